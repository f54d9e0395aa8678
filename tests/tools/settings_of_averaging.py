"""Averaged weights."""

from collections.abc import Callable, Sequence
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from projects.digits import DigitsCNN, DigitsTransform, load_split
from tests.tools.digits_run import Run
from tests.tools.settings import LOSS, Setting, all_of, hook, logs, no_metric

SAVE_ALL = ["SOLVER.CHECKPOINT_PERIOD", 1]


def average(run: Run, name: str = "model_final") -> dict[str, Tensor]:
    """Of the `EMAHook`, in a checkpoint."""
    return run.checkpoint(name)["trainer"]["hooks"]["EMAHook"]["model"]


def average_moves(weights: dict[int, float], kind: Sequence[str] = (".weight", ".bias")) -> Callable[[Run], None]:
    """In these iterations, the average moves by such a part of the way towards the model; in runs of SAVE_ALL."""

    def effect(run: Run) -> None:
        for iter, weight in weights.items():
            name = f"model_{iter:07d}"
            before, now, model = (
                average(run, f"model_{iter - 1:07d}"),
                average(run, name),
                run.checkpoint(name)["model"],
            )
            for key in (key for key in model if key.endswith(tuple(kind))):
                torch.testing.assert_close(now[key], before[key].lerp(model[key], weight), rtol=1e-6, atol=1e-6)

    return effect


def buffers_are_copied(run: Run) -> None:
    model, averaged = run.checkpoint()["model"], average(run)
    assert all(torch.equal(averaged[key], model[key]) for key in model if "running" in key)


def loss_of(weights: dict[str, Tensor], num_samples: int = 200) -> Any:
    """The loss on the validation data, computed anew."""
    model = DigitsCNN(width=2).eval()
    model.load_state_dict(weights)
    batch = default_collate([DigitsTransform()(sample) for sample in load_split("val")[:num_samples]])
    with torch.no_grad():
        loss = F.cross_entropy(model(batch), batch["label"], label_smoothing=0.1).item()
    return pytest.approx(loss, rel=1e-5)


def evaluates(averaged: str | None, trained: str | None) -> Callable[[Run], None]:
    """At the end these metrics are those of the averaged weights, and of the weights that are trained."""

    def effect(run: Run) -> None:
        if averaged is not None:
            assert run.metric(averaged)[12] == loss_of(average(run))
        if trained is not None:
            assert run.metric(trained)[12] == loss_of(run.checkpoint()["model"])

    return effect


AVERAGING = [
    Setting("EMAHook", hook("EMAHook", DECAY=0.5), average_moves({1: 0.5, 5: 0.5, 10: 0.5}), SAVE_ALL),
    *(
        Setting(f"EMAHook: {name}", hook("EMAHook", **arguments), effect, [*SAVE_ALL, *hook("EMAHook", DECAY=0.9)])
        for name, arguments, effect in (
            (
                "annealing",
                {"KIND": "annealing", "DECAY": 0.9, "GAMMA": 4},
                average_moves({1: 4 / 5, 2: 4 / 6, 5: 4 / 9, 10: 4 / 14}),
            ),
            (
                "warm-up",
                {"KIND": "warmup", "DECAY": 0.9, "GAMMA": 4},
                average_moves({iter: 0.1 + 0.9 * exp(-(1 + iter) / 4) for iter in (1, 2, 5, 10)}),
            ),
            ("mean", {"KIND": "mean"}, average_moves({1: 1 / 2, 2: 1 / 3, 5: 1 / 6, 10: 1 / 11})),
            ("interval", {"DECAY": 0.9, "INTERVAL": 2}, average_moves({1: 0, 2: 0.1, 5: 0, 6: 0.1, 9: 0, 10: 0.1})),
            ("begin", {"DECAY": 0.9, "BEGIN": "1ep"}, average_moves({1: 1, 2: 1, 5: 0.1, 10: 0.1})),
            (
                "averaged buffers",
                {"DECAY": 0.9, "BUFFERS": "average"},
                average_moves({1: 0.1, 5: 0.1, 10: 0.1}, ["running_mean", "running_var"]),
            ),
        )
    ),
    Setting(
        "EMAHook: copied buffers",
        hook("EMAHook", DECAY=0.9, BUFFERS="copy"),
        buffers_are_copied,
        hook("EMAHook", DECAY=0.9, BUFFERS="average"),
    ),
    Setting(
        "EMAHook: evaluate ema",
        hook("EMAHook", DECAY=0.9),
        all_of(evaluates(LOSS, None), no_metric(f"raw/{LOSS}"), logs("Evaluating the averaged weights")),
        hook("EMAHook", DECAY=0.9, EVALUATE="raw"),
    ),
    Setting(
        "EMAHook: evaluate raw",
        hook("EMAHook", DECAY=0.9, EVALUATE="raw"),
        all_of(evaluates(None, LOSS), no_metric(f"raw/{LOSS}")),
        hook("EMAHook", DECAY=0.9),
    ),
    Setting(
        "EMAHook: evaluate both",
        hook("EMAHook", DECAY=0.9, EVALUATE="both"),
        evaluates(LOSS, f"raw/{LOSS}"),
        hook("EMAHook", DECAY=0.9),
    ),
]
