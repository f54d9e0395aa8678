"""Values that no run can use are found before anything is built."""

import pytest

from trainkit.config import CfgNode, ConfigError, check_values, get_cfg
from trainkit.config.config import changed_settings
from trainkit.config.defaults import ACCEPTED

NAN, INF = float("nan"), float("inf")


def test_the_defaults_are_in_order_and_every_whole_number_has_a_range():
    check_values(get_cfg())
    keys = {key for key, value in changed_settings(get_cfg(), CfgNode()) if type(value) is int}
    assert keys - {key for names in ACCEPTED.values() for key in names.split()} <= {"VIS_PERIOD", "FORK.ITER"}


def test_settings_that_contradict_each_other_are_an_error():
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.REFERENCE_BATCH_SIZE", 256, "SOLVER.REFERENCE_WORLD_SIZE", 8])
    with pytest.raises(ConfigError, match="SOLVER.REFERENCE_BATCH_SIZE and SOLVER.REFERENCE_WORLD_SIZE exclude each"):
        check_values(cfg)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("LOG.PERIOD", 0, "a whole number in [1, inf)"),
        ("TEST.EVAL_PERIOD", -5, "a whole number in [0, inf)"),
        ("SOLVER.MAX_ITER", 2**63, "a whole number in [1, 9223372036854775808)"),
        ("SOLVER.STEPS", (5, -1), "a whole number in [0, inf)"),
        ("SOLVER.STEPS", (5, 1.5), "a whole number in [0, inf)"),
        ("SEED", 1.0, "a whole number in [-1, 4294967296)"),
        ("SEED", -2, "a whole number in [-1, 4294967296)"),
        ("SOLVER.WARMUP_ITERS", 50_000, "at most SOLVER.MAX_ITER, 40000"),
        ("OUTPUT_DIR", " ", "a folder, or an address such as s3://bucket/run"),
        ("OUTPUT_DIR", "s3:/bucket", "a folder, or an address such as s3://bucket/run"),
        ("LOG.WRITERS", ["json", "json"], "each writer once"),
        ("SOLVER.AMP.LOSS_SCALE", "high", '"dynamic", or a number in (0, inf)'),
        ("FORK.ITER", 3, "an iteration of FORK.RUN, which is empty"),
        ("SOLVER.BASE_LR", None, "a number in [0, inf)"),
        ("SOLVER.BASE_LR", NAN, "a number in [0, inf)"),
        ("SOLVER.BASE_LR", INF, "a number in [0, inf)"),
        ("SOLVER.WEIGHT_DECAY_BIAS", "fast", "a number in [0, inf)"),
        ("SOLVER.MOMENTUM", 5.0, "a number in [0, 1]"),
        ("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 0.0, "a number in (0, inf]"),
        ("DATALOADER.RANDOM_SUBSET_RATIO", 0.0, "a number in (0, 1]"),
        ("CHECKPOINT.MAX_TO_KEEP", True, "a number in [1, inf)"),
        ("CHECKPOINT.PUBLISH", "all", "'', 'model', 'ema'"),
        ("VERSION", 3, "1, 2"),
        ("DATALOADER.SKIP", [[5, 3]], "a list of [start, end], whole numbers from 0 on, which grow"),
    ],
)
def test_a_value_that_no_run_can_use_is_named_with_what_is_accepted(key, value, accepted):
    cfg = get_cfg()
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError) as error:
        check_values(cfg)
    assert str(error.value) == f"{key}: got {value!r} ({type(value).__name__}); accepted: {accepted}"


@pytest.mark.parametrize(
    "options",
    [
        ["SOLVER.MAX_ITER", 2**63 - 1],
        ["SOLVER.MAX_ITER", "3ep", "CHECKPOINT.START", "1ep"],
        ["SOLVER.CLIP_GRADIENTS.CLIP_VALUE", INF, "SOLVER.MOMENTUM", 1.0, "SOLVER.WEIGHT_DECAY_BIAS", None],
        ["CHECKPOINT.BEST_METRIC", ["a/b", "c"], "CHECKPOINT.MAX_TO_KEEP", 1, "CHECKPOINT.PUBLISH", "ema"],
        ["TEST.EXPECTED_RESULTS", [["a", "b", 1.0, 0.1]], "EARLY_STOPPING.THRESHOLD", 99.5],
        ["DATALOADER.SKIP", [[0, 3], [5, 8]]],
    ],
)
def test_values_at_the_ends_of_their_ranges_are_in_order(options):
    cfg = get_cfg()
    cfg.merge_from_list(options)
    check_values(cfg)


def test_a_value_that_was_set_by_hand_is_checked():
    cfg = get_cfg()
    cfg.LOG.PERIOD = "often"
    with pytest.raises(ConfigError, match="LOG.PERIOD: got 'often'"):
        check_values(cfg)
    with pytest.raises(ConfigError, match="use trainkit's get_cfg"):
        check_values({})


@pytest.mark.parametrize("entry", [["a", "b", 1.0], "a"])
def test_an_expected_result_has_four_parts(entry):
    cfg = get_cfg()
    cfg.TEST.EXPECTED_RESULTS = [entry]
    with pytest.raises(ConfigError, match=r"TEST.EXPECTED_RESULTS: got .*; accepted: entries \[task, metric, "):
        check_values(cfg)
