"""What this project brings to trainkit."""

from trainkit.config import CfgNode
from trainkit.config.checks import check_accepted, check_conflicts
from trainkit.utils.periods import parse_time

NAMES = {
    "EMAHook": "trainkit.projects.hooks.averaging",
    "PreciseBN": "trainkit.projects.hooks.batch_norm",
    "SyncBuffers": "trainkit.projects.hooks.batch_norm",
    "CopyAhead": "trainkit.projects.hooks.data",
    "SamplerSeed": "trainkit.projects.hooks.data",
    "is_due_epoch": "trainkit.projects.hooks.data",
    "AccumulationSchedule": "trainkit.projects.hooks.gradients",
    "CheckFiniteLoss": "trainkit.projects.hooks.gradients",
    "Freeze": "trainkit.projects.hooks.gradients",
    "GradNorm": "trainkit.projects.hooks.gradients",
    "UnusedParameters": "trainkit.projects.hooks.gradients",
    "ParamScheduler": "trainkit.projects.hooks.param_scheduler",
    "ReduceOnPlateau": "trainkit.projects.hooks.param_scheduler",
    "AutogradProfiler": "trainkit.projects.hooks.profiler",
    "EmptyCache": "trainkit.projects.hooks.profiler",
    "GarbageCollection": "trainkit.projects.hooks.profiler",
    "MemorySnapshot": "trainkit.projects.hooks.profiler",
    "TorchMemoryStats": "trainkit.projects.hooks.profiler",
    "TorchProfiler": "trainkit.projects.hooks.profiler",
    "BestCheckpoints": "trainkit.projects.hooks.publish_weights",
    "PublishWeights": "trainkit.projects.hooks.publish_weights",
    "RuntimeInfo": "trainkit.projects.hooks.runtime_info",
    "Throughput": "trainkit.projects.hooks.runtime_info",
    "TimeLimit": "trainkit.projects.hooks.time_limit",
    "VISUALIZER_REGISTRY": "trainkit.projects.hooks.visualization",
    "VisualizationHook": "trainkit.projects.hooks.visualization",
}
LENDS = {"trainkit.engine": [*NAMES], "trainkit.engine.hooks": [*NAMES]}
RUN_HOOKS = ["CopyAhead", "SamplerSeed"]


def add_config(cfg: CfgNode) -> None:
    # 3: keep the 3 best also as model_best_<iteration>. 1: only model_best.
    cfg.CHECKPOINT.BEST_TO_KEEP = 1
    # "model" or "ema": at the end, write files of only these weights (final and best).
    cfg.CHECKPOINT.PUBLISH = ""
    # The format of these files: "pth", or "safetensors" (needs that package).
    cfg.CHECKPOINT.PUBLISH_FORMAT = "pth"
    # "23h", "1d 12h": stop and save the run after this time of training. "": no limit.
    cfg.MAX_TIME = ""
    # [[1000, 4]]: 4 times as many from iteration 1000 on. Without epochs ("3ep").
    cfg.SOLVER.ACCUMULATION_FACTORS = []
    cfg.TEST.PRECISE_BN = CfgNode()
    # True: compute batch norm statistics before each evaluation but EVAL_AT_START.
    cfg.TEST.PRECISE_BN.ENABLED = False
    # The number of batches for these statistics.
    cfg.TEST.PRECISE_BN.NUM_ITER = 200


def check(cfg: CfgNode) -> None:
    check_accepted(cfg, {("", "model", "ema"): "CHECKPOINT.PUBLISH"})
    if cfg.CHECKPOINT.BEST_METRIC:
        check_accepted(cfg, {"[1, inf)": "CHECKPOINT.BEST_TO_KEEP"})
    if cfg.CHECKPOINT.PUBLISH:
        check_accepted(cfg, {("pth", "safetensors"): "CHECKPOINT.PUBLISH_FORMAT"})
    if cfg.TEST.PRECISE_BN.ENABLED:
        check_accepted(cfg, {"[1, inf)": "TEST.PRECISE_BN.NUM_ITER"})
    if cfg.MAX_TIME:
        parse_time(cfg.MAX_TIME, "MAX_TIME")
    check_conflicts(
        cfg,
        [("SOLVER.LOGICAL_RANKS", "TEST.PRECISE_BN.ENABLED", "it depends on the number of ranks")],
    )


def prepare(cfg: CfgNode) -> None:
    from trainkit.engine.hooks.checkpoint import best_file_prefixes

    kept = cfg.CHECKPOINT.BEST_TO_KEEP
    switches = {
        "PreciseBN": cfg.TEST.PRECISE_BN.ENABLED,
        "TimeLimit": cfg.MAX_TIME,
        "AccumulationSchedule": cfg.SOLVER.ACCUMULATION_FACTORS,
        "PublishWeights": cfg.CHECKPOINT.PUBLISH,
    }
    named = [entry.get("NAME") for entry in cfg.HOOKS if isinstance(entry, dict)]
    added = [{"NAME": name} for name, is_on in switches.items() if is_on and name not in named]
    if cfg.CHECKPOINT.BEST_METRIC and kept > 1:
        for metric, prefix in best_file_prefixes(cfg.CHECKPOINT.BEST_METRIC).items():
            entry = {
                "NAME": "BestCheckpoints",
                "NUM_TO_KEEP": kept,
                "VAL_METRIC": metric,
                "FILE_PREFIX": prefix,
            }
            added.append(entry)
        cfg.CHECKPOINT.BEST_METRIC = None
        cfg.CHECKPOINT.BEST_TO_KEEP = 1
    cfg.HOOKS = [*cfg.HOOKS, *added]
