"""Every config key with its default; keys that detectron2 has keep its names.

Keys in ``trainkit.config.lengths.LENGTH_KEYS`` take iterations (``500``) or epochs (``"3ep"``).
CONTRIBUTING.md says how to add a key.
"""

import copy
import functools
from typing import Any

from trainkit.config.config import CfgNode as CN
from trainkit.config.config import changed_settings, mark_as_defaults, mark_keys_of_projects
from trainkit.utils.errors import ConfigError
from trainkit.utils.plugins import Plugin, Plugins, find_plugins

_C = CN()
# The version of this set of keys.
_C.VERSION = 1
# The folder of the run, or s3://bucket/run. A new run moves older files to previous_<n>.
_C.OUTPUT_DIR = "./output"
# The seed of all random numbers. -1: draw one and log it.
_C.SEED = -1
# Modules (dotted names) that register models, datasets or hooks; imported before the job is built.
_C.IMPORTS = []
# Threads that torch uses on the CPU. 0: torch's choice. 1 is best for small models on a busy CPU.
_C.NUM_THREADS = 0
# True: cuDNN tries its kernels and uses the fastest ones.
_C.CUDNN_BENCHMARK = False
# True: use kernels that always give the same bits, as exact resume on a GPU needs; slower.
_C.DETERMINISTIC = False
# For torch.set_float32_matmul_precision: "highest", "high", "medium". "": not called.
_C.FLOAT32_PRECISION = ""
# If one rank is asked to stop, all ranks stop after at most this many iterations.
_C.STOP_CHECK_PERIOD = 20
# How often a model draws while it trains. trainkit itself does not use it.
_C.VIS_PERIOD = 0

# ---------------------------------------------------------------------------- model
# Add the keys of your own model here.
_C.MODEL = CN(new_allowed=True)
# The name of the model in MODEL_REGISTRY.
_C.MODEL.NAME = ""
# A device such as "cuda:1". default_setup replaces "auto": CUDA, XPU or MPS, else the CPU.
_C.MODEL.DEVICE = "auto"
# A file or address to start from; only its model is loaded. A resumed run loads its own.
_C.MODEL.WEIGHTS = ""
# With several processes: "ddp", or a name in WRAPPER_REGISTRY, such as "fsdp".
_C.MODEL.PARALLEL = "ddp"
# torch's DistributedDataParallel, used with several processes.
_C.MODEL.DDP = CN()
# True: in each iteration, first all ranks get the buffers of rank 0.
_C.MODEL.DDP.BROADCAST_BUFFERS = False
# True: parameters may get no gradient; each step searches the graph.
_C.MODEL.DDP.FIND_UNUSED_PARAMETERS = False
# False: DDP has a second copy of the gradients, so they may be replaced.
_C.MODEL.DDP.GRADIENT_AS_BUCKET_VIEW = True
# True: each step uses the same parameters in the same way.
_C.MODEL.DDP.STATIC_GRAPH = False
# Exchange gradients as "fp16" or as "bf16" (needs CUDA and NCCL). "": uncompressed.
_C.MODEL.DDP.COMPRESSION = ""

# ---------------------------------------------------------------------------- data
_C.INPUT = CN(new_allowed=True)
# The transform of training samples, a name in TRANSFORM_REGISTRY. "": none.
_C.INPUT.TRAIN_TRANSFORM = ""
# The transform of samples of DATASETS.VAL and DATASETS.TEST. "": none.
_C.INPUT.TEST_TRANSFORM = ""

_C.DATASETS = CN()
# Names of training datasets in DatasetCatalog. Several are concatenated.
_C.DATASETS.TRAIN = ()
# Evaluated every TEST.EVAL_PERIOD; decides the best checkpoint and early stopping. (): TEST.
_C.DATASETS.VAL = ()
# Evaluated at the end and by --eval-only.
_C.DATASETS.TEST = ()

