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

CONFIG_KEYS: dict[str, str] = {
    "REQUEUE_SIGNAL": "trainkit.projects.cluster.config",
    "CHECKPOINT.ASYNC": "trainkit.projects.async_save.config",
    "CHECKPOINT.BEST_TO_KEEP": "trainkit.projects.hooks.config",
    "CHECKPOINT.PUBLISH": "trainkit.projects.hooks.config",
    "CHECKPOINT.TRAINABLE_ONLY": "trainkit.projects.trainable_only.config",
    "CHECKPOINT.PUBLISH_FORMAT": "trainkit.projects.hooks.config",
    "DATALOADER.OVERFIT_BATCHES": "trainkit.projects.samplers.config",
    "DATALOADER.RANDOM_SUBSET_RATIO": "trainkit.projects.samplers.config",
    "DATALOADER.REPEAT_THRESHOLD": "trainkit.projects.samplers.config",
    "DATALOADER.REPEAT_SQRT": "trainkit.projects.samplers.config",
    "MAX_TIME": "trainkit.projects.hooks.config",
    "LOG.PROGRESS": "trainkit.projects.loggers.config",
    "MODEL.ACTIVATION_CHECKPOINT": "trainkit.projects.model_options.config",
    "MODEL.CHANNELS_LAST": "trainkit.projects.model_options.config",
    "MODEL.COMPILE": "trainkit.projects.model_options.config",
    "DATALOADER.SKIP": "trainkit.projects.replay.config",
    "DATALOADER.SKIP_MODE": "trainkit.projects.replay.config",
    "FORK": "trainkit.projects.replay.config",
    "MODEL.FSDP": "trainkit.projects.sharding.config",
    "MODEL.TENSOR_PARALLEL": "trainkit.projects.sharding.config",
    "SOLVER.LOGICAL_RANKS": "trainkit.projects.logical_ranks.config",
    "SOLVER.GRAPH": "trainkit.projects.graph.config",
    "SOLVER.REFERENCE_BATCH_SIZE": "trainkit.projects.scaling.config",
    "SOLVER.OPTIMIZERS": "trainkit.projects.solver_extras.config",
    "SOLVER.PARAM_GROUPS": "trainkit.projects.solver_extras.config",
    "SOLVER.SCHEDULES": "trainkit.projects.solver_extras.config",
    "SOLVER.MAX_BATCHES_PER_EPOCH": "trainkit.projects.samplers.config",
    "TEST.PRECISE_BN": "trainkit.projects.hooks.config",
}
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

