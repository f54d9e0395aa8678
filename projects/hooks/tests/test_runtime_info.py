import torch

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Weight, scalars
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import LRScheduler, RuntimeInfo
from trainkit.engine.step import SimpleTrainer


def test_the_log_says_how_long_the_run_is_and_names_are_those_of_the_table_at_the_start(caplog, tmp_path):
    caplog.set_level("INFO")
    options = ("HOOKS", [{"NAME": "RuntimeInfo"}], "SOLVER.ACCUMULATION_STEPS", 2)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options, "SOLVER.PARAM_GROUPS.BIAS_LR_FACTOR", 2.0))
    trainer.train(0, 1)
    assert (
        "This run: 1 iterations = 0.4 epochs of 2.5; world size 1; lr is that of the parameter group "
        "'layers weight'; 16 samples per iteration; seed 1; 74 of 74 parameters trained"
    ) in caplog.messages
    [table] = [message for message in caplog.messages if message.startswith("Parameter groups:")]
    named = {line.split("|")[1].strip() for line in table.splitlines()[3:]}
    assert len(named) > 1
    assert {name.removeprefix("lr/") for name in trainer.storage.latest() if name.startswith("lr/")} == named


def test_the_rate_that_each_parameter_group_used_is_stored_by_its_name_and_the_momentum_once():
    weights = [torch.nn.Parameter(torch.ones(())) for _ in range(2)]
    model = Weight()
    model.others = torch.nn.ParameterList(weights)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": weights[:1], "lr": 0.25, "name": "backbone"}]
    optimizer = torch.optim.SGD([*groups, {"params": weights[1:]}], lr=0.125, momentum=0.75)
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], optimizer)
    halve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iter: 0.5**iter)
    trainer.register_hooks([RuntimeInfo(), LRScheduler(scheduler=halve)])
    trainer.train(0, 2)
    assert {name: values for name, values in scalars(trainer).items() if name[:3] in ("lr/", "mom")} == {
        "lr/weight": [(0.5, 0), (0.25, 1)],
        "lr/backbone": [(0.25, 0), (0.125, 1)],
        "lr/others weight": [(0.125, 0), (0.0625, 1)],
        "momentum": [(0.75, 0), (0.75, 1)],
    }
