"""The classifier of AlexNet, OverFeat and VGG as layers: a flattened map, two hidden layers, the logits."""

from __future__ import annotations

from gems.models.layer import Layer

_TARGET = "gems.models.blocks.heads:FullyConnected"


def fully_connected_layers(
    in_channels: int, map_px: int, sizes: tuple[int, int, int], dropouts: tuple[float, float, float]
) -> tuple[Layer, ...]:
    """Return fc1, fc2 and head, each one layer.

    Args:
        in_channels: of the last feature map.
        map_px: side to which that map is averaged before it is flattened, the one of the publication.
        sizes: features of fc1 and fc2, and classes.
        dropouts: rate in front of each.
    """
    features = (in_channels * map_px**2, *sizes)
    return tuple(
        Layer(
            name,
            "head" if name == "head" else "linear",
            _TARGET,
            (
                ("in_features", features[index]),
                ("out_features", features[index + 1]),
                ("map_px", 0 if index else map_px),
                ("dropout_rate", dropouts[index]),
                ("is_last", name == "head"),
            ),
        )
        for index, name in enumerate(("fc1", "fc2", "head"))
    )
