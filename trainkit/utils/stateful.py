"""What every base class with a state does by default."""

from collections.abc import Mapping
from typing import Any


def refuse_state(owner: object, state: Mapping[str, Any]) -> None:
    """The ``load_state_dict`` of a class that has no state.

    Raises:
        NotImplementedError: there is a state, and the class of ``owner`` does not say how to load it.
    """
    if state:
        raise NotImplementedError(
            f"{type(owner).__name__} saves a state ({', '.join(state)}) but has no load_state_dict; define both"
        )
