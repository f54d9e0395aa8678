"""Saving in a thread: the same files, from the state of the moment, while training goes on."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import Counter, linear, weight_of
from trainkit.checkpoint import Checkpointer
from trainkit.checkpoint.file import read_file


class Disk:
    """Whatever is written waits for ``go``, and fails if there is an ``error`` then."""

    def __init__(self):
        self.go, self.error = threading.Event(), None
        self._fsync = os.fsync

    def fsync(self, descriptor):
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.go.set()


def names(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


class TwoOfOne(Counter):
    """Tensors that share memory: the same, another shape, another view of the whole, a part; and others."""

    def __init__(self):
        self.whole = torch.arange(6000.0)
        self.empty = torch.zeros(0)

    def state_dict(self):
        whole = self.whole
        return {
            "shared": [whole, whole, whole.view(60, 100), whole.view(60, 100).t(), torch.ones(1).expand(4)],
            "parts": (whole[:10], whole[5:15]),
            "others": {"empty": self.empty, "sparse": torch.eye(3).to_sparse(), "complex": torch.ones(2) * 1j},
            "int8": torch.tensor([1, -1], dtype=torch.int8),
            "bfloat16": nn.Parameter(torch.tensor([[1.5]], dtype=torch.bfloat16)),
            "plain": [1, "a", None, 2.5, {3: True}],
        }


# ---------------------------------------------------------------------------------------- what is written
@pytest.mark.parametrize("model", [linear(1), nn.BatchNorm1d(3)], ids=lambda model: type(model).__name__)
def test_the_file_is_the_same_byte_for_byte(tmp_path, model):
    for async_save in (False, True):
        checkpointer = Checkpointer(
            model, tmp_path / str(async_save), format="async_save" if async_save else "", state=TwoOfOne()
        )
        checkpointer.save("model", iteration=3)
        checkpointer.wait()

    one, other = ((tmp_path / str(async_save) / "model.pth").read_bytes() for async_save in (False, True))
    assert one == other
    assert len(one) < 2 * 24_000  # 6000 numbers that stand in the state four times
    assert names(tmp_path / "False") == names(tmp_path / "True") == ["last_checkpoint", "model.pth"]

    model.weight.data[0] += 1  # the comparison can fail
    Checkpointer(model, tmp_path / "other", state=TwoOfOne()).save("model", iteration=3)
    assert (tmp_path / "other" / "model.pth").read_bytes() != one


@pytest.mark.parametrize("async_save", [False, True])
def test_what_changes_behind_the_save_is_not_in_it(tmp_path, disk, async_save):
    """The synchronous save is the control: it has ended before anything can change."""
    model, state = linear(1), Counter({"list": [1], "tensor": torch.ones(3)})
    checkpointer = Checkpointer(model, tmp_path, format="async_save" if async_save else "", state=state)
    if not async_save:
        disk.go.set()

    writing = checkpointer.save("model")
    assert names(tmp_path) == ([] if async_save else ["last_checkpoint", "model.pth"])
    with torch.no_grad():
        model.weight.fill_(7)
    state.value["list"].append(2)
    state.value["tensor"].fill_(7)
    disk.go.set()
    checkpointer.wait()

    saved = read_file(tmp_path / "model.pth")
    assert saved["model"]["weight"].tolist() == [[1, 1], [1, 1]]
    assert saved["state"]["value"]["list"] == [1]
    assert saved["state"]["value"]["tensor"].tolist() == [1, 1, 1]
    assert (writing is None) == (not async_save)


# ---------------------------------------------------------------------------------------- the memory of the copy


# ---------------------------------------------------------------------------------------- one at a time
def test_the_next_save_waits_for_the_one_under_way(tmp_path, disk):
    order = []
    checkpointer = Checkpointer(linear(1), tmp_path, format="async_save")
    checkpointer.save("first", on_commit=lambda: order.append("first"))

    class Late(Counter):
        def state_dict(self):
            order.append("collected")
            return {}

    checkpointer.add_checkpointable("late", Late())
    second = threading.Thread(target=lambda: checkpointer.save("second", on_commit=lambda: order.append("second")))
    second.start()
    assert order == []
    disk.go.set()
    second.join()
    checkpointer.wait()

    assert order == ["first", "collected", "second"]
    assert (tmp_path / "last_checkpoint").read_text() == "second.pth"


def test_whoever_reads_the_folder_waits(tmp_path, monkeypatch):
    def last_file(c):
        return c.get_checkpoint_file() == str(tmp_path / "model.pth")

    reads = [Checkpointer.has_checkpoint, last_file, lambda c: c.load(tmp_path / "model.pth") == {}]
    reads += [lambda c: c.resume_or_load("") == {}, lambda c: c.wait() is None]
    for read in reads:
        disk = Disk()
        monkeypatch.setattr(os, "fsync", disk.fsync)
        checkpointer = Checkpointer(linear(1), tmp_path, format="async_save")
        checkpointer.save("model")
        assert names(tmp_path) == []
        threading.Timer(0.01, disk.go.set).start()
        assert read(checkpointer)
        assert names(tmp_path) == ["last_checkpoint", "model.pth"]
        monkeypatch.undo()
        for path in tmp_path.iterdir():
            path.unlink()


# ---------------------------------------------------------------------------------------- failures


# ---------------------------------------------------------------------------------------- rotation, and the end


@pytest.mark.slow
def test_a_process_that_ends_completes_its_save(tmp_path):
    script = f"""
import torch
from trainkit.checkpoint import Checkpointer

torch.set_num_threads(1)
model = torch.nn.Linear(2000, 2000)  # 16 MB: far from written when the script is at its end
torch.nn.init.ones_(model.weight)
Checkpointer(model, {str(tmp_path)!r}, format="async_save").save("model")
"""
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True)

    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "model.pth"]
    model = nn.Linear(2000, 2000)
    Checkpointer(model, tmp_path).resume_or_load("")
    assert weight_of(model) == 1
