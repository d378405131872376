"""OverFeat's fast model (Sermanet et al. 2013, arXiv 1312.6229, table 1) as named layers.

It has five convolutions, the first two without padding, with their 2x2 poolings, conv1 ... conv5,
and three fully connected layers, fc1, fc2 and head. 231x231 px give a last map of 6x6, to which
other sizes are averaged; a side has at least 71 px. The published network has dropout 0.5 on fc1
and fc2, and no norm.
"""

from __future__ import annotations

from gems.models.families.shared import Backbone, chain_family, fully_connected
from gems.models.layer import MODELS
from gems.models.steps import conv, max_pool

_BACKBONE = Backbone(
    96,
    {
        "conv1": (conv(96, 11, 4, is_padded=False), max_pool(2, 2)),
        "conv2": (conv(256, 5, is_padded=False), max_pool(2, 2)),
        "conv3": (conv(512, 3),),
        "conv4": (conv(1024, 3),),
        "conv5": (conv(1024, 3), max_pool(2, 2)),
    },
)

MODELS.register(
    "overfeat",
    chain_family(lambda model: _BACKBONE, fully_connected(6, (3072, 4096), ("fc1", "fc2"))),
)
