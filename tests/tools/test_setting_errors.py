"""A setting that is wrong ends a digits job with one line and code 2, before the first iteration."""

import pytest

from tests.tools.digits_run import in_one_piece
from tests.tools.settings import EVERY_KIND, IMPORTS, hook
from tests.tools.settings_of_param_groups import custom_keys, layer_decay, of
from tests.tools.settings_of_schedules import schedules
from trainkit.utils.logger import close_logger


@pytest.fixture(autouse=True)
def closed_logger():
    yield
    close_logger()


def hooks(*entries):
    return ["HOOKS", [*entries]]


AMP = ["SOLVER.AMP.ENABLED", True]
CLIP = ["SOLVER.CLIP_GRADIENTS.ENABLED", True]
EARLY = ["EARLY_STOPPING.METRIC", "classification/top1"]
BEST = {"NAME": "BestCheckpointer", "VAL_METRIC": "classification/top1"}
MOMENTUM = {"NAME": "ParamScheduler", "PARAM": "momentum", "SCHEDULES": [{"NAME": "Exponential", "GAMMA": 0.9}]}
EVERY_PARAMETER = [
    *("embedding.weight", "dwconv.weight", "dwconv.bias", "dwconv2.weight", "dwconv2.bias"),
    *("norm.weight", "norm.bias", "scale", "head.weight", "head.bias"),
]

HOOKS = [
    (hook("EMAHok"), "did you mean 'EMAHook'?"),
    (["HOOKS", ["EMAHook"]], "HOOKS is a list of entries such as {NAME: EMAHook, DECAY: 0.999}; got 'EMAHook'"),
    (hook("PreciseBN", PERIOD=4), "PreciseBN is no entry of the list; set TEST.PRECISE_BN.ENABLED to True"),
    (hook("EMAHook", DECAI=0.9), "EMAHook: unknown 'DECAI'; did you mean 'DECAY'?"),
    (hook("EMAHook", DECAY=2), "must be a number from 0 to below 1, got 2"),
    (hook("EMAHook", EVALUATE="best"), 'evaluate must be "ema", "raw" or "both", got \'best\''),
    (hook("ParamScheduler", PARAM="momentum"), "missing 1 required positional argument: 'schedules'"),
    (hook("ReduceOnPlateau", VAL_METRIC="loss/total_loss", FACTOR=2), "factor must be between 0 and 1"),
    (hook("EarlyStopping", VAL_METRIC="loss/total_loss", PATIENCE=0), "patience must be >= 1 evaluation, got 0"),
    (hook("EMAHook", ENABLED="no"), "ENABLED must be True or False, got 'no'"),
    (hook("EMAHook", PRIORITY="FIRST"), "one of HIGHEST, VERY_HIGH, "),
    (hook("EMAHook", PRIORITY=3, BEFORE="EvalHook"), "give one of PRIORITY, BEFORE, AFTER"),
    (hook("EMAHook", BEFORE="EvalHok"), "must match one of: IterationTimer, "),
    (
        hooks(
            {"NAME": "TorchMemoryStats"}, {"NAME": "TorchMemoryStats"}, {"NAME": "EMAHook", "AFTER": "TorchMemoryStats"}
        ),
        "the anchor 'TorchMemoryStats' matches 2 registered hooks",
    ),
    (hook("EmptyCache", BEFORE_EPOCH="no"), "BEFORE_EPOCH must be True or False, got 'no'"),
    (hook("EMAHook", PRIORITY=True), "got True"),
    (hook("EMAHook", BEGIN=13), "begin of EMAHook is 13, beyond the end of the run after 12 iterations"),
    (hooks({**MOMENTUM, "PARAM": "lr"}), "put the schedule into SOLVER.SCHEDULES, or switch the other off"),
    (hooks({**MOMENTUM, "PARAM": "momentun"}), "did you mean 'momentum'?"),
    (hooks(MOMENTUM, MOMENTUM), "two ParamScheduler hooks set momentum; list their schedules in one of them"),
    (hooks({**MOMENTUM, "SCHEDULES": [{"NAME": "Stap"}]}), "did you mean 'Step'?"),
    (hooks(BEST, BEST), "give them different file_prefix"),
    (["CHECKPOINT.BEST_METRIC", "classification/top1", *hooks(BEST)], "or name both in CHECKPOINT.BEST_METRIC"),
    (
        hooks({"NAME": "LRScheduler", "ENABLED": False}, {"NAME": "ReduceOnPlateau", "VAL_METRIC": "loss/total_loss"}),
        "ReduceOnPlateau needs an LRScheduler hook",
    ),
]

