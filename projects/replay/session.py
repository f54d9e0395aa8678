"""Run the command of a past run again, with a replay in place of its ``train()``; its files are not changed."""

import contextlib
import logging
import os
import re
import runpy
import shlex
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from trainkit.projects.replay import origin as facts
from trainkit.projects.replay.checkpoints import Place
from trainkit.projects.replay.failure import (
    Comparison,
    Failure,
    compare_endings,
    describe_error,
    failed_iteration,
)
from trainkit.projects.replay.inspection import Inspection
from trainkit.projects.replay.record import RunRecord

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import plain_state
from trainkit.config import CfgNode, ConfigError
from trainkit.data.loader import ResumableLoader
from trainkit.engine import DefaultTrainer, HookBase, hooks
from trainkit.engine.defaults import setup
from trainkit.engine.loop import TrainerBase
from trainkit.engine.stopping import Stop, StopRequests
from trainkit.utils import comm
from trainkit.utils.device import device_of
from trainkit.utils.env import stop_signals
from trainkit.utils.events.writers import WRITER_REGISTRY
from trainkit.utils.plugins import find_plugins
from trainkit.utils.run_folder import release_folder

Folder = str | os.PathLike[str]
Start = Callable[[], Any] | Sequence[str] | None

_BY_RESULTS = {"EvalHook", "FinalEvalHook", "EarlyStopping", "ReduceOnPlateau"}
_SAVES = {"PeriodicCheckpointer", "BestCheckpointer", "PublishWeights"}
# A replay takes place in the processes that it finds. The last of these options counts; with other values, `launch`
# would train in new processes.
_ONE_PROCESS = {"--num-gpus": "1", "--num-machines": "1", "--machine-rank": "0"}


class _Done(SystemExit):
    """Raised to end the script whose training was taken over."""


class FailedOnTheWay(RuntimeError):
    """An iteration before the step has failed, so the step cannot be performed."""


