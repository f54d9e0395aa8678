"""Asynchronous saving: a format around a format."""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any

import torch
from torch import Tensor, nn
from trainkit.projects.async_save.host_copy import HostCopy

from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.file import Take
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat, make_format
from trainkit.utils.device import current_device_index, use_device

logger = logging.getLogger(__name__)


class StagedFormat(CheckpointFormat):
    """Copies a state to host memory, where a device is waited for once, and writes the copy in another format.

    Args:
        inner: writes the copy; None: the format of torch.save.
    """

    _snapshot = False  # whether a device copies the state first, see `HostCopy`

    def __init__(self, inner: CheckpointFormat | None = None) -> None:
        self._inner = inner or CheckpointFormat()
        self.collective = self._inner.collective
        # of the last copy: allocating takes longer than copying
        self._memory: dict[torch.device, list[Tensor]] = {}

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> HostCopy:
        copy = HostCopy(state, self._memory, self._inner, self._snapshot)
        self._memory = copy.memory
        return copy

    def write(self, state: HostCopy, path: str) -> None:
        """Write a copy; waits until it is complete."""
        self._inner.write(state.state(), path)

    def read(self, path: str) -> Any:
        return self._inner.read(path)

    def fill(
        self,
        state: dict[str, Any],
        path: str,
        model: nn.Module | None = None,
        wanted: Iterable[str] = ("",),
    ) -> dict[str, Any]:
        return self._inner.fill(state, path, model, wanted)

    def files(self, path: str) -> list[str]:
        return self._inner.files(path)

    def remove(self, path: str) -> None:
        self._inner.remove(path)


class AsyncFormat(StagedFormat):
    """Writes the copy in a thread, while training continues.

    There is one save at a time: the checkpointer waits for it before the next one, and before it reads the folder.
    """

    _snapshot = True

    def __init__(self, inner: CheckpointFormat | None = None) -> None:
        super().__init__(inner)
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def submit(self, save: Callable[[], None]) -> "futures.Future[None]":
        return self._thread.submit(_call, [save], current_device_index())


def _call(saves: list[Callable[[], None]], device_index: int | None) -> None:
    use_device(device_index)
    try:
        saves.pop()()
    except CheckpointError as error:
        text = str(error)
        logger.error("A checkpoint is not saved, training continues: %s", text)
    else:
        return
    # the error is kept until it is asked for; it must not keep the copy of the model alive, as its traceback would
    raise CheckpointError(text)


@FORMAT_REGISTRY.register()
def staged(model: nn.Module | None) -> CheckpointFormat:
    """The builder for CHECKPOINT.FORMAT: around the format of the model."""
    return StagedFormat(make_format("", model))


@FORMAT_REGISTRY.register()
def async_save(model: nn.Module | None) -> CheckpointFormat:
    """The builder for CHECKPOINT.FORMAT: around the format of the model."""
    return AsyncFormat(make_format("", model))
