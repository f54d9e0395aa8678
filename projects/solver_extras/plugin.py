"""What this project brings to trainkit."""

from trainkit.config import CfgNode, ConfigError, choose, get_cfg
from trainkit.config.checks import KEYS_OF_SCHEDULE, check_accepted
from trainkit.config.projects import has_changes

NAMES = {
    "CombinedOptimizer": "trainkit.projects.solver_extras.combined",
    "LARS": "trainkit.projects.solver_extras.combined",
    "combined_optimizer": "trainkit.projects.solver_extras.combined",
    "LAYER_DEPTH_REGISTRY": "trainkit.projects.solver_extras.layer_decay",
    "build_layer_decay": "trainkit.projects.solver_extras.layer_decay",
    "ParamRules": "trainkit.projects.solver_extras.rules",
    "build_param_groups": "trainkit.projects.solver_extras.rules",
    "describe_param_groups": "trainkit.projects.solver_extras.rules",
    "groups_by_rules": "trainkit.projects.solver_extras.rules",
    "SCHEDULE_REGISTRY": "trainkit.projects.solver_extras.schedules",
    "build_schedule": "trainkit.projects.solver_extras.schedules",
    "listed_schedules": "trainkit.projects.solver_extras.schedules",
    "schedules": "trainkit.projects.solver_extras.schedules",
}
LENDS = {
    "trainkit.solver": [
        "CombinedOptimizer",
        "LARS",
        "LAYER_DEPTH_REGISTRY",
        "ParamRules",
        "SCHEDULE_REGISTRY",
        "build_layer_decay",
        "build_param_groups",
        "build_schedule",
        "describe_param_groups",
        "schedules",
    ]
}
LENGTH_LISTS = ["SOLVER.SCHEDULES"]

_GROUPS = "SOLVER.PARAM_GROUPS"


def add_config(cfg: CfgNode) -> None:
    # [{NAME: Linear, END: 500}, ...], see build_schedule. []: SOLVER.LR_SCHEDULER_NAME.
    cfg.SOLVER.SCHEDULES = []
    # Several optimizers: [{NAME: AdamW, PARAMS: ["*bias"]}, {NAME: Muon, LR: 0.02}].
    cfg.SOLVER.OPTIMIZERS = []
    # Numbers that multiply learning rates and weight decays.
    cfg.SOLVER.PARAM_GROUPS = CfgNode()
    # A function in PARAM_GROUP_REGISTRY that replaces all of the following keys.
    cfg.SOLVER.PARAM_GROUPS.BUILDER = ""
    # For norm layers. From NORM to FLAT only the first fit counts.
    cfg.SOLVER.PARAM_GROUPS.NORM_LR_FACTOR = None
    # Multiplies WEIGHT_DECAY_NORM.
    cfg.SOLVER.PARAM_GROUPS.NORM_DECAY_FACTOR = None
    # Multiplies SOLVER.BIAS_LR_FACTOR, but not in normalization layers.
    cfg.SOLVER.PARAM_GROUPS.BIAS_LR_FACTOR = None
    # Multiplies WEIGHT_DECAY_BIAS.
    cfg.SOLVER.PARAM_GROUPS.BIAS_DECAY_FACTOR = None
    # For convolutions with as many groups as input channels.
    cfg.SOLVER.PARAM_GROUPS.DWCONV_LR_FACTOR = None
    # For the same convolutions.
    cfg.SOLVER.PARAM_GROUPS.DWCONV_DECAY_FACTOR = None
    # For nn.Embedding and nn.EmbeddingBag.
    cfg.SOLVER.PARAM_GROUPS.EMBEDDING_LR_FACTOR = None
    # For nn.Embedding and nn.EmbeddingBag.
    cfg.SOLVER.PARAM_GROUPS.EMBEDDING_DECAY_FACTOR = None
    # For parameters with one dimension.
    cfg.SOLVER.PARAM_GROUPS.FLAT_LR_FACTOR = None
    # For parameters with one dimension.
    cfg.SOLVER.PARAM_GROUPS.FLAT_DECAY_FACTOR = None
    # [{KEY: part of names, LR_FACTOR: 0.1, DECAY_FACTOR: 0, TAG: x}, ...]
    cfg.SOLVER.PARAM_GROUPS.CUSTOM_KEYS = []
    # The matching key that counts, or "shortest". "exact": whole names.
    cfg.SOLVER.PARAM_GROUPS.KEY_MATCH = "longest"
    # True: no other factors apply to parameters with a custom key.
    cfg.SOLVER.PARAM_GROUPS.CUSTOM_KEYS_ONLY = False
    # Earlier layers learn more slowly, see build_layer_decay.
    cfg.SOLVER.PARAM_GROUPS.LAYER_DECAY = CfgNode()
    # The factor from one layer to the layer before it. 1: off.
    cfg.SOLVER.PARAM_GROUPS.LAYER_DECAY.RATE = 1.0
    # "vit", "swin", ..., "model", or a name in LAYER_DEPTH_REGISTRY
    cfg.SOLVER.PARAM_GROUPS.LAYER_DECAY.SCHEME = ""
    # "vit", "beit", "mae": number of blocks. "convnext": 6 or 12.
    cfg.SOLVER.PARAM_GROUPS.LAYER_DECAY.NUM_LAYERS = 0
    # "swin", "mixmim": the number of blocks in each stage.
    cfg.SOLVER.PARAM_GROUPS.LAYER_DECAY.DEPTHS = ()
    # The backbone's name prefix. None: "backbone." if there is one.
    cfg.SOLVER.PARAM_GROUPS.LAYER_DECAY.PREFIX = None


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if a value is wrong; `ParamRules` and `build_layer_decay` find other mistakes."""
    from trainkit.solver.build import base_lr

    # another builder replaces the factors
    if not cfg.SOLVER.PARAM_GROUPS.BUILDER:
        factors = [f"{_GROUPS}.{key}" for key in cfg.SOLVER.PARAM_GROUPS if key.endswith("_FACTOR")]
        check_accepted(
            cfg, {"[0, inf)": " ".join(factors), "(0, 1]": f"{_GROUPS}.LAYER_DECAY.RATE"}
        )
    if cfg.SOLVER.OPTIMIZERS and base_lr(cfg.SOLVER)[0] == "SOLVER.OPTIMIZER.LR":
        raise ConfigError(
            "SOLVER.OPTIMIZERS and SOLVER.OPTIMIZER.LR are both set; give each of OPTIMIZERS its LR"
        )


def unused_keys(cfg: CfgNode) -> list[str]:
    return KEYS_OF_SCHEDULE if cfg.SOLVER.SCHEDULES else []


def prepare(cfg: CfgNode) -> None:
    if cfg.SOLVER.SCHEDULES:
        choose(cfg, "SOLVER.LR_SCHEDULER_BUILDER", "listed_schedules", "SOLVER.SCHEDULES")
    if cfg.SOLVER.OPTIMIZERS:
        choose(cfg, "SOLVER.OPTIMIZER_BUILDER", "combined_optimizer", "SOLVER.OPTIMIZERS")
    if has_changes(cfg.SOLVER.PARAM_GROUPS, get_cfg().SOLVER.PARAM_GROUPS):
        builder = cfg.SOLVER.PARAM_GROUPS.BUILDER or "groups_by_rules"
        choose(cfg, "SOLVER.PARAM_GROUP_BUILDER", builder, _GROUPS)