class Session:
    """Runs the command of a run again, and does something else where it would train."""

    keeps_all_hooks = False  # also those that evaluate, which the next checkpoint depends on
    # of the present step; it gets the batches that any `ResumableLoader` gives
    inspection: Inspection | None = None
    trainer: Any  # without the hooks that save, evaluate and write
    _result: Any = None

    def __init__(self, run: str, at: int, place: Place) -> None:
        """``place``: that of iteration ``at`` in the run."""
        # the process that wrote `after` has done the step; it may have other settings
        governing: Any = place.after or place.before
        self.origin = governing.state["trainer"]["origin"]
        self.num_threads = governing.state["trainer"]["num_threads"]
        self.num_ranks = self.origin["facts"]["number of processes"]  # that the replay needs
        self.run = run
        self.at = at
        self.place = place
        self.start = place.before
        self.next = place.after
        self.notes = [*place.notes]  # differences from the run

    def perform(self, start: Start, work: Callable[[Any], Any]) -> Any:
        """Run the command, and return what ``work(trainer)`` returns in place of the training; raises as `replay`."""
        if start is None:
            known = facts.command_of(self.origin)
            raise ConfigError(
                f"give the command of the run after `--`; '{self.run}' says that it was: {known}"
            )
        self._work = work
        disabled_level = logging.root.manager.disable
        threads = torch.get_num_threads()
        threads_of_run = min(self.num_threads, 1024)
        try:
            logging.disable(logging.ERROR)
            torch.set_num_threads(threads_of_run)
            with (
                _temporary_folder() as self._folder,
                self._taking_over(),
                contextlib.suppress(_Done),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                if callable(start):
                    start()
                else:
                    run_command(start)
        finally:
            torch.set_num_threads(threads)
            logging.disable(disabled_level)
        if self._result is None:
            raise ConfigError(
                "the command after `--` has ended before it trained; give the one that trains"
            )
        return self._result

    @contextlib.contextmanager
    def _taking_over(self) -> Iterator[None]:
        """Context in which this replay sets up the configs, has no log, and takes the place of the training."""
        build = DefaultTrainer.__init__
        draw = ResumableLoader.__iter__
        seed = setup.seed_all_rng
        drawn_seed = None  # of a run without SEED
        if self.start is None and self.origin["seed"] < 2**32:
            drawn_seed = self.origin["seed"]

        def init(trainer: Any, cfg: CfgNode) -> None:
            self._set_up(cfg)
            build(trainer, cfg)

        def apply_options(cfg: Any, args: Any) -> list[Any]:
            options = find_plugins().options
            has_options = any(setup.is_given(option, args) for option in options)
            self._set_up(cfg, has_options)
            return []

        def seed_all(number: int | None) -> Any:
            return seed(drawn_seed if number is None else number)

        def iterate(loader: Any) -> Iterator[Any]:
            for batch in draw(loader):
                if self.inspection is not None:
                    self.inspection.drawn.append(batch)
                yield batch

        replaced: list[tuple[Any, str, Any]] = [
            (DefaultTrainer, "__init__", init),
            (DefaultTrainer, "train", lambda trainer, *args, **kwargs: self._train(trainer)),
            (ResumableLoader, "__iter__", iterate),
            (setup, "apply_options", apply_options),
            (setup, "setup_logger", lambda *args, **kwargs: None),
            (RunRecord, "after_failure", lambda record, error: None),
            (StopRequests, "listening", _not_listening),
            (setup, "seed_all_rng", seed_all),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, new in replaced:
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, new)
            yield

    def _set_up(self, cfg: Any, has_options: bool = False) -> None:
        """Give ``cfg`` the settings of the run, and a temporary folder for output, unless it has them already.

        The settings that differ are noted, unless an option of the command, which is not applied, would have set them.
        """
        if not isinstance(cfg, CfgNode):
            raise ConfigError(
                f"the command sets up a {type(cfg).__name__}; only jobs of a DefaultTrainer "
                "are replayed"
            )
        if self._folder == cfg.OUTPUT_DIR:
            return
        is_frozen = cfg.is_frozen()
        given = cfg.clone()
        cfg.defrost()
        facts.use_settings(cfg, self.origin["config"], self.run)
        facts.refuse_imports(cfg.IMPORTS, given.IMPORTS)
        facts.use_a_device_of_this_machine(cfg, given.MODEL.DEVICE)
        if given.MODEL.DEVICE == "auto":  # default_setup named a device in the run; no difference
            given.MODEL["DEVICE"] = cfg.MODEL.DEVICE  # by item, since it may be frozen
        if not has_options:
            for key, now, value in facts.changes_since(cfg, given):
                self.notes.append(
                    f"setting {key}: {value!r} in the run, which is used; {now!r} in the "
                    "command now"
                )
        self._output_dir = os.path.join(self.origin["folder"], cfg.OUTPUT_DIR)
        cfg.OUTPUT_DIR = self._folder
        cfg.CHECKPOINT.DIR = ""
        cfg.IMPORTS = given.IMPORTS
        for name in cfg.LOG.WRITERS:
            with contextlib.suppress(ImportError):
                # imports the module of the writer, as the run did, so that it is no difference
                _ = name in WRITER_REGISTRY
        cfg.LOG.WRITERS = []
        cfg.LOG.PROGRESS = False
        if self.start:
            cfg.MODEL.WEIGHTS = ""
        if is_frozen:
            cfg.freeze()

    def _train(self, trainer: Any) -> None:
        """Called in the place of ``DefaultTrainer.train``."""
        if not 0 <= self.at < trainer.max_iter:
            raise ConfigError(
                f"--iter is {self.at}; accepted: 0 to {trainer.max_iter - 1}, the iterations "
                "of the run"
            )
        if self.start is None and self.origin["parents"]:
            parent = self.origin["parents"][-1]
            raise ConfigError(
                f"the run is a fork of {parent['run']}, which has done iterations "
                f"0 to {parent['iteration']}; replay them there"
            )
        if self.num_ranks != comm.get_world_size() and not trainer.cfg.SOLVER.get("LOGICAL_RANKS"):
            raise CheckpointError(
                f"the run had {self.num_ranks} processes, and this replay has "
                f"{comm.get_world_size()}; start it by "
                f"torchrun --nproc-per-node {self.num_ranks} -m trainkit.projects.replay with "
                "the same arguments"
            )
        self.trainer = trainer
        try:
            self.notes += facts.describe_other_origin(self.origin, device_of(trainer.model))
            trainer._hooks = self._hooks_to_keep(trainer.hooks)
            self.load_start()
            self._result = self._work(trainer)
        finally:
            # workers end now, not only when Python's garbage collector finds the trainer
            trainer.reset_data_loader(tuple)
        raise _Done(0)

    def _hooks_to_keep(self, given: Sequence[HookBase]) -> list[HookBase]:
        """The hooks without those that write, save and evaluate, as far as the iterations do not depend on them."""
        classes: dict[HookBase, set[str]] = {}
        for hook in given:
            classes[hook] = {base.__name__ for base in type(hook).__mro__}
        left_out = {"PeriodicWriter"}
        if not self.keeps_all_hooks:
            left_out |= _SAVES
            needs_results = any("ReduceOnPlateau" in names for names in classes.values())
            if not needs_results:
                left_out |= _BY_RESULTS
        return [hook for hook in given if not left_out & classes[hook]]

    def go_on(self, last: int, *own: HookBase) -> Exception | None:
        """Train up to iteration ``last`` (included); return the error of the inspected step, None if there is none."""
        trainer = self.trainer
        if trainer.done > last:
            return None
        kept = trainer.hooks

        def stop(_: Any) -> None:
            if trainer.iter == last:
                # not request_stop: other ranks would continue for a while
                trainer._stops.stop = Stop("replayed")

        trainer.register_hooks([*own, hooks.CallbackHook(after_step=stop)])
        try:
            TrainerBase.train(trainer, trainer.next_iter, trainer.max_iter)
        except ConfigError:
            raise
        except Exception as error:
            if trainer.iter < self.at:
                text = f"the replay has failed in iteration {trainer.iter}, on the way to {self.at}"
                raise FailedOnTheWay(f"{text}: {describe_error(error)}") from error
            return error
        finally:
            trainer._hooks = [*kept]
        return None

    def failure_here(
        self, error: Exception | None, last: int, losses: Mapping[str, float]
    ) -> Failure | None:
        """The failure of the iterations up to ``last``, as the run would have recorded it."""
        if error is None:
            return None
        text = describe_error(error).replace(self._folder, self._output_dir)
        # what is noticed at the end has a number too large
        iteration = min(failed_iteration(error, self.trainer.iter), last)
        return Failure(iteration, text, losses)

    def failure_of_run(self, first: int, last: int, step: int = -1) -> Failure | None:
        """The first failure in a range of iterations: of this rank, or of any if there were more processes.

        If the run was resumed and has done the iteration, its failure counts only in ``step``.
        """
        are_as_many = comm.get_world_size() == self.num_ranks
        found: list[Failure] = []
        for failure in self.place.failures:
            is_within = first <= failure.iteration <= last
            counts = not failure.is_overtaken or failure.iteration == step
            is_of_rank = not are_as_many or failure.rank == comm.get_rank()
            if is_within and counts and is_of_rank:
                found.append(failure)
        return min(found, key=lambda failure: failure.iteration, default=None)

    def compare_endings(
        self, first: int, last: int, error: Exception | None
    ) -> tuple[str, Comparison]:
        """Compare how iterations ``first`` to ``last`` have ended, without losses; see the function."""
        run = self.failure_of_run(first, last)
        if run is not None:
            run = run._replace(losses={})
        return compare_endings(run, self.failure_here(error, last, {}), self.place.done)

    def load_start(self) -> None:
        if self.start is not None:
            self.trainer.checkpointer.load(self.start.path, strict=True)

    def collect(self) -> Any:
        return copy_of(self.trainer.checkpointer.collect({"iteration": self.trainer.done - 1}))

    def load(self, state: Mapping[str, Any], strict: bool = True) -> None:
        checkpointer = self.trainer.checkpointer
        checkpointer._load_file = lambda path: copy_of(state)
        checkpointer.load(self.run, strict=strict)
        del checkpointer._load_file


@contextlib.contextmanager
def _not_listening(stops: StopRequests) -> Iterator[None]:
    """In the place of ``listening``: a signal ends a replay at once, since it has nothing to save."""
    yield


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Context with a folder, which is removed also if a signal ends the process."""
    former: dict[signal.Signals, Any] = {}

    def end(signum: int, frame: Any) -> None:
        for each in former:
            signal.signal(each, signal.SIG_IGN)  # the folder is removed now
        raise SystemExit(128 + signum)

    if threading.current_thread() is threading.main_thread():
        for each in stop_signals() - {signal.SIGINT}:
            if signal.getsignal(each) == signal.SIG_DFL:
                former[each] = signal.signal(each, end)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="replay-", ignore_cleanup_errors=True) as folder,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(release_folder, folder)
            yield folder
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def copy_of(state: Any) -> Any:
    """A copy of a checkpoint's state, with copies of its tensors."""
    return plain_state(state, take=lambda tensor, path: tensor.clone())


def run_command(words: Sequence[str]) -> None:
    """Run ``[python] FILE ...`` or ``[python] -m MODULE ...`` in this process; other words are a ConfigError."""
    rest = [*words]
    if rest and re.fullmatch(r"python[\d.]*(\.exe)?", os.path.basename(rest[0])):
        rest = rest[1:]
    is_module = rest[:1] == ["-m"]
    if is_module:
        rest = rest[1:]
    name = rest[0] if rest else ""
    arguments = rest[1:]
    if not name or not (is_module or os.path.isfile(name)):
        accepted = "python FILE ..., python -m MODULE ... or FILE ..., with a file that is there"
        raise ConfigError(f"the command is {shlex.join(words)!r}; accepted: {accepted}")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    in_one_process: list[str] = []
    for option, value in _ONE_PROCESS.items():
        if any(word.startswith(option) for word in arguments[:end]):
            in_one_process += [option, value]
    arguments[end:end] = in_one_process
    former_argv = sys.argv
    former_path = [*sys.path]
    sys.argv = [name, *arguments]
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(name))
    sys.path.insert(0, folder)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(name), run_name="__main__")
    finally:
        sys.argv = former_argv
        sys.path[:] = former_path
