"""Handwritten digits: 8x8 scans, ten classes. Importing it registers the datasets, transforms and the model."""

from projects.digits.data import DigitsTrainTransform, DigitsTransform, load_split
from projects.digits.model import DigitsCNN

__all__ = ["DigitsCNN", "DigitsTrainTransform", "DigitsTransform", "load_split"]