_C.DATALOADER = CN()
# Processes per rank that load samples. 0: the process of the rank loads them.
_C.DATALOADER.NUM_WORKERS = 4
# If a worker delivers no batch for this many seconds, the run fails. 0: wait for ever.
_C.DATALOADER.TIMEOUT = 600.0
# The number of batches that each worker loads ahead.
_C.DATALOADER.PREFETCH_FACTOR = 2
# True: keep the workers after each pass over the data for the next one.
_C.DATALOADER.PERSISTENT_WORKERS = False
# "default": torch's default_collate makes a batch. "list": it is a list of samples.
_C.DATALOADER.COLLATE = "default"
# A name in SAMPLER_REGISTRY.
_C.DATALOADER.SAMPLER_TRAIN = "TrainingSampler"

# ---------------------------------------------------------------------------- optimization
_C.SOLVER = CN()
# Keys beside NAME: other arguments, in upper case.
_C.SOLVER.OPTIMIZER = CN(new_allowed=True)
# A class of torch.optim, or a name in OPTIMIZER_REGISTRY.
_C.SOLVER.OPTIMIZER.NAME = "SGD"
# Another function that builds the optimizer, in OPTIMIZER_BUILDER_REGISTRY.
_C.SOLVER.OPTIMIZER_BUILDER = ""
# Another function that makes its groups, in PARAM_GROUP_REGISTRY.
_C.SOLVER.PARAM_GROUP_BUILDER = ""
# Another function that builds the schedule, in LR_SCHEDULER_BUILDER_REGISTRY.
_C.SOLVER.LR_SCHEDULER_BUILDER = ""
# The length of the run. An iteration is one update.
_C.SOLVER.MAX_ITER = 40000
# Samples per micro-batch, over all ranks.
_C.SOLVER.IMS_PER_BATCH = 16
# Micro-batches per iteration.
_C.SOLVER.ACCUMULATION_STEPS = 1
# The learning rate that the schedule multiplies. A warning if the run never reaches it.
_C.SOLVER.BASE_LR = 0.001
# WarmupCosineLR and WarmupLinearLR: the learning rate at the end.
_C.SOLVER.BASE_LR_END = 0.0
# For SGD, LARS, RMSprop, ... An error if you set it and the optimizer does not take it.
_C.SOLVER.MOMENTUM = 0.9
# Nesterov momentum. An error if you set it to True and the optimizer does not take it.
_C.SOLVER.NESTEROV = False
# The weight decay. An error if you set it and the optimizer does not take it.
_C.SOLVER.WEIGHT_DECAY = 0.0001
# The weight decay of parameters of normalization layers.
_C.SOLVER.WEIGHT_DECAY_NORM = 0.0
# The weight decay of parameters called bias. None: WEIGHT_DECAY.
_C.SOLVER.WEIGHT_DECAY_BIAS = None
# Multiplies the learning rate of parameters called bias.
_C.SOLVER.BIAS_LR_FACTOR = 1.0
# True: also others are biases, such as in_proj_bias of attention and bias_ih_l0 of an LSTM.
_C.SOLVER.ALL_BIASES = False
# Or "WarmupCosineLR", "WarmupLinearLR", "WarmupStepWithFixedGammaLR".
_C.SOLVER.LR_SCHEDULER_NAME = "WarmupMultiStepLR"
# The learning rate is multiplied by this factor at each of STEPS.
_C.SOLVER.GAMMA = 0.1
# The iterations at which the learning rate falls. A warning if you set one beyond MAX_ITER.
_C.SOLVER.STEPS = (30000,)
# WarmupStepWithFixedGammaLR: how often the learning rate falls.
_C.SOLVER.NUM_DECAYS = 3
# The warm-up starts at BASE_LR times this factor.
_C.SOLVER.WARMUP_FACTOR = 1.0 / 1000
# The length of the warm-up. If you do not set it, it is at most 5 % of the run.
_C.SOLVER.WARMUP_ITERS = 1000
# Or "constant".
_C.SOLVER.WARMUP_METHOD = "linear"
# True: the schedule starts after the warm-up. False: both start together.
_C.SOLVER.RESCALE_INTERVAL = False
# How often a checkpoint is saved; also a time, "30min" or "1h 30min". 0: only at the end.
_C.SOLVER.CHECKPOINT_PERIOD = 5000
# True: zero the gradients before the forward pass, not after it.
_C.SOLVER.ZERO_GRAD_BEFORE_FORWARD = False
_C.SOLVER.CLIP_GRADIENTS = CN()
# True: clip gradients before each update.
_C.SOLVER.CLIP_GRADIENTS.ENABLED = False
# "value", "norm": clip each parameter. "full_model": clip the total norm.
_C.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = "value"
# The largest value, or the largest norm.
_C.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = 1.0
# The order of the norm, also of the stored grad_norm; "value" computes none.
_C.SOLVER.CLIP_GRADIENTS.NORM_TYPE = 2.0
_C.SOLVER.NON_FINITE = CN()
# For NaN or inf: "raise", "gradients" (look at all), "skip", "ignore".
_C.SOLVER.NON_FINITE.POLICY = "raise"
# The run ends after this many skipped updates in a row, in float16 too.
_C.SOLVER.NON_FINITE.MAX_IN_ROW = 25
# A name in TRAINER_REGISTRY. "": SimpleTrainer, or AMPTrainer if SOLVER.AMP.ENABLED.
_C.SOLVER.TRAINER = ""
_C.SOLVER.AMP = CN()
# True: automatic mixed precision.
_C.SOLVER.AMP.ENABLED = False
# "float16" (with a grad scaler) or "bfloat16" (without).
_C.SOLVER.AMP.PRECISION = "float16"
# The loss scale with float16: "dynamic", or a number for a fixed scale.
_C.SOLVER.AMP.LOSS_SCALE = "dynamic"
# The first value of a dynamic scale.
_C.SOLVER.AMP.INIT_SCALE = 65536.0

