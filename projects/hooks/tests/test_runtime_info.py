"""What `RuntimeInfo` and `Throughput` say about a run."""

import time

import pytest
import torch
from torch import nn
from trainkit.projects.hooks.runtime_info import peak_tflops_of

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Weight, metrics_by_worker, scalars, sgd
from tests.two_ranks import on_two_ranks
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import LRScheduler, RuntimeInfo, Throughput
from trainkit.engine.step import SimpleTrainer


def test_the_log_says_how_long_the_run_is_and_names_are_those_of_the_table_at_the_start(
    caplog, tmp_path
):
    caplog.set_level("INFO")
    options = ("HOOKS", [{"NAME": "RuntimeInfo"}], "SOLVER.ACCUMULATION_STEPS", 2)
    trainer = DefaultTrainer(
        tiny_cfg(tmp_path, *options, "SOLVER.PARAM_GROUPS.BIAS_LR_FACTOR", 2.0)
    )
    trainer.train(0, 1)
    [text] = [text for text in caplog.messages if text.startswith("This run: ")]
    assert "1 iterations = 0.4 epochs of 2.5;" in text
    assert "world size 1;" in text
    assert "parameter group 'layers weight';" in text
    assert "16 samples per iteration;" in text
    assert "seed 1;" in text
    assert "74 of 74 parameters" in text
    [table] = [message for message in caplog.messages if message.startswith("Parameter groups:")]
    named = {line.split("|")[1].strip() for line in table.splitlines()[3:]}
    assert len(named) > 1
    assert {
        name.removeprefix("lr/") for name in trainer.storage.latest() if name.startswith("lr/")
    } == named


def test_the_rate_that_each_parameter_group_used_is_stored_by_its_name_and_the_momentum_once():
    weights = [torch.nn.Parameter(torch.ones(())) for _ in range(2)]
    model = Weight()
    model.others = torch.nn.ParameterList(weights)
    groups = [
        {"params": [model.weight], "lr": 0.5},
        {"params": weights[:1], "lr": 0.25, "name": "backbone"},
    ]
    optimizer = torch.optim.SGD([*groups, {"params": weights[1:]}], lr=0.125, momentum=0.75)
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], optimizer)
    halve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iter: 0.5**iter)
    trainer.register_hooks([RuntimeInfo(), LRScheduler(scheduler=halve)])
    trainer.train(0, 2)
    assert {
        name: values for name, values in scalars(trainer).items() if name[:3] in ("lr/", "mom")
    } == {
        "lr/weight": [(0.5, 0), (0.25, 1)],
        "lr/backbone": [(0.25, 0), (0.125, 1)],
        "lr/others weight": [(0.125, 0), (0.0625, 1)],
        "momentum": [(0.75, 0), (0.75, 1)],
    }


class Slow(nn.Module):
    """A step takes ``seconds`` of a fake clock."""

    flops_per_sample = 1e12

    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds, self.now = nn.Parameter(torch.ones(())), seconds, 50.0

    def tokens_per_sample(self):
        return 100

    def forward(self, batch):
        self.now += self.seconds
        return self.weight * 1.0


def run(seconds, sizes, hook, iters, wrap=lambda model: model, **kwargs):
    """Whatever happens between the steps takes 100 s."""
    model = Slow(seconds)
    trainer = SimpleTrainer(
        wrap(model), [torch.ones(size, 3) for size in sizes], sgd(model), **kwargs
    )

    def pause(trainer):
        model.now += 100

    trainer.register_hooks([hook, AfterStep(pause)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: model.now)
        trainer.train(0, iters)
    return trainer


def rates(trainer, name="samples_per_sec"):
    return trainer.storage.history(name).values()


def test_samples_of_the_last_period_are_divided_by_the_seconds_of_its_steps(asynchronous):
    trainer = run(2.0, (4, 6, 1, 5, 10), Throughput(2), 5, async_write_metrics=asynchronous)
    assert rates(trainer) == [(2.5, 1), (1.5, 3), (5.0, 4)]
    assert trainer.storage.smoothing_hints()["samples_per_sec"] is True
    assert "mfu_pct" not in trainer.storage.latest()
    assert rates(run(2.0, (2, 2), Throughput(1), 2, accumulation_steps=2)) == [(1.0, 0), (1.0, 1)]


def test_each_micro_batch_counts_by_its_own_samples_and_so_do_tokens_and_the_use_of_the_device():
    """8 + 8 + 8 + 1 samples in 4 forward passes of 2 s; a sample has 100 tokens and 10^12 operations."""
    trainer = run(2.0, (8, 8, 8, 1), Throughput(1, peak_tflops=12.5), 2, accumulation_steps=4)
    assert rates(trainer) == [(25 / 8, 0), (25 / 8, 1)]
    assert rates(trainer, "tokens_per_sec") == [(2500 / 8, 0), (2500 / 8, 1)]
    assert rates(trainer, "mfu_pct") == [(25.0, 0), (25.0, 1)]
    assert trainer.feed.watchers == []  # so that a second run counts each batch once


def test_the_utilization_and_the_rate_of_tokens_are_stored_if_the_model_has_what_they_need():
    trainer = run(2.0, (4,), Throughput(1, peak_tflops=8), 1, wrap=nn.DataParallel)
    found = {
        name: rates(trainer, name) for name in ("samples_per_sec", "mfu_pct", "tokens_per_sec")
    }
    assert found == {
        "samples_per_sec": [(2.0, 0)],
        "mfu_pct": [(25.0, 0)],
        "tokens_per_sec": [(200.0, 0)],
    }


def test_the_peak_of_a_device_is_found_by_its_name():
    names = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A10",
        "Tesla K80",
    ]
    assert [peak_tflops_of(name) for name in names] == [989, 756, 312, 125, None]


def _rates(rank, folder):
    """Rank 1 has twice the samples; the slower rank 0 takes 8 s."""
    found = []
    with metrics_by_worker():
        for later in (False, True):
            trainer = run(
                8.0 - 4 * rank, (4 + 4 * rank,), Throughput(2, 3), 4, async_write_metrics=later
            )
            found.append(
                [rates(trainer, name) for name in ("samples_per_sec", "mfu_pct", "tokens_per_sec")]
            )
    return found


@pytest.mark.slow
def test_samples_of_all_ranks_are_counted_against_the_slowest(tmp_path):
    expected = [[(1.5, 1), (1.5, 3)], [(25.0, 1), (25.0, 3)], [(150.0, 1), (150.0, 3)]]
    assert on_two_ranks([_rates], tmp_path)["_rates"] == [[expected] * 2] * 2
