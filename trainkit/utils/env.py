"""The version of torch, seeds for all random number generators, and the signals that stop a run."""

import logging
import os
import random
import signal

import numpy as np
import torch

TORCH_VERSION: tuple[int, ...] = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""(major, minor) of torch."""

_logger = logging.getLogger(__name__)


def seed_all_rng(seed: int | None = None) -> int:
    """Seed Python, NumPy and torch with all its devices; return the seed.

    Args:
        seed: 0 <= seed < 2**32; None draws one from the operating system and logs it.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
        _logger.info("Using the random seed %d", seed)
    random.seed(seed)
    np.random.seed(seed)  # raises ValueError if the seed is out of range
    torch.manual_seed(seed)
    return seed


def stop_signals() -> set[signal.Signals]:
    """SIGTERM, SIGINT and SIGHUP (a closed terminal); in a SLURM job also SIGUSR1."""
    of_slurm = {signal.SIGUSR1} if "SLURM_JOB_ID" in os.environ else set()
    return {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *of_slurm}
