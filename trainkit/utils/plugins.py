"""What projects bring, by name: the one place where trainkit names them.

A project is imported when a config has one of its keys, a registry is asked for one of its names, or a package of
trainkit for one of its classes. Packages of other authors are named by ``IMPORTS`` in a config instead.
"""

import ast
import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Name -> module, from module of ``trainkit.projects`` -> names."""
    return {name: f"trainkit.projects.{module}" for module, some in names.items() for name in some.split()}


CONFIG_KEYS: dict[str, str] = _by_name(
    {
        "cluster.config": "REQUEUE_SIGNAL STEP_TIMEOUT",
        "async_save.config": "CHECKPOINT.ASYNC",
        "hooks.config": (
            "CHECKPOINT.BEST_TO_KEEP CHECKPOINT.PUBLISH CHECKPOINT.PUBLISH_FORMAT MAX_TIME SOLVER.ACCUMULATION_FACTORS "
            "TEST.PRECISE_BN"
        ),
        "trainable_only.config": "CHECKPOINT.TRAINABLE_ONLY",
        "samplers.config": (
            "DATALOADER.OVERFIT_BATCHES DATALOADER.RANDOM_SUBSET_RATIO DATALOADER.REPEAT_THRESHOLD "
            "DATALOADER.REPEAT_SQRT SOLVER.MAX_BATCHES_PER_EPOCH"
        ),
        "loggers.config": "LOG.PROGRESS",
        "model_options.config": "MODEL.ACTIVATION_CHECKPOINT MODEL.CHANNELS_LAST MODEL.COMPILE",
        "replay.config": "DATALOADER.SKIP DATALOADER.SKIP_MODE FORK",
        "sharding.config": "MODEL.FSDP MODEL.TENSOR_PARALLEL",
        "logical_ranks.config": "SOLVER.LOGICAL_RANKS",
        "graph.config": "SOLVER.GRAPH",
        "scaling.config": "SOLVER.REFERENCE_BATCH_SIZE SOLVER.REFERENCE_WORLD_SIZE",
        "solver_extras.config": "SOLVER.OPTIMIZERS SOLVER.PARAM_GROUPS SOLVER.SCHEDULES",
    }
)
"""Config key -> the module that declares it, and any keys below it, in ``add_config(cfg)``.

The module may have more functions, which are called if the key is in the config: ``check(cfg)``, by `check_values`,
raises ConfigError if a value is wrong; ``prepare(cfg)`` changes the config of a `DefaultTrainer`, or calls
`comm.set_data_ranks`, before anything is built; ``wrap_model(cfg, model)`` returns the model to train, after
``build_model``, and ``wrap_loader(cfg, loader)`` the training or test loader.
"""

CONFIG_TYPES: Mapping[str, str] = {
    "omegaconf.dictconfig.DictConfig": "trainkit.projects.lazy.settings",
}
"""The type of a config that `default_setup` and `configurable` accept beside CfgNode -> the module that reads it.

