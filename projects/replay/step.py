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
    Saved,
    Values,
    around,
    compare_way,
    logged_values,
    prove_equal,
)
from trainkit.projects.replay.inspection import Inspection, Part, Replay, judge
from trainkit.projects.replay.origin import sizes_and_times
from trainkit.projects.replay.session import Folder, Session, Start, copy_of

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
    is_file = os.path.isfile(run)
    if not os.path.exists(run) or is_file != (iter is None) or (is_file and prove):
        accepted = (
            "accepted: the folder of a run and --iter, or a capsule without --iter and --prove"
        )
        raise ConfigError(
            f"got {run!r} (there: {os.path.exists(run)}), iter={iter}, prove={prove}; {accepted}"
        )
    session = _Capsule(run) if iter is None else _Step(run, iter, *around(run, iter))
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
        first, reached = trainer.start_iter, list[dict[str, Any]]()
        if self.keeps_all_hooks:
            self._collect_at_next(reached)
        self.go_on(self.at - 1)
        before, seen = self.collect(), self.look()
        origin = os.path.basename(self.start.path) if self.start else "the beginning"
        result = Replay(self.run, self.at, origin, self.at - first, self.notes, seen)
        equals_run = self.compare(
            result, logged_values(trainer.storage.state_dict(), first, self.at + 1)
        )
        if self.keeps_all_hooks and self.next is not None:
            self.go_on(self.next.done)
            result.proof = comm.broadcast(
                prove_equal(reached, self.next) if comm.is_main_process() else ""
            )
        if bisect:
            self.load(before)
            result.samples_at_fault = _of_ranks(self._find_samples(seen))
        if verdict:
            self.load(before)
            result.verdict = _of_ranks(
                judge(seen, self.look(), self._perform_elsewhere(command), equals_run)
            )
        result.findings = comm.all_gather(result.find())
        return result

    def compare(self, result: Replay, values: Values) -> bool | None:
        """Compare with what the run has stored; returns whether the values are equal, None if that is not known."""
        recorded, newest = (
            self.origin["samples"],
            self.origin["saved_ns"] if self.next else math.inf,
        )
        for name, (size, time) in sizes_and_times(result.samples).items():
            if recorded[name] != [size, time] if name in recorded else time > newest:
                result.changed_files.append(name)
        # only rank 0 has all values
        way = compare_way(values, self.next, self.at) if comm.is_main_process() else ("", None)
        result.on_the_way, is_equal = comm.broadcast(way)
        return is_equal

    def _collect_at_next(self, reached: list[dict[str, Any]]) -> None:
        """Append the state at the place of the next checkpoint to ``reached``."""
        saved: Any = self.next

        def ask(trainer: Any) -> None:
            if trainer.iter == saved.done:
                trainer.request_save("(replay)", lambda: reached.append(self.collect()))

        hook = hooks.CallbackHook(after_step=ask)
        hook.priority = "NORMAL" if saved.stage == 2 else "LOW"  # above or below the save point
        self.trainer.register_hooks([hook])

    def look(self) -> Inspection:
        """Perform and inspect the step now."""
        self.inspection = seen = Inspection(self.samples)
        seen.error = self.go_on(self.at, seen)
        seen.close()
        self.inspection = None
        return seen

    def _find_samples(self, seen: Inspection) -> str:
        """Try each sample of the step alone, from the state before the step, which was just loaded."""
        self.trainer._restore_rng()
        found, reason = (
            [],
            "the step has not called the model, or the trainer makes its steps itself",
        )
        try:
            for number, batch in enumerate([] if seen.is_own_step else seen.batches):
                found.append(
                    find_samples(
                        self.trainer._trainer, batch, next(iter(seen.samples[number:]), [])
                    )
                )
        except TypeError as error:
            found, reason = [], str(error)
        return "; ".join(found) or f"they cannot be looked at one by one: {reason}"

    def _perform_elsewhere(self, command: Start) -> list[Part] | str:
        if "RANK" in os.environ or callable(command):
            return "it is under torchrun" if "RANK" in os.environ else "no command is given"
        with tempfile.TemporaryDirectory() as folder:
            arguments = (
                self.run,
                self.at if os.path.isdir(self.run) else None,
                command,
                f"{folder}/parts",
            )
            code = f"import sys; sys.path = {sys.path}; from {__name__} import write_parts; write_parts(*{arguments!r})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if os.path.exists(arguments[-1]):
                return list(torch.load(arguments[-1]))
            return (done.stderr.strip().splitlines() or ["it has ended"])[-1]


def write_parts(run: str, iter: int | None, command: Start, file: str) -> None:
    """What the new process does: write the parts of the step."""
    torch.save(replay(run, iter, command, verdict=False).inspection.parts, file)


