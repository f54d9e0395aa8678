"""The tables name what exists, and the example can be built."""

import ast
import inspect
import re

import pytest
import yaml
from torch import nn

import trainkit_selfsup  # noqa: F401  # registers hooks
from tests.docs.pages import blocks, page, run
from tests.engine.job import tiny_cfg
from trainkit import engine
from trainkit.config import CfgNode, get_cfg
from trainkit.engine import DefaultTrainer, hooks
from trainkit.engine.hook_base import HOOK_POINTS, Priority
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.modeling import MODEL_REGISTRY
from trainkit.solver.schedules import SCHEDULE_REGISTRY

TEXT = page("docs/migrate_from_mmengine.md")
LEFT, SELFSUP_MODEL = blocks("docs/migrate_from_mmengine.md", "python")
RIGHT, SELFSUP_CONFIG = blocks("docs/migrate_from_mmengine.md", "yaml")

POINTS_OF_2022 = [
    "before_run",
    "after_load_checkpoint",
    "before_train_epoch",
    "before_train_iter",
    "after_train_iter",
    "after_train_epoch",
    "before_val_epoch",
    "before_val_iter",
    "after_val_iter",
    "after_val_epoch",
    "before_save_checkpoint",
    "before_test_epoch",
    "before_test_iter",
    "after_test_iter",
    "after_test_epoch",
    "after_run",
]
LATER_POINTS = ["before_train", "before_val", "after_val", "after_train", "before_test", "after_test"]


