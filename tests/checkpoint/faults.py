"""A disk that fails, or on which the process dies, at the n-th call of one kind."""

import builtins
import io
import os

# all of one save of a small state: the file and the tag are made durable and renamed, then their folder is made durable
CALLS_OF_A_SAVE = [*("write", "fsync", "rename") * 2, "fsync"]
EACH_CALL = [
    (kind, CALLS_OF_A_SAVE[: place + 1].count(kind)) for place, kind in enumerate(CALLS_OF_A_SAVE)
]


class Faults:
    """Calls ``action`` in place of the n-th call of a kind, and in the middle of a write.

    Attributes:
        calls: their kinds so far.
    """

    def __init__(self, patch, kind="", n=0, action=lambda: None):
        self.calls = []
        self._kind, self._n, self._action = kind, n, action
        fsync, replace, open_file = os.fsync, os.replace, builtins.open
        faults = self

        class File(io.FileIO):
            def write(self, data):
                if faults._is_hit("write"):
                    super().write(data[: len(data) // 2])
                    faults._action()
                return super().write(data)

        def opened(file, mode="r", *args, **kwargs):
            if not str(file).endswith(".trainkit-tmp"):
                return open_file(file, mode, *args, **kwargs)
            return io.BufferedWriter(File(file, "x"), 1 << 20)

        patch(builtins, "open", opened)
        patch(
            os,
            "fsync",
            lambda descriptor: self._action() if self._is_hit("fsync") else fsync(descriptor),
        )
        patch(
            os,
            "replace",
            lambda *paths: self._action() if self._is_hit("rename") else replace(*paths),
        )

    def _is_hit(self, kind):
        self.calls.append(kind)
        return (kind, self.calls.count(kind)) == (self._kind, self._n)
