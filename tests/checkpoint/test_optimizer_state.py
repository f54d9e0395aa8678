"""A saved state of an optimizer goes to the parameters of the same names, or is refused."""

import copy
import re

import pytest
import torch
from torch import nn

from tests.engine.tiny import PlainOptimizer, through_a_file
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.engine.step import SimpleTrainer
from trainkit.solver.lr_scheduler import LRMultiplier


class Layers(nn.Module):
    """Layers in any order of their definition; ``shared`` is the weight of two of them."""

    def __init__(self, order, width=4, tied=()):
        super().__init__()
        for name in order:
            setattr(self, name, self.make(name, width))
        for one, other in tied:
            getattr(self, other).weight = getattr(self, one).weight
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for _, parameter in sorted(self.named(), key=lambda item: item[0]):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    @staticmethod
    def make(name, width):
        sizes = {"first": (3, width), "second": (width, 4), "third": (4, 4), "last": (4, 1)}
        return nn.LayerNorm(4) if name == "norm" else nn.Linear(*sizes[name])

    def named(self):
        return self.named_parameters(remove_duplicate=False)

    def forward(self, batch):
        for name in ("first", "second", "norm", "third", "last"):
            if hasattr(self, name):
                batch = getattr(self, name)(batch).tanh()
        return batch.square().mean()


OPTIMIZERS = {
    "sgd": lambda params, **how: torch.optim.SGD(params, 0.1, momentum=0.9, **how),
    "adam": lambda params, **how: torch.optim.Adam(params, 0.01, **how),
    "adamw": lambda params, **how: torch.optim.AdamW(params, 0.01, **how),
}


def data(count=12):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(6, 3, generator=generator) for _ in range(count)]


def trainer_of(model, optimizer, batches):
    return SimpleTrainer(model, batches, optimizer)


def train(model, optimizer, batches):
    trainer = trainer_of(model, optimizer, batches)
    trainer.train(0, len(batches))
    return trainer


def saved_with(first, tmp_path):
    Checkpointer(first.model, tmp_path, trainer=first).save("model_0000005")


def resume(model, optimizer, batches, tmp_path):
    trainer = trainer_of(model, optimizer, batches)
    Checkpointer(model, tmp_path, trainer=trainer).resume_or_load("")
    trainer.train(6, 12)
    return trainer


def by_name(model):
    return dict(model.named_parameters())


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("width", [4, 7], ids=["equal sizes", "other sizes"])
def test_modules_that_are_defined_in_another_order_keep_their_momentum(width, kind, how, tmp_path):
    def make(order):
        model = Layers(order.split(), width)
        return model, OPTIMIZERS[kind](model.parameters(), **how)

    whole, optimizer = make("first second third last")
    train(whole, optimizer, data())
    saved_with(train(*make("first second third last"), data()[:6]), tmp_path)
    model, optimizer = make("third last second first")
    resume(model, optimizer, data()[6:], tmp_path)
    expected = by_name(whole)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert [*by_name(model)] != [*expected]  # they were in another order


def groups_of(model):
    """As the default config makes them: the norms have no decay, and the group of the first parameter is first."""
    groups = {}
    for name, parameter in model.named_parameters():
        decay = 0.0 if name.startswith("norm") else 0.1
        groups.setdefault(decay, []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "lr": 0.1 if decay else 0.05}
        for decay, members in groups.items()
    ]