# ------------------------------------------------------------ checkpoints, evaluation, logs
_C.CHECKPOINT = CN()
# The folder for checkpoints. "": OUTPUT_DIR.
_C.CHECKPOINT.DIR = ""
# If not 0, the first periodic checkpoint is saved after this many iterations.
_C.CHECKPOINT.START = 0
# True: save model_final at the end of the run.
_C.CHECKPOINT.SAVE_LAST = True
# The name of a format in FORMAT_REGISTRY; "": one file of torch.save.
_C.CHECKPOINT.FORMAT = ""
# How many periodic files are kept. None: all. model_final and model_best always stay.
_C.CHECKPOINT.MAX_TO_KEEP = None
# Such as "classification/top1", or a list. None: no best checkpoint. Its evaluator must exist.
_C.CHECKPOINT.BEST_METRIC = None
# "max": larger values are better. "min": smaller. "auto": by the metric's name, see the log.
_C.CHECKPOINT.BEST_MODE = "auto"

# [{NAME: EMAHook, DECAY: 0.999}, ...], see trainkit.engine.hooks.ConfiguredHooks.
_C.HOOKS = []

_C.TEST = CN()
# Names in EVALUATOR_REGISTRY, or {NAME: LossEvaluator, WEIGHT: num_tokens} with arguments.
_C.TEST.EVALUATORS = []
# Samples per batch on each rank.
_C.TEST.IMS_PER_BATCH = 64
# Evaluate at most this many batches per rank. 0: all.
_C.TEST.MAX_BATCHES = 0
# How often the model is evaluated during training. 0: only at the end.
_C.TEST.EVAL_PERIOD = 0
# If not 0, the first periodic evaluation comes after this many iterations.
_C.TEST.EVAL_START = 0
# True: also evaluate before training, which finds a broken evaluator early.
_C.TEST.EVAL_AT_START = False
# [[task, metric, value, tolerance], ...]: the final results are checked against these.
_C.TEST.EXPECTED_RESULTS = []

