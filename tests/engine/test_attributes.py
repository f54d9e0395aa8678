"""Attributes of a trainer are saved with it: optimizers, schedules, gradient scalers and modules."""

import gc
import logging

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Regression, Steps, batches, sgd, through_a_file
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.config import ConfigError
from trainkit.engine import hooks
from trainkit.engine.defaults import DefaultTrainer
from trainkit.engine.loop import TrainerBase
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer
from trainkit.solver.lr_scheduler import LRMultiplier
from trainkit.utils import comm


def linear(inputs, outputs, seed):
    layer = nn.Linear(inputs, outputs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def adversarial_step(trainer, generator, judge, for_generator, for_judge):
    """One update of each; the input is a function of the iteration."""
    real = torch.full((4, 2), 1.0 + trainer.iter / 10)
    fake = generator(real.sin())
    for optimizer, loss in (
        (for_judge, lambda: (judge(fake.detach()) - judge(real)).mean().tanh()),
        (for_generator, lambda: -judge(fake).mean().tanh()),
    ):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def adam(module, lr=0.01):
    return torch.optim.Adam(module.parameters(), lr)


class InDict(TrainerBase):
    """Optimizers in a dict, schedules in a list; the modules are parts of one that the checkpointer has."""

    def __init__(self, folder):
        super().__init__()
        self.models = nn.ModuleDict({"generator": linear(2, 2, 0), "judge": linear(2, 1, 1)})
        self.optimizers = {name: adam(module) for name, module in self.models.items()}
        self.schedules = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            for optimizer in self.optimizers.values()
        ]
        self.checkpointer = Checkpointer(self.models, folder, trainer=self)

    def run_step(self):
        adversarial_step(self, *self.models.values(), *self.optimizers.values())
        for schedule in self.schedules:
            schedule.step()


class MadeAfterLoading(TrainerBase):
    def __init__(self, folder):
        super().__init__()
        self.generator = linear(2, 2, 0)
        self.judge = linear(2, 1, 1)
        self.checkpointer = Checkpointer(nn.Linear(1, 1), folder, trainer=self)

    @property
    def models(self):
        return nn.ModuleDict({"generator": self.generator, "judge": self.judge})

    def before_train(self):
        self.pair = (adam(self.generator), adam(self.judge))
        super().before_train()

    def run_step(self):
        adversarial_step(self, self.generator, self.judge, *self.pair)


class InSimpleTrainer(SimpleTrainer):
    def __init__(self, folder):
        model = nn.ModuleDict({"generator": linear(2, 2, 0), "judge": linear(2, 1, 1)})
        super().__init__(model, batches(1), torch.optim.SGD(model["judge"].parameters(), 0.01))
        self.for_generator = adam(model["generator"])
        self.checkpointer = Checkpointer(model, folder, trainer=self)

    @property
    def models(self):
        return self.model

    def run_step(self):
        adversarial_step(self, *self.model.values(), self.for_generator, self.optimizer)


def weights(trainer):
    return [parameter for _, parameter in sorted(trainer.models.named_parameters())]


@pytest.mark.parametrize("make", [InDict, MadeAfterLoading, InSimpleTrainer])
def test_a_trainer_with_its_own_step_resumes_with_the_bits_of_a_run_that_is_never_stopped(
    make, tmp_path
):
    whole = make(tmp_path / "whole")
    whole.train(0, 60)
    first = make(tmp_path / "run")
    first.train(0, 40)
    first.checkpointer.save("model_0000039")
    second = make(tmp_path / "run")
    second.checkpointer.resume_or_load("")
    second.train(40, 60)
    for own, expected in zip(weights(second), weights(whole), strict=True):
        assert torch.equal(own, expected)
    anew = make("")  # the comparison can fail
    anew.train(40, 60)
    assert not torch.equal(weights(anew)[0], weights(whole)[0])


class GAN(DefaultTrainer):
    """Two optimizers as attributes; the one that the config asks for is not used."""

    def __init__(self, cfg):
        super().__init__(cfg)
        layers = self.model.layers
        self.for_first = adam(layers[0])
        self.for_last = adam(layers[-1])

    def run_step(self):
        batch = self.fetch()
        for optimizer in (self.for_first, self.for_last):
            optimizer.zero_grad()
            sum(self.model(batch).values()).backward()
            optimizer.step()


