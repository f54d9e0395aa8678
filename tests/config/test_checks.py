"""Values that no run can use are found before anything is built."""

import pytest

from trainkit.config import CfgNode, ConfigError, check_values, get_cfg
from trainkit.config.config import changed_settings
from trainkit.config.defaults import ACCEPTED, core_defaults

NAN, INF = float("nan"), float("inf")


def test_the_defaults_are_in_order_and_every_whole_number_has_a_range():
    check_values(get_cfg())
    defaults = changed_settings(core_defaults(), CfgNode())
    keys = {key for key, value in defaults if type(value) is int}
    with_range = {key for names in ACCEPTED.values() for key in names.split()}
    assert keys - with_range == {"VIS_PERIOD"}


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("LOG.PERIOD", 0, "a whole number in [1, inf)"),
        ("SOLVER.MAX_ITER", 2**63, "a whole number in [1, 9223372036854775808)"),
        ("SOLVER.STEPS", (5, 1.5), "a whole number in [0, inf)"),
        ("SOLVER.WARMUP_ITERS", 50_000, "at most SOLVER.MAX_ITER, 40000"),
        ("OUTPUT_DIR", "s3:/bucket", "a folder, or an address such as s3://bucket/run"),
        ("LOG.WRITERS", ["json", "json"], "each writer once"),
        ("FORK.ITER", 3, "an iteration of FORK.RUN, which is empty"),
        ("SOLVER.BASE_LR", NAN, "a number in [0, inf)"),
        ("SOLVER.WEIGHT_DECAY_BIAS", "fast", "a number in [0, inf)"),
        ("OUTPUT_DIR", None, "text, such as './output'"),
        ("MODEL.DEVICE", None, "text, such as 'auto'"),
        ("CHECKPOINT.MAX_TO_KEEP", True, "a number in [1, inf)"),
        ("VERSION", 3, "1, 2"),
    ],
)
def test_a_value_that_no_run_can_use_is_named_with_what_is_accepted(key, value, accepted):
    cfg = get_cfg()
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError) as error:
        check_values(cfg)
    named, _, after_it = str(error.value).partition("accepted: ")
    assert named.startswith(f"{key}: ")
    assert f"{value!r} ({type(value).__name__})" in named
    assert after_it == accepted


def test_values_at_the_ends_of_their_ranges_are_in_order():
    cfg = get_cfg()
    cfg.merge_from_list(
        ["SOLVER.MAX_ITER", 2**63 - 1, "CHECKPOINT.START", "1ep", "SOLVER.MOMENTUM", 1.0]
    )
    cfg.merge_from_list(["SOLVER.CLIP_GRADIENTS.CLIP_VALUE", INF, "SOLVER.WEIGHT_DECAY_BIAS", None])
    cfg.merge_from_list(
        ["TEST.EXPECTED_RESULTS", [["a", "b", 1.0, 0.1]], "CHECKPOINT.MAX_TO_KEEP", 1]
    )
    check_values(cfg)


def test_a_value_that_was_set_by_hand_is_checked():
    cfg = get_cfg()
    for entry in (["a", "b", 1.0], "a"):
        cfg.TEST.EXPECTED_RESULTS = [entry]
        with pytest.raises(
            ConfigError, match=r"TEST.EXPECTED_RESULTS: got .*; accepted: entries \[task, metric, "
        ):
            check_values(cfg)
    cfg.LOG.PERIOD = "often"
    with pytest.raises(ConfigError, match="LOG.PERIOD: got 'often'"):
        check_values(cfg)
    with pytest.raises(ConfigError, match="use trainkit's get_cfg"):
        check_values({})
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.REFERENCE_BATCH_SIZE", 256, "SOLVER.REFERENCE_WORLD_SIZE", 8])
    with pytest.raises(
        ConfigError,
        match="SOLVER.REFERENCE_BATCH_SIZE and SOLVER.REFERENCE_WORLD_SIZE exclude each",
    ):
        check_values(cfg)


