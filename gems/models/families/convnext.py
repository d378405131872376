"""ConvNeXt (Liu et al. 2022, arXiv 2201.03545) as named layers.

It has a 4x4 convolution of stride 4, four stages of residual blocks with a 2x2 convolution of
stride 2 between stages, and a head of global average pooling, a norm and one linear map. The stages
have C, 2C, 4C and 8C channels, C = `model.width`. `model.depth` is the total number of blocks: 18
(tiny: C = 96) or 36 (small, base and large: C = 96, 128 and 192). All norms are over channels. With
`model.stochastic_depth` a sample skips the branch of a block at a rate that rises from 0 in the
first block to the configured rate in the last one; the published rates are 0.1 for tiny, 0.4 for
small, and 0.5 for base and large.
"""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.models.families.shared import check_classifier, depth_error
from gems.models.layer import MODELS, Layer, ModelFamily, block

_BLOCKS = {18: (3, 3, 9, 3), 36: (3, 3, 27, 3)}
_STEM_PX = 4
_STRIDE_PX = _STEM_PX * 2**3


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return stem, stage1.block1, ..., stage2.downsample, stage2.block1, ..., head.

    Raises:
        ConfigError: No such network has this depth, norm, width, dropout or stochastic depth.
    """
    check_classifier(model, ("layer",), has_stochastic_depth=True)
    if model.depth not in _BLOCKS:
        raise depth_error(
            model.depth, "a ConvNeXt has 18 (tiny) or 36 blocks (small, base, large)", _BLOCKS
        )
    channels = model.width
    out = [
        block(
            "stem",
            "conv",
            "convnext:Stem",
            in_channels=data.channels,
            out_channels=channels,
            side_px=_STEM_PX,
        )
    ]
    rates = iter(
        [model.stochastic_depth * index / (model.depth - 1) for index in range(model.depth)]
    )
    for stage, num_blocks in enumerate(_BLOCKS[model.depth], 1):
        if stage > 1:
            sizes = {"in_channels": channels, "out_channels": 2 * channels}
            out.append(block(f"stage{stage}.downsample", "conv", "convnext:Downsample", **sizes))
            channels *= 2
        out += [
            block(
                f"stage{stage}.block{index + 1}",
                "residual",
                "convnext:Block",
                channels=channels,
                drop_rate=rate,
            )
            for index, rate in zip(range(num_blocks), rates, strict=False)
        ]
    sizes = {"in_channels": channels, "num_classes": data.num_classes}
    return (*out, block("head", "head", "convnext:NormedHead", **sizes, dropout_rate=model.dropout))


# strides equal kernels, so a map has the side divided by its stride, rounded down
MODELS.register(
    "convnext",
    ModelFamily(
        layers,
        lambda model: _STRIDE_PX,
        lambda model, side_px: side_px // _STRIDE_PX,
        title="{name}{depth}",
    ),
)
