"""Every config key with its default; keys that detectron2 has keep its names.

Keys in ``trainkit.config.lengths.LENGTH_KEYS`` take iterations (``500``) or epochs (``"3ep"``).
"""

from trainkit.config.config import CfgNode as CN

_C = CN()
_C.VERSION = 1  # of this set of keys
_C.OUTPUT_DIR = "./output"  # the folder of the run; a new run moves what an earlier one left there into previous_<n>
_C.SEED = -1  # -1: drawn at random and logged
_C.IMPORTS = []  # dotted module names, imported when building: where models, datasets and hooks register themselves
_C.CUDNN_BENCHMARK = False  # let cuDNN try its kernels and take the fastest
_C.DETERMINISTIC = False  # kernels that give the same bits each time, so that a run on a GPU is resumed exactly; slower
_C.FLOAT32_PRECISION = ""  # "", "highest", "high" or "medium": torch.set_float32_matmul_precision
_C.STOP_CHECK_PERIOD = 20  # iterations after which at most all ranks have stopped when one was asked to
_C.VIS_PERIOD = 0  # for models that draw while they train; nothing else reads it
_C.FORK = CN()  # the run starts with the state of another one, as --fork says
_C.FORK.RUN = ""  # the folder of its checkpoints; "": it starts anew
_C.FORK.ITER = -1  # of the checkpoint, the last iteration that it has done; -1: the newest one
_C.FORK.CHANGES = []  # [key, value of that run, value of this run], written by --fork

# ---------------------------------------------------------------------------- model
_C.MODEL = CN(new_allowed=True)  # a model's own keys go beside these
_C.MODEL.NAME = ""  # in MODEL_REGISTRY
_C.MODEL.DEVICE = "auto"  # CUDA, then MPS, then CPU; or a torch device such as "cuda:1"
_C.MODEL.WEIGHTS = ""  # a checkpoint file; only its model is loaded, unless a run is resumed
_C.MODEL.CHANNELS_LAST = False  # the memory format of weights of convolutions, which are faster with it on GPUs
_C.MODEL.ACTIVATION_CHECKPOINT = CN()  # saves memory: what blocks compute is computed again in the backward pass
_C.MODEL.ACTIVATION_CHECKPOINT.BLOCKS = []  # class names of these blocks, such as ["Block"]; []: none
_C.MODEL.ACTIVATION_CHECKPOINT.KEEP = []  # operations whose results are kept all the same, such as ["mm", "addmm"]
_C.MODEL.COMPILE = CN()  # torch.compile; --eval-only runs the model as it is
_C.MODEL.COMPILE.ENABLED = False  # compile the model
_C.MODEL.COMPILE.BACKEND = "inductor"  # of torch.compile
_C.MODEL.COMPILE.MODE = "default"  # "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
_C.MODEL.COMPILE.FULLGRAPH = False  # True: an error where a part of the model cannot be compiled
_C.MODEL.COMPILE.DYNAMIC = None  # so that it takes None
_C.MODEL.COMPILE.DYNAMIC = False  # kernels for shapes that vary; None: for those that have varied so far
_C.MODEL.PARALLEL = "ddp"  # or "fsdp": each of several processes holds a part of the model
_C.MODEL.FSDP = CN()  # fully_shard of torch
_C.MODEL.FSDP.BLOCKS = []  # class names of what is gathered together, such as ["Block"]; []: what ModuleLists hold
_C.MODEL.FSDP.MESH = []  # [replicate, shard]: groups of ranks that shard the model; []: all ranks are one
_C.MODEL.FSDP.PARAM_DTYPE = ""  # of the computation: "bfloat16", "float16", "float32"; "": that of the parameters
_C.MODEL.FSDP.REDUCE_DTYPE = ""  # in which gradients are averaged; "": that of the computation
_C.MODEL.FSDP.RESHARD_AFTER_FORWARD = True  # False: more memory, less traffic
_C.MODEL.FSDP.META_INIT = False  # only rank 0 builds the weights, in host memory, and the others take theirs from it
_C.MODEL.DDP = CN()  # DistributedDataParallel, with several processes
_C.MODEL.DDP.BROADCAST_BUFFERS = False  # give all ranks the buffers of rank 0 before each forward pass
_C.MODEL.DDP.FIND_UNUSED_PARAMETERS = False  # parameters may get no gradient; costs a look at the graph in each step
_C.MODEL.DDP.GRADIENT_AS_BUCKET_VIEW = False  # saves memory as large as the gradients
_C.MODEL.DDP.STATIC_GRAPH = False  # each step uses the same parameters in the same way
_C.MODEL.DDP.COMPRESSION = ""  # "fp16" or "bf16": of the gradients that are exchanged; "bf16" needs CUDA and NCCL

