"""Whole runs on a GPU: every trainer with all default hooks, resumed, and on the second GPU."""

import threading

import pytest
import torch
from trainkit.projects.async_save import format, host_copy
from trainkit.projects.async_save.format import AsyncFormat
from trainkit.projects.graph.tests.test_graph import Net
from trainkit.projects.non_finite.policies import SkipNonFinite

from tests.cuda import needs_cuda
from tests.engine.job import tiny_cfg
from tests.engine.tiny import Weight, batches, scalars
from tests.exactness.jobs import Configured
from tests.exactness.machine import check
from trainkit.checkpoint import Checkpointer
from trainkit.checkpoint.file import read_file
from trainkit.checkpoint.format import CheckpointFormat
from trainkit.data import TRANSFORM_REGISTRY
from trainkit.engine import AMPTrainer, DefaultTrainer, SimpleTrainer
from trainkit.engine.hooks import CallbackHook, MemorySnapshot
from trainkit.utils.device import uuid_of
from trainkit.utils.env import get_rng_state, set_rng_state

HOOKS = [{"NAME": "EMAHook"}, {"NAME": "RuntimeInfo"}]
SKIP = ("SOLVER.NON_FINITE.POLICY", "skip", "SOLVER.ACCUMULATION_STEPS", 2)
FUSED = ("SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.OPTIMIZER.FUSED", True, "SOLVER.BASE_LR", 0.01)
SETTINGS = {
    "SimpleTrainer": (),
    "AMPTrainer float16": ("SOLVER.AMP.ENABLED", True),
    "AMPTrainer bfloat16": ("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16"),
    "skip and accumulation": SKIP,
    "all together": (
        *SKIP,
        *("SOLVER.AMP.ENABLED", True),
        *("SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm"),
    ),
}

draws_as_cpu = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a GPU draws other random numbers"
)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def config(folder, *options, name="cuda"):
    return tiny_cfg(
        folder, "MODEL.DEVICE", name, "LOG.ASYNC", True, "HOOKS", HOOKS, *FUSED, *options
    )


def train(folder, *options, name="cuda", hooks=()):
    cfg = config(folder, *options, name=name)
    torch.manual_seed(cfg.SEED)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks(hooks)
    trainer.train()
    return trainer


def resumes_exactly(folder, *options):
    check(Configured(*options, make_cfg=config), folder / "exact", num_kills=2)


@TRANSFORM_REGISTRY.register()
def LabelOnCPU(cfg):
    """torch puts numbers on the default device, and cannot pin them there."""
    return lambda sample: {**sample, "label": torch.tensor(sample["label"], device="cpu")}


@needs_cuda
def test_a_run_whose_default_device_is_the_gpu_resumes_exactly(tmp_path):
    options = ("CHECKPOINT.ASYNC", True, "SOLVER.ACCUMULATION_STEPS", 2)
    options += ("INPUT.TRAIN_TRANSFORM", "LabelOnCPU", "INPUT.TEST_TRANSFORM", "LabelOnCPU")
    torch.set_default_device("cuda")
    try:
        resumes_exactly(tmp_path, *options)
    finally:
        torch.set_default_device(None)


@needs_cuda
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_a_run_that_is_killed_and_resumed_ends_as_the_whole_one(options, tmp_path):
    resumes_exactly(tmp_path, *options)


@draws_as_cpu
@needs_cuda
def test_a_run_has_the_weights_the_statistics_and_the_results_of_one_on_the_cpu(tmp_path):
    gpu, cpu = train(tmp_path / "gpu"), train(tmp_path / "cpu", name="cpu")
    state = {name: value.cpu() for name, value in gpu.model.state_dict().items()}
    torch.testing.assert_close(state, cpu.model.state_dict())
    assert state["layers.1.running_mean"].any()
    top1 = [scalars(trainer)["classification/top1"] for trainer in (gpu, cpu)]
    assert top1[0] == top1[1]


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_forward_pass_is_under_autocast_of_cuda(dtype):
    found = []

    def compute(weight, batch):
        product = weight.view(1, 1) @ batch
        found.append((product.dtype, product.device.type, torch.is_autocast_enabled("cuda")))
        return product.float().sum()

    model = Weight(compute).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    AMPTrainer(model, [torch.ones(1, 1)], optimizer, precision=dtype).train(0, 1)
    assert found == [(dtype, "cuda", True)]


