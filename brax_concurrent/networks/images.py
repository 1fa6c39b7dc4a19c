"""Images to try networks with: random ones, which differ in what a network sees of them."""

from __future__ import annotations

import numpy as np

_PATCHES = 4  # of the coarse pattern, in each direction


def random_images(shape: tuple[int, ...], count: int, seed: int = 0) -> np.ndarray:
    """Random images (count, height, width, channels), float32, about -2 to 2.

    Each has a mean colour, a contrast and a coarse pattern of its own, with noise over it. Of pure noise all images
    would look alike to a network that takes means over pixels, and gates would choose one path for all.
    """
    height, width, channels = shape
    random = np.random.default_rng(seed)
    rows, columns = np.arange(height) * _PATCHES // height, np.arange(width) * _PATCHES // width
    pattern = random.standard_normal((count, _PATCHES, _PATCHES, channels), np.float32)[:, rows][:, :, columns]
    noise = random.standard_normal((count, height, width, channels), np.float32)
    colour = random.standard_normal((count, 1, 1, channels), np.float32)
    contrast = random.uniform(0.2, 1.5, (count, 1, 1, 1)).astype(np.float32)
    return colour + contrast * (0.7 * pattern + 0.5 * noise)
