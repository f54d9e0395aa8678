"""CfgNode: what may be merged, and what errors say."""

import copy
import pickle

import pytest

from trainkit.config import CfgNode, ConfigError, get_cfg


def leaves(cfg, prefix=""):
    for name, value in cfg.items():
        if isinstance(value, CfgNode):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("SOLVER.BASE_LR", "1e-3", 0.001),
        ("SOLVER.CLIP_GRADIENTS.NORM_TYPE", "inf", float("inf")),
        ("SOLVER.MAX_ITER", "3ep", "3ep"),
        ("SOLVER.STEPS", ["0.5ep", 9], ("0.5ep", 9)),
        ("TEST.EVALUATORS", "('a',)", ["a"]),
        ("DATASETS.TRAIN", "[a, b]", ("a", "b")),
        (
            "HOOKS",
            "[{NAME: EMAHook, DECAY: 1e-3, A: True}]",
            [{"NAME": "EMAHook", "DECAY": 0.001, "A": True}],
        ),
        ("TEST.EXPECTED_RESULTS", (("t", "m", 1.0, 0.1),), [["t", "m", 1.0, 0.1]]),
        ("SOLVER.AMP.ENABLED", "true", True),
        ("OUTPUT_DIR", "2024", "2024"),
        ("OUTPUT_DIR", "'a b'", "a b"),
        ("MAX_TIME", "3600", "3600"),
        ("LOG.ASYNC", "null", None),
        ("CHECKPOINT.DIR", "None", None),
        ("CHECKPOINT.DIR", "null", None),
        ("CHECKPOINT.DIR", "", ""),
        ("CHECKPOINT.DIR", "'None'", "None"),
        ("MODEL.WEIGHTS", "None", None),
        ("CHECKPOINT.MAX_TO_KEEP", "3", 3),
        ("MODEL.BACKBONE.NAME", "resnet", "resnet"),
        ("SOLVER.OPTIMIZER.EPS", "1e-8", 1e-8),
    ],
)
def test_a_value_is_taken_as_the_type_of_its_key(key, value, expected):
    cfg = get_cfg()
    cfg.merge_from_list([key, value])
    merged = dict(leaves(cfg))[key]
    assert merged == expected
    assert type(merged) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "type_name", "accepted"),
    [
        ("SEED", True, "bool", "a number"),
        ("DATASETS.TRAIN", None, "NoneType", "a list or a tuple"),
        ("SOLVER.AMP.ENABLED", 1, "int", "True or False"),
        ("OUTPUT_DIR", 3, "int", "text"),
        ("SOLVER.MAX_ITER", "-3ep", "str", "epochs"),
        ("SOLVER.AMP", True, "bool", "a node"),
    ],
)
def test_a_wrong_type_names_key_value_type_and_what_is_accepted(key, value, type_name, accepted):
    with pytest.raises(ConfigError) as error:
        get_cfg().merge_from_list([key, value])
    message = str(error.value)
    assert message.startswith(f"{key}: ")
    assert f"{value!r} ({type_name})" in message
    assert accepted in message.split("accepted: ")[1]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("SOLVR.BASE_LR", "'SOLVER.BASE_LR'?"),
        ("solver.base_lr", "'SOLVER.BASE_LR'?"),
        ("TEST.PATIENCE", "'EARLY_STOPPING.PATIENCE'?"),
        ("QQQ", "no key has a similar name"),
    ],
)
def test_an_unknown_key_names_its_nearest_neighbour(key, hint):
    with pytest.raises(KeyError) as error:
        get_cfg().merge_from_list([key, "1"])
    assert isinstance(error.value, ConfigError)
    assert str(error.value).startswith(f"unknown key {key}; ")
    assert hint in str(error.value)
    with pytest.raises(
        ConfigError, match=r"options: got \['SEED=1'\] \(list\); accepted: KEY VALUE KEY VALUE"
    ):
        get_cfg().merge_from_list(["SEED=1"])


