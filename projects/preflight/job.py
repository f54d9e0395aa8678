"""The user's job: it is built again, with other settings, and run for some steps in a temporary folder."""

import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from trainkit.projects.preflight.findings import Finding, not_asked
from trainkit.projects.preflight.options import INSIDE

from trainkit.config import CfgNode, get_cfg
from trainkit.engine.hook_base import HookBase
from trainkit.utils.device import unwrap_model
from trainkit.utils.env import seed_all_rng

STEPS = 20  # of the ordinary run
ONE_BATCH_STEPS = 30


class Probe(HookBase):
    """Notes what is seen in the steps of a run.

    Attributes:
        batches: the first 8, on the CPU.
        unused: names of parameters whose gradients are missing or zero in each step.
        sec: part of a step -> seconds in all.
        evaluating: modules in eval mode.
    """

    priority = "HIGHEST"

    def __init__(self) -> None:
        self.batches, self.losses = list[Any](), list[float]()
        self.evaluating = set[str]()
        self.sec: dict[str, float] = defaultdict(float)

    def before_step(self) -> None:
        if not self.sec:  # not in before_train: other hooks copy the model there
            self._model, self._context = unwrap_model(self.trainer.model), contextlib.ExitStack()
            self.unused = {name for name, value in self._model.named_parameters() if value.requires_grad}
            self._context.callback(self._model.register_forward_pre_hook(self._before_forward).remove)
            self._context.callback(self._model.register_forward_hook(self._after_forward).remove)
        self._started = self._forward_at = self._backward_at = time.perf_counter()

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        self._forward_at = time.perf_counter()
        kinds = (_BatchNorm, nn.Dropout, type(model))
        if torch.is_grad_enabled():  # else it is an evaluation
            parts = [(name or "the model", part) for name, part in model.named_modules() if isinstance(part, kinds)]
            self.evaluating |= {name for name, part in parts if not part.training}

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        self.sec["forward"] += time.perf_counter() - self._forward_at

    def after_backward(self) -> None:
        self._backward_at, trainer = time.perf_counter(), self.trainer
        grads = {name: value.grad for name, value in self._model.named_parameters() if name in self.unused}
        self.unused = {name for name, grad in grads.items() if grad is None or not grad.any()}
        self.losses.append(sum(float(trainer.losses[name]) for name in trainer.trained_losses))
        if len(self.batches) < 8:
            self.batches.append(tree_map_only(Tensor, lambda value: value.detach().cpu(), trainer.batch))

    def after_step(self) -> None:
        now = time.perf_counter()
        self.sec["step"] += now - self._started
        self.sec["update and hooks"] += now - self._backward_at

    def after_train(self) -> None:
        self._context.close()


class Job:
    """The user's job.

    Attributes:
        trainer: as the user has built it, not trained; ``model``: its model.
        cfg: the settings as the user gave them.
        folder: a temporary one.
    """

    def __init__(self, trainer: Any, given: str) -> None:
        self.trainer, self.cfg, self.folder = trainer, get_cfg(), trainer.cfg.OUTPUT_DIR
        self.model = unwrap_model(trainer.model)
        self.cfg.merge_from_other_cfg(CfgNode.load_cfg(given))
        self._error: BaseException | None = None
        self._runs = 0

    def ask(self, name: str, question: Callable[["Job"], Finding]) -> Finding:
        """The finding of a check. An error of the job is the finding of "runs" alone."""
        try:
            finding = question(self)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            is_known = error is self._error and name != "runs"
            finding = not_asked("the job does not run") if is_known else Finding("wrong", text, "the job has to run")
        return finding._replace(name=name)

    def options(self, *options: Any) -> list[Any]:
        """Settings of a short run in a folder of its own, and further ones."""
        self._runs += 1
        own = ["OUTPUT_DIR", f"{self.folder}/{self._runs}", "CHECKPOINT.DIR", "''", "SEED", max(self.cfg.SEED, 0)]
        return [*own, "TEST.MAX_BATCHES", 1, *options]

    def build(self, *options: Any) -> Any:
        """A new trainer, as in a process that has just started."""
        cfg = self.cfg.clone()
        cfg.merge_from_list(self.options(*options))
        seed_all_rng(cfg.SEED)
        trainer = self.trainer.__class__(cfg)
        trainer.resume_or_load(resume=False)
        return trainer

    @cached_property
    def ordinary(self) -> tuple[Any, Probe]:
        """A trainer after `STEPS` steps, and what was seen."""
        if self._error is None:
            try:
                return self._train(self.build(), STEPS)
            except (Exception, SystemExit) as error:
                self._error = error if isinstance(error, Exception) else RuntimeError(f"exit code {error.code}")
        raise self._error

    @cached_property
    def one_batch(self) -> tuple[Any, Probe]:
        """A trainer after steps with one batch and the full learning rate."""
        options = ["SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", (), "SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR"]
        batch, trainer = self.ordinary[1].batches[0], self.build(*options)
        trainer.data_loader = [batch] * ONE_BATCH_STEPS
        return self._train(trainer, ONE_BATCH_STEPS)

    def _train(self, trainer: Any, steps: int) -> tuple[Any, Probe]:
        probe = Probe()
        trainer.register_hooks([probe])
        trainer.train(0, min(steps, trainer.max_iter))
        return trainer, probe

    @cached_property
    def whole(self) -> Path:
        """The folder of a run of six steps in a new process, with a checkpoint after three."""
        return self.start(6)

    def start(self, steps: int, *options: Any) -> Path:
        """The folder of a run of the user's command in a new process; raises RuntimeError if it fails."""
        own = self.options("SOLVER.MAX_ITER", steps, "SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", (), *options)
        own = [str(word) for word in ("SOLVER.CHECKPOINT_PERIOD", 3, *own)]
        environment = {**os.environ, INSIDE: "1"}
        done = subprocess.run([*sys.orig_argv, *own], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"a process ended with code {done.returncode}: {done.stderr.strip()[-200:]}")
        return Path(dict(zip(own[::2], own[1::2], strict=False))["OUTPUT_DIR"])