The module has a function ``to_cfg(cfg, args)``: a CfgNode with the settings that `default_setup` needs, and the text of
``config.yaml``.
"""

NAMES: Mapping[str, str] = _by_name(
    {
        "cluster.requeue": "Requeue",
        "cluster.timeout": "StepTimeout",
        "graph.trainer": "GraphTrainer GraphAMPTrainer graph_trainer",
        "non_finite.trainers": "gradients skip",
        "logical_ranks.trainer": "LogicalTrainer LogicalAMPTrainer logical_trainer",
        "async_save.format": "async_save staged",
        "remote.mirror": "Mirror",
        "remote.addresses": "register_addresses",
        "remote.store": "CheckpointStore STORE_REGISTRY",
        "weights.safetensors": "safetensors",
        "weights.pickles": "load_trusted_pickle",
        "sharding.format": "shards",
        "replay.skip": "SkipBatches",
        "lazy.config": "LazyCall LazyConfig",
        "lazy.instantiate": "instantiate",
        "lazy.testing": "reload_lazy_config",
        "lazy.locate": "locate _convert_target_to_string",
        "compat.global_config": "global_cfg set_global_cfg",
        "compat.serialize": "PicklableWrapper",
        "compat.memory": "retry_if_cuda_oom",
        "compat.datasets": "AspectRatioGroupedDataset ToIterableDataset set_default_dataset_from_list_serialize_method",
        "compat.log": "_log_api_usage create_small_table log_every_n log_every_n_seconds log_first_n",
        "hooks.accumulation": "AccumulationSchedule",
        "hooks.epochs": "is_due_epoch",
        "fast_dev.options": "LoadsAgain fast_dev_config",
        "preflight.hook": "KillAt Preflight",
        "scaling.batch": "KeepBatch",
        "scaling.scaling": "scale_lr_to_batch scale_workers",
        "predict.predictor": "DefaultPredictor",
        "solver_extras.lars": "LARS",
        "solver_extras.combined": "CombinedOptimizer combined_optimizer",
        "solver_extras.layer_decay": "LAYER_DEPTH_REGISTRY build_layer_decay",
        "solver_extras.rules": "ParamRules build_param_groups",
        "solver_extras.composed": "listed_schedules build_schedule",
        "solver_extras.schedules": "SCHEDULE_REGISTRY",
        "solver_extras": "schedules",
        "solver_extras.names": "describe_param_groups",
        "compat.schedules": "KeepLastValue WarmupCosineLR WarmupMultiStepLR _get_warmup_factor_at_iter",
        "solver_extras.groups": "groups_by_rules",
        "adapters.logits": "losses_from",
        "evaluators.classification": "ClassificationEvaluator",
        "evaluators.loss": "LossEvaluator",
        "evaluators.confusion": "ConfusionMatrixEvaluator",
        "evaluators.segmentation": "SemSegEvaluator",
        "evaluators.metadata": "Metadata MetadataCatalog",
        "samplers.combined": "CombinedLoader",
        "samplers.grouped": "GroupedBatchSampler",
        "samplers.random_subset": "RandomSubsetTrainingSampler",
        "samplers.repeat_factor": "RepeatFactorTrainingSampler",
        "samplers.limited": "limited_sampler",
        "sharding.fsdp": "fsdp",
        "hooks.best_checkpoints": "BestCheckpoints",
        "hooks.check_finite_loss": "CheckFiniteLoss",
        "hooks.copy_ahead": "CopyAhead",
        "hooks.ema": "EMAHook",
        "hooks.freeze": "Freeze",
        "hooks.memory": "EmptyCache GarbageCollection TorchMemoryStats",
        "hooks.grad_norm": "GradNorm",
        "hooks.time_limit": "TimeLimit",
        "hooks.memory_snapshot": "MemorySnapshot",
        "hooks.param_scheduler": "ParamScheduler",
        "hooks.precise_bn": "PreciseBN",
        "hooks.profiler": "AutogradProfiler TorchProfiler",
        "hooks.publish": "PublishWeights",
        "hooks.reduce_on_plateau": "ReduceOnPlateau",
        "hooks.runtime_info": "RuntimeInfo",
        "hooks.sampler_seed": "SamplerSeed",
        "trainable_only.frozen": "FrozenWeights",
        "hooks.sync_buffers": "SyncBuffers",
        "hooks.throughput": "Throughput",
        "hooks.unused_parameters": "UnusedParameters",
        "hooks.visualization": "VISUALIZER_REGISTRY VisualizationHook",
        "loggers.csv_writer": "CSVWriter csv",
        "loggers.progress_bar": "ProgressBar progress_bar",
        "loggers.tensorboard_settings": "tensorboard_settings",
        "loggers.mlflow_writer": "MLflowWriter mlflow",
        "loggers.wandb_writer": "WandbWriter wandb",
    }
)
"""The name of a class or function, also of one in a registry -> the module that has and registers it."""

OPTIONS: dict[str, str] = {
    "--fast-dev-run": "trainkit.projects.fast_dev.options",
    "--fork": "trainkit.projects.replay.fork",
    "--preflight": "trainkit.projects.preflight.options",
    "--preflight-quick": "trainkit.projects.preflight.options",
    "--overfit-batches": "trainkit.projects.samplers.options",
}
"""Option of the command line -> the module that adds it to the parser, in ``add_options(parser)``.

If the option is given, `default_setup` calls ``apply(cfg, args)`` of the module before it uses the config. ``apply``
may change both in place, and may return a function, which is called when OUTPUT_DIR is ready: nothing of an earlier run
is in it.
"""

RUN_HOOKS: Mapping[str, str] = {
    "CopyAhead": "trainkit.projects.hooks.copy_ahead",
    "SamplerSeed": "trainkit.projects.hooks.sampler_seed",
    "RunRecord": "trainkit.projects.replay.record",
}
"""The name of a hook class -> its module. Every `DefaultTrainer` has a hook of each class, if its project is there.

The class takes no arguments, and its ``priority`` says where the hook stands. It may refuse a trainer by ``is_needed``.
"""

FORMATS = ("shards", "safetensors")
"""Registered names of checkpoint formats; an entry of a file, or the suffix of its name, says which one wrote it."""


class MissingProjectError(ImportError):
    """The project of a module of these tables is not installed."""


def type_name(value: object) -> str:
    """The name of the type of ``value``, as in `CONFIG_TYPES`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def load_plugin(module: str) -> ModuleType:
    """Import a module of the tables. Raises MissingProjectError if its project is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        project = ".".join(module.split(".")[:3])
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingProjectError(f"this needs the project {project}, which is not installed") from error


def installed(table: Mapping[str, str]) -> Iterator[tuple[str, ModuleType]]:
    """The names of a table with their modules, without those whose project is not there."""
    for name, module in table.items():
        with contextlib.suppress(MissingProjectError):
            yield name, load_plugin(module)


def import_plugin_of(name: str) -> None:
    """Import the project that brings ``name``, if there is one; it registers what it has."""
    if name in NAMES:
        load_plugin(NAMES[name])


def lazy_names(package: str, *names: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that imports its names when they are first asked for.

    The package imports the names in ``if TYPE_CHECKING:``; this statement is read from its source. So each name is
    written once, and type checkers know it.

    Args:
        package: its ``__name__``.
        names: further names, which are in `NAMES`.
    """
    spec = importlib.util.find_spec(package)
    source = getattr(spec and spec.loader, "get_source", lambda _: "")(package) or ""
    blocks = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: str(node.module) for node in imports for alias in node.names}
    all_of = modules.pop("*", "")  # the package whose names are names of this one too
    modules |= {name: NAMES[name] for name in names}

    def get(name: str) -> Any:
        module = modules.get(name, "")
        if not module and all_of and name in importlib.import_module(all_of).__all__:
            module = all_of
        if not module:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}") if module == package else getattr(load_plugin(module), name)

    return get
