"""What `default_setup` reads from a `LazyConfig`."""

import os
from typing import Any

from trainkit.projects.lazy.config import to_yaml

from trainkit.config import CfgNode, ConfigError, get_cfg


def to_cfg(cfg: Any, args: Any) -> tuple[CfgNode, str]:
    """The settings in ``cfg.train``, and the text that `LazyConfig.save` writes.

    ``cfg`` is changed: ``train.output_dir`` becomes absolute, and with ``--num-gpus 0`` the device is the CPU.

    Raises:
        ConfigError: there is no ``train.output_dir``, or it is an address.
    """
    if getattr(args, "num_gpus", 1) == 0:
        cfg.train.device = "cpu"
    train, settings = cfg.get("train", {}), get_cfg()
    if not train.get("output_dir"):
        raise ConfigError(f"train.output_dir is missing in the config, which has {', '.join(map(str, cfg))}; set it")
    if "://" in train.output_dir:
        raise ConfigError(f"train.output_dir is {train.output_dir!r}; only a config of get_cfg accepts an address")
    text = to_yaml(cfg)
    train.output_dir = os.path.abspath(os.path.expanduser(train.output_dir))
    settings.OUTPUT_DIR, settings.MODEL.WEIGHTS = train.output_dir, train.get("init_checkpoint") or ""
    settings.CUDNN_BENCHMARK = bool(train.get("cudnn_benchmark"))
    seed = train.get("seed")
    settings.SEED = -1 if seed is None else seed
    return settings, text
