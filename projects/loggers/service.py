"""What writers for external services have in common."""

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trainkit.utils.events.writers import PictureWriter

logger = logging.getLogger(__name__)


class ServiceWriter(PictureWriter):
    """Base class of writers for external services, whose errors do not end a run.

    An error is logged, and this training writes nothing more to the service. Only an ``OSError`` is raised.
    """

    _service: str  # its name in messages
    _has_failed = False

    def begin(self, trainer: Any) -> None:
        super().begin(trainer)
        with contextlib.suppress(ImportError):
            importlib.import_module("pandas")  # services check whether a value is a table of pandas
        with contextlib.suppress(OSError), self._surviving():  # the first write raises an OSError again
            _ = self._writer

    def write(self) -> None:
        with self._surviving():
            if not self._has_failed:
                super().write()

    def close(self) -> None:
        try:
            with self._surviving("The run of %s could not be finished: %s"):
                super().close()
        finally:
            self._has_failed = False

    @contextlib.contextmanager
    def _surviving(self, message: str = "Nothing more is written for %s, training continues: %s") -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # services have no common base class of their errors
            self._has_failed = True
            logger.error(message, self._service, error)


@contextlib.contextmanager
def default_environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Context in which environment variables that are not set have these values."""
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
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
