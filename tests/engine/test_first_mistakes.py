"""What a newcomer does wrong first: the message alone says what to write."""

import logging
import signal

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Regression, batches, sgd
from trainkit.data import build_test_loader
from trainkit.engine import HookBase, SimpleTrainer, hooks
from trainkit.solver import LRMultiplier, ScheduledLR


class NamedInputs(nn.Module):
    """Takes the entries of a batch by name, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, input_ids, labels=None):
        return {"loss": self.linear(input_ids).mean(), "logits": 1}


NAMED = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2)}


@pytest.mark.parametrize(
    ("model", "batch", "described"),
    [
        (
            nn.Linear(3, 1),
            [torch.ones(4, 3), torch.ones(4)],
            "a list of 2: tensor [4, 3], tensor [4]",
        ),
        (nn.Linear(3, 1), (torch.ones(4, 3), "name"), "a tuple of 2: tensor [4, 3], str"),
        (NamedInputs(), NAMED, "a dict {'input_ids': tensor [2, 3], 'labels': tensor [2]}"),
        (nn.Linear(3, 1), torch.ones(4, 5), "a tensor [4, 5]"),
    ],
)
def test_a_model_that_cannot_take_the_first_batch_is_told_what_it_gets(model, batch, described):
    with pytest.raises((TypeError, RuntimeError)) as of_torch:
        model(batch)
    trainer = SimpleTrainer(model, [batch], sgd(model))
    with pytest.raises(type(of_torch.value)) as caught:
        trainer.train(0, 2)
    own, line = str(caught.value).rsplit("\n", 1)
    assert own == str(of_torch.value)
    assert f"called as model(batch); batch is {described}. " in line
    assert "losses_from(model, loss_fn)" in line


def test_an_error_of_a_later_step_stays_as_it_is():
    data = [*batches(1), [torch.ones(2), "not a tensor"]]
    model = Regression()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - torch's own
        SimpleTrainer(model, data, sgd(model)).train(0, 2)
    assert "losses_from" not in str(caught.value)


def a_trainer(**options):
    model = Regression()
    return SimpleTrainer(model, batches(3), sgd(model), **options)


def evaluate_to_a_number():
    trainer = a_trainer()
    trainer.register_hooks([hooks.EvalHook(1, lambda: 0.5)])
    trainer.train(0, 2)


def torch_scheduler():
    return torch.optim.lr_scheduler.StepLR(sgd(Regression()), 1)


MISTAKES = {
    "a number to clip by": (
        lambda: a_trainer(clip_gradients=1.0),
        'GradientClipper("full_model", 1.0)',
    ),
    "a length in epochs": (lambda: a_trainer().train(0, "3ep"), "round(3 * trainer.epoch_length)"),
    "a fraction of an iteration": (lambda: a_trainer().train(0, 2.5), "got max_iter=2.5"),
    "a float from an evaluation": (evaluate_to_a_number, 'such as {"accuracy": 0.5}'),
    "one hook": (lambda: a_trainer().register_hooks(HookBase()), "write [hook]"),
    "the class of a scheduler": (
        lambda: hooks.LRScheduler(None, torch.optim.lr_scheduler.StepLR),
        "StepLR(optimizer, ...)",
    ),
    "torch's scheduler as a schedule": (
        lambda: ScheduledLR(sgd(Regression()), torch_scheduler()),
        "LRScheduler(optimizer, scheduler)",
    ),
    "torch's scheduler as a multiplier": (
        lambda: LRMultiplier(sgd(Regression()), torch_scheduler(), 10),
        "LRScheduler(optimizer, scheduler)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_first_mistake_is_answered_by_what_to_write(name):
    do_it, what_to_write = MISTAKES[name]
    with pytest.raises(TypeError) as caught:
        do_it()
    assert what_to_write in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_test_loader_of_a_config_takes_a_dataset_as_the_train_loader_does(tmp_path):
    cfg = tiny_cfg(tmp_path)
    samples = [{"x": torch.full((4,), float(value))} for value in (3, 1, 4)]
    found = [
        value for batch in build_test_loader(cfg, dataset=samples) for value in batch["x"][:, 0]
    ]
    assert found == [1.5, 0.5, 2.0]  # by the transform of the config
    with pytest.raises(TypeError, match="needs dataset_name, or dataset="):
        build_test_loader(cfg)


def test_a_failed_step_is_one_line_of_the_log_and_its_traceback_is_for_the_log_file(caplog):
    caplog.set_level(logging.INFO, "trainkit")

    class Fails(HookBase):
        def after_step(self):
            raise ValueError("boom")

    trainer = a_trainer()
    trainer.register_hooks([Fails()])
    with pytest.raises(ValueError, match="boom"):
        trainer.train(0, 2)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    [error] = errors
    assert error.getMessage().endswith(": ValueError: boom")
    assert "Traceback" not in caplog.text


@pytest.fixture
def ctrl_c():
    """What a terminal does; a process in the background ignores it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("ctrl_c")
def test_the_last_line_after_ctrl_c_says_where_the_run_stands_and_what_to_write():
    trainer = a_trainer()
    interrupt = AfterStep(lambda trainer: trainer.iter == 1 and signal.raise_signal(signal.SIGINT))
    trainer.register_hooks([interrupt])
    with pytest.raises(
        KeyboardInterrupt, match="stopped after 2 of 5 iterations.*catch KeyboardInterr"
    ):
        trainer.train(0, 5)
