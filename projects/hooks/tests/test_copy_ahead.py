"""Batches that are copied while the device computes."""

from collections import UserDict

import torch
from trainkit.projects.hooks.copy_ahead import CopyAhead

from tests.cuda import needs_cuda
from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer


def test_it_moves_like_move_to_device():
    meta = torch.device("meta")  # a device that is not the CPU, on every machine
    batch = UserDict(x=torch.ones(2), name="a")
    [moved] = CopyAhead().move([batch], meta)
    assert (moved["x"].device, moved["name"], type(moved)) == (meta, "a", UserDict)
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
