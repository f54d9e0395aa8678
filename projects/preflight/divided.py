"""What a draw of samples can say about the division of the data."""

import math
from collections import Counter
from typing import NamedTuple

READ_SEC = 10.0  # for TRAIN, and for VAL and TEST together
_IS_LEAK = 0.01  # share of the samples of VAL and TEST that are in TRAIN


class Draw(NamedTuple):
    """``of_train`` samples were drawn from TRAIN, which has ``train``, and ``others`` from VAL and TEST.

    Each sample that is in TRAIN too is found with a chance of ``of_train / train``.
    """

    of_train: int
    train: int
    others: int

    @property
    def limit(self) -> float:
        """More samples than this are found only if more than 1 % are in TRAIN: three deviations above the mean."""
        chance = self.of_train / self.train
        mean = _IS_LEAK * self.others * chance
        return mean + 3 * math.sqrt(mean * (1 - chance))

    @property
    def smallest_leak(self) -> float:
        """The share that is found almost always: its mean is three deviations above the limit."""
        chance = self.of_train / self.train
        half = 1.5 * math.sqrt(1 - chance)  # of three deviations of a mean of 1
        root = half + math.sqrt(half**2 + self.limit)
        return root**2 / (self.others * chance)


def missing(here: Counter[int], there: Counter[int], is_whole: bool) -> list[int]:
    """The classes that are here and not there.

    If only a part of ``there`` was drawn, a class counts if ten samples of it were to be expected.
    """
    num_here = here.total()
    num_there = there.total()
    found = []
    for label in sorted(here):
        expected = num_there * here[label] / num_here
        if label not in there and (is_whole or expected >= 10):
            found.append(label)
    return found
