"""Repeat a step of a past run, from a checkpoint or from the capsule of a failed step."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from trainkit.projects.replay.checkpoints import around, compare_values, compare_way, logged_values, prove
from trainkit.projects.replay.inspection import Inspection
from trainkit.projects.replay.origin import Saved
from trainkit.projects.replay.result import Replay, compare_failure, judge
from trainkit.projects.replay.session import Session, Start, copy_of

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file, write_file
from trainkit.config import ConfigError
from trainkit.engine import hooks
from trainkit.utils import comm
from trainkit.utils.model import unwrap_model


def replay(
    run: str | os.PathLike[str],
    iter: int | None = None,
    start: Start = None,
    *,
    prove: bool = False,
    verdict: bool = True,
    find_samples: Callable[[Any, list[Any], list[list[str]]], str] | None = None,
    anomaly: bool = False,
    debug: bool = False,
    profile: str = "",
    save_state: str = "",
) -> Replay:
    """Repeat and inspect step ``iter`` of a run, from its checkpoints; the run is not changed.

    Every process of the run calls it. For a capsule one process is enough.

    Args:
        run: the folder of the checkpoints; or the capsule of a failed step, which holds its iteration.
        iter: the iteration of the step, counted from 0, as in metrics.json.
        start: a function that sets up the run as its command did and calls ``train()``; or a command as a list, such as
            ``["python", "train.py"]``; or the path of a script to run with the arguments of the run. None: the command
            in the checkpoint, if its script or module and its IMPORTS are in the project of the current folder.
        prove: continue to the next checkpoint, and compare everything in it.
        verdict: perform the step three times (twice for a capsule), and say whether all executions are equal.
        find_samples: finds the samples with which the step fails. Called in the step, after it has fetched its batches,
            with the `SimpleTrainer`, the batches and the names of their samples; returns text.
        anomaly: perform the step under ``torch.autograd.detect_anomaly``; there is no verdict then.
        debug: stop in the debugger before the forward pass.
        profile: where to write a trace of the step, for chrome://tracing.
        save_state: where to write the state before the step, as a checkpoint.

    Raises:
        CheckpointError: no checkpoint can be used, or the run had another number of processes.
        ConfigError: the command does not call ``train()``, or it is in the checkpoint and its code is not in the
            project; the run has no such iteration; ``iter`` is missing for a
            run, or given for a capsule.
    """
    run, is_capsule = os.path.abspath(run), os.path.isfile(run)
    if (iter is None) != is_capsule or (is_capsule and prove):
        accepted = (
            "is a capsule of one step: leave out --iter and --prove"
            if is_capsule
            else "is no capsule but a run: give --iter"
        )
        raise ConfigError(f"{run!r} {accepted}; got iter={iter}, prove={prove}")
    files = {"profile": profile and os.path.abspath(profile), "save_state": save_state and os.path.abspath(save_state)}
    options: dict[str, Any] = {"prove": prove, "verdict": verdict and not anomaly, "find_samples": find_samples}
    options |= {"anomaly": anomaly, "debug": debug, **files}
    session = _Capsule(run, options) if is_capsule else _Step(run, iter or 0, options)
    return session.perform(start)


class _Looked(Exception):
    """Raised to end a step after ``find_samples``."""


class _Step(Session):
    """A step that is reached from a checkpoint or from iteration 0."""

    def __init__(self, run: str, at: int, options: dict[str, Any]) -> None:
        super().__init__(run, at, *around(run, at))
        if options["prove"] and (self._next is None or "capsule" in self._next.state):
            raise CheckpointError(f"'{run}' has no checkpoint after iteration {at}; leave out --prove")
        self._options, self.anomaly = options, options["anomaly"]

    def work(self, trainer: Any) -> Replay:
        self._load_start()
        first = trainer.start_iter
        self._go_on(self._at - 1)
        before = self._collect()
        result = self._look(before, first)
        values = logged_values(trainer.storage.state_dict(), first, self._at + 1)
        # only rank 0 has all values that were stored
        way = compare_way(values, self._next, self._at) if comm.is_main_process() else ("", True)
        result.on_the_way, stored_is_equal = comm.broadcast(way)
        result.samples_at_fault = self._bisect(before, result)
        again = self._perform(before)[0] if self._options["verdict"] else None
        if self._options["prove"]:
            trainer._hooks = self._all_hooks
        if again is not None or self._options["prove"]:
            other, proof = self._from_start()
            result.proof = comm.broadcast(proof)
        if again is not None:
            change = compare_values(values, logged_values(trainer.storage.state_dict(), first, self._at))[1]
            since = f", since iteration {change[0]} ({change[1]})" if change else ""
            verdict = judge(result.inspection, again, other, since, stored_is_equal)
            first_rank, *others = comm.all_gather(verdict)
            different = [f"{text} (on rank {rank})" for rank, text in enumerate(others, 1) if text != first_rank]
            result.verdict = "; ".join([first_rank, *different])
        result.findings = comm.all_gather(result.find())
        return result

    def _look(self, before: dict[str, Any], first: int) -> Replay:
        if self._options["save_state"] and comm.is_main_process():
            write_file(before, self._options["save_state"])
        seen, error = self._perform(before, special=True)
        start = os.path.basename(self._start.path) if self._start else "the beginning"
        return Replay(self._run, self._at, start, first, self._notes, error, seen)

    def _bisect(self, before: dict[str, Any], result: Replay) -> str:
        """Call ``find_samples`` in the step, after it has fetched its batches and before it computes anything."""
        find_samples = self._options["find_samples"]
        if find_samples is None:
            return ""
        self._load(before)
        step, found = self._trainer._trainer, []

        def look(batches: list[Any]) -> Any:
            found.append(find_samples(step, batches, result.inspection.samples))
            raise _Looked

        step.compute_gradients = look
        try:
            error = self._go_on(self._at)
        finally:
            del step.compute_gradients
        failure = f"they cannot be looked at one by one: {error.partition('. ')[0] or 'the iteration makes no step'}"
        by_rank = comm.all_gather("; ".join(found) or failure)
        return by_rank[0] if len(by_rank) == 1 else "; ".join(f"rank {i}: {text}" for i, text in enumerate(by_rank))

    def _from_start(self) -> tuple[Inspection, str]:
        """Perform the step from the checkpoint; for ``prove``, continue to the next checkpoint and compare."""
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
        """Perform the step from a state of this process; return its inspection, and its error ("" if none)."""
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


class _Capsule(_Step):
    """The step that a capsule holds."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        state = read_file(path)
        self._capsule = state.pop("capsule", None)
        if self._capsule is None:
            raise CheckpointError(f"'{path}' is no capsule of a step; to replay from a checkpoint, name its folder")
        if not self._capsule["batches"]:
            reason = "the failure was noticed after the weights had been updated, or there was no batch"
            raise CheckpointError(f"'{path}' holds no step: {reason}. Give {self._capsule['command']}")
        at = self._capsule["iteration"]
        Session.__init__(self, path, at, Saved(at, 1, path, state), None)
        self._options, self.anomaly, self._processes = options, options["anomaly"], 1
        self._notes += self._capsule["notes"]

    def work(self, trainer: Any) -> Replay:
        assert self._start is not None
        state = dict(self._start.state)
        result = self._look(state, self._at)
        result.failure = "not compared: autograd stops at the first anomaly"
        if not self.anomaly:
            result.failure = compare_failure(self._capsule, result)
        result.samples_at_fault = self._bisect(state, result)
        if self._options["verdict"]:
            result.verdict = judge(result.inspection, self._perform(state)[0])
        result.findings = [result.find()]
        return result

    def _load(self, state: dict[str, Any], strict: bool = False) -> None:
        super()._load(state, strict=False)
        step = self._trainer._trainer
        batches = copy_of(self._capsule["batches"])
        step.feed.accumulation_steps, step.feed.schedule = len(batches), []
        step._data_loader_iter_obj = iter(batches)

    def _perform(self, state: dict[str, Any], special: bool = False) -> tuple[Inspection, str]:
        inspection, error = super()._perform(state, special)
        inspection.samples = self._capsule["samples"]
        # the buffers before the step are not known: the forward pass that failed has changed them
        before, own = inspection.not_finite_before, dict(unwrap_model(self._trainer.model).named_parameters())
        inspection.not_finite_before = [name for name in before if name in own]
        return inspection, error