def test_a_default_trainer_with_two_optimizers_resumes_exactly_and_stores_no_rate_of_a_third(
    tmp_path, caplog
):
    def job(folder, *options, resume=False, max_iter=60):
        cfg = tiny_cfg(folder, "SOLVER.MAX_ITER", 60, "SOLVER.CHECKPOINT_PERIOD", 20, *options)
        trainer = GAN(cfg)
        trainer.resume_or_load(resume=resume)
        trainer.train(max_iter=max_iter)
        return trainer

    torch.manual_seed(0)
    whole = job(tmp_path / "whole")
    torch.manual_seed(0)
    job(tmp_path / "run", max_iter=40)
    resumed = job(tmp_path / "run", resume=True)
    for own, expected in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, expected)
    for trainer in (whole, resumed):
        assert "lr" not in trainer.storage.histories()
    assert "LRScheduler (SGD) made no update in iteration 0" in caplog.text


def test_the_rate_of_an_optimizer_is_stored_from_its_first_update_on():
    model = Regression()

    class Late(SimpleTrainer):
        def update(self):
            if self.iter >= 2:
                super().update()

    trainer = Late(model, batches(4), sgd(model, lr=0.5))
    trainer.scheduler = LRMultiplier(trainer.optimizer, lambda where: 1.0, 4)
    trainer.register_hooks([hooks.LRScheduler()])
    trainer.train(0, 4)
    assert trainer.storage.history("lr").values() == [(0.5, 2), (0.5, 3)]


def entries(trainer):
    state = trainer.state_dict()
    return sorted(state.get("attributes", {}))


def test_what_is_saved_elsewhere_or_has_no_state_is_not_saved_again(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 5)
    trainer.register_hooks([hooks.LRScheduler()])
    assert entries(trainer) == []
    trainer.head = model.linear  # a part of the model
    trainer.both = nn.ModuleList([model.linear, nn.ReLU()])  # all its tensors are in the model
    trainer.criterion = nn.MSELoss()  # no tensors
    trainer.scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer.elsewhere = linear(2, 2, 0)
    trainer.checkpointer = Checkpointer(
        model, tmp_path, trainer=trainer, elsewhere=trainer.elsewhere
    )
    trainer.note = {"text": 1, "deep": {"teacher": linear(2, 2, 0)}}  # two levels
    assert entries(trainer) == []
    trainer.teacher = linear(300, 2000, 0)
    trainer.same = trainer.teacher
    trainer.scalers = [torch.amp.GradScaler("cpu")]
    trainer.named = {"one": sgd(trainer.teacher), 2: sgd(model)}
    assert entries(trainer) == ["named.2", "named.one", "scalers.0", "teacher"]
    assert "teacher (Linear, 2.3 MiB)" in caplog.text  # 602,000 values of 4 bytes


def test_an_attribute_can_be_left_out_and_a_wrong_name_is_warned_about(caplog):
    class WithTeacher(Steps):
        unsaved = ("teacher", "pair.second", "techer")

    trainer = WithTeacher()
    trainer.teacher = linear(2, 2, 0)
    trainer.pair = {"first": linear(2, 2, 0), "second": linear(2, 2, 0)}
    trainer.train(0, 1)
    assert entries(trainer) == ["pair.first"]
    assert "`unsaved` names ['techer'], which the trainer does not have" in caplog.text
    trainer.unsaved = "teacher"
    with pytest.raises(TypeError, match="unsaved has to be names"):
        trainer.train(0, 1)


def test_states_without_an_attribute_and_attributes_without_a_state_are_named(caplog):
    first = Steps()
    first.gone = linear(2, 2, 0)
    first.kept = linear(2, 2, 1)
    first.train(0, 1)
    state = through_a_file(first.state_dict())
    second = Steps()
    second.kept = linear(2, 2, 5)
    second.new = linear(2, 2, 6)
    second.load_state_dict(state)
    assert torch.equal(second.kept.weight, first.kept.weight)
    second.train(1, 2)
    assert "does not have: ['gone']" in caplog.text
    assert "start anew: ['new']" in caplog.text


