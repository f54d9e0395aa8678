"""The arguments of the optimizer in a config."""

from typing import Any

from trainkit.config.config import CfgNode


def optimizer_argument(solver: CfgNode, name: str) -> tuple[str, Any]:
    """The key and the value of an optimizer argument: SOLVER.OPTIMIZER wins over SOLVER.

    Args:
        name: the name of the argument, such as LR, which is BASE_LR in SOLVER.
    """
    key = "BASE_LR" if name == "LR" else name
    own = None if isinstance(solver.OPTIMIZER, str) else solver.OPTIMIZER.get(name)  # a text is its name
    return (f"SOLVER.{key}", solver.get(key)) if own is None else (f"SOLVER.OPTIMIZER.{name}", own)
