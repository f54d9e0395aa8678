"""Values that are not finite: of the model before it is saved, and the error that names them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@torch.no_grad()
def non_finite_names(model: nn.Module) -> list[str]:
    """Names of parameters and buffers with a value that is not finite on this rank; waits for the device."""
    finite: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        finite.setdefault(local.device, {})[name] = local.isfinite().all()
    return [
        name
        for by_name in finite.values()
        for name, good in zip(by_name, torch.stack([*by_name.values()]).tolist(), strict=True)  # reads each device once
        if not good
    ]


def describe_failure(what: str, iter: int, values: Mapping[str, Any], more: str = "") -> str:
    numbers = {name: float(value) for name, value in values.items() if not name.startswith("[")}
    return (
        f"the {what} not finite in iteration {iter}: {numbers}{more}. Lower the learning rate, clip gradients, or look "
        "at the batch of this iteration"
    )


def raise_failure(by_rank: Sequence[str | None]) -> None:
    """Raise the first failure, if there is one; every rank passes the same list.

    Raises:
        FloatingPointError: a rank has a failure; with several ranks the message names it.
    """
    for rank, failure in enumerate(by_rank):
        if failure is not None:
            raise FloatingPointError(failure if len(by_rank) == 1 else f"{failure} (on rank {rank})")
