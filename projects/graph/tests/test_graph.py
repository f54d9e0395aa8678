"""The step as a recorded graph: what it computes, when it is recorded, what it refuses."""

import copy
import cProfile
import io
import math
import threading

import pytest
import torch
from torch import nn
from trainkit.projects.graph.tests.recorded_graph import (
    CpuRecorder,
    RecordedAMPTrainer,
    RecordedTrainer,
)
from trainkit.projects.non_finite.policies import SkipNonFinite

from tests.cuda import allow_waiting, forbid_waiting, needs_cuda
from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, batches, scalars
from trainkit.config import ConfigError
from trainkit.engine import (
    AMPTrainer,
    DefaultTrainer,
    GraphAMPTrainer,
    GraphTrainer,
    HookBase,
    SimpleTrainer,
)
from trainkit.engine.amp import fixed_scaler
from trainkit.engine.hooks import CallbackHook, EMAHook, LRScheduler
from trainkit.solver import LARS, GradientClipper
from trainkit.utils.events import get_event_storage

RECORDED = {SimpleTrainer: RecordedTrainer, AMPTrainer: RecordedAMPTrainer}


class Net(nn.Module):
    """Buffers, random numbers and several losses; takes what `batches` gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.last = nn.Linear(6, 1)

    def forward(self, batch):
        x, y = batch
        error = self.last(self.drop(self.norm(self.first(x)).relu())) - y
        return {
            "loss_a": error.square().mean(),
            "loss_b": 0.1 * error.abs().mean(),
            "bias": error.detach().mean(),
        }


def fused_sgd(model, **kwargs):
    return torch.optim.SGD(
        model.parameters(), **{"lr": 0.1, "momentum": 0.9, "fused": True, **kwargs}
    )


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2.0**-6, fused=True)


def adam(model):
    return torch.optim.Adam(model.parameters(), capturable=True)


def halving(optimizer):
    """A rate that is another one in each iteration; exact in float32."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iter: 1.0 - iter / 128)


def make(
    trainer_type,
    make_optimizer=fused_sgd,
    data=None,
    hooks=lambda trainer: [],
    make_model=Net,
    make_policy=None,
    **kwargs,
):
    model = make_model()
    torch.manual_seed(1)
    optimizer = make_optimizer(model)
    if make_policy is not None:
        kwargs["non_finite"] = make_policy()
    trainer = trainer_type(model, batches(5) if data is None else data, optimizer, **kwargs)
    trainer.register_hooks([LRScheduler(scheduler=halving(optimizer)), *hooks(trainer)])
    return trainer


def result(trainer):
    """Everything that a run leaves behind."""
    model = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return (
        model,
        copy.deepcopy(trainer.optimizer.state_dict()),
        scalars(trainer),
        torch.get_rng_state(),
    )


