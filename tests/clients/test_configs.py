"""Configs as detectron2's users have them: nodes of other programs, defaults that nobody has chosen, arithmetic."""

import logging
import sys

import fvcore.common.config
import pytest
import yacs.config

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, sgd
from trainkit.config import CfgNode, ConfigError, LazyConfig, get_cfg
from trainkit.config.arithmetic import evaluate_arithmetic
from trainkit.engine import DefaultPredictor, DefaultTrainer, default_argument_parser, default_setup, launch
from trainkit.solver import build_lr_scheduler, build_optimizer
from trainkit.utils.logger import close_logger

# ---------------------------------------------------------------------- a config from somewhere else


class Detectron2CfgNode(fvcore.common.config.CfgNode):
    pass


@pytest.mark.parametrize("node", [yacs.config.CfgNode, fvcore.common.config.CfgNode, Detectron2CfgNode])
@pytest.mark.parametrize(
    "take",
    [
        DefaultTrainer,
        DefaultPredictor,
        lambda cfg: default_setup(cfg, default_argument_parser().parse_args([])),
        lambda cfg: build_optimizer(cfg, Regression()),
        lambda cfg: build_lr_scheduler(cfg, sgd(Regression())),
    ],
)
def test_a_config_of_another_program_is_refused_with_what_to_use(node, take):
    with pytest.raises(ConfigError, match=rf"cfg is a \S*{node.__module__}\S*CfgNode.*use trainkit's get_cfg"):
        take(node({"SOLVER": {"MAX_ITER": 10}, "OUTPUT_DIR": "x"}))


@pytest.mark.parametrize("node", [yacs.config.CfgNode, fvcore.common.config.CfgNode])
def test_settings_of_such_a_config_can_be_merged(node):
    cfg = get_cfg()
    cfg.merge_from_other_cfg(node({"SOLVER": {"MAX_ITER": 10}}))
    assert cfg.SOLVER.MAX_ITER == 10
    assert isinstance(cfg.SOLVER, CfgNode)


# ---------------------------------------------------------------------- defaults that nobody has chosen


@pytest.mark.parametrize("name", ["WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR"])
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
    if name == "WarmupMultiStepLR":  # the warm-up is the whole run
        assert rates[50] == pytest.approx((1e-3 + 1) / 2)


def test_a_warm_up_that_was_chosen_is_still_held_against_the_length_of_the_run():
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.WARMUP_ITERS = 100, 101
    with pytest.raises(ConfigError, match="SOLVER.WARMUP_ITERS=101 is longer than SOLVER.MAX_ITER=100"):
        build_lr_scheduler(cfg, sgd(Regression()))


# ---------------------------------------------------------------------- the CPU


def device_of_the_run(args):
    cfg = tiny_cfg(args.folder, "MODEL.DEVICE", args.device)
    cfg.freeze()
    default_setup(cfg, args)
    close_logger()
    return cfg.MODEL.DEVICE, (args.folder / "config.yaml").read_text()


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_no_gpus_is_one_process_on_the_cpu(tmp_path, device, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    args = default_argument_parser().parse_args(["--num-gpus", "0"])
    args.folder, args.device = tmp_path, device
    found, saved = launch(device_of_the_run, args.num_gpus, args=(args,))
    assert found == "cpu"
    assert "DEVICE: cpu" in saved


def test_no_gpus_and_another_device_contradict_each_other(tmp_path):
    args = default_argument_parser().parse_args(["--num-gpus", "0"])
    args.folder, args.device = tmp_path, "cuda"
    with pytest.raises(ConfigError, match="--num-gpus is 0, but MODEL.DEVICE is 'cuda'; leave one of them out"):
        device_of_the_run(args)
    assert not [*tmp_path.iterdir()]


def test_several_machines_need_processes():
    with pytest.raises(ValueError, match="need at least 1 process per machine"):
        launch(print, 0, num_machines=2, dist_url="tcp://127.0.0.1:1")


# ---------------------------------------------------------------------- arithmetic in YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.0 / 3", 1 / 3),
        ("90000 * 2", 180000),
        ("(60000 * 2, 80000 * 2)", (120000, 160000)),
        ("[32 * 2 ** (1.0 / 3), -7 // 2, 7 % 4]", [32 * 2 ** (1.0 / 3), -4, 3]),
        ("(1, 2) + (3,) * 2", (1, 2, 3, 3)),
        ("[[0.5] * 2] * 2", [[0.5, 0.5], [0.5, 0.5]]),
        ("-(+2) ** -1", -0.5),
        (" True ", True),
    ],
)
def test_arithmetic_of_numbers_and_tuples_is_evaluated(text, value, tmp_path):
    assert evaluate_arithmetic(text) == value
    (tmp_path / "c.yaml").write_text(f'X: !!python/object/apply:eval ["{text}"]\nY: 1\n')
    read = CfgNode.load_yaml_with_base(tmp_path / "c.yaml")
    assert read == {"X": value, "Y": 1}
    assert type(read["X"]) is type(value)


def test_it_is_merged_into_the_keys_of_a_config_and_of_a_lazy_one(tmp_path):
    (tmp_path / "c.yaml").write_text(
        'SOLVER: {STEPS: !!python/object/apply:eval ["(10 * 3, 10 * 4)"], '
        'MAX_ITER: !!python/object/apply:eval ["10 * 5"], GAMMA: !!python/object/apply:eval ["1 / 4"]}'
    )
    cfg = get_cfg()
    cfg.merge_from_file(tmp_path / "c.yaml")
    assert (cfg.SOLVER.STEPS, cfg.SOLVER.MAX_ITER, cfg.SOLVER.GAMMA) == ((30, 40), 50, 0.25)
    assert LazyConfig.load(tmp_path / "c.yaml").SOLVER.STEPS == [30, 40]


@pytest.mark.parametrize(
    "text",
    [
        "[x * 2 for x in [1, 2]]",
        "int(3.5)",
        "__import__('os').getcwd()",
        "().__class__",
        "a",
        "'text' * 2",
        "1 if 2 else 3",
        "1 < 2",
        "2 << 3",
        "~1",
        "1j",
        "(-1) ** 0.5",
        "10 ** 100",
        "9 ** 9 ** 9",
        "2 ** 300 * 2",
        "[0] * 101",
        "101 * (0,)",
        "((),) * 1000000000",
        "() * 1000000000",
        "[[0] * 50] * 50",
        "1 / 0",
        "1e308 ** 2",
        "(1, 2) + 3",
        "1 +",
        "1; 2",
        "",
        "-" * 900 + "1",
        "(" * 400 + "1" + ")" * 400,
        "1 + " * 300 + "1",
        "0x" + "f" * 200,
    ],
    ids=lambda text: text[:20],
)
def test_everything_else_is_refused_with_its_line(text, tmp_path):
    (tmp_path / "c.yaml").write_text(f'Y: 1\nX: !!python/object/apply:eval ["{text}"]\n')
    with pytest.raises(
        ConfigError, match=r"c\.yaml, line 2: eval takes arithmetic of numbers only, got .*; write the values"
    ):
        CfgNode.load_yaml_with_base(tmp_path / "c.yaml")


@pytest.mark.parametrize("node", ["[]", '["1", "2"]', "[1]", '"1"', '{args: ["1"]}', "[[1]]"])
def test_another_form_is_refused_too(node, tmp_path):
    (tmp_path / "c.yaml").write_text(f"X: !!python/object/apply:eval {node}\n")
    with pytest.raises(ConfigError, match="eval takes one text in a list"):
        CfgNode.load_yaml_with_base(tmp_path / "c.yaml")
