"""Models of torchvision, timm and Hugging Face. Importing it registers the datasets, the transform and the models."""

from projects.vision_text.data import Shapes, Texts, ToImage
from projects.vision_text.models import llama_depth, resnet_depth

__all__ = ["Shapes", "Texts", "ToImage", "llama_depth", "resnet_depth"]
