"""A folder of tiles by class, cut out of one large picture: `python -m examples.make_tiles FOLDER`.

Here the picture ships with scikit-image (real histology, haematoxylin and DAB), and a tile's class
is whether it is stained more than the median tile is. Replace both by your slides and your
annotations; `data=folder` reads the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data

TILE_PX = 64
VALIDATION_SHARE = 0.25


def main(folder: Path) -> None:
    """Write FOLDER/{train,validation}/{pale,stained}/*.png."""
    slide = data.immunohistochemistry()
    corners = [
        (row, column)
        for row in range(0, slide.shape[0] - TILE_PX + 1, TILE_PX)
        for column in range(0, slide.shape[1] - TILE_PX + 1, TILE_PX)
    ]
    tiles = [slide[row : row + TILE_PX, column : column + TILE_PX] for row, column in corners]
    darkness = [-float(tile.mean()) for tile in tiles]
    middle = float(np.median(darkness))
    draw = np.random.default_rng(0).random(len(tiles))
    for (row, column), tile, dark, number in zip(corners, tiles, darkness, draw, strict=True):
        split = "validation" if number < VALIDATION_SHARE else "train"
        path = (
            folder
            / split
            / ("stained" if dark > middle else "pale")
            / f"{row:04d}-{column:04d}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(tile).save(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
