"""What projects bring, by name: the one place where trainkit names them.

A project is imported when a config has one of its keys, a registry is asked for one of its names, or a package of
trainkit for one of its classes. Packages of other authors are named by ``IMPORTS`` in a config instead.
"""

from collections.abc import Mapping


def _by_name(projects: Mapping[str, str]) -> dict[str, str]:
    """Name -> module, from project -> "module: name name; module: name"; without "module:" it is ``config``."""
    found: dict[str, str] = {}
    for project, text in projects.items():
        for part in text.split("; "):
            module, _, names = part.rpartition(": ")
            found |= dict.fromkeys(
                names.split(), f"trainkit.projects.{project}.{module or 'config'}"
            )
    return found


CONFIG_KEYS: dict[str, str] = _by_name(
    {
        "cluster": "FIRST_STEP_TIMEOUT REQUEUE_SIGNAL STEP_TIMEOUT",
        "async_save": "CHECKPOINT.ASYNC",
        "hooks": (
            "CHECKPOINT.BEST_TO_KEEP CHECKPOINT.PUBLISH CHECKPOINT.PUBLISH_FORMAT MAX_TIME SOLVER.ACCUMULATION_FACTORS "
            "TEST.PRECISE_BN"
        ),
        "trainable_only": "CHECKPOINT.TRAINABLE_ONLY",
        "samplers": (
            "DATALOADER.OVERFIT_BATCHES DATALOADER.RANDOM_SUBSET_RATIO DATALOADER.REPEAT_THRESHOLD "
            "DATALOADER.REPEAT_SQRT SOLVER.MAX_BATCHES_PER_EPOCH"
        ),
        "loggers": "LOG.PROGRESS",
        "model_options": "MODEL.ACTIVATION_CHECKPOINT MODEL.CHANNELS_LAST MODEL.COMPILE",
        "replay": "DATALOADER.SKIP DATALOADER.SKIP_MODE FORK",
        "sharding": "MODEL.FSDP MODEL.TENSOR_PARALLEL",
        "logical_ranks": "SOLVER.LOGICAL_RANKS",
        "graph": "SOLVER.GRAPH",
        "scaling": "SOLVER.REFERENCE_BATCH_SIZE SOLVER.REFERENCE_WORLD_SIZE",
        "solver_extras": "SOLVER.OPTIMIZERS SOLVER.PARAM_GROUPS SOLVER.SCHEDULES",
    }
)
"""Config key -> the module that declares it, and any keys below it, in ``add_config(cfg)``.

If the key is in the config, further functions of the module are called: ``check(cfg)`` raises ConfigError if a value is
wrong; ``prepare(cfg)`` changes the config of a `DefaultTrainer`, or calls `comm.set_data_ranks`, before anything is
built; ``wrap_model(cfg, model)`` and ``wrap_loader(cfg, loader)`` return the model to train and a loader.
"""

CONFIG_TYPES: dict[str, str] = {"omegaconf.dictconfig.DictConfig": "trainkit.projects.lazy.config"}
"""The type of a config that `default_setup` and `configurable` accept beside CfgNode -> the module that reads it.

Its ``to_cfg(cfg, args)`` returns a CfgNode with the settings that `default_setup` needs, and the text of config.yaml.
"""

