"""ParamRules: factors by the kind and the name of a parameter."""

import logging

import pytest
import torch
from torch import nn

from trainkit.solver import ParamRules, build_param_groups, get_default_optimizer_params


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 2)


def named_groups(model, groups):
    names = {param: name for name, param in model.named_parameters()}
    return [{**group, "params": [names[param] for param in group["params"]]} for group in groups]


class EveryKind(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.dwconv = nn.Conv2d(2, 4, 1, groups=2)
        self.conv = nn.Conv2d(1, 1, 1)  # as many groups as input channels, as in OpenMMLab
        self.norm = nn.LayerNorm(2)
        self.gain = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(()))


EVERY_NAME = ["gain", "scale", "embedding.weight"]
EVERY_NAME += [f"{layer}.{leaf}" for layer in ("dwconv", "conv", "norm") for leaf in ("weight", "bias")]


def values_by_name(model, groups, key):
    return {name: group[key] for group in named_groups(model, groups) for name in group["params"]}


@pytest.mark.parametrize(
    ("factors", "changed"),
    [
        ({"norm": 2.0}, {"norm.weight": 2.0, "norm.bias": 2.0}),
        ({"bias": 2.0}, {"dwconv.bias": 2.0, "conv.bias": 2.0}),
        ({"dwconv": 2.0}, dict.fromkeys(["dwconv.weight", "dwconv.bias", "conv.weight", "conv.bias"], 2.0)),
        ({"flat": 2.0}, dict.fromkeys(["gain", "dwconv.bias", "conv.bias", "norm.weight", "norm.bias"], 2.0)),
        (
            {"flat": 0.0, "embedding": 5.0, "dwconv": 4.0, "bias": 3.0, "norm": 1.0},
            {"gain": 0.0, "embedding.weight": 5.0}
            | dict.fromkeys(["conv.weight", "dwconv.weight"], 4.0)
            | dict.fromkeys(["dwconv.bias", "conv.bias"], 3.0),
        ),
    ],
    ids=str,
)
def test_a_kind_has_its_factors_and_the_first_one_given_counts(factors, changed):
    model = EveryKind()
    expected = {**dict.fromkeys(EVERY_NAME, 1.0), **changed}
    groups = build_param_groups(model, 1.0, 0.5, ParamRules(lr_factors=factors))
    assert values_by_name(model, groups, "lr") == expected
    assert values_by_name(model, groups, "weight_decay") == dict.fromkeys(EVERY_NAME, 0.5)
    if "norm" not in factors and "bias" in factors:
        expected["norm.bias"] = factors["bias"]  # only for the learning rate is it no bias
    groups = build_param_groups(model, 0.5, 1.0, ParamRules(decay_factors=factors))
    assert values_by_name(model, groups, "weight_decay") == expected
    assert values_by_name(model, groups, "lr") == dict.fromkeys(EVERY_NAME, 0.5)


def test_without_rules_the_groups_are_those_of_the_detectron2_function():
    model = Net()
    model.twin = nn.Linear(2, 2)
    model.twin.weight = model.head.weight
    model.conv.requires_grad_(False)
    rules = ParamRules(weight_decay_norm=0.5, weight_decay_bias=0.25, bias_lr_factor=2.0)
    expected = get_default_optimizer_params(model, 0.1, 1.0, 0.5, 2.0, 0.25)
    assert build_param_groups(model, 0.1, 1.0, rules) == expected
    assert build_param_groups(model, 0.1, 1.0, ParamRules()) != expected
    assert build_param_groups(model, 0.1, None, rules) == get_default_optimizer_params(model, 0.1, bias_lr_factor=2.0)


