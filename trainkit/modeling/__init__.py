"""Models by name."""

from trainkit.modeling.build import MODEL_REGISTRY, build_model
from trainkit.utils.plugins import lending

__all__ = ["MODEL_REGISTRY", "build_model"]

__getattr__, __dir__ = lending(__name__)
