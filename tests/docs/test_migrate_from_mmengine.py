"""The tables name what exists, and the example can be built."""

import ast
import contextlib
import inspect
import math
import re
import sys
from functools import reduce

import pytest
import torch
import yaml
from torch import nn
from trainkit.projects.solver_extras.schedules import SCHEDULE_REGISTRY, build_schedule

import trainkit_selfsup  # noqa: F401  # registers hooks
from tests.docs.pages import blocks, page, run
from tests.engine.job import tiny_cfg
from trainkit import engine
from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, default_setup, hooks
from trainkit.engine.hook_base import HOOK_POINTS, Priority
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.evaluation import EVALUATOR_REGISTRY
from trainkit.modeling import MODEL_REGISTRY
from trainkit.solver import build_optimizer

RULES_PAGE = "projects/solver_extras/from_mmengine.md"
SELFSUP_PAGE = "projects/trainkit_selfsup/README.md"
PAGES = [
    "docs/migrate_from_mmengine.md",
    "projects/hooks/from_mmengine.md",
    RULES_PAGE,
    SELFSUP_PAGE,
]
TEXT = "\n".join(map(page, PAGES))
LEFT, PARTS = blocks("docs/migrate_from_mmengine.md", "python")
(RIGHT,) = blocks("docs/migrate_from_mmengine.md", "yaml")
RULES, LARS, STAGES, FUNCTION = blocks(RULES_PAGE, "python")
RULES_IN_YAML, LARS_IN_YAML, STAGES_IN_YAML = blocks(RULES_PAGE, "yaml")
(SELFSUP_MODEL,) = blocks(SELFSUP_PAGE, "python")
(SELFSUP_CONFIG,) = blocks(SELFSUP_PAGE, "yaml")


