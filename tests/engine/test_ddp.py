"""DistributedDataParallel under the trainers, with each of its options: two ranks are one process that accumulates."""

import collections
import logging
import os
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.engine.job import TinyClassifier, tiny_cfg
from tests.engine.tiny import AfterStep, Weight, scalars, sgd
from tests.two_ranks import SLOW, on_two_ranks
from trainkit.checkpoint import Checkpointer
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import parallel
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.defaults import DefaultTrainer
from trainkit.engine.defaults.build import ddp_options
from trainkit.engine.defaults.run import EvaluationRun
from trainkit.engine.hooks import CallbackHook, PeriodicCheckpointer
from trainkit.engine.loop import TrainerBase
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer
from trainkit.evaluation import inference_on_dataset
from trainkit.solver import GradientClipper
from trainkit.utils import comm


class Net(nn.Module):
    """Without batch norm and dropout; a batch is ``(x [N, 6], y [N, 1])``."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, batch):
        x, y = batch
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": (self.head(x) - y).square().mean()}


def part(rank, num_ranks, steps):
    """What a rank gets of ten batches of 24 samples, each in ``steps`` micro-batches."""
    generator = torch.Generator().manual_seed(7)
    xs = torch.randn(10, 24, 6, generator=generator)
    ys = xs.square().mean(2, keepdim=True) + xs.mean(2, keepdim=True)
    of_all = [
        micro
        for x, y in zip(xs, ys, strict=True)
        for micro in zip(x.chunk(steps), y.chunk(steps), strict=True)
    ]
    return [(x.chunk(num_ranks)[rank], y.chunk(num_ranks)[rank]) for x, y in of_all]


COPIES = ["MODEL.DDP.GRADIENT_AS_BUCKET_VIEW", False]
OPTIONS = {
    "none": COPIES,
    "broadcast": ["MODEL.DDP.BROADCAST_BUFFERS", True, *COPIES],
    "unused": ["MODEL.DDP.FIND_UNUSED_PARAMETERS", True, *COPIES],
    "views": [],
    "static": ["MODEL.DDP.STATIC_GRAPH", True, *COPIES],
    "static, views": ["MODEL.DDP.STATIC_GRAPH", True],
}


def options(*names_and_values):
    cfg = get_cfg()
    cfg.merge_from_list(names_and_values)
    return ddp_options(cfg)


def fp16_trainer(*args, **kwargs):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return AMPTrainer(*args, grad_scaler=scaler, log_grad_scaler=True, **kwargs)


# each equals one process that accumulates the ranks' batches, to the last bit
SETTINGS = {
    "plain": SimpleTrainer,
    "zeroed before forward": partial(SimpleTrainer, zero_grad_before_forward=True),
    "clipped by norm": partial(SimpleTrainer, clip_gradients=GradientClipper("full_model", 0.1)),
    "clipped by value": partial(SimpleTrainer, clip_gradients=GradientClipper("value", 0.01)),
    "bfloat16": partial(AMPTrainer, precision=torch.bfloat16),
    "float16": fp16_trainer,
}
OVERFLOW_AT = 3  # on the second rank, in float16


def train(make_trainer, model, data, **kwargs):
    """The weights, and what is stored; evaluated in between."""
    trainer = make_trainer(model, data, sgd(model, 0.05, momentum=0.9), **kwargs)
    evaluate = AfterStep(
        lambda t: t.iter % 4 == 3 and inference_on_dataset(t.model, data[:1], None)
    )
    trainer.register_hooks([evaluate])
    trainer.train(0, 10)
    return {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "stored": {
            name: [value for value, _ in values] for name, values in scalars(trainer).items()
        },
    }


def spiked(data, index):
    """With targets there whose gradients are too large for float16."""
    x, y = data[index]
    return [*data[:index], (x, y + 1000), *data[index + 1 :]]


def settings(rank, folder):
    found = {}
    for option, names_and_values in OPTIONS.items():
        for setting, make_trainer in SETTINGS.items():
            data = part(rank, 2, 1)
            if setting == "float16" and rank == 1:
                data = spiked(data, OVERFLOW_AT)
            model = create_ddp_model(Net(seed=rank), **options(*names_and_values))
            found[option, setting] = train(make_trainer, model, data)
    return found


def compression(rank, folder):
    """What one update leaves of a weight of 1 whose gradients are 1 and 2**-12."""
    found = {}
    for kind in ("", "fp16", "bf16"):
        try:
            model = create_ddp_model(Weight(), **options("MODEL.DDP.COMPRESSION", kind))
        except TypeError as error:
            found[kind] = str(error)
            continue
        SimpleTrainer(model, [torch.tensor(2.0**-12 if rank else 1.0)], sgd(model, 1.0)).train(0, 1)
        found[kind] = model.module.weight.item()
    return found


def from_config(rank, folder):
    """The job of a config: the settings of the wrapper that are on, and the running means of this rank."""
    found = {}
    for option in ("broadcast", "static, views", "unused"):
        torch.manual_seed(rank)
        trainer = DefaultTrainer(
            tiny_cfg(os.path.join(folder, option), "SOLVER.MAX_ITER", 6, *OPTIONS[option])
        )
        trainer.train()
        ddp = trainer.model
        names = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        on = [name for name in names if getattr(ddp, name)]
        found[option] = {"on": on, "mean": ddp.module.layers[1].running_mean}
    return found


class Uneven(nn.Module):
    """Rank 0 uses a layer that the other ranks do not use."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.of_rank_0 = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.norm(self.layer(x))
        if comm.get_world_size() > 1 and comm.is_main_process():
            y = y + self.of_rank_0(x)
        return y.square().mean()


