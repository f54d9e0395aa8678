"""Asynchronous saving: a format around a format."""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any

from torch import Tensor, nn
from trainkit.projects.async_save.host_copy import HostCopy

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat, TorchFormat
from trainkit.checkpoint.state import Take

logger = logging.getLogger(__name__)


class AsyncFormat(CheckpointFormat):
    """Copies a state to host memory and writes it in a thread, in another format.

    There is one save at a time: the checkpointer waits for it before the next one, and before it reads the folder.

    Args:
        inner: writes the copy; None: the format of torch.save.
        worker: has the thread; None: a new one.
    """

    def __init__(self, inner: CheckpointFormat | None = None, worker: "Worker | None" = None) -> None:
        self._inner, self._worker = inner or TorchFormat(), worker or Worker()
        self.collective = self._inner.collective

    def for_state(self, state: Mapping[str, Any]) -> "AsyncFormat":
        return AsyncFormat(self._inner.for_state(state), self._worker)

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> Any:
        return self._worker.copy(state, self._inner)

    def write(self, state: Any, path: str) -> None:
        """Write a copy; waits until it is complete."""
        self._inner.write(state.state(), path)

    def submit(self, save: Callable[[], None]) -> "futures.Future[None]":
        return self._worker.start(save)

    def wait(self) -> None:
        self._worker.wait()

    def raise_error(self) -> None:
        self._worker.raise_error()

    def read(self, path: str) -> Any:
        return self._inner.read(path)

    def files(self, path: str) -> list[str]:
        return self._inner.files(path)

    def remove(self, path: str) -> None:
        self._inner.remove(path)

    def accepts(self, state: Mapping[str, Any]) -> bool:
        return self._inner.accepts(state)

    def verify(self, state: Mapping[str, Any], path: str, *, part: int = 0, num_parts: int = 1) -> None:
        self._inner.verify(state, path, part=part, num_parts=num_parts)

    def fill(
        self, state: dict[str, Any], path: str, model: nn.Module | None = None, wanted: Iterable[str] = ("",)
    ) -> dict[str, Any]:
        return self._inner.fill(state, path, model, wanted)

    def adapt(self, weights: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        return self._inner.adapt(weights, own)


class Worker:
    """The thread, the memory of the last copy (allocating takes longer than copying), and the save under way."""

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._memory: dict[bool, Tensor] = {}
        self._writing: futures.Future[None] | None = None

    def copy(self, state: Mapping[str, Any], form: CheckpointFormat) -> HostCopy:
        copy = HostCopy(state, self._memory, form)
        self._memory = copy.memory
        return copy

    def start(self, save: Callable[[], None]) -> "futures.Future[None]":
        self._writing = self._thread.submit(_call, [save])
        return self._writing

    def wait(self) -> None:
        if self._writing is not None:
            futures.wait([self._writing])

    def raise_error(self) -> None:
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()


def _call(saves: list[Callable[[], None]]) -> None:
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
def async_save() -> CheckpointFormat:
    """The builder for CHECKPOINT.FORMAT."""
    return AsyncFormat()
