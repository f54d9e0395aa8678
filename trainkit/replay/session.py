"""A step of a past run again: the command of the run is given once more, and its training is done up to that step."""

import contextlib
import logging
import os
import runpy
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import write_file
from trainkit.checkpoint.state import plain_state
from trainkit.config import CfgNode, ConfigError
from trainkit.engine import HookBase, hooks
from trainkit.engine.command import active_replay
from trainkit.engine.loop import TrainerBase
from trainkit.engine.origin import describe_origin, describe_other_origin
from trainkit.engine.settings import changed_settings, settings_of
from trainkit.engine.stopping import Stop
from trainkit.replay.checkpoints import around, compare_way, logged_values, prove
from trainkit.replay.inspection import Inspection
from trainkit.replay.report import Replay, judge
from trainkit.utils import comm
from trainkit.utils.device import device_of
from trainkit.utils.env import seed_all_rng
from trainkit.utils.logger import close_logger
from trainkit.utils.rng import set_rng_state
from trainkit.utils.run_folder import release_folder

_SAVES = (hooks.PeriodicCheckpointer, hooks.BestCheckpointer, hooks.PublishWeights)
_EVALUATES = (hooks.EvalHook, hooks.EarlyStopping)  # and what chooses by the results


class _Done(SystemExit):
    """Ends the script whose training was taken over."""


def replay(
    run: str | os.PathLike[str],
    iter: int,
    start: Callable[[], Any] | str | None = None,
    *,
    prove: bool = False,
    verdict: bool = True,
    anomaly: bool = False,
    debug: bool = False,
    profile: str = "",
    save_state: str = "",
) -> Replay:
    """Perform step ``iter`` of a run once more, from its checkpoints, and look at it; ``run`` is not changed.

    Every process of the run calls it.

    Args:
        run: the folder of its checkpoints.
        iter: from 0, as in logs and metrics.
        start: sets up the run as its command did and calls ``train()``; or the script to run with the arguments of the
            run. None: the command that the checkpoint names.
        prove: go on to the next checkpoint, and compare all that it holds.
        verdict: perform the step three times, and say whether that gave the same.
        anomaly: perform it under ``torch.autograd.detect_anomaly``.
        debug: stop in the debugger before the forward pass.
        profile: where to write a trace of the step, for chrome://tracing.
        save_state: where to write the state before the step, as a checkpoint.

    Raises:
        CheckpointError: no checkpoint can be used, or the run had another number of processes.
        ConfigError: the command does not come to ``train()``, or has no such iteration.
    """
    own = {"prove": prove, "verdict": verdict, "anomaly": anomaly, "debug": debug}
    files = {"profile": profile and os.path.abspath(profile), "save_state": save_state and os.path.abspath(save_state)}
    session = _Session(os.path.abspath(run), iter, {**own, **files})
    token, disabled = active_replay.set(session), logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.suppress(_Done), warnings.catch_warnings():
            if not anomaly:  # which names the operation in a warning
                warnings.simplefilter("ignore")
            start() if callable(start) else _run_command(session.origin, start)
    finally:
        logging.disable(disabled)
        active_replay.reset(token)
        close_logger()  # which default_setup has opened there
        release_folder(session.scratch)
        shutil.rmtree(session.scratch, ignore_errors=True)
    if session.result is None:
        raise ConfigError("the command of the run has ended before it trained; give the script that trains (--script)")
    return session.result


def _run_command(origin: dict[str, Any], script: str | None) -> None:
    """In this process, as ``python script arguments`` or ``python -m module arguments`` did."""
    former = sys.argv, [*sys.path], os.getcwd()
    module = "" if script else origin["module"]
    sys.argv = [os.path.abspath(script) if script else origin["argv"][0], *origin["argv"][1:]]
    try:
        if not os.path.isdir(origin["folder"]):
            raise ConfigError(f"the folder in which the run was started is not there: {origin['folder']!r}; make it")
        os.chdir(origin["folder"])
        sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(sys.argv[0])))
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        elif os.path.isfile(sys.argv[0]):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            raise ConfigError(f"the script of the run is not there: {sys.argv[0]!r}; name it (--script)")
    finally:
        sys.argv, sys.path[:] = former[:2]
        os.chdir(former[2])


