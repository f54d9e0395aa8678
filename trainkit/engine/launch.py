"""detectron2's import path of `launch`."""

from typing import TYPE_CHECKING

from trainkit.utils.loading import names_on_demand

if TYPE_CHECKING:
    from trainkit.engine.process import DEFAULT_TIMEOUT, launch

__all__ = ["DEFAULT_TIMEOUT", "launch"]

__getattr__ = names_on_demand(__name__)
