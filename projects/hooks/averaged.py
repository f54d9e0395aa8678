"""Averaged weights in a checkpoint.

If a file was chosen by the score of averaged weights, its entry ``model`` is the average, and ``trained_model`` has the
weights for resuming. The entry ``evaluated`` says which weights were scored: "ema" for the average, "model" for the
model's own.
"""

from collections.abc import Mapping
from typing import Any

EVALUATED, TRAINED = "evaluated", "trained_model"
AVERAGED_PATH = "trainer.hooks.EMAHook.model"


def averaged_weights(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The average of the (first) `EMAHook` in the state of a file; None if there is none."""
    found: Any = state
    for key in AVERAGED_PATH.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