class _Session:
    """One replay: takes the place of the training in the command of a run."""

    def __init__(self, run: str, iteration: int, options: dict[str, Any]) -> None:
        self._run, self._at, self._options = run, iteration, options
        self._start, self._next = around(run, iteration)
        if options["prove"] and self._next is None:
            raise CheckpointError(f"'{run}' has no checkpoint after iteration {iteration}; leave out --prove")
        # the process that wrote a file has done the steps before it: its settings may be others than those of the start
        governing = self._next or self._start
        assert governing is not None
        self.origin = governing.origin
        self._notes: list[str] = []
        self.result: Replay | None = None
        self.scratch = tempfile.mkdtemp(prefix="replay-")

    def set_up(self, cfg: Any) -> None:
        if not isinstance(cfg, CfgNode):
            raise ConfigError("a job with a LazyConfig cannot be replayed; use get_cfg and a DefaultTrainer")
        if self.scratch != cfg.OUTPUT_DIR:
            self._redirect(cfg)
        if self._start is None and cfg.SEED < 0 and self.origin["seed"] < 2**32:
            seed_all_rng(self.origin["seed"])

    def _redirect(self, cfg: CfgNode) -> None:
        """Take over the settings of the run, and write nothing there."""
        frozen, given = cfg.is_frozen(), cfg.clone()
        cfg.defrost()
        path = Path(self.scratch, "given.yaml")
        path.write_text(self.origin["config"])
        cfg.merge_from_file(path)
        counted, before = settings_of(cfg), dict(changed_settings(given, CfgNode()))
        for key, value in changed_settings(cfg, given):
            if key in counted:
                now = before.get(key)
                self._notes.append(f"setting {key}: {value!r} in the run, which is used; {now!r} in the command now")
        cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR = self.scratch, ""
        cfg.LOG.WRITERS, cfg.LOG.PROGRESS = [], False
        if self._start is not None:
            cfg.MODEL.WEIGHTS = ""
        if frozen:
            cfg.freeze()

    def train(self, trainer: Any) -> None:
        if not 0 <= self._at < trainer.max_iter:
            raise ConfigError(f"--iter is {self._at}; accepted: 0 to {trainer.max_iter - 1}, the iterations of the run")
        if (processes := self.origin["processes"]) != comm.get_world_size():
            raise CheckpointError(
                f"the run had {processes} processes, and this replay has {comm.get_world_size()}; start it by "
                f"torchrun --nproc-per-node {processes} tools/replay.py with the same arguments"
            )
        try:
            self.result = self._replay(trainer)
        finally:
            # workers end now, not when the collector of cycles finds the trainer
            trainer.reset_data_loader(tuple)
            trainer._test_loaders.clear()
        raise _Done(0)

    def _replay(self, trainer: Any) -> Replay:
        self._trainer = trainer
        own = describe_origin("", device_of(trainer.model), None)
        notes = [*self._notes, *describe_other_origin(self.origin, own)]
        self._beginning = None if self._start is not None else self._collect()
        with_all = [hook for hook in trainer.hooks if not isinstance(hook, hooks.PeriodicWriter)]
        by_results = any(isinstance(hook, hooks.ReduceOnPlateau) for hook in with_all)
        left_out = _SAVES if by_results else (*_SAVES, *_EVALUATES)
        trainer._hooks = [hook for hook in with_all if not isinstance(hook, left_out)]

        self._load_start()
        first = trainer.start_iter
        self._go_on(self._at - 1)
        before = self._collect()
        if self._options["save_state"] and comm.is_main_process():
            write_file(before, self._options["save_state"])
        seen, error = self._perform(before, special=True)
        values = logged_values(trainer.storage.state_dict(), first, self._at + 1)
        start = os.path.basename(self._start.path) if self._start else "the beginning"
        result = Replay(self._run, self._at, start, first, notes, error, seen)
        # rank 0 has the whole of what is stored
        way = compare_way(values, self._next, self._at) if comm.is_main_process() else ("", True)
        result.on_the_way, stored_is_equal = comm.broadcast(way)
        again = self._perform(before)[0] if self._options["verdict"] else None
        if self._options["prove"]:
            trainer._hooks = with_all
        if again is not None or self._options["prove"]:
            other, proof = self._from_start()
            result.proof = comm.broadcast(proof)
        if again is not None:
            other_values = logged_values(trainer.storage.state_dict(), first, self._at + 1)
            verdict = judge(seen, again, other, values, other_values, stored_is_equal)
            first_rank, *others = comm.all_gather(verdict)
            different = [f"{text} (on rank {rank})" for rank, text in enumerate(others, 1) if text != first_rank]
            result.verdict = "; ".join([first_rank, *different])
        result.findings = comm.all_gather(result.find())
        return result

    def _from_start(self) -> tuple[Inspection, str]:
        """The step from the checkpoint, and on to the next one if that is to be compared with what is reached there."""
        self._load_start()
        inspection, last, own = Inspection(self._at), self._at, []
        kept: list[dict[str, Any]] = []
        if self._options["prove"] and self._next is not None:
            last = self._next.iteration - (self._next.stage == 1)

            def ask(trainer: Any) -> None:
                if trainer.iter == last:
                    trainer.request_save("(replay)", lambda: kept.append(self._collect()))

            own = [hooks.CallbackHook(after_step=ask)]
            own[0].priority = "NORMAL" if self._next.stage == 2 else "LOW"  # above or below the save point
        self._go_on(last, inspection, *own)
        inspection.close()
        return inspection, prove(kept, self._next) if own and self._next and comm.is_main_process() else ""

    def _perform(self, state: dict[str, Any], special: bool = False) -> tuple[Inspection, str]:
        """The step from a state of this process; what was seen, and its error if it has failed."""
        self._load(state)
        inspection = Inspection(self._at, debug=special and self._options["debug"])
        with contextlib.ExitStack() as stack:
            if special and self._options["anomaly"]:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            traces = special and self._options["profile"]
            profiler = stack.enter_context(torch.profiler.profile()) if traces else None
            error = self._go_on(self._at, inspection)
        if profiler is not None and comm.is_main_process():
            profiler.export_chrome_trace(self._options["profile"])
        inspection.close()
        return inspection, error

    def _go_on(self, last: int, *own: HookBase) -> str:
        """Train up to iteration ``last``, included; the error of the step that is looked at, if it fails."""
        trainer = self._trainer
        if trainer.last_done_iter >= last:
            return ""
        kept = trainer.hooks

        def stop(_: Any) -> None:
            if trainer.iter == last:
                trainer._stop = Stop("replayed")  # not by request_stop, after which other ranks go on for a while

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
        """A copy of what a checkpoint would hold now."""
        trainer = self._trainer
        state, _ = trainer.checkpointer._collect({"iteration": trainer.last_done_iter})
        return _copy(state)

    def _load(self, state: dict[str, Any]) -> None:
        checkpointer = self._trainer.checkpointer
        checkpointer._apply(_copy(state), self._run, [*checkpointer.checkpointables], strict=True)

    def _load_start(self) -> None:
        trainer = self._trainer
        if self._start is not None:
            trainer.checkpointer.load(self._start.path, strict=True)
        elif trainer.status != "not started":
            self._load(self._beginning or {})
            set_rng_state(trainer._rng_state)  # now, as at the beginning: hooks may draw before the first step
            trainer._rng_state = None


def _copy(state: Any) -> Any:
    return plain_state(state, take_tensor=torch.clone)
