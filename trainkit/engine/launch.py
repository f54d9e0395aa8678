"""detectron2's import path of `launch`."""

from trainkit.engine.process import DEFAULT_TIMEOUT, launch

__all__ = ["DEFAULT_TIMEOUT", "launch"]
