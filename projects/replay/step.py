"""Repeat a step of a past run, from a checkpoint or from the capsule of a failed step."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from trainkit.projects.evaluators.samples import SampleCounter
from trainkit.projects.replay.checkpoints import (
    Place,
    Saved,
    Values,
    around,
    compare_way,
    logged_values,
    prove_equal,
)
from trainkit.projects.replay.failure import Comparison, Failure, compare_endings
from trainkit.projects.replay.inspection import Inspection, Part, Replay, is_on_the_way, judge
from trainkit.projects.replay.origin import sizes_and_times
from trainkit.projects.replay.session import FailedOnTheWay, Folder, Session, Start, copy_of

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError
from trainkit.engine import hooks
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model
from trainkit.utils.env import get_rng_state, set_rng_state

# the first would cost time in each step; the second is as large as the model
_NOT_IN_CAPSULES = ["random state and buffers are those after the forward pass that has failed"]
_NOT_IN_CAPSULES += ["the optimizer has no momentum, so its update is another one"]


def replay(
    run: Folder,
    iter: int | None = None,
    start: Start = None,
    *,
    prove: bool = False,
    verdict: bool = True,
    bisect: bool = False,
) -> Replay:
    """Repeat and inspect step ``iter`` of a run, from its checkpoints; every process of the run calls it.

    Args:
        run: the folder of the checkpoints; or the capsule of a failed step, which holds its iteration.
        iter: the iteration of the step, counted from 0, as in metrics.json.
        start: the command of the run, such as ``["python", "train.py"]``, or a function that does the same.
        prove: continue to the next checkpoint, and compare everything in it.
        verdict: perform the step again in this process, and in a new one if ``start`` is a command.
        bisect: find the samples with which the step fails.

    Raises CheckpointError: no checkpoint can be used, or the run had another number of processes. ConfigError:
    ``start`` is missing or does not call ``train()``, or there is no such iteration.
    """
    run = os.path.abspath(run)
    is_there = os.path.exists(run)
    is_capsule = os.path.isfile(run)
    names_a_step = iter is not None
    if not is_there or is_capsule == names_a_step or (is_capsule and prove):
        raise ConfigError(
            f"got {run!r} (there: {is_there}), iter={iter}, prove={prove}; accepted: "
            "the folder of a run and --iter, or a capsule without --iter and --prove"
        )
    session = _Capsule(run) if iter is None else _Step(run, iter, around(run, iter))
    if prove and (session.next is None or "capsule" in session.next.state):
        raise CheckpointError(
            f"'{run}' has no checkpoint after iteration {iter}; leave out --prove"
        )
    session.keeps_all_hooks = prove
    found: Replay = session.perform(
        start, lambda trainer: session.work(trainer, start, verdict, bisect)
    )
    return found


class _Step(Session):
    samples: Sequence[list[str]] = ()  # their names, if the loader does not know them

    def work(self, trainer: Any, command: Start, verdict: bool, bisect: bool) -> Replay:
        first = trainer.start_iter
        reached: list[dict[str, Any]] = []  # the state at the place of the next checkpoint
        if self.keeps_all_hooks:
            self._collect_at_next(reached)
        beginning = None
        if self.start is None and first < self.at:
            beginning = self.collect()
        self.go_on(self.at - 1)
        before = self.collect()
        seen = self.look()

        origin = os.path.basename(self.start.path) if self.start else "the beginning"
        result = Replay(self.run, self.at, origin, self.at - first, self.notes, seen)
        failure, equals_run = self._compare_with_run(result, first)
        is_equal = equals_run is not False and failure in ("not known", "has come back")
        if self.keeps_all_hooks and self.next is not None:
            self.go_on(self.next.done)
            result.proof = self._prove(reached, self.next)
            is_equal = is_equal and not result.proof.startswith("DIFFERENT")
        if verdict:
            self.load(before)
            again = self.look()
            elsewhere = self._perform_elsewhere(command)
            from_start = None
            if first < self.at and is_on_the_way(seen, elsewhere):
                from_start = self._look_from_start(beginning)
            text, is_same = judge(seen, again, elsewhere, equals_run, failure, from_start)
            result.verdict = _of_ranks(text)
            is_equal = is_equal and is_same
        if bisect:  # last: it calls the model many times, which a counter in it would notice
            self.load(before)
            result.samples_at_fault = self._name_samples(seen)
        result.is_equal = all(comm.all_gather(is_equal))
        result.findings = comm.all_gather(result.find())
        return result

    def _compare_with_run(self, result: Replay, first: int) -> tuple[Comparison, bool | None]:
        """Whether the failure is that of the run, and whether the values equal those of the run; notes both texts."""
        text, failure = self.compare_failure(first, result.inspection)
        result.failure = _of_ranks(text)
        failure = _worst(comm.all_gather(failure))
        storage = self.trainer.storage.state_dict()
        equals_run = self.compare(result, logged_values(storage, first, self.at + 1))
        if failure == "has come back" and equals_run is not False:
            equals_run = not result.failure.startswith("DIFFERENT")
        return failure, equals_run

    def _prove(self, reached: list[dict[str, Any]], saved: Saved) -> str:
        text = ""
        if comm.is_main_process():
            text = prove_equal(reached, saved)
        proof: str = comm.broadcast(text)
        return proof

    def compare_failure(self, first: int, seen: Inspection) -> tuple[str, Comparison]:
        """Compare how the way and the step have ended here and in the run."""
        run = self.failure_of_run(first, self.at, step=self.at)
        return compare_endings(run, seen.failure, self.place.done)

    def compare(self, result: Replay, values: Values) -> bool | None:
        """Compare with what the run has stored; returns whether the values are equal, None if that is not known."""
        recorded = self.origin["samples"]
        newest = self.origin["saved_ns"] if self.next else math.inf
        for name, (size, time) in sizes_and_times(result.samples).items():
            if name in recorded:
                has_changed = recorded[name] != [size, time]
            else:
                has_changed = time > newest
            if has_changed:
                result.changed_files.append(name)
        # only rank 0 has all values
        way: tuple[str, bool | None] = "", None
        if comm.is_main_process():
            way = compare_way(values, self.next, self.at)
        result.on_the_way, is_equal = comm.broadcast(way)
        return is_equal

    def _collect_at_next(self, reached: list[dict[str, Any]]) -> None:
        """Append the state at the place of the next checkpoint to ``reached``."""
        saved: Any = self.next

        def ask(trainer: Any) -> None:
            if trainer.iter == saved.done:
                trainer.request_save("(replay)", lambda: reached.append(self.collect()))

        hook = hooks.CallbackHook(after_step=ask)
        # below or above the save point
        hook.priority = "LOW" if saved.boundary_is_over else "NORMAL"
        self.trainer.register_hooks([hook])

    def look(self) -> Inspection:
        """Perform and inspect the step now."""
        seen = Inspection(self.samples)
        self.inspection = seen
        error = self.go_on(self.at, seen)
        seen.close()
        losses = {name: loss.item() for name, loss in seen.losses.items()}
        seen.note_failure(error, self.failure_here(error, self.at, losses))
        self.inspection = None
        return seen

    def _look_from_start(self, beginning: Any) -> Inspection | Exception:
        """Repeat the way too, and inspect the step; or how the way has failed. ``beginning``: without a checkpoint."""
        if beginning is None:
            self.load_start()
        else:
            self.load(beginning)
        try:
            self.go_on(self.at - 1)
        except FailedOnTheWay as error:
            return error
        return self.look()

    def _name_samples(self, seen: Inspection) -> str:
        """Name the samples with which the step fails, over all micro-batches and ranks."""
        found, reason = self._find_samples(seen)
        failed: list[str] = []
        good: list[str] = []
        for of_rank in comm.all_gather(found):
            for has_failed, text in of_rank:
                (failed if has_failed else good).append(text)
        if failed:
            return "; ".join(failed)  # a good micro-batch has no sample at fault
        if good and seen.error:
            return "the forward pass does not fail again, so this names none of them"
        if not good:
            return f"they cannot be looked at one by one: {reason}"
        return "; ".join(dict.fromkeys(good))

    def _find_samples(self, seen: Inspection) -> tuple[list[tuple[bool, str]], str]:
        """Try each sample of the step alone, from the state before the step, which was just loaded.

        Returns for each micro-batch whether it fails, and a text; or why there is none.
        """
        self.trainer._restore_rng()
        found: list[tuple[bool, str]] = []
        if seen.is_own_step or not seen.batches:
            reason = "the step has not called the model, or the trainer makes its steps itself"
            return found, reason
        try:
            for number, batch in enumerate(seen.batches):
                found.append(find_samples(self.trainer._trainer, batch, seen.names_of(number)))
        except TypeError as error:
            return found, str(error)
        return found, ""

    def _perform_elsewhere(self, command: Start) -> list[Part] | str | Exception:
        """The parts of the step in a new process, why there is none, or how it has failed."""
        if "RANK" in os.environ:
            return "it is under torchrun"
        if callable(command):
            return "no command is given"
        iter = self.at if os.path.isdir(self.run) else None
        with tempfile.TemporaryDirectory(prefix="replay-", ignore_cleanup_errors=True) as folder:
            file = f"{folder}/parts"
            arguments = (self.run, iter, command, file)
            code = f"import sys; sys.path = {sys.path}; "
            code += f"from {__name__} import write_parts; write_parts(*{arguments!r})"
            # its temporary files end with this folder, also if it is killed
            environment = {**os.environ, "TMPDIR": folder}
            words = [sys.executable, "-c", code]
            done = subprocess.run(words, capture_output=True, text=True, env=environment)
            if os.path.exists(file):
                return list(torch.load(file))
            lines = done.stderr.strip().splitlines() or ["without a word"]
            return RuntimeError(f"a new process has failed: {lines[-1]}")


def write_parts(run: str, iter: int | None, command: Start, file: str) -> None:
    """What the new process does: write the parts of the step."""
    torch.save(replay(run, iter, command, verdict=False).inspection.parts, file)


def _of_ranks(text: str) -> str:
    """The text of rank 0, and those of other ranks that differ."""
    texts = comm.all_gather(text)
    parts = [texts[0]] if texts[0] else []
    for rank, other in enumerate(texts):
        if other and other != texts[0]:
            parts.append(f"{other} (on rank {rank})")
    return "; ".join(parts)


def _worst(found: Sequence[Comparison]) -> Comparison:
    """Of all ranks: a failure has come back only if no rank misses it."""
    order: tuple[Comparison, ...] = ("has not come back", "only here", "has come back", "not known")
    return min(found, key=order.index)


class _Capsule(_Step):
    def __init__(self, path: str) -> None:
        state = read_file(path)
        self._capsule: dict[str, Any] = state.pop("capsule", {})
        self._state = state
        if not self._capsule:
            raise CheckpointError(
                f"'{path}' is no capsule of a step; to replay from a checkpoint, name its folder"
            )
        if not self._capsule["batches"]:
            reason = (
                "the weights had been updated, or there was no batch that a file can hold, or "
                "there were several"
            )
            raise CheckpointError(
                f"'{path}' holds no step: {reason}. Give {self._capsule['command']}"
            )
        at = self._capsule["iteration"]
        before = Saved(at - 1, True, path, state)
        super().__init__(path, at, Place(before, None, at - 1))
        self.num_ranks = 1
        self.samples = self._capsule["samples"]
        self.notes = [*_NOT_IN_CAPSULES]

    def compare_failure(self, first: int, seen: Inspection) -> tuple[str, Comparison]:
        """Whether the step fails as in the capsule, and how many of its losses are equal."""
        run = Failure(self.at, self._capsule["error"], self._capsule["losses"])
        text, failure = compare_endings(run, seen.failure, self.at - 1, is_exact=False)
        if failure == "has not come back":
            text = f"{text}. From the checkpoint: {self._capsule['command']}"
        return text, failure

    def compare(self, result: Replay, values: Values) -> bool | None:
        return None  # the run has stored no value of a step that has failed

    def load_start(self) -> None:
        self.load(self._state)

    def load(self, state: Mapping[str, Any], strict: bool = False) -> None:
        super().load(state, strict)
        step = self.trainer._trainer
        step.accumulation_steps = 1
        step._data_loader_iter_obj = iter(copy_of(self._capsule["batches"]))

    def look(self) -> Inspection:
        seen = super().look()
        # the buffers before the step are not known: the forward pass that failed has changed them
        parameters = dict(unwrap_model(self.trainer.model).named_parameters())
        seen.not_finite_before = [name for name in seen.not_finite_before if name in parameters]
        return seen


def find_samples(step: Any, batch: Any, names: Sequence[str]) -> tuple[bool, str]:
    """Run the forward pass of a `SimpleTrainer` with each sample of a batch alone, to find those with which it fails.

    Each pass starts from the same random state and buffers; no hook is called. The sample is in its batch twice, since
    batch norm does not accept a single one. If the step does not fail, the sample with the largest loss is named.
    ``batch``: a list of samples, or nested containers of tensors whose first dimension is the sample. Returns whether
    the whole batch fails, and a text.
    """
    model = unwrap_model(step.model)
    rng = get_rng_state()
    count = SampleCounter(model, step.data_loader)
    size = count(batch)
    is_list = count.is_list(batch)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def try_batch(batch: Any) -> tuple[str, float]:
        """How it fails ("": it does not), and the loss."""
        set_rng_state(rng)
        try:
            loss = float(step.compute_losses(batch).total)
        except Exception as error:
            return f"the forward pass ends in {type(error).__name__}", math.inf
        finally:
            for name, buffer in model.named_buffers():
                buffer.data.copy_(buffers.get(name, buffer))
        if not math.isfinite(loss):
            return "the loss is not finite", math.inf
        return "", loss

    if len(names) != size:
        names = [f"sample {i} of the batch" for i in range(size)]
    alone: dict[str, tuple[str, float]] = {}
    step.call_model = model  # a data-parallel wrapper would wait for the other ranks
    try:
        failure, _ = try_batch(batch)
        for row, name in enumerate(names):
            alone[name] = try_batch(_twice(batch, row, size, is_list))
    finally:
        del step.call_model
    if failure:
        return True, _describe_bad(failure, alone, size)
    return False, _describe_largest(alone, size, model)


def _describe_bad(failure: str, alone: Mapping[str, tuple[str, float]], size: int) -> str:
    bad = [name for name, (found, _) in alone.items() if found == failure]
    if len(bad) == size:
        return f"{failure} with each of the {size} samples alone, so this names none of them"
    named = ", ".join(bad[:8]) or "none"
    return f"{failure} with {named} ({len(bad)} of {size} samples, each alone)"


def _describe_largest(
    alone: Mapping[str, tuple[str, float]], size: int, model: torch.nn.Module
) -> str:
    losses = sorted((loss, name) for name, (_, loss) in alone.items())
    largest, name = losses[-1]
    median, _ = losses[size // 2]
    text = f"the loss is finite; {name} has the largest one alone: {largest:.4g}"
    text += f" (median {median:.4g})"
    if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        text += (
            "; batch norm used the statistics of each sample alone, "
            "so in the batch another one may be larger"
        )
    return text


def _twice(batch: Any, row: int, size: int, is_list: bool) -> Any:
    if is_list:
        return [batch[row]] * 2

    def rows(value: Tensor) -> Tensor:
        has_samples = value.shape[:1] == (size,)
        return value[[row, row]] if has_samples else value

    return tree_map_only(Tensor, rows, batch)