class Even(nn.Module):
    """Every rank uses all parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.layer(x)).square().mean()


def train_uneven(folder, wrapper_options=(), **kwargs):
    """The iteration at which a run of three steps ends, with an exchange of metrics and a save after each step."""
    model = create_ddp_model(Uneven(), **dict(wrapper_options))
    trainer = SimpleTrainer(model, [torch.randn(4, 3)], sgd(model), **kwargs)
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 1)])
    trainer.train(0, 3)
    return trainer.iter


def uneven(rank, folder):
    return train_uneven(folder)


def uneven_accumulated(rank, folder):
    return train_uneven(folder, {"broadcast_buffers": True}, accumulation_steps=2)


def uneven_by_worker(rank, folder):
    return train_uneven(folder, async_write_metrics=True)


class OwnStep(TrainerBase):
    def __init__(self, model):
        super().__init__()
        self.model, self.optimizer = model, sgd(model)

    def run_step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).backward()
        self.optimizer.step()


def uneven_in_a_step_of_ones_own(rank, folder):
    trainer = OwnStep(create_ddp_model(Uneven()))
    checkpointer = Checkpointer(trainer.model, os.path.join(folder, "own"), trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2)])
    trainer.train(0, 3)


class UnevenLater(Uneven):
    """From the third step on only rank 0 uses a layer."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.norm(self.layer(x))
        if self.calls < 3 or comm.is_main_process():
            y = y + self.of_rank_0(x)
        return y.square().mean()


def uneven_later(rank, folder):
    model = create_ddp_model(UnevenLater())
    trainer = SimpleTrainer(model, [torch.randn(4, 3)], sgd(model), exchange_period=100)
    try:
        trainer.train(0, 6)
    except RuntimeError as error:
        raise RuntimeError(f"iteration {trainer.iter}: {error}") from None


def uneven_allowed(rank, folder):
    return train_uneven(folder, {"find_unused_parameters": True})


def new_groups(rank, folder):
    """How many groups are there before each step of a run that exchanges metrics, stops and times of saves."""
    made, seen = [], []
    model = create_ddp_model(Weight())
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model), async_write_metrics=True)
    checkpointer = Checkpointer(model, os.path.join(folder, "groups"), trainer=trainer)
    save = PeriodicCheckpointer(checkpointer, "1h")
    look = CallbackHook(before_step=lambda trainer: seen.append(len(made)))
    trainer.register_hooks([save, look])
    with pytest.MonkeyPatch.context() as patch:
        new_group = dist.new_group
        patch.setattr(dist, "new_group", lambda **kwargs: made.append(1) or new_group(**kwargs))
        trainer.train(0, 12)
    return {*seen, len(made)}


