"""Letting go of gradients."""

from torch.optim import Optimizer


def drop_gradients(optimizer: Optimizer) -> None:
    """``optimizer.zero_grad()``; without the range for profilers that takes most of its time, if it is torch's own."""
    if getattr(type(optimizer), "zero_grad", None) is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