def test_factors_of_a_custom_key_multiply_the_other_ones_and_its_options_reach_the_group():
    model = Net()
    rules = ParamRules(
        lr_factors={"bias": 2.0},
        decay_factors={"norm": 0.5},
        custom_keys={"norm": {"lr_factor": 0.25, "decay_factor": 0.5, "lars_exclude": True}, "head.w": {"taps": [1]}},
    )
    assert named_groups(model, build_param_groups(model, 1.0, 1.0, rules)) == [
        {"params": ["conv.weight"], "lr": 1.0, "weight_decay": 1.0},
        {"params": ["conv.bias", "head.bias"], "lr": 2.0, "weight_decay": 1.0},
        {"params": ["norm.weight", "norm.bias"], "lr": 0.25, "weight_decay": 0.25, "lars_exclude": True},
        {"params": ["head.weight"], "lr": 1.0, "weight_decay": 1.0, "taps": [1]},
    ]


def test_as_in_openmmlab_a_custom_key_may_switch_all_other_rules_off():
    model = Net()
    rules = ParamRules(
        weight_decay_norm=0.0,
        bias_lr_factor=2.0,
        lr_factors={"flat": 3.0},
        decay_factors={"flat": 0.0},
        lr_factor_func=lambda name: 0.5,
        custom_keys={"norm": {"decay_factor": 0.5}},
        custom_keys_only=True,
    )
    assert named_groups(model, build_param_groups(model, 1.0, 1.0, rules)) == [
        {"params": ["conv.weight", "head.weight"], "lr": 0.5, "weight_decay": 1.0},
        {"params": ["conv.bias", "head.bias"], "lr": 3.0, "weight_decay": 0.0},
        {"params": ["norm.weight", "norm.bias"], "lr": 1.0, "weight_decay": 0.5},
    ]


@pytest.mark.parametrize(
    ("key_match", "expected"),
    [
        ("longest", {"conv.weight": 0.1, "conv.bias": 0.3, "norm.weight": 0.4, "head.weight": 0.4}),
        ("shortest", {"conv.weight": 0.4, "conv.bias": 0.2, "norm.weight": 0.4, "head.weight": 0.4}),
        ("exact", {"conv.bias": 0.3}),
    ],
)
def test_of_several_custom_keys_one_counts_and_the_alphabet_decides_among_equals(key_match, expected):
    model = Net()
    factors = {"t": 0.4, "onv.": 0.2, "conv": 0.1, "conv.bias": 0.3}
    keys = {key: {"lr_factor": factor} for key, factor in factors.items()}
    groups = build_param_groups(model, 1.0, None, ParamRules(custom_keys=keys, key_match=key_match))
    names = [name for name, _ in model.named_parameters()]
    assert values_by_name(model, groups, "lr") == {**dict.fromkeys(names, 1.0), **expected}


def test_custom_keys_that_count_for_nothing_draw_a_warning(caplog):
    model = Net()
    model.conv.requires_grad_(False)
    keys = {"conv": {}, "hed": {"lr_factor": 2.0}, "hea": {"lr_factor": 2.0}, "head": {"lr_factor": 2.0}}
    with caplog.at_level(logging.WARNING):
        build_param_groups(model, 1.0, None, ParamRules(custom_keys=keys))
    assert [record.getMessage() for record in caplog.records] == [
        "Custom keys that match no parameter and have no effect: hea, hed"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr_factors": {"nrom": 1.0}}, r"\['nrom'\] are no kinds; accepted: norm, bias, dwconv, embedding, flat"),
        ({"decay_factors": {"norm": -1.0}}, "norm in decay_factors must be a number >= 0, got -1.0"),
        ({"custom_keys": {"a": {"lr_factor": "big"}}}, "lr_factor of 'a' in custom_keys must be a number >= 0"),
        ({"custom_keys": {"a": {"lr_mult": 1.0}}}, r"'a' in custom_keys takes lr_factor and .*got \['lr_mult'\]"),
        ({"key_match": "best"}, "key_match must be one of longest, shortest, exact, got 'best'"),
    ],
    ids=str,
)
def test_wrong_rules_are_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParamRules(**arguments)