# ---------------------------------------------------------------------------- data
_C.INPUT = CN(new_allowed=True)
_C.INPUT.TRAIN_TRANSFORM = ""  # in TRANSFORM_REGISTRY; "": samples as they are
_C.INPUT.TEST_TRANSFORM = ""  # likewise, of the samples of VAL and TEST

_C.DATASETS = CN()
_C.DATASETS.TRAIN = ()  # names in DatasetCatalog; several are concatenated
_C.DATASETS.VAL = ()  # evaluated every TEST.EVAL_PERIOD; feeds best checkpoint and early stopping; (): TEST
_C.DATASETS.TEST = ()  # evaluated at the end and by --eval-only

_C.DATALOADER = CN()
_C.DATALOADER.NUM_WORKERS = 4  # processes per rank that load samples; 0: the process of the rank does
_C.DATALOADER.TIMEOUT = 600.0  # seconds that a worker may take for the batch that is waited for; 0: for ever
_C.DATALOADER.PREFETCH_FACTOR = 2  # batches that each worker loads ahead
_C.DATALOADER.PERSISTENT_WORKERS = False  # keep workers from one pass over the data to the next
_C.DATALOADER.COLLATE = "default"  # "default": torch's default_collate; "list": a batch is the list of its samples
_C.DATALOADER.SAMPLER_TRAIN = "TrainingSampler"  # RandomSubsetTrainingSampler, RepeatFactorTrainingSampler
_C.DATALOADER.RANDOM_SUBSET_RATIO = 1.0  # RandomSubsetTrainingSampler: the part of the dataset
_C.DATALOADER.REPEAT_THRESHOLD = 0.0  # RepeatFactorTrainingSampler: rarer categories than this part are repeated
_C.DATALOADER.REPEAT_SQRT = True  # RepeatFactorTrainingSampler: by the square root of how much rarer
_C.DATALOADER.SKIP = []  # [[100, 120]]: leave out the batches of iterations 100 to 119, counted from 0
_C.DATALOADER.SKIP_MODE = "shift"  # the batches after them follow; "consume": iterations 100 to 119 make no step