def test_none_takes_anything_and_two_keys_take_several_types():
    cfg = get_cfg()
    for value in ("a", ["a", "b"], None, "c"):
        cfg.merge_from_list(["CHECKPOINT.BEST_METRIC", value])
        assert value == cfg.CHECKPOINT.BEST_METRIC
    cfg.SOLVER.MAX_ITER = "3ep"
    cfg.merge_from_list(
        ["SOLVER.MAX_ITER", "20", "LOG.ASYNC", "True", "SOLVER.WEIGHT_DECAY_BIAS", 0]
    )
    assert cfg.SOLVER.MAX_ITER == 20
    cfg.merge_from_list(["LOG.ASYNC", "None", "SOLVER.WEIGHT_DECAY_BIAS", 0.1])
    assert cfg.LOG.ASYNC is None
    assert cfg.SOLVER.WEIGHT_DECAY_BIAS == 0.1


def test_a_key_that_a_merge_made_takes_another_type_later_and_a_declared_one_does_not():
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.WIDTH", "1", "MODEL.HEAD.DEPTH", "2"])
    cfg.merge_from_list(["MODEL.WIDTH", "0.5", "MODEL.HEAD.BIAS", "True"])
    assert cfg.MODEL.WIDTH == 0.5
    assert cfg.MODEL.HEAD == {"DEPTH": 2, "BIAS": True}
    cfg.MODEL.NECK = CfgNode({"DEPTH": 2})
    with pytest.raises(ConfigError, match=r"MODEL.NECK.DEPTH: got 'a' \(str\)"):
        cfg.merge_from_list(["MODEL.NECK.DEPTH", "a"])
    with pytest.raises(
        ConfigError, match=r"unknown key MODEL.NECK.DEPHT; did you mean .MODEL.NECK.DEPTH"
    ):
        cfg.merge_from_list(["MODEL.NECK.DEPHT", "3"])


def test_a_merge_shares_nothing_with_what_was_merged():
    source = {"MODEL": {"WIDTHS": [1, 2], "HEAD": {"DEPTH": 1}}, "HOOKS": [{"NAME": "a"}]}
    before = copy.deepcopy(source)
    cfg = get_cfg()
    cfg.merge_from_other_cfg(source)
    cfg.MODEL.WIDTHS.append(3)
    cfg.MODEL.HEAD.DEPTH = 2
    cfg.HOOKS[0]["NAME"] = "b"
    assert source == before


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda cfg: pickle.loads(pickle.dumps(cfg)), CfgNode.clone]
)
def test_a_copy_is_equal_and_keeps_its_rules(duplicate):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.WIDTH", "8", "LOG.ASYNC", "True"])
    cfg.freeze()
    other = duplicate(cfg)
    assert type(other) is CfgNode
    assert other == cfg
    with pytest.raises(ConfigError, match="frozen"):
        other.merge_from_list(["SEED", "1"])
    other.defrost()
    other.merge_from_list(["MODEL.WIDTH", "0.5", "LOG.ASYNC", "None"])
    with pytest.raises(ConfigError):
        other.merge_from_list(["SEED", "a"])


def test_a_deprecated_key_is_skipped_and_a_renamed_one_names_the_new_one(caplog):
    cfg = get_cfg()
    cfg.register_renamed_key("B", "A")
    cfg.register_deprecated_key("LOG.EVAL_AXIS")
    cfg.merge_from_list(["LOG.EVAL_AXIS", "iter"])
    assert "LOG.EVAL_AXIS" in caplog.text
    assert "EVAL_AXIS" not in cfg.LOG
    with pytest.raises(KeyError, match="A"):
        cfg.merge_from_list(["B", "1"])


def test_a_config_survives_a_dump_and_a_load(tmp_path):
    cfg = get_cfg()
    cfg.merge_from_list(
        ["MODEL.A", (1, (2, 3)), "MODEL.B.C", 1e-8, "MODEL.D", "1e-3x", "MODEL.E", "'1e-3'"]
    )
    cfg.merge_from_list(
        [
            "MODEL.F",
            None,
            "MODEL.G",
            "'null'",
            "MODEL.J",
            "'None'",
            "MODEL.H",
            [{"NAME": "x", "N": 1e5}],
        ]
    )
    cfg.merge_from_list(
        ["SOLVER.CLIP_GRADIENTS.NORM_TYPE", "inf", "OUTPUT_DIR", "1e5", "MODEL.I", "ü: #"]
    )
    cfg.merge_from_list(["SOLVER.STEPS", "('1ep',)", "LOG.ASYNC", "true"])
    path = tmp_path / "config.yaml"
    path.write_text(cfg.dump(), encoding="utf-8")
    again = get_cfg()
    again.merge_from_file(path)
    assert again == cfg
    assert [(key, type(value)) for key, value in sorted(leaves(again))] == [
        (key, type(value)) for key, value in sorted(leaves(cfg))
    ]


