"""Settings of parameter groups that no run can use are found before anything is built."""

import pytest

from trainkit.config import ConfigError, check_values, get_cfg


def check(groups, **solver):
    cfg = get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": {**solver, "PARAM_GROUPS": groups}})
    check_values(cfg)


@pytest.mark.parametrize(
    "groups",
    [
        {"BUILDER": "mine"},
        {"BIAS_LR_FACTOR": 2, "NORM_DECAY_FACTOR": 0.0, "CUSTOM_KEYS": [{"KEY": "a", "LR_FACTOR": 0.5, "TAG": "x"}]},
        {"LAYER_DECAY": {"RATE": 0.5, "SCHEME": "vit", "NUM_LAYERS": 12}},
        {"LAYER_DECAY": {"SCHEME": "vit"}},
    ],
    ids=str,
)
def test_settings_that_fit_together_pass(groups):
    check(groups)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"FLAT_DECAY_FACTOR": -1}, "SOLVER.PARAM_GROUPS.FLAT_DECAY_FACTOR is -1; accepted: a number of at least 0"),
        ({"BIAS_LR_FACTOR": "2"}, "BIAS_LR_FACTOR is '2'"),
        ({"BIAS_LR_FACTOR": True}, "BIAS_LR_FACTOR is True"),
        ({"CUSTOM_KEYS": ["norm"]}, "SOLVER.PARAM_GROUPS.CUSTOM_KEYS has the entry 'norm'; each one is a node with a"),
        ({"CUSTOM_KEYS": [{"LR_FACTOR": 1.0}]}, "each one is a node with a KEY that no other has"),
        ({"CUSTOM_KEYS": [{"KEY": "a"}, {"KEY": "a"}]}, "a KEY that no other has"),
        ({"CUSTOM_KEYS": [{"KEY": ""}]}, "has the entry {'KEY': ''}"),
        ({"CUSTOM_KEYS": [{"KEY": "a", "LR_FACTOR": "x"}]}, "CUSTOM_KEYS, a, LR_FACTOR is 'x'; accepted: a number"),
        ({"KEY_MATCH": "best"}, "KEY_MATCH: got 'best' .*; accepted: 'longest', 'shortest', 'exact'"),
        ({"LAYER_DECAY": {"RATE": 0.0}}, "LAYER_DECAY.RATE is 0.0; it must be above 0"),
        ({"LAYER_DECAY": {"RATE": 1.5}}, "LAYER_DECAY.RATE is 1.5"),
        ({"LAYER_DECAY": {"RATE": 0.5}}, "LAYER_DECAY.RATE is 0.5, but SCHEME is empty; set it"),
        (
            {"LAYER_DECAY": {"NUM_LAYERS": -1}},
            r"LAYER_DECAY.NUM_LAYERS: got -1 .*; accepted: a whole number",
        ),
        (
            {"BUILDER": "mine", "BIAS_LR_FACTOR": 2.0},
            "BUILDER 'mine' makes all groups; leave it out, or SOLVER.PARAM_GROUPS.BIAS_LR_FACTOR$",
        ),
        (
            {"BUILDER": "mine", "CUSTOM_KEYS": [{"KEY": "a"}]},
            "leave it out, or SOLVER.PARAM_GROUPS.CUSTOM_KEYS$",
        ),
        (
            {"BUILDER": "mine", "LAYER_DECAY": {"RATE": 0.5, "SCHEME": "vit"}},
            "leave it out, or SOLVER.PARAM_GROUPS.LAYER_DECAY.RATE$",
        ),
        (
            {"NORM_DECAY_FACTOR": 1.0},
            "NORM_DECAY_FACTOR is 1.0, but it multiplies SOLVER.WEIGHT_DECAY_NORM, which is 0; set that to 0.0001",
        ),
    ],
    ids=str,
)
def test_what_no_run_can_use_is_named_with_the_remedy(groups, message):
    with pytest.raises(ConfigError, match=message):
        check(groups)
