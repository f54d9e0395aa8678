import pytest
import torch
from torch import nn

from tests.engine.tiny import Weight, sgd
from trainkit.engine.hooks import CallbackHook, ParamScheduler
from trainkit.engine.step import SimpleTrainer

HALVE = [{"NAME": "Exponential", "GAMMA": 0.5}]
LINEAR = [{"NAME": "Linear", "START_FACTOR": 0.25}]


def make(hook, optimizer=None, read=lambda group: group["weight_decay"]):
    """A trainer with the hook, and what ``read`` finds in the first group at each update."""
    optimizer, used = optimizer or sgd(Weight(), weight_decay=0.5, momentum=0.5), []
    trainer = SimpleTrainer(Weight(), [torch.tensor(1.0)], optimizer)
    note = CallbackHook(after_backward=lambda trainer: used.append(read(optimizer.param_groups[0])))
    trainer.register_hooks([hook, note])
    return trainer, used


def test_the_first_update_uses_the_first_value_and_each_value_is_stored_with_its_iteration():
    trainer, used = make(ParamScheduler("weight_decay", LINEAR))
    trainer.train(0, 4)
    assert used == [0.125, 0.25, 0.375, 0.5]
    assert trainer.storage.history("weight_decay").values() == list(zip(used, range(4), strict=True))
    assert trainer.storage.smoothing_hints()["weight_decay"] is False


def test_any_number_of_the_groups_can_be_scheduled():
    def adam():
        return torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5, betas=(0.5, 0.75))

    for param, optimizer, key, expected in [
        ("momentum", sgd(Weight(), momentum=0.5), "momentum", [0.5, 0.25, 0.125]),
        ("momentum", adam(), "betas", [(0.5, 0.75), (0.25, 0.75), (0.125, 0.75)]),
        ("betas.0", adam(), "betas", [(0.5, 0.75), (0.25, 0.75), (0.125, 0.75)]),
        ("betas.1", adam(), "betas", [(0.5, 0.75), (0.5, 0.375), (0.5, 0.1875)]),
        ("lr", adam(), "lr", [0.5, 0.25, 0.125]),
    ]:
        trainer, used = make(ParamScheduler(param, HALVE), optimizer, lambda group, key=key: group[key])
        trainer.train(0, 3)
        assert used == expected, param


def test_groups_start_from_their_own_values_and_the_largest_is_stored():
    groups = [{"params": [nn.Parameter(torch.ones(1)) for _ in range(n)], "weight_decay": n / 8} for n in (1, 2)]
    trainer, _ = make(ParamScheduler("weight_decay", HALVE), torch.optim.SGD(groups, lr=0.1))
    trainer.train(0, 2)
    values = [(group["weight_decay"], group["initial_weight_decay"]) for group in trainer.optimizer.param_groups]
    assert values == [(1 / 16, 1 / 8), (2 / 16, 2 / 8)]
    assert trainer.storage.history("weight_decay").values() == [(2 / 8, 0), (2 / 16, 1)]


def test_a_run_in_parts_has_one_schedule_if_its_length_is_given():
    def run(*parts, **kwargs):
        trainer, used = make(ParamScheduler("weight_decay", LINEAR, **kwargs))
        for part in parts:
            trainer.train(*part)
        return used

    assert run((0, 2), (2, 4), max_iter=4) == run((0, 4)) == [0.125, 0.25, 0.375, 0.5]
    assert run((0, 2), (2, 4)) == [0.125, 0.5, 0.375, 0.5]


def test_a_field_that_no_group_has_is_an_error_before_the_first_step():
    for param in ("weight_decy", "nesterov", "betas.0"):
        trainer, used = make(ParamScheduler(param, HALVE))
        with pytest.raises(ValueError, match=rf"no parameter group has '{param}'; accepted: .*'weight_decay'"):
            trainer.train(0, 1)
        assert used == []