NAMES: Mapping[str, str] = {
    "Requeue": "trainkit.projects.cluster.requeue",
    "GraphTrainer": "trainkit.projects.graph.trainer",
    "GraphAMPTrainer": "trainkit.projects.graph.trainer",
    "LogicalTrainer": "trainkit.projects.logical_ranks.trainer",
    "LogicalAMPTrainer": "trainkit.projects.logical_ranks.trainer",
    "logical_trainer": "trainkit.projects.logical_ranks.trainer",
    "graph_trainer": "trainkit.projects.graph.trainer",
    "async_save": "trainkit.projects.async_save.format",
    "Mirror": "trainkit.projects.remote.mirror",
    "download_address": "trainkit.projects.remote.addresses",
    "upload_address": "trainkit.projects.remote.addresses",
    "CheckpointStore": "trainkit.projects.remote.store",
    "STORE_REGISTRY": "trainkit.projects.remote.store",
    "safetensors": "trainkit.projects.weights.safetensors",
    "load_trusted_pickle": "trainkit.projects.weights.pickles",
    "shards": "trainkit.projects.sharding.format",
    "SkipBatches": "trainkit.projects.replay.skip",
    "LazyCall": "trainkit.projects.lazy.config",
    "LazyConfig": "trainkit.projects.lazy.config",
    "instantiate": "trainkit.projects.lazy.instantiate",
    "reload_lazy_config": "trainkit.projects.lazy.testing",
    "locate": "trainkit.projects.lazy.locate",
    "_convert_target_to_string": "trainkit.projects.lazy.locate",
    "global_cfg": "trainkit.projects.compat.global_config",
    "set_global_cfg": "trainkit.projects.compat.global_config",
    "PicklableWrapper": "trainkit.projects.compat.serialize",
    "retry_if_cuda_oom": "trainkit.projects.compat.memory",
    "AspectRatioGroupedDataset": "trainkit.projects.compat.datasets",
    "ToIterableDataset": "trainkit.projects.compat.datasets",
    "set_default_dataset_from_list_serialize_method": "trainkit.projects.compat.datasets",
    "_log_api_usage": "trainkit.projects.compat.log",
    "create_small_table": "trainkit.projects.compat.log",
    "log_every_n": "trainkit.projects.compat.log",
    "log_every_n_seconds": "trainkit.projects.compat.log",
    "log_first_n": "trainkit.projects.compat.log",
    "is_due_epoch": "trainkit.projects.hooks.epochs",
    "LoadsAgain": "trainkit.projects.fast_dev.options",
    "fast_dev_config": "trainkit.projects.fast_dev.options",
    "scale_lr_to_batch": "trainkit.projects.scaling.scaling",
    "scale_workers": "trainkit.projects.scaling.scaling",
    "DefaultPredictor": "trainkit.projects.predict.predictor",
    "LARS": "trainkit.projects.solver_extras.lars",
    "CombinedOptimizer": "trainkit.projects.solver_extras.combined",
    "combined_optimizer": "trainkit.projects.solver_extras.combined",
    "LAYER_DEPTH_REGISTRY": "trainkit.projects.solver_extras.layer_decay",
    "build_layer_decay": "trainkit.projects.solver_extras.layer_decay",
    "ParamRules": "trainkit.projects.solver_extras.rules",
    "build_param_groups": "trainkit.projects.solver_extras.rules",
    "listed_schedules": "trainkit.projects.solver_extras.composed",
    "build_schedule": "trainkit.projects.solver_extras.composed",
    "SCHEDULE_REGISTRY": "trainkit.projects.solver_extras.schedules",
    "schedules": "trainkit.projects.solver_extras",
    "describe_param_groups": "trainkit.projects.solver_extras.names",
    "KeepLastValue": "trainkit.projects.compat.schedules",
    "WarmupCosineLR": "trainkit.projects.compat.schedules",
    "WarmupMultiStepLR": "trainkit.projects.compat.schedules",
    "_get_warmup_factor_at_iter": "trainkit.projects.compat.schedules",
    "groups_by_rules": "trainkit.projects.solver_extras.groups",
    "losses_from": "trainkit.projects.adapters.logits",
    "ClassificationEvaluator": "trainkit.projects.evaluators.classification",
    "LossEvaluator": "trainkit.projects.evaluators.loss",
    "ConfusionMatrixEvaluator": "trainkit.projects.evaluators.confusion",
    "SemSegEvaluator": "trainkit.projects.evaluators.segmentation",
    "CombinedLoader": "trainkit.projects.samplers.combined",
    "GroupedBatchSampler": "trainkit.projects.samplers.grouped",
    "RandomSubsetTrainingSampler": "trainkit.projects.samplers.random_subset",
    "RepeatFactorTrainingSampler": "trainkit.projects.samplers.repeat_factor",
    "limited_sampler": "trainkit.projects.samplers.limited",
    "fsdp": "trainkit.projects.sharding.fsdp",
    "BestCheckpoints": "trainkit.projects.hooks.best_checkpoints",
    "CheckFiniteLoss": "trainkit.projects.hooks.check_finite_loss",
    "EMAHook": "trainkit.projects.hooks.ema",
    "Freeze": "trainkit.projects.hooks.freeze",
    "EmptyCache": "trainkit.projects.hooks.memory",
    "GradNorm": "trainkit.projects.hooks.grad_norm",
    "GarbageCollection": "trainkit.projects.hooks.memory",
    "TimeLimit": "trainkit.projects.hooks.time_limit",
    "TorchMemoryStats": "trainkit.projects.hooks.memory",
    "MemorySnapshot": "trainkit.projects.hooks.memory_snapshot",
    "ParamScheduler": "trainkit.projects.hooks.param_scheduler",
    "PreciseBN": "trainkit.projects.hooks.precise_bn",
    "AutogradProfiler": "trainkit.projects.hooks.profiler",
    "TorchProfiler": "trainkit.projects.hooks.profiler",
    "PublishWeights": "trainkit.projects.hooks.publish",
    "ReduceOnPlateau": "trainkit.projects.hooks.reduce_on_plateau",
    "RuntimeInfo": "trainkit.projects.hooks.runtime_info",
    "SamplerSeed": "trainkit.projects.hooks.sampler_seed",
    "FrozenWeights": "trainkit.projects.trainable_only.frozen",
    "SyncBuffers": "trainkit.projects.hooks.sync_buffers",
    "Throughput": "trainkit.projects.hooks.throughput",
    "UnusedParameters": "trainkit.projects.hooks.unused_parameters",
    "VISUALIZER_REGISTRY": "trainkit.projects.hooks.visualization",
    "VisualizationHook": "trainkit.projects.hooks.visualization",
    "CSVWriter": "trainkit.projects.loggers.csv_writer",
    "csv": "trainkit.projects.loggers.csv_writer",
    "ProgressBar": "trainkit.projects.loggers.progress_bar",
    "progress_bar": "trainkit.projects.loggers.progress_bar",
    "tensorboard_settings": "trainkit.projects.loggers.tensorboard_settings",
    "MLflowWriter": "trainkit.projects.loggers.mlflow_writer",
    "mlflow": "trainkit.projects.loggers.mlflow_writer",
    "WandbWriter": "trainkit.projects.loggers.wandb_writer",
    "wandb": "trainkit.projects.loggers.wandb_writer",
}
"""The name of a class or function, also of one in a registry -> the module that has and registers it."""

OPTIONS: dict[str, str] = {
    "--fast-dev-run": "trainkit.projects.fast_dev.options",
    "--fork": "trainkit.projects.replay.fork",
    "--overfit-batches": "trainkit.projects.samplers.options",
}
"""Option of the command line -> the module that adds it to the parser, in ``add_options(parser)``.

If the option is given, `default_setup` calls ``apply(cfg, args)`` of the module before it uses the config. ``apply``
may change both in place, and may return a function, which is called when OUTPUT_DIR is ready: nothing of an earlier run
is in it.
"""

RUN_HOOKS: Mapping[str, str] = {
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
