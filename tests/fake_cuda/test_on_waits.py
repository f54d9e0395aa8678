"""Where the host waits for the device, by place; the loop itself must not."""

from collections import Counter

import pytest
import torch

from tests.cuda import needs_cuda
from tests.fake_cuda import device
from tests.fake_cuda.test_on_trainers import SETTINGS, train
from trainkit.checkpoint.file import read_file
from trainkit.checkpoint.format import make_format
from trainkit.checkpoint.ranks import gather_rank_states
from trainkit.engine.hooks import CallbackHook
from trainkit.utils import comm
from trainkit.utils.device import new_event, wait_for
from trainkit.utils.events.numbers import Numbers

LONG = (
    "SOLVER.MAX_ITER",
    60,
    "SOLVER.CHECKPOINT_PERIOD",
    30,
    "TEST.EVAL_PERIOD",
    0,
    "LOG.PERIOD",
    5,
)
GRAPHS = {
    f"{name}, graph": (*options, "SOLVER.GRAPH.ENABLED", True) for name, options in SETTINGS.items()
}
RUNS = SETTINGS | GRAPHS | {"logical ranks": ("SOLVER.LOGICAL_RANKS", 2)}


def waits_by_iteration(folder, *options):
    """iteration -> what the loop has waited for from its ``before_step`` to the end of its ``after_step``."""
    found = {}

    def start(trainer):
        device.waits.clear()

    def end(trainer):
        found[trainer.iter] = [
            (wait.what, wait.place) for wait in device.waits if wait.thread == "MainThread"
        ]

    train(folder, *LONG, *options, hooks=[CallbackHook(before_step=start, after_step=end)])
    return found


@needs_cuda
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_step_waits_at_most_for_the_event_of_two_steps_before(options, tmp_path):
    found = waits_by_iteration(tmp_path, *options)
    settled = {iter: waits for iter, waits in found.items() if iter >= 10}
    assert {wait for waits in settled.values() for wait in waits} == {("event", "metrics.py:_keep")}
    assert max(len(waits) for waits in settled.values()) == 1


@needs_cuda
def test_threads_that_wait_for_the_device_sleep(tmp_path):
    device.waits.clear()
    train(tmp_path, *LONG, "CHECKPOINT.ASYNC", True)
    threads = {(wait.thread, wait.what) for wait in device.waits if "event" in wait.what}
    assert threads == {
        ("MainThread", "event"),
        ("trainkit-metrics_0", "event"),
        ("checkpoint_0", "event"),
    }
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert device.waits[-1].what == "event, spinning"


@needs_cuda
def test_the_fake_device_refuses_a_wait_that_would_make_a_context_on_another_gpu():
    event = new_event(torch.device("cuda:1"))
    with pytest.raises(RuntimeError, match="waits for cuda:1 .* a context on its device, cuda:0"):
        event.synchronize()
    wait_for(event)
    assert torch.cuda.current_device() == 0


@needs_cuda
def test_numbers_of_another_gpu_than_the_current_one_are_read_when_they_have_arrived():
    numbers = Numbers([torch.tensor(float(i), device="cuda:1") for i in range(3)])
    device.waits.clear()
    assert [*numbers.read()] == [0.0, 1.0, 2.0]
    assert [wait.what for wait in device.waits] == ["event"]


@needs_cuda
@pytest.mark.parametrize(("name", "is_one"), [("staged", True), ("", False)])
def test_a_staged_save_waits_once_for_all_tensors(name, is_one, tmp_path):
    tensors = {str(i): torch.full((100,), float(i), device="cuda") for i in range(5)}
    form = make_format(name)
    device.waits.clear()
    form.write(form.prepare({"model": tensors}), str(tmp_path / "model.pth"))
    assert (len(device.waits) == 1) == is_one
    saved = read_file(tmp_path / "model.pth")["model"]
    assert all(torch.equal(value, torch.full((100,), float(name))) for name, value in saved.items())


@needs_cuda
def test_asynchronous_saves_copy_into_a_pinned_block_that_is_kept():
    form, blocks = make_format("async_save"), [device.native.num_pinned()]
    for _ in range(2):
        form.prepare({"model": {"weight": torch.ones(3, device="cuda")}}).state()
        blocks.append(device.native.num_pinned())
    assert blocks == [blocks[0], blocks[0] + 1, blocks[0] + 1]


@needs_cuda
def test_a_save_of_several_ranks_waits_once_for_all_that_they_may_not_share(monkeypatch):
    monkeypatch.setattr(comm, "broadcast", lambda digests: {})  # rank 0 has other values
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)).cuda()
    state = {"model": model.state_dict()}
    device.waits.clear()
    [part] = gather_rank_states(state, model, {})
    assert [wait.what for wait in device.waits] == ["event"]
    torch.testing.assert_close(
        part["model"], {name: value.cpu() for name, value in model.named_buffers()}
    )


@needs_cuda
def test_beside_its_steps_a_run_waits_twice_for_each_save_and_in_evaluations(tmp_path):
    device.waits.clear()
    train(tmp_path, *LONG, "TEST.EVAL_PERIOD", 30, "CHECKPOINT.ASYNC", True)
    places = Counter(
        wait.place for wait in device.waits if wait.thread == "MainThread" and wait.what != "event"
    )
    del places["build.py:build_model"]
    assert places == {
        "finite.py:are_certainly_finite": 6,  # before each save; one read for all values
        "evaluator.py:process": 12,  # the labels and the predictions of a batch
    }
