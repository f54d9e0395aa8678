"""A hook that has a digits job stopped from inside, at a moment that is exact."""

import os
import signal
from typing import Any

from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils import comm


@HOOK_REGISTRY.register()
class SendSignal(HookBase):
    """Send a signal from the last rank: in a step, or in an evaluation."""

    def __init__(self, signum: str, iter: int, in_evaluation: bool = False, to_launcher: bool = False) -> None:
        self._signum, self._iter, self._in_evaluation = signal.Signals[signum], iter, in_evaluation
        self._process = os.getppid() if to_launcher else os.getpid()

    def after_backward(self) -> None:
        self._send(in_evaluation=False)

    def before_eval_step(self, phase: str, index: int, inputs: Any) -> None:
        if index == 0:
            self._send(in_evaluation=True)

    def _send(self, in_evaluation: bool) -> None:
        is_last_rank = comm.get_rank() == comm.get_world_size() - 1
        if is_last_rank and self.trainer.iter == self._iter and in_evaluation == self._in_evaluation:
            os.kill(self._process, self._signum)
