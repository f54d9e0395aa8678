import itertools
import json
import logging
import math
import threading
import weakref
from fractions import Fraction

import pytest
import torch
from torch import nn

from tests.engine.tiny import (
    CLOCK_READINGS,
    AfterStep,
    PlainOptimizer,
    Regression,
    Weight,
    batches,
    scalars,
    sgd,
)
from trainkit.config import get_cfg
from trainkit.data.build import build_batch_data_loader
from trainkit.data.samplers import TrainingSampler
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.defaults.build import make_step_trainer
from trainkit.engine.hooks import CallbackHook, EvalHook, PeriodicWriter
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import GradientClipper, build_gradient_clipper
from trainkit.utils.events import EventStorage, EventWriter, JSONWriter


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(loader, iters, **kwargs):
    """The weights after ``iters`` iterations of a Regression, and the trainer."""
    model = Regression()
    trainer = SimpleTrainer(model, loader, sgd(model, momentum=0.9), **kwargs)
    trainer.train(0, iters)
    return weights(model), trainer


def bare_loop(data, iters, momentum=0.9):
    model, losses = Regression(), []
    optimizer = sgd(model, momentum=momentum)
    for iter, batch in zip(range(iters), itertools.cycle(data), strict=False):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), iter))
    return weights(model), losses


def test_twenty_steps_equal_a_bare_loop_bit_for_bit(asynchronous):
    data = batches(7)
    expected, losses = bare_loop(data, 20)
    found, trainer = trained(data, 20, async_write_metrics=asynchronous)
    assert torch.equal(found, expected)
    assert trainer.storage.history("total_loss").values() == losses
    assert trainer.iter == 20
    assert trainer.status == "finished"
    other, other_losses = bare_loop(data, 20, momentum=0.9001)
    assert not torch.equal(found, other)
    assert other_losses != losses


@pytest.mark.parametrize("zero_grad_before_forward", [False, True])
def test_the_parts_of_a_step_come_in_their_order(zero_grad_before_forward):
    calls = []

    class Loader:
        def __iter__(self):
            while True:
                calls.append("fetch")
                yield torch.tensor(2.0)

    def forward(weight, batch):
        calls.append("forward")
        return weight * batch

    def clip(parameters):
        calls.append("clip")
        (parameter,) = parameters
        assert parameter.grad.item() == 2.0
        parameter.grad.fill_(0.5)

    model = Weight(forward)
    options = {"zero_grad_before_forward": zero_grad_before_forward, "clip_gradients": clip}
    trainer = SimpleTrainer(model, Loader(), PlainOptimizer(sgd(model, lr=1.0), calls), **options)
    trainer.register_hooks(
        [CallbackHook(after_backward=lambda trainer: calls.append("after_backward"))]
    )
    trainer.train(0, 2)
    first = ["zero_grad", "forward"] if zero_grad_before_forward else ["forward", "zero_grad"]
    assert calls == ["fetch", *first, "after_backward", "clip", "update"] * 2
    assert model.weight.item() == 0.0  # two clipped updates of 0.5


@pytest.mark.parametrize(
    ("compute", "stored", "gradient"),
    [
        (lambda w, x: (w * x).reshape(1), {"total_loss": 3.0}, 3.0),
        (lambda w, x: {"loss_a": w * x}, {"total_loss": 3.0}, 3.0),
        (
            lambda w, x: {"loss_a": w * x, "b": 2 * w},
            {"total_loss": 5.0, "loss_a": 3.0, "b": 2.0},
            5.0,
        ),
        (
            lambda w, x: {"loss_a": w * x, "accuracy": torch.tensor(90), "b": (2 * w).detach()},
            {"total_loss": 3.0, "loss_a": 3.0, "accuracy": 90.0, "b": 2.0},
            3.0,
        ),
    ],
    ids=["shape [1]", "one entry", "two entries", "entries without grad"],
)
def test_entries_that_require_grad_are_summed_and_the_others_only_logged(
    compute, stored, gradient, caplog
):
    caplog.set_level(logging.INFO, "trainkit.engine.step")
    model = Weight(compute)
    trainer = SimpleTrainer(model, [torch.tensor(3.0)], sgd(model, lr=1.0))
    trainer.train(0, 1)
    assert scalars(trainer) == {name: [(value, 0)] for name, value in stored.items()}
    assert model.weight.item() == 1.0 - gradient
    if "accuracy" in stored:
        [text] = [text for text in caplog.messages if text.startswith("Minimizing loss_a;")]
        assert text.endswith(" ['accuracy', 'b']")


