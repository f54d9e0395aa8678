"""The README cannot drift from what is run; its links and commands are looked at in tests/docs."""

import inspect
import re
import subprocess

from torch import nn

from tests.docs.pages import ROOT, blocks, run
from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, HookBase, TrainerBase
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils.registry import Registry

LOOP, HOOK, MODEL, LOADER = blocks("README.md", "python")
(ENTRIES,) = blocks("README.md", "yaml")
(SITE,) = blocks("docs/index.md", "python")


def test_the_two_commands_are_those_that_ci_takes_from_the_readme_and_the_slow_tests_are_run_too():
    script = (ROOT / ".ci/run").read_text()
    pattern = re.search(r"^grep -E '(.+)' README.md", script, re.MULTILINE)[1]
    found = subprocess.run(
        ["grep", "-E", pattern, ROOT / "README.md"], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == [
        "pip install -e . && python tools/train_net.py",
        "pip install -e '.[test]' && pytest -n auto --dist loadfile",
    ]
    assert script.endswith("\npytest -n auto --dist loadfile -m slow\n")


def test_the_loop_in_short_is_that_of_the_source():
    source = inspect.getsource(TrainerBase.train) + inspect.getsource(TrainerBase._run_iterations)
    in_short = [
        line.partition("  #")[0].strip()
        for line in LOOP.splitlines()
        if not line.startswith("while")
    ]
    assert [line for line in in_short if line not in source] == []
    assert SITE == LOOP


def test_the_hook_stores_the_size_of_each_batch(tmp_path):
    trainer = run(
        HOOK, "README.md", HookBase=HookBase, DefaultTrainer=DefaultTrainer, cfg=tiny_cfg(tmp_path)
    )["trainer"]
    assert trainer.storage.history("batch_size").values() == [(8, iter) for iter in range(10)]


def test_the_entries_of_the_config_change_the_hooks(tmp_path):
    (tmp_path / "config.yaml").write_text(ENTRIES)
    cfg = tiny_cfg(tmp_path, "SOLVER.MAX_ITER", "4ep")
    cfg.merge_from_file(str(tmp_path / "config.yaml"))
    HOOK_REGISTRY.register(
        run(HOOK.partition("\n\n\n")[0], "README.md", HookBase=HookBase)["ShowBatchSize"]
    )
    default, changed = (
        set(DefaultTrainer(c).describe_hooks().split()) for c in (tiny_cfg(tmp_path), cfg)
    )
    assert {name.strip(",") for name in changed - default} >= {
        "EMAHook",
        "ParamScheduler",
        "ShowBatchSize",
    }
    assert default - changed == {"IterationTimer,", "IterationTimer", "before_step"}


def test_the_model_and_the_loader_are_found_where_the_text_says():
    registry, mine = Registry("MODEL"), [{"x": 1}]
    model = run(MODEL, "README.md", nn=nn, MODEL_REGISTRY=registry)["MyModel"]
    trainer = run(LOADER, "README.md", DefaultTrainer=DefaultTrainer, my_loader=lambda cfg: mine)[
        "Trainer"
    ]
    assert registry.get("MyModel") is model
    assert trainer.build_train_loader(None) is mine
