"""Repeat a step of a past run, from a checkpoint or from the capsule of a failed step."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from trainkit.projects.replay.checkpoints import around, compare_way, logged_values, prove
from trainkit.projects.replay.inspection import Inspection
from trainkit.projects.replay.origin import Saved
from trainkit.projects.replay.project import checkout
from trainkit.projects.replay.result import Elsewhere, Replay, compare_failure, judge
from trainkit.projects.replay.session import Session, Start, copy_of

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file, write_file
from trainkit.config import ConfigError
from trainkit.engine import HookBase, hooks
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model


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
    save_state: str = "",
) -> Replay:
    """Repeat and inspect step ``iter`` of a run, from its checkpoints; the run is not changed.

    Every process of the run calls it. For a capsule one process is enough.

    Args:
        run: the folder of the checkpoints; or the capsule of a failed step, which holds its iteration.
        iter: the iteration of the step, counted from 0, as in metrics.json.
        start: a function that sets up the run as its command did and calls ``train()``; or a command as a list, such as
            ``["python", "train.py"]``. None: the command in the checkpoint, if its script or module and its IMPORTS are
            in the project of the current folder.
        prove: continue to the next checkpoint, and compare everything in it.
        verdict: perform the step again in this process, and in a new one if ``start`` is a command, and say whether all
            executions are equal.
        find_samples: finds the samples with which the step fails. Called in the step, after it has fetched its batches,
            with the `SimpleTrainer`, the batches and the names of their samples; returns text.
        anomaly: perform the step under ``torch.autograd.detect_anomaly``; there is no verdict then.
        debug: stop in the debugger before the forward pass.
        save_state: where to write the state before the step, as a checkpoint.

    Raises:
        CheckpointError: no checkpoint can be used, or the run had another number of processes.
        ConfigError: the command does not call ``train()``, or it is in the checkpoint and its code is not in the
            project; the run has no such iteration; ``iter`` is missing for a run, or given for a capsule.
    """
    run = os.path.abspath(run)
    if not os.path.exists(run):
        raise ConfigError(f"there is no {run!r}; accepted: the folder of a run, or a capsule")
    if (iter is None) != os.path.isfile(run) or (os.path.isfile(run) and prove):
        is_capsule = "is a capsule of one step: leave out --iter and --prove" if os.path.isfile(run) else ""
        raise ConfigError(f"{run!r} {is_capsule or 'is a run: give --iter'}; got iter={iter}, prove={prove}")
    options: dict[str, Any] = {"prove": prove, "verdict": verdict and not anomaly, "find_samples": find_samples}
    options |= {"anomaly": anomaly, "debug": debug, "start": start}
    options["save_state"] = save_state and os.path.abspath(save_state)
    session = _Capsule(run, options) if iter is None else _Step(run, iter, options)
    return session.perform(start)


# like python -m, but modules in the current folder do not come first
_PROGRAM = """
import sys
sys.path[0] = {!r}
from trainkit.projects.replay.__main__ import main, parse_args
sys.exit(main(parse_args(sys.argv[1:])))
"""


class _Looked(Exception):
    """Raised to end a step after ``find_samples``."""


class _Step(Session):
    """A step that is reached from a checkpoint or from iteration 0."""

    def __init__(self, run: str, at: int, options: dict[str, Any]) -> None:
        super().__init__(run, at, *around(run, at))
        if options["prove"] and (self._next is None or "capsule" in self._next.state):
            raise CheckpointError(f"'{run}' has no checkpoint after iteration {at}; leave out --prove")
        self._take(options)

    def _take(self, options: dict[str, Any]) -> None:
        self._options, self.anomaly, self.keeps_all_hooks = options, options["anomaly"], options["prove"]
        self._folder_of_caller = os.getcwd()

    def work(self, trainer: Any) -> Replay:
        first = trainer.start_iter
        self._go_on(self._at - 1)
        before = self._collect()
        if self._options["save_state"] and comm.is_main_process():
            write_file(before, self._options["save_state"])
        kept = list[dict[str, Any]]()
        seen, error = self._look(*self._ask_for_state(kept))
        name = os.path.basename(self._start.path) if self._start else "the beginning"
        values = logged_values(trainer.storage.state_dict(), first, self._at + 1)
        result = Replay(self._run, self._at, name, first, self._notes, error, seen, values)
        # only rank 0 has all values that were stored
        way = compare_way(values, self._next, self._at) if comm.is_main_process() else ("", None)
        result.on_the_way, equals_run = comm.broadcast(way)
        if self._options["prove"]:
            assert self._next is not None
            self._go_on(self._next.iteration - (self._next.stage == 1), *self._ask_for_state(kept))
            result.proof = comm.broadcast(prove(kept, self._next) if comm.is_main_process() else "")
        self._judge(before, result, equals_run)
        return result

    def _judge(self, before: dict[str, Any], result: Replay, equals_run: bool | None) -> None:
        """Find the samples at fault, and compare with further executions."""
        result.samples_at_fault = self._bisect(before, result)
        if self._options["verdict"]:
            self._load(before)
            again = self._look(is_special=False)[0]
            elsewhere = self._perform_elsewhere()
            first_rank, *others = comm.all_gather(judge(result.inspection, again, result.values, elsewhere, equals_run))
            different = [f"{text} (on rank {rank})" for rank, text in enumerate(others, 1) if text != first_rank]
            result.verdict = "; ".join([first_rank, *different])
        result.findings = comm.all_gather(result.find())

    def _ask_for_state(self, kept: list[dict[str, Any]]) -> list[HookBase]:
        """For ``prove``: the hook that appends the state at the place of the next checkpoint."""
        if not self._options["prove"] or self._next is None:
            return []
        last = self._next.iteration - (self._next.stage == 1)

        def ask(trainer: Any) -> None:
            if trainer.iter == last:
                trainer.request_save("(replay)", lambda: kept.append(self._collect()))

        hook = hooks.CallbackHook(after_step=ask)
        hook.priority = "NORMAL" if self._next.stage == 2 else "LOW"  # above or below the save point
        return [hook]

    def _look(self, *own: HookBase, is_special: bool = True) -> tuple[Inspection, str]:
        """Perform the step now; return its inspection, and its error ("" if none)."""
        inspection = self.inspection = Inspection(self._at, debug=is_special and self._options["debug"])
        has_anomaly = is_special and self._options["anomaly"]
        with torch.autograd.set_detect_anomaly(True) if has_anomaly else contextlib.nullcontext():
            error = self._go_on(self._at, inspection, *own)
        inspection.close()
        self.inspection = None
        return inspection, error

    def _bisect(self, before: dict[str, Any], result: Replay) -> str:
        """Call ``find_samples`` in the step, after it has fetched its batches and before it computes anything."""
        find_samples = self._options["find_samples"]
        if find_samples is None:
            return ""
        self._load(before)
        step, found, reached = self._trainer._trainer, [], []

        def look() -> Any:
            reached.append(True)
            batches = [batch for batch, _ in step.micro_batches()]
            found.append(find_samples(step, batches, result.inspection.samples))
            raise _Looked

        step.compute_gradients = look
        try:
            error = self._go_on(self._at)
        finally:
            del step.compute_gradients
        reason = error.partition(". ")[0] if reached else "there is no batch, or this trainer makes its steps itself"
        failure = f"they cannot be looked at one by one: {reason}"
        by_rank = comm.all_gather("; ".join(found) or failure)
        return by_rank[0] if len(by_rank) == 1 else "; ".join(f"rank {i}: {text}" for i, text in enumerate(by_rank))

    def _perform_elsewhere(self) -> Elsewhere:
        """Perform the step in a new process, which runs the same command."""
        start = self._options["start"]
        if callable(start) or "RANK" in os.environ:
            return Elsewhere(reason="it is under torchrun" if "RANK" in os.environ else "no command is given")
        with tempfile.TemporaryDirectory() as folder:
            words = [self._run, *(["--iter", str(self._at)] if os.path.isdir(self._run) else [])]
            words += ["--parts", file := os.path.join(folder, "parts"), *(["--", *start] if start else [])]
            program = [sys.executable, "-c", _PROGRAM.format(str(checkout())), *words]
            done = subprocess.run(program, cwd=self._folder_of_caller, capture_output=True, text=True)
            if not os.path.exists(file):
                return Elsewhere(reason=(done.stderr.strip().splitlines() or ["it has ended"])[-1])
            with open(file) as text:
                found = json.load(text)
        parts = [(name, digest) for name, digest in found["parts"]]
        return Elsewhere(parts, {int(iter): row for iter, row in found["values"].items()})


class _Capsule(_Step):
    """The step that a capsule holds."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        state = read_file(path)
        self._capsule = state.pop("capsule", None)
        if self._capsule is None:
            raise CheckpointError(f"'{path}' is no capsule of a step; to replay from a checkpoint, name its folder")
        if not self._capsule["batches"]:
            reason = "the weights had been updated, or there was no batch, or there were several (accumulation)"
            raise CheckpointError(f"'{path}' holds no step: {reason}. Give {self._capsule['command']}")
        at = self._capsule["iteration"]
        Session.__init__(self, path, at, Saved(at, 1, path, state), None)
        self._take(options)
        self._processes = 1
        self._notes += self._capsule["notes"]

    def work(self, trainer: Any) -> Replay:
        assert self._start is not None
        self._load(state := dict(self._start.state))
        seen, error = self._look()
        result = Replay(self._run, self._at, os.path.basename(self._run), self._at, self._notes, error, seen)
        result.failure = "not compared: autograd stops at the first anomaly"
        if not self.anomaly:
            result.failure = compare_failure(self._capsule, result)
        self._judge(state, result, True)  # the failure says whether it is that of the run
        return result

    def _load_start(self) -> None:
        """The capsule is loaded with its batches, see ``work``."""

    def _load(self, state: dict[str, Any], strict: bool = False) -> None:
        super()._load(state, strict)
        step = self._trainer._trainer
        batches = copy_of(self._capsule["batches"])
        step.accumulation_steps = len(batches)
        step._data_loader_iter_obj = iter(batches)

    def _look(self, *own: HookBase, is_special: bool = True) -> tuple[Inspection, str]:
        inspection, error = super()._look(*own, is_special=is_special)
        inspection.samples = self._capsule["samples"]
        # the buffers before the step are not known: the forward pass that failed has changed them
        parameters = dict(unwrap_model(self._trainer.model).named_parameters())
        inspection.not_finite_before = [name for name in inspection.not_finite_before if name in parameters]
        return inspection, error
