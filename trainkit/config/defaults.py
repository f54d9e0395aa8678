"""Every config key with its default; keys that detectron2 has keep its names.

Keys in ``trainkit.config.lengths.LENGTH_KEYS`` take iterations (``500``) or epochs (``"3ep"``).
"""

from trainkit.config.config import CfgNode as CN

_C = CN()
_C.VERSION = 1
_C.OUTPUT_DIR = "./output"
_C.SEED = -1  # -1: drawn at random and logged
_C.IMPORTS = []  # dotted module names, imported when building: where models, datasets and hooks register themselves
_C.CUDNN_BENCHMARK = False
_C.FLOAT32_PRECISION = ""  # "", "highest", "high" or "medium": torch.set_float32_matmul_precision
_C.VIS_PERIOD = 0

# ---------------------------------------------------------------------------- model
_C.MODEL = CN(new_allowed=True)  # a model's own keys go beside these
_C.MODEL.NAME = ""  # in MODEL_REGISTRY
_C.MODEL.DEVICE = "auto"  # CUDA, then MPS, then CPU; or a torch device such as "cuda:1"
_C.MODEL.WEIGHTS = ""  # a checkpoint file; only its model is loaded, unless a run is resumed

# ---------------------------------------------------------------------------- data
_C.INPUT = CN(new_allowed=True)
_C.INPUT.TRAIN_TRANSFORM = ""  # in TRANSFORM_REGISTRY; "": samples as they are
_C.INPUT.TEST_TRANSFORM = ""

_C.DATASETS = CN()
_C.DATASETS.TRAIN = ()  # names in DatasetCatalog; several are concatenated
_C.DATASETS.VAL = ()  # evaluated every TEST.EVAL_PERIOD; feeds best checkpoint and early stopping; (): TEST
_C.DATASETS.TEST = ()  # evaluated at the end and by --eval-only

_C.DATALOADER = CN()
_C.DATALOADER.NUM_WORKERS = 4
_C.DATALOADER.PREFETCH_FACTOR = 2
_C.DATALOADER.PERSISTENT_WORKERS = False
_C.DATALOADER.COLLATE = "default"  # "default": torch's default_collate; "list": a batch is the list of its samples
_C.DATALOADER.SAMPLER_TRAIN = "TrainingSampler"  # RandomSubsetTrainingSampler, RepeatFactorTrainingSampler
_C.DATALOADER.RANDOM_SUBSET_RATIO = 1.0
_C.DATALOADER.REPEAT_THRESHOLD = 0.0
_C.DATALOADER.REPEAT_SQRT = True

# ---------------------------------------------------------------------------- optimization
_C.SOLVER = CN()
_C.SOLVER.OPTIMIZER = CN(new_allowed=True)  # every constructor argument of the optimizer, in upper case
_C.SOLVER.OPTIMIZER.NAME = "SGD"  # a class of torch.optim, or in OPTIMIZER_REGISTRY
_C.SOLVER.MAX_ITER = 40000
_C.SOLVER.IMS_PER_BATCH = 16  # samples per micro-batch over all ranks
_C.SOLVER.ACCUMULATION_STEPS = 1  # micro-batches per iteration
_C.SOLVER.REFERENCE_WORLD_SIZE = 0  # see DefaultTrainer.auto_scale_workers
_C.SOLVER.BASE_LR = 0.001
_C.SOLVER.BASE_LR_END = 0.0
_C.SOLVER.MOMENTUM = 0.9  # SGD
_C.SOLVER.NESTEROV = False  # SGD
_C.SOLVER.WEIGHT_DECAY = 0.0001
_C.SOLVER.WEIGHT_DECAY_NORM = 0.0
_C.SOLVER.WEIGHT_DECAY_BIAS = None  # None: WEIGHT_DECAY
_C.SOLVER.BIAS_LR_FACTOR = 1.0
_C.SOLVER.LR_SCHEDULER_NAME = "WarmupMultiStepLR"  # WarmupCosineLR, WarmupStepWithFixedGammaLR
_C.SOLVER.GAMMA = 0.1
_C.SOLVER.STEPS = (30000,)
_C.SOLVER.NUM_DECAYS = 3
_C.SOLVER.WARMUP_FACTOR = 1.0 / 1000
_C.SOLVER.WARMUP_ITERS = 1000
_C.SOLVER.WARMUP_METHOD = "linear"  # or "constant"
_C.SOLVER.RESCALE_INTERVAL = False
_C.SOLVER.CHECKPOINT_PERIOD = 5000
_C.SOLVER.ZERO_GRAD_BEFORE_FORWARD = False
_C.SOLVER.CLIP_GRADIENTS = CN()
_C.SOLVER.CLIP_GRADIENTS.ENABLED = False
_C.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = "value"  # "value" and "norm": each parameter; "full_model": the norm of all
_C.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = 1.0
_C.SOLVER.CLIP_GRADIENTS.NORM_TYPE = 2.0
_C.SOLVER.AMP = CN()
_C.SOLVER.AMP.ENABLED = False
_C.SOLVER.AMP.PRECISION = "float16"  # "float16" (with a grad scaler) or "bfloat16" (without)

# ---------------------------------------------------------------------------- checkpoints, evaluation, logs
_C.CHECKPOINT = CN()
_C.CHECKPOINT.MAX_TO_KEEP = None  # None: keep all; model_final and model_best are never rotated away
_C.CHECKPOINT.BEST_METRIC = ""  # such as "classification/top1"; "": no best checkpoint
_C.CHECKPOINT.BEST_MODE = "max"

_C.TEST = CN()
_C.TEST.EVALUATORS = []  # names in EVALUATOR_REGISTRY, used by DefaultTrainer.build_evaluator
_C.TEST.IMS_PER_BATCH = 64  # samples per rank
_C.TEST.MAX_BATCHES = 0  # evaluate at most so many batches per rank; 0: all
_C.TEST.EVAL_PERIOD = 0  # 0: only at the end
_C.TEST.EVAL_AT_START = False  # finds a broken evaluator before hour ten
_C.TEST.EXPECTED_RESULTS = []  # [[task, metric, value, tolerance], ...]
_C.TEST.PRECISE_BN = CN()
_C.TEST.PRECISE_BN.ENABLED = False
_C.TEST.PRECISE_BN.NUM_ITER = 200

_C.EARLY_STOPPING = CN()
_C.EARLY_STOPPING.METRIC = ""  # such as "classification/top1"; "": no early stopping
_C.EARLY_STOPPING.MODE = "max"
_C.EARLY_STOPPING.PATIENCE = 3  # evaluations without an improvement of more than MIN_DELTA
_C.EARLY_STOPPING.MIN_DELTA = 0.0

_C.LOG = CN()
_C.LOG.PERIOD = 20
_C.LOG.WINDOW = 20  # iterations that are smoothed by their median
_C.LOG.GATHER_PERIOD = 1  # average the losses over ranks every so many iterations
_C.LOG.ASYNC = None  # None: on an accelerator only
_C.LOG.WRITERS = ["console", "json", "tensorboard"]


def get_cfg() -> CN:
    """A fresh copy of the defaults, free to be changed."""
    return _C.clone()
