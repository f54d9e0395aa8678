"""The format of the page does what it says; `projects/remote` tests a run in its store."""

import gzip
import os

import pytest
import torch
from torch import nn

from tests.docs.pages import blocks, run
from tests.engine.job import tiny_cfg
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer

FORMAT, STORE = blocks("docs/extending.md", "python")


@pytest.fixture(scope="module")
def page():
    return run(FORMAT, "docs/extending.md")


def test_a_compressed_checkpoint_is_resumed_and_a_damaged_one_is_an_error(page, tmp_path):
    model = nn.Linear(100, 100)
    checkpointer = Checkpointer(model, tmp_path, format=page["Compressed"]())
    checkpointer.save("model")
    again = nn.Linear(100, 100)
    Checkpointer(again, tmp_path, format=page["Compressed"]()).resume_or_load("")
    assert torch.equal(again.weight, model.weight)
    assert gzip.decompress((tmp_path / "model.pth").read_bytes())[:2] == b"PK"
    checkpointer.remove("model")
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint"]
    (tmp_path / "model.pth").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"cannot read '\S+model\.pth': Not a gzipped file"):
        Checkpointer(model, tmp_path, format=page["Compressed"]()).resume_or_load("")


def test_a_config_names_a_format(page, tmp_path):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "CHECKPOINT.FORMAT", "compressed"))
    trainer.train()
    assert gzip.decompress((tmp_path / "model_final.pth").read_bytes())[:2] == b"PK"
    with pytest.raises(ConfigError, match="CHECKPOINT.FORMAT.*'compresed'.*did you mean 'compressed'"):
        DefaultTrainer(tiny_cfg(tmp_path, "CHECKPOINT.FORMAT", "compresed"))


def test_the_store_keeps_files_by_name(tmp_path):
    page = run(STORE.partition("@STORE_REGISTRY")[0], "docs/extending.md")
    page["ARCHIVE"] = str(tmp_path / "archive")
    store = page["Archive"]("archive://run1")
    (tmp_path / "here").write_text("1")
    for name in ("log.txt", "a/b"):
        store.put(str(tmp_path / "here"), name)
    assert sorted(store.list()) == ["a/b", "log.txt"]
    store.get("a/b", str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "1"
    store.remove("a/b")
    assert [*store.list()] == ["log.txt"]
    with pytest.raises(FileNotFoundError):
        store.get("a/b", str(tmp_path / "there"))
