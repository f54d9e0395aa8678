"""The global random state of Python, NumPy and torch."""

import logging
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainkit.utils import comm
from trainkit.utils.env import seed_all_rng

_logger = logging.getLogger(__name__)


def get_rng_state() -> dict[str, Any]:
    """The state of every global generator of this process, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # reading the state would initialize CUDA
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in _cuda_devices()]
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state from ``get_rng_state``; states of missing devices are ignored with a warning."""
    if "seed" in state:
        seed_all_rng(state["seed"])
        return
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    of_cuda, has_mps = state.get("cuda", []), torch.backends.mps.is_available()
    for device, cuda_state in zip(_cuda_devices() if of_cuda else [], of_cuda, strict=False):
        torch.cuda.set_rng_state(cuda_state, device)
    if "mps" in state and has_mps:
        torch.mps.set_rng_state(state["mps"])
    if len(of_cuda) > torch.cuda.device_count() or ("mps" in state and not has_mps):
        _logger.warning("The random state of devices that this machine does not have is ignored")


def _cuda_devices() -> list[int]:
    """All CUDA devices, the current one first, since its number may differ in a resumed run."""
    return sorted(range(torch.cuda.device_count()), key=lambda device: device != torch.cuda.current_device())


def rng_state_for_rank(state: dict[str, Any] | None, saved: int, present: int, iteration: int) -> dict[str, Any] | None:
    """The state for `set_rng_state`: the saved one; a derived one if there were ``saved`` ranks, not ``present``."""
    if state is None or saved == present:
        return state
    text = "The checkpoint is of %s ranks, now there are %d: each takes the state of rank 0, and a new random state"
    _logger.info(text, saved, present)
    entropy, key = zlib.crc32(repr(state["python"]).encode()), (comm.get_data_rank(), iteration)
    return {"seed": int(np.random.SeedSequence(entropy, spawn_key=key).generate_state(1, np.uint32)[0])}


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Context that at its end restores the global random state of this process and of the devices that it uses."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
