"""Values that no run can use are found before anything is built."""

import pytest

from trainkit.config import CfgNode, ConfigError, check_values, get_cfg
from trainkit.config.checks import similar_keys
from trainkit.config.config import changed_settings
from trainkit.config.defaults import RANGES

NAN, INF = float("nan"), float("inf")


def test_the_defaults_are_in_order():
    check_values(get_cfg())


def test_every_whole_number_has_a_range():
    keys = {key for key, value in changed_settings(get_cfg(), CfgNode()) if type(value) is int}
    assert keys - {key for names in RANGES.values() for key in names.split()} <= {"VERSION", "VIS_PERIOD", "FORK.ITER"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["SOLVER.REFERENCE_BATCH_SIZE", 256], ["SOLVER.REFERENCE_WORLD_SIZE", 8]),
        (["DETERMINISTIC", True], ["CUDNN_BENCHMARK", True]),
    ],
)
def test_settings_that_contradict_each_other_are_an_error(one, other):
    cfg = get_cfg()
    cfg.merge_from_list([*one, *other])
    with pytest.raises(ConfigError, match=rf"{one[0]} and {other[0]} exclude each other"):
        check_values(cfg)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("LOG.PERIOD", 0, "a whole number in [1, inf)"),
        ("TEST.EVAL_PERIOD", -5, "a whole number in [0, inf)"),
        ("SOLVER.MAX_ITER", 0, "a whole number in [1, 9223372036854775808)"),
        ("SOLVER.MAX_ITER", 2**63, "a whole number in [1, 9223372036854775808)"),
        ("SOLVER.WARMUP_ITERS", 40001, "at most SOLVER.MAX_ITER, 40000"),
        ("SOLVER.STEPS", (5, -1), "a whole number in [0, inf)"),
        ("SEED", 1.0, "a whole number in [-1, 4294967296)"),
        ("SOLVER.STEPS", (5, 1.5), "a whole number in [0, inf)"),
        ("SOLVER.BASE_LR", None, "a number in [0, inf)"),
        ("SEED", -2, "a whole number in [-1, 4294967296)"),
        ("SEED", 2**32, "a whole number in [-1, 4294967296)"),
        ("DATALOADER.PREFETCH_FACTOR", 0, "a whole number in [1, inf)"),
        ("DATALOADER.TIMEOUT", NAN, "a number in [0, inf)"),
        ("DATALOADER.RANDOM_SUBSET_RATIO", 0.0, "a number in (0, 1]"),
        ("SOLVER.BASE_LR", NAN, "a number in [0, inf)"),
        ("SOLVER.BASE_LR", INF, "a number in [0, inf)"),
        ("SOLVER.WEIGHT_DECAY", NAN, "a number in [0, inf)"),
        ("SOLVER.WEIGHT_DECAY_BIAS", "fast", "a number in [0, inf)"),
        ("SOLVER.WARMUP_FACTOR", -0.1, "a number in [0, inf)"),
        ("SOLVER.GAMMA", NAN, "a number in [0, inf)"),
        ("SOLVER.MOMENTUM", 5.0, "a number in [0, 1]"),
        ("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 0.0, "a number in (0, inf]"),
        ("SOLVER.AMP.INIT_SCALE", -1.0, "a number in (0, inf)"),
        ("SOLVER.AMP.LOSS_SCALE", "static", '"dynamic", or a number in (0, inf)'),
        ("SOLVER.AMP.LOSS_SCALE", 0, '"dynamic", or a number in (0, inf)'),
        ("SOLVER.AMP.LOSS_SCALE", True, '"dynamic", or a number in (0, inf)'),
        ("CHECKPOINT.MAX_TO_KEEP", 0, "a number in [1, inf)"),
        ("CHECKPOINT.MAX_TO_KEEP", True, "a number in [1, inf)"),
        ("EARLY_STOPPING.THRESHOLD", "5%", "a number in (-inf, inf)"),
        ("CHECKPOINT.PUBLISH", "all", "'', 'model', 'ema'"),
        ("LOG.WRITERS", ["json", "json"], "each name once"),
        ("OUTPUT_DIR", " ", 'a folder, or an address such as "s3://bucket/run"'),
        ("OUTPUT_DIR", "a\0b", 'a folder, or an address such as "s3://bucket/run"'),
        ("OUTPUT_DIR", "s3:/x", 'a folder, or an address such as "s3://bucket/run"'),
        ("VERSION", 3, "1, 2"),
        ("DATALOADER.SKIP", [[5, 3]], "a list of [start, end], whole numbers from 0 on, which grow"),
        ("DATALOADER.SKIP", [3], "a list of [start, end], whole numbers from 0 on, which grow"),
    ],
)
def test_a_value_that_no_run_can_use_is_named_with_what_is_accepted(key, value, accepted):
    cfg = get_cfg()
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError) as error:
        check_values(cfg)
    assert str(error.value) == f"{key}: got {value!r} ({type(value).__name__}); accepted: {accepted}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.MAX_ITER", 2**63 - 1),
        ("SOLVER.MAX_ITER", "3ep"),
        ("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", INF),
        ("SOLVER.MOMENTUM", 1.0),
        ("SOLVER.WEIGHT_DECAY_BIAS", None),
        ("DATALOADER.SKIP", [[0, 3], [5, 8]]),
    ],
)
def test_a_value_at_the_end_of_its_range_is_in_order(key, value):
    cfg = get_cfg()
    cfg.merge_from_list([key, value])
    check_values(cfg)


