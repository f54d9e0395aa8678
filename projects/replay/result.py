"""The result of a replay, and its text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainkit.projects.replay.checkpoints import Values
from trainkit.projects.replay.inspection import Inspection, Part, find_difference

from trainkit.utils.logger import format_table


@dataclass
class Replay:
    """A step that was performed again. ``str()`` of it is the report.

    Attributes:
        run: the folder of the run, or the path of the capsule.
        start: the name of the checkpoint from which the replay started; ``first_iteration`` is the one after it.
        differences: the settings, code, versions, machine and processes that differ from those of the run.
        inspection: that of this rank; ``batch``, ``losses``, ``gradients`` and ``samples`` (names) are taken from it.
        changed_files: the files of the batch of this rank that have changed since the run.
        findings: the faults that each rank has found: name -> text.
        failure, samples_at_fault, on_the_way, proof, verdict: the texts of the report with these names; "" if there is
            nothing to compare, or it was not requested.
    """

    run: str
    iteration: int
    start: str
    first_iteration: int
    differences: list[str]
    error: str
    inspection: Inspection
    values: Values = field(default_factory=dict)
    changed_files: list[str] = field(default_factory=list)
    findings: list[dict[str, str]] = field(default_factory=list)
    failure: str = ""
    samples_at_fault: str = ""
    on_the_way: str = ""
    proof: str = ""
    verdict: str = ""

    def __post_init__(self) -> None:
        seen = self.inspection
        self.batch, self.losses, self.gradients = seen.batch, seen.losses, seen.gradients
        self.samples = [name for names in seen.samples for name in names]

    @property
    def first_bad_module(self) -> str:
        """The first module whose output is not finite; "" if all outputs are finite."""
        return next((module for module, largest in self.inspection.outputs if not math.isfinite(largest)), "")

    @property
    def first_bad_gradient(self) -> str:
        """The first parameter, in the order of the backward pass, whose gradient is not finite; "" if there is none."""
        return next((name for name, grad in reversed(self.gradients.items()) if not grad.isfinite().all()), "")

    @property
    def is_equal(self) -> bool:
        """Whether the replay equals the run, and all executions are equal, as far as they were compared."""
        text = f"{self.failure} {self.on_the_way} {self.proof} {self.verdict}"
        return "DIFFERENT" not in text and "differs" not in text

    def find(self) -> dict[str, str]:
        """The faults on this rank: name -> text."""
        found = {
            "the step has failed": self.error.partition(". ")[0],
            "files of the batch that have changed since the run": _shortened(self.changed_files),
            "not finite before the step": _shortened(self.inspection.not_finite_before),
            "samples that are not finite": _shortened(self.inspection.bad_samples),
            "first module whose output is not finite": self.first_bad_module,
            "  for": _shortened(self.inspection.samples_of_first_bad_output),
            "first gradient that is not finite": self.first_bad_gradient,
        }
        return {name: text for name, text in found.items() if text}

    def __str__(self) -> str:
        done, gradients = self.iteration - self.first_iteration, self.gradients.items()
        tables = [
            (("batch", "shape", "dtype", "min", "max"), self.inspection.fields()),
            (("loss", "value"), [(name, loss.item()) for name, loss in self.losses.items()]),
            (("module", "largest output"), self.inspection.outputs),
            (("parameter", "gradient's norm"), [(name, grad.float().norm().item()) for name, grad in gradients]),
        ]
        lines = [f"Iteration {self.iteration} of {self.run}, from {self.start} and {done} iterations after it", ""]
        lines += [f"not as in the run: {text}" for text in self.differences]
        lines += [] if self.differences else ["settings, code, versions and machine are as in the run"]
        lines += [f"\n{format_table(rows, names, floatfmt='.4g', missingval='-')}" for names, rows in tables]
        lines += ["", f"{len(self.samples)} samples: {_shortened(self.samples)}"]
        for rank, faults in enumerate(self.findings):
            lines += [f"rank {rank}:"] if faults and len(self.findings) > 1 else []
            lines += [f"{name}: {text}" for name, text in faults.items()]
        checks = {"failure": self.failure, "samples": self.samples_at_fault, "on the way": self.on_the_way}
        checks |= {"proof": self.proof, "verdict": self.verdict}
        return "\n".join([*lines, *(f"{name}: {text}" for name, text in checks.items() if text)])


def _shortened(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def judge(first: Inspection, again: Inspection, elsewhere: list[Part] | str, equals_run: bool | None) -> str:
    """Whether the executions of a step agree with each other, and with the values that the run has stored.

    Two are in this process, from the same state; ``elsewhere``: the parts of one in a new process, or why there was
    none; ``equals_run``: whether the values equal those of the run, None if nothing of the data was compared.
    """
    is_new = not isinstance(elsewhere, str)
    here, there = find_difference(first.parts, again.parts), find_difference(first.parts, elsewhere) if is_new else ""
    same = f"in this process it differs in {here}" if here else "repeated in this process, every bit is equal"
    new = f"in a new process it differs in {there}" if there else "in a new process, every bit is equal"
    if here and not is_new:
        start = "transient, or with a state that no checkpoint holds"
    elif here:
        start = "with a state that no checkpoint holds (a counter, a cache, an iterator)"
        start = "transient (hardware, a race, a clock, random numbers of another source)" if there else start
    elif there:
        start = "other in each process (the order of a set, an address, the environment)"
    elif equals_run is None:
        start = "reproducible, but not compared with the run, which has stored no value of the data (--prove compares)"
    else:
        start = "reproducible" if equals_run else "different on this machine: the run has stored other values"
    return f"{start}: {same}; {new if is_new else f'not repeated in a new process: {elsewhere}'}"