@draws_as_cpu
@needs_cuda
@pytest.mark.parametrize("trainer_type", [SimpleTrainer, AMPTrainer])
def test_skipped_updates_leave_what_they_leave_on_the_cpu(trainer_type):
    by_scaler = trainer_type is AMPTrainer

    def run(name):
        torch.manual_seed(0)
        model = Net().to(name)
        bad = () if by_scaler else (0, 3)  # of the scaler the first updates overflow
        data = [
            (x * float("nan"), y) if place in bad else (x, y)
            for place, (x, y) in enumerate(batches(8))
        ]
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
        options = {"log_grad_scaler": True} if by_scaler else {"non_finite": SkipNonFinite()}
        trainer = trainer_type(model, data, optimizer, async_write_metrics=True, **options)
        trainer.train(0, 8)
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        return state, {
            name: scalars(trainer).get(name) for name in ("skipped_updates", "[metric]grad_scaler")
        }

    on_cuda, on_cpu = run("cuda"), run("cpu")
    torch.testing.assert_close(on_cuda, on_cpu)
    assert on_cuda[1]["skipped_updates"][-1][0] >= 2


@needs_cuda
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_a_recorded_run_has_the_losses_of_an_ordinary_one_and_resumes_exactly(options, tmp_path):
    ordinary = train(tmp_path / "ordinary", *options, "SOLVER.MAX_ITER", 20)
    graph = (*options, "SOLVER.MAX_ITER", 20, "SOLVER.GRAPH.ENABLED", True)
    recorded = train(tmp_path / "recorded", *graph)
    losses = [
        [value for value, _ in scalars(trainer)["total_loss"]] for trainer in (ordinary, recorded)
    ]
    # a recorded update has its lr in float32
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert recorded._trainer._recordings
    resumes_exactly(tmp_path, *graph)


@needs_two
@needs_cuda
@pytest.mark.parametrize(
    "options",
    [
        ("CHECKPOINT.ASYNC", True),
        ("SOLVER.GRAPH.ENABLED", True),
        SETTINGS["AMPTrainer float16"],
    ],
)
def test_a_run_on_the_second_gpu_leaves_the_first_one_alone(options, tmp_path):
    found = set()

    def look(trainer):
        found.add((torch.cuda.current_device(), torch.cuda.memory_allocated(0)))

    first = train(tmp_path / "first", *options)
    allocated = torch.cuda.memory_allocated(0)
    second = train(
        tmp_path / "second", *options, name="cuda:1", hooks=[CallbackHook(after_step=look)]
    )
    states = [
        {name: value.cpu() for name, value in each.model.state_dict().items()}
        for each in (first, second)
    ]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert found == {(1, allocated)}


@needs_two
@needs_cuda
def test_the_threads_of_a_run_have_its_gpu_as_their_current_one(tmp_path, monkeypatch):
    found = {}

    def look():
        found[threading.current_thread().name] = torch.cuda.current_device()

    class Watched(CheckpointFormat):
        def write(self, state, path):
            look()
            super().write(state, path)

    monkeypatch.setattr(format, "make_format", lambda name, model: Watched())
    train(
        tmp_path,
        *("CHECKPOINT.ASYNC", True),
        name="cuda:1",
        hooks=[CallbackHook(after_step=lambda trainer: trainer.storage.publish(look))],
    )
    assert found == {"trainkit-metrics_0": 1, "checkpoint_0": 1}


@needs_cuda
def test_the_memory_of_a_save_is_taken_again_when_it_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()

    class Late(CheckpointFormat):
        def write(self, state, path):
            assert may_write.wait(60)
            super().write(state, path)

    class Watched(AsyncFormat):
        def submit(self, save):
            future = super().submit(save)
            result = future.result
            future.result = lambda: (may_write.set(), result())  # somebody waits for the save
            return future

    monkeypatch.setattr(host_copy, "BLOCK_SIZE", 64)
    model = torch.nn.ParameterList(torch.zeros(40) for _ in range(3)).cuda()
    checkpointer = Checkpointer(model, tmp_path, format=Watched(Late()))
    for number in (1.0, 2.0):
        for place, parameter in enumerate(model):
            parameter.data.fill_(number + 10 * place)
        may_write.clear()
        checkpointer.save(f"model_{number:.0f}")
    checkpointer.wait()

    saved = [read_file(tmp_path / f"model_{number}.pth")["model"].values() for number in (1, 2)]
    assert [[value.unique().tolist() for value in values] for values in saved] == [
        [[1], [11], [21]],
        [[2], [12], [22]],
    ]


