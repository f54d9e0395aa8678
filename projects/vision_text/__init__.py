"""Models of torchvision, timm and Hugging Face. Importing it registers the datasets and the transform.

A module for each model registers that model; the config of the model imports it.
"""

from projects.vision_text.data import Shapes, Texts, ToImage

__all__ = ["Shapes", "Texts", "ToImage"]
