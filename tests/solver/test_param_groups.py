import pytest
import torch
from torch import nn

from trainkit.config import get_cfg
from trainkit.solver import build_optimizer, get_default_optimizer_params, reduce_param_groups


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


class Biases(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, add_bias_kv=True)
        self.lstm = nn.LSTM(2, 2, bidirectional=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2), name="bias", dim=None)
        self.q_bias = nn.Parameter(torch.zeros(2))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(3, 2))
        self.biased = nn.Parameter(torch.zeros(2))


# written by hand from the documentation of torch
NAMED_BIAS = {"attention.out_proj.bias"}
OTHER_BIASES = {"q_bias", "attention.in_proj_bias", "attention.bias_k", "attention.bias_v"}
OTHER_BIASES |= {
    f"lstm.bias_{gate}_l0{direction}" for gate in ("ih", "hh") for direction in ("", "_reverse")
}
OTHER_BIASES |= {f"head.parametrizations.bias.original{part}" for part in (0, 1)}


def biases_in(model, **arguments):
    groups = get_default_optimizer_params(
        model, 1.0, 0.5, bias_lr_factor=2.0, weight_decay_bias=0.0, **arguments
    )
    found = {name: group for group in named_groups(model, groups) for name in group["params"]}
    assert {group["lr"] for group in found.values() if group["weight_decay"] == 0.0} == {2.0}
    return {name for name, group in found.items() if group["lr"] == 2.0}


def test_only_parameters_named_bias_are_biases_as_in_detectron2_and_the_log_names_the_others(
    caplog,
):
    assert biases_in(Biases()) == NAMED_BIAS
    [text] = caplog.messages
    assert "10 others: q_bias, attention.in_proj_bias, attention.bias_k" in text
    assert "SOLVER.ALL_BIASES True takes them in" in text


def test_one_argument_takes_in_all_biases(caplog):
    assert biases_in(Biases(), all_biases=True) == NAMED_BIAS | OTHER_BIASES
    assert caplog.messages == []


def test_without_a_rule_for_biases_or_without_other_biases_nothing_is_said(caplog):
    get_default_optimizer_params(Biases(), 1.0, 0.5, weight_decay_norm=0.0)
    get_default_optimizer_params(Biases(), 1.0, 0.5, weight_decay_bias=0.5)
    get_default_optimizer_params(Net(), 1.0, 0.5, bias_lr_factor=2.0)
    get_default_optimizer_params(nn.LSTM(2, 2).requires_grad_(False), 1.0, 0.5, bias_lr_factor=2.0)
    assert caplog.messages == []


@pytest.mark.parametrize("solver", [{"WEIGHT_DECAY_BIAS": 0.0}, {"BIAS_LR_FACTOR": 2.0}], ids=str)
@pytest.mark.parametrize("all_biases", [False, True])
def test_a_key_takes_in_all_biases(solver, all_biases, caplog):
    cfg = get_cfg()
    rates = {"BASE_LR": 1.0, "WEIGHT_DECAY": 0.5}
    cfg.merge_from_other_cfg({"SOLVER": {**rates, **solver, "ALL_BIASES": all_biases}})
    model = nn.LSTM(2, 2)
    groups = build_optimizer(cfg, model).param_groups
    assert len(groups) == 1 + all_biases
    if all_biases:
        found = named_groups(model, groups)[1]
        assert found["params"] == ["bias_ih_l0", "bias_hh_l0"]
        assert (found["lr"], found["weight_decay"]) in ((1.0, 0.0), (2.0, 0.5))
    assert ("bias_ih_l0, bias_hh_l0" in caplog.text) is not all_biases