def test_an_attribute_that_does_not_fit_is_an_error_before_the_model_changes(tmp_path):
    def make(width):
        model = linear(2, width, 0)
        trainer = Steps()
        trainer.checkpointer = Checkpointer(model, tmp_path, trainer=trainer)
        trainer.mine = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(2)).sum().backward()
        trainer.mine.step()
        return model, trainer

    _, trainer = make(3)
    trainer.checkpointer.save("model")
    state = torch.load(tmp_path / "model.pth", weights_only=True)
    state["trainer"]["attributes"]["mine"]["state"][0]["exp_avg"] = torch.zeros(7)
    torch.save(state, tmp_path / "model.pth")
    other, resumed = make(3)
    before = other.weight.clone()
    with pytest.raises(CheckpointError, match=r"model.pth.*trainer.mine .*'exp_avg'.*shape \[7\]"):
        resumed.checkpointer.resume_or_load("")
    assert torch.equal(other.weight, before)


class Sharded(torch.Tensor):
    """A tensor of which each rank holds a part, as far as trainkit looks."""

    @staticmethod
    def full_tensor():
        raise NotImplementedError


def test_sharded_modules_are_refused_with_the_line_that_saves_them():
    trainer = Steps()
    trainer.teacher = linear(2, 2, 0)
    trainer.teacher.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Sharded))
    line = r'checkpointer.add_checkpointable\("teacher", trainer.teacher\)'
    with pytest.raises(ConfigError, match=line):
        trainer.train(0, 1)
    trainer.unsaved = ("teacher",)
    trainer.train(0, 1)


def test_private_attributes_are_named_among_what_is_not_resumed(tmp_path, caplog):
    trainer = Steps()
    trainer.model = linear(2, 2, 0)
    trainer._hidden = sgd(trainer.model)
    checkpointer = Checkpointer(trainer.model, tmp_path, trainer=trainer)
    trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 5)])
    trainer.train(0, 1)
    assert "not saved: _hidden" in caplog.text


def test_the_log_names_each_attribute_once_with_its_size(caplog):
    trainer = Steps()
    trainer.teachers = [nn.Linear(1024, 512, bias=False)]
    trainer.nested = {"deep": [linear(2, 2, 0)]}
    with caplog.at_level(logging.INFO):
        trainer.state_dict()
        trainer.state_dict()
    [text] = [text for text in caplog.messages if "checkpoints hold" in text]
    assert "checkpoints hold: teachers.0 (Linear, 2.0 MiB). " in text  # 1024 * 512 * 4 bytes


def test_a_trainer_with_attributes_is_let_go():
    trainer = Steps()
    trainer.mine = linear(2, 2, 0)
    trainer.train(0, 1)
    trainer.state_dict()
    found = gc.get_referrers(trainer.mine)
    del trainer
    assert len(found) <= 2


# ---------------------------------------------------------------------- states that no file can hold


class Noting(hooks.CallbackHook):
    """Has a NumPy number in its state from an iteration on."""

    def __init__(self, start):
        super().__init__()
        self.start = start
        self.loaded = None

    def state_dict(self):
        bad = self.trainer.iter >= self.start
        return {"best": np.float64(0.5) if bad else 0.5, "count": 3}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def job_with_notes(folder, start):
    model = Regression()
    trainer = SimpleTrainer(model, batches(4), sgd(model))
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    note = Noting(start)
    trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 10), note])
    return trainer, checkpointer, note


def test_a_state_that_no_file_can_hold_ends_the_run_after_the_first_iteration(tmp_path):
    trainer, _, _ = job_with_notes(tmp_path, 0)
    with pytest.raises(
        TypeError, match=r"cannot be written: .*'trainer.hooks.Noting.best'.*float64"
    ):
        trainer.train(0, 300)
    assert trainer.iter == 0
    assert trainer.status == "failed"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("start", [15, 27])  # at a periodic save, and at the final one
def test_a_state_that_turns_up_later_costs_no_weights(start, tmp_path, caplog):
    trainer, _, _ = job_with_notes(tmp_path, start)
    with pytest.raises(TypeError, match=r"'trainer.hooks.Noting.best' is .* without this state"):
        trainer.train(0, 28)
    name = {15: "model_0000019.pth", 27: "model_final.pth"}[start]
    saved = torch.load(tmp_path / name, weights_only=True)
    assert saved["left_out"] == ["trainer.hooks.Noting.best"]
    assert [*saved["trainer"]["hooks"]] == ["PeriodicCheckpointer"]
    assert (tmp_path / "last_checkpoint").read_text() == name
    resumed, checkpointer, note = job_with_notes(tmp_path, 100)
    checkpointer.resume_or_load("")
    assert "trainer.hooks.Noting.best" in caplog.messages[-2] + caplog.messages[-1] + caplog.text
    assert torch.equal(resumed.model.linear.weight, trainer.model.linear.weight)
    assert note.loaded is None
    assert resumed.done - 1 == {15: 19, 27: 27}[start]


