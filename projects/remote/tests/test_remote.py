"""A run whose OUTPUT_DIR is an address of fsspec, here of a store in memory, or in the store of docs/extending.md."""

import argparse
import json
import os
import pickle
import threading
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from trainkit.projects.remote.store import register_addresses

from tests.docs.pages import blocks, run
from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep
from tests.exactness.machine import content
from tools.convert_checkpoint import convert
from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.format import make_format
from trainkit.checkpoint.mirror import forget_mirrors, local_folder, mirror_of
from trainkit.engine import DefaultPredictor, DefaultTrainer, default_setup
from trainkit.utils.file_io import PathManager
from trainkit.utils.logger import close_logger

pytestmark = pytest.mark.slow  # whole runs that are killed

ADDRESS, ROOT = "memory://bucket/run", "/bucket/run/"
KEEP = ("CHECKPOINT.MAX_TO_KEEP", 2, "SOLVER.CHECKPOINT_PERIOD", 2, "TEST.EVAL_PERIOD", 3)
KEEP += ("CHECKPOINT.BEST_METRIC", "classification/top1", "CHECKPOINT.BEST_TO_KEEP", 2)


@pytest.fixture(autouse=True)
def empty_store():
    register_addresses()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    forget_mirrors()  # a run that a test breaks off goes on copying its files otherwise


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Go to a machine with this name, whose local folders are empty at first."""
    return lambda name: monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / name))


def start(*options, folder=ADDRESS, resume=False, do=lambda trainer: None):
    """One start of a run; the trainer."""
    cfg = tiny_cfg(folder, *KEEP, *options)
    try:
        default_setup(cfg, Namespace(resume=resume))
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=resume)
        trainer.register_hooks([AfterStep(do)])
        trainer.train()
        return trainer
    finally:
        close_logger()


def local(trainer):
    return Path(trainer.cfg.OUTPUT_DIR)


def same(trainer, whole):
    """Whether the run has ended as the whole one."""
    files, lines = content(local(trainer))
    return files.items() <= whole[0].items() and "model_final.pth" in files and lines == whole[1]


def there():
    return {name.removeprefix(ROOT) for name in MemoryFileSystem.store if name.startswith(ROOT)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    start(folder=folder)
    return content(folder)


def test_a_run_leaves_its_files_at_the_address(on, whole):
    on("a")
    folder = local(start())
    assert content(folder) == whole
    assert there() == {path.name for path in folder.iterdir() if path.name[0] != "."} | {
        "last_upload.json"
    }
    assert {
        "model_0000007.pth",
        "model_best.pth",
        "model_final.pth",
        "metrics.json",
        "log.txt",
    } <= there()
    assert "model_0000003.pth" not in there()
    assert MemoryFileSystem.store[f"{ROOT}last_checkpoint"].getvalue() == b"model_final.pth"
    assert f"OUTPUT_DIR: {ADDRESS}" in (folder / "config.yaml").read_text()
    assert f"uploaded to {ADDRESS} after each save" in (folder / "log.txt").read_text()


@pytest.fixture
def states(monkeypatch):
    """The content of the store after each change of a run."""
    found = []

    def noted(method):
        original = getattr(MemoryFileSystem, method)

        def call(self, *arguments, **kwargs):
            result = original(self, *arguments, **kwargs)
            found.append(dict(self.store))
            return result

        monkeypatch.setattr(MemoryFileSystem, method, call)

    for method in ("put_file", "pipe_file", "rm_file"):
        noted(method)
    return found


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.slow), 13])
def test_a_run_killed_after_a_change_at_the_address_ends_elsewhere_with_the_same_bits(
    on, states, whole, every
):
    on("a")
    start()
    starts = set()
    for i, state in enumerate(states[::every]):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(state)
        on(f"machine {i}")
        trainer = start(resume=True)
        starts.add(trainer.start_iter)
        assert same(trainer, whole)
        assert {name for name in there() if name.endswith(".pth")} == whole[0].keys()
    assert len(starts) > 2


def fail(*arguments, **kwargs):
    raise ConnectionError("the network is down")


def test_what_could_not_be_uploaded_is_uploaded_by_the_next_save(on, monkeypatch, whole):
    def break_off(trainer):
        if trainer.iter in (0, 6):
            monkeypatch.setattr(
                MemoryFileSystem, "put_file", fail if trainer.iter == 0 else put_file
            )

    put_file = MemoryFileSystem.put_file
    on("a")
    log = (local(start(do=break_off)) / "log.txt").read_text()
    assert "does not have all files of the run: the network is down." in log
    on("b")
    assert same(start(resume=True), whole)


@pytest.fixture
def cut_off(on, monkeypatch):
    """A run on machine "a" that uploads nothing after iteration 4, and has ended with an error; its local folder."""

    def break_off(trainer):
        if trainer.iter == 4:
            patch.setattr(MemoryFileSystem, "put_file", fail)

    on("a")
    with monkeypatch.context() as patch:
        text = "the network is down. They are in .*/a/runs/.*: --resume goes on there, unless"
        with pytest.raises(CheckpointError, match=text):
            start(do=break_off)
        folder = Path(local_folder(ADDRESS))
    forget_mirrors()
    return folder


def bits(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*.pth")}


def test_a_run_whose_last_upload_fails_goes_on_from_its_own_files_and_uploads_them(
    cut_off, on, whole, caplog
):
    before = bits(cut_off)
    again = start(resume=True)
    assert again.status == "finished"
    assert again.start_iter == 10
    assert bits(cut_off) == before  # nothing was downloaded, nothing moved
    assert "WARNING" not in caplog.text
    on("b")
    forget_mirrors()
    other = start(resume=True)
    assert other.status == "finished"
    assert other.start_iter == 10
    assert same(other, whole)


@pytest.mark.parametrize("knows_what_is_there", [True, False])
def test_a_killed_run_goes_on_from_its_own_checkpoint_if_this_is_newer_than_the_upload(
    on, monkeypatch, whole, knows_what_is_there
):
    """Also if the process was killed before it noted what it has uploaded."""

    def kill(trainer):
        if trainer.iter == 4:
            patch.setattr(MemoryFileSystem, "put_file", fail)
        if trainer.iter == 8:
            raise KeyboardInterrupt

    on("a")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        start(do=kill)
    folder = Path(local_folder(ADDRESS))
    if not knows_what_is_there:
        (folder / ".uploaded.json").write_text(
            json.dumps({**json.loads((folder / ".uploaded.json").read_text()), "sent": {}})
        )
    forget_mirrors()
    again = start(resume=True)
    assert again.start_iter == 8
    assert same(again, whole)


def test_what_only_this_machine_has_is_moved_if_the_run_has_gone_on_elsewhere(
    cut_off, on, whole, caplog
):
    before = bits(cut_off)
    on("b")
    assert 0 < start(resume=True).start_iter < 10
    on("a")
    forget_mirrors()
    again = start(resume=True)
    assert same(again, whole)
    aside = cut_off / "previous_1"
    assert f"the files that only {cut_off} had are now in {aside}" in caplog.text
    moved = {str(cut_off / path.name): path.read_bytes() for path in aside.glob("*.pth")}
    assert moved
    assert moved.items() <= before.items()
    assert {"model_final.pth", "metrics.json"} <= {path.name for path in aside.iterdir()}
    in_store = {name for name in there() if name.endswith(".pth")}
    assert {path.name for path in cut_off.glob("*.pth")} == in_store


def test_files_of_a_machine_that_were_uploaded_are_not_kept_twice(on, whole):
    def stop(trainer):
        if trainer.iter == 4:
            trainer.request_stop("elsewhere")

    on("a")
    folder = local(start(do=stop))
    on("b")
    start(resume=True)
    on("a")
    forget_mirrors()
    assert same(start(resume=True), whole)
    assert [*folder.glob("previous_*/*.pth")] == []


def test_a_store_that_cannot_be_reached_is_not_another_run(on, monkeypatch, whole):
    """Such as a folder that is not mounted: there the files are missing, without another error."""
    get_file = MemoryFileSystem.get_file
    was_asked = threading.Event()

    def is_missing(self, path, *arguments, **kwargs):
        was_asked.set()
        raise FileNotFoundError(path)

    def unmount(trainer):
        if trainer.iter == 2:
            monkeypatch.setattr(MemoryFileSystem, "get_file", is_missing)
        if trainer.iter == 4:  # after a save
            assert was_asked.wait(60)
            monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)

    on("a")
    trainer = start(do=unmount)
    log = (local(trainer) / "log.txt").read_text()
    assert "last_upload.json is not there" in log
    assert "another run writes there" not in log
    on("b")
    forget_mirrors()
    assert same(start(resume=True), whole)


@pytest.mark.parametrize("resume", [False, True])
def test_a_store_that_cannot_be_read_at_the_start_is_an_error(on, monkeypatch, resume):
    def fail(self, path, *arguments, **kwargs):
        raise PermissionError("not today")

    on("a")
    monkeypatch.setattr(MemoryFileSystem, "get_file", fail)
    with pytest.raises(CheckpointError, match=f"'{ADDRESS}' .*: not today"):
        start(resume=resume)


def test_a_run_that_another_one_has_replaced_uploads_nothing_more(on):
    def replace(trainer):
        if trainer.iter == 0:
            MemoryFileSystem().pipe_file(
                f"{ROOT}last_upload.json", json.dumps({**manifest(), "upload": "9"}).encode()
            )

    on("a")
    with pytest.raises(CheckpointError, match=r"another run writes there \(9\)"):
        start(do=replace)
    assert manifest()["upload"] == "9"
    assert "model_final.pth" not in there()


def manifest():
    return json.loads(MemoryFileSystem.store[f"{ROOT}last_upload.json"].getvalue())


def test_if_the_newest_checkpoint_is_damaged_the_one_before_is_downloaded(on):
    on("a")
    start("CHECKPOINT.BEST_TO_KEEP", 1)
    for name in ("model_final.pth", "model_best.pth"):
        MemoryFileSystem().pipe_file(ROOT + name, b"PK damaged")
    on("b")
    assert start("CHECKPOINT.BEST_TO_KEEP", 1, resume=True).start_iter == 8


def test_the_files_of_shards_go_with_their_checkpoint_and_no_file_leaves_the_folder(on, tmp_path):
    on("a")
    here = Path(local_folder(ADDRESS))
    shards = {4: "model_0000004.shards-11111111", 9: "model_0000009.shards-22222222"}
    for iter, folder in shards.items():
        (here / folder).mkdir(parents=True)
        (here / folder / ".metadata").write_text("m")
        (here / f"model_{iter:07d}.pth").write_text("p")
    (here / "last_checkpoint").write_text("model_0000009.pth")
    remote = mirror_of(str(here))
    remote.take()
    assert remote.release() == ""
    new = {f"{folder}/.metadata" for folder in shards.values()} | {
        "model_0000004.pth",
        "model_0000009.pth",
    }
    assert there() == new | {"last_checkpoint", "last_upload.json"}

    outside = [
        "../evil.pth",
        "/evil.pth",
        "../a.shards-11111111/evil",
        "x/../evil.pth",
        "a/b.shards-11111111/evil",
    ]
    changed = {**manifest(), "files": manifest()["files"] + outside}
    MemoryFileSystem().pipe_file(f"{ROOT}last_upload.json", json.dumps(changed).encode())
    on("b")
    here = Path(local_folder(ADDRESS))
    remote = mirror_of(str(here))
    remote.download()
    assert not list(tmp_path.rglob("evil*"))
    assert {path.name for path in here.iterdir()} == {
        *(*shards.values(), "model_0000004.pth", "model_0000009.pth", "last_checkpoint"),
        ".manifest",
        ".uploaded.json",
    }
    assert (here / shards[9] / ".metadata").read_text() == "m"
    make_format("shards").remove(str(here / "model_0000004.pth"))
    remote.take()
    assert remote.release() == ""
    assert there() == {
        f"{shards[9]}/.metadata",
        "model_0000009.pth",
        "last_checkpoint",
        "last_upload.json",
    }


def test_weights_at_an_address_are_loaded_and_downloaded_again_when_they_have_changed(on, tmp_path):
    on("a")
    weights = DefaultTrainer(tiny_cfg(tmp_path)).model.state_dict()
    for value in (1.0, 2.0):
        torch.save(
            {name: torch.full_like(weight, value) for name, weight in weights.items()},
            tmp_path / "weights.pth",
        )
        PathManager.copy_from_local(str(tmp_path / "weights.pth"), "memory://bucket/weights.pth")
        cfg = tiny_cfg(tmp_path, "MODEL.WEIGHTS", "memory://bucket/weights.pth")
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=False)
        for model in (trainer.model, DefaultPredictor(cfg).model):
            assert torch.equal(model.layers[0].bias, torch.full((8,), value))


def test_a_pickle_is_converted_from_an_address_to_another_one(on):
    on("a")
    MemoryFileSystem().pipe_file(
        "/bucket/x.pkl", pickle.dumps({"weight": numpy.ones(3, numpy.float32)})
    )
    assert convert("memory://bucket/x.pkl", "memory://bucket/x.pth") == []
    assert torch.equal(
        torch.load(PathManager.get_local_path("memory://bucket/x.pth"))["weight"], torch.ones(3)
    )
    with pytest.raises(
        CheckpointError, match="'s3://bucket/x.pth' cannot be written: Install s3fs"
    ):
        convert("memory://bucket/x.pkl", "s3://bucket/x.pth")


[STORE] = [code for code in blocks("docs/extending.md", "python") if "ARCHIVE" in code]


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
