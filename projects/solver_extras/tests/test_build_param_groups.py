"""Parameter groups by the kind and the name of a parameter, of `ParamRules` and of a config; their names and table."""

import pytest
import torch
from torch import nn
from trainkit.projects.solver_extras.rules import describe_param_groups, group_names

from tests.solver.test_param_groups import Net, named_groups
from trainkit.config import ConfigError, check_values, get_cfg
from trainkit.solver import (
    LARS,
    LAYER_DEPTH_REGISTRY,
    PARAM_GROUP_REGISTRY,
    ParamRules,
    build_optimizer,
    build_param_groups,
    get_default_optimizer_params,
)


class EveryKind(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.dwconv = nn.Conv2d(2, 4, 1, groups=2)
        self.conv = nn.Conv2d(1, 1, 1)  # as many groups as input channels, as in OpenMMLab
        self.norm = nn.LayerNorm(2)
        self.gain = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(()))


def values_by_name(model, groups, key):
    return {name: group[key] for group in named_groups(model, groups) for name in group["params"]}


@pytest.mark.parametrize(
    ("factors", "changed"),
    [
        ({"norm": 2.0}, {"norm.weight": 2.0, "norm.bias": 2.0}),
        ({"bias": 2.0}, {"dwconv.bias": 2.0, "conv.bias": 2.0}),
        (
            {"flat": 2.0},
            dict.fromkeys(["gain", "dwconv.bias", "conv.bias", "norm.weight", "norm.bias"], 2.0),
        ),
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
    plain = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    groups = build_param_groups(model, 1.0, 0.5, ParamRules(lr_factors=factors))
    assert values_by_name(model, groups, "lr") == {**plain, **changed}
    assert {*values_by_name(model, groups, "weight_decay").values()} == {0.5}
    if "norm" not in factors and "bias" in factors:
        # only for the learning rate is it no bias
        changed = {
            **changed,
            "norm.bias": factors["bias"],
        }
    groups = build_param_groups(model, 0.5, 1.0, ParamRules(decay_factors=factors))
    assert values_by_name(model, groups, "weight_decay") == {**plain, **changed}
    assert {*values_by_name(model, groups, "lr").values()} == {0.5}


def test_without_rules_the_groups_are_those_of_the_detectron2_function():
    model = Net()
    model.twin = nn.Linear(2, 2)
    model.twin.weight = model.head.weight
    model.conv.requires_grad_(False)
    rules = ParamRules(weight_decay_norm=0.5, weight_decay_bias=0.25, bias_lr_factor=2.0)
    expected = get_default_optimizer_params(model, 0.1, 1.0, 0.5, 2.0, 0.25)
    assert build_param_groups(model, 0.1, 1.0, rules) == expected
    assert build_param_groups(model, 0.1, 1.0, ParamRules()) != expected
    assert build_param_groups(model, 0.1, None, rules) == get_default_optimizer_params(
        model, 0.1, bias_lr_factor=2.0
    )


def test_factors_of_a_custom_key_multiply_the_other_ones_or_switch_them_off_and_its_options_reach_the_group():
    model = Net()
    keys = {
        "norm": {"lr_factor": 0.25, "decay_factor": 0.5, "lars_exclude": True},
        "head.w": {"taps": [1]},
    }
    rules = {"lr_factors": {"bias": 2.0}, "decay_factors": {"norm": 0.5}, "custom_keys": keys}
    assert named_groups(model, build_param_groups(model, 1.0, 1.0, ParamRules(**rules))) == [
        {"params": ["conv.weight"], "lr": 1.0, "weight_decay": 1.0},
        {"params": ["conv.bias", "head.bias"], "lr": 2.0, "weight_decay": 1.0},
        {
            "params": ["norm.weight", "norm.bias"],
            "lr": 0.25,
            "weight_decay": 0.25,
            "lars_exclude": True,
        },
        {"params": ["head.weight"], "lr": 1.0, "weight_decay": 1.0, "taps": [1]},
    ]
    rules |= {"weight_decay_norm": 0.0, "bias_lr_factor": 2.0, "lr_factor_func": lambda name: 0.125}
    as_in_openmmlab = ParamRules(**rules, custom_keys_only=True)
    assert named_groups(model, build_param_groups(model, 1.0, 1.0, as_in_openmmlab)) == [
        {"params": ["conv.weight"], "lr": 0.125, "weight_decay": 1.0},
        {"params": ["conv.bias", "head.bias"], "lr": 0.5, "weight_decay": 1.0},
        {
            "params": ["norm.weight", "norm.bias"],
            "lr": 0.25,
            "weight_decay": 0.5,
            "lars_exclude": True,
        },
        {"params": ["head.weight"], "lr": 1.0, "weight_decay": 1.0, "taps": [1]},
    ]


@pytest.mark.parametrize(
    ("key_match", "expected"),
    [
        ("longest", {"conv.weight": 0.1, "conv.bias": 0.3, "norm.weight": 0.4, "head.weight": 0.4}),
        (
            "shortest",
            {"conv.weight": 0.4, "conv.bias": 0.2, "norm.weight": 0.4, "head.weight": 0.4},
        ),
        ("exact", {"conv.bias": 0.3}),
    ],
)
def test_of_several_custom_keys_one_counts_and_the_alphabet_decides_among_equals(
    key_match, expected
):
    model = Net()
    factors = {"t": 0.4, "onv.": 0.2, "conv": 0.1, "conv.bias": 0.3}
    keys = {key: {"lr_factor": factor} for key, factor in factors.items()}
    groups = build_param_groups(model, 1.0, None, ParamRules(custom_keys=keys, key_match=key_match))
    plain = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    assert values_by_name(model, groups, "lr") == {**plain, **expected}


def test_custom_keys_that_count_for_nothing_draw_a_warning(caplog):
    model = Net()
    model.conv.requires_grad_(False)
    keys = {
        "conv": {},
        "hed": {"lr_factor": 2.0},
        "hea": {"lr_factor": 2.0},
        "head": {"lr_factor": 2.0},
    }
    build_param_groups(model, 1.0, None, ParamRules(custom_keys=keys))
    [text] = caplog.messages
    assert text.startswith("Custom keys")
    assert text.endswith(": hea, hed")


class Tied(nn.Module):
    """A language model whose head is declared first; it has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 3, bias=False)
        self.embedding = nn.Embedding(3, 2)
        self.head.weight = self.embedding.weight
        self.body = nn.Linear(2, 2)


def test_a_shared_parameter_is_of_the_kinds_of_all_its_owners(caplog):
    model = Tied()
    rules = ParamRules(lr_factors={"embedding": 2.0}, decay_factors={"embedding": 0.0})
    [shared, others] = named_groups(model, build_param_groups(model, 1.0, 0.5, rules))
    assert shared == {"params": ["head.weight"], "lr": 2.0, "weight_decay": 0.0}
    assert others == {"params": ["body.weight", "body.bias"], "lr": 1.0, "weight_decay": 0.5}
    assert caplog.messages == []
    # a whole module that two names share
    model.twin = nn.ModuleDict({"norm": nn.LayerNorm(2)})
    model.body.weight = nn.Parameter(torch.zeros(2))
    model.body.bias = model.twin["norm"].bias
    groups = build_param_groups(model, 1.0, 0.5, ParamRules(decay_factors={"norm": 0.0}))
    decays = values_by_name(model, groups, "weight_decay")
    assert decays["body.bias"] == decays["twin.norm.weight"] == 0.0
    assert rates(Tied(), {"EMBEDDING_DECAY_FACTOR": 0.0})["head.weight"] == (1.0, 0.0)


@pytest.mark.parametrize(
    ("factors", "decay", "message"),
    [
        ({"lr_factors": {"embedding": 2.0}}, 0.5, "embedding of lr_factors"),
        (
            {"lr_factors": {"bias": 2.0}, "decay_factors": {"embedding": 0.0, "bias": 0.0}},
            0.5,
            "embedding of decay_factors",
        ),
        # each flat parameter is a bias, or of a norm layer, whose factors count
        (
            {"decay_factors": {"norm": 0.0, "bias": 0.0, "flat": 0.0}},
            0.5,
            "flat of decay_factors",
        ),
        ({"decay_factors": {"norm": 0.0}}, None, "norm of decay_factors"),
    ],
    ids=str,
)
def test_a_factor_that_counts_for_no_parameter_draws_a_warning(factors, decay, message, caplog):
    build_param_groups(Net(), 1.0, decay, ParamRules(**factors))
    [text] = caplog.messages
    assert text.endswith(f": {message}")


def test_the_rules_for_biases_take_in_others_by_a_key_and_else_name_them(caplog):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(2, 1)

    groups = {"BIAS_DECAY_FACTOR": 0.0}
    assert rates(Model(), groups)["attention.in_proj_bias"] == (1.0, 1.0)
    assert "and not to 1 others: attention.in_proj_bias" in caplog.text
    caplog.clear()
    found = rates(Model(), groups, ALL_BIASES=True)
    assert found["attention.in_proj_bias"] == found["attention.out_proj.bias"] == (1.0, 0.0)
    assert caplog.messages == []


def test_wrong_rules_are_an_error():
    with pytest.raises(ValueError, match=r"\['nrom'\] are no kinds; accepted: norm, bias"):
        ParamRules(lr_factors={"nrom": 1.0})
    with pytest.raises(ValueError, match=r"norm in decay_factors must be a number in .*got -1.0"):
        ParamRules(decay_factors={"norm": -1.0})


def optimizer_of(model, groups=None, **solver):
    cfg = get_cfg()
    solver = {"BASE_LR": 1.0, "WEIGHT_DECAY": 1.0, "WEIGHT_DECAY_NORM": 1.0, **solver}
    cfg.merge_from_other_cfg({"SOLVER": {**solver, "PARAM_GROUPS": groups or {}}})
    check_values(cfg)
    return build_optimizer(cfg, model)


def rates(model, groups=None, **solver):
    """name -> (lr, weight decay)"""
    found = named_groups(model, optimizer_of(model, groups, **solver).param_groups)
    return {
        name: (group["lr"], group["weight_decay"]) for group in found for name in group["params"]
    }


def test_each_key_reaches_the_rates_and_multiplies_the_keys_that_detectron2_has():
    groups = {
        f"{kind}_DECAY_FACTOR": 0.5 for kind in ("NORM", "BIAS", "DWCONV", "EMBEDDING", "FLAT")
    }
    groups |= {"NORM_LR_FACTOR": 2.0, "BIAS_LR_FACTOR": 3.0, "DWCONV_LR_FACTOR": 4.0}
    groups |= {"EMBEDDING_LR_FACTOR": 5.0, "FLAT_LR_FACTOR": 6.0}
    solver = {"BIAS_LR_FACTOR": 10.0, "WEIGHT_DECAY_NORM": 0.5, "WEIGHT_DECAY_BIAS": 2.0}
    assert rates(EveryKind(), groups, **solver) == {
        "embedding.weight": (5.0, 0.5),
        "gain": (6.0, 0.5),
        "scale": (1.0, 1.0),
        "norm.weight": (2.0, 0.25),
        "norm.bias": (20.0, 1.0),
        **dict.fromkeys(["conv.weight", "dwconv.weight"], (4.0, 0.5)),
        **dict.fromkeys(["conv.bias", "dwconv.bias"], (30.0, 1.0)),
    }


@LAYER_DEPTH_REGISTRY.register()
def solver_test_net_depth(name):
    return int(name.startswith("head")), 2


OF_THE_HEAD = {"CUSTOM_KEYS": [{"KEY": "head", "LR_FACTOR": 0.5}], "BIAS_LR_FACTOR": 3.0}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (OF_THE_HEAD, [1.0, 3.0, 0.5, 1.5]),
        ({**OF_THE_HEAD, "CUSTOM_KEYS_ONLY": True}, [1.0, 3.0, 0.5, 0.5]),
        ({**OF_THE_HEAD, "KEY_MATCH": "exact"}, [1.0, 3.0, 1.0, 3.0]),
        (
            {"LAYER_DECAY": {"RATE": 0.5, "SCHEME": "solver_test_net_depth"}},
            [0.5, 0.5, 1.0, 1.0],
        ),
    ],
)
def test_custom_keys_and_layer_decay_reach_the_rates(groups, expected):
    found = rates(Net(), groups)
    names = ("conv.weight", "conv.bias", "head.weight", "head.bias")
    assert [found[name][0] for name in names] == expected


def test_custom_keys_give_the_options_of_lars():
    node = {"NAME": "LARS", "ETA": 0.002, "MOMENTUM": 0.9, "NESTEROV": True}
    keys = [{"KEY": "bias", "DECAY_FACTOR": 0.0, "LARS_EXCLUDE": True}]
    optimizer = optimizer_of(Net(), {"CUSTOM_KEYS": keys}, OPTIMIZER=node)
    assert type(optimizer) is LARS
    names = ("lr", "weight_decay", "eta", "momentum", "nesterov", "lars_exclude")
    assert [[group.get(name) for name in names] for group in optimizer.param_groups] == [
        [1.0, 1.0, 0.002, 0.9, True, False],
        [1.0, 0.0, 0.002, 0.9, True, True],
    ]


@PARAM_GROUP_REGISTRY.register()
def solver_test_groups(cfg, model):
    return [
        {"params": model.head.parameters(), "lr": cfg.SOLVER.BASE_LR * 10},
        {"params": [model.conv.weight]},
    ]


def test_a_users_function_makes_the_groups_as_it_likes():
    model = Net()
    groups = optimizer_of(model, {"BUILDER": "solver_test_groups"}).param_groups
    assert [group["params"] for group in groups] == [
        list(model.head.parameters()),
        [model.conv.weight],
    ]
    assert [group["lr"] for group in groups] == [10.0, 1.0]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"BUILDER": "solver_test_group"},
            r"SOLVER.PARAM_GROUP_BUILDER: no .* did you mean 'solver_test_groups'\?",
        ),
        ({"LAYER_DECAY": {"RATE": 1.5}}, "LAYER_DECAY.RATE: got 1.5"),
        (
            {"LAYER_DECAY": {"RATE": 0.5, "SCHEME": "swin", "DEPTHS": [2], "PREFIX": "net."}},
            "after the prefix 'net.'",
        ),
        ({"FLAT_DECAY_FACTOR": -1}, "FLAT_DECAY_FACTOR: got -1"),
        ({"CUSTOM_KEYS": ["norm"]}, "CUSTOM_KEYS: got .*accepted: nodes with a KEY"),
        (
            {"CUSTOM_KEYS": [{"KEY": "a", "LR_MULT": 2.0}]},
            r"SOLVER.PARAM_GROUPS: 'a' in .*got .'lr_mult'",
        ),
        (
            {"CUSTOM_KEYS": [{"KEY": "a", "LR_FACTOR": "big"}]},
            r"lr_factor in custom_keys\['a'\] must .*got 'big'",
        ),
        (
            {"KEY_MATCH": "best", "CUSTOM_KEYS": [{"KEY": "norm"}]},
            "PARAM_GROUPS: key_match must be .*got 'best'",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_an_error_that_names_its_key(groups, message):
    with pytest.raises(ConfigError, match=message):
        optimizer_of(Net(), groups)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2)
        )
        self.head = nn.Linear(2, 2)


def test_a_group_is_called_by_what_and_where_its_parameters_are():
    model = Layers()
    assert group_names(get_default_optimizer_params(model, 0.1, 0.1, 0.0), model) == [
        "weight+bias",
        "layers norm",
    ]
    by_layer = [{"params": [*layer.parameters()]} for layer in model.layers]
    alike = [{"params": [param]} for param in (model.head.weight, nn.Parameter(torch.zeros(1)))]
    own = [{"params": [model.head.bias], "name": "mine"}, {"params": [model.head.weight]}]
    assert group_names([*by_layer, *alike, *own], model) == [
        "layers.0 weight+bias+norm",
        "layers.1 weight+bias+norm",
        "head weight",
        "weight",
        "mine",
        "head weight 2",
    ]


def test_the_table_of_groups_shows_what_tells_them_apart():
    model = Layers()
    overrides = {"head.bias": {"lr": 0.05}}
    groups = get_default_optimizer_params(model, 0.5, 0.0001, overrides=overrides)
    table = describe_param_groups(torch.optim.SGD(groups, lr=0.5, momentum=0.9), model)
    assert [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if ":" not in line
    ] == [
        ["group", "lr", "decay", "parameters", "values"],
        ["weight+bias+norm", "0.5", "0.0001", "9", "24"],
        ["head bias", "0.05", "0.0001", "1", "2"],
    ]
