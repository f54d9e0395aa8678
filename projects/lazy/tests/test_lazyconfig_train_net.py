"""The tool for configs in Python, as a user calls it."""

import itertools
import json
from argparse import Namespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from trainkit.projects.lazy.train import build_trainer
from trainkit.projects.lazy.train import run as run_lazy

from projects.digits import DigitsCNN
from tests.exactness.machine import content
from tools import lazyconfig_train_net, train_net
from trainkit.config import ConfigError, LazyCall, LazyConfig, get_cfg, resolve_lengths
from trainkit.engine import HookBase, default_argument_parser, default_setup
from trainkit.evaluation import DatasetEvaluator
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
    solver = digits.SOLVER
    assert cfg.train.max_iter == solver.MAX_ITER
    assert cfg.train.eval_period == digits.TEST.EVAL_PERIOD
    assert cfg.model.width == digits.MODEL.WIDTH
    assert cfg.lr_multiplier.warmup_length * cfg.train.max_iter == solver.WARMUP_ITERS
    assert cfg.optimizer.lr == solver.BASE_LR


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


OF_DETECTRON2 = """
from fvcore.common.param_scheduler import MultiStepParamScheduler
from torch.optim import SGD

from test_lazyconfig_train_net import DistanceEvaluator, DistanceToOne, unchanged
from trainkit.config import LazyCall as L
from trainkit.data import build_test_loader, build_train_loader
from trainkit.solver import WarmupParamScheduler, get_default_optimizer_params

dataloader = dict(
    train=L(build_train_loader)(
        dataset=[{"target": 1.0}] * 8, mapper=unchanged, total_batch_size=4, num_workers=0
    ),
    test=L(build_test_loader)(dataset=[{"target": 1.0}] * 2, mapper=unchanged, num_workers=0),
    evaluator=L(DistanceEvaluator)(),
)
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(values=[1.0, 0.5], milestones=[4], num_updates=6),
    warmup_factor=1.0,
    warmup_length=0.0,
)
optimizer = L(SGD)(
    params=L(get_default_optimizer_params)(weight_decay_norm=0.0), lr=0.25, weight_decay=0.0
)
model = L(DistanceToOne)()
train = dict(
    output_dir="./output",
    init_checkpoint="",
    max_iter=6,
    amp=dict(enabled=False),
    ddp=dict(broadcast_buffers=False, find_unused_parameters=False, fp16_compression=False),
    checkpointer=dict(period=2, max_to_keep=100),
    eval_period=2,
    log_period=1,
    device="cpu",
)
"""


def unchanged(sample):
    return sample


