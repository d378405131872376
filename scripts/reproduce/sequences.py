"""The layers of the language models.

Embeddings, LSTM layers, additive attention and the head over the vocabulary.
Hidden states are time first, (T, N, width), as recurrent kernels read and write them without a
copy. Weights are drawn as torch draws them: embeddings normal, LSTM and linear maps uniform within
1 / sqrt(fan-in).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional

# On a processor a projected LSTM runs torch's own kernels, and every rank would say so.
warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")


class _Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)


class WordEmbedding(_Embedding):
    """Takes tokens (N, T), int64 below `vocabulary`, and gives their vectors (T, N, width)."""

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.words(tokens.t())
        return out


class SourceEmbedding(_Embedding):
    """Takes pairs of sequences (N, 2, T).

    Gives the source's vectors (T, N, width), and the target's tokens (N, T).
    """

    output_names = ("main", "target")

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        source, target = pairs.unbind(1)
        return self.words(source.t()), target.contiguous()


class TargetEmbedding(_Embedding):
    """Takes the encoder's output (S, N, width) and the target's tokens (N, T).

    Gives the tokens' vectors (T, N, width), and the encoder's output as it came, the memory of the
    attention.
    """

    output_names = ("main", "memory")

    def forward(self, memory: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(target.t()), memory


class Recurrent(nn.Module):
    """One LSTM layer from a zero state.

    With `num_cells` its output is a projection of so many cells.
    Takes (T, N, in_features) and gives (T, N, width), twice as wide when `bidirectional`;
    `is_residual` adds the input. Hands on the tensors named in `carried` as they are.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        num_cells: int | None = None,
        bidirectional: bool = False,
        is_residual: bool = False,
        carried: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        projected = width if num_cells else 0
        self.lstm = nn.LSTM(
            in_features, num_cells or width, proj_size=projected, bidirectional=bidirectional
        )
        self.is_residual = is_residual
        self.output_names = ("main", *carried) if carried else ()

    def forward(self, x: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        output, _ = self.lstm(x)
        out: Tensor = x + output if self.is_residual else output
        return (out, *carried) if carried else out


class Attention(nn.Module):
    """Additive attention (Bahdanau et al. 2015, appendix A.1.2).

    V tanh(W query + U key), softmax over the source.
    Takes the lowest decoder layer's output (T, N, width), whose value a place before is the query
    (zero at the first), and memory (S, N, width). Gives the output as it came and the context (T,
    N, width).
    """

    output_names = ("main", "context")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query(functional.pad(state, (0, 0, 0, 0, 1, -1)))
        energy = torch.tanh(query.unsqueeze(1) + self.key(memory).unsqueeze(0))
        weight = self.score(energy).squeeze(3).softmax(dim=1)
        return state, torch.einsum("tsn,snw->tnw", weight, memory).contiguous()


class ContextDecoder(Recurrent):
    """An upper LSTM layer of the decoder.

    Takes the output of the layer below and the context, both (T, N, width).
    Gives the output (T, N, width), to which `is_residual` adds that below, and the context as it
    came, unless `is_last`.
    """

    def __init__(self, width: int, is_residual: bool, is_last: bool) -> None:
        super().__init__(
            2 * width, width, is_residual=is_residual, carried=() if is_last else ("context",)
        )

    def forward(self, x: Tensor, *context: Tensor) -> Tensor | tuple[Tensor, ...]:
        output, _ = self.lstm(torch.cat([x, *context], dim=2))
        out: Tensor = x + output if self.is_residual else output
        return (out, *context) if self.output_names else out


class WordHead(nn.Module):
    """Maps (T, N, width) to logits (N, vocabulary, T), for cross-entropy with labels (N, T)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(x).permute(1, 2, 0)
        return out