def test_groups_that_come_in_another_order_keep_their_settings_and_rates(tmp_path):
    def make(order):
        model = Layers(order.split())
        optimizer = torch.optim.AdamW(groups_of(model), fused=True)
        scheduler = LRMultiplier(optimizer, lambda where: 1 - where / 2, 12)
        trainer = SimpleTrainer(model, data(), optimizer)
        trainer.scheduler = scheduler
        return trainer, scheduler

    def steps(trainer, scheduler, batches):
        for batch in batches:
            trainer.optimizer.zero_grad()
            trainer.model(batch).backward()
            trainer.optimizer.step()
            scheduler.step()

    whole, scheduler = make("first norm last")
    steps(whole, scheduler, data())
    first, scheduler = make("first norm last")
    steps(first, scheduler, data()[:6])
    Checkpointer(first.model, tmp_path, trainer=first, schedule=scheduler).save("model")
    second, scheduler = make("norm last first")
    Checkpointer(second.model, tmp_path, trainer=second, schedule=scheduler).resume_or_load("")
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.0, 0.1]
    assert scheduler.base_lrs == [0.05, 0.1]
    steps(second, scheduler, data()[6:])
    expected = by_name(whole.model)
    for name, parameter in second.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def step_of(model, optimizer):
    model(data()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def loads(model, optimizer, state):
    """Load a state of a trainer, which must be refused; returns the message."""
    before = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        SimpleTrainer(model, data(), optimizer).load_state_dict(state)
    after = optimizer.state_dict()
    assert str(after) == str(before)
    assert str(model.state_dict()) == str(weights)
    return str(caught.value)


def saved_state(model, optimizer):
    step_of(model, optimizer)
    return through_a_file(SimpleTrainer(model, data(), optimizer).state_dict())


def test_a_parameter_that_has_changed_its_group_is_refused():
    def make(second_group):
        model = Layers(("first", "last"))
        named = by_name(model)
        groups = [
            {"params": [p for n, p in named.items() if n not in second_group]},
            {"params": [named[name] for name in second_group], "lr": 0.5},
        ]
        return model, torch.optim.SGD(groups, 0.1, momentum=0.9)

    state = saved_state(*make(["first.bias"]))
    message = loads(*make(["last.bias"]), state)
    assert re.search(
        r"the parameter first.bias is in group 1 of the checkpoint's .* group 0 of", message
    )


def test_parameters_that_only_one_side_has_are_named():
    def make(order):
        model = Layers(order.split())
        return model, OPTIMIZERS["sgd"](model.parameters())

    message = loads(*make("first last"), saved_state(*make("first third last")))
    assert "the checkpoint's optimizer: third.weight, third.bias; " in message
    message = loads(*make("first third last"), saved_state(*make("first last")))
    assert "of this run: third.weight, third.bias. " in message


def test_a_parameter_of_another_shape_is_refused_by_its_name():
    def make(width):
        model = Layers(("first", "second", "last"), width)
        return model, OPTIMIZERS["sgd"](model.parameters())

    message = loads(*make(4), saved_state(*make(5)))
    assert "first.weight has the shape [5, 3]" in message
    assert "and [4, 3]" in message


@pytest.mark.parametrize("entry", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("shape", [[7], [], [4, 3, 1]], ids=str)
@pytest.mark.parametrize("has_names", [True, False])
def test_a_state_of_another_shape_is_refused_before_the_optimizer_sees_it(entry, shape, has_names):
    def make():
        model = Layers(("first", "last"))
        return model, OPTIMIZERS["adamw"](model.parameters(), fused=True)

    state = saved_state(*make())
    if not has_names:  # as in a file of detectron2
        del state["optimizer_groups"]
    if entry == "step" and shape == []:
        shape = [2]
    state["optimizer"]["state"][0][entry] = torch.zeros(shape)
    message = loads(*make(), state)
    assert f"'{entry}' in the state of parameter 0 (AdamW) has shape {shape}" in message


def test_a_bare_optimizer_of_a_checkpointer_is_checked_too_and_the_model_keeps_its_weights(
    tmp_path,
):
    def make(order):
        model = Layers(order.split())
        return model, OPTIMIZERS["adamw"](model.parameters(), fused=True)

    model, optimizer = make("first third last")
    step_of(model, optimizer)
    Checkpointer(model, tmp_path, optimizer=optimizer).save("model")
    other, restored = make("last third first")
    Checkpointer(other, tmp_path, optimizer=restored).resume_or_load("")
    expected = dict(zip(by_name(model), optimizer.state.values(), strict=True))
    for name, parameter in other.named_parameters():
        assert torch.equal(restored.state[parameter]["exp_avg"], expected[name]["exp_avg"])

    state = torch.load(tmp_path / "model.pth", weights_only=True)
    state["optimizer"]["state"][2]["exp_avg"] = torch.zeros(7)
    state["model"] = {name: value + 1 for name, value in state["model"].items()}
    torch.save(state, tmp_path / "stranger.pth")
    model, optimizer = make("first third last")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"stranger.pth.*entry 'optimizer' .*shape \[7\]"):
        Checkpointer(model, optimizer=optimizer).load(str(tmp_path / "stranger.pth"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_a_tied_weight_is_found_under_each_of_its_names():
    def make(order, tied):
        model = Layers(order.split(), tied=[tied])
        return model, OPTIMIZERS["adam"](model.parameters())

    first, optimizer = make("second third last", ("second", "third"))
    step_of_tied(first, optimizer)
    state = through_a_file(SimpleTrainer(first, data(), optimizer).state_dict())
    other, restored = make("last third second", ("third", "second"))
    # its first name in the first run is second.weight
    assert [*by_name(other)][2] == "third.weight"
    SimpleTrainer(other, data(), restored).load_state_dict(state)
    expected = optimizer.state[first.second.weight]["exp_avg"]
    assert torch.equal(restored.state[other.second.weight]["exp_avg"], expected)
    expected = optimizer.state[first.last.bias]["exp_avg"]
    assert torch.equal(restored.state[other.last.bias]["exp_avg"], expected)


def step_of_tied(model, optimizer):
    model(torch.randn(6, 4, generator=torch.Generator().manual_seed(1))).backward()
    optimizer.step()


class Wrapped(nn.Module):
    """A wrapper under the name of DistributedDataParallel or torch.compile."""

    def __init__(self, name, inner):
        super().__init__()
        setattr(self, name, inner)
        self.inner_name = name

    def forward(self, batch):
        return getattr(self, self.inner_name)(batch)


@pytest.mark.parametrize("prefix", ["module", "_orig_mod"])
def test_wrappers_of_a_model_and_of_its_parts_do_not_count(prefix):
    plain = Layers(("first", "third", "last"))
    state = saved_state(plain, optimizer := OPTIMIZERS["adam"](plain.parameters()))
    inner = Layers(("third", "last", "first"))
    inner.third = Wrapped(prefix, inner.third)
    outer = Wrapped(prefix, inner)
    restored = OPTIMIZERS["adam"](outer.parameters())
    SimpleTrainer(outer, data(), restored).load_state_dict(state)
    expected = optimizer.state[plain.third.weight]["exp_avg"]
    inside = getattr(inner.third, prefix).weight
    assert torch.equal(restored.state[inside]["exp_avg"], expected)


def test_parameters_outside_of_the_model_count_by_their_places_and_the_others_by_name():
    def make(order):
        model = Layers(order.split())
        extra = [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))]
        named = by_name(model)
        params = [extra[0], *named.values(), extra[1]]
        for number, parameter in enumerate(extra):
            parameter.grad = torch.full((4, 4), number + 1.0)
        return model, extra, OPTIMIZERS["sgd"](params)

    model, _, optimizer = make("first third last")
    state = saved_state(model, optimizer)
    other, own, restored = make("third first last")
    SimpleTrainer(other, data(), restored).load_state_dict(state)
    for number in (0, 1):
        momentum = restored.state[own[number]]["momentum_buffer"]
        assert torch.equal(momentum, torch.full((4, 4), number + 1.0))
    momentum = restored.state[other.third.weight]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[model.third.weight]["momentum_buffer"])


