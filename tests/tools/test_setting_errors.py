"""A setting that is wrong ends a digits job with one line and code 2, before the first iteration."""

import pytest

from tests.tools.digits_run import in_one_piece
from tests.tools.settings import EVERY_KIND, IMPORTS, hook
from tests.tools.settings_of_optimization import schedules
from trainkit.utils.logger import close_logger


@pytest.fixture(autouse=True)
def closed_logger():
    yield
    close_logger()


def hooks(*entries):
    return ["HOOKS", [*entries]]


BEST = {"NAME": "BestCheckpointer", "VAL_METRIC": "classification/top1"}
MOMENTUM = {"NAME": "ParamScheduler", "PARAM": "momentum", "SCHEDULES": [{"NAME": "Exponential", "GAMMA": 0.9}]}
STREAM = [*IMPORTS, "DATASETS.TRAIN", ["digits_stream"]]
EVERY_PARAMETER = [
    *("embedding.weight", "dwconv.weight", "dwconv.bias", "dwconv2.weight", "dwconv2.bias"),
    *("norm.weight", "norm.bias", "scale", "head.weight", "head.bias"),
]

# one of each part that reads settings; its own tests have the others
ALL = [
    (hook("EMAHok"), "did you mean 'EMAHook'?"),
    (["HOOKS", ["EMAHook"]], "HOOKS is a list of entries such as {NAME: EMAHook, DECAY: 0.999}; got 'EMAHook'"),
    (hook("EMAHook", DECAI=0.9), "'decai'"),
    (hook("EMAHook", DECAY=2), "must be a number from 0 to below 1, got 2"),
    (hook("EMAHook", BEGIN=13), "begin of EMAHook is 13"),
    (hooks(MOMENTUM, MOMENTUM), "two ParamScheduler hooks set momentum; list their schedules in one of them"),
    (hooks(BEST, BEST), "two hooks have the file_prefix 'model_best'"),
    (
        hooks({"NAME": "LRScheduler", "ENABLED": False}, {"NAME": "ReduceOnPlateau", "VAL_METRIC": "loss/total_loss"}),
        "ReduceOnPlateau needs an LRScheduler hook",
    ),
    (["CHECKPOINT.BEST_METRIC", "classification/quality"], 'mode is "auto"'),
    (["SOLVER.REFERENCE_WORLD_SIZE", 3], "a multiple of SOLVER.REFERENCE_WORLD_SIZE (3)"),
    (["CHECKPOINT.PUBLISH", "ema"], 'no EMAHook is registered; add one, or publish "model"'),
    (["CHECKPOINT.MAX_TO_KEEP", 0], "accepted: a number in [1, inf)"),
    (["SOLVER.AMP.PRECISION", "float8"], "SOLVER.AMP.PRECISION: got 'float8' (str); accepted: 'float16', 'bfloat16'"),
    (
        ["SOLVER.PARAM_GROUPS.FLAT_LR_FACTOR", -1.0],
        "FLAT_LR_FACTOR: got -1.0 (float); accepted: a number of at least 0",
    ),
    ([*EVERY_KIND, "MODEL.FROZEN", EVERY_PARAMETER], "has no trainable parameters"),
    (["SOLVER.OPTIMIZER.NAME", "Adan"], "did you mean 'Adam'?"),
    (["SOLVER.OPTIMIZER.DAMPNING", 0.5], "dampning=0.5"),
    (["SOLVER.OPTIMIZER.NAME", "AdamW"], "SOLVER.NESTEROV: got True (bool); accepted: False"),  # digits sets it
    (["SOLVER.MOMENTUM", 0.0], "Nesterov momentum requires a momentum and zero dampening"),
    (schedules({"NAME": "Cosin"}), "did you mean 'Cosine'?"),
    (schedules({"NAME": "Cosine", "END_VALUE": -1}), "end_value must be a number >= 0, got -1"),
    (["SOLVER.LR_SCHEDULER_NAME", "Cosine"], "did you mean 'WarmupCosineLR'?"),
    (["SOLVER.WARMUP_ITERS", 13], "SOLVER.WARMUP_ITERS: got 13 (int); accepted: at most SOLVER.MAX_ITER, 12"),
    (["SOLVER.STEPS", [6, 3]], "start_epoch=6, milestone=3"),
    (
        ["SOLVER.MAX_ITER", "3 epochs"],
        'accepted: iterations (an int, such as 500) or epochs (such as "3ep" or "0.5ep")',
    ),
    ([*STREAM, "SOLVER.MAX_ITER", "3ep"], "SOLVER.MAX_ITER: got '3ep' (str); accepted: iterations"),
    ([*STREAM, *hook("EMAHook", BEGIN="1ep")], "HOOKS[0].BEGIN: got '1ep' (str); accepted: iterations"),
]


@pytest.mark.parametrize(("options", "remedy"), ALL, ids=[" ".join(map(str, options[-2:])) for options, _ in ALL])
def test_a_wrong_setting_ends_with_one_line_that_names_the_remedy(tmp_path, capsys, options, remedy):
    with pytest.raises(SystemExit) as caught:
        in_one_piece(tmp_path, *options)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert remedy in error
    metrics = tmp_path / "metrics.json"
    assert not metrics.exists() or metrics.read_text() == ""  # nothing has been trained


def test_a_stream_without_epochs_is_trained(tmp_path):
    assert len(in_one_piece(tmp_path, *STREAM).metric("total_loss")) == 12