def tables(text):
    """For each table its rows, each a dict from the header's words to the cell."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    for block in blocks:
        header, rule, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines())
        assert all(set(cell) == {"-"} for cell in rule)
        yield [dict(zip(header, row, strict=True)) for row in rows]


ROWS = [row for table in tables(TEXT) for row in table]


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


def config_keys(node, prefix=""):
    for name, value in node.items():
        yield prefix + name
        if isinstance(value, CfgNode):
            yield from config_keys(value, f"{prefix}{name}.")


KEYS = set(config_keys(get_cfg()))


def problem_of_entry(entry):
    """What is wrong with an entry of HOOKS or SOLVER.SCHEDULES."""
    name = entry.pop("NAME")
    if name in HOOK_REGISTRY:
        accepted = {"ENABLED", *map(str.upper, inspect.signature(HOOK_REGISTRY.get(name)).parameters)}
    elif name in SCHEDULE_REGISTRY:
        accepted = {"BEGIN", "END", *map(str.upper, inspect.signature(SCHEDULE_REGISTRY.get(name)).parameters)}
    else:
        return f"{name} is not registered"
    nested = [problem_of_entry(dict(item)) for item in entry.get("SCHEDULES", [])]
    unknown = sorted(set(entry) - accepted)
    return next(filter(None, nested), None) or (f"{name} does not take {unknown}" if unknown else None)


def problem_of(span):
    """What is wrong with a name of trainkit."""
    if span.startswith("{"):
        return problem_of_entry(yaml.safe_load(span))
    name = re.match(r"[\w.]+", span)[0]
    if name in KEYS or name in HOOK_POINTS:
        return None
    where, *attributes = name.split(".")
    found = getattr(hooks, where, None) or getattr(engine, where, None)
    for attribute in attributes:
        found = getattr(found, attribute, None)
    return None if found is not None else f"there is no {name}"


def test_every_name_in_a_column_of_trainkit_exists():
    named = [span for row in ROWS for span in spans(row["trainkit"])]

    assert len(named) > 100
    assert [problem for problem in map(problem_of, named) if problem] == []


def test_every_config_key_and_entry_in_the_text_exists():
    keys = re.findall(r"`([A-Z_]+\.[A-Z_.]+)`", TEXT)
    entries = re.findall(r"`(\{NAME: \w.*?\})`", TEXT)

    assert len(keys) > 50
    assert len(entries) > 30
    assert [problem for problem in map(problem_of, keys + entries) if problem] == []


@pytest.mark.parametrize(
    ("span", "problem"),
    [
        ("SOLVER.MAX_ITERS", "there is no SOLVER.MAX_ITERS"),
        ("before_iter", "there is no before_iter"),
        ("EMA", "there is no EMA"),
        ("DefaultTrainer.resume", "there is no DefaultTrainer.resume"),
        ("{NAME: EMAHook, MOMENTUM: 0.1}", r"EMAHook does not take \['MOMENTUM'\]"),
        ("{NAME: DenseCLHook, START: 500}", r"DenseCLHook does not take \['START'\]"),
        ("{NAME: LinearLR}", "LinearLR is not registered"),
        ("{NAME: ParamScheduler, SCHEDULES: [{NAME: Linear, T_MAX: 3}]}", r"Linear does not take \['T_MAX'\]"),
    ],
)
def test_a_name_that_does_not_exist_is_found(span, problem):
    assert re.fullmatch(problem, problem_of(span))


def test_a_row_without_a_counterpart_says_why():
    assert [row for row in ROWS if not row["trainkit"] and not (row.get("Note") or row.get("Place"))] == []


def test_all_hook_points_are_there_once_and_those_of_the_first_tutorial_have_a_star():
    points = next(tables(TEXT))
    names = {spans(row["MMEngine"])[0]: row["MMEngine"].endswith("*") for row in points}

    assert len(points) == len(names) == 22
    assert [name for name, has_star in names.items() if has_star] == [n for n in names if n in POINTS_OF_2022]
    assert sorted(names) == sorted(POINTS_OF_2022 + LATER_POINTS)
    assert {spans(row["trainkit"])[0] for row in points} == set(HOOK_POINTS) - {"after_backward"}


def test_the_priorities_are_those_of_the_enum():
    table = next(table for table in tables(TEXT) if "Priority there" in table[0])
    found = [re.fullmatch(r"(\w+) \((\d+)\)", row["Priority there"]).groups() for row in table]

    assert [(name, int(value)) for name, value in found] == [(name, Priority[name].value) for name, _ in found]


@MODEL_REGISTRY.register()
class WithBackbone(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, batch):
        return {"loss": nn.functional.cross_entropy(self.head(self.backbone(batch["x"])), batch["label"])}


def test_the_example_is_python_on_the_left_and_a_job_on_the_right(tmp_path):
    ast.parse(LEFT)
    (tmp_path / "config.yaml").write_text(RIGHT)
    cfg = tiny_cfg(tmp_path, "MODEL.NAME", "WithBackbone", "SOLVER.IMS_PER_BATCH", 4)
    cfg.merge_from_file(str(tmp_path / "config.yaml"))

    trainer = DefaultTrainer(cfg)

    assert trainer.max_iter == 12 * 5  # 40 samples, two micro-batches of 4 each
    assert type(trainer.optimizer).__name__ == "AdamW"
    first = 1e-4 * 0.001  # the warm-up
    assert sorted({group["lr"] for group in trainer.optimizer.param_groups}) == pytest.approx([0.1 * first, first])
    for line in ("EMAHook", "EarlyStopping", "BestCheckpointer"):
        assert line in trainer.describe_hooks()


def test_the_model_of_your_own_trains_with_the_hook_of_mmselfsup(tmp_path):
    run(SELFSUP_MODEL, "docs/migrate_from_mmengine.md")
    (tmp_path / "config.yaml").write_text(SELFSUP_CONFIG)
    cfg = tiny_cfg(tmp_path / "run", "DATASETS.TEST", (), "TEST.EVAL_PERIOD", 0, "SOLVER.CHECKPOINT_PERIOD", 1000)
    cfg.merge_from_file(str(tmp_path / "config.yaml"))
    cfg.merge_from_list(["SOLVER.MAX_ITER", 502, "LOG.PERIOD", 500])
    trainer = DefaultTrainer(cfg)
    trainer.train()

    dense = [value > 0 for value, _ in trainer.storage.history("loss_dense").values()]
    assert dense[-4:] == [False, False, True, True]
    assert not any(dense[:-2])


def test_the_hooks_of_mmselfsup_can_be_made_as_the_table_writes_them():
    entries = [yaml.safe_load(span) for row in ROWS for span in spans(row["trainkit"]) if span.startswith("{NAME: ")]
    made = []
    for entry in entries:
        hook_class = HOOK_REGISTRY.get(entry.pop("NAME")) if entry["NAME"] in HOOK_REGISTRY else None
        if getattr(hook_class, "__module__", "").startswith("trainkit_selfsup"):
            made.append(type(hook_class(**{key.lower(): value for key, value in entry.items()})).__name__)

    assert {*made} == {"DeepClusterHook", "DenseCLHook", "ODCHook", "SimSiamHook", "SwAVHook"}
    assert len(made) == 11