METRICS = [
    (["CHECKPOINT.BEST_METRIC", "classification/top2"], "did you mean 'classification/top1'?"),
    (["CHECKPOINT.BEST_METRIC", ["loss/total_loss", "loss/loss_clss"]], "did you mean 'loss/loss_cls'?"),
    (["EARLY_STOPPING.METRIC", "classification/top2"], "did you mean 'classification/top1'?"),
    (hook("BestCheckpointer", VAL_METRIC="classification/top2"), "did you mean 'classification/top1'?"),
    (hook("EarlyStopping", VAL_METRIC="classification/top2"), "did you mean 'classification/top1'?"),
    (hook("ReduceOnPlateau", VAL_METRIC="classification/top2"), "did you mean 'classification/top1'?"),
    (["CHECKPOINT.BEST_METRIC", "classification/quality"], "CHECKPOINT.BEST_MODE"),
    (["EARLY_STOPPING.METRIC", "classification/quality"], "EARLY_STOPPING.MODE"),
    (["CHECKPOINT.BEST_METRIC", ["loss/total_loss", "loss_total_loss"]], "two metrics for the file model_best_loss"),
    (["CHECKPOINT.BEST_METRIC", 3], 'accepted: None, a name such as "task/top1", or a list'),
]

CONTRADICTIONS = [
    ([*AMP, "SOLVER.AMP.LOSS_SCALE", "dynamc"], 'accepted: "dynamic", or a number in (0, inf)'),
    ([*AMP, "SOLVER.AMP.INIT_SCALE", 0.0], "SOLVER.AMP.INIT_SCALE: got 0.0 (float); accepted: a number in (0, inf)"),
    ([*AMP, "SOLVER.OPTIMIZER.DAMPENING", 0.5, "SOLVER.NESTEROV", False], "SOLVER.OPTIMIZER.FUSED"),
    ([*EARLY, "TEST.EVAL_PERIOD", 0], "but TEST.EVAL_PERIOD is 0; set it"),
    (["TEST.EVAL_PERIOD", 0, *hook("ReduceOnPlateau", VAL_METRIC="loss/total_loss")], "eval_period must be a whole"),
    (["EARLY_STOPPING.THRESHOLD", 0.5], "but EARLY_STOPPING.METRIC is ''; set it"),
    ([*EARLY, "EARLY_STOPPING.THRESHOLD", "high"], "accepted: a number in (-inf, inf)"),
    (
        [*EARLY, "EARLY_STOPPING.MIN_DELTA", -1.0],
        "EARLY_STOPPING.MIN_DELTA: got -1.0 (float); accepted: a number in [0, inf)",
    ),
    (["SOLVER.REFERENCE_BATCH_SIZE", 200, "SOLVER.REFERENCE_WORLD_SIZE", 2], "set one of them"),
    (["SOLVER.REFERENCE_WORLD_SIZE", 3], "a multiple of SOLVER.REFERENCE_WORLD_SIZE (3)"),
    (["CHECKPOINT.MAX_TO_KEEP", 0], "accepted: a whole number in [1, inf)"),
    (["CHECKPOINT.START", 3, "SOLVER.CHECKPOINT_PERIOD", 0], "but SOLVER.CHECKPOINT_PERIOD is 0; set it"),
    (["CHECKPOINT.PUBLISH", "ema"], 'no EMAHook is registered; add one, or publish "model"'),
    ([*CLIP, "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 0.0], "CLIP_VALUE: got 0.0 (float); accepted: a number in (0, inf]"),
    ([*CLIP, "SOLVER.CLIP_GRADIENTS.NORM_TYPE", -1.0], "NORM_TYPE: got -1.0 (float); accepted: a number in (0, inf]"),
]

CHOICES = [
    ("CHECKPOINT.BEST_MODE", "'auto', 'max', 'min'"),
    ("CHECKPOINT.PUBLISH", "'', 'model', 'ema'"),
    ("CHECKPOINT.PUBLISH_FORMAT", "'pth', 'safetensors'"),
    ("EARLY_STOPPING.MODE", "'auto', 'max', 'min'"),
    ("LOG.EVAL_AXIS", "'iter', 'epoch'"),
    ("SOLVER.AMP.PRECISION", "'float16', 'bfloat16'"),
    ("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "'value', 'norm', 'full_model'"),
    ("SOLVER.PARAM_GROUPS.KEY_MATCH", "'longest', 'shortest', 'exact'"),
]
AT_LEAST = [
    *[(key, 0) for key in ("CHECKPOINT.START", "DATALOADER.NUM_WORKERS", "SOLVER.CHECKPOINT_PERIOD")],
    *[(key, 0) for key in ("SOLVER.PARAM_GROUPS.LAYER_DECAY.NUM_LAYERS", "SOLVER.REFERENCE_BATCH_SIZE")],
    *[(key, 0) for key in ("SOLVER.WARMUP_ITERS", "TEST.EVAL_PERIOD", "TEST.EVAL_START", "TEST.MAX_BATCHES")],
    *[(key, 1) for key in ("EARLY_STOPPING.PATIENCE", "LOG.GATHER_PERIOD", "LOG.PERIOD", "LOG.WINDOW")],
    *[(key, 1) for key in ("SOLVER.ACCUMULATION_STEPS", "SOLVER.IMS_PER_BATCH", "SOLVER.MAX_ITER")],
    *[(key, 1) for key in ("TEST.IMS_PER_BATCH", "TEST.PRECISE_BN.NUM_ITER")],
]
RANGES = [
    *[([key, "wrong"], f"{key}: got 'wrong' (str); accepted: {accepted}") for key, accepted in CHOICES],
    *[
        ([key, least - 1], f"{key}: got {least - 1} (int); accepted: a whole number in [{least}, ")
        for key, least in AT_LEAST
    ],
]

PARAM_GROUPS = [
    (of("FLAT_LR_FACTOR", -1.0), "FLAT_LR_FACTOR is -1.0; accepted: a number of at least 0"),
    (of("BIAS_DECAY_FACTOR", "none"), "BIAS_DECAY_FACTOR is 'none'; accepted: a number of at least 0"),
    (of("NORM_DECAY_FACTOR", 0.5), "set that to 0.001, SOLVER.WEIGHT_DECAY, or leave the factor out"),
    (custom_keys({"LR_FACTOR": 0.1}), "such as {KEY: backbone.stem, LR_FACTOR: 0.1}"),
    (custom_keys({"KEY": "layers.1"}, {"KEY": "layers.1"}), "each one is a node with a KEY that no other has"),
    (custom_keys({"KEY": "layers.1", "LR_FACTOR": -0.1}), "layers.1, LR_FACTOR is -0.1; accepted: a number"),
    (custom_keys({"KEY": "layers.1", "LR_MULT": 0.1}), "did you mean lr_factor?"),
    ([*IMPORTS, *of("BUILDER", "heads_apart")], "did you mean 'head_apart'?"),
    ([*IMPORTS, *of("BUILDER", "head_apart"), *of("FLAT_LR_FACTOR", 0.5)], "leave it out, or SOLVER.PARAM_GROUPS.FLAT"),
    ([*IMPORTS, *of("BUILDER", "head_apart"), *layer_decay("model")], "leave it out, or SOLVER.PARAM_GROUPS.LAYER"),
    (layer_decay("vit", RATE=0.0), "LAYER_DECAY.RATE is 0.0; it must be above 0, and at most 1 (off)"),
    (layer_decay("vit", RATE=1.5), "LAYER_DECAY.RATE is 1.5; it must be above 0, and at most 1 (off)"),
    (layer_decay(""), "SCHEME is empty; set it to the kind of the model, such as vit"),
    (layer_decay("vitt"), "unknown scheme 'vitt'; accepted: vit, "),
    (layer_decay("vit"), "scheme 'vit' needs num_layers (NUM_LAYERS)"),
    (
        layer_decay("vit", NUM_LAYERS=2, DEPTHS=(1,)),
        "scheme 'vit' does not take depths (DEPTHS), got (1,); leave it out",
    ),
    (layer_decay("vit", NUM_LAYERS=2), "put the last one at 2; correct them"),
    (layer_decay("vit", NUM_LAYERS=2, PREFIX="encoder."), "give another prefix or scheme"),
    (layer_decay("model"), "needs a method get_layer_depth(name) of DigitsCNN; write one"),
    ([*EVERY_KIND, "MODEL.FROZEN", EVERY_PARAMETER], "at least one needs requires_grad=True to be optimized"),
]

RPROP = ["SOLVER.OPTIMIZER.NAME", "Rprop", "SOLVER.NESTEROV", False]
OPTIMIZERS = [
    (["SOLVER.OPTIMIZER.NAME", "Adan"], "did you mean 'Adam'?"),
    (["SOLVER.OPTIMIZER.NAME", "LBFGS"], "choose another optimizer"),
    (["SOLVER.OPTIMIZER.DAMPNING", 0.5], "did you mean 'DAMPENING'?"),
    (["SOLVER.OPTIMIZER.LR", "fast"], "SOLVER.OPTIMIZER.LR must be a number, got 'fast'"),
    (
        ["SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.NESTEROV", False, "SOLVER.OPTIMIZER.BETAS", [2, 0.9]],
        "SOLVER.OPTIMIZER.BETAS=(2, 0.9)",
    ),
    (["SOLVER.OPTIMIZER.NAME", "AdamW"], "leave SOLVER.NESTEROV at its default False"),  # digits sets it
    (["SOLVER.MOMENTUM", 0.0], "Nesterov momentum requires a momentum and zero dampening"),
    (["SOLVER.OPTIMIZER.NAME", "LARS", "SOLVER.MOMENTUM", 0.0], "nesterov needs momentum > 0"),
    (
        [*RPROP, "SOLVER.WEIGHT_DECAY", 0.0, *of("FLAT_DECAY_FACTOR", 0.5)],
        "give weight_decay, or leave them out",
    ),
    ([*RPROP, "SOLVER.WEIGHT_DECAY", 0.5], "SOLVER.WEIGHT_DECAY is 0.5, but Rprop takes no weight_decay"),
]

SCHEDULES = [
    (schedules({"NAME": "Cosin"}), "did you mean 'Cosine'?"),
    (
        ["SOLVER.SCHEDULES", ["Cosine"]],
        "must be an entry such as {NAME: Linear, END: 500} or {NAME: Cosine, BEGIN: 500",
    ),
    (schedules({"NAME": "Cosine", "ENDVALUE": 1}), "did you mean 'END_VALUE'?"),
    (schedules({"NAME": "Cosine", "END_VALUE": -1}), "end_value must be a number >= 0, got -1"),
    (
        schedules({"NAME": "Cosine", "END_VALUE": 0.1, "END_RATIO": 0.1}),
        "end_value 0.1 and end_ratio 0.1 both say where it ends; give one",
    ),
    (schedules({"NAME": "Cosine", "BEGIN": 5, "END": 3}), "END must be in iterations, an int >= 6, got 3"),
    (schedules({"NAME": "Cosine", "END": "3eps"}), "END must be in iterations, an int >= 1, got '3eps'"),
    (schedules({"NAME": "Step"}), "missing 1 required positional argument: 'step_size'"),
    (schedules({"NAME": "WarmupStableDecay", "WARMUP": 8, "DECAY": 4}), "must be shorter than length 12 together"),
    (["SOLVER.LR_SCHEDULER_NAME", "Cosine"], "did you mean 'WarmupCosineLR'?"),
    (["SOLVER.WARMUP_METHOD", "slow"], "must be linear, constant or exponential, got 'slow'"),
    (["SOLVER.WARMUP_ITERS", 13], "shorten the warm-up (0: none)"),
    (["SOLVER.WARMUP_ITERS", 12, "SOLVER.RESCALE_INTERVAL", True], "needs a warm-up that is shorter than the training"),
    (
        ["SOLVER.WARMUP_ITERS", 4, "SOLVER.WARMUP_METHOD", "exponential", "SOLVER.WARMUP_FACTOR", 0.0],
        "an exponential warm-up must start and end above 0",
    ),
    (["SOLVER.STEPS", [6, 3]], "SOLVER.STEPS must grow from one to the next, got (6, 3)"),
    (
        ["SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.BASE_LR_END", 1.0],
        "SOLVER.BASE_LR_END=1.0 must be between 0 and SOLVER.BASE_LR=0.1",
    ),
    (
        ["SOLVER.LR_SCHEDULER_NAME", "WarmupStepWithFixedGammaLR", "SOLVER.NUM_DECAYS", 0],
        "SOLVER.NUM_DECAYS must be >= 1, got 0",
    ),
]

STREAM = [*IMPORTS, "DATASETS.TRAIN", ["digits_stream"]]
EPOCHS = [
    (
        ["SOLVER.MAX_ITER", "3 epochs"],
        'accepted: iterations (an int, such as 500) or epochs (such as "3ep" or "0.5ep")',
    ),
    ([*STREAM, "SOLVER.MAX_ITER", "3ep"], "SOLVER.MAX_ITER: got '3ep' (str); accepted: iterations"),
    (
        [*STREAM, *schedules({"NAME": "Cosine", "END": "3ep"})],
        "SOLVER.SCHEDULES[0].END: got '3ep' (str); accepted: iterations",
    ),
    ([*STREAM, *hook("EMAHook", BEGIN="1ep")], "HOOKS[0].BEGIN: got '1ep' (str); accepted: iterations"),
    ([*STREAM, *hook("EmptyCache", AFTER_EPOCH=True)], "use a period in iterations"),
]

ALL = [*HOOKS, *METRICS, *CONTRADICTIONS, *RANGES, *PARAM_GROUPS, *OPTIMIZERS, *SCHEDULES, *EPOCHS]


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
