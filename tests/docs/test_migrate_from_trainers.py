"""The scripts of the pages for users of Lightning and of transformers run, and so does each setting of their tables."""

import ast
import json
import re
import shlex

import pytest
import torch

from tests.docs.pages import blocks, page, run
from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, HookBase, default_argument_parser, default_setup
from trainkit.engine.hook_base import HOOK_POINTS

LIGHTNING = "docs/migrate_from_lightning.md"
TRANSFORMERS = "docs/migrate_from_huggingface.md"
LIT, LIT_MOVED = blocks("docs/migrate_from_lightning.md", "python")
HF, HF_MOVED = blocks("docs/migrate_from_huggingface.md", "python")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def functions(source, *names):
    """The text of some functions of a block."""
    tree = ast.parse(source)
    found = {node.name: ast.unparse(node) for node in tree.body if hasattr(node, "name")}
    return [found[name] for name in names]


def test_both_scripts_of_a_page_have_the_same_data():
    assert functions(LIT, "points") == functions(LIT_MOVED, "points")
    assert functions(HF, "texts", "pad") == functions(HF_MOVED, "texts", "pad")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source", "folder"),
    [(LIGHTNING, LIT_MOVED, "output/points"), (TRANSFORMERS, HF_MOVED, "output/texts")],
)
def test_the_script_learns_stops_early_and_can_be_resumed_and_evaluated(
    tmp_path, name, source, folder
):
    def start(*options):
        return run(source, name)["main"](default_argument_parser().parse_args([*options]))

    start("--fast-dev-run")
    short = start("SOLVER.MAX_ITER", "8ep")
    assert short["classification"]["top1"] > 90
    files = {path.name for path in (tmp_path / folder).iterdir()}
    assert {"model_best.pth", "model_final.pth", "config.yaml", "log.txt"} <= files
    assert start("--eval-only", "SOLVER.MAX_ITER", "8ep") == short

    lines = (tmp_path / folder / "metrics.json").read_text().splitlines()
    logged = {key for line in lines for key in json.loads(line)}
    assert {"total_loss", "lr", "grad_norm", "classification/top1"} <= logged
    assert ("train_accuracy" in logged) == (name == LIGHTNING)
    start("--resume", "SOLVER.MAX_ITER", "9ep")


def test_the_optimizer_of_the_script_decays_and_rates_as_transformers_do():
    """As its `get_parameter_names` and `get_linear_schedule_with_warmup`, by hand."""
    names = run(HF_MOVED, TRANSFORMERS)
    seen = []

    class Look(HookBase):
        def before_step(self):
            groups = self.trainer.optimizer.param_groups
            seen.append({group["lr"] for group in groups})
            if self.trainer.iter == 0:
                for group in groups:
                    for parameter in group["params"]:
                        decays[id(parameter)] = group["weight_decay"]

    class Trainer(names["Trainer"]):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.register_hooks([Look()])
            own.append(self.model)

    own, decays = [], {}
    names["run"](
        default_argument_parser().parse_args([]), Trainer, cfg_of(names, "SOLVER.MAX_ITER", "3ep")
    )
    for name, parameter in own[0].named_parameters():
        is_free = "bias" in name or "norm" in name
        assert decays[id(parameter)] == (0.0 if is_free else 0.01), name
    rising = [0.002 * i / 20 for i in range(20)]
    falling = [0.002 * (60 - i) / 40 for i in range(20, 60)]
    assert [rate for (rate,) in seen] == pytest.approx(rising + falling)


def cfg_of(names, *options):
    """The config that the script gives to `run`."""
    found = []
    real = names["run"]
    names["run"] = lambda args, trainer, cfg: found.append(cfg)
    names["main"](None)
    names["run"] = real
    found[0].merge_from_list([*options])
    return found[0]


def test_a_schedule_in_epochs_has_the_rates_of_one_that_is_stepped_after_each_epoch(tmp_path):
    [line] = [span for span in GIVEN if span.startswith("SOLVER.SCHEDULES")]
    options = shlex.split(line.replace("10ep", "2ep"))
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options, "SOLVER.MAX_ITER", "6ep"))
    trainer.train()
    rates = [rate for rate, _ in trainer.storage.history("lr").values()]
    per_epoch = trainer.max_iter // 6
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], rates[0])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    theirs = []
    for _ in range(6):
        theirs += [optimizer.param_groups[0]["lr"]] * per_epoch
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(theirs)
    assert len({*theirs}) == 3


def right_columns(name):
    text = re.sub(r"^```.*?^```$", "", page(name), flags=re.DOTALL | re.MULTILINE)
    for row in re.findall(r"^\| .+ \| (.+) \|$", text, re.MULTILINE):
        if row != "in trainkit":
            yield row


def settings(name):
    """Each text of the right columns that is put after a command."""
    for row in right_columns(name):
        for span in re.findall(r"`([^`]+)`", row):
            if re.match(r"(--[a-z]|[A-Z][A-Z0-9_.]+ )", span):
                yield span


# what needs other processes, options without a job, a file, or a minute
NOT_TRAINED = {
    "--resume",
    "--eval-only",
    "--num-gpus 2",
    "--num-machines 2",
    "MODEL.COMPILE.ENABLED True",
    "MODEL.WEIGHTS path",
    "--opts TEST.IMS_PER_BATCH 1",  # of the command that predicts
}
GIVEN = sorted({*settings(LIGHTNING), *settings(TRANSFORMERS)})


def test_the_tables_have_settings():
    assert len(GIVEN) > 60
    assert {*GIVEN} >= NOT_TRAINED


@pytest.mark.parametrize("given", [span for span in GIVEN if span not in NOT_TRAINED])
@pytest.mark.filterwarnings("ignore")
def test_a_setting_of_the_tables_trains(tmp_path, given):
    given = given.replace("BertLayer", "Linear")
    args = default_argument_parser().parse_args(shlex.split(given))
    evaluators = ["TinyAccuracy", "LossEvaluator"]
    own = {"SOLVER.MAX_ITER": 10, "TEST.EVALUATORS": evaluators, "SOLVER.WARMUP_ITERS": 0}
    options = [each for pair in own.items() for each in pair]
    if given == "SOLVER.MAX_ITER 1000":
        options += ["LOG.PERIOD", 1000, "TEST.EVAL_PERIOD", 0, "SOLVER.CHECKPOINT_PERIOD", 1000]
    cfg = tiny_cfg(tmp_path / "run", "SOLVER.STEPS", (), *options)
    cfg.merge_from_list(args.opts)
    modes = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        default_setup(cfg, args)
        trainer = DefaultTrainer(cfg)
        trainer.train()
    finally:
        torch.use_deterministic_algorithms(modes[0])
        torch.backends.cudnn.benchmark = modes[1]
        torch.set_float32_matmul_precision("highest")
    assert trainer.status == "finished"


def test_the_points_and_methods_of_the_tables_are_there(tmp_path):
    trainer = DefaultTrainer(tiny_cfg(tmp_path))
    text = "\n".join([*right_columns(LIGHTNING), *right_columns(TRANSFORMERS)])
    points = {*re.findall(r"`((?:before|after)_\w+)", text)}
    methods = {*re.findall(r"`(build_\w+)", text)}
    attributes = {*re.findall(r"\btrainer\.(\w+)", text)} - {
        "batch",
        "losses",
        "outputs",
    }  # there in a step
    assert points <= {*HOOK_POINTS}
    assert len(points) > 5
    assert {name for name in methods | attributes if not hasattr(trainer, name)} == set()
    assert len(methods | attributes) > 10