@pytest.mark.parametrize(
    ("compute", "error", "message"),
    [
        (lambda w, x: [w], TypeError, "the model returned list"),
        (lambda w, x: {"a": w, "b": 1.0}, TypeError, "'b': 1.0; accepted"),
        (
            lambda w, x: {"a": w, "b": w * torch.ones(2, 3)},
            ValueError,
            r"'b' has the shape \[2, 3\]",
        ),
        (lambda w, x: {"a": w, "z": w * 1j}, TypeError, r"one of \['a', 'z'\] is complex"),
        (lambda w, x: {"total_loss": w}, ValueError, "total_loss, which is the name of the sum"),
        (
            lambda w, x: {"loss": w * x, "data_time": x},
            ValueError,
            r"stores \['data_time'\] itself",
        ),
        (
            lambda w, x: {"b": x, "a": w.detach()},
            ValueError,
            r"none of the losses \['a', 'b'\] .* requires grad",
        ),
    ],
)
def test_a_model_that_returns_no_usable_loss_is_an_error(compute, error, message):
    model = Weight(compute)
    with pytest.raises(error, match=message):
        SimpleTrainer(model, [torch.tensor(3.0)], sgd(model)).train(0, 1)
    assert model.weight.item() == 1.0


def test_the_model_is_put_into_train_mode_once_and_eval_mode_is_an_error():
    model = Regression().eval()
    trainer = SimpleTrainer(model, batches(1), sgd(model))
    assert model.training
    trainer.register_hooks([AfterStep(lambda trainer: trainer.model.eval())])
    with pytest.raises(RuntimeError, match=r"must call model\.train\(\) again"):
        trainer.train(0, 3)
    assert trainer.iter == 1


def test_a_wrapped_optimizer_loader_and_model_work_unchanged():
    class Loader:
        def __iter__(self):
            return iter(data)

    data, model = batches(3), nn.Sequential(Regression())
    optimizer = PlainOptimizer(sgd(model, momentum=0.9))
    trainer = SimpleTrainer(model, Loader(), optimizer)
    trainer.train(0, 10)
    expected, _ = trained(data, 10)
    assert torch.equal(weights(model), expected)
    trainer.load_state_dict(trainer.state_dict())
    assert optimizer.calls == ["zero_grad", "update"] * 10


def test_a_loader_that_ends_is_iterated_again():
    found, model = [], Weight()
    trainer = SimpleTrainer(model, [torch.tensor(float(i)) for i in range(3)], sgd(model, lr=0.0))
    trainer.register_hooks([AfterStep(lambda trainer: found.append(trainer.batch.item()))])
    trainer.train(0, 7)
    assert found == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], r"the data loader \(list\) yields no batch"),
        (iter(batches(2)), r"\(list_iterator\) is an iterator that has ended"),
    ],
)
def test_an_empty_loader_and_an_ended_iterator_are_errors(loader, message):
    model = Regression()
    trainer = SimpleTrainer(model, loader, sgd(model))
    with pytest.raises(ValueError, match=message):
        trainer.train(0, 5)
    assert trainer.status == "failed"
    with pytest.raises(
        TypeError, match="data loader is <function batches .*; call it and give what it returns"
    ):
        trainer.data_loader = batches


