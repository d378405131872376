"""Inception v3 (Szegedy et al. 2015, arXiv 1512.00567, table 1 and figures 5 to 7) as named layers.

An inception block is one layer. If the paper omits widths, or its table contradicts it (the fifth
convolution), the widths are those of the authors' released model, which has batch norm, and dropout
0.2 in front of the linear map. 299x299 px give a last map of 8x8.

With `auxiliary` a second classifier reads the map after mixed6e (layer "auxiliary"). Its logits
cross the following boundaries together with the map. The head adds their loss, with the weight of
Szegedy et al. 2014, to the loss of the main logits.
"""

from __future__ import annotations

from dataclasses import replace

from gems.config.schema import DataConfig, ModelConfig
from gems.models.families.shared import Backbone, check_classifier, pooled_head
from gems.models.layer import MODELS, Layer, ModelFamily, block
from gems.models.steps import Fork, Pool, Step, conv, max_pool, scaled_channels, side_after

_WIDTH = 32
_AUXILIARY_CHANNELS = (128, 768)
_AUXILIARY_WEIGHT = 0.3
_AUXILIARY_WINDOW = (Pool("average", 5, 3, 0), conv(768, 5, is_padded=False))
_HALVE = max_pool(3, 2)


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return conv1 ... conv5, mixed5b ... mixed7c, head.

    With model.auxiliary, the layer "auxiliary" follows mixed6e.

    Raises:
        ConfigError: No such network has this norm, width or dropout.
    """
    check_classifier(model, has_auxiliary=True)
    features = _BACKBONE.layers(data.channels, model.width, model.norm)
    in_channels = _BACKBONE.channels(model.width)
    if not model.auxiliary:
        return (*features, pooled_head(model, data, in_channels))
    inner, last = (
        scaled_channels(channels, model.width, _WIDTH) for channels in _AUXILIARY_CHANNELS
    )
    auxiliary = block(
        "auxiliary",
        "head",
        "heads:Auxiliary",
        in_channels=_UP_TO_AUXILIARY.channels(model.width),
        inner_channels=inner,
        out_channels=last,
        num_classes=data.num_classes,
        norm=model.norm,
    )
    split = len(_UP_TO_AUXILIARY.parts)
    carried = {"carried": ("auxiliary",)}
    return (
        *features[:split],
        auxiliary,
        *(
            replace(layer, options=tuple((dict(layer.options) | carried).items()))
            for layer in features[split:]
        ),
        pooled_head(model, data, in_channels, "AuxiliaryHead", weight=_AUXILIARY_WEIGHT),
    )


def normed_px(model: ModelConfig, side_px: int) -> int:
    """Return a side of the last map, or of the auxiliary classifier's map if that is smaller.

    It is 0 for images below 75 px.
    """
    last_px = _BACKBONE.normed_px(side_px)
    if not model.auxiliary:
        return last_px
    auxiliary_px = side_after(_UP_TO_AUXILIARY.normed_px(side_px), _AUXILIARY_WINDOW)
    return min(last_px, max(1, auxiliary_px))


def _with_pooling(*branches: tuple[Step, ...], pooled: int) -> Fork:
    return Fork((*branches, (Pool("average", 3, 1, 1), conv(pooled))))


def _mixed5(pooled: int) -> Fork:
    return _with_pooling(
        (conv(64),), (conv(48), conv(64, 5)), (conv(64), conv(96, 3), conv(96, 3)), pooled=pooled
    )


def _mixed6(inner: int) -> Fork:
    """Return a block of figure 6 with n = 7: a 7x7 convolution as 1x7 and 7x1."""
    return _with_pooling(
        (conv(192),),
        (conv(inner), conv(inner, (1, 7)), conv(192, (7, 1))),
        (
            conv(inner),
            conv(inner, (7, 1)),
            conv(inner, (1, 7)),
            conv(inner, (7, 1)),
            conv(192, (1, 7)),
        ),
        pooled=192,
    )


_MIXED6A = Fork(
    (
        (conv(384, 3, 2, is_padded=False),),
        (conv(64), conv(96, 3), conv(96, 3, 2, is_padded=False)),
        (_HALVE,),
    )
)
_MIXED7A = Fork(
    (
        (conv(192), conv(320, 3, 2, is_padded=False)),
        (conv(192), conv(192, (1, 7)), conv(192, (7, 1)), conv(192, 3, 2, is_padded=False)),
        (_HALVE,),
    )
)
# figure 7: branches that fork again expand the filter banks
_EXPANDED = Fork(((conv(384, (1, 3)),), (conv(384, (3, 1)),)))
_MIXED7 = _with_pooling(
    (conv(320),), (conv(384), _EXPANDED), (conv(448), conv(384, 3), _EXPANDED), pooled=192
)
_UP_TO_AUXILIARY = Backbone(
    _WIDTH,
    {
        "conv1": (conv(32, 3, 2, is_padded=False),),
        "conv2": (conv(32, 3, is_padded=False),),
        "conv3": (conv(64, 3), _HALVE),
        "conv4": (conv(80),),
        "conv5": (conv(192, 3, is_padded=False), _HALVE),
        "mixed5b": (_mixed5(32),),
        "mixed5c": (_mixed5(64),),
        "mixed5d": (_mixed5(64),),
        "mixed6a": (_MIXED6A,),
        "mixed6b": (_mixed6(128),),
        "mixed6c": (_mixed6(160),),
        "mixed6d": (_mixed6(160),),
        "mixed6e": (_mixed6(192),),
    },
)
_LAST = {"mixed7a": (_MIXED7A,), "mixed7b": (_MIXED7,), "mixed7c": (_MIXED7,)}
_BACKBONE = Backbone(_WIDTH, {**_UP_TO_AUXILIARY.parts, **_LAST})

MODELS.register("inception_v3", ModelFamily(layers, lambda model: _BACKBONE.stride_px, normed_px))