def _of_ranks(text: str) -> str:
    """The text of rank 0, and those of other ranks that differ."""
    texts = comm.all_gather(text)
    return "; ".join(
        [texts[0], *(f"{text} (on rank {i})" for i, text in enumerate(texts) if text != texts[0])]
    )


class _Capsule(_Step):
    def __init__(self, path: str) -> None:
        self._state = state = read_file(path)
        self._capsule: dict[str, Any] = state.pop("capsule", {})
        if not self._capsule:
            raise CheckpointError(
                f"'{path}' is no capsule of a step; to replay from a checkpoint, name its folder"
            )
        if not self._capsule["batches"]:
            reason = "the weights had been updated, or there was no batch that a file can hold, or there were several"
            raise CheckpointError(
                f"'{path}' holds no step: {reason}. Give {self._capsule['command']}"
            )
        at = self._capsule["iteration"]
        super().__init__(path, at, Saved(at - 1, 1, path, state), None)
        self.num_ranks, self.samples, self.notes = 1, self._capsule["samples"], [*_NOT_IN_CAPSULES]

    def compare(self, result: Replay, values: Values) -> bool | None:
        """Whether the step fails as in the capsule, and how many of its losses are equal."""
        losses, former = (
            {n: loss.item() for n, loss in result.losses.items()},
            self._capsule["losses"],
        )
        same = [name for name, loss in former.items() if repr(losses.get(name)) == repr(loss)]
        text = f"; {len(same)} of {len(former)} losses equal those of the run" if former else ""
        if result.error.partition(":")[0] == self._capsule["error"].partition(":")[0]:
            result.failure = f"it has come back{text}"
        else:
            text = f"{self._capsule['error'].partition('. ')[0]:.200}{text}. From the checkpoint: "
            result.failure = f"DIFFERENT: in the run it was {text}{self._capsule['command']}"
        return True  # the failure says it

    def load_start(self) -> None:
        self.load(self._state)

    def load(self, state: Mapping[str, Any], strict: bool = False) -> None:
        super().load(state, strict)
        step = self.trainer._trainer
        step.accumulation_steps, step._data_loader_iter_obj = (
            1,
            iter(copy_of(self._capsule["batches"])),
        )

    def look(self) -> Inspection:
        seen = super().look()
        # the buffers before the step are not known: the forward pass that failed has changed them
        parameters = dict(unwrap_model(self.trainer.model).named_parameters())
        seen.not_finite_before = [name for name in seen.not_finite_before if name in parameters]
        return seen


def find_samples(step: Any, batch: Any, names: Sequence[str]) -> str:
    """Run the forward pass of a `SimpleTrainer` with each sample of a batch alone, to find those with which it fails.

    Each pass starts from the same random state and buffers; no hook is called. The sample is in its batch twice, since
    batch norm does not accept a single one. If the step does not fail, the sample with the largest loss is named.
    ``batch``: a list of samples, or nested containers of tensors whose first dimension is the sample.
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
            return ("", loss) if math.isfinite(loss) else ("the loss is not finite", math.inf)
        except Exception as error:
            return f"the forward pass ends in {type(error).__name__}", math.inf
        finally:
            for name, buffer in model.named_buffers():
                buffer.data.copy_(buffers.get(name, buffer))

    names = names if len(names) == size else [f"sample {i} of the batch" for i in range(size)]
    step.call_model = model  # a data-parallel wrapper would wait for the other ranks
    try:
        failure, alone = (
            try_batch(batch)[0],
            {names[i]: try_batch(_twice(batch, i, size, is_list)) for i in range(size)},
        )
    finally:
        del step.call_model
    if failure:
        bad = [name for name, (found, _) in alone.items() if found == failure]
        if len(bad) == size:
            return f"{failure} with each of the {size} samples alone, so this names none of them"
        return f"{failure} with {', '.join(bad[:8]) or 'none'} ({len(bad)} of {size} samples, each alone)"
    losses = sorted((loss, name) for name, (_, loss) in alone.items())
    (largest, name), (median, _) = losses[-1], losses[size // 2]
    text = (
        f"the loss is finite; {name} has the largest one alone: {largest:.4g} (median {median:.4g})"
    )
    if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        text += "; batch norm used the statistics of each sample alone, so in the batch another one may be larger"
    return text


def _twice(batch: Any, row: int, size: int, is_list: bool) -> Any:
    if is_list:
        return [batch[row]] * 2
    return tree_map_only(
        Tensor, lambda value: value[[row, row]] if value.shape[:1] == (size,) else value, batch
    )
