"""The arguments that detectron2's users pass by position or by name are where they were; new ones come behind them."""

import inspect

import pytest

from trainkit.engine import AMPTrainer, SimpleTrainer, TrainerBase, create_ddp_model, default_writers, hooks, launch
from trainkit.evaluation import inference_on_dataset
from trainkit.solver import LRMultiplier, WarmupParamScheduler, get_default_optimizer_params
from trainkit.utils.events import CommonMetricPrinter, EventStorage, JSONWriter, TensorboardXWriter

STEP = ["model", "data_loader", "optimizer", "gather_metric_period", "zero_grad_before_forward"]
SIGNATURES = [
    (TrainerBase.train, ["self", "start_iter", "max_iter"]),
    (TrainerBase.register_hooks, ["self", "hooks"]),
    (SimpleTrainer, [*STEP, "async_write_metrics"]),
    (AMPTrainer, [*STEP, "grad_scaler", "precision", "log_grad_scaler", "async_write_metrics"]),
    (SimpleTrainer.write_metrics, ["loss_dict", "data_time", "cur_iter", "prefix"]),
    (hooks.IterationTimer, ["warmup_iter"]),
    (hooks.PeriodicWriter, ["writers", "period"]),
    (hooks.PeriodicCheckpointer, ["checkpointer", "period", "max_iter", "max_to_keep", "file_prefix"]),
    (hooks.BestCheckpointer, ["eval_period", "checkpointer", "val_metric", "mode", "file_prefix"]),
    (hooks.LRScheduler, ["optimizer", "scheduler"]),
    (hooks.TorchProfiler, ["enable_predicate", "output_dir", "activities", "save_tensorboard"]),
    (hooks.EvalHook, ["eval_period", "eval_function", "eval_after_train"]),
    (hooks.PreciseBN, ["period", "model", "data_loader", "num_iter"]),
    (hooks.TorchMemoryStats, ["period", "max_runs"]),
    (launch, ["main_func", "num_gpus_per_machine", "num_machines", "machine_rank", "dist_url", "args", "timeout"]),
    (create_ddp_model, ["model", "fp16_compression"]),
    (default_writers, ["output_dir", "max_iter"]),
    (EventStorage, ["start_iter"]),
    (EventStorage.put_scalar, ["self", "name", "value", "smoothing_hint", "cur_iter"]),
    (JSONWriter, ["json_file", "window_size"]),
    (TensorboardXWriter, ["log_dir", "window_size"]),
    (CommonMetricPrinter, ["max_iter", "window_size"]),
    (LRMultiplier, ["optimizer", "multiplier", "max_iter", "last_iter"]),
    (WarmupParamScheduler, ["scheduler", "warmup_factor", "warmup_length", "warmup_method", "rescale_interval"]),
    (get_default_optimizer_params, ["model", "base_lr", "weight_decay", "weight_decay_norm", "bias_lr_factor"]),
    (inference_on_dataset, ["model", "data_loader", "evaluator", "callbacks"]),
]


@pytest.mark.parametrize(("function", "names"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_call_written_for_detectron2_still_means_the_same(function, names):
    assert [*inspect.signature(function).parameters][: len(names)] == names
