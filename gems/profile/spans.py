"""Tables of the joint costs of layers i to e, for every i and e at once, and of a rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gems.profile import ModelProfile

Table = NDArray[np.float64]


class Spans:
    """Tables (L, L + 1) over all runs of neighbouring layers of a profile.

    Entry [i, e] is of layers i up to e.
    Only entries with e > i mean anything; the others are 0.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.num_layers = profile.num_layers

    @cached_property
    def stash(self) -> Table:
        """Bytes that a stage keeps from forward to backward, its inputs not among them."""
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
        """The bytes that a split backward keeps between I and W.

        The stage's inputs and given gradients are not included.
        """
        own = self._of("held_input_bytes")[:, None] + np.append(
            0.0, self._of("held_output_grad_bytes")
        )
        table: Table = np.maximum(self._sums("held_for_weights_bytes") - own, 0.0)
        return table

    @cached_property
    def forward_peak(self) -> Table:
        """The most bytes in use during a stage's forward, its inputs not among them."""
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
                own[layer] -= size if maker < i else 0  # it is among the stage's inputs
            before = np.append(0.0, self.stash[i, i + 1 : -1] + own[i + 1 :])
            table[i, i + 1 :] = np.maximum.accumulate(before + peaks[i:])
        return table

    @cached_property
    def backward_peak(self) -> Table:
        """The most bytes in use during a stage's backward.

        What it still keeps, gradients, workspace; no inputs.
        The gradient of the stage's output, which the stage was given, is in use throughout.
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
        # the ends of stages at which layers before the last have a backward peak of their own, and
        # those peaks
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
        # at its end a stage has a gradient for each input, of zeros where none came
        return np.where(table > 0, np.maximum(table, self.handed_back + self.given_back), 0.0)

    @cached_property
    def input_gradient_peak(self) -> Table:
        """The most bytes in use during I of a split backward.

        As `backward_peak`, and what is left for W so far.
        """
        peaks = self._of("backward_peak_bytes")
        gradients = self._of("output_grad_bytes")
        left = np.cumsum(self._of("held_for_weights_bytes"))
        table = np.zeros_like(self.stash)
        for i in range(self.num_layers):
            so_far = self.stash[i, i + 1 :] + peaks[i:] - left[i:]
            table[i, i + 1 :] = np.maximum.accumulate(so_far) + left[i:] + gradients[i:]
        return table

    @cached_property
    def weight_gradient_peak(self) -> Table:
        """The most bytes that W needs beyond what I left.

        The gradient of the largest layer's parameters.
        """
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
        """Bytes that the first layer is given; the same in a row."""
        return self._in_rows([self.profile.given_bytes(i) for i in range(self.num_layers)])

    @cached_property
    def handed_on(self) -> Table:
        """Bytes that the last layer passes on; the same in a column."""
        return np.tile(np.append(0.0, self._of("output_bytes")), (self.num_layers, 1))

    @cached_property
    def given_back(self) -> Table:
        """Bytes of the gradient that the last layer is given; the same in a column."""
        return np.tile(np.append(0.0, self._of("output_grad_bytes")), (self.num_layers, 1))

    @cached_property
    def handed_back(self) -> Table:
        """Bytes of the gradient that the first layer returns; the same in a row, 0 in the first."""
        return self._in_rows(np.append(0.0, self._of("output_grad_bytes")[:-1]))

    @cached_property
    def slot(self) -> Table:
        """Bytes of a slot of a stage's CUDA graphs: its storages at fixed addresses.

        Each storage counts once: what the layers save, as without graphs; copies of the inputs;
        outputs that are not saved; and the gradients of outputs and of inputs. The outputs of the
        last stage are what the loss is given. The loss runs without graphs, and what it saves is
        not counted.
        """
        return self._slot("input_grads_at")

    @cached_property
    def segment_slot(self) -> Table:
        """The same of a later segment of a stage, whose input gradients stay as they are made."""
        return self._slot("segment_grads_at")

    @cached_property
    def slot_for_weights(self) -> Table:
        """Bytes of a slot in addition with a split backward: the gradients that I leaves for W."""
        of_outputs = np.append(0.0, self._of("held_output_grad_bytes"))
        table: Table = np.maximum(self._sums("held_grad_bytes") - of_outputs, 0.0)
        return table

    @cached_property
    def slot_pool(self) -> Table:
        """The most bytes in use in a slot, whose pool keeps room for temporary tensors."""
        backward = self.backward_peak - self.given_back + self._unsaved_outputs
        return np.maximum(self.slot, self._around_slot + np.maximum(self.forward_peak, backward))

    @cached_property
    def split_slot_pool(self) -> Table:
        """The same with a split backward, whose I leaves in the slot what W reads."""
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
        """Bytes that a stage makes and passes on, or gives to the loss, and does not save."""
        own = np.zeros((self.num_layers, self.num_layers + 1))
        for maker, layer in enumerate(self.profile.layers):
            for one in (*layer.saved, *layer.passing):
                until = min((one.last_use, *one.savers))
                own[maker, maker + 1 : maker + 1 + until] += one.total_bytes
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
    """What the stages of one rank cost together.

    The largest over `moments` of a sum over its stages.
    `stages` names them. `moments[m][k]` gives, when called, the table of stage `stages[k]` at
    moment m of the step: an array (L, L + 1) whose entry [i, e] is the cost of that stage when it
    holds layers i up to e (e > i; the rest is not read). Where a rank has one stage, all its
    moments may be folded into one table, the largest of each entry.
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
