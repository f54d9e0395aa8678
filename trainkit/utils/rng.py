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
    """The state of every global generator of this process, as tensors and plain values.

    CUDA devices are included only if CUDA is already in use, because reading their state would initialize CUDA.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
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
    if cuda_states := state.get("cuda", []):
        for device, cuda_state in zip(_cuda_devices(), cuda_states, strict=False):
            torch.cuda.set_rng_state(cuda_state, device)
    if len(cuda_states) > torch.cuda.device_count():
        _logger.warning(
            "The random state is of %d CUDA devices, but there are %d here; the states of the others are ignored",
            len(cuda_states),
            torch.cuda.device_count(),
        )
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    elif "mps" in state:
        _logger.warning("The random state is of an MPS device, but there is none here; its state is ignored")


def _cuda_devices() -> list[int]:
    """All CUDA devices, the current one first, since its number may differ in a resumed run."""
    return sorted(range(torch.cuda.device_count()), key=lambda device: device != torch.cuda.current_device())


def rng_state_for_rank(state: dict[str, Any] | None, saved: int, present: int, iteration: int) -> dict[str, Any] | None:
    """The state for `set_rng_state`: the saved state; if ``saved`` and ``present`` differ, a state derived from it.

    Raises:
        KeyError: a generator is missing.
    """
    if state is None:
        return None
    if not {"python", "numpy", "torch"} <= state.keys():
        raise KeyError(f"the random state of a run must have python, numpy and torch, got {[*state]}")
    if saved == present:
        return state
    _logger.warning(
        "The checkpoint was written by %s processes, now there are %d: new random states are derived from the "
        "checkpoint, the rank and the iteration",
        saved,
        present,
    )
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
