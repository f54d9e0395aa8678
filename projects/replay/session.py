"""Run the command of a past run again, with a replay in place of its ``train()``; its files are not changed."""

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.projects.replay.command import given_command, recorded_command, run_command
from trainkit.projects.replay.origin import Saved, active_replay, describe_other_origin
from trainkit.projects.replay.project import Project
from trainkit.projects.replay.settings import changes_since

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.state import plain_state
from trainkit.config import CfgNode, ConfigError
from trainkit.config.imports import import_check
from trainkit.config.yaml_files import load_yaml
from trainkit.engine import DefaultTrainer, HookBase, hooks, setup
from trainkit.engine.loop import TrainerBase
from trainkit.engine.stopping import Stop
from trainkit.utils import comm
from trainkit.utils.device import device_of
from trainkit.utils.plugins import OPTIONS
from trainkit.utils.rng import set_rng_state
from trainkit.utils.run_folder import release_folder

_SAVES = (hooks.PeriodicCheckpointer, hooks.BestCheckpointer, hooks.PublishWeights)
_EVALUATES = (hooks.EvalHook, hooks.EarlyStopping)  # and hooks that decide by the results


Start = Callable[[], Any] | str | Sequence[str] | None


class _Done(SystemExit):
    """Raised to end the script whose training was taken over."""