@needs_cuda
@pytest.mark.parametrize(
    ("room", "limit", "num"),
    [(None, 1, 3), (2, 1, 2), (2 - 2**-15, 1, 1), (0.9, 1, 0), (None, 0, 0)],
)
def test_an_asynchronous_save_copies_beside_the_computation_if_it_has_room(
    room, limit, num, tmp_path, monkeypatch
):
    size = 2**24  # above 10 MiB torch takes no part of memory that it has
    tensors = [torch.full((size,), i, dtype=torch.uint8, device="cuda") for i in range(3)]
    form, memory, own, are_beside = (
        AsyncFormat(),
        torch.accelerator.memory,
        torch.accelerator.current_stream(),
        [],
    )

    def copy_(self, source, copy=torch.Tensor.copy_, **kwargs):
        if source.is_cuda and self.is_cpu:
            are_beside.append(torch.accelerator.current_stream() != own)
        return copy(self, source, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(host_copy, "BLOCK_SIZE", size)
    memory.empty_cache()
    before, taken = (
        memory.memory_allocated(),
        memory.max_memory_allocated() - memory.memory_reserved(),
    )
    if room is not None:
        monkeypatch.setattr(
            memory, "get_memory_info", lambda device: (taken + int(room * size) + 1000, 10_000)
        )
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        state = form.prepare({"tensors": tensors})
    finally:
        torch.cuda.set_per_process_memory_fraction(1)
    for tensor in tensors:
        tensor.fill_(3)
    assert (memory.memory_allocated() > before) == (num > 0)
    form.write(state, str(tmp_path / "model.pth"))
    assert memory.memory_allocated() == before
    assert are_beside == [False] * (3 - num) + [True] * num
    saved = read_file(tmp_path / "model.pth")["tensors"]
    assert [(tensor.min().item(), tensor.max().item()) for tensor in saved] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]


@needs_two
@needs_cuda
def test_the_random_state_of_the_device_in_use_goes_to_the_one_that_a_resumed_run_uses():
    torch.cuda.set_device(0)
    torch.cuda.default_generators[0].manual_seed(3)
    torch.cuda.default_generators[1].manual_seed(4)
    state = get_rng_state()
    torch.cuda.set_device(1)
    try:
        set_rng_state(state)
        assert [generator.initial_seed() for generator in torch.cuda.default_generators] == [4, 3]
    finally:
        torch.cuda.set_device(0)


@needs_two
@needs_cuda
def test_each_gpu_has_a_uuid_of_its_own_and_a_cpu_has_none():
    first, second, current, cpu = (
        uuid_of(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda", "cpu")
    )
    assert first != second
    assert current == [first, second][torch.cuda.current_device()]
    assert cpu is None


def run_out(trainer):
    torch.empty(2**45, device="cuda")


def spoil(trainer):
    next(trainer.model.parameters()).data.fill_(float("nan"))


@needs_cuda
@pytest.mark.parametrize(
    ("fail", "error"), [(run_out, torch.OutOfMemoryError), (spoil, FloatingPointError)]
)
def test_a_failure_ends_the_run_and_the_process_can_train_again(fail, error, tmp_path):
    hooks = [
        MemorySnapshot(str(tmp_path / "memory")),
        CallbackHook(before_step=lambda t: t.iter == 3 and fail(t)),
    ]
    with pytest.raises(error, match="out of memory|not finite in iteration 3"):
        train(tmp_path, hooks=hooks)

    assert [*tmp_path.glob("memory/*")] == [tmp_path / "memory/memory_3_rank0.pickle"] * (
        fail is run_out
    )
    assert train(tmp_path / "next").status == "finished"
