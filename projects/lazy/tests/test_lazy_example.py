"""The configs of projects/lazy: the digits job, said in another way."""

from pathlib import Path

import pytest
from fvcore.common.param_scheduler import CosineParamScheduler

from projects.digits import DigitsCNN
from trainkit.config import LazyConfig, get_cfg, instantiate, resolve_lengths
from trainkit.solver import build_lr_scheduler, build_optimizer

PROJECTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cfg():
    return LazyConfig.load(PROJECTS / "lazy/configs/digits.py")


@pytest.fixture(scope="module")
def digits():
    """The config of projects/digits."""
    cfg = get_cfg()
    cfg.merge_from_file(PROJECTS / "digits/config.yaml")
    return resolve_lengths(cfg, 19)


def test_the_job_changes_its_own_copy_of_what_it_imports(cfg):
    assert list(cfg) == ["train", "dataloader", "model", "lr_multiplier", "optimizer"]
    assert (cfg.train.output_dir, cfg.train.max_iter, cfg.train.log_period) == ("./output/lazy", 800, 20)
    assert LazyConfig.load(PROJECTS / "lazy/configs/common.py").train.max_iter == 90000


def optimizer_of(cfg, model):
    return instantiate({**cfg.optimizer, "params": {**cfg.optimizer.params, "model": model}})


def settings(optimizer):
    """Of each parameter group, and the shapes of its parameters."""
    groups = [
        {**group, "params": [tuple(param.shape) for param in group["params"]]} for group in optimizer.param_groups
    ]
    return [{name: value for name, value in group.items() if name != "initial_lr"} for group in groups]


def test_model_and_optimizer_are_those_of_projects_digits(cfg, digits):
    model = instantiate(cfg.model)
    assert str(model) == str(DigitsCNN(digits.MODEL.WIDTH))
    theirs = build_optimizer(digits, model)
    assert settings(optimizer_of(cfg, model)) == settings(theirs)
    changed = LazyConfig.apply_overrides(cfg.copy(), ["optimizer.lr=0.2"])
    assert settings(optimizer_of(changed, model)) != settings(theirs)


def test_the_learning_rate_is_that_of_projects_digits_in_every_iteration(cfg, digits):
    optimizer = build_optimizer(digits, DigitsCNN(2))
    scheduler, factor, rates = build_lr_scheduler(digits, optimizer), instantiate(cfg.lr_multiplier), []
    for _ in range(800):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [cfg.optimizer.lr * factor(i / cfg.train.max_iter) for i in range(800)]
    plain = CosineParamScheduler(1.0, 0.0)
    assert rates != [cfg.optimizer.lr * plain(i / cfg.train.max_iter) for i in range(800)]
