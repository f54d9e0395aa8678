"""The seam for runs at an address.

Such a run writes to a local folder, and a mirror copies its files.
"""

from typing import Protocol

from trainkit.utils.plugins import load


class Mirror(Protocol):
    """Copies the files of a local folder to an address. Used on rank 0.

    Attributes:
        is_taken: whether a run of this process writes to the address.
    """

    address: str
    folder: str
    is_taken: bool

    def download(self) -> None:
        """Get newer files from the address. Raises CheckpointError."""

    def take(self, resume: bool | None = None) -> None:
        """A run starts.

        Args:
            resume: whether it resumes; None: it does not say it.

        Raises:
            CheckpointError: another run is there.
        """

    def after_save(self, folder: str) -> None:
        """Upload, in a thread: a checkpoint was saved in ``folder``.

        It is this folder or another one of the run.
        """

    def release(self) -> str:
        """The run has ended: upload the last files; returns the error, or ""."""


_mirrors: dict[str, Mirror] = {}  # by local folder


def local_folder(path: str) -> str:
    """The local folder for the files of a run: ``path``.

    If ``path`` is an address, the folder of its `Mirror`.
    """
    if "://" not in path:
        return path
    mirror: Mirror = load("make_mirror")(path)
    _mirrors.setdefault(mirror.folder, mirror)
    return mirror.folder


def mirror_of(folder: str) -> Mirror | None:
    """The mirror of a folder that `local_folder` has returned; None if it stands for no address."""
    return _mirrors.get(folder)


def tell_mirrors(folder: str) -> None:
    """Tell all mirrors that a checkpoint was saved: the run may have another folder."""
    for mirror in list(_mirrors.values()):  # another run in a thread may add one
        mirror.after_save(folder)


def forget_mirrors() -> None:
    """Start as a new process, whose runs have no addresses yet."""
    _mirrors.clear()
