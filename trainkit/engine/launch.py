"""detectron2's import path of `launch`."""

from typing import TYPE_CHECKING

from trainkit.utils.loading import lazy_names

if TYPE_CHECKING:
    from trainkit.engine.process import DEFAULT_TIMEOUT, launch

__all__ = ["DEFAULT_TIMEOUT", "launch"]

__getattr__ = lazy_names(__name__)