@pytest.mark.parametrize("accumulation_steps", [1, 8])
def test_batch_losses_and_graphs_are_let_go_before_the_next_ones(accumulation_steps, asynchronous):
    batches_alive, graphs_alive, at_fetch, at_forward, seen = (
        weakref.WeakSet(),
        weakref.WeakSet(),
        [],
        [],
        [],
    )

    class Batch:
        def __init__(self):
            batches_alive.add(self)

    class Payload:
        def __init__(self):
            graphs_alive.add(self)

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.payload = Payload()  # lives as long as this node of the graph
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Loader:
        def __iter__(self):
            while True:
                at_fetch.append(len(batches_alive))
                yield Batch()

    def losses_of(weight, batch):
        at_forward.append(len(graphs_alive))
        return {"loss_a": Identity.apply(weight), "loss_b": weight}

    def look(trainer):
        loss = trainer.losses["loss_a"]
        assert isinstance(trainer.batch, Batch)
        assert loss.item() == 1.0
        assert not loss.requires_grad
        seen.append(trainer.iter)

    model, options = (
        Weight(losses_of),
        {"async_write_metrics": asynchronous, "accumulation_steps": accumulation_steps},
    )
    trainer = SimpleTrainer(model, Loader(), sgd(model, lr=0.0), **options)
    trainer.register_hooks([CallbackHook(after_backward=look, after_step=look)])
    trainer.train(0, 3)
    assert seen == [0, 0, 1, 1, 2, 2]
    assert at_fetch == ([0] + [1] * (accumulation_steps - 1)) * 3  # one micro-batch is loaded ahead
    assert at_forward == [0] * 3 * accumulation_steps


def test_epochs_are_counted_from_the_length_of_the_data():
    model, epochs, starts, ends = Regression(), [], [], []
    trainer = SimpleTrainer(model, batches(10), sgd(model), accumulation_steps=3)
    on_epoch = {
        "before_epoch": lambda t: starts.append(t.iter),
        "after_epoch": lambda t: ends.append(t.iter),
    }
    trainer.register_hooks(
        [CallbackHook(after_step=lambda trainer: epochs.append(trainer.epoch), **on_epoch)]
    )
    assert trainer.iters_per_epoch == 3
    assert trainer.epoch_length == Fraction(10, 3)
    trainer.train(0, 5)
    trainer.train(5, 9)
    # they start in the iterations nearest to 3 1/3 and 6 2/3
    assert epochs == [0] * 3 + [1] * 4 + [2] * 2
    assert starts == [0, 3, 7]
    assert ends == [2, 6]
    data = build_batch_data_loader([*range(10)], TrainingSampler(10), total_batch_size=3)
    endless = SimpleTrainer(model, data, sgd(model))
    assert endless.iters_per_epoch == 3
    assert endless.epoch_length == Fraction(10, 3)


@pytest.mark.parametrize("change", ["accumulation", "loader"])
def test_epochs_are_those_of_the_trainer_as_it_was_built_in_a_resumed_run_too(change):
    """4 batches are an epoch of 4 iterations, though from iteration 8 on an iteration draws 4 batches."""

    def change_it(trainer):
        if trainer.iter < 8:
            return
        if change == "accumulation":
            trainer.accumulation_steps = 4
        elif trainer.iter == 8:
            trainer.data_loader = batches(3)

    def run(start, end, state=None):
        model, ends = Regression(), []
        trainer = SimpleTrainer(model, batches(4), sgd(model))
        trainer.register_hooks([CallbackHook(before_step=change_it)])
        note = CallbackHook(after_epoch=lambda trainer: ends.append((trainer.iter, trainer.epoch)))
        trainer.register_hooks([note])
        if state is not None:
            trainer.load_state_dict(state)
        trainer.train(start, end)
        return ends, trainer.state_dict()

    whole, _ = run(0, 20)
    assert whole == [(3, 0), (7, 1), (11, 2), (15, 3), (19, 4)]
    before, state = run(0, 12)
    assert before + run(12, 20, state)[0] == whole


def test_a_loader_that_gets_a_length_after_the_trainer_is_built_has_epochs():
    model = Regression()
    trainer = SimpleTrainer(model, iter(()), sgd(model), accumulation_steps=2)
    assert not trainer.has_epochs
    trainer.accumulation_steps = 5
    trainer.data_loader = batches(6)
    assert trainer.iters_per_epoch == 3


