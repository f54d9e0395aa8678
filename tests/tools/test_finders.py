"""The learning-rate range test, and the search for the largest batch size."""

import math

import pytest
import torch
from torch import nn

from tests.engine.job import TinyClassifier, tiny_cfg
from tools import find_batch_size, find_lr
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, HookBase, SimpleTrainer
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.modeling import MODEL_REGISTRY


def points_of(losses):
    return [find_lr.Point(1e-4 * 1.1**i, loss, loss) for i, loss in enumerate(losses)]


def test_the_steepest_place_and_the_lowest_loss_are_found():
    points = points_of(
        [1 - 1 / (1 + math.exp(-(i - 30) / 2)) + 0.02 * max(0, i - 50) ** 2 for i in range(61)]
    )
    steepest, lowest = find_lr.suggest(points)
    assert points[28].lr < steepest < points[32].lr
    assert lowest == points[50].lr
    with pytest.raises(
        ConfigError, match="the loss does not fall with any of these learning rates"
    ):
        find_lr.suggest(points_of([1.0 + i for i in range(30)]))


def test_rates_grow_by_one_factor_groups_keep_theirs_and_a_loss_that_diverges_ends_the_test():
    def forward(batch):
        used.append([group["lr"] for group in optimizer.param_groups])
        return {"loss": (model.weight * 1e3 - model.bias).square().sum()}

    model, used = nn.Linear(1, 1), []
    model.forward = forward
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    trainer = SimpleTrainer(model, [None] * 100, optimizer)
    test = find_lr.RangeTest(1e-9, 1e-1, base_lr=0.5)
    trainer.register_hooks([test])
    trainer.train(0, 81)

    assert used[0] == pytest.approx([1e-9, 1e-10])
    assert used[20] == pytest.approx([1e-7, 1e-8])
    assert trainer.status == "stopped"
    assert len(test.points) < 81
    assert math.isfinite(test.points[-1].loss)
    assert [point.lr for point in test.points] == pytest.approx(
        [lrs[0] for lrs in used[: len(test.points)]]
    )


def test_the_test_trains_as_the_job_with_its_own_hooks_and_without_those_of_trainkit(
    tmp_path, monkeypatch
):
    seen = []

    class Seen(HookBase):
        def before_step(self):
            seen.append(self.trainer.iter)

    monkeypatch.setitem(HOOK_REGISTRY._objects, "Seen", Seen)
    hooks = [
        {"NAME": "Seen"},
        {"NAME": "EMAHook"},
        {"NAME": "ParamScheduler", "PARAM": "momentum", "SCHEDULES": []},
    ]
    best = ("CHECKPOINT.BEST_METRIC", "classification/top1", "CHECKPOINT.BEST_TO_KEEP", 2)
    cfg = tiny_cfg(tmp_path / "job", "HOOKS", hooks, *best)

    one, two = (find_lr.run_test(cfg, DefaultTrainer, 1e-4, 1e-1, 30) for _ in range(2))

    assert one == two
    assert seen == [*range(30)] * 2
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(
        ConfigError, match="the loss diverges after . steps; give a smaller --min than 1e"
    ):
        find_lr.run_test(cfg, DefaultTrainer, 1e30, 1e38, 30)


@pytest.mark.slow
def test_the_picture_is_the_only_file_that_is_written(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    args = find_lr.parse_args(["--output", "lr.png", "--iters", "120", "MODEL.WIDTH", "4"])
    suggested = find_lr.main(args)
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert 1e-4 < suggested < 1
    assert f"suggested: SOLVER.BASE_LR {suggested:.2g}\n" in capsys.readouterr().out


def test_a_mistake_is_an_error_before_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, error in (
        ("--min 1 --max 0.1", "--min is 1 and --max is 0.1; accepted: 0 < min < max"),
        (
            "--script absent.py",
            "--script 'absent.py' is no file of Python; name the file that trains",
        ),
        ("--output absent/lr.png", "'absent/lr.png' cannot be written"),
    ):
        with pytest.raises(ConfigError, match=error):
            find_lr.main(find_lr.parse_args(words.split()))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("memory", "start", "limit", "tried", "found"),
    [
        (23, 8, 1000, [8, 16, 32, 24, 20, 22], 22),
        (5, 64, 1000, [64, 32, 16, 8, 4, 6, 5], 5),
        (10**6, 3, 20, [3, 6, 12, 20], 20),
        (0, 4, 20, [4, 2, 1], 0),
    ],
)
def test_a_size_is_doubled_until_memory_runs_out_and_then_found_within_an_eighth(
    memory, start, limit, tried, found
):
    seen = []
    assert (
        find_batch_size.search(
            lambda size: bool(seen.append(size)) or size <= memory, start, lambda: limit
        )
        == found
    )
    assert seen == tried


@MODEL_REGISTRY.register()
class NeedsMemory(TinyClassifier):
    """For 23 samples there is enough memory."""

    def forward(self, batch):
        if len(batch["label"]) > 23:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(batch)


class Mistaken(DefaultTrainer):
    @classmethod
    def build_optimizer(cls, cfg, model):
        raise RuntimeError("a mistake")


@pytest.mark.slow
def test_real_steps_are_made_with_each_size_and_a_mistake_is_no_lack_of_memory(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    options = [
        "MODEL.NAME",
        "NeedsMemory",
        "SOLVER.ACCUMULATION_STEPS",
        2,
        "SOLVER.REFERENCE_BATCH_SIZE",
        16,
    ]
    (tmp_path / "job.yaml").write_text(tiny_cfg("output", *options).dump())
    args = ["--config-file", "job.yaml", "--steps", "2"]
    assert (
        find_batch_size.main(find_batch_size.parse_args([*args, "--max-batch-size", "100"])) == 22
    )

    _, _, *rows, fastest, suggested = capsys.readouterr().out.splitlines()
    assert [int(row.split()[0]) for row in rows] == [8, 16, 20, 22, 24, 32]
    assert ["out of memory" in row for row in rows] == [False] * 4 + [True] * 2
    assert all(int(row.split()[-1].replace(",", "")) > 0 for row in rows[:4])
    assert fastest.startswith("fastest: ")
    assert suggested.startswith("suggested: SOLVER.IMS_PER_BATCH 22 ")
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]

    with pytest.raises(
        ConfigError, match="memory that runs out may end other programs too; give --max-batch-size"
    ):
        find_batch_size.main(find_batch_size.parse_args(args))
    with pytest.raises(RuntimeError, match="a mistake"):
        find_batch_size.try_size(tiny_cfg("output"), Mistaken, 4, 1)