class Remembers(Weight):
    """Keeps in attributes what is no buffer: a number, a list, a dict, a deque, and a queue of a tensor."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.last = 0, [], {}
        self.recent = collections.deque(maxlen=4)
        self.queue = torch.zeros(3)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, batch):
        self.calls += 1
        self.seen.append(batch.item())
        self.recent.append(batch.item())
        self.last["batch"] = batch.item()
        self.queue.copy_(torch.cat([batch.reshape(1), self.queue[:-1]]))
        self.total += batch
        return super().forward(batch)


def memory(rank, folder):
    """What a model has in its attributes after three steps."""
    model = Remembers()
    ddp = create_ddp_model(model)
    queue = model.queue
    SimpleTrainer(ddp, [torch.tensor(float(i)) for i in (1, 2, 3)], sgd(ddp)).train(0, 3)
    assert model.queue is queue
    kept = [model.calls, model.seen, [*model.recent], model.last]
    return [*kept, model.queue.tolist(), model.total.item()]


def devices(rank, folder):
    """What ranks say whose devices have these UUIDs: one for both, one for each, or none on the CPU."""
    found = {}
    makers = {
        "plain": lambda cfg: create_ddp_model(Weight()),
        "trained": DefaultTrainer,
        "evaluated": partial(EvaluationRun, trainer_class=DefaultTrainer),
    }
    for uuids in (("a", "a"), ("a", "b"), (None, None)):
        for name, make in makers.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel, "uuid_of", lambda device, uuid=uuids[rank]: uuid)
                try:
                    make(tiny_cfg(os.path.join(folder, "devices")))
                except ConfigError as error:
                    found[uuids, name] = str(error)
    return found


def buffers(rank, folder):
    """Whether an evaluation warns of the statistics of batch norm, with the hook and without."""
    warned = {}
    logger = logging.getLogger("trainkit.evaluation.evaluator")
    for entries in ([{"NAME": "SyncBuffers"}], []):
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logger.addHandler(handler)
        DefaultTrainer(
            tiny_cfg(os.path.join(folder, f"buffers{len(entries)}"), "HOOKS", entries)
        ).train()
        logger.removeHandler(handler)
        texts = [record.getMessage() for record in records]
        warned[len(entries)] = sum("differ between ranks" in text for text in texts)
    return warned


UNEVEN = (
    uneven,
    uneven_accumulated,
    uneven_by_worker,
    uneven_in_a_step_of_ones_own,
    uneven_later,
    uneven_allowed,
)
# buffers: the first, since a process warns once
CHECKS = (buffers, settings, compression, from_config, new_groups, memory, devices, *UNEVEN)


@pytest.fixture(scope="module", params=SLOW)
def ranks(tmp_path_factory):
    """What each check gave on each of two ranks: name -> [on rank 0, on rank 1]."""
    return on_two_ranks(CHECKS, tmp_path_factory.mktemp("ranks"))


def alone(setting):
    """The two ranks' run of one process, which accumulates their batches."""
    data = part(0, 1, 2)
    if setting == "float16":
        data = spiked(data, 2 * OVERFLOW_AT + 1)
    return train(SETTINGS[setting], Net(seed=0), data, accumulation_steps=2)


def test_the_passes_before_the_first_step_leave_no_trace_in_what_a_model_remembers(ranks):
    seen = [1.0, 2.0, 3.0]
    expected = [3, seen, seen, {"batch": 3.0}, seen[::-1], 6.0]
    assert ranks["memory"] == [expected] * 2


def test_two_ranks_are_one_process_to_the_last_bit_whatever_the_options(ranks):
    for setting in SETTINGS:
        expected = alone(setting)
        losses = expected["stored"].pop("total_loss")
        for found in ranks["settings"]:
            for option in OPTIONS:
                run = found[option, setting]
                torch.testing.assert_close(run["weights"], expected["weights"], atol=0, rtol=0)
                assert run["stored"].pop("total_loss") == pytest.approx(losses, rel=1e-6)
                assert run["stored"] == expected["stored"], setting


@pytest.mark.slow
def test_a_setting_makes_a_difference_and_a_rank_that_overflows_alone_makes_all_skip_and_halve_their_scale():
    plain = alone("plain")
    for setting in ("clipped by norm", "clipped by value", "bfloat16", "float16"):
        run = alone(setting)
        assert not torch.allclose(run["weights"][0], plain["weights"][0], atol=1e-4)
    assert run["stored"]["skipped_updates"] == [0] * 3 + [1] * 7
    assert run["stored"]["[metric]grad_scaler"] == [1024] * 4 + [512] * 6


def test_gradients_are_exchanged_in_the_type_that_is_asked_for(ranks):
    for found in ranks["compression"]:
        assert found[""] == 0.5 - 2**-13
        assert found["fp16"] == 0.5
        if torch.version.cuda is None:
            assert "BF16" in found["bf16"]
        else:
            assert found["bf16"] == 0.5


def test_the_options_of_a_config_reach_the_model_of_its_run(ranks):
    _, second = ranks["from_config"]
    assert second["broadcast"]["on"] == []
    assert second["static, views"]["on"] == ["gradient_as_bucket_view", "static_graph"]
    assert second["unused"]["on"] == ["find_unused_parameters"]
    own = second["unused"]["mean"]
    assert torch.equal(second["static, views"]["mean"], own)
    assert not torch.equal(second["broadcast"]["mean"], own)


WITHOUT_GRADIENT = "of rank {} gave no gradient to: of_rank_0.weight, of_rank_0.bias. If ranks or steps use different "

