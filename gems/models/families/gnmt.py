"""GNMT, Google's translation network (Wu et al. 2016, arXiv 1609.08144), as named layers.

`model.depth` LSTM layers in the encoder, the first in both directions, and as many in the decoder,
with residuals from the third layer on in either. The lowest decoder layer asks an additive
attention (Bahdanau et al. 2015, arXiv 1409.0473) over the encoder's output for a context, from the
place before (section 3.1, y_{i-1}), and all layers above read that context too. Published are depth
8, width 1024 and 32k word pieces; dropout and the residuals' clipping for inference are left out.
Hidden states are time first, (T, N, width).

It takes pairs of sequences, int64 (N, 2, T): source, and the translation that the decoder is to
have said so far.
"""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models.families.shared import check_language
from gems.models.layer import MODELS, Layer, ModelFamily, block

_FIRST_RESIDUAL = 3


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return source, encoder1, ..., target, decoder1, attention, decoder2, ..., head.

    Raises ConfigError for a depth below 2, a width below 1, or a vocabulary that the data exceeds.
    """
    check_language(model, data)
    if model.depth < 2:
        raise ConfigError(
            "model.depth", model.depth, "layers of the encoder, and of the decoder, at least 2"
        )
    width = model.width
    words = {"vocabulary": model.vocabulary, "width": model.width}
    out = [block("source", "embedding", "sequences:SourceEmbedding", **words)]
    for number in range(1, model.depth + 1):
        options: dict[str, object] = {
            "in_features": 2 * width if number == 2 else width,
            "width": width,
            "is_residual": number >= _FIRST_RESIDUAL,
            "carried": ("target",),
        }
        options |= {"bidirectional": True} if number == 1 else {}
        out.append(block(f"encoder{number}", "lstm", "sequences:Recurrent", **options))
    lowest = {"in_features": width, "width": width, "carried": ("memory",)}
    out.append(block("target", "embedding", "sequences:TargetEmbedding", **words))
    out.append(block("decoder1", "lstm", "sequences:Recurrent", **lowest))
    out.append(block("attention", "attention", "sequences:Attention", width=width))
    for number in range(2, model.depth + 1):
        options = {
            "width": width,
            "is_residual": number >= _FIRST_RESIDUAL,
            "is_last": number == model.depth,
        }
        out.append(block(f"decoder{number}", "lstm", "sequences:ContextDecoder", **options))
    return (*out, block("head", "head", "sequences:WordHead", **words))


MODELS.register("gnmt", ModelFamily(layers, takes="token_pairs"))
