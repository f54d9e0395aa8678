"""detectron2's import path for the loop, hooks and trainers."""

from trainkit.engine.amp import AMPTrainer
from trainkit.engine.hook_base import HookBase
from trainkit.engine.loop import TrainerBase
from trainkit.engine.step import SimpleTrainer

__all__ = ["AMPTrainer", "HookBase", "SimpleTrainer", "TrainerBase"]