_C.EARLY_STOPPING = CN()
# Such as "classification/top1". "": no early stopping. Its evaluator must exist.
_C.EARLY_STOPPING.METRIC = ""
# "max": larger values are better. "min": smaller. "auto": by the metric's name, see the log.
_C.EARLY_STOPPING.MODE = "auto"
# Stop after this many evaluations without an improvement of more than MIN_DELTA.
_C.EARLY_STOPPING.PATIENCE = 3
# A smaller improvement does not count.
_C.EARLY_STOPPING.MIN_DELTA = 0.0
# "abs": MIN_DELTA is a difference. "rel": a fraction of the best value.
_C.EARLY_STOPPING.MIN_DELTA_MODE = "abs"
# A number: also stop as soon as METRIC is better than it.
_C.EARLY_STOPPING.THRESHOLD = None
# A number: also stop as soon as METRIC is worse than it.
_C.EARLY_STOPPING.DIVERGENCE = None
# Values count after this many iterations. Those before do not count at all.
_C.EARLY_STOPPING.START = 0

_C.LOG = CN()
# The number of iterations from one call of the writers to the next.
_C.LOG.PERIOD = 20
# A loss is shown as its median over this many iterations.
_C.LOG.WINDOW = 20
# Each scalar keeps this many values for plots and medians. A checkpoint holds 16 bytes for each.
_C.LOG.HISTORY_LENGTH = 10_000
# N: store the losses of every N-th iteration. Ranks exchange them once per PERIOD.
_C.LOG.GATHER_PERIOD = 1
# True: a worker thread stores metrics and calls the writers. None: only on CUDA and XPU.
_C.LOG.ASYNC = None
# Also "csv", "progress_bar", or another name in WRITER_REGISTRY.
_C.LOG.WRITERS = ["console", "json", "tensorboard"]
# The terminal shows lines from this level on: DEBUG, INFO, WARNING or ERROR. log.txt has all.
_C.LOG.LEVEL = "INFO"
# True: handlers of the root logger, such as pytest's caplog, get the lines too.
_C.LOG.PROPAGATE = False

MEANT_IF_SET = (
    "DATALOADER.SAMPLER_TRAIN",
    "SOLVER.MOMENTUM",
    "SOLVER.NESTEROV",
    "SOLVER.STEPS",
    "SOLVER.WARMUP_ITERS",
    "SOLVER.WEIGHT_DECAY",
)
"""Keys whose default is only a suggestion: it gives way where it does not fit, and a value that was
set does not. A dump of a config, such as config.yaml, has them only if they were set, so that a run
from it trains the same."""

ACCEPTED: dict[Any, str] = {
    "[-1, 4294967296)": "SEED",
    "[1, 9223372036854775808)": "SOLVER.MAX_ITER",
    "[1, inf)": """
        CHECKPOINT.MAX_TO_KEEP DATALOADER.PREFETCH_FACTOR EARLY_STOPPING.PATIENCE LOG.GATHER_PERIOD
        LOG.HISTORY_LENGTH LOG.PERIOD LOG.WINDOW SOLVER.ACCUMULATION_STEPS SOLVER.IMS_PER_BATCH
        SOLVER.NON_FINITE.MAX_IN_ROW STOP_CHECK_PERIOD TEST.IMS_PER_BATCH
    """,
    "[0, inf)": """
        CHECKPOINT.START DATALOADER.NUM_WORKERS DATALOADER.TIMEOUT EARLY_STOPPING.MIN_DELTA
        EARLY_STOPPING.START SOLVER.BASE_LR SOLVER.BASE_LR_END SOLVER.BIAS_LR_FACTOR
        SOLVER.CHECKPOINT_PERIOD SOLVER.GAMMA SOLVER.NUM_DECAYS SOLVER.STEPS SOLVER.WARMUP_FACTOR
        SOLVER.WARMUP_ITERS SOLVER.WEIGHT_DECAY SOLVER.WEIGHT_DECAY_BIAS SOLVER.WEIGHT_DECAY_NORM
        TEST.EVAL_PERIOD TEST.EVAL_START TEST.MAX_BATCHES
    """,
    "[0, 1]": "SOLVER.MOMENTUM",
    "(0, inf)": "SOLVER.AMP.INIT_SCALE",
    "[0, 1024]": "NUM_THREADS",
    "(0, inf]": "SOLVER.CLIP_GRADIENTS.CLIP_VALUE SOLVER.CLIP_GRADIENTS.NORM_TYPE",
    "(-inf, inf)": "EARLY_STOPPING.DIVERGENCE EARLY_STOPPING.THRESHOLD",
    ("abs", "rel"): "EARLY_STOPPING.MIN_DELTA_MODE",
    ("auto", "max", "min"): "CHECKPOINT.BEST_MODE EARLY_STOPPING.MODE",
    ("", "highest", "high", "medium"): "FLOAT32_PRECISION",
    ("DEBUG", "INFO", "WARNING", "ERROR"): "LOG.LEVEL",
    ("", "fp16", "bf16"): "MODEL.DDP.COMPRESSION",
    ("float16", "bfloat16"): "SOLVER.AMP.PRECISION",
    ("value", "norm", "full_model"): "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
    (1, 2): "VERSION",  # 2: detectron2's; its keys mean the same here
}
"""An interval of numbers, or values -> the keys that accept them, see
`trainkit.config.checks.check_accepted`."""


