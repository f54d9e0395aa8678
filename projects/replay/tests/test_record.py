"""What the hook of every run puts into its checkpoints, and what it says when a run is resumed."""

import argparse
import logging
import re

import pytest
import torch
from trainkit.projects.replay.tests.job import Scans, stop_at

from tests.engine.job import tiny_cfg
from trainkit.checkpoint.file import read_file
from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.engine.hooks import CallbackHook


def resumed(cfg, caplog):
    """The rows of the table of other settings that a resumed run shows; the first has the names of the columns."""
    caplog.clear()
    DefaultTrainer(cfg).resume_or_load()
    tables = [
        text
        for text in caplog.messages
        if text.startswith("The checkpoint was written with other settings")
    ]
    return [
        re.split(r" {2,}", line.strip())
        for table in tables
        for line in table.splitlines()[1:]
        if line[0] != "-"
    ]


def test_settings_that_change_what_a_resumed_run_computes_are_shown(tmp_path, caplog):
    hooks = [{"NAME": "GarbageCollection", "PERIOD": 5, "ENABLED": True}]
    DefaultTrainer(cfg := tiny_cfg(tmp_path, "HOOKS", hooks)).train()
    others = {  # key: former value, value, what is used
        "SEED": (1, 2, "checkpoint"),
        "SOLVER.BASE_LR": (0.1, 0.2, "checkpoint"),
        "SOLVER.MAX_ITER": (10, 20, "this run"),
        "SOLVER.AMP.PRECISION": ("float16", "bfloat16", "this run"),
        "DATASETS.TRAIN": (["tiny_train"], ["tiny_val"], "this run"),
        "MODEL.WIDTH": ("-", 7, "this run"),
    }
    options = [item for key, (_, new, _) in others.items() for item in (key, new)]
    no_matter = ("DATALOADER.NUM_WORKERS", 1, "LOG.PERIOD", 3, "MODEL.WEIGHTS", "other.pth")

    titles, *rows = resumed(tiny_cfg(tmp_path, "HOOKS", hooks, *no_matter, *options), caplog)

    assert titles == ["setting", "of this run", "in the checkpoint", "what is used"]
    wanted = [
        [key, repr(new), "-" if old == "-" else repr(old), used]
        for key, (old, new, used) in others.items()
    ]
    assert sorted(rows) == sorted(wanted)
    (tmp_path / "config.yaml").write_text(cfg.dump())
    same = get_cfg()
    same.merge_from_file(str(tmp_path / "config.yaml"))
    assert list(same.HOOKS[0]) != list(hooks[0])  # the keys are in another order
    assert resumed(same, caplog) == []


def test_a_run_whose_checkpoints_are_in_parts_says_that_no_step_of_it_can_be_repeated(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 3, "SOLVER.STEPS", ()))
    trainer.register_hooks([CallbackHook(before_step=lambda trainer: [][trainer.iter])])
    monkeypatch.setattr(trainer.checkpointer.format, "collective", True)
    with pytest.raises(IndexError):
        trainer.train()

    assert "its checkpoints are in parts" in caplog.text
    assert "To repeat the step" not in caplog.text
    assert not (tmp_path / "capsule.rank0.pt").exists()


class Nameless(Scans):
    def sample_name(self, index):
        raise LookupError("no name")


DatasetCatalog.register("tiny_nameless", Nameless)


def test_names_of_samples_that_cannot_be_had_do_not_end_a_run(tmp_path, caplog):
    options = (
        "DATASETS.TRAIN",
        ("tiny_nameless",),
        "DATASETS.TEST",
        (),
        "SOLVER.NON_FINITE.POLICY",
        "ignore",
    )
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options, "SOLVER.CHECKPOINT_PERIOD", 1))
    trainer.register_hooks([stop_at(0)])
    trainer.train()
    assert "not recorded: LookupError: no name" in caplog.text
    assert (tmp_path / "model_0000000.pth").exists()


def test_a_run_goes_with_torchs_newer_setting_of_the_precision(tmp_path):
    cfg = tiny_cfg(tmp_path)
    # torch refuses to read the older setting beside it
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        default_setup(cfg, argparse.Namespace())
        DefaultTrainer(cfg).train()
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    origin = read_file(tmp_path / "model_final.pth")["trainer"]["origin"]
    assert origin["facts"]["precision of float32 products"] == "tf32"