class Session:
    """Runs the command of a run again, and calls ``work`` where the command would train. A subclass defines ``work``.

    Attributes:
        origin: how the run was started.
        seed: the seed that the run used, if the replay starts at iteration 0; else None.
        result: what ``work`` has returned; None if the command has not called ``train()``.
    """

    anomaly = False  # True: show warnings, since they name the operation
    _trainer: Any

    def __init__(self, run: str, at: int, start: Saved | None, after: Saved | None) -> None:
        """
        Args:
            run: the folder of the run, or a capsule.
            at: the first iteration to inspect.
            start: the checkpoint from which the replay starts; None: it starts at iteration 0.
            after: the next checkpoint. The process that wrote it has done the step; it may have other settings than
                ``start``.
        """
        governing = after or start
        assert governing is not None
        origin = self.origin = governing.state["trainer"]["origin"]
        self._run, self._at, self._start, self._next = run, at, start, after
        self._project = Project(left_out=run if os.path.isdir(run) else os.path.dirname(run))
        self._processes = origin["processes"]  # number of processes that the replay needs
        self.seed = origin["seed"] if start is None and origin["seed"] < 2**32 else None
        self._notes: list[str] = []
        self.result: Any = None

    def work(self, trainer: Any) -> Any:
        """Called instead of the training, with a trainer without the hooks that save, evaluate and write."""
        raise NotImplementedError

    def perform(self, start: Start) -> Any:
        """Run the command, and return what ``work`` returns.

        Raises:
            ConfigError: the command does not call ``train()``, or its code is not the user's own; or the run has no
                such iteration.
            CheckpointError: the run had another number of processes.
        """
        if active_replay.get() is not None:
            raise ConfigError("the command of the run is a replay; give the one that trains (`-- python train.py`)")
        begin, check = self._find_start(start)
        self._folder = tempfile.mkdtemp(prefix="replay-")
        tokens, disabled = (active_replay.set(self), import_check.set(check)), logging.root.manager.disable
        logging.disable(logging.ERROR)
        try:
            with self._taking_over(), contextlib.suppress(_Done), warnings.catch_warnings():
                if not self.anomaly:
                    warnings.simplefilter("ignore")
                begin()
        finally:
            logging.disable(disabled)
            active_replay.reset(tokens[0])
            import_check.reset(tokens[1])
            release_folder(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)
        if self.result is None:
            raise ConfigError(
                "the command of the run has ended before it trained; give the one that trains (`-- python train.py`)"
            )
        return self.result

    @contextlib.contextmanager
    def _taking_over(self) -> Iterator[None]:
        """Context in which this replay sets up the configs, has no log, and takes the place of the training."""
        init = DefaultTrainer.__init__

        def build(trainer: DefaultTrainer, cfg: CfgNode) -> None:
            self.set_up(cfg)
            if self.origin["batch"]:  # the number of ranks at the start of the run, see the project scaling
                Path(self._folder, "batch.json").write_text(json.dumps(self.origin["batch"]))
            init(trainer, cfg)

        def apply_options(cfg: Any, args: Any) -> list[Callable[[], None]]:
            self.set_up(cfg, compare=not any(getattr(args, option.strip("-"), None) for option in OPTIONS))
            return []

        seed_all_rng, drawn = setup.seed_all_rng, self.seed
        replaced: dict[str, tuple[Any, Any]] = {
            "__init__": (DefaultTrainer, build),
            "train": (DefaultTrainer, lambda trainer, *args, **kwargs: self.train(trainer)),
            "apply_options": (setup, apply_options),
            "setup_logger": (setup, lambda *args, **kwargs: None),
            "seed_all_rng": (setup, lambda seed: seed_all_rng(drawn if seed is None else seed)),
        }
        with contextlib.ExitStack() as stack:
            for name, (owner, new) in replaced.items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, new)
            yield

    def _find_start(self, start: Start) -> tuple[Callable[[], Any], Callable[[Iterable[Any]], None] | None]:
        """The call that trains, and the check of all modules of IMPORTS, if the file has the arguments of the call."""
        if callable(start):
            return start, None
        if start is not None and not isinstance(start, str):
            return partial(run_command, given_command(start)), None
        command = recorded_command(self.origin, self._project, start or "")
        if comm.is_main_process():
            print(f"Running again: {command} (from {command.folder})", file=sys.stderr, flush=True)
        return partial(run_command, command), self._project.check_imports

    def set_up(self, cfg: Any, compare: bool = True) -> None:
        """Give ``cfg`` the settings of the run, and a temporary folder for output, unless it has them already.

        Args:
            compare: note the settings that differ; False: an option, which is not applied, would have set them.
        """
        if not isinstance(cfg, CfgNode):
            raise ConfigError(f"the command sets up a {type(cfg).__name__}; only jobs of a DefaultTrainer are replayed")
        if self._folder == cfg.OUTPUT_DIR:
            return
        frozen, given = cfg.is_frozen(), cfg.clone()
        cfg.defrost()
        cfg.merge_from_other_cfg(load_yaml(self.origin["config"], self._run))
        self._project.check_imports(cfg.IMPORTS, given.IMPORTS)
        for key, now, value in changes_since(cfg, given) if compare else ():
            self._notes.append(f"setting {key}: {value!r} in the run, which is used; {now!r} in the command now")
        cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR = self._folder, ""
        cfg.LOG.WRITERS, cfg.LOG.PROGRESS = [], False
        if self._start is not None:
            cfg.MODEL.WEIGHTS = ""
        if frozen:
            cfg.freeze()

    def train(self, trainer: Any) -> None:
        if not 0 <= self._at < trainer.max_iter:
            raise ConfigError(f"--iter is {self._at}; accepted: 0 to {trainer.max_iter - 1}, the iterations of the run")
        if self._start is None and (parents := self.origin.get("parents")):
            (*_, parent) = parents
            raise ConfigError(
                f"iteration {self._at} is not after a checkpoint of this run, a fork of {parent['run']}, which has "
                f"done the iterations up to {parent['iteration']}; replay those there"
            )
        if self._processes != comm.get_world_size() and not trainer.cfg.SOLVER.get("LOGICAL_RANKS"):
            raise CheckpointError(
                f"the run had {self._processes} processes, and this replay has {comm.get_world_size()}; start it by "
                f"torchrun --nproc-per-node {self._processes} -m trainkit.projects.replay with the same arguments"
            )
        self._trainer = trainer
        try:
            self._notes += describe_other_origin(self.origin, device_of(trainer.model))
            self._beginning = None if self._start is not None else self._collect()
            self._attributes = [(hook, dict(vars(hook))) for hook in trainer.hooks]
            self._all_hooks = [hook for hook in trainer.hooks if not isinstance(hook, hooks.PeriodicWriter)]
            by_results = any(isinstance(hook, hooks.ReduceOnPlateau) for hook in self._all_hooks)
            left_out = _SAVES if by_results else (*_SAVES, *_EVALUATES)
            trainer._hooks = [hook for hook in self._all_hooks if not isinstance(hook, left_out)]
            self.result = self.work(trainer)
        finally:
            # workers end now, not only when Python's garbage collector finds the trainer
            trainer.reset_data_loader(tuple)
        raise _Done(0)

    def _go_on(self, last: int, *own: HookBase) -> str:
        """Train up to iteration ``last`` (included); return the error of the inspected step, "" if it did not fail."""
        trainer = self._trainer
        if trainer.last_done_iter >= last:
            return ""
        kept = trainer.hooks

        def stop(_: Any) -> None:
            if trainer.iter == last:
                trainer._stops.stop = Stop("replayed")  # not request_stop: other ranks would continue for a while

        trainer.register_hooks([*own, hooks.CallbackHook(after_step=stop)])
        try:
            TrainerBase.train(trainer, trainer.last_done_iter + 1, trainer.max_iter)
        except Exception as error:
            if trainer.iter < self._at:
                text = f"the replay has failed in iteration {trainer.iter}, on the way to {self._at}"
                raise RuntimeError(f"{text}: {type(error).__name__}: {error}") from error
            return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        finally:
            trainer._hooks = [*kept]
        return ""

    def _collect(self) -> dict[str, Any]:
        """A copy of the state that a checkpoint would hold now."""
        trainer = self._trainer
        state = trainer.checkpointer.collect({"iteration": trainer.last_done_iter})
        return copy_of(state)

    def _load(self, state: dict[str, Any], strict: bool = True) -> None:
        checkpointer = self._trainer.checkpointer
        checkpointer._load_file = lambda path: copy_of(state)
        try:
            checkpointer.load(self._run, strict=strict)
        finally:
            del checkpointer._load_file

    def _load_start(self) -> None:
        trainer = self._trainer
        for hook, attributes in self._attributes:  # a hook without a state in the checkpoint starts anew
            vars(hook).clear()
            vars(hook).update(attributes)
        if self._start is not None:
            trainer.checkpointer.load(self._start.path, strict=True)
        elif trainer.status != "not started":
            self._load(self._beginning or {})
            set_rng_state(trainer._rng_state)  # now, as in the first execution: hooks may draw before the first step
            trainer._rng_state = None


def copy_of(state: Any) -> Any:
    """A copy of a checkpoint's state, with copies of its tensors."""
    return plain_state(state, take=lambda tensor, path: tensor.clone())
