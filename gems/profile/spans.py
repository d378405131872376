"""Tables of the joint costs of layers i to e, for all i and e, and of a rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gems.profile import ModelProfile

Table = NDArray[np.float64]


class Spans:
    """Tables (L, L + 1) over all spans of layers: entry [i, e] is for layers i up to e (e > i).

    Other entries are 0.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.num_layers = profile.num_layers

    @cached_property
    def stash(self) -> Table:
        """Bytes that a stage keeps from forward to backward, without its inputs."""
        layers = self.profile.layers
        num = self.num_layers
        table = np.zeros((num + 1, num + 1))
        for i in range(num - 1, -1, -1):
            own = np.zeros(num + 1)
            own[i + 1 :] = layers[i].stash_bytes
            for ahead, num_bytes in layers[i].saved_later:
                own[i + ahead + 1 :] += num_bytes
            table[i] = table[i + 1] + own
            table[i, : i + 1] = 0
        return table[:num]

    @cached_property
    def held_for_weights(self) -> Table:
        """Bytes kept between I and W of a split backward, without inputs and output gradients."""
        own = self._of("held_input_bytes")[:, None] + np.append(
            0.0, self._of("held_output_grad_bytes")
        )
        table: Table = np.maximum(self._sums("held_for_weights_bytes") - own, 0.0)
        return table

    @cached_property
    def forward_peak(self) -> Table:
        """The peak bytes of a stage's forward, without its inputs."""
        peaks = self._of("forward_peak_bytes")
        unsaved = self._of("unsaved_input_bytes")
        carried = [
            (index, index - back, size)
            for index, layer in enumerate(self.profile.layers)
            for back, size in layer.unsaved_from
        ]
        table = np.zeros_like(self.stash)
        for i in range(self.num_layers):
            own = unsaved.copy()
            for layer, maker, size in carried:
                own[layer] -= size if maker < i else 0  # an input of the stage
            before = np.append(0.0, self.stash[i, i + 1 : -1] + own[i + 1 :])
            table[i, i + 1 :] = np.maximum.accumulate(before + peaks[i:])
        return table

    @cached_property
    def backward_peak(self) -> Table:
        """The peak bytes of a stage's backward: stash, gradients and workspace, without inputs.

        The received gradient of the stage's output is held throughout.
        """
        layers = self.profile.layers
        peaks = self._of("backward_peak_bytes")
        gradients = self._of("output_grad_bytes")
        alone = (
            np.array([dict(layer.backward_peak_at).get(0, -np.inf) for layer in layers]) + gradients
        )
        last = np.where(alone > -np.inf, alone, peaks)
        table = np.zeros_like(self.stash)
        for i in range(self.num_layers):
            within = np.append(
                -np.inf, np.maximum.accumulate(self.stash[i, i + 1 :] + peaks[i:])[:-1]
            )
            table[i, i + 1 :] = np.maximum(
                self.stash[i, i + 1 :] + last[i:], within + gradients[i:]
            )
        # by end of the stage, the different backward peaks of layers before the last
        cases: dict[int, dict[int, int]] = {}
        for index, layer in enumerate(layers):
            for ahead, num_bytes in layer.backward_peak_at:
                if ahead:
                    cases.setdefault(index + ahead + 1, {})[index] = num_bytes
        for end, case in cases.items():
            own = peaks.copy()
            own[list(case)] = list(case.values())
            for i in range(end - 1):
                inner = np.max(self.stash[i, i + 1 : end] + own[i : end - 1]) + gradients[end - 1]
                table[i, end] = max(inner, self.stash[i, end] + last[end - 1])
        for i, layer in enumerate(layers):
            for ahead, num_bytes in layer.passed_at:
                table[i, i + ahead + 1] += num_bytes
        # at its end a stage has a gradient for each input, possibly of zeros
        return np.where(table > 0, np.maximum(table, self.handed_back + self.given_back), 0.0)

    @cached_property
    def input_gradient_peak(self) -> Table:
        """The peak bytes of I of a split backward: `backward_peak`, and the bytes kept for W."""
        peaks = self._of("backward_peak_bytes")
        gradients = self._of("output_grad_bytes")
        for_weights = np.cumsum(self._of("held_for_weights_bytes"))
        table = np.zeros_like(self.stash)
        for i in range(self.num_layers):
            so_far = self.stash[i, i + 1 :] + peaks[i:] - for_weights[i:]
            table[i, i + 1 :] = np.maximum.accumulate(so_far) + for_weights[i:] + gradients[i:]
        return table

    @cached_property
    def weight_gradient_peak(self) -> Table:
        """The peak bytes of W beyond those kept by I: the gradient of the largest parameters."""
        params = self._of("param_bytes")
        table = np.zeros_like(self.stash)
        for i in range(self.num_layers):
            table[i, i + 1 :] = np.maximum.accumulate(params[i:])
        return table

    @cached_property
    def params(self) -> Table:
        """Bytes of the parameters."""
        return self._sums("param_bytes")

    @cached_property
    def buffers(self) -> Table:
        """Bytes of the buffers, such as running statistics."""
        return self._sums("buffer_bytes")

    @cached_property
    def time_s(self) -> Table:
        """Seconds of forward and whole backward of one micro-batch."""
        return self._sums("time_s")

    @cached_property
    def given(self) -> Table:
        """Bytes of the first layer's inputs, constant in a row."""
        return self._in_rows([self.profile.given_bytes(i) for i in range(self.num_layers)])

    @cached_property
    def handed_on(self) -> Table:
        """Bytes of the last layer's outputs, constant in a column."""
        return np.tile(np.append(0.0, self._of("output_bytes")), (self.num_layers, 1))

    @cached_property
    def given_back(self) -> Table:
        """Bytes of the last layer's output gradients, constant in a column."""
        return np.tile(np.append(0.0, self._of("output_grad_bytes")), (self.num_layers, 1))

    @cached_property
    def handed_back(self) -> Table:
        """Bytes of the first layer's input gradients, constant in a row and 0 in row 0."""
        return self._in_rows(np.append(0.0, self._of("output_grad_bytes")[:-1]))

    @cached_property
    def slot(self) -> Table:
        """Bytes of a slot of a stage's CUDA graphs: its storages at fixed addresses.

        They are the stash, copies of the inputs, unsaved outputs, and the gradients of outputs and
        inputs. The outputs of the last stage are the inputs of the loss. The loss runs without
        graphs, so the storages that it saves do not count.
        """
        return self._slot("input_grads_at")

    @cached_property
    def segment_slot(self) -> Table:
        """The same for a later segment of a stage, whose input gradients are not copied."""
        return self._slot("segment_grads_at")

    @cached_property
    def slot_for_weights(self) -> Table:
        """Additional bytes of a slot with a split backward: the gradients that I keeps for W."""
        of_outputs = np.append(0.0, self._of("held_output_grad_bytes"))
        table: Table = np.maximum(self._sums("held_grad_bytes") - of_outputs, 0.0)
        return table

    @cached_property
    def slot_pool(self) -> Table:
        """The peak bytes of a slot and its pool, which includes temporary tensors."""
        backward = self.backward_peak - self.given_back + self._unsaved_outputs
        return np.maximum(self.slot, self._around_slot + np.maximum(self.forward_peak, backward))

    @cached_property
    def split_slot_pool(self) -> Table:
        """The same with a split backward, whose I keeps tensors for W in the slot."""
        backward = np.maximum(
            self.input_gradient_peak - self.given_back,
            self.held_for_weights + self.weight_gradient_peak,
        )
        split = np.maximum(self.slot + self.slot_for_weights, self.slot_pool)
        return np.maximum(split, self._around_slot + self._unsaved_outputs + backward)

    def _slot(self, input_gradients: str) -> Table:
        table = self.stash + self._around_slot + self._unsaved_outputs + self.handed_back
        table[:, -1] -= self.profile.layers[-1].loss_bytes
        for i, layer in enumerate(self.profile.layers):
            for ahead, num_bytes in getattr(layer, input_gradients):
                table[i, i + ahead + 1] += num_bytes - self.handed_back[i, i + ahead + 1]
        return table

    @cached_property
    def _around_slot(self) -> Table:
        """Bytes of the copies of a stage's inputs and of the gradients of its outputs."""
        table = self.given + self.given_back
        table[:, -1] = self.given[:, -1] + self.profile.layers[-1].score_grad_bytes
        return table

    @cached_property
    def _unsaved_outputs(self) -> Table:
        """Bytes of unsaved outputs of a stage, or unsaved inputs of the loss."""
        own = np.zeros((self.num_layers, self.num_layers + 1))
        for maker, layer in enumerate(self.profile.layers):
            for storage in (*layer.saved, *layer.passing):
                until = min((storage.last_use, *storage.savers))
                own[maker, maker + 1 : maker + 1 + until] += storage.total_bytes
        own[-1, -1] += self.profile.layers[-1].score_bytes
        table: Table = np.cumsum(own[::-1], axis=0)[::-1]
        return table

    def boundary_bytes(self) -> tuple[int, ...]:
        """Return the bytes between layers b and b + 1."""
        return tuple(layer.output_bytes for layer in self.profile.layers[:-1])

    def _of(self, name: str) -> Table:
        return np.array([getattr(layer, name) for layer in self.profile.layers], dtype=float)

    def _in_rows(self, values: Sequence[float] | Table) -> Table:
        return np.repeat(np.array(values, dtype=float)[:, None], self.num_layers + 1, axis=1)

    def _sums(self, name: str) -> Table:
        total = np.append(0.0, np.cumsum(self._of(name)))
        table: Table = np.maximum(total[None, :] - total[:-1, None], 0.0)
        return table


@dataclass(frozen=True, slots=True)
class RankCosts:
    """The joint cost of a rank's `stages`: the maximum over `moments` of the sum over the stages.

    `moments[m][k]()` returns the table of stage `stages[k]` at moment m of the step: an array
    (L, L + 1) whose entry [i, e] is the cost of that stage with layers i up to e (e > i; other
    entries are not read). The moments of a rank with one stage may be merged into one table, the
    elementwise maximum.
    """

    stages: tuple[int, ...]
    moments: tuple[tuple[Callable[[], Table], ...], ...]

    def at(self, spans: Sequence[tuple[int, int]]) -> float:
        """Return the cost with `spans[k]` = (first layer, end) of its k-th stage."""
        return max(
            sum(float(table()[span]) for table, span in zip(tables, spans, strict=True))
            for tables in self.moments
        )

    def spans(self, boundaries: Sequence[int]) -> list[tuple[int, int]]:
        """Return the layers of each of its stages.

        Stage s is layers boundaries[s] up to boundaries[s + 1].
        """
        return [(boundaries[stage], boundaries[stage + 1]) for stage in self.stages]

    def under(self, boundaries: Sequence[int]) -> float:
        """Return the cost under a partition."""
        return self.at(self.spans(boundaries))
