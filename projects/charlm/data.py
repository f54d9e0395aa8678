"""Windows of text."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from projects.charlm.corpus import python_corpus
from trainkit.data import DatasetCatalog

WINDOW = 128  # characters that the model sees at once
NUM_EVALUATED = 1_000  # windows of the texts for validation and testing


class TextWindows(Dataset[dict[str, Any]]):
    """Windows of a text, at equal distances from its start to its end.

    A sample is a dict with ``tokens``, int64 ``[WINDOW]``, and ``targets``, the same text shifted by one character.

    Args:
        tokens: the tokens of the text, uint8 ``[length]``.
        num_windows: default is the largest number without an overlap.

    Raises:
        ValueError: ``num_windows`` is larger than that.
    """

    def __init__(self, tokens: np.ndarray, num_windows: int | None = None) -> None:
        most = max(len(tokens) - 1, 0) // WINDOW
        if num_windows is None:
            num_windows = most
        if num_windows > most:
            raise ValueError(
                f"num_windows is {num_windows}, but {len(tokens)} characters give {most} at most"
            )
        self._tokens = tokens
        self._num_windows = num_windows

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} windows, got index {index}")
        start = index * len(self._tokens) // len(self)
        end = start + WINDOW + 1
        window = torch.from_numpy(self._tokens[start:end].astype(np.int64))
        return {"tokens": window[:-1], "targets": window[1:]}


def load_windows(split: str, num_windows: int | None = None) -> TextWindows:
    """Windows of "train", "val" or "test" of the running Python's library."""
    return TextWindows(python_corpus().splits[split], num_windows)


DatasetCatalog.register("stdlib_train", partial(load_windows, "train"))
DatasetCatalog.register("stdlib_val", partial(load_windows, "val", NUM_EVALUATED))
DatasetCatalog.register("stdlib_test", partial(load_windows, "test", NUM_EVALUATED))
