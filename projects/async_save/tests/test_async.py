"""Saving in a thread: the same files, from the state of the moment, while training goes on."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from trainkit.projects.async_save.host_copy import HostCopy

from tests.checkpoint.conftest import Counter, linear, weight_of
from tests.engine.hooks.test_checkpoint_ranks import fail_on_rank_0
from tests.engine.tiny import AfterStep, Steps
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer
from trainkit.checkpoint.file import read_file
from trainkit.engine.hooks import PeriodicCheckpointer


class Disk:
    """Whatever is written waits for ``go``."""

    def __init__(self):
        self.go = threading.Event()
        self._fsync = os.fsync

    def fsync(self, descriptor):
        assert self.go.wait(60)
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
        self.other = torch.arange(100.0)
        self.empty = torch.zeros(0)

    def state_dict(self):
        whole = self.whole
        return {
            "shared": [
                whole,
                whole,
                whole.view(60, 100),
                whole.view(60, 100).t(),
                torch.ones(1).expand(4),
            ],
            "parts": (whole[:10], whole[5:15]),
            "part first": [self.other[2:5], self.other, self.other.view(10, 10)],
            "others": {
                "empty": self.empty,
                "sparse": torch.eye(3).to_sparse(),
                "complex": torch.ones(2) * 1j,
            },
            "int8": torch.tensor([1, -1], dtype=torch.int8),
            "bfloat16": nn.Parameter(torch.tensor([[1.5]], dtype=torch.bfloat16)),
            "plain": [1, "a", None, 2.5, {3: True}],
        }


def test_the_file_is_the_same_byte_for_byte(tmp_path):
    found, model = {}, nn.BatchNorm1d(3)
    for format in ("", "staged", "async_save", "other"):
        # as if all belonged to one run
        (tmp_path / format).mkdir(exist_ok=True)
        (tmp_path / format / "run_id").write_text("0123456789abcdef")
        if format == "other":  # the comparison can fail
            model.weight.data[0] += 1
        checkpointer = Checkpointer(
            model, tmp_path / format, format=format.replace("other", ""), state=TwoOfOne()
        )
        checkpointer.save("model", iteration=3)
        checkpointer.wait()
        found[format] = (tmp_path / format / "model.pth").read_bytes()

    assert found[""] == found["staged"] == found["async_save"] != found["other"]
    assert len(found[""]) < 2 * 24_000  # 6000 numbers that stand in the state four times
    assert names(tmp_path / "async_save") == ["last_checkpoint", "model.pth", "run_id"]


@pytest.mark.parametrize(("num", "is_kept"), [(120_000, True), (130_000, False)])
def test_a_state_that_has_grown_by_a_fifth_takes_the_host_memory_of_the_last_copy(num, is_kept):
    first = HostCopy({"weight": torch.zeros(100_000)})
    second = HostCopy({"weight": torch.arange(float(num))}, first.memory)
    assert torch.equal(second.state()["weight"], torch.arange(float(num)))
    cpu = torch.device("cpu")
    assert (first.memory[cpu][0] is second.memory[cpu][0]) == is_kept


def test_what_changes_after_the_save_is_not_in_it(tmp_path, disk):
    model, state = linear(1), Counter({"list": [1], "tensor": torch.ones(3)})
    checkpointer = Checkpointer(model, tmp_path, format="async_save", state=state)
    assert checkpointer.save("model") is not None
    assert names(tmp_path) == []
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


def test_the_next_save_waits_for_the_one_under_way(tmp_path, disk):
    order = []
    checkpointer = Checkpointer(linear(1), tmp_path, format="async_save")
    checkpointer.save("first", on_commit=lambda: order.append("first"))

    class Late(Counter):
        def state_dict(self):
            order.append("collected")
            return {}

    checkpointer.add_checkpointable("late", Late())
    second = threading.Thread(
        target=lambda: checkpointer.save("second", on_commit=lambda: order.append("second"))
    )
    second.start()
    assert order == []
    disk.go.set()
    second.join()
    checkpointer.wait()

    assert order == ["first", "collected", "second"]
    assert (tmp_path / "last_checkpoint").read_text() == "second.pth"


READS = {
    "last_checkpoint": lambda c: c.get_checkpoint_file() == f"{c.save_dir}/model.pth",
    "load": lambda c: c.load(f"{c.save_dir}/model.pth") == {},
    "resume": lambda c: c.resume_or_load("") == {},
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whoever_reads_the_folder_waits(tmp_path, disk, read):
    checkpointer = Checkpointer(linear(1), tmp_path, format="async_save")
    checkpointer.save("model")
    assert names(tmp_path) == []
    threading.Timer(0.01, disk.go.set).start()
    assert read(checkpointer)
    assert names(tmp_path) == ["last_checkpoint", "model.pth", "run_id"]


def settled(checkpointer):
    """Looks at the folder, for which the checkpointer waits."""
    return AfterStep(lambda trainer: checkpointer.has_checkpoint())


def test_an_asynchronous_save_that_fails_is_logged_at_once_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "model_0000001.pth").mkdir()
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, format="async_save")
    errors = []
    count = AfterStep(
        lambda trainer: errors.append(sum("is not saved" in text for text in caplog.messages))
    )
    trainer = Steps([settled(checkpointer), PeriodicCheckpointer(checkpointer, 2)])
    trainer.register_hooks([settled(checkpointer), count], priority="LOW")
    trainer.train(0, 6)

    assert trainer.status == "finished"
    assert errors == [0, 1, 1, 1, 1, 1]
    (error,) = [text for text in caplog.messages if "is not saved" in text]
    assert "model_0000001.pth" in error
    assert names(tmp_path) == [
        "last_checkpoint",
        "model_0000001.pth",
        "model_0000003.pth",
        "model_final.pth",
        "run_id",
    ]


def fail_asynchronously(rank, folder):
    return fail_on_rank_0(rank, folder, "async_save")


def test_a_failure_in_the_thread_of_rank_0_fails_all_ranks(tmp_path):
    assert on_two_ranks([fail_asynchronously], tmp_path)["fail_asynchronously"] == [None, None]


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

    model = nn.Linear(2000, 2000)
    Checkpointer(model, tmp_path).resume_or_load("")
    assert weight_of(model) == 1