class DistanceToOne(nn.Module):
    """The distance of the weight to 1, squared; a step halves the distance at a rate of 0.25."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.fails_at = fails_at

    def forward(self, batch):
        if self.training and self.weight.item() == self.fails_at:
            raise KeyError("broken off")
        distances = (self.weight - torch.as_tensor(batch["target"]).float()) ** 2
        return {"loss": distances.mean()} if self.training else distances


class DistanceEvaluator(DatasetEvaluator):
    def reset(self):
        self.found = []

    def process(self, inputs, outputs):
        self.found += outputs.tolist()

    def evaluate(self):
        return {"distance": {"squared": sum(self.found) / len(self.found)}}


def distance_after(steps):
    """A rate of 0.25 for four steps, then of 0.125; the derivative is twice the distance."""
    return 0.5 ** min(steps, 4) * 0.75 ** max(steps - 4, 0)


def test_a_config_in_the_shape_of_detectron2_trains_resumes_and_is_evaluated(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(OF_DETECTRON2)

    def run_it(*arguments):
        options = ["--config-file", str(config), f"train.output_dir={tmp_path / 'out'}"]
        args = default_argument_parser().parse_args([*options, *arguments])
        try:
            return lazyconfig_train_net.main(args)
        finally:
            close_logger()

    with pytest.raises(KeyError, match="broken off"):
        run_it(f"+model.fails_at={1 - distance_after(5)}")
    run_it("--resume")
    state = torch.load(tmp_path / "out" / "model_final.pth")
    assert state["model"]["weight"].item() == 1 - distance_after(6)
    rates = [0.25, 0.25, 0.25, 0.25, 0.125, 0.125]
    assert [rate for _, _, rate in metrics(tmp_path / "out", "lr")] == rates
    # the results are at the iteration before, but after training at max_iter, as in detectron2
    squared = [
        (iteration, "distance/squared", distance_after(steps) ** 2)
        for iteration, steps in ((1, 2), (3, 4), (6, 6))
    ]
    assert metrics(tmp_path / "out", "distance/squared") == squared
    assert run_it("--eval-only") == {"distance": {"squared": distance_after(6) ** 2}}


@pytest.mark.parametrize(
    ("missing", "evaluated"),
    [
        ("del dataloader['evaluator']", []),
        ("del dataloader['test']", []),
        ("dataloader['val'] = dataloader.pop('test')", ["distance/squared"]),
        ("del train['amp'], train['ddp'], train['init_checkpoint']", ["distance/squared"]),
        ("train['amp'] = dict(enabled=True, precision='bfloat16')", ["distance/squared"]),
        ("train['device'] = 'auto'", ["distance/squared"]),
    ],
)
def test_what_a_config_leaves_out_is_left_out_in_the_run(tmp_path, missing, evaluated):
    config = tmp_path / "config.py"
    config.write_text(f"{OF_DETECTRON2}\n{missing}")
    options = ["--config-file", str(config), f"train.output_dir={tmp_path}", "train.max_iter=2"]
    try:
        lazyconfig_train_net.main(default_argument_parser().parse_args(options))
    finally:
        close_logger()
    assert torch.load(tmp_path / "model_final.pth")["model"]["weight"].item() == 0.75
    found = [name for _, name, _ in metrics(tmp_path, "distance/squared", "test/distance/squared")]
    assert found == evaluated


def test_the_device_of_a_config_is_one_that_a_model_takes_after_default_setup(tmp_path):
    cfg = OmegaConf.create({"train": {"output_dir": str(tmp_path), "device": "auto"}})
    default_setup(cfg, Namespace(resume=False))
    close_logger()
    assert nn.Linear(1, 1).to(cfg.train.device).weight.device.type == cfg.train.device
    assert LazyConfig.load(tmp_path / "config.yaml").train.device == "auto"


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


def test_default_setup_logs_the_config_and_what_its_file_has_lost(tmp_path):
    """As a script of detectron2 calls it."""
    model = LazyCall(nn.Linear)(in_features=3, out_features=1)
    train = {"output_dir": str(tmp_path)}
    for schedule, is_lost in ((nn.Identity, False), (lambda name: 0.5, True)):
        cfg = LazyConfig.apply_overrides(OmegaConf.create({"train": train, "model": model}), [])
        cfg._set_flag("allow_objects", True)
        cfg.schedule = schedule
        default_setup(cfg, Namespace(resume=False))
        close_logger()
        log = (tmp_path / "log.txt").read_text()
        assert "in_features: 3" in log
        assert ("config.yaml has only the names of these values" in log) == is_lost
        assert ("test_lazyconfig_train_net" in log and "<lambda>" in log) == is_lost


def test_a_project_trains_with_a_trainer_that_it_has_built_itself(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(OF_DETECTRON2)
    seen = []

    class Seen(HookBase):
        def after_step(self):
            seen.append(self.trainer.iter)

    def build_own(cfg):
        trainer, checkpointer = build_trainer(cfg)
        trainer.register_hooks([Seen()])
        return trainer, checkpointer

    options = [f"train.output_dir={tmp_path / 'out'}", "train.max_iter=2"]
    args = default_argument_parser().parse_args(options)
    assert run_lazy(args, config, build_own) is None
    assert seen == [0, 1]
