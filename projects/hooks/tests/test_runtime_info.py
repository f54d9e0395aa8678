import torch

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, Weight, batches, scalars, sgd
from trainkit.engine import DefaultTrainer, HookBase
from trainkit.engine.hooks import LRScheduler, RuntimeInfo
from trainkit.engine.step import SimpleTrainer


def test_a_config_tells_the_samples_and_the_seed(caplog, tmp_path):
    caplog.set_level("INFO")
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [{"NAME": "RuntimeInfo"}], "SOLVER.ACCUMULATION_STEPS", 2))
    trainer.train(0, 1)
    assert (
        "This run: 1 iterations = 0.4 epochs of 2.5; world size 1; lr is that of the parameter group "
        "'layers weight+bias'; 16 samples per iteration; seed 1; 74 of 74 parameters trained"
    ) in caplog.messages


def with_groups(optimizer_class, *hooks, **options):
    weights = [torch.nn.Parameter(torch.ones(())) for _ in range(3)]
    model = Weight()
    model.others = torch.nn.ParameterList(weights[1:])
    groups = [{"params": [model.weight], "lr": 0.5}, *({"params": [weight]} for weight in weights[1:])]
    groups[1] |= {"lr": 0.25, "name": "backbone"}
    optimizer = optimizer_class(groups, lr=0.125, **options)
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], optimizer)
    halve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iter: 0.5**iter)
    trainer.register_hooks([*hooks, LRScheduler(scheduler=halve)])
    return trainer


def test_the_rate_that_each_parameter_group_used_is_stored_by_its_name_and_the_momentum_once():
    trainer = with_groups(torch.optim.SGD, RuntimeInfo(), momentum=0.75)
    trainer.train(0, 2)
    stored = scalars(trainer)
    assert stored["lr/weight"] == [(0.5, 0), (0.25, 1)]
    assert stored["lr/backbone"] == [(0.25, 0), (0.125, 1)]
    assert stored["lr/others weight"] == [(0.125, 0), (0.0625, 1)]
    assert stored["momentum"] == [(0.75, 0), (0.75, 1)]
    assert {name for name in stored if "/" in name} == {"lr/weight", "lr/backbone", "lr/others weight"}
    assert trainer.storage.smoothing_hints()["lr/backbone"] is False


def test_the_names_are_those_of_the_table_at_the_start(tmp_path, caplog):
    caplog.set_level("INFO")
    options = ("HOOKS", [{"NAME": "RuntimeInfo"}], "SOLVER.PARAM_GROUPS.NORM_DECAY_FACTOR", 0.0)
    options += ("SOLVER.PARAM_GROUPS.BIAS_LR_FACTOR", 2.0)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options))
    trainer.train(max_iter=1)
    [table] = [message for message in caplog.messages if message.startswith("Parameter groups:")]
    named = {line.split("|")[1].strip() for line in table.splitlines()[3:]}
    stored = {name.removeprefix("lr/") for name in trainer.storage.latest() if name.startswith("lr/")}
    assert stored == named
    assert len(stored) > 1


def test_a_group_that_a_hook_adds_after_the_update_has_its_rate_from_the_next_one_on():
    class Unfreeze(HookBase):
        def after_step(self):
            if self.trainer.iter == 2:
                self.trainer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})

    trainer = SimpleTrainer(model := Regression(), batches(2), sgd(model))
    trainer.register_hooks([Unfreeze(), RuntimeInfo()])
    trainer.train(1, 5)
    assert trainer.storage.history("lr/1").values() == [(0.5, 3), (0.5, 4)]
