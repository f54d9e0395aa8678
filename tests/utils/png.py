"""Reads the PNG files that trainkit writes."""

import io

import numpy as np
from PIL import Image


def decode_png(content):
    """The image, shape ``[H, W, 3]``."""
    return np.array(Image.open(io.BytesIO(content)))