def by_file(cfg, tmp_path, value):
    (tmp_path / "base.yaml").write_text(f"SOLVER: {{WARMUP_ITERS: {value}}}")
    (tmp_path / "top.yaml").write_text("_BASE_: base.yaml\nSOLVER: {BASE_LR: 0.1}")
    cfg.merge_from_file(tmp_path / "top.yaml")


WAYS = {
    "command line": lambda cfg, _, value: cfg.merge_from_list(["SOLVER.WARMUP_ITERS", str(value)]),
    "dict": lambda cfg, _, value: cfg.merge_from_other_cfg({"SOLVER": {"WARMUP_ITERS": value}}),
    "attribute": lambda cfg, _, value: setattr(cfg.SOLVER, "WARMUP_ITERS", value),
    "node": lambda cfg, _, value: cfg.merge_from_other_cfg(
        CfgNode({"SOLVER": {"WARMUP_ITERS": value}})
    ),
    "inherited file": by_file,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_key_that_was_set_to_its_default_is_set(tmp_path, way):
    cfg = get_cfg()
    assert not cfg.SOLVER.is_set("WARMUP_ITERS")
    WAYS[way](cfg, tmp_path, 1000)
    assert cfg.SOLVER.is_set("WARMUP_ITERS")
    assert not cfg.SOLVER.is_set("WARMUP_FACTOR")
    assert not cfg.SOLVER.is_set("NO_SUCH_KEY")
    assert not get_cfg().SOLVER.is_set("WARMUP_ITERS")


def test_a_merge_of_a_whole_config_takes_over_what_is_set_in_it():
    cfg, other = get_cfg(), get_cfg()
    cfg.SOLVER.WARMUP_ITERS = 7
    cfg.SOLVER.MOMENTUM = 0.9
    other.SOLVER.MOMENTUM = 0.9
    cfg.merge_from_other_cfg(other)
    assert cfg.SOLVER.WARMUP_ITERS == 1000
    assert not cfg.SOLVER.is_set("WARMUP_ITERS")
    assert cfg.SOLVER.is_set("MOMENTUM")


def test_an_item_does_not_count_as_set_nor_does_the_default_of_a_project():
    cfg = get_cfg()
    cfg.SOLVER["WARMUP_ITERS"] = 1000
    assert not cfg.SOLVER.is_set("WARMUP_ITERS")
    assert cfg.TEST.PRECISE_BN.NUM_ITER == 200
    assert not cfg.TEST.PRECISE_BN.is_set("NUM_ITER")
    cfg.merge_from_list(["TEST.PRECISE_BN.NUM_ITER", "200"])
    assert cfg.TEST.PRECISE_BN.is_set("NUM_ITER")


def test_values_of_a_node_made_by_hand_are_set():
    node = CfgNode({"WARMUP_ITERS": 1000, "AMP": {"ENABLED": False}})
    assert node.is_set("WARMUP_ITERS")
    assert node.AMP.is_set("ENABLED")
    cfg = get_cfg()
    cfg.SOLVER = node
    assert cfg.SOLVER.is_set("WARMUP_ITERS")


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda cfg: pickle.loads(pickle.dumps(cfg)), CfgNode.clone]
)
def test_a_copy_knows_what_is_set_and_shares_nothing(duplicate):
    cfg = get_cfg()
    cfg.SOLVER.WARMUP_ITERS = 1000
    other = duplicate(cfg)
    assert other.SOLVER.is_set("WARMUP_ITERS")
    assert not other.SOLVER.is_set("STEPS")
    other.SOLVER.STEPS = (30000,)
    assert not cfg.SOLVER.is_set("STEPS")


def test_a_dump_has_a_key_that_is_meant_only_if_set_as_a_comment(tmp_path):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.WARMUP_ITERS", "1000"])
    (tmp_path / "config.yaml").write_text(cfg.dump())
    again = get_cfg()
    again.merge_from_file(tmp_path / "config.yaml")
    assert again == cfg
    keys = ["WARMUP_ITERS", "STEPS", "MOMENTUM", "WEIGHT_DECAY"]
    assert [again.SOLVER.is_set(key) for key in keys] == [True, False, False, False]
    assert "\n# not set: SOLVER.MOMENTUM 0.9\n" in cfg.dump()
    assert again.dump() == cfg.dump()
