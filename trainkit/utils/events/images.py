"""Images and histograms in a form that every writer can show."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.utils.device import runs_ahead


class Image(NamedTuple):
    name: str
    tensor: Tensor
    iter: int


class Histogram(NamedTuple):
    name: str
    iter: int
    raw: dict[str, Any]  # the keyword arguments of SummaryWriter.add_histogram_raw


def showable_image(name: str, image: Any, warn: Callable[[str], None]) -> Any:
    """``image`` itself if every writer can show it, else a copy that they can show.

    Args:
        name: for messages.
        warn: called with a warning.

    Raises:
        ValueError: see `EventStorage.put_image`.
    """
    try:
        tensor = torch.as_tensor(image)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"image {name!r} must be a tensor or an array, got {type(image).__name__}: {error}"
        ) from error
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3, 4) or tensor.numel() == 0:
        raise ValueError(
            f"image {name!r} has the shape {list(tensor.shape)}; accepted: [channel, height, "
            "width] with 1, 3 or 4 channels, see permute() and unsqueeze()"
        )
    if tensor.dtype == torch.uint8:
        return image
    if tensor.dtype == torch.bool:
        return tensor.detach().float()
    if not tensor.is_floating_point():
        raise ValueError(
            f"image {name!r} has the type {tensor.dtype}; accepted: float in [0, 1], uint8 in "
            "[0, 255], bool"
        )
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.detach().float()  # NumPy has no bfloat16
        image = tensor
    if not runs_ahead(tensor.device):  # else the check would wait for the device
        if tensor.isfinite().all():
            return image
        warn(f"The image {name!r} has pixels that are not finite; they are shown as 0 or 1")
    return tensor.detach().nan_to_num(nan=0.0, posinf=1.0, neginf=0.0)


def histogram_of(
    name: str, hist_tensor: Any, bins: int, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """The keyword arguments of SummaryWriter.add_histogram_raw, for the finite values of a tensor.

    None if there is no finite value. Synchronizes its device.

    Args:
        name: for messages.
        warn: called with a warning.

    Raises:
        ValueError: see `EventStorage.put_histogram`.
    """
    if bins < 1:
        raise ValueError(f"histogram {name!r} needs at least 1 bin, got bins={bins!r}")
    try:
        given = torch.as_tensor(hist_tensor).detach()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"histogram {name!r} must be of a tensor or an array, got "
            f"{type(hist_tensor).__name__}: {error}"
        ) from error
    if given.is_complex():
        raise ValueError(f"histogram {name!r} is of complex numbers; give their abs() or real part")
    values = given.float().flatten().cpu()
    is_finite = values.isfinite()
    if not is_finite.all():
        values = values[is_finite]
        warn(f"The histogram {name!r} leaves out values that are not finite")
    if values.numel() == 0:
        warn(f"The histogram {name!r} has no finite value, so it is left out")
        return None
    low = values.min().item()
    high = values.max().item()
    edges = torch.linspace(low, high, bins + 1, device="cpu")
    counts = torch.histc(values, bins=bins)
    return {
        "min": low,
        "max": high,
        "num": values.numel(),
        "sum": values.sum().item(),
        "sum_squares": values.square().sum().item(),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
    }