@pytest.mark.parametrize(("key", "value"), [("LOG.PERIOD", "often"), ("OUTPUT_DIR", 3)])
def test_a_value_that_was_set_by_hand_is_checked(key, value):
    cfg = get_cfg()
    *parents, name = key.split(".")
    setattr(cfg[parents[0]] if parents else cfg, name, value)
    with pytest.raises(ConfigError, match=rf"{key}: got {value!r}"):
        check_values(cfg)


@pytest.mark.parametrize("entry", [["a", "b", 1.0], "a"])
def test_an_expected_result_has_four_parts(entry):
    cfg = get_cfg()
    cfg.TEST.EXPECTED_RESULTS = [entry]
    with pytest.raises(ConfigError, match=r"TEST.EXPECTED_RESULTS: got .*; accepted: entries \[task, metric, "):
        check_values(cfg)


@pytest.mark.parametrize(
    "options",
    [
        ["CHECKPOINT.BEST_METRIC", "a/b", "CHECKPOINT.PUBLISH", "ema", "CHECKPOINT.SAVE_LAST", False],
        ["CHECKPOINT.BEST_METRIC", ["a/b", "c"], "CHECKPOINT.MAX_TO_KEEP", 1, "CHECKPOINT.START", "1ep"],
        ["CHECKPOINT.BEST_METRIC", "", "CHECKPOINT.PUBLISH", "model"],
        ["TEST.EXPECTED_RESULTS", [["a", "b", 1.0, 0.1]]],
        ["EARLY_STOPPING.METRIC", "a/b", "TEST.EVAL_PERIOD", "1ep", "EARLY_STOPPING.THRESHOLD", 99.5],
    ],
)
def test_options_that_go_together_are_in_order(options):
    cfg = get_cfg()
    cfg.merge_from_list(options)
    check_values(cfg)


@pytest.mark.parametrize("scale", ["dynamic", 512, 512.0, "512"])
def test_a_loss_scale_is_dynamic_or_a_number(scale, tmp_path):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.AMP.LOSS_SCALE", scale])
    check_values(cfg)
    (tmp_path / "saved.yaml").write_text(cfg.dump())
    again = get_cfg()
    again.merge_from_file(tmp_path / "saved.yaml")
    expected = "dynamic" if scale == "dynamic" else 512
    assert expected == again.SOLVER.AMP.LOSS_SCALE


@pytest.mark.parametrize(
    ("keys", "pairs"),
    [
        (["MODEL.NAM", "MODEL.weights"], [("MODEL.NAM", "MODEL.NAME"), ("MODEL.weights", "MODEL.WEIGHTS")]),
        (["INPUT.TRAIN_TRANFORM"], [("INPUT.TRAIN_TRANFORM", "INPUT.TRAIN_TRANSFORM")]),
        (["INPUT.MIN_SIZE_TRAIN", "INPUT.MAX_SIZE_TRAIN", "MODEL.KERNEL_H", "MODEL.KERNEL_W", "MODEL.GAME"], []),
    ],
)
def test_a_new_key_that_looks_like_another_one_is_found(keys, pairs):
    cfg = get_cfg()
    cfg.merge_from_list([text for key in keys for text in (key, "x")])
    assert [*similar_keys(cfg, get_cfg())] == pairs