def joined(parts):
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def test_accumulation_equals_one_batch_of_all_samples():
    data = batches(12)
    expected, whole = trained([joined(data[i : i + 3]) for i in range(0, 12, 3)], 8)
    found, trainer = trained(data, 8, accumulation_steps=3)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    losses, iters = zip(*trainer.storage.history("total_loss").values(), strict=True)
    assert iters == tuple(range(8))
    assert losses == pytest.approx(
        [loss for loss, _ in whole.storage.history("total_loss").values()], abs=1e-6
    )
    not_accumulated, _ = trained(data, 8)
    assert (not_accumulated - expected).abs().max() > 1e-3


def test_each_micro_batch_has_the_same_weight_however_short_it_is():
    model = Weight(lambda weight, batch: weight * batch.mean())
    parts = [torch.ones(3), torch.full((1,), 5.0)]
    trainer = SimpleTrainer(model, parts, sgd(model, lr=0.5), accumulation_steps=2)
    trainer.train(0, 1)
    # the gradient is (1 + 5) / 2, not (3 * 1 + 5) / 4
    assert model.weight.item() == 1 - 0.5 * 3


def test_windows_cross_epochs_as_in_openmmlab():
    """A window of three of four batches: no window is cut where an epoch ends."""
    data = batches(4)
    found, _ = trained(data, 4, accumulation_steps=3)
    expected, _ = trained([joined([*data, *data, *data][at : at + 3]) for at in range(0, 12, 3)], 4)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    cut, _ = trained([joined(data[:3]), joined(data[3:])], 4)
    assert (cut - expected).abs().max() > 1e-3


def test_batch_norm_under_accumulation_is_warned_about_once(caplog):
    def messages(model, accumulation_steps):
        caplog.clear()
        SimpleTrainer(model, [], sgd(model), accumulation_steps=accumulation_steps)
        return caplog.messages.copy()

    with_norm = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    [text] = messages(with_norm, 4)
    assert text.startswith("Batch norm")
    assert "micro-batch separately: 4" in text
    assert messages(with_norm, 1) == messages(nn.GroupNorm(1, 3), 4) == []


def nan_at(index, count):
    data = batches(count)
    data[index] = (data[index][0], data[index][1] * math.nan)
    return data


@pytest.mark.parametrize("gather_metric_period", [1, 10])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(gather_metric_period):
    data = nan_at(4, 10)
    expected, _ = trained(data, 4)
    model = Regression()
    trainer = SimpleTrainer(
        model, data, sgd(model, momentum=0.9), gather_metric_period=gather_metric_period
    )
    with pytest.raises(
        FloatingPointError, match=r"in iteration 4: {'total_loss': nan}.*of this iteration$"
    ):
        trainer.train(0, 10)
    assert trainer.iter == 4
    assert trainer.status == "failed"
    assert torch.equal(weights(model), expected)


@pytest.mark.parametrize(
    ("clip_type", "is_asynchronous"), [("value", False), ("norm", False), ("full_model", True)]
)
def test_the_norm_that_clipping_needs_is_stored_and_is_no_loss(clip_type, is_asynchronous):
    model = Weight(lambda weight, batch: {"loss_a": weight * batch, "loss_b": weight})
    options = {
        "clip_gradients": GradientClipper(clip_type, 2.5),
        "async_write_metrics": is_asynchronous,
    }
    trainer = SimpleTrainer(
        model, [torch.tensor(1.0), torch.tensor(3.0)], sgd(model, lr=0.25), **options
    )
    trainer.train(0, 2)
    weight = 1.0 - 0.25 * 2.0  # the first gradient is 2, the second 4 and clipped to 2.5
    expected = {
        "total_loss": [(2.0, 0), (4 * weight, 1)],
        "loss_a": [(1.0, 0), (3 * weight, 1)],
        "loss_b": [(1.0, 0), (weight, 1)],
    }
    if clip_type != "value":
        expected["grad_norm"] = [(2.0, 0), (4.0, 1)]
    assert scalars(trainer) == expected
    assert model.weight.item() == pytest.approx(weight - 0.25 * 2.5, abs=1e-6)
    model = Weight(lambda weight, batch: {"loss": weight * batch, "grad_norm": batch})
    with pytest.raises(ValueError, match=r"stores \['grad_norm'\] itself"):
        SimpleTrainer(model, [torch.tensor(1.0)], sgd(model), **options).train(0, 1)
    SimpleTrainer(model, [torch.tensor(1.0)], sgd(model)).train(0, 1)
    # also with an optimizer that does not clip itself
    (cfg := get_cfg()).SOLVER.CLIP_GRADIENTS.ENABLED = True
    assert make_step_trainer(cfg, model, [], sgd(model)).clip_gradients == build_gradient_clipper(
        cfg
    )