def tables(text):
    """For each table its rows, each a dict from the header's words to the cell."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, rule, *rows = (
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()
        )
        assert all(set(cell) == {"-"} for cell in rule)
        yield [dict(zip(header, row, strict=True)) for row in rows]


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


def problem_of_entry(entry):
    """What is wrong with an entry of HOOKS or SOLVER.SCHEDULES."""
    name = entry.pop("NAME")
    if name in HOOK_REGISTRY:
        accepted = {
            "ENABLED",
            *map(str.upper, inspect.signature(HOOK_REGISTRY.get(name)).parameters),
        }
    elif name in SCHEDULE_REGISTRY:
        parameters = inspect.signature(SCHEDULE_REGISTRY.get(name)).parameters
        accepted = {"BEGIN", "END", "STEP_SIZE", *map(str.upper, parameters)}
    else:
        return f"{name} is not registered"
    nested = [problem_of_entry(dict(item)) for item in entry.get("SCHEDULES", [])]
    unknown = sorted(set(entry) - accepted)
    return next(filter(None, nested), None) or (
        f"{name} does not take {unknown}" if unknown else None
    )


def problem_of(span):
    """What is wrong with a name of trainkit."""
    if span.startswith("{"):
        return problem_of_entry(yaml.safe_load(span))
    name = re.match(r"[\w.]+", span)[0]
    for place in (get_cfg(), hooks, engine):
        with contextlib.suppress(AttributeError):
            reduce(getattr, name.split("."), place)
            return None
    return None if name in HOOK_POINTS else f"there is no {name}"


def test_every_name_of_the_tables_exists_and_one_that_does_not_is_found():
    rows = [row for table in tables(TEXT) for row in table if "trainkit" in row]
    named = [span for row in rows for span in spans(row["trainkit"])]
    entries = re.findall(r"`(\{NAME: \w.*?\})`", TEXT)
    assert (len(named) > 100, len(entries) > 30) == (True, True)
    assert [problem for problem in map(problem_of, named + entries) if problem] == []

    unknown = [
        "SOLVER.MAX_ITERS",
        "before_iter",
        "EMA",
        "DefaultTrainer.resume",
        "{NAME: EMAHook, MOMENTUM: 0.1}",
    ]
    unknown += ["{NAME: LinearLR}", "{NAME: ParamScheduler, SCHEDULES: [{NAME: Linear, T_MAX: 3}]}"]
    assert all(map(problem_of, unknown))

    # the tables of the points and of the priorities
    of_points = next(
        table for table in tables(TEXT) if table[0].get("MMEngine") == "`before_run` *"
    )
    points = {spans(row["trainkit"])[0] for row in of_points}
    assert points == {*HOOK_POINTS} - {"after_backward", "after_failure"}
    (table,) = (table for table in tables(TEXT) if "Priority in MMEngine" in table[0])
    for row in table:
        name, value = row["Priority in MMEngine"].rstrip(")").split(" (")
        assert Priority[name].value == int(value)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The config of the page, in a folder with its module, and a function that gives a trainer."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)

    def build(*options):
        cfg = get_cfg()
        cfg.merge_from_other_cfg(yaml.safe_load(RIGHT))
        cfg.merge_from_list(["OUTPUT_DIR", str(tmp_path / "run"), "DATALOADER.NUM_WORKERS", 0])
        cfg.merge_from_list(["SEED", 0, *options])
        default_setup(cfg, None)
        return DefaultTrainer(cfg)

    yield build
    for registry, name in (
        (MODEL_REGISTRY, "PointNet"),
        (EVALUATOR_REGISTRY, "TopOne"),
        (HOOK_REGISTRY, "HeadNorm"),
    ):
        registry._objects.pop(name, None)
    for name in ("points_train", "points_val"):
        DatasetCatalog.remove(name)
    sys.modules.pop("my_parts", None)


def test_the_job_of_the_page_trains_with_all_its_hooks(job, tmp_path):
    ast.parse(LEFT)
    trainer = job()
    results = trainer.train()
    assert type(trainer.optimizer).__name__ == "AdamW"
    assert trainer.max_iter == 12 * 10  # 200 samples by 20
    assert trainer.scheduler.base_lrs == [
        group["initial_lr"] for group in trainer.optimizer.param_groups
    ]
    for line in ("EMAHook", "EarlyStopping", "BestCheckpointer", "HeadNorm"):
        assert line in trainer.describe_hooks()
    norms = trainer.storage.history("head_norm").values()
    assert [iter for _, iter in norms][:2] == [9, 19]
    assert results["accuracy"]["top1"] > 60
    assert {"model_best.pth", "model_final.pth"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


def test_the_function_of_the_page_of_rules_has_the_depths_of_its_model():
    depth_of = run(FUNCTION, "page")["depth_of"]
    assert [depth_of(name) for name in ("stem.0.weight", "levels.2.fc.bias", "head.bias")] == [
        (0, 6),
        (3, 6),
        (5, 6),
    ]


@pytest.mark.parametrize(
    ("python", "config"),
    [(LEFT, RIGHT), (RULES, RULES_IN_YAML), (LARS, LARS_IN_YAML), (STAGES, STAGES_IN_YAML)],
)
def test_an_example_builds_the_optimizer_of_mmengine(python, config):
    """The tests of `projects/solver_extras` compare the groups with the rules of OpenMMLab."""
    wanted = run(python, "page")["optim_wrapper"]["optimizer"]
    model = nn.Module()
    model.backbone = nn.Module()
    model.backbone.downsample_layers = nn.ModuleList([nn.Conv2d(2, 2, 2)])
    model.backbone.stages = nn.ModuleList(
        nn.ModuleList(nn.Linear(2, 2) for _ in range(n)) for n in (3, 3, 9, 3)
    )
    model.head, model.bn = nn.Linear(2, 2), nn.BatchNorm2d(2)
    model.cls_token = model.pos_embed = nn.Parameter(torch.zeros(1, 1, 4))
    cfg = get_cfg()
    cfg.merge_from_other_cfg(yaml.safe_load(config))
    cfg.merge_from_list(["SOLVER.MAX_ITER", 1, "SOLVER.PARAM_GROUPS.CUSTOM_KEYS", []])
    optimizer = build_optimizer(cfg, model)
    assert type(optimizer).__name__ == wanted["type"]
    for key in wanted.keys() & {"momentum", "nesterov", "betas"}:
        assert optimizer.defaults[key] == wanted[key]
    assert max(group["lr"] for group in optimizer.param_groups) >= wanted["lr"] * 0.999
    assert max(group["weight_decay"] for group in optimizer.param_groups) == wanted["weight_decay"]


def test_restarts_after_a_step_need_ten_times_the_weights_and_the_ratio():
    """By the formula of MMEngine, which starts from the initial rate."""
    entries = [
        {"NAME": "Step", "STEP_SIZE": 10, "GAMMA": 0.1, "END": 11},
        {"NAME": "CosineRestarts", "BEGIN": 10, "PERIODS": [20, 20]},
    ]
    entries[1].update(WEIGHTS=[10.0, 5.0], END_RATIO=10 * 0.01)
    schedule = build_schedule(entries, 50, "SOLVER.SCHEDULES")
    for begin, weight in ((10, 1.0), (30, 0.5)):
        for t in range(20):
            cosine = (1 + math.cos(math.pi * t / 20)) / 2
            theirs = 0.3 * 0.01 + (0.3 * weight - 0.3 * 0.01) * cosine
            assert schedule(begin + t, 0.3) == pytest.approx(theirs)


def test_the_model_of_your_own_trains_with_the_hook_of_mmselfsup(tmp_path):
    run(SELFSUP_MODEL, "page")
    cfg = tiny_cfg(
        tmp_path / "run",
        "DATASETS.TEST",
        (),
        "TEST.EVAL_PERIOD",
        0,
        "SOLVER.CHECKPOINT_PERIOD",
        1000,
    )
    cfg.merge_from_other_cfg(yaml.safe_load(SELFSUP_CONFIG))
    cfg.merge_from_list(["SOLVER.MAX_ITER", 502, "LOG.PERIOD", 500])
    trainer = DefaultTrainer(cfg)
    trainer.train()
    dense = [value > 0 for value, _ in trainer.storage.history("loss_dense").values()]
    assert dense[-4:] == [False, False, True, True]
    assert not any(dense[:-2])
