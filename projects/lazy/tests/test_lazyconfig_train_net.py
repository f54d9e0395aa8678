"""The tool for configs in Python, as a user calls it."""

import itertools
import json
from argparse import Namespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from projects.digits import DigitsCNN
from tests.exactness.machine import content
from tools import lazyconfig_train_net, train_net
from trainkit.config import ConfigError, LazyCall, LazyConfig, get_cfg, resolve_lengths
from trainkit.engine import default_argument_parser, default_setup
from trainkit.utils.logger import close_logger

# epochs of 12 iterations; periods without a common divisor
SHORT = [
    "train.max_iter=14",
    "train.eval_period=5",
    "train.checkpointer.period=3",
    "train.log_period=1",
]
SHORT += [
    "model.width=2",
    "dataloader.train.total_batch_size=100",
    "lr_multiplier.warmup_length=0.5",
]


class BreaksOff(DigitsCNN):
    """A run of it fails in its ``count``-th step."""

    def __init__(self, count, **arguments):
        super().__init__(**arguments)
        self._counts, self._last = itertools.count(1), count

    def forward(self, batch):
        if self.training and next(self._counts) == self._last:
            raise KeyError("broken off")
        return super().forward(batch)


def run(folder, *arguments):
    command = [*SHORT, f"train.output_dir={folder}", *arguments]
    try:
        return lazyconfig_train_net.main(default_argument_parser().parse_args(command))
    finally:
        close_logger()


def broken_off(folder, count, *arguments):
    with pytest.raises(KeyError, match="broken off"):
        run(folder, f"model._target_={__name__}.BreaksOff", f"+model.count={count}", *arguments)


def metrics(folder, *names):
    """(iteration, name, value) in the order in which they were written."""
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [(row["iteration"], name, row[name]) for row in rows for name in names if name in row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def test_the_log_says_once_that_no_step_can_be_repeated(whole):
    assert (whole / "log.txt").read_text().count("its steps cannot be repeated later") == 1


def test_a_run_that_is_broken_off_twice_and_resumed_ends_as_the_whole_one(whole, tmp_path):
    broken_off(tmp_path, 6)
    assert (tmp_path / "last_checkpoint").read_text().strip() == "model_0000002.pth"
    broken_off(tmp_path, 7, "--resume")
    assert (tmp_path / "last_checkpoint").read_text().strip() == "model_0000008.pth"
    run(tmp_path, "--resume")
    assert content(tmp_path) == content(whole)


def test_the_job_is_that_of_train_net_bit_for_bit(whole, tmp_path):
    options = [
        "SOLVER.MAX_ITER",
        "14",
        "TEST.EVAL_PERIOD",
        "5",
        "LOG.PERIOD",
        "1",
        "MODEL.WIDTH",
        "2",
    ]
    options += [
        "SOLVER.IMS_PER_BATCH",
        "100",
        "SOLVER.WARMUP_ITERS",
        "7",
        "OUTPUT_DIR",
        str(tmp_path),
    ]
    train_net.main(default_argument_parser().parse_args(options))
    results = [
        f"{prefix}{name}"
        for prefix in ("", "test/")
        for name in ("classification/top1", "loss/total_loss")
    ]
    names = ("total_loss", "lr", *results)
    assert metrics(tmp_path, *names) == metrics(whole, *names)
    assert len(metrics(whole, *names)) == 14 + 14 + 3 * 2 + 2
    theirs, ours = (torch.load(folder / "model_final.pth")["model"] for folder in (tmp_path, whole))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert theirs.keys() == ours.keys()


def test_the_settings_are_those_of_projects_digits():
    cfg, digits = LazyConfig.load(lazyconfig_train_net.DEFAULT_CONFIG), get_cfg()
    digits.merge_from_file(lazyconfig_train_net.ROOT / "projects/digits/config.yaml")
    digits = resolve_lengths(digits, 19)
    warmup = cfg.lr_multiplier.warmup_length * cfg.train.max_iter
    found = (cfg.train.max_iter, cfg.train.eval_period, cfg.model.width, warmup, cfg.optimizer.lr)
    solver = digits.SOLVER
    period = digits.TEST.EVAL_PERIOD
    assert found == (
        solver.MAX_ITER,
        period,
        digits.MODEL.WIDTH,
        solver.WARMUP_ITERS,
        solver.BASE_LR,
    )


def test_the_saved_config_gives_the_same_run(whole, tmp_path):
    saved = LazyConfig.load(whole / "config.yaml")
    assert saved.train.max_iter == 14
    command = ["--config-file", str(whole / "config.yaml"), f"train.output_dir={tmp_path}"]
    lazyconfig_train_net.main(default_argument_parser().parse_args(command))
    assert content(tmp_path) == content(whole)
    saved.train.output_dir = str(tmp_path)
    assert LazyConfig.load(tmp_path / "config.yaml") == saved


def test_the_trial_run_goes_through_every_part_in_a_folder_of_its_own(tmp_path):
    run(tmp_path, "--fast-dev-run")
    names = {path.name for path in (tmp_path / "fast_dev_run").iterdir()}
    assert {"model_0000002.pth", "model_final.pth", "metrics.json", "config.yaml"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["fast_dev_run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.max_itr=3"], "'max_iter'"),
        (["--eval-only"], "there is nothing to evaluate"),
        (["--config-file", "no/such.py"], "no/such.py"),
        (["+model.depth=3"], "projects.digits.model.DigitsCNN(width, depth) failed: TypeError"),
    ],
)
def test_mistakes_are_one_message(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, *arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error


def test_default_setup_seeds_makes_the_folder_and_moves_an_earlier_run_aside(tmp_path):
    def setup(cfg, **arguments):
        default_setup(cfg, Namespace(config_file="", resume=False, eval_only=False, **arguments))
        close_logger()
        return torch.rand(())

    train = {"output_dir": str(tmp_path / "out"), "seed": 7, "device": "cuda"}
    cfg = OmegaConf.create(
        {"train": train, "model": LazyCall(nn.Linear)(in_features=1, out_features=1)}
    )
    first = setup(cfg)
    saved = LazyConfig.load(tmp_path / "out" / "config.yaml")
    assert saved.train == cfg.train
    assert saved.model == {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    assert (tmp_path / "out" / "log.txt").is_file()
    assert setup(cfg) == first
    assert (tmp_path / "out" / "previous_1" / "config.yaml").is_file()
    cfg.train.seed = 8
    assert setup(cfg, num_gpus=0) != first
    assert cfg.train.device == "cpu"
    with pytest.raises(
        ConfigError, match="train.output_dir is missing in the config, which has model; set it"
    ):
        setup(OmegaConf.create({"model": {}}))