def test_an_entry_that_is_only_logged_may_be_nan():
    model = Weight(lambda weight, batch: {"loss_a": weight, "recall": torch.tensor(math.nan)})
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model))
    trainer.train(0, 2)
    assert trainer.status == "finished"
    assert all(math.isnan(value) for value, _ in trainer.storage.history("recall").values())


class Listener(EventWriter):
    """Notes in which threads it was called, and says that it was."""

    def __init__(self):
        self.threads, self.called = [], threading.Event()

    def write(self):
        self.threads.append(threading.get_ident())
        self.called.set()


@pytest.mark.usefixtures("worker")
def test_asynchronously_a_loss_that_is_not_finite_ends_the_run_within_one_log_period():
    listener = Listener()
    model = Regression()
    trainer = SimpleTrainer(model, nan_at(3, 40), sgd(model), async_write_metrics=True)

    def wait(trainer):  # these steps are too short for a worker thread to get its turn for sure
        if trainer.iter == 12:
            assert listener.called.wait(120)

    trainer.register_hooks([PeriodicWriter([listener], period=10), AfterStep(wait)])
    with pytest.raises(FloatingPointError, match="not finite in iteration 3"):
        trainer.train(0, 40)
    assert trainer.status == "failed"
    assert 9 <= trainer.iter < 20


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("period", [0, 1])
def test_asynchronously_a_last_loss_that_is_not_finite_is_found_before_it_is_saved_or_evaluated(
    period,
):
    done, model = [], Regression()
    trainer = SimpleTrainer(model, nan_at(4, 5), sgd(model), async_write_metrics=True)
    save = AfterStep(
        lambda t: period and t.request_save("model", lambda: done.append(("save", t.iter)))
    )
    evaluate = EvalHook(period, lambda: done.append(("eval", trainer.iter)))
    trainer.register_hooks([save, evaluate, PeriodicWriter([], period=20)])
    with pytest.raises(FloatingPointError, match="not finite in iteration 4"):
        trainer.train(0, 5)
    assert trainer.status == "failed"
    assert done == [(what, iter) for iter in range(4 * period) for what in ("save", "eval")]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_asynchronous_metrics_are_the_same_and_come_from_another_thread(precision, tmp_path):
    histories, files, threads = [], [], []
    for asynchronous in (False, True):
        model, path, listener = (
            Weight(lambda w, x: {"loss_a": w * x, "half": x / 2}),
            tmp_path / "metrics",
            Listener(),
        )
        data, options = (
            [torch.tensor(float(i)) for i in range(5)],
            {"async_write_metrics": asynchronous},
        )
        make, more = (AMPTrainer, {"precision": precision}) if precision else (SimpleTrainer, {})
        trainer = make(model, data, sgd(model), **options, **more)
        put = AfterStep(lambda trainer: trainer.storage.put_scalar("epoch_share", trainer.iter / 5))
        writer = PeriodicWriter([JSONWriter(path), listener], period=4)
        trainer.register_hooks([EvalHook(10, lambda: {"top1": 50}), writer, put])
        trainer.train(0, 22)
        histories.append(scalars(trainer))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        files.append(
            [
                {key: value for key, value in row.items() if key not in CLOCK_READINGS}
                for row in rows
            ]
        )
        threads.append({thread == threading.get_ident() for thread in listener.threads})
        path.unlink()
    assert histories[0] == histories[1]
    assert (
        list(histories[0])
        == list(histories[1])
        == ["total_loss", "loss_a", "half", "epoch_share", "top1"]
    )
    assert len(histories[0]["total_loss"]) == 22
    assert files[0] == files[1]
    assert [row["iteration"] for row in files[0]] == [3, 7, 9, 11, 15, 19, 21, 22]
    assert threads == [{True}, {False}]