def test_a_rate_that_no_file_can_hold_costs_the_state_of_the_optimizer_and_not_the_weights(
    tmp_path, caplog
):
    def make():
        model = Regression()
        trainer = SimpleTrainer(model, batches(4), sgd(model, momentum=0.5))
        return trainer, Checkpointer(model, tmp_path, trainer=trainer)

    trainer, checkpointer = make()

    def spoil(trainer):
        trainer.optimizer.param_groups[0]["lr"] = np.float64(0.25)

    trainer.register_hooks([AfterStep(lambda t: t.iter == 3 and spoil(t))])
    trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 5)])
    with pytest.raises(TypeError, match=r"'trainer.optimizer.param_groups\[0\].lr' is "):
        trainer.train(0, 10)
    resumed, checkpointer = make()
    checkpointer.resume_or_load("")
    assert "no entry 'optimizer': SGD starts anew" in caplog.text
    assert torch.equal(resumed.model.linear.weight, trainer.model.linear.weight)


# ---------------------------------------------------------------------- properties


@pytest.mark.parametrize("base", [DefaultTrainer, SimpleTrainer])
def test_an_attribute_error_inside_a_property_keeps_its_words(base, tmp_path):
    class Trainer(base):
        @property
        def teacher(self):
            return self.model.no_such_part

    if base is DefaultTrainer:
        trainer = Trainer(tiny_cfg(tmp_path))
    else:
        trainer = Trainer(Regression(), [], None)
    with pytest.raises(AttributeError, match="no_such_part"):
        _ = trainer.teacher
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'tacher'"):
        _ = trainer.tacher


def test_a_default_trainer_passes_on_what_its_step_knows_and_may_have_attributes_of_these_names(
    tmp_path,
):
    trainer = DefaultTrainer(tiny_cfg(tmp_path))
    seen = []
    names = ("batch", "losses", "trained_losses", "feed", "metrics", "policy", "clip_gradients")
    look = hooks.CallbackHook(
        after_backward=lambda t: seen.append({name: getattr(t, name) for name in names})
    )
    trainer.register_hooks([look])
    trainer.train(max_iter=5)
    assert [*seen[0]["batch"]] == ["x", "label"]
    assert [*seen[0]["losses"]] == ["loss_cls"]
    assert seen[0]["trained_losses"] == ["loss_cls"]
    assert seen[0]["feed"].loader is trainer.data_loader
    trainer.metrics = "mine"
    assert trainer.metrics == "mine"
    trainer.train(max_iter=10)  # the step goes on with its own
    assert [iter for _, iter in trainer.storage.history("total_loss").values()] == [*range(10)]
    with pytest.raises(AttributeError, match="'SimpleTrainer' object has no attribute 'grad_sc"):
        _ = trainer.grad_scaler


class Judged(TrainerBase):
    """Has a module that is not the model; each rank trains with other numbers."""

    def __init__(self, judge):
        super().__init__()
        self.judge = judge
        self.optimizer = adam(judge)

    def run_step(self):
        numbers = torch.full((4, 2), 1.0 + comm.get_rank())
        self.optimizer.zero_grad()
        self.judge(numbers).square().mean().backward()
        self.optimizer.step()


def find_differing_modules(rank, folder):
    """The messages for a module as it is, with another start on each rank, wrapped, and left out."""
    messages = {}
    for name, judge in {
        "as it is": linear(2, 1, 0),
        "other start": linear(2, 1, rank),
        "wrapped": create_ddp_model(linear(2, 1, rank)),
        "left out": linear(2, 1, rank),
    }.items():
        trainer = Judged(judge)
        if name == "left out":
            trainer.unsaved = ("judge",)
        try:
            trainer.train(0, 2)
        except ConfigError as error:
            messages[name] = str(error)
    return messages


@pytest.mark.slow
def test_a_module_that_each_rank_trains_for_itself_is_an_error(tmp_path):
    of_ranks = on_two_ranks([find_differing_modules], tmp_path)["find_differing_modules"]
    assert of_ranks[0] == of_ranks[1]
    assert [*of_ranks[0]] == ["as it is", "other start"]
    for message in of_ranks[0].values():
        assert "trainer.judge has other weights on rank 1 than on rank 0" in message
