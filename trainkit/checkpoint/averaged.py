"""Averaged weights in a checkpoint.

If a file was chosen by the score of averaged weights, its ``model`` is the average, and its ``trained_model`` the
weights for resuming. Its entry ``evaluated`` is "ema" then, and "model" if the model's own weights were scored.
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