def test_a_value_that_the_model_changes_in_place_is_stored_as_it_was_in_its_step():
    stored = []
    for asynchronous in (False, True):
        count = torch.zeros(())
        model = Weight(
            lambda weight, batch, count=count: {"loss": weight * batch, "count": count.add_(1)}
        )
        trainer = SimpleTrainer(
            model, [torch.tensor(1.0)], sgd(model), async_write_metrics=asynchronous
        )
        trainer.train(0, 25)
        stored.append(scalars(trainer))
    assert stored[0] == stored[1]
    assert stored[1]["count"] == [(i + 1.0, i) for i in range(25)]


def test_write_metrics_puts_the_prefix_before_every_entry():
    weight = torch.tensor(3.0, requires_grad=True)
    with EventStorage(5) as storage:
        SimpleTrainer.write_metrics(
            {"loss_a": weight * 2, "loss_b": weight, "accuracy": 50.0}, 0.25, 7, "val_"
        )
        named = {"val_total_loss": 9.0, "val_loss_a": 6.0, "val_loss_b": 3.0, "val_accuracy": 50.0}
        times = {"rank_data_time": 0.25, "data_time": 0.25}
        assert storage.latest() == {name: (value, 7) for name, value in {**named, **times}.items()}
        SimpleTrainer.write_metrics({"loss_a": torch.tensor(1.0), "loss_b": 2.0}, 0.0, 8)
        assert storage.latest()["total_loss"] == (3.0, 8)  # of all, since nothing requires grad
        with pytest.raises(FloatingPointError, match=r"in iteration 9: {'total_loss': inf}"):
            SimpleTrainer.write_metrics({"loss_a": math.inf}, 0.0, 9)


def test_a_loss_that_some_micro_batches_lack_counts_as_in_what_is_minimized_and_another_entry_is_the_mean_of_its_own():
    def compute(weight, batch):
        return {
            "loss_a": weight * batch,
            **({"loss_b": 8 * weight, "accuracy": batch} if batch > 1 else {}),
        }

    model = Weight(compute)
    trainer = SimpleTrainer(
        model, [torch.tensor(1.0), torch.tensor(3.0)], sgd(model, lr=1.0), accumulation_steps=2
    )
    trainer.train(0, 1)
    # the gradient of what is logged is that of the step: 2 + 8 / 2
    stored = {"total_loss": 6.0, "loss_a": 2.0, "loss_b": 4.0, "accuracy": 3.0}
    assert scalars(trainer) == {name: [(value, 0)] for name, value in stored.items()}
    assert model.weight.item() == 1.0 - 6.0


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_outputs_of_the_model_are_for_hooks_until_the_save_point_and_no_metric(accumulation_steps):
    seen = []
    model = Weight(lambda weight, batch: {"loss": weight * batch, "outputs": 2 * batch})
    data = [torch.tensor(1.0), torch.tensor(3.0)]
    trainer = SimpleTrainer(model, data, sgd(model), accumulation_steps=accumulation_steps)
    read = {
        point: lambda trainer: seen.append(trainer.outputs)
        for point in ("after_backward", "after_step")
    }
    trainer.register_hooks([CallbackHook(**read)])
    trainer.train(0, 1)
    assert seen == 2 * [2.0 if accumulation_steps == 1 else [2.0, 6.0]]
    assert {*scalars(trainer)} == {"total_loss"}


