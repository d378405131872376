"""BIG LSTM, a language model (Jozefowicz et al. 2016, arXiv 1602.02410, section 3), as named layers.

Word embeddings, `model.depth` LSTM layers whose outputs are projected (Sak et al. 2014, arXiv
1402.1128) from 8 times `model.width` cells to `model.width`, and a softmax over the whole
vocabulary. Published are depth 2, width 1024 (8192 cells) and 793 470 words. The publication trains
with importance sampling of the softmax and with dropout; here the softmax is whole and nothing is
dropped. Hidden states are time first, (T, N, width).

It takes sequences, int64 (N, T), and begins each from a zero state.
"""

from __future__ import annotations

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models.families.shared import check_language
from gems.models.layer import MODELS, Layer, ModelFamily, block

_CELLS_PER_OUTPUT = 8


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return words, lstm1, lstm2, ..., head.

    Raises ConfigError for a depth or width below 1, or a vocabulary that the data exceeds.
    """
    check_language(model, data)
    if model.depth < 1:
        raise ConfigError("model.depth", model.depth, "LSTM layers, at least 1")
    words = {"vocabulary": model.vocabulary, "width": model.width}
    width = model.width
    recurrent = {"in_features": width, "width": width, "num_cells": _CELLS_PER_OUTPUT * width}
    return (
        block("words", "embedding", "sequences:WordEmbedding", **words),
        *(
            block(f"lstm{number + 1}", "lstm", "sequences:Recurrent", **recurrent)
            for number in range(model.depth)
        ),
        block("head", "head", "sequences:WordHead", **words),
    )


MODELS.register("biglstm", ModelFamily(layers, takes="tokens"))
