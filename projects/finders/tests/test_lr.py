"""The learning-rate range test."""

import logging
import math
import sys

import pytest
import torch
from torch import nn
from trainkit.projects.finders import lr
from trainkit.projects.finders.command import only_logging

from tests.docs.pages import ROOT
from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, HookBase, SimpleTrainer
from trainkit.engine.hooks import HOOK_REGISTRY


def points_of(losses):
    return [lr.Point(1e-4 * 1.1**i, loss, loss) for i, loss in enumerate(losses)]


def test_the_steepest_place_and_the_lowest_loss_are_found():
    losses = []
    for i in range(61):
        falling = 1 - 1 / (1 + math.exp(-(i - 30) / 2))
        rising = 0.02 * max(0, i - 50) ** 2
        losses.append(falling + rising)
    points = points_of(losses)
    steepest, lowest = lr.suggest(points)
    assert points[28].lr < steepest < points[32].lr
    assert lowest == points[50].lr


def test_a_loss_that_only_rises_is_an_error():
    with pytest.raises(
        ConfigError, match="the loss does not fall with any of these learning rates"
    ):
        lr.suggest(points_of([1.0 + i for i in range(30)]))


def test_rates_grow_by_one_factor_groups_keep_theirs_and_a_loss_that_diverges_ends_the_test():
    def forward(batch):
        used.append([group["lr"] for group in optimizer.param_groups])
        return {"loss": (model.weight * 1e3 - model.bias).square().sum()}

    model, used = nn.Linear(1, 1), []
    model.forward = forward
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    trainer = SimpleTrainer(model, [None] * 100, optimizer)
    test = lr.RangeTest(1e-9, 1e-1, base_lr=0.5)
    trainer.register_hooks([test])
    trainer.train(0, 81)

    assert used[0] == pytest.approx([1e-9, 1e-10])
    assert used[20] == pytest.approx([1e-7, 1e-8])
    assert trainer.status == "stopped"
    assert len(test.points) < 81
    assert math.isfinite(test.points[-1].loss)
    rates = [lrs[0] for lrs in used[: len(test.points)]]
    assert [point.lr for point in test.points] == pytest.approx(rates)


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

    one = lr.run_test(cfg, DefaultTrainer, 1e-4, 1e-1, 30)
    two = lr.run_test(cfg, DefaultTrainer, 1e-4, 1e-1, 30)

    assert one == two
    assert seen == [*range(30)] * 2
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(
        ConfigError, match="the loss diverges after . steps; give a smaller --min than 1e"
    ):
        lr.run_test(cfg, DefaultTrainer, 1e30, 1e38, 30)


def test_nothing_is_said_about_going_on_in_the_folder_that_is_deleted(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # of pytest; a command has none
    with only_logging("WARNING"):
        points = lr.run_test(tiny_cfg(tmp_path), DefaultTrainer, 1e-4, 1e8, 60)
    assert len(points) < 60  # the run was stopped, so its log ends with a remark about --resume
    assert "--resume" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_picture_is_the_only_file_that_is_written(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    config = ROOT / "projects/digits/config.yaml"
    args = lr.parse_args(["--config-file", str(config), "--iters", "120", "MODEL.WIDTH", "4"])
    suggested = lr.main(args)
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert 1e-4 < suggested < 1
    assert f"suggested: SOLVER.BASE_LR {suggested:.2g}\n" in capsys.readouterr().out


SCRIPT = """
import torch
from torch import nn
from trainkit.engine import DefaultTrainer

class Halfway(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return {"loss": (self.weight - 1) ** 2}

class Trainer(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        return Halfway()

    @classmethod
    def build_train_loader(cls, cfg):
        return [torch.zeros(1)] * 10
"""


def test_a_script_needs_no_config(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "own_lr_job.py").write_text(SCRIPT)
    args = lr.parse_args(["--script", "own_lr_job.py", "MODEL.DEVICE", "cpu"])
    assert 1e-5 < lr.main(args) < 10
    assert "suggested: SOLVER.BASE_LR" in capsys.readouterr().out
    sys.modules.pop("own_lr_job")


def test_a_command_that_names_no_job_is_an_error(tmp_path):
    args = lr.parse_args(["--output", str(tmp_path / "lr.png")])
    with pytest.raises(ConfigError, match="MODEL.NAME is empty; .* name its file: --script"):
        lr.main(args)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--min 1 --max 0.1", "--min is 1 and --max is 0.1; accepted: 0 < min < max"),
        ("--script absent.py", "--script 'absent.py' is no file of Python; name the file"),
        ("--output absent/lr.png", "'absent/lr.png' cannot be written"),
    ],
)
def test_a_mistake_is_an_error_before_training(words, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "job.yaml"
    config.write_text(tiny_cfg("output").dump())
    with pytest.raises(ConfigError, match=error):
        lr.main(lr.parse_args(["--config-file", str(config), *words.split()]))
    assert [*tmp_path.iterdir()] == [config]