# ---------------------------------------------------------------------------- optimization
_C.SOLVER = CN()
_C.SOLVER.OPTIMIZER = CN(new_allowed=True)  # constructor arguments in upper case; they win over the keys of SOLVER
_C.SOLVER.OPTIMIZER.NAME = "SGD"  # a class of torch.optim, or in OPTIMIZER_REGISTRY
_C.SOLVER.MAX_ITER = 40000  # length of the run; an iteration is an update
_C.SOLVER.IMS_PER_BATCH = 16  # samples per micro-batch over all ranks
_C.SOLVER.ACCUMULATION_STEPS = 1  # micro-batches per iteration
_C.SOLVER.REFERENCE_WORLD_SIZE = 0  # see DefaultTrainer.auto_scale_workers
_C.SOLVER.REFERENCE_BATCH_SIZE = 0  # samples per iteration for which BASE_LR is meant; 0: for those there are
_C.SOLVER.BASE_LR = 0.001  # learning rate after the warm-up, without factors
_C.SOLVER.BASE_LR_END = 0.0  # WarmupCosineLR: learning rate at the end
_C.SOLVER.MOMENTUM = 0.9  # of SGD, LARS, RMSprop, ...; where the optimizer takes none, another value is an error
_C.SOLVER.NESTEROV = False  # likewise
_C.SOLVER.WEIGHT_DECAY = 0.0001  # likewise; of weights
_C.SOLVER.WEIGHT_DECAY_NORM = 0.0  # of the parameters of normalization layers
_C.SOLVER.WEIGHT_DECAY_BIAS = None  # None: WEIGHT_DECAY
_C.SOLVER.BIAS_LR_FACTOR = 1.0  # on the learning rate of biases
_C.SOLVER.PARAM_GROUPS = CN()  # factors on the rates above; those that apply to a parameter are multiplied
_C.SOLVER.PARAM_GROUPS.BUILDER = ""  # a function in PARAM_GROUP_REGISTRY, instead of all that follows
_C.SOLVER.PARAM_GROUPS.NORM_LR_FACTOR = None  # of NORM, BIAS, ... the first that is given and describes a parameter
_C.SOLVER.PARAM_GROUPS.NORM_DECAY_FACTOR = None  # multiplies WEIGHT_DECAY_NORM
_C.SOLVER.PARAM_GROUPS.BIAS_LR_FACTOR = None  # multiplies SOLVER.BIAS_LR_FACTOR; not of norm layers
_C.SOLVER.PARAM_GROUPS.BIAS_DECAY_FACTOR = None  # multiplies WEIGHT_DECAY_BIAS
_C.SOLVER.PARAM_GROUPS.DWCONV_LR_FACTOR = None  # of convolutions with as many groups as channels
_C.SOLVER.PARAM_GROUPS.DWCONV_DECAY_FACTOR = None  # likewise
_C.SOLVER.PARAM_GROUPS.EMBEDDING_LR_FACTOR = None  # of nn.Embedding and nn.EmbeddingBag
_C.SOLVER.PARAM_GROUPS.EMBEDDING_DECAY_FACTOR = None  # likewise
_C.SOLVER.PARAM_GROUPS.FLAT_LR_FACTOR = None  # of parameters with one dimension
_C.SOLVER.PARAM_GROUPS.FLAT_DECAY_FACTOR = None  # likewise
_C.SOLVER.PARAM_GROUPS.CUSTOM_KEYS = []  # [{KEY: part of names, LR_FACTOR: 0.1, DECAY_FACTOR: 0.0, LARS_EXCLUDE: True}]
_C.SOLVER.PARAM_GROUPS.KEY_MATCH = "longest"  # or "shortest", or "exact" for whole names
_C.SOLVER.PARAM_GROUPS.CUSTOM_KEYS_ONLY = False  # a custom key switches all other factors off for its parameters
_C.SOLVER.PARAM_GROUPS.LAYER_DECAY = CN()  # see trainkit.solver.build_layer_decay
_C.SOLVER.PARAM_GROUPS.LAYER_DECAY.RATE = 1.0  # 1: off
_C.SOLVER.PARAM_GROUPS.LAYER_DECAY.SCHEME = ""  # "vit", "swin", "convnext", ..., "model", or a function's dotted name
_C.SOLVER.PARAM_GROUPS.LAYER_DECAY.NUM_LAYERS = 0  # "vit", "beit", "mae": blocks; "convnext": 6 or 12
_C.SOLVER.PARAM_GROUPS.LAYER_DECAY.DEPTHS = ()  # "swin", "mixmim": blocks of each stage
_C.SOLVER.PARAM_GROUPS.LAYER_DECAY.PREFIX = None  # of the backbone's names; None: "backbone." if there is one
_C.SOLVER.SCHEDULES = []  # {NAME: Linear, END: 500} and so on, see trainkit.solver.build_schedule; []: the keys below
_C.SOLVER.LR_SCHEDULER_NAME = "WarmupMultiStepLR"  # WarmupCosineLR, WarmupStepWithFixedGammaLR
_C.SOLVER.GAMMA = 0.1  # the factor at each of STEPS
_C.SOLVER.STEPS = (30000,)  # where the rate falls
_C.SOLVER.NUM_DECAYS = 3  # WarmupStepWithFixedGammaLR: how often the rate falls
_C.SOLVER.WARMUP_FACTOR = 1.0 / 1000  # on the learning rate at the start
_C.SOLVER.WARMUP_ITERS = 1000  # length of the warm-up
_C.SOLVER.WARMUP_METHOD = "linear"  # "constant", "exponential"
_C.SOLVER.RESCALE_INTERVAL = False  # True: the schedule starts after the warm-up; False: both start together
_C.SOLVER.CHECKPOINT_PERIOD = 5000  # from save to save; 0: only at the end
_C.SOLVER.ZERO_GRAD_BEFORE_FORWARD = False  # zero the gradients before the forward pass rather than after it
_C.SOLVER.CLIP_GRADIENTS = CN()
_C.SOLVER.CLIP_GRADIENTS.ENABLED = False  # clip gradients before each update
_C.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = "value"  # "value" and "norm": each parameter; "full_model": the norm of all
_C.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = 1.0  # the largest value, or norm
_C.SOLVER.CLIP_GRADIENTS.NORM_TYPE = 2.0  # also of the norm that is stored as grad_norm, whatever CLIP_TYPE
_C.SOLVER.NON_FINITE = CN()
_C.SOLVER.NON_FINITE.POLICY = "raise"  # a loss or gradient that is not finite: end the run; "skip" the update; "ignore"
_C.SOLVER.NON_FINITE.MAX_IN_ROW = 25  # skipped updates in a row that end the run, also those of float16
_C.SOLVER.GRAPH = CN()
_C.SOLVER.GRAPH.ENABLED = False  # CUDA: the step recorded and replayed; elsewhere: torch.compile. See GraphTrainer
_C.SOLVER.AMP = CN()
_C.SOLVER.AMP.ENABLED = False  # automatic mixed precision
_C.SOLVER.AMP.PRECISION = "float16"  # "float16" (with a grad scaler) or "bfloat16" (without)
_C.SOLVER.AMP.LOSS_SCALE = None  # so that it takes text and numbers
_C.SOLVER.AMP.LOSS_SCALE = "dynamic"  # for float16; a number: that scale, fixed
_C.SOLVER.AMP.INIT_SCALE = 65536.0  # with which a dynamic scale starts