OFF = [
    # (what is off by default, a value that it would not accept, what switches it on)
    (("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 0), ("SOLVER.CLIP_GRADIENTS.ENABLED", True)),
    (("SOLVER.CLIP_GRADIENTS.NORM_TYPE", -1.0), ("SOLVER.CLIP_GRADIENTS.ENABLED", True)),
    (("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "agc"), ("SOLVER.CLIP_GRADIENTS.ENABLED", True)),
    (("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", None), ("SOLVER.CLIP_GRADIENTS.ENABLED", True)),
    (("SOLVER.AMP.PRECISION", "fp8"), ("SOLVER.AMP.ENABLED", True)),
    (("SOLVER.AMP.LOSS_SCALE", "high"), ("SOLVER.AMP.ENABLED", True)),
    (("SOLVER.AMP.INIT_SCALE", 0.0), ("SOLVER.AMP.ENABLED", True)),
    (("SOLVER.NON_FINITE.MAX_IN_ROW", 0), ("SOLVER.NON_FINITE.POLICY", "skip")),
    (("SOLVER.NON_FINITE.MAX_IN_ROW", 0), ("SOLVER.AMP.ENABLED", True)),
    (("SOLVER.BASE_LR_END", -1.0), ("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR")),
    (("SOLVER.NUM_DECAYS", -1), ("SOLVER.LR_SCHEDULER_NAME", "WarmupStepWithFixedGammaLR")),
    (("CHECKPOINT.BEST_MODE", "most"), ("CHECKPOINT.BEST_METRIC", "a/b")),
    (("CHECKPOINT.BEST_TO_KEEP", 0), ("CHECKPOINT.BEST_METRIC", "a/b")),
    (("TEST.EVAL_START", -1), ("TEST.EVAL_PERIOD", 5)),
    (("EARLY_STOPPING.PATIENCE", 0), ("EARLY_STOPPING.METRIC", "a/b")),
    (("EARLY_STOPPING.MODE", "most"), ("EARLY_STOPPING.METRIC", "a/b")),
    (("EARLY_STOPPING.MIN_DELTA", NAN), ("EARLY_STOPPING.METRIC", "a/b")),
    (("CHECKPOINT.PUBLISH_FORMAT", "onnx"), ("CHECKPOINT.PUBLISH", "model")),
    (("TEST.PRECISE_BN.NUM_ITER", 0), ("TEST.PRECISE_BN.ENABLED", True)),
    (("MODEL.COMPILE.MODE", "fast"), ("MODEL.COMPILE.ENABLED", True)),
    (("MODEL.FSDP.PARAM_DTYPE", "int8"), ("MODEL.PARALLEL", "fsdp")),
    (
        ("DATALOADER.RANDOM_SUBSET_RATIO", 0.0),
        ("DATALOADER.SAMPLER_TRAIN", "RandomSubsetTrainingSampler"),
    ),
]


@pytest.mark.parametrize(("setting", "switch"), OFF, ids=str)
def test_a_feature_that_is_off_accepts_every_value_of_its_keys(setting, switch):
    cfg = get_cfg()
    cfg.merge_from_list([*setting])
    check_values(cfg)
    cfg.merge_from_list([*switch])
    with pytest.raises(ConfigError, match=setting[0]):
        check_values(cfg)


@pytest.mark.parametrize(
    ("setting", "switch"),
    [
        (("SOLVER.STEPS", (-5,)), ("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR")),
        (("SOLVER.GAMMA", -1.0), ("SOLVER.SCHEDULES", [{"NAME": "Cosine"}])),
        (("SOLVER.WARMUP_ITERS", 50_000), ("SOLVER.SCHEDULES", [{"NAME": "Cosine"}])),
        (("SOLVER.WARMUP_FACTOR", -1.0), ("SOLVER.WARMUP_ITERS", 0)),
        (("SOLVER.WARMUP_METHOD", None), ("SOLVER.WARMUP_ITERS", 0)),
        (("SOLVER.BASE_LR", -1.0), ("SOLVER.OPTIMIZER.LR", 0.1)),
        (("CHECKPOINT.START", -1), ("SOLVER.CHECKPOINT_PERIOD", 0)),
        (("DATALOADER.PREFETCH_FACTOR", 0), ("DATALOADER.NUM_WORKERS", 0)),
        (("DATALOADER.TIMEOUT", -1.0), ("DATALOADER.NUM_WORKERS", 0)),
        (("MODEL.DDP.COMPRESSION", "int8"), ("MODEL.PARALLEL", "fsdp")),
    ],
    ids=str,
)
def test_what_another_setting_switches_off_accepts_every_value(setting, switch):
    cfg = get_cfg()
    cfg.merge_from_list([*setting])
    with pytest.raises(ConfigError, match=setting[0]):
        check_values(cfg)
    cfg.merge_from_list([*switch])
    check_values(cfg)