NAMES: dict[str, str] = {"schedules": "trainkit.projects.solver_extras"} | _by_name(
    {
        "adapters": "logits: losses_from",
        "async_save": "format: async_save staged",
        "cluster": "hooks: Requeue StepTimeout",
        "compat": (
            "comm: create_local_process_group get_local_process_group get_local_rank get_local_size reduce_dict; "
            "datasets: AspectRatioGroupedDataset ToIterableDataset set_default_dataset_from_list_serialize_method; "
            "log: _log_api_usage create_small_table global_cfg log_every_n log_every_n_seconds log_first_n "
            "set_global_cfg; memory: PicklableWrapper retry_if_cuda_oom; "
            "schedules: KeepLastValue WarmupCosineLR WarmupMultiStepLR _get_warmup_factor_at_iter"
        ),
        "evaluators": (
            "classification: ClassificationEvaluator ConfusionMatrixEvaluator Metadata MetadataCatalog "
            "SemSegEvaluator; loss: LossEvaluator"
        ),
        "fast_dev": "options: LoadsAgain fast_dev_config",
        "graph": "trainer: GraphTrainer GraphAMPTrainer graph_trainer",
        "hooks": (
            "batch_norm: PreciseBN SyncBuffers; data: CopyAhead SamplerSeed is_due_epoch; "
            "averaging: EMAHook; gradients: AccumulationSchedule CheckFiniteLoss Freeze GradNorm UnusedParameters; "
            "param_scheduler: ParamScheduler ReduceOnPlateau; publish_weights: BestCheckpoints PublishWeights; "
            "profiler: AutogradProfiler EmptyCache GarbageCollection MemorySnapshot TorchMemoryStats TorchProfiler; "
            "runtime_info: RuntimeInfo Throughput; time_limit: TimeLimit; "
            "visualization: VISUALIZER_REGISTRY VisualizationHook"
        ),
        "lazy": "config: LazyCall LazyConfig instantiate reload_lazy_config; nodes: locate _convert_target_to_string",
        "loggers": (
            "csv_writer: CSVWriter csv; progress_bar: ProgressBar progress_bar; "
            "services: MLflowWriter WandbWriter mlflow wandb; tensorboard_writer: TensorboardXWriter tensorboard"
        ),
        "logical_ranks": "trainer: LogicalTrainer LogicalAMPTrainer logical_trainer",
        "non_finite": "policies: gradients skip",
        "predict": "predictor: DefaultPredictor",
        "preflight": "hook: Killed Preflight",
        "remote": "mirror: Mirror; store: CheckpointStore STORE_REGISTRY register_addresses",
        "replay": "config: SkipBatches",
        "samplers": (
            "combined: CombinedLoader GroupedBatchSampler; "
            "parts: RandomSubsetTrainingSampler RepeatFactorTrainingSampler limited_sampler"
        ),
        "scaling": "scaling: scale_lr_to_batch scale_workers",
        "sharding": "format: shards; fsdp: fsdp",
        "solver_extras": (
            "combined: CombinedOptimizer LARS combined_optimizer; "
            "schedules: SCHEDULE_REGISTRY build_schedule listed_schedules; "
            "layer_decay: LAYER_DEPTH_REGISTRY build_layer_decay; "
            "rules: ParamRules build_param_groups describe_param_groups groups_by_rules"
        ),
        "trainable_only": "frozen: FrozenWeights",
        "weights": "pickles: load_trusted_pickle; safetensors: safetensors",
    }
)
"""The name of a class or function, also of one in a registry -> the module that has and registers it."""

OPTIONS: dict[str, str] = _by_name(
    {
        "fast_dev": "options: --fast-dev-run",
        "replay": "fork: --fork",
        "preflight": "options: --preflight --preflight-allow --preflight-json --preflight-quick",
        "samplers": "--overfit-batches",
    }
)
"""Option of the command line -> the module that adds it to the parser, in ``add_options(parser)``.

If the option is given, `default_setup` calls ``apply(cfg, args)`` of the module, which may change both in place, and
may return a function that is called when OUTPUT_DIR is ready: nothing of an earlier run is in it.
"""

RUN_HOOKS: dict[str, str] = _by_name(
    {
        "hooks": "data: CopyAhead SamplerSeed",
        "replay": "record: RunRecord",
    }
)
"""The name of a hook class -> its module. Every `DefaultTrainer` has a hook of each class, if its project is there.

The class takes no arguments, and its ``priority`` says where the hook stands. It may refuse a trainer by ``is_needed``.
"""

FORMATS = ("shards", "safetensors")
"""Registered names of checkpoint formats; an entry of a file, or the suffix of its name, says which one wrote it."""


def type_name(value: object) -> str:
    """The name of the type of ``value``, as in `CONFIG_TYPES`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
