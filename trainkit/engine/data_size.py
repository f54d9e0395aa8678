"""The size of the training data of a run, saved to be compared when the run is resumed."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainkit.data.protocol import samples_of
from trainkit.utils import comm
from trainkit.utils.periods import check_number, check_period


@dataclass(frozen=True)
class DataSize:
    """What positions in the data and lengths in epochs depend on; None: not known.

    Attributes:
        samples: in one pass over the data, of all ranks.
        batch: samples of one iteration, of all ranks.
        epoch: iterations of one pass, not rounded.
    """

    samples: int | None = None
    batch: int | None = None
    epoch: Fraction | None = None

    def state_dict(self) -> dict[str, Any]:
        epoch = None
        if self.epoch is not None:
            epoch = [self.epoch.numerator, self.epoch.denominator]
        return {"samples": self.samples, "batch": self.batch, "epoch": epoch}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "DataSize":
        """What `state_dict` gave; from {} nothing is known."""
        epoch = state.get("epoch")
        if epoch is not None:
            epoch = Fraction(*epoch)
            check_number("epoch", epoch.numerator, "(0, inf)")
        for name in ("samples", "batch"):
            if state.get(name) is not None:
                check_period(name, state[name])
        return cls(state.get("samples"), state.get("batch"), epoch)


def data_size_of(
    loader: Any, accumulation_steps: int, epoch_length: int | Fraction | None
) -> DataSize:
    """The size of the data of a trainer with this loader."""
    samples, batch_of_rank = samples_of(loader)
    batch = None
    if batch_of_rank is not None:
        batch = batch_of_rank * comm.get_data_world_size() * accumulation_steps
    epoch = None
    if epoch_length is not None:
        epoch = Fraction(epoch_length)
    return DataSize(samples, batch, epoch)


def describe_changes(new: DataSize, old: DataSize) -> list[tuple[str, str, str, str]]:
    """A row of a table for each size that is known and differs.

    Returns:
        (what, its value in this run, its value in the checkpoint, what happens) for each.
    """
    happens = {
        "samples": (
            "samples per epoch",
            "the position is looked up in another order: until this epoch ends, some samples "
            "come twice and some are left out",
        ),
        "batch": ("samples per iteration", "the position counts samples, so none is left out"),
        "epoch": ("iterations per epoch", "the number of the epoch is counted with the new length"),
    }
    rows = []
    for name, (what, meaning) in happens.items():
        here = getattr(new, name)
        there = getattr(old, name)
        if here is not None and there is not None and here != there:
            rows.append((what, _number(here), _number(there), meaning))
    return rows


def _number(value: int | Fraction) -> str:
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    return str(value)
