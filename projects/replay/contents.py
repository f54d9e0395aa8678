"""The differences between the states of two checkpoints, bit by bit."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

CLOCK_READINGS = frozenset(
    ["time", "data_time", "rank_data_time", "eta_seconds", "samples_per_sec", "tokens_per_sec", "mfu_pct"]
)
_TRAINER, _WRITER = r"(ranks/\d+/)?trainer", r"hooks/PeriodicWriter(#\d+)?/writers/\d+/state"
_SCALAR = re.compile(rf"{_TRAINER}/(storage/\w+|{_WRITER}/taken)/(?P<name>\w+)")
_OF_FILES = re.compile(rf"{_TRAINER}/{_WRITER}/(length|sizes|id)|{_TRAINER}/(origin|hooks/RunRecord/parents)")


def is_of_the_clock(path: str) -> bool:
    """Whether an entry differs between equal runs: clock readings, sizes of files with them, how a run started."""
    scalar = _SCALAR.fullmatch(path)
    return (scalar is not None and scalar["name"] in CLOCK_READINGS) or _OF_FILES.fullmatch(path) is not None


def differing(
    left: Any,
    right: Any,
    path: str = "",
    skip: Callable[[Any, str], bool] = lambda key, path: False,
    seen: set[tuple[int, int]] | None = None,
) -> Iterator[str]:
    """Each place where two nested values differ, with a description; values are compared bit by bit.

    Args:
        path: the path of both values, with names joined by "/".
        skip: called with the key and the path of each entry of a mapping; True leaves the entry out.
        seen: the pairs of objects that were compared; many ways may lead to one object.
    """
    seen = set() if seen is None else seen
    if isinstance(left, Mapping | list | tuple):
        if (id(left), id(right)) in seen:
            return
        seen.add((id(left), id(right)))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if difference := _difference_of_tensors(_dense(left), _dense(right)):
            yield f"{path}: {difference}"
    elif isinstance(left, Mapping) and isinstance(right, Mapping):  # of any class: programs may use different classes
        for key in [*left, *(key for key in right if key not in left)]:
            here = f"{path}/{key}".lstrip("/")
            if skip(key, here):
                continue
            if key not in left or key not in right:
                yield f"{here}: only in the {'first' if key in left else 'second'}"
            else:
                yield from differing(left[key], right[key], here, skip, seen)
    elif type(left) is not type(right):
        yield f"{path}: {type(left).__name__} and {type(right).__name__}"
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{path}: {len(left)} and {len(right)} entries"
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from differing(*pair, f"{path}/{index}", skip, seen)
    elif repr(left) != repr(right):  # repr shows every bit of a float, but NaN equals NaN
        yield f"{path}: {left!r:.60} and {right!r:.60}"


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().dequantize() if tensor.is_quantized else tensor.detach().to_dense()


def _difference_of_tensors(left: Tensor, right: Tensor) -> str:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return " and ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in (left, right))
    if left.is_meta or right.is_meta:
        return ""  # in a rank's own part, for a sharded tensor, which is compared in the part of all ranks
    left, right = left.cpu(), right.cpu()  # a replay compares the state on a GPU with a file
    bits = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (left, right)]  # [values, bytes]
    num_different = int((bits[0] != bits[1]).any(dim=1).sum())
    if not num_different:
        return ""
    size = "" if left.is_complex() else f", by at most {(left.double() - right.double()).abs().max().item():.3g}"
    return f"{num_different} of {left.numel()} values{size}"
