"""The order of work on streams, judged by torch's own sanitizer (CSAN); each with an order that it must refuse."""

import contextlib

import pytest
import torch
from torch.cuda import _gpu_trace as gpu_trace
from torch.cuda import _sanitizer as sanitizer
from trainkit.projects.graph.tests.test_graph import Net, batches, fused_sgd
from trainkit.projects.hooks.data import CopyAhead

from tests.cuda import needs_cuda
from tests.fake_cuda.test_on_trainers import SETTINGS, train
from trainkit.engine import GraphTrainer, SimpleTrainer

CALLBACKS = [registry for name, registry in vars(gpu_trace).items() if name.endswith("Callbacks")]
RUNS = SETTINGS | {
    "async save": ("CHECKPOINT.ASYNC", True),
    "graph": ("SOLVER.GRAPH.ENABLED", True),
}


@pytest.fixture
def watched():
    """A context in which two streams that use one tensor without an order are an error."""

    @contextlib.contextmanager
    def watch():
        with sanitizer.CUDASanitizerDispatchMode():
            yield
        stop()

    def stop():
        for registry in CALLBACKS:
            registry.callback_list.clear()

    yield watch
    stop()


def on_cuda(trainer_type, **kwargs):
    torch.manual_seed(0)
    model = Net().cuda()
    data = [tuple(part.pin_memory() for part in pair) for pair in batches(4)]
    torch.cuda.synchronize()
    trainer = trainer_type(model, data, fused_sgd(model), async_write_metrics=True, **kwargs)
    trainer.register_hooks([CopyAhead()])
    return trainer


@needs_cuda
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_run_with_all_default_hooks_has_no_race(options, tmp_path, watched):
    with watched():
        assert train(tmp_path, *options).status == "finished"


@needs_cuda
def test_the_memory_of_a_batch_is_kept_from_the_next_one_until_the_stream_that_reads_it_has_read_it(
    monkeypatch,
):
    kept, read = set(), set()

    def note(tensor, stream):
        kept.add((tensor.data_ptr(), stream.stream_id))

    def copy(static, batch, copy=torch._foreach_copy_):
        read.update((tensor.data_ptr(), torch.cuda.current_stream().stream_id) for tensor in batch)
        copy(static, batch)

    class Watched(GraphTrainer):
        def call_model(self, batch):
            read.update(
                (tensor.data_ptr(), torch.cuda.current_stream().stream_id) for tensor in batch
            )
            return super().call_model(batch)

    monkeypatch.setattr(torch.Tensor, "record_stream", note)
    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    trainer = on_cuda(Watched)
    # three ordinary steps on a stream of their own, then the recording and copies into it
    trainer.train(0, 6)
    own = {tensor.data_ptr() for tensor in trainer._recording.inputs}
    of_batches = {(tensor, stream) for tensor, stream in read if tensor not in own}
    assert len({stream for _, stream in of_batches}) == 2
    assert of_batches <= kept


@needs_cuda
def test_a_batch_that_is_used_before_its_copy_has_ended_is_found(watched, monkeypatch):
    def move(self, data, device):
        with torch.Stream(device):
            return tuple(tensor.to(device, non_blocking=True) for tensor in data)

    monkeypatch.setattr(CopyAhead, "move", move)
    with watched(), pytest.raises(sanitizer.CUDASanitizerErrors):
        on_cuda(SimpleTrainer).train(0, 3)
