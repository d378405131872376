"""Write volumes with bright balls in noise, and their masks: `python -m examples.make_volumes FOLDER`.

FOLDER/images and FOLDER/masks get NIfTI files in Hounsfield units, of 24 x 40 x 40 voxels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nibabel
import numpy as np

SHAPE = (24, 40, 40)  # depth, rows, columns
SPACING_MM = (2.0, 1.0, 1.0)


def make(folder: Path, count: int = 12) -> None:
    """Write `count` volumes and their masks."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    places = np.indices(SHAPE).astype(float)
    for number in range(count):
        rng = np.random.default_rng(number)
        mask = np.zeros(SHAPE, dtype=bool)
        for _ in range(3):
            centre = rng.uniform(0.2, 0.8, 3) * SHAPE
            away = ((places - centre[:, None, None, None]).T * SPACING_MM).T
            mask |= np.sqrt((away**2).sum(0)) < rng.uniform(5, 9)
        units = rng.normal(0, 60, SHAPE) + 120 * mask
        for name, values in (("images", units.round()), ("masks", mask)):
            # a NIfTI file has columns, rows and depth
            image = nibabel.Nifti1Image(
                values.astype(np.int16).transpose(2, 1, 0), np.diag([*SPACING_MM[::-1], 1])
            )
            nibabel.save(image, folder / name / f"{number:02d}.nii")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