def get_cfg() -> CN:
    """A new copy of the defaults, those of projects too, which you may change."""
    return _defaults_with(find_plugins()).clone()


def core_defaults() -> CN:
    """A new copy of the defaults of trainkit's own keys, without those of projects."""
    return _C.clone()


@functools.cache
def _defaults_with(plugins: Plugins) -> CN:
    cfg = core_defaults()
    for plugin in plugins.each:
        _add_keys(cfg, keys_of(plugin), "", plugins)
    mark_as_defaults(cfg, MEANT_IF_SET)
    for plugin in plugins.each:
        mark_keys_of_projects(cfg, keys_of(plugin))
    return cfg


@functools.cache
def keys_of(plugin: Plugin) -> CN:
    """A config that has only the keys that ``plugin`` adds to those of trainkit; do not change it.

    Raises ConfigError if it changes a key of trainkit, or if its ``add_config`` fails.
    """
    cfg = core_defaults()
    try:
        plugin.add_config(cfg)
    except Exception as error:  # it may raise anything
        raise ConfigError(
            f"add_config of the plug-in {plugin.module} fails: {type(error).__name__}: {error}; "
            "correct it, or remove the package"
        ) from error
    return _added_keys(cfg, _C, "", plugin)


def _added_keys(node: CN, known: CN, prefix: str, plugin: Plugin) -> CN:
    added = CN()
    for name, value in node.items():
        if name not in known:
            added[name] = value
        elif isinstance(value, CN) and isinstance(known[name], CN):
            below = _added_keys(value, known[name], f"{prefix}{name}.", plugin)
            if below:
                added[name] = below
        elif value != known[name]:
            raise ConfigError(
                f"the plug-in {plugin.module} changes {prefix}{name}, a key of trainkit; "
                "let its add_config add keys with other names"
            )
    return added


def _add_keys(cfg: CN, keys: CN, prefix: str, plugins: Plugins) -> None:
    """Raises ConfigError if one of them is there already."""
    for name, value in keys.items():
        key = f"{prefix}{name}"
        if name not in cfg:
            cfg[name] = copy.deepcopy(value)
        elif isinstance(value, CN) and isinstance(cfg[name], CN):
            _add_keys(cfg[name], value, f"{key}.", plugins)
        else:
            both = [plugin.module for plugin in plugins.each if _has_key(plugin, key)]
            raise ConfigError(
                f"{' and '.join(both)} both have the key {key}; remove one of them, or rename the "
                "key there"
            )


def _has_key(plugin: Plugin, key: str) -> bool:
    settings = changed_settings(keys_of(plugin), CN())
    return any(f"{name}.".startswith(f"{key}.") for name, _ in settings)
