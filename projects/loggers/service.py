"""What writers for external services have in common."""

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import Row, ScalarWriter

logger = logging.getLogger(__name__)


class ServiceWriter(ScalarWriter):
    """Base class of writers for external services, whose errors do not end a run.

    An error is logged, and this training writes nothing more to the service. A subclass defines ``_open`` and
    ``_log_all``; images and histograms are then cleared in the storage. Raises ImportError: ``package`` is missing.
    """

    _service: str  # its name in messages
    _has_failed = False
    _opened: Any = None  # an object of the package of the service
    _finish: Callable[[], None]  # ends the output

    def __init__(self, window_size: int, package: str) -> None:
        super().__init__(window_size)
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{type(self).__name__} needs the package {package}: pip install 'trainkit[{package}]'")

    @property
    def _writer(self) -> Any:
        if self._opened is None:
            self._opened, self._finish = self._open()
        return self._opened

    def _open(self) -> tuple[Any, Callable[[], None]]:
        """Start the output, or continue it; return it, and the function that ends it."""
        raise NotImplementedError

    def _log_all(self, rows: list[Row], storage: EventStorage) -> None:
        raise NotImplementedError

    def _show(self, rows: list[Row], storage: EventStorage) -> None:
        if rows or storage.images() or storage.histograms():
            self._log_all(rows, storage)
            storage.clear_images()
            storage.clear_histograms()

    def begin(self, trainer: Any) -> None:
        # import before loader workers are forked: a fork during an import in another thread could wait for ever
        importlib.import_module("PIL.Image").preinit()
        with contextlib.suppress(ImportError):
            importlib.import_module("pandas")  # services check whether a value is a table of pandas
        with self._surviving():
            _ = self._writer

    def write(self) -> None:
        with self._surviving():
            if not self._has_failed:
                super().write()

    def close(self) -> None:
        super().close()
        with self._surviving():
            if self._opened is not None:
                self._opened = None
                self._finish()
        self._has_failed = False

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # services have no common base class of their errors
            self._has_failed = True
            logger.error("Nothing more is written for %s, training continues: %s", self._service, error)


@contextlib.contextmanager
def default_environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Context in which environment variables that are not set have these values."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def to_uint8_array(image: Any) -> np.ndarray:
    """The image as uint8 ``[height, width, channel]``, or ``[height, width]`` for one channel; floats are in [0, 1]."""
    tensor = torch.as_tensor(image).detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.mul(255).clamp(0, 255).to(torch.uint8)
    return tensor.permute(1, 2, 0).squeeze(-1).numpy()
