"""Memory and time of a rank that reads one huge region of a whole-slide image.

A tiled pyramidal TIFF file of `--slide` px a side (enlarged tissue, deflated) is written to a
temporary folder. In a process of its own the batch loader of a run then reads one training sample
of `--side` px at level 0, flipped and turned as usual, by data=slide with `data.prefetch_steps=0`
and no workers; more steps ahead hold more samples. The growth of the resident set's peak is
compared with the bytes of the sample's float32 tensor. The exit code is 1 if it is above `--most`
times these.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL.Image import Resampling, fromarray

from gems.data.tissue import SLIDE_PX, read_slide
from gems.utils.host_memory import resident_bytes
from scripts.bench.rig import Table, answered, composed, in_child, log, machine, options, square

LIBRARIES = ("openslide", "tiffslide")
ENLARGED = 8
TILE_PX = 256
NUM_LEVELS = 4


def main(argv: list[str]) -> int:
    """Measure with each library and return 1 if one takes more memory than allowed."""
    arguments = options(
        __doc__, argv, side=16384, slide=18432, most=1.5, libraries=list(LIBRARIES), json=False
    )
    facts = machine()
    with tempfile.TemporaryDirectory() as scratch:
        write_slide(Path(scratch), arguments.slide)
        file_bytes = (Path(scratch) / "slide.tif").stat().st_size
        log(
            f"{arguments.side} px a side of a slide of {arguments.slide}, {file_bytes / 1e6:.0f} MB"
        )
        table = Table(
            "library:<12",
            "region GiB=region_bytes:>12.2f",
            "growth GiB=growth_bytes:>12.2f",
            "ratio:>8.3f",
            "read s=read_s:>10.1f",
        )
        rows = []
        for library in arguments.libraries:
            result = in_child(read_region, scratch, arguments.side, library, threads=1)
            rows.append(table.row({"library": library, **result}, result.get("failed", "")))
    failed = any(row.get("ratio", arguments.most + 1) > arguments.most for row in rows)
    return answered({"machine": facts, "rows": rows}, failed, arguments.json)


def read_region(folder: str, side_px: int, library: str) -> dict[str, float]:
    """Return bytes, growth of the peak and seconds of reading the first batch of a run."""
    import torch

    from gems.data import open_dataset, pyramid
    from gems.engine.batch_loader import BatchLoader, ReadShare

    pyramid.LIBRARIES = (library,)
    spec = composed(
        f"model=resnet20_v1 schedule=1f1b data=slide data.path={folder} data.prefetch_steps=0"
        f" {square(side_px)}",
        "parallel.partitions=2 parallel.micro_batches=1 parallel.micro_batch_size=1",
    )
    dataset = open_dataset(spec.data, spec.seed)
    loader = BatchLoader(spec, dataset, ReadShare(0, (0,)), torch.device("cpu"))
    open_library(Path(folder))
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin_s = time.perf_counter()
    (images,) = loader.batch(0).images.values()
    read_s = time.perf_counter() - begin_s
    growth = resident_bytes("VmHWM") - before
    region = images.element_size() * images.nelement()
    assert images.shape == (1, 3, side_px, side_px) and float(images[0, :, ::97, ::97].std()) > 0.1
    return {
        "region_bytes": region,
        "growth_bytes": growth,
        "ratio": growth / region,
        "read_s": read_s,
    }


def open_library(folder: Path) -> None:
    """Load the library, which is no part of a region."""
    from gems.data.pyramid import open_slide

    handle = open_slide(folder / "slide.tif")
    handle.read_region((0, 0), 0, (TILE_PX, TILE_PX))
    handle.close()


def write_slide(folder: Path, side_px: int) -> None:
    """Write slide.tif by tiles, and labels.csv with a training and a validation region."""
    picture = fromarray(read_slide())
    with tifffile.TiffWriter(folder / "slide.tif", bigtiff=True) as file:
        for number in range(NUM_LEVELS):
            side = side_px >> number
            enlarged_px = SLIDE_PX * ENLARGED >> number
            pattern = np.asarray(picture.resize((enlarged_px, enlarged_px), Resampling.BICUBIC))
            file.write(
                _tiles(pattern, side),
                shape=(side, side, 3),
                dtype=np.uint8,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb",
                compression="zlib",
                compressionargs={"level": 1},
                subfiletype=int(number > 0),
            )
    (folder / "labels.csv").write_text(
        "file,label,split,x,y\nslide.tif,0,train,100,60\nslide.tif,1,validation,0,0\n"
    )


def _tiles(pattern: np.ndarray[Any, Any], side_px: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the tiles of a picture that repeats a pattern, row by row."""
    repeats = -(-TILE_PX // len(pattern)) + 1
    wide = np.tile(pattern, (repeats, repeats, 1))
    for row in range(0, side_px, TILE_PX):
        for column in range(0, side_px, TILE_PX):
            top = row % len(pattern)
            offset = column % len(pattern)
            yield np.ascontiguousarray(wide[top : top + TILE_PX, offset : offset + TILE_PX])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
