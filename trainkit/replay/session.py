"""A step of a past run again: the command of the run is given once more, and its training is done up to that step."""

import contextlib
import json
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
from trainkit.checkpoint.file import read_file, write_file
from trainkit.checkpoint.state import plain_state
from trainkit.config import CfgNode, ConfigError
from trainkit.engine import HookBase, hooks
from trainkit.engine.command import active_replay
from trainkit.engine.loop import TrainerBase
from trainkit.engine.origin import describe_origin, describe_other_origin
from trainkit.engine.settings import changed_settings, settings_of
from trainkit.engine.stopping import Stop
from trainkit.replay.checkpoints import Saved, Values, around, compare_values, first_difference, logged_values
from trainkit.replay.inspection import Inspection, find_difference
from trainkit.replay.report import Replay
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

    def __init__(self) -> None:
        super().__init__(0)


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
    scratch = tempfile.mkdtemp(prefix="replay-")
    files = {"profile": profile, "save_state": save_state}
    session = _Session(
        os.fspath(run), iter, scratch, prove=prove, verdict=verdict, anomaly=anomaly, debug=debug, **files
    )
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
        release_folder(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
    if session.result is None:
        raise ConfigError("the command of the run has ended before it trained; give the script that trains (--script)")
    return session.result


def _run_command(origin: dict[str, Any], script: str | None) -> None:
    """In this process, as ``python script arguments`` or ``python -m module arguments`` did."""
    argv, folder, path = [*origin["argv"]], os.getcwd(), [*sys.path]
    former_argv = sys.argv
    script = os.path.abspath(script) if script else None
    try:
        os.chdir(origin["folder"])
    except OSError as error:
        raise ConfigError(f"the folder in which the run was started cannot be entered: {error}") from error
    try:
        sys.argv = [script or argv[0], *argv[1:]]
        sys.path[:0] = (
            [os.getcwd()] if origin["module"] and not script else [os.path.dirname(os.path.abspath(sys.argv[0]))]
        )
        if origin["module"] and not script:
            runpy.run_module(origin["module"], run_name="__main__", alter_sys=True)
        elif os.path.isfile(sys.argv[0]):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            raise ConfigError(f"the run was started by {argv[0]!r}, which is not there; give its script (--script)")
    finally:
        sys.argv, sys.path[:] = former_argv, path
        os.chdir(folder)


class _StopAfter(HookBase):
    """Ends the training on all ranks after iteration ``at``."""

    def __init__(self, trainer: TrainerBase, at: int) -> None:
        self._loop, self._at = trainer, at

    def after_step(self) -> None:
        if self.trainer.iter == self._at:
            self._loop._stop = Stop("replayed")  # not request_stop, after which the other ranks go on for a while


class _Collect(HookBase):
    """Keeps what a checkpoint would hold where ``saved`` was written."""

    def __init__(self, saved: Saved, collect: Callable[[], dict[str, Any]]) -> None:
        self._at = saved.iteration - (saved.stage == 1)
        self._collect = collect
        self.priority = "NORMAL" if saved.stage == 2 else "LOW"  # above or below the save point
        self.state: dict[str, Any] | None = None

    def after_step(self) -> None:
        if self.trainer.iter == self._at:
            self.trainer.request_save("(replay)", self._keep)

    def _keep(self) -> None:
        self.state = self._collect()


class _Session:
    """One replay: takes the place of the training in the command of a run."""

    def __init__(
        self,
        run: str,
        iteration: int,
        scratch: str,
        *,
        prove: bool,
        verdict: bool,
        anomaly: bool,
        debug: bool,
        **files: str,
    ) -> None:
        self._run, self._at, self._scratch = os.path.abspath(run), iteration, scratch
        self._prove, self._verdict, self._anomaly, self._debug = prove, verdict, anomaly, debug
        self._files = {name: os.path.abspath(path) if path else "" for name, path in files.items()}
        self._start, self._next = around(self._run, iteration)
        if prove and self._next is None:
            raise CheckpointError(
                f"'{run}' has no checkpoint after iteration {iteration} to compare with; leave out --prove"
            )
        # the process that wrote a file has done the steps before it: its settings may be others than those of the start
        governing = self._next or self._start
        assert governing is not None
        self.origin = governing.origin
        self._notes: list[str] = []
        self.result: Replay | None = None

    # ------------------------------------------------------------------ in the place of the run

    def set_up(self, cfg: Any) -> None:
        if not isinstance(cfg, CfgNode):
            raise ConfigError(
                "a job with a LazyConfig cannot be replayed; use a config of get_cfg and a DefaultTrainer"
            )
        if self._scratch != cfg.OUTPUT_DIR:
            self._redirect(cfg)
        if self._start is None and cfg.SEED < 0 and self.origin["seed"] < 2**32:
            seed_all_rng(self.origin["seed"])

    def _redirect(self, cfg: CfgNode) -> None:
        """Take over the settings of the run, and write nothing there."""
        frozen, given = cfg.is_frozen(), cfg.clone()
        cfg.defrost()
        path = Path(self._scratch, "given.yaml")
        path.write_text(self.origin["config"])
        cfg.merge_from_file(path)
        counted, before = settings_of(cfg), dict(changed_settings(given, CfgNode()))
        for key, value in changed_settings(cfg, given):
            if key in counted:
                now = before.get(key)
                self._notes.append(f"setting {key}: {value!r} in the run, which is used; {now!r} in the command now")
        cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR = self._scratch, ""
        cfg.LOG.WRITERS, cfg.LOG.PROGRESS = [], False
        if self._start is not None:
            cfg.MODEL.WEIGHTS = ""
        # read only beside a checkpoint
        Path(self._scratch, "batch.json").write_text(json.dumps(self.origin["batch"]))
        if frozen:
            cfg.freeze()

    def train(self, trainer: Any) -> None:
        if self._at >= trainer.max_iter:
            raise ConfigError(f"--iter is {self._at}; accepted: 0 to {trainer.max_iter - 1}, the iterations of the run")
        if (processes := self.origin["processes"]) != comm.get_world_size():
            raise CheckpointError(
                f"the run had {processes} processes, and this replay has {comm.get_world_size()}; start it by "
                f"torchrun --nproc-per-node {processes} tools/replay.py with the same arguments"
            )
        self.result = self._replay(trainer)
        raise _Done

    # ------------------------------------------------------------------ the executions

    def _replay(self, trainer: Any) -> Replay:
        self._trainer = trainer
        own = describe_origin("", device_of(trainer.model), None)
        notes = [*self._notes, *describe_other_origin(self.origin, own)]
        self._beginning = None if self._start is not None else self._collect()
        all_hooks = trainer.hooks
        by_results = any(isinstance(hook, hooks.ReduceOnPlateau) for hook in all_hooks)
        left_out = (*_SAVES, hooks.PeriodicWriter) if by_results else (*_SAVES, hooks.PeriodicWriter, *_EVALUATES)
        trainer._hooks = [hook for hook in all_hooks if not isinstance(hook, left_out)]

        self._load_start()
        first = trainer.start_iter
        self._go_on(self._at - 1)
        before = self._collect()
        if self._files["save_state"] and comm.is_main_process():
            write_file(before, self._files["save_state"])
        seen, error = self._perform(before, special=True)
        values = self._values(first)
        again = self._perform(before)[0] if self._verdict else None
        other, other_values, proof = None, None, ""
        if self._verdict or self._prove:
            if self._prove:
                trainer._hooks = [*all_hooks]
            self._load_start()
            inspection = Inspection(self._at)
            collect = _Collect(self._next, self._collect) if self._prove and self._next else None
            self._go_on(collect._at if collect else self._at, inspection, *([collect] if collect else []))
            inspection.close()
            other, other_values = inspection, self._values(first)
            if collect is not None and self._next is not None and comm.is_main_process():
                proof = self._compare(collect, self._next)

        result = Replay(
            run=self._run,
            iteration=self._at,
            start=self._start.name if self._start else "the beginning",
            first_iteration=first,
            differences=notes,
            error=error,
            inspection=seen,
        )
        # rank 0 has the whole of what is stored
        way = self._describe_way(values) if comm.is_main_process() else ("", True)
        (result.on_the_way, stored_is_equal), result.proof = comm.broadcast((way, proof))
        if again is not None and other is not None and other_values is not None:
            verdicts = comm.all_gather(_judge(seen, again, other, values, other_values, stored_is_equal))
            different = [f"{text} (on rank {rank})" for rank, text in enumerate(verdicts) if text != verdicts[0]]
            result.verdict = "; ".join([verdicts[0], *different])
        result.findings = comm.all_gather(result.find())
        return result

    def _perform(self, state: dict[str, Any], special: bool = False) -> tuple[Inspection, str]:
        """The step from a state of this process; what was seen, and its error if it has failed."""
        self._load(state)
        inspection = Inspection(self._at, debug=special and self._debug)
        with contextlib.ExitStack() as stack:
            if special and self._anomaly:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            profiler = stack.enter_context(torch.profiler.profile()) if special and self._files["profile"] else None
            error = self._go_on(self._at, inspection)
        if profiler is not None and comm.is_main_process():
            profiler.export_chrome_trace(self._files["profile"])
        inspection.close()
        return inspection, error

    def _go_on(self, last: int, *own: HookBase) -> str:
        """Train up to iteration ``last``, included; the error of the step that is looked at, if it fails."""
        trainer = self._trainer
        if trainer.last_done_iter >= last:
            return ""
        kept = trainer.hooks
        trainer.register_hooks([*own, _StopAfter(trainer, last)])
        try:
            TrainerBase.train(trainer, trainer.last_done_iter + 1, trainer.max_iter)
        except Exception as error:
            if trainer.iter < self._at:
                text = f"the replay has failed in iteration {trainer.iter}, on the way to {self._at}"
                raise RuntimeError(f"{text}: {type(error).__name__}: {error}") from error
            return f"{type(error).__name__}: {error}"
        finally:
            trainer._hooks = [*kept]
        return ""

    # ------------------------------------------------------------------ states

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

    def _values(self, first: int) -> Values:
        return logged_values(self._trainer.storage.state_dict(), first, self._at + 1)

    # ------------------------------------------------------------------ comparisons

    def _describe_way(self, values: Values) -> tuple[str, bool]:
        if self._next is None:
            return "nothing to compare with: the run has stored nothing after this step", True
        first = min((iter for history in values.values() for iter in history), default=self._at)
        stored = logged_values(self._next.state["trainer"]["storage"], first, self._at + 1)
        count, different = compare_values(values, stored)
        where = f"in {self._next.name}, iterations {first} to {self._at}"
        if different is None:
            return f"{count} of {count} logged values equal those {where}", True
        iteration, name, here, there = different
        return f"DIFFERENT: {name} of iteration {iteration} is {here!r} here and {there!r} {where}", False

    def _compare(self, collect: _Collect, saved: Saved) -> str:
        if collect.state is None:
            return f"DIFFERENT: the replay has not reached {saved.name}"
        if difference := first_difference(collect.state, read_file(saved.path)):
            return f"DIFFERENT from {saved.name} in {difference} (first here, second in the file)"
        return f"every byte equals {saved.name}: model, optimizer, random state, data, hooks, storage"


def _judge(
    first: Inspection, again: Inspection, other: Inspection, values: Values, other_values: Values, stored_is_equal: bool
) -> str:
    if where := find_difference(first, again):
        return f"transient: performed twice in place, the step differs in {where}"
    if where := find_difference(first, other):
        different = compare_values(values, other_values)[1]
        since = f", since iteration {different[0]} ({different[1]})" if different and different[0] < first._at else ""
        return f"transient: performed twice from the checkpoint, the step differs in {where}{since}"
    if not stored_is_equal:
        return "different on this machine: three executions agree, but not with what the run has stored"
    return "reproducible: twice in place and once more from the checkpoint, every bit is equal"


def _copy(state: Any) -> Any:
    return plain_state(state, take_tensor=torch.clone)
