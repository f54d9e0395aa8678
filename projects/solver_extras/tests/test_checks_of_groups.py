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
    ("groups", "key"),
    [
        ({"FLAT_DECAY_FACTOR": -1}, "FLAT_DECAY_FACTOR: got -1"),
        ({"BIAS_LR_FACTOR": "2"}, "BIAS_LR_FACTOR: got '2'"),
        ({"BIAS_LR_FACTOR": True}, "BIAS_LR_FACTOR: got True"),
        ({"CUSTOM_KEYS": ["norm"]}, "CUSTOM_KEYS"),
        ({"CUSTOM_KEYS": [{"LR_FACTOR": 1.0}]}, "CUSTOM_KEYS"),
        ({"CUSTOM_KEYS": [{"KEY": "a"}, {"KEY": "a"}]}, "CUSTOM_KEYS"),
        ({"CUSTOM_KEYS": [{"KEY": ""}]}, "CUSTOM_KEYS"),
        ({"CUSTOM_KEYS": [{"KEY": "a", "LR_FACTOR": "x"}]}, "CUSTOM_KEYS, a, LR_FACTOR: got 'x'"),
        ({"KEY_MATCH": "best"}, "KEY_MATCH: got 'best'"),
        ({"LAYER_DECAY": {"RATE": 0.0}}, "LAYER_DECAY.RATE: got 0.0"),
        ({"LAYER_DECAY": {"RATE": 1.5}}, "LAYER_DECAY.RATE: got 1.5"),
        ({"LAYER_DECAY": {"RATE": 0.5}}, "LAYER_DECAY.SCHEME: got ''"),
        ({"LAYER_DECAY": {"NUM_LAYERS": -1}}, "LAYER_DECAY.NUM_LAYERS: got -1"),
        ({"BUILDER": "mine", "BIAS_LR_FACTOR": 2.0}, "BUILDER: got 'mine'"),
        ({"BUILDER": "mine", "CUSTOM_KEYS": [{"KEY": "a"}]}, "BUILDER: got 'mine'"),
        ({"BUILDER": "mine", "LAYER_DECAY": {"RATE": 0.5, "SCHEME": "vit"}}, "BUILDER: got 'mine'"),
        ({"NORM_DECAY_FACTOR": 1.0}, "NORM_DECAY_FACTOR: got 1.0"),
    ],
    ids=str,
)
def test_what_no_run_can_use_is_named(groups, key):
    with pytest.raises(ConfigError, match=f"SOLVER.PARAM_GROUPS.{key}.*accepted: "):
        check(groups)
