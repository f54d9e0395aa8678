"""A config for programs that do not pass theirs on."""

from trainkit.config import CfgNode

global_cfg = CfgNode()
"""Empty until `set_global_cfg`."""


def set_global_cfg(cfg: CfgNode) -> None:
    """Replace the content of ``global_cfg`` by the keys of ``cfg``."""
    global_cfg.clear()
    global_cfg.update(cfg)
