"""Several optimizers behave as one, and as each alone on its part."""

import copy

import pytest
import torch
from torch import nn
from trainkit.projects.non_finite.policies import SkipNonFinite

from trainkit.config import ConfigError, check_values, get_cfg, scale_lr_to_batch
from trainkit.engine import AMPTrainer, SimpleTrainer
from trainkit.engine.amp import fixed_scaler
from trainkit.solver import build_lr_scheduler, build_optimizer

MUON = {
    "NAME": "Muon",
    "PARAMS": ["0.weight"],
    "LR": 0.02,
    "MOMENTUM": 0.95,
    "NESTEROV": True,
    "WEIGHT_DECAY": 0.1,
}
CLIPPED = ["SOLVER.CLIP_GRADIENTS.ENABLED", True]
MUON_AND_ADAMW = [MUON, {"NAME": "AdamW"}]
# both are fused on a CPU
SGD_AND_ADAMW = [
    {"NAME": "SGD", "PARAMS": ["0.*"], "LR": 0.1},
    {"NAME": "AdamW"},
]


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x):
        return super().forward(x).square().mean()


def make_cfg(entries, *options):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.OPTIMIZERS", entries, *options])
    return cfg


def batches(num, bad=()):
    found = torch.randn(num, 16, 4, generator=torch.Generator().manual_seed(1))
    for i in bad:
        found[i, 0, 0] = torch.inf
    return [*found]


def weights(model):
    return [parameter.tolist() for parameter in model.parameters()]


def trained(entries, num=6, bad=(), trainer_class=SimpleTrainer, options=(), **arguments):
    model = Net()
    trainer = trainer_class(
        model, batches(num, bad), build_optimizer(make_cfg(entries, *options), model), **arguments
    )
    trainer.train(0, num)
    return trainer


def test_each_optimizer_updates_its_parameters_as_it_does_alone():
    model = Net()
    muon = torch.optim.Muon(
        [model[0].weight], lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1
    )
    rest = [model[0].bias, *model[1].parameters(), *model[2].parameters()]
    groups = [{"params": rest[:1] + rest[3:]}, {"params": rest[1:3], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.001, weight_decay=1e-4, fused=True)
    for batch in batches(6):
        model.zero_grad()
        model(batch).backward()
        muon.step()
        adamw.step()
    assert weights(trained(MUON_AND_ADAMW).model) == weights(model)
    assert weights(trained([{"NAME": "AdamW"}]).model) != weights(model)


def test_a_loaded_or_copied_optimizer_goes_on_as_the_one_it_comes_from():
    first = trained(MUON_AND_ADAMW, options=CLIPPED)
    model = Net()
    model.load_state_dict(first.model.state_dict())
    loaded = SimpleTrainer(
        model, batches(6), build_optimizer(make_cfg(MUON_AND_ADAMW, *CLIPPED), model)
    )
    loaded.load_step_state_dict(copy.deepcopy(first.step_state_dict()))
    model, optimizer = copy.deepcopy((first.model, first.optimizer))
    copied = SimpleTrainer(model, batches(6), optimizer)
    found = []
    for trainer in (first, loaded, copied):
        for group in trainer.optimizer.param_groups:  # as a schedule does
            group["lr"] = group["lr"] / 2
        trainer.train(0, 3)
        found.append(weights(trainer.model))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "entries", [MUON_AND_ADAMW, SGD_AND_ADAMW], ids=["on the host", "by fused kernels"]
)
@pytest.mark.parametrize("kind", [SimpleTrainer, AMPTrainer])
def test_all_optimizers_skip_an_update_that_is_not_finite(entries, kind):
    """A skipped first update is as if it had not been, for a scaler and for the policy."""

    def options():
        if kind is AMPTrainer:
            return {"precision": torch.float16, "grad_scaler": fixed_scaler("cpu", 1.0)}
        return {"non_finite": SkipNonFinite()}

    found = trained(entries, 4, bad=[0], trainer_class=kind, **options())
    expected = Net()
    trainer = kind(
        expected, batches(4)[1:], build_optimizer(make_cfg(entries), expected), **options()
    )
    trainer.train(0, 3)
    assert found.skipped_updates == 1
    assert weights(found.model) == weights(expected)
    undisturbed = trained(entries, 4, trainer_class=kind, **options())
    assert weights(undisturbed.model) != weights(expected)


def test_momentum_of_a_late_parameter_starts_at_zero_beside_another_optimizer(monkeypatch):
    """Fused SGD of torch takes uninitialised memory if only some of its parameters have a gradient at first."""
    model = Net()
    optimizer = build_optimizer(make_cfg(SGD_AND_ADAMW, "SOLVER.WEIGHT_DECAY", 0.0), model)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.full_like(tensor, torch.nan))
    model[0].bias.requires_grad_(False)
    for batch in batches(2):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        model[0].bias.requires_grad_(True)
    assert torch.equal(optimizer.state[model[0].bias]["momentum_buffer"], model[0].bias.grad)


def test_schedules_and_scaling_reach_the_rate_of_each_optimizer():
    options = ["SOLVER.BASE_LR", 0.1, "SOLVER.REFERENCE_BATCH_SIZE", 8, "SOLVER.WARMUP_ITERS", 0]
    cfg = scale_lr_to_batch(
        make_cfg([*MUON_AND_ADAMW], *options, "SOLVER.MAX_ITER", 10, "SOLVER.STEPS", (1,))
    )
    model = Net()
    optimizer = build_optimizer(cfg, model)
    scheduler = build_lr_scheduler(cfg, optimizer)
    rates = [[group["lr"] for group in optimizer.param_groups]]
    optimizer.step()
    scheduler.step()
    rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [pytest.approx([0.04, 0.2, 0.2]), pytest.approx([0.004, 0.02, 0.02])]
    assert MUON["LR"] == 0.02


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [{"NAME": "Muon", "PARAMS": ["0.*"]}, {"NAME": "SGD"}],
            "entry of Muon: .*Muon refuses .* only supports 2D",
        ),
        (
            [{"NAME": "Muon", "PARAMS": ["0.weigth"]}, {"NAME": "SGD"}],
            "did you mean '0.weight'. '0.weigth' .*fits no",
        ),
        (
            [{"NAME": "SGD", "PARAMS": ["0.*", "1.*"]}],
            r"no PARAMS fit 2.weight, 2.bias \(2 in all\)",
        ),
        (
            [{"NAME": "SGD"}, {"NAME": "AdamW", "PARAMS": ["2.*"]}],
            "'2.*' .* fits no trainable parameter that is left",
        ),
        ([{"NAME": "SGD", "PARAMS": "0.*"}], "got .*; accepted: .* PARAMS, a list"),
        ([{"PARAMS": ["*"]}], "got .*; accepted: nodes with NAME"),
    ],
)
def test_mistakes_are_found_when_it_is_built(entries, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(make_cfg(entries), Net())


def test_a_group_that_no_optimizer_would_update_and_a_rate_of_the_unused_node_are_refused():
    optimizer = build_optimizer(make_cfg(MUON_AND_ADAMW), Net())
    assert [type(part).__name__ for part in optimizer.optimizers] == ["Muon", "AdamW"]
    with pytest.raises(TypeError, match="takes no further group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(
        ConfigError, match=r"OPTIMIZERS and SOLVER\.OPTIMIZER\.LR are both set; give each"
    ):
        check_values(make_cfg(SGD_AND_ADAMW, "SOLVER.OPTIMIZER.LR", 0.5))
