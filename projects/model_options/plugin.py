"""What this project brings to trainkit."""

from typing import Any

from trainkit.config import CfgNode
from trainkit.config.checks import check_accepted

_ACCEPTED = {
    (False, True, None): "MODEL.COMPILE.DYNAMIC",
    (
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ): "MODEL.COMPILE.MODE",
}


def add_config(cfg: CfgNode) -> None:
    # True: store convolution weights in torch's channels_last format, faster on GPUs.
    cfg.MODEL.CHANNELS_LAST = False
    # Saves memory: the backward pass computes some outputs again.
    cfg.MODEL.ACTIVATION_CHECKPOINT = CfgNode()
    # The class names of these modules, such as ["Block"]. []: none.
    cfg.MODEL.ACTIVATION_CHECKPOINT.BLOCKS = []
    # torch.compile. --eval-only does not compile the model.
    cfg.MODEL.COMPILE = CfgNode()
    # True: compile the model.
    cfg.MODEL.COMPILE.ENABLED = False
    # The backend of torch.compile.
    cfg.MODEL.COMPILE.BACKEND = "inductor"
    # Or "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
    cfg.MODEL.COMPILE.MODE = "default"
    # True: raise an error if a part of the model cannot be compiled.
    cfg.MODEL.COMPILE.FULLGRAPH = False
    # False: compile for each shape. True: for any shape. None: torch decides.
    cfg.MODEL.COMPILE.DYNAMIC = False


def check(cfg: CfgNode) -> None:
    if cfg.MODEL.COMPILE.ENABLED:
        check_accepted(cfg, _ACCEPTED)


def wrap_model(cfg: CfgNode, model: Any) -> Any:
    from trainkit.projects.model_options.model import apply_options

    return apply_options(cfg, model)
