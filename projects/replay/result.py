"""The result of a replay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.projects.replay.checkpoints import Values, compare_values
from trainkit.projects.replay.inspection import Inspection, Part, find_difference


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
        values: the values that the replay has logged, up to the step.
        findings: the faults that each rank has found.
        on_the_way: a comparison of these values with those that the run has stored.
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
    values: Values = field(default_factory=dict)
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
        """Whether the replay equals the run, and all executions are equal, as far as they were compared."""
        found = (self.failure, self.on_the_way, self.proof, self.verdict)
        return not any(word in text for text in found for word in ("DIFFERENT", "differs"))

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


@dataclass
class Elsewhere:
    """An execution of the step in a new process, from the checkpoint; ``reason`` says why there was none."""

    parts: Sequence[Part] = ()
    values: Values = field(default_factory=dict)
    reason: str = ""


def judge(first: Inspection, again: Inspection, values: Values, elsewhere: Elsewhere, equals_run: bool | None) -> str:
    """Whether the executions of a step agree with each other, and with the values that the run has stored.

    Args:
        first: the first execution; ``values``: what was logged up to it.
        again: another one in the same process, from a copy of the state before the step.
        equals_run: whether the values equal those that the run has stored; None: nothing of the data was compared.
    """
    here = find_difference(first.parts, again.parts)
    there = find_difference(first.parts, elsewhere.parts) if not elsewhere.reason else ""
    same = f"in this process it differs in {here}" if here else "repeated in this process, every bit is equal"
    new = f"in a new process it differs in {there}" if there else "in a new process, every bit is equal"
    if there and (change := compare_values(values, elsewhere.values)[1]):
        new += f", since iteration {change[0]} ({change[1]})"
    if elsewhere.reason:
        new = f"not repeated in a new process: {elsewhere.reason}"
    if here and there:
        start = "transient (hardware, a race, a clock, random numbers of another source)"
    elif here:
        start = "with a state that no checkpoint holds (a counter, a cache, an iterator), not a fault of the machine"
        start = start if not elsewhere.reason else "transient, or with a state that no checkpoint holds"
    elif there:
        start = "other in each process (the order of a set, an address, the environment), not a fault of the machine"
    elif equals_run is False:
        start = "different on this machine: the executions agree, but the run has stored other values"
    elif equals_run is None:
        start = "reproducible, but not compared with the run, which has stored no value of the data (--prove compares)"
    else:
        start = "reproducible"
    return f"{start}: {same}; {new}"


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
