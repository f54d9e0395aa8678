"""Random number generators, the version of torch, and the signals that stop a run."""

import logging
import os
import random
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainkit.utils import comm

TORCH_VERSION: tuple[int, ...] = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""(major, minor) of torch."""

_logger = logging.getLogger(__name__)


def seed_all_rng(seed: int | None = None) -> int:
    """Seed Python, NumPy and torch with all its devices; return the seed, from 0 to 2**32 - 1.

    None draws one from the operating system and logs it.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
        _logger.info("Using the random seed %d", seed)
    random.seed(seed)
    np.random.seed(seed)  # raises ValueError if the seed is out of range
    torch.manual_seed(seed)
    return seed


def get_rng_state() -> dict[str, Any]:
    """The state of every global generator of this process, as tensors and plain values."""
    version, python_keys, next_gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    keys_as_tensor = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state = {
        # as a tensor: a file holds one record, not 625 objects
        "python": [version, torch.from_numpy(np.array(python_keys, np.int64)), next_gauss],
        "numpy": [kind, keys_as_tensor, *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # reading the state would initialize CUDA
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in _cuda_devices()]
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state of `get_rng_state`, as far as this machine has its devices.

    Or a state ``{"seed": seed}`` of `rng_state_for_rank`.
    """
    if "seed" in state:
        seed_all_rng(state["seed"])
        return
    random.setstate(_python_state(state))
    np.random.set_state(_numpy_state(state))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        for device, cuda_state in zip(_cuda_devices(), state["cuda"], strict=False):
            torch.cuda.set_rng_state(cuda_state, device)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def check_rng_state(state: dict[str, Any]) -> None:
    """Check that `set_rng_state` can restore this state; no generator is changed.

    Raises:
        Exception: of any type, it cannot.
    """
    if "seed" in state:
        np.random.SeedSequence(state["seed"])
        return
    random.Random().setstate(_python_state(state))
    np.random.RandomState().set_state(_numpy_state(state))
    torch.Generator().set_state(state["torch"])
    gpu_states = state.get("cuda", [])
    for gpu_state in gpu_states:
        _check_device_state(gpu_state)
    if "mps" in state:
        _check_device_state(state["mps"])
    if torch.cuda.is_initialized():
        size = len(torch.cuda.get_rng_state())
        for gpu_state in gpu_states:
            if len(gpu_state) != size:
                raise ValueError(f"the state of a GPU has {len(gpu_state)} bytes, not {size}")


def _check_device_state(state: torch.Tensor) -> None:
    if state.dtype != torch.uint8 or state.ndim != 1:
        raise ValueError(f"the state of a device has {state.dtype} of shape {[*state.shape]}")


def _python_state(state: dict[str, Any]) -> Any:
    version, keys, next_gauss = state["python"]
    return (version, tuple(keys.tolist()), next_gauss)


def _numpy_state(state: dict[str, Any]) -> Any:
    kind, keys, *rest = state["numpy"]
    return (kind, keys.numpy().astype(np.uint32), *rest)


def _cuda_devices() -> list[int]:
    """All CUDA devices, the current one first, since its number may differ in a resumed run."""
    count = torch.cuda.device_count()
    if count == 0:
        return []
    current = torch.cuda.current_device()
    others = [device for device in range(count) if device != current]
    return [current, *others]


def rng_state_for_rank(
    state: dict[str, Any] | None, saved: int, present: int, iteration: int
) -> dict[str, Any] | None:
    """The state to restore on this rank: ``state`` itself if there are as many ranks as before.

    Else it is ``{"seed": seed}``, with a seed made from ``state``, the rank and the iteration.

    Args:
        saved: the number of ranks when ``state`` was saved.
        present: the number of ranks now.
    """
    if state is None or saved == present:
        return state
    _logger.info(
        "The checkpoint is of %s ranks, now there are %d: each takes a new random state",
        saved,
        present,
    )
    entropy = zlib.crc32(repr(_python_state(state)).encode())
    sequence = np.random.SeedSequence(entropy, spawn_key=(comm.get_data_rank(), iteration))
    return {"seed": int(sequence.generate_state(1)[0])}


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Context that at its end restores the global random state of this process and its devices."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def stop_signals() -> set[signal.Signals]:
    """SIGTERM, SIGINT and SIGHUP (a closed terminal); in a SLURM job also SIGUSR1."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    if "SLURM_JOB_ID" in os.environ:
        signals.add(signal.SIGUSR1)
    return signals
