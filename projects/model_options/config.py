"""The config keys of this project."""

from torch import nn
from trainkit.projects.model_options.options import checkpoint_blocks, compile_model, use_channels_last

from trainkit.config import CfgNode
from trainkit.config.checks import check_accepted

_ACCEPTED = {
    (False, True, None): "MODEL.COMPILE.DYNAMIC",
    ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"): "MODEL.COMPILE.MODE",
}


def add_config(cfg: CfgNode) -> None:
    """Add the keys with their defaults."""
    cfg.MODEL.CHANNELS_LAST = False  # True: store convolution weights in torch's channels_last format, faster on GPUs.
    cfg.MODEL.ACTIVATION_CHECKPOINT = CfgNode()  # Saves memory: the backward pass computes some outputs again.
    cfg.MODEL.ACTIVATION_CHECKPOINT.BLOCKS = []  # The class names of these modules, such as ["Block"]. []: none.
    cfg.MODEL.COMPILE = CfgNode()  # torch.compile. --eval-only does not compile the model.
    cfg.MODEL.COMPILE.ENABLED = False  # True: compile the model.
    cfg.MODEL.COMPILE.BACKEND = "inductor"  # The backend of torch.compile.
    cfg.MODEL.COMPILE.MODE = "default"  # Or "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
    cfg.MODEL.COMPILE.FULLGRAPH = False  # True: raise an error if a part of the model cannot be compiled.
    cfg.MODEL.COMPILE.DYNAMIC = False  # False: compile for each shape. True: for any shape. None: torch decides.


def check(cfg: CfgNode) -> None:
    """Raises ConfigError if a value is not accepted."""
    check_accepted(cfg, _ACCEPTED)


def wrap_model(cfg: CfgNode, model: nn.Module) -> nn.Module:
    """Apply the options in place; names and values of the state stay."""
    if cfg.MODEL.CHANNELS_LAST:
        use_channels_last(model)
    checkpoint_blocks(cfg, model)
    if cfg.MODEL.COMPILE.ENABLED:
        compile_model(cfg, model)
    return model
