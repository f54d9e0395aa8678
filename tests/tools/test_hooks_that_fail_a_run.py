"""Hooks whose effect is that a digits job fails."""

import pytest

from tests.engine.tiny import metrics_by_worker
from tests.tools.digits_run import Run, in_one_piece, in_pieces
from tests.tools.settings import hook
from trainkit.utils.logger import close_logger

# the learning rate is the reason for losses that are not finite, which are noticed when the metrics are written
DIVERGING = ["SOLVER.BASE_LR", 1e30, "LOG.ASYNC", True, "LOG.PERIOD", 100, "SOLVER.CHECKPOINT_PERIOD", 0]
WITH_SPARE = [
    *("IMPORTS", ["projects.digits", "tests.tools.digits_hooks"], "MODEL.NAME", "DigitsWithSpare"),
    *hook("UnusedParameters"),
]


@pytest.mark.parametrize("run", [in_one_piece, in_pieces])
def test_check_finite_loss_ends_the_run_before_the_update_with_the_bad_loss(tmp_path, run):
    with metrics_by_worker():
        with pytest.raises(FloatingPointError, match="in iteration 1, .*loss_cls is nan on rank 0"):
            run(tmp_path / "with", *DIVERGING, "TEST.EVAL_PERIOD", 0, *hook("CheckFiniteLoss", INTERVAL=1))
        close_logger()
        with pytest.raises(FloatingPointError, match="the loss is not finite in iteration 1"):
            run(tmp_path / "without", *DIVERGING, "TEST.EVAL_PERIOD", 0)
        close_logger()

    assert "Training failed in iteration 1: FloatingPointError" in Run(tmp_path / "with").log
    assert "Training failed in iteration 1: FloatingPointError" not in Run(tmp_path / "without").log


def test_unused_parameters_end_the_run_if_asked_to(tmp_path):
    in_one_piece(tmp_path / "goes_on", *WITH_SPARE)
    with pytest.raises(RuntimeError, match="never used in the forward pass: spare.weight, spare.bias"):
        in_one_piece(tmp_path / "ends", *WITH_SPARE, *hook("UnusedParameters", RAISE_ERROR=True))
    close_logger()
