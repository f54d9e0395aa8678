"""Averaged weights in a checkpoint.

A file that was chosen by the score of averaged weights holds these under ``model``, and those that the run goes on with
under ``trained_model``; its entry ``evaluated`` says so: "ema", or "model" where the model's own were scored.
"""

from collections.abc import Mapping
from typing import Any

EVALUATED, TRAINED = "evaluated", "trained_model"
AVERAGED_PATH = "trainer.hooks.EMAHook.model"


def averaged_weights(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The weights that an `EMAHook` has averaged, in the state that a file holds; None if there are none.

    Of several such hooks, the first one's.
    """
    found: Any = state
    for key in AVERAGED_PATH.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
