"""SOLVER.PARAM_GROUPS, from the config to the optimizer."""

import pytest
from torch import nn

from trainkit.config import ConfigError, check_values, get_cfg
from trainkit.solver import LARS, LAYER_DEPTH_REGISTRY, PARAM_GROUP_REGISTRY, build_optimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 2, 1, groups=2)
        self.norm = nn.BatchNorm2d(2)
        self.words = nn.Embedding(2, 2)
        self.head = nn.Linear(2, 2)


def make_cfg(groups=None, **solver):
    cfg = get_cfg()
    solver = {"BASE_LR": 1.0, "WEIGHT_DECAY": 1.0, "WEIGHT_DECAY_NORM": 1.0, **solver}
    cfg.merge_from_other_cfg({"SOLVER": {**solver, "PARAM_GROUPS": groups or {}}})
    check_values(cfg)
    return cfg


def rates(cfg, model):
    """name -> (lr, weight decay)"""
    names = {param: name for name, param in model.named_parameters()}
    groups = build_optimizer(cfg, model).param_groups
    return {names[param]: (group["lr"], group["weight_decay"]) for group in groups for param in group["params"]}


PLAIN = dict.fromkeys(
    ["stem.weight", "stem.bias", "norm.weight", "norm.bias", "words.weight", "head.weight", "head.bias"], (1.0, 1.0)
)


@pytest.mark.parametrize(
    ("groups", "changed"),
    [
        ({}, {}),
        ({"NORM_LR_FACTOR": 0.5}, {"norm.weight": (0.5, 1.0), "norm.bias": (0.5, 1.0)}),
        ({"NORM_DECAY_FACTOR": 0}, {"norm.weight": (1.0, 0.0), "norm.bias": (1.0, 0.0)}),
        ({"DWCONV_LR_FACTOR": 0.5}, dict.fromkeys(["stem.weight", "stem.bias"], (0.5, 1.0))),
        ({"EMBEDDING_DECAY_FACTOR": 0.0}, {"words.weight": (1.0, 0.0)}),
        ({"FLAT_LR_FACTOR": 0.5, "NORM_LR_FACTOR": 1.0}, dict.fromkeys(["stem.bias", "head.bias"], (0.5, 1.0))),
        (
            {"CUSTOM_KEYS": [{"KEY": "head", "LR_FACTOR": 0.5}], "BIAS_LR_FACTOR": 3.0, "BIAS_DECAY_FACTOR": 0.5},
            {
                "stem.bias": (3.0, 0.5),
                "norm.bias": (1.0, 0.5),
                "head.weight": (0.5, 1.0),
                "head.bias": (1.5, 0.5),
            },
        ),
        (
            {"CUSTOM_KEYS": [{"KEY": "head", "LR_FACTOR": 0.5}], "CUSTOM_KEYS_ONLY": True, "BIAS_LR_FACTOR": 3.0},
            {"stem.bias": (3.0, 1.0), "head.weight": (0.5, 1.0), "head.bias": (0.5, 1.0)},
        ),
        (
            {"CUSTOM_KEYS": [{"KEY": key, "LR_FACTOR": 0.5} for key in ("head", "head.b")], "KEY_MATCH": "exact"},
            {},
        ),
        (
            {"LAYER_DECAY": {"RATE": 0.5, "SCHEME": "solver_test_net_depth"}},
            {**dict.fromkeys(PLAIN, (0.5, 1.0)), "head.weight": (1.0, 1.0), "head.bias": (1.0, 1.0)},
        ),
    ],
    ids=str,
)
def test_each_setting_reaches_the_rates(groups, changed):
    assert rates(make_cfg(groups), Net()) == {**PLAIN, **changed}


@LAYER_DEPTH_REGISTRY.register()
def solver_test_net_depth(name):
    return int(name.startswith("head")), 2


