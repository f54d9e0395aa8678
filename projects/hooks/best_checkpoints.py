"""Keep the checkpoints of several best values."""

import contextlib
import math
from functools import partial
from typing import Any

from trainkit.engine.hook_base import HOOK_REGISTRY
from trainkit.engine.hooks.checkpoint import BestCheckpointer
from trainkit.engine.hooks.monitor import Mode
from trainkit.utils.periods import check_period


@HOOK_REGISTRY.register()
class BestCheckpoints(BestCheckpointer):
    """`BestCheckpointer` that also keeps the ``num_to_keep`` best values, as ``<file_prefix>_<iteration>``.

    Of equal values the earlier one is better. It needs a trainkit checkpointer.
    """

    _state_names = (*BestCheckpointer._state_names, "_kept")

    def __init__(
        self,
        eval_period: int,
        checkpointer: Any,
        val_metric: str,
        mode: Mode = "max",
        file_prefix: str = "model_best",
        *,
        num_to_keep: int = 2,
    ) -> None:
        super().__init__(eval_period, checkpointer, val_metric, mode, file_prefix)
        self._num_to_keep = check_period("num_to_keep", num_to_keep, minimum=1)

    def _forget(self) -> None:
        super()._forget()
        self._kept: list[list[Any]] = []  # [name, value] of numbered files, the best first; on rank 0

    def after_load(self, state: dict[str, Any]) -> None:
        """In older checkpoints the states of these hooks have the name of the base class."""
        states = state.get("trainer", {}).get("hooks", {})
        for name in [name for name in states if name.startswith("BestCheckpointer") and "kept" in states[name]]:
            states[name.replace("BestCheckpointer", "BestCheckpoints")] = states.pop(name)

    def judge(self, value: float) -> list[str]:
        names = super().judge(value)
        if math.isfinite(value):
            name = f"{self.file_prefix}_{self.trainer.last_done_iter:07d}"
            others = [other for other in self._kept if other[0] != name]
            ranked = sorted([*others, [name, value]], key=lambda kept: -self._sign * kept[1])
            self._kept = ranked[: self._num_to_keep]
            names = [name] * ([name, value] in self._kept) + names
        return names

    def _save_untagged(self, name: str, iteration: int, **entries: Any) -> None:
        if name == self.file_prefix or self.not_better > 0:  # the last one of this evaluation
            entries["on_commit"] = partial(self._remove, self._before.get("kept", []))
        super()._save_untagged(name, iteration, **entries)

    def _remove(self, entries: list[list[Any]]) -> None:
        """Remove the files of ``entries`` that are not among the best."""
        for entry in entries:
            if entry not in self._kept:
                with contextlib.suppress(OSError):  # a file that stays only costs space
                    self.checkpointer.remove(entry[0])

    def undo(self) -> None:
        tried = self._kept
        super().undo()
        self._remove(tried)  # those whose file was not written