class Backbone(nn.Module):
    """The batch times the weights of all parts that are there."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(2))
        self.head = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return sum(parameter * batch for parameter in self.parameters())


def untrained(caplog):
    return [text for text in caplog.messages if "in no optimizer" in text]


def frozen_and_unfrozen_at(iteration, caplog, act=lambda trainer: None, max_iter=6, **kwargs):
    """Train with a backbone that is frozen when the optimizer is built; the iteration of each warning."""
    model = Backbone()
    model.backbone.requires_grad_(False)
    optimizer = torch.optim.SGD([model.head], lr=0.1)
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], optimizer, **kwargs)
    found = []

    def unfreeze(trainer):
        if trainer.iter == iteration:
            act(trainer)
            trainer.model.backbone.requires_grad_(True)

    def look(trainer):
        found.extend([trainer.iter] * (len(untrained(caplog)) - len(found)))

    trainer.register_hooks([CallbackHook(before_step=unfreeze, after_step=look)])
    trainer.train(0, max_iter)
    return found


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}])
def test_a_parameter_that_a_hook_unfreezes_is_named_in_the_first_step_with_its_gradient(
    caplog, options
):
    assert frozen_and_unfrozen_at(3, caplog, **options) == [3]
    [text] = untrained(caplog)
    assert text.startswith("2 parameters have gradients, but are in no optimizer")
    assert "backbone.0, backbone.1. " in text


def test_a_parameter_that_stays_frozen_or_gets_into_an_optimizer_is_not_named(caplog):
    def add_group(trainer):
        trainer.optimizer.add_param_group({"params": [*trainer.model.backbone]})

    def other_optimizer(trainer):
        trainer.further = {"backbone": torch.optim.SGD(trainer.model.backbone, lr=0.1)}

    assert frozen_and_unfrozen_at(-1, caplog) == []
    assert frozen_and_unfrozen_at(3, caplog, add_group) == []
    assert frozen_and_unfrozen_at(3, caplog, other_optimizer) == []


def test_an_optimizer_that_was_built_without_a_part_of_the_model_is_noticed(caplog):
    model = Backbone()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], torch.optim.SGD(model.backbone, lr=0.1))
    trainer.train(0, 3)
    trainer.train(0, 3)
    [text] = untrained(caplog)
    assert ": head. " in text


def test_a_parameter_that_is_added_during_the_run_is_noticed_after_the_next_check_of_the_model(
    caplog,
):
    def add(trainer):
        if trainer.iter == 1:
            trainer.model.late = nn.Parameter(torch.ones(()))
            trainer.check_finite()  # as before a checkpoint

    model = Backbone()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model))
    trainer.register_hooks([CallbackHook(after_step=add)])
    trainer.train(0, 4)
    assert [": late. " in text for text in untrained(caplog)] == [True]


def test_several_optimizers_are_found_wherever_a_trainer_or_a_hook_has_them(caplog):
    class Gan(SimpleTrainer):
        def __init__(self, model):
            super().__init__(model, [torch.tensor(1.0)], torch.optim.SGD([model.head], lr=0.1))
            self._critic = [torch.optim.SGD([model.backbone[0]], lr=0.1)]

        def run_step(self):
            super().run_step()
            self._critic[0].step()

    class Own(CallbackHook):
        def __init__(self, optimizer):
            super().__init__(after_backward=lambda trainer: optimizer.step())
            self.optimizer = optimizer

    model = Backbone()
    trainer = Gan(model)
    trainer.register_hooks([Own(torch.optim.SGD([model.backbone[1]], lr=0.1))])
    trainer.train(0, 3)
    assert untrained(caplog) == []


def test_a_parameter_in_an_optimizer_has_no_function_that_a_step_would_call(monkeypatch):
    watched = []
    register = torch.Tensor.register_post_accumulate_grad_hook
    monkeypatch.setattr(
        torch.Tensor,
        "register_post_accumulate_grad_hook",
        lambda parameter, function: watched.append(parameter) or register(parameter, function),
    )
    model = Backbone()
    SimpleTrainer(model, [torch.tensor(1.0)], sgd(model)).train(0, 2)
    assert watched == []
    model = Backbone()
    optimizer = torch.optim.SGD(model.backbone, lr=0.1)
    SimpleTrainer(model, [torch.tensor(1.0)], optimizer).train(0, 2)
    assert [id(parameter) for parameter in watched] == [id(model.head)]
