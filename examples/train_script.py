"""Train your own network on your own data from a script.

`mpiexec -n 2 python -m examples.train_script FOLDER`.
`gems.compose` takes what a configuration has; the network and the data are objects of this program.
FOLDER holds tiles as examples/own_tiles.py reads them.
"""

from __future__ import annotations

import sys

from torch import nn

import gems
from examples.own_model import Block
from examples.own_tiles import Tiles


class Net(nn.Module):
    """Two blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 8), Block(8, 16))
        self.classify = nn.Linear(16, 2)

    def forward(self, image):
        return self.classify(self.blocks(image).mean(dim=(2, 3)))


def main(folder: str) -> None:
    """Train in the ranks that mpiexec has started."""
    spec = gems.compose(
        [
            "schedule=1f1b",
            "parallel.partitions=2",
            "data.height_px=32",
            "data.width_px=32",
            "train.steps=8",
            "name=script",
            f"runs_dir={folder}/runs",
        ]
    )
    train, validation = (Tiles(folder, split) for split in ("train", "validation"))
    result = gems.train(spec, model=Net, dataset=train, validation_dataset=validation)
    print(
        f"loss {result.first_loss:.3f} to {result.last_loss:.3f}, accuracy"
        f" {result.validation_accuracy:.2f}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
