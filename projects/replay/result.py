"""The result of a replay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.projects.replay.inspection import Inspection, find_difference


@dataclass
class Replay:
    """A step that was performed again.

    Attributes:
        run: the folder of the run, or the path of the capsule.
        iteration: the iteration of the step, counted from 0.
        start: the name of the checkpoint from which the replay started.
        first_iteration: the first iteration that the replay performed.
        differences: the settings, code, versions, device and processes that differ from those of the run.
        error: the error of the step; "" if it did not fail.
        inspection: the `Inspection` of this rank. ``batch``, ``losses``, ``gradients`` (parameter -> gradient before
            clipping), ``activations`` (an entry per call of a module) and ``samples`` (names) are taken from it.
        findings: the faults that each rank has found.
        on_the_way: a comparison of the logged values up to the step with those that the run has stored.
        failure: whether the step fails as in the capsule; "" without a capsule.
        samples_at_fault: what ``find_samples`` has found on each rank; "" if not requested.
        proof: a comparison of the state with the next checkpoint; "" if not requested.
        verdict: whether several executions agree; "" if not requested.
    """

    run: str
    iteration: int
    start: str
    first_iteration: int
    differences: list[str]
    error: str
    inspection: Inspection
    findings: list[dict[str, str]] = field(default_factory=list)
    failure: str = ""
    samples_at_fault: str = ""
    on_the_way: str = ""
    proof: str = ""
    verdict: str = ""

    def __post_init__(self) -> None:
        seen = self.inspection
        self.batch, self.losses, self.gradients = seen.batch, seen.losses, seen.gradients
        self.activations, self.samples = seen.outputs, [name for names in seen.samples for name in names]

    @property
    def bad_samples(self) -> list[str]:
        """The names of the samples with values that are not finite."""
        return [*dict.fromkeys(name for field in self.inspection.fields() for name in field.bad_samples)]

    @property
    def first_bad_module(self) -> str:
        """The first module whose output is not finite; "" if all outputs are finite."""
        return next((output.module for output in self.activations if not output.is_finite), "")

    @property
    def samples_of_first_bad_module(self) -> list[str]:
        """The samples for which this module's output is not finite; empty if its first dimension is not the sample."""
        return self.inspection.samples_of_first_bad_output()

    @property
    def first_bad_gradient(self) -> str:
        """The first parameter, in the order of the backward pass, whose gradient is not finite; "" if there is none."""
        return next((row.parameter for row in reversed(self.inspection.updates) if not row.grad_is_finite), "")

    @property
    def is_equal(self) -> bool:
        """Whether the replay equals the run, and all executions are equal."""
        found = (self.failure, self.on_the_way, self.proof, self.verdict)
        return not any(word in text for text in found for word in ("DIFFERENT", "different on", "transient"))

    def find(self) -> dict[str, str]:
        """The faults on this rank: name -> text."""
        found = {
            "the step has failed": self.error.partition(". ")[0],
            "not finite before the step": shortened(self.inspection.not_finite_before),
            "samples that are not finite": shortened(self.bad_samples),
            "first module whose output is not finite": self.first_bad_module,
            "  for": shortened(self.samples_of_first_bad_module),
            "first gradient that is not finite": self.first_bad_gradient,
        }
        return {name: text for name, text in found.items() if text}


def judge(
    first: Inspection, again: Inspection, other: Inspection | None = None, way: str = "", stored_is_equal: bool = True
) -> str:
    """Whether the executions of a step agree with each other and with the values that the run has stored.

    Args:
        first: the first execution.
        again: the second one, from a copy of the same state.
        other: an execution from the checkpoint; None if there was none.
        way: where the logged values of two executions from the checkpoint differ first, as text; "" if they are equal.
        stored_is_equal: whether the logged values equal those that the run has stored.
    """
    if where := find_difference(first, again):
        return f"transient: performed twice in place, the step differs in {where}"
    if other is None:
        return "reproducible: twice in place, every bit is equal"
    if where := find_difference(first, other):
        return f"transient: performed twice from the checkpoint, the step differs in {where}{way}"
    if not stored_is_equal:
        return "different on this machine: three executions agree, but not with what the run has stored"
    return "reproducible: twice in place and once more from the checkpoint, every bit is equal"


def compare_failure(capsule: Mapping[str, Any], result: Replay) -> str:
    """Whether the step fails as in the capsule, and how many of its losses are equal; as text."""
    losses = {name: loss.item() for name, loss in result.losses.items()}
    same = [name for name, loss in capsule["losses"].items() if repr(losses.get(name)) == repr(loss)]
    count = f"; {len(same)} of {len(capsule['losses'])} losses equal those of the run" if capsule["losses"] else ""
    if result.error.partition(":")[0] == capsule["error"].partition(":")[0]:
        return f"it has come back{count}"
    error = capsule["error"].partition(". ")[0]
    return f"DIFFERENT: in the run it was {error:.200}{count}. From the checkpoint: {capsule['command']}"


def shortened(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