OTHERS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "Adamax": {},
    "ASGD": {"t0": 0},
    "LBFGS": {},
    "Muon": {},
    "NAdam": {"momentum_decay": 0.1},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
    "SparseAdam": {},
}


def test_the_table_below_has_all_optimizers_of_torch():
    known = {name for name, each in vars(torch.optim).items() if isinstance(each, type)}
    assert known - {"Optimizer"} == {*OTHERS}


@pytest.mark.parametrize("name", OTHERS)
def test_each_optimizer_of_torch_goes_on_with_the_bits_of_a_run_that_is_never_stopped(name):
    def make():
        table = nn.Embedding(5, 3, sparse=name == "SparseAdam")
        with torch.no_grad():
            table.weight.copy_(torch.arange(15.0).view(5, 3) / 8)
        return table, getattr(torch.optim, name)(table.parameters(), lr=0.01, **OTHERS[name])

    def steps(table, optimizer, count):
        def closure():
            optimizer.zero_grad()
            loss = table(torch.tensor([0, 2, 3])).square().mean()
            loss.backward()
            return loss

        for _ in range(count):
            if name == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

    whole, optimizer = make()
    steps(whole, optimizer, 8)
    first, optimizer = make()
    steps(first, optimizer, 4)
    state = through_a_file(SimpleTrainer(first, data(), optimizer).state_dict())
    second, optimizer = make()
    second.load_state_dict(first.state_dict())
    SimpleTrainer(second, data(), optimizer).load_state_dict(state)
    steps(second, optimizer, 4)
    assert torch.equal(second.weight, whole.weight)


