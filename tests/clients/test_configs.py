"""Configs as detectron2's users have them: nodes of other programs, defaults that nobody has chosen."""

import logging
import sys

import fvcore.common.config
import pytest
import torch
import yacs.config
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, sgd
from trainkit.config import CfgNode, ConfigError, check_values, get_cfg
from trainkit.engine import (
    DefaultPredictor,
    DefaultTrainer,
    default_argument_parser,
    default_setup,
    launch,
)
from trainkit.solver import build_lr_scheduler
from trainkit.utils.logger import close_logger


class Detectron2CfgNode(fvcore.common.config.CfgNode):
    pass


@pytest.mark.parametrize(
    "node", [yacs.config.CfgNode, fvcore.common.config.CfgNode, Detectron2CfgNode]
)
def test_a_config_of_another_program_is_refused_with_what_to_use_and_its_settings_can_be_merged(
    node,
):
    settings = node({"SOLVER": {"MAX_ITER": 10}})
    for take in (DefaultTrainer, DefaultPredictor, lambda cfg: default_setup(cfg, None)):
        with pytest.raises(
            ConfigError, match=rf"cfg is a \S*{node.__module__}\S*CfgNode.*use trainkit's get_cfg"
        ):
            take(settings)
    cfg = get_cfg()
    cfg.merge_from_other_cfg(settings)
    assert cfg.SOLVER.MAX_ITER == 10
    assert isinstance(cfg.SOLVER, CfgNode)


@pytest.mark.parametrize(
    "name", ["WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR"]
)
def test_default_lengths_do_not_stop_a_short_run_and_are_not_warned_about(name, caplog):
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.LR_SCHEDULER_NAME, cfg.SOLVER.BASE_LR = 100, name, 1.0
    optimizer = sgd(Regression(), lr=1.0)
    with caplog.at_level(logging.WARNING):
        scheduler = build_lr_scheduler(cfg, optimizer)
    assert not caplog.messages
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(1e-3)
    assert rates.index(max(rates)) in (4, 5)  # the warm-up is 5 % of the run
    assert max(rates) == pytest.approx(1.0, abs=0.01)


def test_a_project_may_make_the_optimizer_a_name_as_many_of_detectron2_do(tmp_path):
    class Trainer(DefaultTrainer):
        @classmethod
        def build_optimizer(cls, cfg, model):
            if cfg.SOLVER.OPTIMIZER == "ADAMW":
                return torch.optim.AdamW(
                    model.parameters(), cfg.SOLVER.BASE_LR * cfg.SOLVER.BACKBONE_MULTIPLIER
                )
            return super().build_optimizer(cfg, model)

    def optimizer(name):
        cfg = tiny_cfg(
            tmp_path, "SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.REFERENCE_WORLD_SIZE", 2
        )
        cfg.SOLVER.OPTIMIZER, cfg.SOLVER.BACKBONE_MULTIPLIER = "SGD", 0.1
        (tmp_path / "c.yaml").write_text(f"SOLVER: {{OPTIMIZER: {name}, BACKBONE_MULTIPLIER: 0.2}}")
        cfg.merge_from_file(tmp_path / "c.yaml")
        cfg.freeze()
        trainer = Trainer(cfg)
        trainer.train()
        assert name == trainer.cfg.SOLVER.OPTIMIZER
        return trainer.optimizer

    adamw = optimizer("ADAMW")
    assert type(adamw) is torch.optim.AdamW
    assert type(optimizer("SGD")) is torch.optim.SGD
    assert adamw.param_groups[0]["initial_lr"] == pytest.approx(0.01)


def test_a_config_of_detectron2s_version_is_read_and_an_unknown_key_is_a_key_error(tmp_path):
    (tmp_path / "c.yaml").write_text("SOLVER: {MAX_ITER: 7}\nVERSION: 2\n")
    cfg = get_cfg()
    cfg.merge_from_file(tmp_path / "c.yaml")
    assert cfg.SOLVER.MAX_ITER == 7
    check_values(cfg)
    (tmp_path / "c.yaml").write_text("SOLVER: {BASE_LRR: 7}\n")
    with pytest.raises(KeyError, match="c.yaml: unknown key SOLVER.BASE_LRR;"):
        cfg.merge_from_file(tmp_path / "c.yaml")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_goes_to_the_device_of_the_config_after_default_setup(tmp_path, frozen):
    cfg = tiny_cfg(tmp_path, "MODEL.DEVICE", "auto")
    if frozen:
        cfg.freeze()
    default_setup(cfg, None)
    close_logger()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    expected = accelerator.type if accelerator else "cpu"
    assert nn.Linear(1, 1).to(cfg.MODEL.DEVICE).weight.device.type == expected
    # another machine may have another device
    assert "DEVICE: auto" in (tmp_path / "config.yaml").read_text()


def test_no_gpus_is_one_process_on_the_cpu(tmp_path, monkeypatch):
    def device_of_the_run(args):
        cfg = tiny_cfg(tmp_path, "MODEL.DEVICE", "auto")
        cfg.freeze()
        default_setup(cfg, args)
        close_logger()
        return cfg.MODEL.DEVICE

    monkeypatch.setattr(sys, "argv", ["train.py"])
    args = default_argument_parser().parse_args(["--num-gpus", "0"])
    assert launch(device_of_the_run, args.num_gpus, args=(args,)) == "cpu"
    assert "DEVICE: cpu" in (tmp_path / "config.yaml").read_text()