# rank 0 waits for rank 1, which has failed; what Gloo says depends on what rank 0 had still to read
LOST_PEER = re.compile(r"gloo/transport/\w+/pair\.cc:\d+\] .+peer")


@pytest.mark.parametrize("name", ["uneven", "uneven_accumulated", "uneven_by_worker"])
def test_ranks_that_use_different_layers_end_with_an_error_that_names_these_and_the_setting(
    ranks, name
):
    first, second = ranks[name]
    assert LOST_PEER.search(first)
    assert second.startswith("RuntimeError: Expected to have finished reduction")
    assert WITHOUT_GRADIENT.format(1) + "parameters, set MODEL.DDP.FIND_UNUSED_PARAMETERS" in second


def test_a_trainer_with_its_own_step_and_checkpoints_ends_with_torchs_error_too(ranks):
    first, second = ranks["uneven_in_a_step_of_ones_own"]
    assert LOST_PEER.search(first)
    assert second.startswith("RuntimeError: Expected to have finished reduction")


def test_ranks_that_use_different_layers_in_a_later_step_end_in_the_one_after_it(ranks):
    _, error = ranks["uneven_later"]
    assert error.startswith("RuntimeError: iteration 3: Expected to have finished reduction")


def test_an_evaluation_warns_once_if_ranks_have_other_statistics_of_batch_norm(ranks):
    assert ranks["buffers"] == [{1: 0, 0: 1}] * 2


def test_all_groups_of_a_run_are_there_before_its_first_step(ranks):
    assert ranks["new_groups"] == [{3}, {3}]


def test_with_find_unused_parameters_ranks_may_use_different_layers(ranks):
    assert ranks["uneven_allowed"] == [3, 3]


def test_two_ranks_on_one_device_are_an_error_on_both_before_training_and_before_an_evaluation(
    ranks,
):
    for found in ranks["devices"]:
        kinds = [name for _, name in found]
        assert kinds == ["plain", "trained", "evaluated"]
        assert {uuids for uuids, _ in found} == {("a", "a")}
        for text in found.values():
            assert text.startswith("the ranks [0, 1] are on one accelerator")
            assert "UUID a; " in text


@pytest.mark.parametrize(
    ("by_rank", "same"),
    [
        (["x", "y", "x"], "[0, 2]"),
        (["x", None, "y", "y"], "[2, 3]"),
        (["x", "y"], None),
        ([None] * 3, None),
    ],
)
def test_ranks_are_told_by_the_uuids_of_their_devices_and_those_on_a_cpu_share_it(
    by_rank, same, monkeypatch
):
    monkeypatch.setattr(comm, "all_gather", lambda own: by_rank)
    if same is None:
        parallel.check_own_device(Weight())
        return
    with pytest.raises(ConfigError, match=re.escape(f"the ranks {same} are on one accelerator")):
        parallel.check_own_device(Weight())


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_in_one_process_the_model_is_not_wrapped(tmp_path, parallel, group_of_one):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "MODEL.PARALLEL", parallel))
    assert type(trainer.model) is TinyClassifier
    assert create_ddp_model(trainer.model) is trainer.model


def test_ddps_error_on_a_layer_that_is_not_used_gains_its_name_and_the_setting(group_of_one):
    model = DistributedDataParallel(Uneven())
    trainer = SimpleTrainer(model, [torch.randn(4, 3)], sgd(model))
    with pytest.raises(RuntimeError, match=WITHOUT_GRADIENT.format(0)) as raised:
        trainer.train(0, 3)
    assert str(raised.value).startswith("Expected to have finished reduction")
    assert trainer.iter == 0


def test_the_error_names_no_wrong_layer_if_one_was_frozen_after_it_was_wrapped(group_of_one):
    for frozen in ("layer", "norm"):
        model = DistributedDataParallel(Even())
        getattr(model.module, frozen).requires_grad_(False)
        trainer = SimpleTrainer(model, [torch.randn(4, 3)], sgd(model))
        with pytest.raises(RuntimeError, match="no gradient to: parameters that were frozen"):
            trainer.train(0, 3)


def test_another_error_of_the_model_stays_as_it_is(group_of_one):
    model = DistributedDataParallel(Uneven())
    trainer = SimpleTrainer(model, [torch.randn(4, 5)], sgd(model))
    with pytest.raises(RuntimeError) as raised:
        trainer.train(0, 3)
    with pytest.raises(RuntimeError) as expected:
        Uneven()(torch.randn(4, 5))
    own, first_call = str(raised.value).rsplit("\n", 1)
    assert own == str(expected.value)
    assert "MODEL.DDP.FIND_UNUSED_PARAMETERS" not in first_call
