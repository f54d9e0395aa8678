"""Hooks that log or free memory, and batches that are copied while the device computes."""

import gc
import re
import weakref
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from trainkit.projects.hooks import data
from trainkit.projects.hooks.data import CopyAhead

from tests.cuda import needs_cuda
from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, Steps, batches, fail_at, sgd
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import (
    CallbackHook,
    EmptyCache,
    EvalHook,
    GarbageCollection,
    TorchMemoryStats,
)
from trainkit.engine.step import SimpleTrainer
from trainkit.evaluation import inference_on_dataset
from trainkit.utils.device import move_to_device


@pytest.mark.parametrize(("max_iter", "expected"), [(20, [3, 6]), (4, [3, 4])])
def test_it_reports_every_period_and_exactly_so_often(monkeypatch, caplog, max_iter, expected):
    for i, name in enumerate(["allocated", "reserved"]):
        monkeypatch.setattr(
            torch.accelerator.memory, f"memory_{name}", lambda i=i: (2 * i + 1) * 2**20
        )
        monkeypatch.setattr(
            torch.accelerator.memory, f"max_memory_{name}", lambda i=i: (2 * i + 2) * 2**20
        )
    monkeypatch.setattr(
        torch.accelerator.memory, "reset_peak_memory_stats", lambda: pytest.fail("others read it")
    )
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "summary")
    caplog.set_level("INFO", logger="trainkit.projects.hooks.profiler")
    Steps([TorchMemoryStats(period=3, max_runs=2)]).train(0, max_iter)
    *lines, summary = caplog.messages
    assert summary == "\nsummary"
    numbers = [re.findall(r"\d+", line) for line in lines]
    # after how many iterations, then MiB: allocated and its peak, reserved and its peak
    assert numbers == [[str(done), "1", "2", "3", "4"] for done in expected]


ALL_BUT_ENDS = {"after_epoch": False, "after_step": True, "before_epoch": True}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({}, "0 1 - 2 3 - e0 e1 -"), (ALL_BUT_ENDS, "- 0 - 1 - - 2 - 3 - - e0 - e1 -")],
)
def test_the_cache_is_emptied_where_it_was_asked_for_in_training_and_in_evaluation(
    monkeypatch, arguments, expected
):
    calls, model = [], Regression()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    # the evaluation asks as well
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(
        torch, "get_device_module", lambda: SimpleNamespace(empty_cache=lambda: calls.append("-"))
    )
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    monitor = CallbackHook(
        before_step=lambda trainer: calls.append(str(trainer.iter)),
        before_eval_step=lambda trainer, phase, index, inputs: calls.append(f"e{index}"),
    )
    evaluate = EvalHook(0, lambda: inference_on_dataset(model, batches(2), None))
    trainer.register_hooks([EmptyCache(**arguments), monitor, evaluate])
    trainer.train(0, 4)
    assert calls == expected.split()


class Knot:
    def __init__(self):
        self.self = self


def test_garbage_is_collected_every_period_and_not_between_and_by_python_after_a_failure():
    made, found, was_enabled = [], [], gc.isenabled()
    gc.enable()
    note = CallbackHook(
        after_step=lambda trainer: found.append([i for i, knot in enumerate(made) if knot()])
    )
    trainer = Steps([GarbageCollection(3)], step=lambda iter: made.append(weakref.ref(Knot())))
    trainer.register_hooks([note], priority="LOW")
    trainer.train(0, 7)
    assert found == [[0], [0, 1], [], [3], [3, 4], [], [6]]

    with pytest.raises(RuntimeError, match="step 1 failed"):
        Steps([GarbageCollection()], step=fail_at(1)).train(0, 3)
    assert gc.isenabled()
    gc.enable() if was_enabled else gc.disable()


def test_it_moves_like_move_to_device():
    meta = torch.device("meta")  # a device that is not the CPU, on every machine
    batch = UserDict(x=torch.ones(2), name="a")
    [moved] = CopyAhead().move([batch], meta)
    assert moved["x"].device == meta
    assert moved["name"] == "a"
    assert type(moved) is UserDict
    assert batch["x"].device == torch.device("cpu")


def test_a_run_on_a_cpu_does_without_it(tmp_path):
    assert not any(isinstance(hook, CopyAhead) for hook in DefaultTrainer(tiny_cfg(tmp_path)).hooks)


@needs_cuda
def test_the_next_batch_is_copied_while_the_device_still_computes():
    device = torch.device("cuda", torch.cuda.current_device())
    prefetcher = CopyAhead()
    batch = {"x": torch.arange(1000.0).pin_memory(), "pageable": torch.arange(10.0)}
    first = prefetcher.move(batch, device)  # makes the stream
    torch.cuda.synchronize()

    torch.cuda._sleep(2_000_000_000)  # about a second of computation
    computed = torch.cuda.Event()
    computed.record()
    moved = prefetcher.move(batch, device)
    with torch.cuda.stream(torch.cuda.Stream()):
        while moved["x"].sum().item() != sum(range(1000)):
            pass
    assert not computed.query()  # the copy is there, and the computation still runs

    total = (moved["x"].sum() + moved["pageable"].sum()).item()  # waits for both
    assert total == sum(range(1000)) + sum(range(10))
    assert torch.equal(first["x"].cpu(), batch["x"])


@needs_cuda
def test_all_batches_are_copied_on_one_stream_beside_that_of_the_computation(monkeypatch):
    device, streams = torch.device("cuda", torch.cuda.current_device()), []

    def move(batch, device):
        streams.append(torch.accelerator.current_stream(device))
        return move_to_device(batch, device)

    monkeypatch.setattr(data, "move_to_device", move)
    hook = CopyAhead()
    for _ in range(5):
        hook.move(torch.ones(3).pin_memory(), device)
    first = streams[0]
    assert streams == [first] * 5
    assert first != torch.accelerator.current_stream(device)