CLASSES = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad"]


@pytest.mark.parametrize("saved", CLASSES)
@pytest.mark.parametrize("now", CLASSES)
def test_the_state_of_another_class_is_refused(saved, now):
    def make(name):
        model = Layers(("first", "last"))
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.01)

    state = saved_state(*make(saved))
    model, optimizer = make(now)
    if saved == now:
        SimpleTrainer(model, data(), optimizer).load_state_dict(state)
        step_of(model, optimizer)
    else:
        message = loads(model, optimizer, state)
        assert f"has the state of {saved}, the optimizer of this run is {now}" in message


class WithStatistics(torch.optim.AdamW):
    """A subclass that keeps a value of another shape, and a group with a list of names."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = torch.tensor([1.0, 2.0])
        return loss


def test_what_a_subclass_adds_has_any_shape_and_a_wrapper_does_not_hide_the_class():
    def make(wrap=lambda optimizer: optimizer):
        model = Layers(("first", "last"))
        return model, wrap(WithStatistics(model.parameters()))

    state = saved_state(*make())
    model, optimizer = make()
    SimpleTrainer(model, data(), optimizer).load_state_dict(state)
    assert optimizer.state[model.last.bias]["seen"].tolist() == [1.0, 2.0]
    model, optimizer = make(PlainOptimizer)
    state["optimizer"]["state"][1]["exp_avg"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match="'exp_avg' in the state of parameter 1"):
        SimpleTrainer(model, data(), optimizer).load_state_dict(state)


def test_the_names_that_torch_keeps_in_a_group_are_those_of_this_run():
    def make(order):
        model = Layers(order.split())
        return model, torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9)

    state = saved_state(*make("first last"))
    model, optimizer = make("last first")
    SimpleTrainer(model, data(), optimizer).load_state_dict(state)
    assert optimizer.param_groups[0]["param_names"] == [*by_name(model)]


def test_a_loaded_state_has_its_settings_in_their_order_so_that_digests_of_it_are_equal():
    def make():
        model = Layers(("first", "last"))
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)

    model, optimizer = make()
    state = saved_state(model, optimizer)
    other, restored = make()
    SimpleTrainer(other, data(), restored).load_state_dict(state)
    [group] = restored.state_dict()["param_groups"]
    assert [*group] == [*optimizer.state_dict()["param_groups"][0]]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["optimizer"].pop("state"),
        lambda state: state["optimizer"].update(param_groups=3),
        lambda state: state["optimizer"]["param_groups"][0].pop("params"),
        lambda state: state["optimizer"]["state"].update({0: [1]}),
        lambda state: state["optimizer_groups"].append({}),
        lambda state: state.update(optimizer_groups=[3]),
        lambda state: state["optimizer_groups"][0]["names"].pop(),
        lambda state: state["optimizer_groups"][0].update(shapes=5),
    ],
)
def test_a_damaged_state_is_an_error_that_says_so(change):
    model = Layers(("first", "last"))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    state = saved_state(model, optimizer)
    change(state)
    message = loads(model, optimizer, state)
    assert "damaged" in message or "is no dict" in message
