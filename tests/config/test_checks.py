"""Values that no run can use are found before anything is built."""

import contextlib

import pytest

from trainkit.config import ConfigError, check_values, get_cfg


def test_the_defaults_are_in_order():
    check_values(get_cfg())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["LOG.PERIOD", 0], "LOG.PERIOD is 0; it must be at least 1"),
        (["TEST.EVAL_PERIOD", -5], "TEST.EVAL_PERIOD is -5; it must be at least 0"),
        (["SOLVER.MAX_ITER", 0], "SOLVER.MAX_ITER is 0"),
        (["OUTPUT_DIR", ""], "OUTPUT_DIR is empty, so nothing could be saved; set it to a folder"),
        (["LOG.EVAL_AXIS", "batch"], "LOG.EVAL_AXIS is 'batch'; accepted: iter, epoch"),
        (["CHECKPOINT.BEST_MODE", "most"], "CHECKPOINT.BEST_MODE is 'most'; accepted: auto, max, min"),
        (["EARLY_STOPPING.MODE", ""], "EARLY_STOPPING.MODE is ''; accepted: auto, max, min"),
        (["CHECKPOINT.PUBLISH", "all"], "CHECKPOINT.PUBLISH is 'all'; accepted: \"\", model, ema"),
        (["CHECKPOINT.START", -1], "CHECKPOINT.START is -1; it must be at least 0"),
        (["CHECKPOINT.START", "2ep", "SOLVER.CHECKPOINT_PERIOD", 0], "START is 2ep, but SOLVER.CHECKPOINT_PERIOD is 0"),
        (["CHECKPOINT.MAX_TO_KEEP", 0], "MAX_TO_KEEP is 0; accepted: a number of at least 1, or None to keep all"),
        (["CHECKPOINT.MAX_TO_KEEP", True], "MAX_TO_KEEP is True; accepted"),
        (["CHECKPOINT.MAX_TO_KEEP", "few"], "MAX_TO_KEEP is 'few'; accepted"),
        (["CHECKPOINT.BEST_TO_KEEP", 0, "CHECKPOINT.BEST_METRIC", "a/b"], "BEST_TO_KEEP is 0; it must be at least 1"),
        (["CHECKPOINT.BEST_TO_KEEP", 2], "BEST_TO_KEEP is 2, but BEST_METRIC is empty; set it"),
        (["CHECKPOINT.BEST_METRIC", 5], "BEST_METRIC is 5; accepted: None, a name such as"),
        (["CHECKPOINT.BEST_METRIC", ["a/b", ""]], r"BEST_METRIC is \['a/b', ''\]; accepted"),
        (["CHECKPOINT.PUBLISH", "model", "CHECKPOINT.SAVE_LAST", False], "nothing to publish; set one of them"),
        (["EARLY_STOPPING.THRESHOLD", 5], "EARLY_STOPPING.THRESHOLD is 5, but EARLY_STOPPING.METRIC is empty"),
        (["EARLY_STOPPING.METRIC", "a/b", "TEST.EVAL_PERIOD", 1, "EARLY_STOPPING.THRESHOLD", "5%"], "'5%'; accepted"),
        (["SOLVER.AMP.PRECISION", "half"], "SOLVER.AMP.PRECISION is 'half'; accepted: float16, bfloat16"),
        (["SOLVER.AMP.LOSS_SCALE", "static"], "LOSS_SCALE is 'static'; accepted: .dynamic. or a number"),
        (["SOLVER.AMP.LOSS_SCALE", 0], "SOLVER.AMP.LOSS_SCALE is 0; accepted"),
        (["SOLVER.AMP.LOSS_SCALE", True], "SOLVER.AMP.LOSS_SCALE is True; accepted"),
        (["SOLVER.AMP.INIT_SCALE", -1], "SOLVER.AMP.INIT_SCALE is -1.0; accepted: a number greater than 0"),
        (["SOLVER.AMP.LOSS_SCALE", 512, "SOLVER.AMP.PRECISION", "bfloat16"], "bfloat16, which has no scale; leave"),
        (["SOLVER.AMP.LOSS_SCALE", 512, "SOLVER.AMP.INIT_SCALE", 64], "is float16 and LOSS_SCALE is 512; leave INIT"),
        (["SOLVER.AMP.INIT_SCALE", 64, "SOLVER.AMP.PRECISION", "bfloat16"], "but no dynamic scale starts with it"),
        (["SOLVER.NON_FINITE.POLICY", "warn"], "SOLVER.NON_FINITE.POLICY is 'warn'; accepted: raise, skip, ignore"),
        (["SOLVER.NON_FINITE.MAX_IN_ROW", 0], "SOLVER.NON_FINITE.MAX_IN_ROW is 0; it must be at least 1"),
        (["SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "all"], "CLIP_TYPE is 'all'; accepted: value, norm, full_model"),
        (["TEST.EXPECTED_RESULTS", [["a", "b", 1.0]]], r"the entry \['a', 'b', 1.0\]; each must be \[task, metric, "),
        (["TEST.EXPECTED_RESULTS", ["a", "b", 1.0, 0.1]], "the entry 'a'; each must be"),
        (["EARLY_STOPPING.METRIC", "a/b"], "TEST.EVAL_PERIOD is 0, so nothing is evaluated before the end"),
    ],
)
def test_what_no_run_can_use_is_named_with_what_is_accepted(options, message):
    cfg = get_cfg()
    cfg.merge_from_list(options)
    with pytest.raises(ConfigError, match=message):
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


def test_lengths_in_epochs_are_in_order():
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.MAX_ITER", "3ep", "LOG.PERIOD", "0.1ep"])
    check_values(cfg)


@pytest.mark.parametrize(
    ("keys", "meant"),
    [
        (["MODEL.NAM"], "MODEL.NAME"),
        (["MODEL.weights"], "MODEL.WEIGHTS"),
        (["MODEL.DEVISE"], "MODEL.DEVICE"),
        (["INPUT.TRAIN_TRANFORM"], "INPUT.TRAIN_TRANSFORM"),
        (["MODEL.WIDTH", "MODEL.WIDHT"], "MODEL.WIDTH"),
        (["MODEL.WIDTH", "MODEL.DEPTH", "INPUT.CROP", "MODEL.CONV1", "MODEL.CONV12"], None),
        (["INPUT.MIN_SIZE_TRAIN", "INPUT.MAX_SIZE_TRAIN", "MODEL.KERNEL_H", "MODEL.KERNEL_W", "MODEL.GAME"], None),
    ],
)
def test_a_new_key_that_looks_like_another_one_draws_a_warning(caplog, keys, meant):
    cfg = get_cfg()
    cfg.merge_from_list([text for key in keys for text in (key, "x")])
    check_values(cfg)
    warning = f"{keys[-1]} is used as a new key, beside {meant}; correct it if you meant that one"
    assert caplog.messages == ([] if meant is None else [warning])


@pytest.mark.parametrize("key", ["CHECKPOINT.MAX_TO_KEEP", "MODEL.COMPILE.DYNAMIC", "EARLY_STOPPING.THRESHOLD"])
def test_a_node_where_a_value_belongs_is_no_surprise_for_the_look_at_keys(key):
    cfg = get_cfg()
    cfg.merge_from_list([key, "{A: 1}"])
    with contextlib.suppress(ConfigError):
        check_values(cfg)
