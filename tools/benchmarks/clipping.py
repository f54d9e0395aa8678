"""Clipping of gradients, beside torch's functions and multi-tensor operations.

3,000 gradients have 16 x 16 numbers, 24 have 1024 x 1024. The clipper of trainkit also returns the
norm of all gradients.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from benchmarks.measure import Comparison, compare, one_thread, timed
from trainkit.solver.clipping import GradientClipper

ROUNDS = 31
LIMIT = 1e6  # nothing is changed, so every round has the same gradients


def clip_value_by_hand(parameters: list[Tensor]) -> None:
    clip_grad_value_(parameters, LIMIT)


def clip_norm_by_hand(parameters: list[Tensor]) -> None:
    clip_grad_norm_(parameters, LIMIT)


def clip_each_norm_by_hand(parameters: list[Tensor]) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (LIMIT / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))


TWINS: dict[str, Callable[[list[Tensor]], None]] = {
    "value": clip_value_by_hand,
    "norm": clip_each_norm_by_hand,
    "full_model": clip_norm_by_hand,
}
"""CLIP_TYPE -> the same by hand."""

NAMES = {
    "value": "each number",
    "norm": "the norm of each parameter",
    "full_model": "the norm of all",
}

# name -> number of parameters, and their width
SIZES = {"3,000 tensors": (3000, 16), "24 tensors": (24, 1024)}
QUICK_SIZES = {"3 tensors": (3, 16)}


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    sizes = QUICK_SIZES if quick else SIZES
    comparisons = []
    with one_thread():
        for name, (count, width) in sizes.items():
            parameters = make_parameters(count, width)
            for clip_type, twin in TWINS.items():
                clipper = GradientClipper(clip_type, LIMIT)
                others = {"trainkit": timed(partial(clipper, parameters))}
                work = f"{NAMES[clip_type]}, {name}"
                run_twin = timed(partial(twin, parameters))
                comparisons.append(compare(work, twin, run_twin, others, rounds))
    return comparisons


def make_parameters(count: int, width: int) -> list[Tensor]:
    parameters = []
    for _ in range(count):
        parameter = torch.zeros(width, width, requires_grad=True)
        parameter.grad = torch.ones(width, width)
        parameters.append(parameter)
    return parameters
