"""The store of the page docs/extending.md does what the page says."""

import argparse
import os

from tests.docs.pages import blocks, run
from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, default_setup

STORE = blocks("docs/extending.md", "python")[4]


def test_a_run_in_an_archive_is_resumed_on_another_machine(tmp_path, monkeypatch):
    page = run(STORE, "docs/extending.md")
    page["ARCHIVE"] = str(tmp_path / "archive")
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "a"))
    cfg = tiny_cfg("archive://run1")
    default_setup(cfg, argparse.Namespace(resume=False))
    trainer = DefaultTrainer(cfg)
    trainer.train(0, 5)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "b"))
    cfg = tiny_cfg("archive://run1")
    default_setup(cfg, argparse.Namespace(resume=True))
    again = DefaultTrainer(cfg)
    again.resume_or_load()
    assert again.start_iter == 5
    assert {"model_final.pth", "log.txt", "config.yaml"} <= {*os.listdir(tmp_path / "archive/run1")}