def test_factors_multiply_the_keys_that_detectron2_has():
    cfg = make_cfg(
        {"BIAS_LR_FACTOR": 3.0, "NORM_DECAY_FACTOR": 0.5, "BIAS_DECAY_FACTOR": 0.25},
        BIAS_LR_FACTOR=2.0,
        WEIGHT_DECAY_NORM=0.5,
        WEIGHT_DECAY_BIAS=2.0,
    )
    assert rates(cfg, Net()) == {
        **PLAIN,
        "stem.bias": (6.0, 0.5),
        "norm.weight": (1.0, 0.25),
        "norm.bias": (2.0, 1.0),
        "head.bias": (6.0, 0.5),
    }


def test_layer_decay_by_a_named_scheme_takes_its_numbers_from_the_config():
    model = nn.Module()
    model.encoder = nn.Module()
    model.encoder.patch_embed = nn.Linear(1, 1, bias=False)
    model.encoder.blocks = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    decay = {"RATE": 0.5, "SCHEME": "vit", "NUM_LAYERS": 2, "PREFIX": "encoder."}
    lrs = [lr for lr, _ in rates(make_cfg({"LAYER_DECAY": decay}), model).values()]
    assert lrs == [0.125, 0.25, 0.5]
    assert [lr for lr, _ in rates(make_cfg({"LAYER_DECAY": {**decay, "RATE": 1.0}}), model).values()] == [1.0] * 3


@PARAM_GROUP_REGISTRY.register()
def solver_test_groups(cfg, model):
    return [
        {"params": model.head.parameters(), "lr": cfg.SOLVER.BASE_LR * 10},
        {"params": [model.stem.weight], "tag": "stem"},
    ]


def test_custom_keys_give_the_options_of_lars():
    node = {"NAME": "LARS", "ETA": 0.002, "MOMENTUM": 0.9, "NESTEROV": True}
    cfg = make_cfg({"CUSTOM_KEYS": [{"KEY": "bias", "DECAY_FACTOR": 0.0, "LARS_EXCLUDE": True}]}, OPTIMIZER=node)
    optimizer = build_optimizer(cfg, Net())
    assert type(optimizer) is LARS
    keys = ("lr", "weight_decay", "eta", "momentum", "nesterov", "lars_exclude")
    assert [[group.get(key) for key in keys] for group in optimizer.param_groups] == [
        [1.0, 1.0, 0.002, 0.9, True, False],
        [1.0, 0.0, 0.002, 0.9, True, True],
    ]


def test_a_users_function_makes_the_groups_as_it_likes():
    model = Net()
    groups = build_optimizer(make_cfg({"BUILDER": "solver_test_groups"}), model).param_groups
    assert [group["params"] for group in groups] == [list(model.head.parameters()), [model.stem.weight]]
    assert [(group["lr"], group.get("tag")) for group in groups] == [(10.0, None), (1.0, "stem")]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"BUILDER": "solver_test_group"}, r"SOLVER.PARAM_GROUP_BUILDER: no .* did you mean 'solver_test_groups'\?"),
        ({"LAYER_DECAY": {"RATE": 0.5, "SCHEME": "vitt"}}, "PARAM_GROUPS: unknown scheme 'vitt'; accepted: vit"),
        ({"LAYER_DECAY": {"RATE": 0.5, "SCHEME": "vit"}}, r"PARAM_GROUPS: scheme 'vit' needs num_layers"),
        ({"LAYER_DECAY": {"RATE": 1.5}}, "LAYER_DECAY.RATE: got 1.5"),
        ({"FLAT_DECAY_FACTOR": -1}, "FLAT_DECAY_FACTOR: got -1"),
        ({"BIAS_LR_FACTOR": "2"}, "BIAS_LR_FACTOR: got '2'"),
        ({"CUSTOM_KEYS": ["norm"]}, "CUSTOM_KEYS: got .*accepted: nodes with a KEY"),
        ({"CUSTOM_KEYS": [{"KEY": "a"}, {"KEY": "a"}]}, "CUSTOM_KEYS: got"),
        ({"CUSTOM_KEYS": [{"KEY": "a", "LR_MULT": 2.0}]}, r"SOLVER.PARAM_GROUPS: 'a' in .*got .'lr_mult'"),
        ({"KEY_MATCH": "best"}, "PARAM_GROUPS: key_match must be .*got 'best'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_an_error_that_names_its_key(groups, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(make_cfg(groups), Net())
