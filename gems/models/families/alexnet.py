"""AlexNet in the single-tower layout of Krizhevsky 2014, as named layers.

Source: arXiv 1404.5997, "one weird trick". It has five convolutions with their poolings, conv1 ...
conv5, and three fully connected layers, fc1, fc2 and head. 224x224 px give a last map of 6x6, to
which other sizes are averaged; a side has at least 63 px. The published network has dropout 0.5
before fc1 and fc2, and no norm.
"""

from __future__ import annotations

from gems.models.families.shared import Backbone, chain_family, fully_connected
from gems.models.layer import MODELS
from gems.models.steps import Conv, conv, max_pool

_BACKBONE = Backbone(
    64,
    {
        "conv1": (Conv(64, (11, 11), 4, (2, 2)), max_pool(3, 2)),
        "conv2": (conv(192, 5), max_pool(3, 2)),
        "conv3": (conv(384, 3),),
        "conv4": (conv(256, 3),),
        "conv5": (conv(256, 3), max_pool(3, 2)),
    },
)

MODELS.register(
    "alexnet",
    chain_family(lambda model: _BACKBONE, fully_connected(6, (4096, 4096), ("fc1", "fc2"))),
)
