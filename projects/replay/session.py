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

import torch
from trainkit.projects.replay.command import given_command, recorded_command, run_command
from trainkit.projects.replay.inspection import Inspection
from trainkit.projects.replay.origin import Saved, active_replay, describe_other_origin, threads_of
from trainkit.projects.replay.project import Project
from trainkit.projects.replay.settings import changes_since

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.state import plain_state
from trainkit.config import CfgNode, ConfigError
from trainkit.config.imports import import_check
from trainkit.config.yaml_files import load_yaml
from trainkit.data.loader import ResumableLoader
from trainkit.engine import DefaultTrainer, HookBase, hooks, setup
from trainkit.engine.loop import TrainerBase
from trainkit.engine.stopping import Stop
from trainkit.utils import comm
from trainkit.utils.device import device_of
from trainkit.utils.plugins import OPTIONS
from trainkit.utils.run_folder import release_folder

Start = Callable[[], Any] | Sequence[str] | None

_BY_RESULTS = {"EvalHook", "FinalEvalHook", "EarlyStopping", "ReduceOnPlateau"}
_SAVES = {"PeriodicCheckpointer", "BestCheckpointer", "PublishWeights"}


class _Done(SystemExit):
    """Raised to end the script whose training was taken over."""


class Session:
    """Runs the command of a run again, and calls ``work`` where the command would train. A subclass defines ``work``.

    Attributes:
        origin: how the run was started.
        inspection: that of the present step, which gets the batches that any `ResumableLoader` gives; None: of no step.
        result: what ``work`` has returned; None if the command has not called ``train()``.
    """

    keeps_all_hooks = False  # True: also those that evaluate, which the next checkpoint depends on
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
        self.origin = governing.state["trainer"]["origin"]
        self._run, self._at, self._start, self._next = run, at, start, after
        self._project = Project(left_out=run if os.path.isdir(run) else os.path.dirname(run))
        self._processes = self.origin["processes"]  # number of processes that the replay needs
        self._notes: list[str] = []
        self.inspection: Inspection | None = None
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
        threads = torch.get_num_threads()
        logging.disable(logging.ERROR)
        try:
            torch.set_num_threads(threads_of(self.origin) or threads)
            with self._taking_over(), contextlib.suppress(_Done), warnings.catch_warnings():
                if not self.anomaly:
                    warnings.simplefilter("ignore")
                begin()
        finally:
            torch.set_num_threads(threads)
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

    def _find_start(self, start: Start) -> tuple[Callable[[], Any], Callable[[Iterable[Any]], None] | None]:
        """The call that trains, and the check of all modules of IMPORTS, if the file has the arguments of the call."""
        if callable(start):
            return start, None
        if start is not None:
            return partial(run_command, given_command(start)), None
        command = recorded_command(self.origin, self._project)
        if comm.is_main_process():
            print(f"Running again: {command} (from {command.folder})", file=sys.stderr, flush=True)
        return partial(run_command, command), self._project.check_imports

    @contextlib.contextmanager
    def _taking_over(self) -> Iterator[None]:
        """Context in which this replay sets up the configs, has no log, and takes the place of the training."""
        build, draw, seed = DefaultTrainer.__init__, ResumableLoader.__iter__, setup.seed_all_rng
        drawn = self.origin["seed"] if self._start is None and self.origin["seed"] < 2**32 else None

        def init(trainer: Any, cfg: CfgNode) -> None:
            self.set_up(cfg)
            if self.origin["batch"]:  # the number of ranks at the start of the run, see the project scaling
                Path(self._folder, "batch.json").write_text(json.dumps(self.origin["batch"]))
            build(trainer, cfg)

        def apply_options(cfg: Any, args: Any) -> list[Callable[[], None]]:
            options = [option.strip("-").replace("-", "_") for option in OPTIONS]
            self.set_up(cfg, compare=not any(getattr(args, option, None) for option in options))
            return []

        def iterate(loader: Any) -> Iterator[Any]:
            for batch in draw(loader):
                if self.inspection is not None:
                    self.inspection.drawn.append(batch)
                yield batch

        replaced: list[tuple[Any, str, Any]] = [
            (DefaultTrainer, "__init__", init),
            (DefaultTrainer, "train", lambda trainer, *args, **kwargs: self.train(trainer)),
            (ResumableLoader, "__iter__", iterate),
            (setup, "apply_options", apply_options),
            (setup, "setup_logger", lambda *args, **kwargs: None),
            (setup, "seed_all_rng", lambda number: seed(drawn if number is None else number)),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, new in replaced:
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, new)
            yield

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
        """Called in the place of ``DefaultTrainer.train``."""
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
        names = {hook: {base.__name__ for base in type(hook).__mro__} for hook in trainer.hooks}
        needs_results = any("ReduceOnPlateau" in found for found in names.values())
        others = set() if self.keeps_all_hooks else _SAVES if needs_results else _SAVES | _BY_RESULTS
        left_out = {"PeriodicWriter", *others}
        try:
            self._notes += describe_other_origin(self.origin, device_of(trainer.model))
            trainer._hooks = [hook for hook in trainer.hooks if not left_out & names[hook]]
            self._load_start()
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

    def _load_start(self) -> None:
        if self._start is not None:
            self._trainer.checkpointer.load(self._start.path, strict=True)

    def _collect(self) -> dict[str, Any]:
        """A copy of the state that a checkpoint would hold now."""
        return copy_of(self._trainer.checkpointer.collect({"iteration": self._trainer.last_done_iter}))

    def _load(self, state: dict[str, Any], strict: bool = True) -> None:
        checkpointer = self._trainer.checkpointer
        checkpointer._load_file = lambda path: copy_of(state)
        try:
            checkpointer.load(self._run, strict=strict)
        finally:
            del checkpointer._load_file


def copy_of(state: Any) -> Any:
    """A copy of a checkpoint's state, with copies of its tensors."""
    return plain_state(state, take=lambda tensor, path: tensor.clone())
