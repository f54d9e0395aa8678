"""The config and the weights of a finished run."""

import os

from trainkit.checkpoint.folder import candidates, choose
from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.engine.defaults.folders import checkpoint_dir
from trainkit.engine.hooks.checkpoint import best_file_prefixes


def cfg_of_run(
    run: str | None, config_file: str = "", weights: str = "", opts: list[str] | None = None
) -> CfgNode:
    """The config of a run or of a file, with MODEL.WEIGHTS.

    Args:
        run: the folder of a run; None: the config is that of ``config_file``.
        weights: a checkpoint; "": the best one of the run, or else its last one.
        opts: keys and values that change the config.

    Raises:
        ConfigError: there is no config, or there are no weights.
        trainkit.checkpoint.CheckpointError: none of the run's checkpoints is intact.
    """
    cfg = get_cfg()
    if run is None and not config_file:
        raise ConfigError("name the folder of a run, or a --config-file")
    if run is not None and not os.path.isdir(run):
        raise ConfigError(
            f"{run!r} is not a folder; name the folder of a run, or a --config-file and --weights"
        )
    cfg.merge_from_file(config_file or os.path.join(run or "", "config.yaml"))
    if run is not None:
        cfg.OUTPUT_DIR = run  # the folder may have been moved
    cfg.merge_from_list(opts or [])
    if not weights and run is None:
        weights = cfg.MODEL.WEIGHTS
    if not weights:
        weights = _weights_of_run(cfg)
    if cfg.CHECKPOINT.get("TRAINABLE_ONLY"):
        _add_frozen_weights(cfg)
    cfg.MODEL.WEIGHTS = weights
    cfg.freeze()
    return cfg


def _weights_of_run(cfg: CfgNode) -> str:
    folder = checkpoint_dir(cfg)
    for prefix in best_file_prefixes(cfg.CHECKPOINT.BEST_METRIC).values():
        path = os.path.join(folder, f"{prefix}.pth")
        if os.path.exists(path):
            return path
    path = choose(candidates(folder))[0]
    if not path:
        raise ConfigError(f"there is no checkpoint in {folder!r}; name one with --weights")
    return path


def _add_frozen_weights(cfg: CfgNode) -> None:
    """Let the weights that the checkpoint leaves out come from where the run has taken them."""
    names = [entry.get("NAME") for entry in cfg.HOOKS]
    if "FrozenWeights" not in names:
        hook = {"NAME": "FrozenWeights", "WEIGHTS": cfg.MODEL.WEIGHTS}
        cfg.HOOKS = [*cfg.HOOKS, hook]
