"""The examples of the page do what it says; `projects/remote` tests a run in its store."""

import gzip
import os
import shutil
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.docs.pages import blocks, run
from tests.engine.job import tiny_cfg
from tests.engine.tiny import Weight
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.config import ConfigError, get_cfg, prepare_projects
from trainkit.engine import (
    DefaultTrainer,
    SimpleTrainer,
    default_argument_parser,
    default_setup,
    hooks,
)
from trainkit.utils import comm, plugins
from trainkit.utils.run_folder import release_folder

ONE_STEP = ("SOLVER.MAX_ITER", 1, "SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", ())
HOOK, STEP, WRAPPER, FORMAT, STORE, LOADER, KEYS, TABLES = blocks("docs/extending.md", "python")


@pytest.fixture(scope="module")
def page():
    """What all blocks of parts define, each of which registers its part once."""
    return {
        name: value
        for block in (HOOK, STEP, WRAPPER, FORMAT, LOADER)
        for name, value in run(block, "page").items()
    }


def test_the_hook_counts_on_after_a_resume(page, tmp_path):
    cfg = tiny_cfg(tmp_path, "HOOKS", "[{'NAME': 'CountSamples'}]", "SOLVER.CHECKPOINT_PERIOD", 4)
    trainer = DefaultTrainer(cfg)
    trainer.train(0, 4)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    trainer.train()
    (hook,) = [hook for hook in trainer.hooks if isinstance(hook, page["CountSamples"])]
    assert hook.state_dict() == {"seen": cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.MAX_ITER}


def test_the_part_of_the_step_and_the_wrapper_are_chosen_by_the_config(page, tmp_path):
    gradients = {}
    for name in ("", "flooded"):
        torch.manual_seed(0)
        trainer = DefaultTrainer(tiny_cfg(tmp_path / name, "SOLVER.TRAINER", name, *ONE_STEP))
        assert type(trainer._trainer) is (page["Flooded"] if name else SimpleTrainer)
        trainer.train()
        gradients[name] = [parameter.grad for parameter in trainer.model.parameters()]
    # the loss is above 0.1, so its gradient is the same
    assert all(map(torch.equal, gradients[""], gradients["flooded"]))
    DefaultTrainer(tiny_cfg(tmp_path, "MODEL.PARALLEL", "half_gradients", *ONE_STEP)).train()
    assert (tmp_path / "model_final.pth").exists()


def test_a_compressed_checkpoint_is_resumed_and_a_damaged_one_is_an_error(page, tmp_path):
    model = nn.Linear(100, 100)
    checkpointer = Checkpointer(model, tmp_path, format=page["Compressed"]())
    checkpointer.save("model")
    again = nn.Linear(100, 100)
    Checkpointer(again, tmp_path, format=page["Compressed"]()).resume_or_load("")
    assert torch.equal(again.weight, model.weight)
    assert gzip.decompress((tmp_path / "model.pth").read_bytes())[:2] == b"PK"
    checkpointer.remove("model")
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "run_id"]
    (tmp_path / "model.pth").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"cannot read '\S+model\.pth': Not a gzipped file"):
        Checkpointer(model, tmp_path, format=page["Compressed"]()).resume_or_load("")


def test_of_compressed_checkpoints_the_last_iteration_of_the_run_is_the_newest(page, tmp_path):
    for folder, iterations in ((tmp_path / "run", (9, 29, 19)), (tmp_path / "other", (39,))):
        checkpointer = Checkpointer(nn.Linear(1, 1), folder, format=page["Compressed"]())
        for iteration in iterations:
            # the names say nothing
            checkpointer.save(f"model_{100 - iteration}", iteration=iteration)
    shutil.copy(tmp_path / "other/model_61.pth", tmp_path / "run")
    (tmp_path / "run/last_checkpoint").unlink()
    again = Checkpointer(nn.Linear(1, 1), tmp_path / "run", format=page["Compressed"]())
    assert again.resume_or_load("") == {"iteration": 29}


def test_the_store_keeps_files_by_name(tmp_path):
    page = run(STORE.partition("@STORE_REGISTRY")[0], "docs/extending.md")
    page["ARCHIVE"] = str(tmp_path / "archive")
    store = page["Archive"]("archive://run1")
    (tmp_path / "here").write_text("1")
    store.put(str(tmp_path / "here"), "a/b")
    assert [*store.list()] == ["a/b"]
    store.get("a/b", str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "1"
    store.remove("a/b")
    with pytest.raises(FileNotFoundError):
        store.get("a/b", str(tmp_path / "there"))


def test_the_loader_goes_on_after_a_resume(page, tmp_path):
    def make():
        model = Weight(lambda weight, batch: (weight * batch[0] - batch[1]).square().mean())
        trainer = SimpleTrainer(model, page["Sine"](8), torch.optim.SGD(model.parameters(), lr=0.1))
        checkpointer = Checkpointer(model, tmp_path, trainer=trainer)
        trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 3, save_last=False)])
        return trainer, checkpointer

    whole, _ = make()
    whole.train(0, 7)
    trainer, checkpointer = make()
    checkpointer.load(tmp_path / "model_0000002.pth")
    trainer.train(3, 7)
    assert torch.equal(trainer.model.weight, whole.model.weight)


@pytest.fixture
def pairs(monkeypatch):
    """The module of the page, named in the tables by the lines of the page."""
    module = ModuleType("pairs")
    vars(module).update(run(KEYS, "docs/extending.md"))
    monkeypatch.setitem(sys.modules, "pairs", module)
    tables = plugins.CONFIG_KEYS, plugins.OPTIONS
    before = [dict(table) for table in tables]
    run(TABLES, "docs/extending.md")
    yield module
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def test_a_key_is_declared_checked_and_prepares_the_run(pairs, tmp_path, monkeypatch, as_rank):
    by_option = tiny_cfg(tmp_path)
    with monkeypatch.context() as patch:  # one process is an odd number
        patch.setattr(pairs, "check", lambda cfg: None)
        default_setup(by_option, default_argument_parser().parse_args(["--pairs"]))
    release_folder(tmp_path)
    assert by_option.MODEL.PAIRS is True

    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.PAIRS", True])
    as_rank(3, 4)
    monkeypatch.setattr(comm, "set_data_ranks", lambda *ranks: found.append(ranks))
    found = []
    prepare_projects(cfg)
    assert found[-1] == (1, 2)
    as_rank(0, 3)
    with pytest.raises(ConfigError, match="MODEL.PAIRS is True with 3 processes"):
        pairs.check(cfg)
