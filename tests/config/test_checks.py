"""Values that no run can use are found before anything is built."""

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
        (["CHECKPOINT.BEST_MODE", "most"], "CHECKPOINT.BEST_MODE is 'most'; accepted: max, min"),
        (["SOLVER.AMP.PRECISION", "half"], "SOLVER.AMP.PRECISION is 'half'; accepted: float16, bfloat16"),
        (["EARLY_STOPPING.METRIC", "a/b"], "TEST.EVAL_PERIOD is 0, so nothing is evaluated before the end"),
    ],
)
def test_what_no_run_can_use_is_named_with_what_is_accepted(options, message):
    cfg = get_cfg()
    cfg.merge_from_list(options)
    with pytest.raises(ConfigError, match=message):
        check_values(cfg)


def test_lengths_in_epochs_are_in_order():
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.MAX_ITER", "3ep", "LOG.PERIOD", "0.1ep"])
    check_values(cfg)
