"""Properties of a trainer that forward to one of its parts."""

from operator import attrgetter
from typing import Any

from trainkit.utils.device import is_part_of


def forwarded(path: str, doc: str = "") -> Any:
    """A property that reads and sets an attribute of a part: ``forwarded("_trainer.model")``."""
    owner, _, name = path.rpartition(".")
    owner_of = attrgetter(owner)

    def set_value(trainer: Any, value: Any) -> None:
        check_exchange(trainer, name, value)
        setattr(owner_of(trainer), name, value)

    return property(attrgetter(path), set_value, doc=doc)


def check_exchange(trainer: Any, name: str, new: Any) -> None:
    """Raises RuntimeError if ``new`` would replace the model or the optimizer (``name``) of a running trainer."""
    if trainer.status != "running" or name not in ("model", "optimizer"):
        return
    own = getattr(trainer, name)
    if is_part_of(new, own) if name == "model" else new.param_groups is own.param_groups:
        return
    raise RuntimeError(
        f"trainer.{name} cannot be replaced during a run: hooks, the schedule and the checkpointer would keep the old "
        f"{name}. Change it in place (load_state_dict), or build the other one before training (build_{name} of "
        "DefaultTrainer)"
    )
