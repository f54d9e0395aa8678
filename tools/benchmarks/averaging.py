"""The time of an average of the weights, compared with the one operation that it needs."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from benchmarks.job import one_thread
from benchmarks.measure import Row, Runner, alternate, compare
from trainkit.engine import TrainerBase
from trainkit.engine.hooks import EMAHook

_DECAY = 0.999


class ManyTensors(nn.Module):
    """Many parameters of 64 x 64 numbers, as in small models; larger parameters would hide the overhead."""

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tensors = nn.ParameterList(
            torch.randn(64, 64, generator=generator) for _ in range(count)
        )


class _Untrained(TrainerBase):
    """A trainer for the hook, which does not train."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def run_step(self) -> None:
        pass


def ema(
    rounds: int = 31, *, scratch: Path, updates: int = 100, num_tensors: int = 318
) -> list[Row]:
    """The after_step of an `EMAHook` compared with torch._foreach_lerp_, and torch's own averaged model."""
    model = ManyTensors(num_tensors)
    trainer, hook = _Untrained(model), EMAHook(_DECAY)
    trainer.register_hooks([hook])
    trainer.train(0, 1)  # this makes the average; its first update copies
    sources = [parameter.detach() for parameter in model.parameters()]
    averages = [source.clone() for source in sources]
    averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(_DECAY))
    averaged.update_parameters(model)

    def lerp() -> None:
        torch._foreach_lerp_(averages, sources, 1 - _DECAY)

    runners: dict[str, Runner] = {
        "EMAHook": lambda: _seconds(hook.after_step, updates),
        "AveragedModel": lambda: _seconds(
            lambda: averaged.update_parameters(model), max(1, updates // 10)
        ),
        "one _foreach_lerp_": lambda: _seconds(lerp, updates),
    }
    with one_thread():
        found = alternate(runners, rounds)
    tensors = f"EMA of {num_tensors} tensors"
    note = "tensors of 64 x 64"
    return [
        compare(f"{tensors}: EMAHook", found, "EMAHook", "one _foreach_lerp_", 1.3, note=note),
        compare(
            f"{tensors}: torch's AveragedModel",
            found,
            "AveragedModel",
            "one _foreach_lerp_",
            note=note,
        ),
    ]


def _seconds(update: Callable[[], None], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        update()
    return (time.perf_counter() - begin) / times
