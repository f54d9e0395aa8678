"""Which pixel belongs to which digit. Importing it registers the datasets, the networks and the drawing."""

from projects.segmentation.data import CANVAS_SIZE, CLASS_NAMES, DigitCanvases
from projects.segmentation.drawing import PALETTE, draw_segmentation
from projects.segmentation.model import FCN, Segmenter, UNet, ViT, ViTSegmenter

__all__ = [
    "CANVAS_SIZE",
    "CLASS_NAMES",
    "DigitCanvases",
    "FCN",
    "PALETTE",
    "Segmenter",
    "UNet",
    "ViT",
    "ViTSegmenter",
    "draw_segmentation",
]
