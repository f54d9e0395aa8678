import pytest
import torch
from torch import nn

from trainkit.solver import get_default_optimizer_params, reduce_param_groups


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 2)


def named_groups(model, groups):
    names = {param: name for name, param in model.named_parameters()}
    return [{**group, "params": [names[param] for param in group["params"]]} for group in groups]


def test_biases_have_their_own_lr_and_weight_decay_also_in_norm_layers():
    model = Net()
    model.twin = nn.Linear(2, 2, bias=False)
    model.twin.weight = model.head.weight  # shared parameters come once, frozen ones not at all
    model.twin.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    groups = get_default_optimizer_params(
        model,
        base_lr=0.5,
        weight_decay=0.01,
        weight_decay_norm=0.02,
        bias_lr_factor=2.0,
        weight_decay_bias=0.0,
    )
    assert named_groups(model, groups) == [
        {"params": ["conv.weight", "head.weight"], "lr": 0.5, "weight_decay": 0.01},
        {"params": ["conv.bias", "norm.bias", "head.bias"], "lr": 1.0, "weight_decay": 0.0},
        {"params": ["norm.weight"], "lr": 0.5, "weight_decay": 0.02},
    ]


def test_every_kind_of_norm_layer_is_found():
    norms = (
        nn.SyncBatchNorm(2),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.RMSNorm(2),
        nn.InstanceNorm2d(2, affine=True),
    )
    for layer in (*norms, type("UsersNorm", (nn.LayerNorm,), {})(2), nn.Linear(2, 2)):
        (group,) = get_default_optimizer_params(layer, weight_decay=1.0, weight_decay_norm=0.0)
        assert group == {
            "params": [*layer.parameters()],
            "weight_decay": float(type(layer) is nn.Linear),
        }


def test_an_override_matches_a_leaf_name_or_a_full_name_which_wins():
    model = Net()
    groups = get_default_optimizer_params(
        model,
        base_lr=0.1,
        weight_decay=0.01,
        overrides={
            "head.weight": {"lr": 1.0},
            "weight": {"lr": 0.5, "weight_decay": 0.0},
            "norm.bias": {"momentum": 0.8},
        },
    )
    assert named_groups(model, groups) == [
        {"params": ["conv.weight", "norm.weight"], "lr": 0.5, "weight_decay": 0.0},
        {"params": ["conv.bias", "head.bias"], "lr": 0.1, "weight_decay": 0.01},
        {"params": ["norm.bias"], "lr": 0.1, "weight_decay": 0.01, "momentum": 0.8},
        {"params": ["head.weight"], "lr": 1.0, "weight_decay": 0.0},
    ]


def test_the_lr_factor_of_a_name_and_the_factor_of_biases_multiply():
    model = Net()
    groups = get_default_optimizer_params(
        model,
        base_lr=1.0,
        bias_lr_factor=2.0,
        lr_factor_func=lambda name: 0.25 if name.startswith("conv") else 1.0,
    )
    assert named_groups(model, groups) == [
        {"params": ["conv.weight"], "lr": 0.25},
        {"params": ["conv.bias"], "lr": 0.5},
        {"params": ["norm.weight", "head.weight"], "lr": 1.0},
        {"params": ["norm.bias", "head.bias"], "lr": 2.0},
    ]
    for arguments in ({"bias_lr_factor": 2.0}, {"lr_factor_func": len}):
        with pytest.raises(ValueError, match="base_lr, which is None"):
            get_default_optimizer_params(model, **arguments)


def test_reducing_merges_equal_groups_and_the_last_mention_of_a_parameter_wins():
    a, b, c, d, e = (nn.Parameter(torch.zeros(1)) for _ in range(5))
    assert reduce_param_groups(
        [
            {"params": [a], "lr": 1.0, "betas": [0.9, 0.99]},
            {"params": [b, c], "lr": 2.0},
            {"params": d, "betas": [0.9, 0.99], "lr": 1.0},
            {"params": iter([e]), "lr": 2.0},
        ]
    ) == [{"params": [a, d], "lr": 1.0, "betas": [0.9, 0.99]}, {"params": [b, c, e], "lr": 2.0}]
    groups = [{"params": [a, b], "lr": 1.0}, {"params": [a], "weight_decay": 0.5}]
    assert reduce_param_groups(groups) == [
        {"params": [a], "lr": 1.0, "weight_decay": 0.5},
        {"params": [b], "lr": 1.0},
    ]
    assert groups == [{"params": [a, b], "lr": 1.0}, {"params": [a], "weight_decay": 0.5}]