def same(one, other):
    """Bit for bit, NaN included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def both(trainer_type=SimpleTrainer, steps=100, **kwargs):
    """The ordinary trainer and the one with a graph, behind the same run, and whether they have the same results."""
    ordinary, recorded = (make(each, **kwargs) for each in (trainer_type, RECORDED[trainer_type]))
    results = []
    for trainer in (ordinary, recorded):
        torch.manual_seed(2)
        trainer.train(0, steps)
        results.append(result(trainer))
    return ordinary, recorded, same(*results)


class Doubling(HookBase):
    def after_backward(self):
        for parameter in self.trainer.model.parameters():
            parameter.grad *= 2


SETTINGS = {
    "asynchronous metrics, AdamW": {"async_write_metrics": True, "make_optimizer": fused_adamw},
    "bfloat16": {"trainer_type": AMPTrainer, "precision": torch.bfloat16},
    "float16": {"trainer_type": AMPTrainer, "log_grad_scaler": True},
    "float16 of a fixed scale": {
        "trainer_type": AMPTrainer,
        "grad_scaler": fixed_scaler("cpu", 128.0),
    },
    "ignore": {"non_finite": "ignore", "zero_grad_before_forward": True},
    "all together": {
        "trainer_type": AMPTrainer,
        "make_policy": SkipNonFinite,
        "make_optimizer": fused_adamw,
        "log_grad_scaler": True,
        "accumulation_steps": 3,
        "clip_gradients": GradientClipper("full_model", 0.1),
        "async_write_metrics": True,
        "hooks": lambda trainer: [Doubling(), EMAHook(decay=0.9)],
    },
}


SLOW = ("asynchronous metrics, AdamW", "bfloat16", "float16", "float16 of a fixed scale")
CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SETTINGS]


@pytest.mark.parametrize("name", CASES)
def test_100_steps_equal_those_of_the_ordinary_trainer_bit_for_bit(name):
    _, recorded, are_equal = both(**SETTINGS[name])
    assert are_equal
    assert recorded.recorder.num_replays >= 90


# 3: overflows
@pytest.mark.parametrize(("trainer_type", "skipped"), [(SimpleTrainer, 8), (AMPTrainer, 8 + 3)])
def test_skipped_updates_are_the_same(trainer_type, skipped):
    data = [
        (x * math.nan, y) if place in (1, 20, 21, 39) else (x, y)
        for place, (x, y) in enumerate(batches(40))
    ]
    _, recorded, are_equal = both(trainer_type, steps=80, data=data, make_policy=SkipNonFinite)
    assert are_equal
    assert scalars(recorded)["skipped_updates"][-1] == (skipped, 79)


def test_a_gradient_that_a_hook_removes_is_an_error_that_says_what_to_do():
    def remove(trainer):
        if trainer.iter == 5:
            trainer.model.last.bias.grad = None

    with pytest.raises(
        RuntimeError, match=r"exchanged a gradient.*in place.*SOLVER.GRAPH.ENABLED False"
    ):
        make(RecordedTrainer, hooks=lambda _: [CallbackHook(after_backward=remove)]).train(0, 10)


def test_each_shape_is_recorded_once_and_gives_the_same_numbers():
    data = [*batches(3), *batches(1, size=2), *batches(1, size=3)]
    _, recorded, are_equal = both(data=data, async_write_metrics=True)
    assert are_equal
    assert recorded.recorder.num_recorded == 3
    assert recorded.recorder.num_replays == 91


@pytest.mark.parametrize(
    "more", [str, lambda i: torch.eye(2).to_sparse(), lambda i: torch.empty(1, device="meta")]
)
def test_batches_that_cannot_be_recorded_run_as_ordinary_steps(more, caplog):
    class Named(Net):
        def forward(self, batch):
            return super().forward(batch["pair"])

    data = [{"pair": pair, "more": [more(i)]} for i, pair in enumerate(batches(110))]
    recorded = make(RecordedTrainer, data=data, make_model=Named)
    recorded.train(0, 110)
    assert recorded.recorder.num_recorded == 0
    assert caplog.text.count("without file names and the like") == 1


CHANGES = [
    lambda trainer: trainer.optimizer.param_groups[0].update(weight_decay=0.1),
    lambda trainer: trainer.model.first.requires_grad_(False),
    lambda trainer: trainer.model.norm.eval(),
    lambda trainer: setattr(
        trainer.model.last.weight, "data", trainer.model.last.weight.data.clone()
    ),
    lambda trainer: trainer.optimizer.load_state_dict(
        copy.deepcopy(trainer.optimizer.state_dict())
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_the_middle_is_followed(change):
    def at_20(trainer):
        if trainer.iter == 20:
            change(trainer)

    _, recorded, are_equal = both(
        steps=40, hooks=lambda trainer: [AfterStep(at_20)], async_write_metrics=True
    )
    assert are_equal
    assert recorded.recorder.num_recorded == 2
    assert recorded.recorder.num_replays == 34


def test_a_step_that_has_failed_is_followed_by_ordinary_ones():
    def fail(trainer):
        if trainer.iter == 8 and trainer.status == "running" and not failed:
            failed.append(trainer.iter)
            raise KeyError("once")

    found = []
    for trainer_type in (AMPTrainer, RecordedAMPTrainer):
        failed = []
        trainer = make(
            trainer_type, hooks=lambda _: [CallbackHook(after_backward=fail)], log_grad_scaler=True
        )
        torch.manual_seed(2)
        with pytest.raises(KeyError):
            trainer.train(0, 20)
        trainer.train(8, 20)
        found.append(result(trainer))
    assert same(*found)
    assert trainer.recorder.num_recorded == 2 * 2


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("to_graph", [False, True], ids=["from a graph", "to a graph"])
def test_a_checkpoint_of_either_trainer_is_resumed_by_the_other_bit_for_bit(to_graph, amp):
    ordinary = AMPTrainer if amp else SimpleTrainer
    first, second = (ordinary, RECORDED[ordinary]) if to_graph else (RECORDED[ordinary], ordinary)
    whole = make(ordinary, make_optimizer=fused_adamw)
    torch.manual_seed(2)
    whole.train(0, 40)

    started = make(first, make_optimizer=fused_adamw)
    torch.manual_seed(2)
    started.train(0, 20)
    file = io.BytesIO()
    torch.save({"model": started.model.state_dict(), "trainer": started.state_dict()}, file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed = make(second, make_optimizer=fused_adamw)
    resumed.model.load_state_dict(state["model"])
    resumed.load_state_dict(state["trainer"])
    resumed.train(20, 40)

    assert same(result(whole), result(resumed))
    assert isinstance(state["trainer"]["optimizer"]["param_groups"][0]["lr"], float)
    assert state["trainer"]["optimizer"]["param_groups"][0]["capturable"] is False


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, LARS])
def test_an_optimizer_that_would_keep_its_rate_is_refused(optimizer_type):
    with pytest.raises(
        ConfigError, match=f"{optimizer_type.__name__} cannot be recorded.*FUSED True.*capturable"
    ):
        make(
            RecordedTrainer, make_optimizer=lambda model: optimizer_type(model.parameters(), lr=0.1)
        )


class Reading(Net):
    def forward(self, batch):
        losses = super().forward(batch)
        losses["loss_a"].register_hook(
            lambda gradient: gradient * (1.0 if gradient.item() else 2.0)
        )
        return losses


class Putting(Net):
    def forward(self, batch):
        get_event_storage().put_scalar("depth", 2.0)
        return super().forward(batch)


class Replacing(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, batch):
        self.mean = self.mean * 0.9 + batch[0].mean() * 0.1
        return super().forward(batch)


@pytest.mark.parametrize(
    ("kind", "message"), [(Putting, r"scalars \['depth'\]"), (Replacing, r"buffers \['mean'\]")]
)
def test_a_model_that_does_what_a_replay_does_not_repeat_is_an_error_that_says_so(kind, message):
    with pytest.raises(RuntimeError, match=f"{message}.*SOLVER.GRAPH.ENABLED False"):
        make(RecordedTrainer, make_model=kind).train(0, 10)


def test_the_steps_of_a_model_that_reads_a_value_stay_ordinary_ones_and_the_log_names_the_line(
    caplog,
):
    _, recorded, are_equal = both(steps=10, make_model=Reading)
    assert are_equal
    assert recorded.recorder.num_recorded == 0
    (message,) = [message for message in caplog.messages if "cannot be recorded" in message]
    assert message.startswith(
        "Steps that wait for the device, as at _local_scalar_dense, cannot be recorded and stay"
    )


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "float16"])
def test_a_config_with_a_graph_gives_the_same_run(tmp_path, monkeypatch, amp):
    recorder, found = CpuRecorder(), []
    monkeypatch.setattr(GraphTrainer, "make_recorder", lambda self: recorder)  # as on CUDA
    for graph in (False, True):
        options = ["SOLVER.GRAPH.ENABLED", graph, "SOLVER.AMP.ENABLED", amp, "LOG.ASYNC", True]
        torch.manual_seed(2)
        trainer = DefaultTrainer(tiny_cfg(tmp_path / str(graph), *options))
        results = trainer.train()
        found.append((results, trainer.model.state_dict(), scalars(trainer)))
    assert same(*found)
    assert recorder.num_recorded == 1
    assert recorder.num_replays == 7


def on_cuda(trainer_type, data=(), make_model=Net, **kwargs):
    data = [
        tuple(part.pin_memory() for part in pair)
        for pair in data or [*batches(4), *batches(1, size=2)]
    ]
    return make(
        trainer_type,
        data=data,
        make_model=lambda: make_model().cuda(),
        async_write_metrics=True,
        **kwargs,
    )


@needs_cuda
@pytest.mark.parametrize(
    ("types", "settings"),
    [
        (
            (SimpleTrainer, GraphTrainer),
            {"make_optimizer": adam, "clip_gradients": GradientClipper("norm", 0.1)},
        ),
        (
            (AMPTrainer, GraphAMPTrainer),
            {"accumulation_steps": 2, "hooks": lambda trainer: [Doubling(), EMAHook()]},
        ),
    ],
)
def test_on_cuda_40_steps_equal_those_of_the_ordinary_trainer_and_a_changed_setting_is_recorded_again(
    types, settings
):
    steps, found = [], []

    class Counted(Net):
        def forward(self, batch):
            steps.append(trainer.iter)
            return super().forward(batch)

    def at_20(trainer):
        if trainer.iter == 20:
            trainer.optimizer.param_groups[0]["weight_decay"] = 0.5

    for trainer_type in types:
        steps.clear()
        trainer = on_cuda(trainer_type, make_model=Counted, data=batches(5), **settings)
        trainer.register_hooks([AfterStep(at_20)])
        torch.manual_seed(2)
        trainer.train(0, 40)
        found.append([value for value, _ in scalars(trainer)["total_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert len({*found[0]}) == 40  # no step repeats an earlier one
    # three ordinary ones, and the recording
    assert sorted({*steps}) == [
        0,
        1,
        2,
        3,
        21,
        22,
        23,
        24,
    ]


@needs_cuda
def test_on_cuda_an_optimizer_that_is_not_fused_resumes_a_state_with_its_counts_on_the_host():
    def plain_adam(model):
        return torch.optim.Adam(model.parameters())

    def losses(trainer):
        return [value for value, _ in scalars(trainer)["total_loss"]]

    whole, started, resumed = (
        on_cuda(kind, make_optimizer=plain_adam)
        for kind in (SimpleTrainer, SimpleTrainer, GraphTrainer)
    )
    torch.manual_seed(2)
    whole.train(0, 20)
    torch.manual_seed(2)
    started.train(0, 5)
    state = started.state_dict()
    assert {each["step"].device.type for each in state["optimizer"]["state"].values()} == {"cpu"}
    resumed.model.load_state_dict(started.model.state_dict())
    resumed.load_state_dict(state)
    resumed.train(5, 20)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-4)
    assert resumed._recordings


@needs_cuda
def test_on_cuda_a_replayed_step_never_waits_for_the_device():
    trainer = on_cuda(
        GraphAMPTrainer,
        make_optimizer=fused_adamw,
        clip_gradients=GradientClipper("full_model", 0.1),
    )

    def watch(trainer):
        if trainer.iter == 39:  # both shapes are recorded
            forbid_waiting()
        elif trainer.iter == 98:  # at its end a run looks at the model
            allow_waiting()

    trainer.register_hooks([AfterStep(watch)])
    try:
        trainer.train(0, 100)
    finally:
        allow_waiting()
    assert trainer.status == "finished"


@needs_cuda
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.clone().index_put_((x > 0,), torch.ones(1, device=x.device)),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_on_cuda_the_steps_of_a_model_that_reads_a_value_stay_ordinary_ones(read, caplog):
    class ReadingInForward(Net):
        def forward(self, batch):
            read(batch[0].detach())  # here
            return super().forward(batch)

    trainer = on_cuda(GraphTrainer, make_model=ReadingInForward)
    trainer.train(0, 10)
    assert [message for message in caplog.messages if "test_graph.py:" in message]


@needs_cuda
def test_on_cuda_the_steps_of_an_optimizer_that_skips_on_the_host_stay_ordinary_ones(caplog):
    trainer = on_cuda(GraphAMPTrainer, make_optimizer=adam, grad_scaler=fixed_scaler("cuda", 128.0))
    with cProfile.Profile():  # which keeps its place
        trainer.train(0, 10)
    assert [
        message for message in caplog.messages if "cannot be recorded and stay ordinary" in message
    ]


@needs_cuda
def test_on_cuda_a_recording_lets_other_threads_call_cuda():
    class Pinning(Net):
        def forward(self, batch):
            if torch.cuda.is_current_stream_capturing():
                thread = threading.Thread(target=lambda: torch.ones(1).pin_memory())
                thread.start()
                thread.join()
            return super().forward(batch)

    trainer = on_cuda(GraphTrainer, make_model=Pinning)
    trainer.train(0, 20)
    assert len(trainer._recordings) == 2