# ---------------------------------------------------------------------------- checkpoints, evaluation, logs
_C.CHECKPOINT = CN()
_C.CHECKPOINT.DIR = ""  # "": OUTPUT_DIR
_C.CHECKPOINT.START = 0  # before the first save by SOLVER.CHECKPOINT_PERIOD, if not 0
_C.CHECKPOINT.SAVE_LAST = True  # model_final
_C.CHECKPOINT.ASYNC = False  # copy what is saved to host memory, and write it in a thread while training goes on
_C.CHECKPOINT.MAX_TO_KEEP = None  # None: keep all; model_final and model_best are never rotated away
_C.CHECKPOINT.BEST_METRIC = None  # such as "classification/top1", or a list of such; None: no best checkpoint
_C.CHECKPOINT.BEST_MODE = "auto"  # "max", "min"; "auto": by the name of the metric
_C.CHECKPOINT.PUBLISH = ""  # "model" or "ema": weights of model_final and the best files alone, at the end of the run

_C.HOOKS = []  # {NAME: EMAHook, DECAY: 0.999} and so on, see trainkit.engine.hooks.ConfiguredHooks

_C.TEST = CN()
_C.TEST.EVALUATORS = []  # names in EVALUATOR_REGISTRY, used by DefaultTrainer.build_evaluator
_C.TEST.IMS_PER_BATCH = 64  # samples per rank
_C.TEST.PERSISTENT_WORKERS = True  # keep workers from one evaluation by EVAL_PERIOD to the next; False: data change
_C.TEST.MAX_BATCHES = 0  # evaluate at most so many batches per rank; 0: all
_C.TEST.EVAL_PERIOD = 0  # 0: only at the end
_C.TEST.EVAL_START = 0  # the first of these evaluations, if not 0
_C.TEST.EVAL_AT_START = False  # finds a broken evaluator before hour ten
_C.TEST.EXPECTED_RESULTS = []  # [[task, metric, value, tolerance], ...]
_C.TEST.PRECISE_BN = CN()
_C.TEST.PRECISE_BN.ENABLED = False  # compute the statistics of batch norms anew before each evaluation
_C.TEST.PRECISE_BN.NUM_ITER = 200  # batches that are used for that

_C.EARLY_STOPPING = CN()
_C.EARLY_STOPPING.METRIC = ""  # such as "classification/top1"; "": no early stopping
_C.EARLY_STOPPING.MODE = "auto"  # as CHECKPOINT.BEST_MODE
_C.EARLY_STOPPING.PATIENCE = 3  # evaluations without an improvement of more than MIN_DELTA
_C.EARLY_STOPPING.MIN_DELTA = 0.0  # what is less counts as no improvement
_C.EARLY_STOPPING.THRESHOLD = None  # a number: stop as well when METRIC is better than it

_C.LOG = CN()
_C.LOG.PERIOD = 20  # iterations from one call of the writers to the next
_C.LOG.WINDOW = 20  # iterations that are smoothed by their median
_C.LOG.GATHER_PERIOD = 1  # store the losses every so many iterations; 1: several ranks exchange them per PERIOD
_C.LOG.ASYNC = None  # on an accelerator, store metrics in a worker thread; None: yes
_C.LOG.WRITERS = ["console", "json", "tensorboard"]  # those that show the scalars
_C.LOG.LEVEL = "INFO"  # the terminal shows lines from this level on: DEBUG, INFO, WARNING or ERROR; log.txt has all
_C.LOG.PROGRESS = True  # bars instead of lines where the output is a terminal or a notebook
_C.LOG.EVAL_AXIS = "iter"  # or "epoch": over what writers show the results of evaluations


def get_cfg() -> CN:
    """A fresh copy of the defaults, free to be changed."""
    return _C.clone()


global_cfg = CN()
"""For programs that do not pass their config on; empty until `set_global_cfg`."""


def set_global_cfg(cfg: CN) -> None:
    """Give ``global_cfg`` the keys of ``cfg``, instead of those it has."""
    global_cfg.clear()
    global_cfg.update(cfg)
