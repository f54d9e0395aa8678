"""The default for classes with a state."""

from collections.abc import Mapping
from typing import Any


def refuse_state(owner: object, state: Mapping[str, Any]) -> None:
    """The default ``load_state_dict``.

    Raises:
        NotImplementedError: there is a state, but the class of ``owner`` does not override ``load_state_dict``.
    """
    if state:
        raise NotImplementedError(
            f"{type(owner).__name__} saves a state ({', '.join(state)}) but has no load_state_dict; define both"
        )
