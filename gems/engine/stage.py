"""The interface of a stage: layers that move together between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from gems.autograd.split_backward.layers import SplitLayers
from gems.streaming.block_plan import Box

Tensors = tuple[Tensor, ...]
# of the output of the last layer: a tensor, or tensors in tuples, lists and dicts
Loss = Callable[[Any], Tensor]
StageKey = tuple[int, int]  # direction, stage
SegmentKey = tuple[int, int, int | None]  # direction, stage, segment


class Stage(Protocol):
    """Runs its layers, for several micro-batches in flight.

    `index` is a micro-batch, or a strip of one. For each index `forward` comes first, then
    `recompute` if the forward was to be run again, then `backward`, or `backward_input` and
    `backward_weight` (Qi et al. 2023, section 2).

    Attributes:
        modules: The layers.
        stash_bytes: The bytes that a forward keeps, without parameters, buffers and inputs;
            measured on the first micro-batch.
        gives_parts: Whether `infer` returns the outputs of each strip, in place of whole maps after
            the last one.
    """

    modules: nn.ModuleList
    stash_bytes: int | None
    gives_parts: bool

    @property
    def held_for_weights_bytes(self) -> int | None:
        """Return the bytes that `backward_input` leaves for `backward_weight`.

        They are measured on the first micro-batch, without received gradients; None before.
        """

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run the layers and keep what backward needs.

        Return the tensors of the next boundary, detached. On the last stage, `loss` turns the
        model's output into a scalar, which is returned. If `is_split`, `backward_input` and
        `backward_weight` will follow instead of `backward`. If it `is_run_again`, `recompute` will
        come before them, and a stage may keep no more than it needs for that.
        """

    def recompute(
        self, index: int, loss: Loss | None = None, images: Sequence[Tensor] = ()
    ) -> None:
        """Run the layers again, and keep what backward needs.

        `images` are the forward's inputs, read again: of a strip that is run again, the first stage
        keeps no part of an image.

        Raises:
            RuntimeError: An input was changed in place in the meantime.
        """

    def backward(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Add to the parameters' gradients, and free what forward kept.

        Take the gradients of the floating-point outputs. Return the gradients of the floating-point
        inputs, and the inputs themselves, which nothing reads any more.
        """

    def backward_input(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Compute the input gradients like `backward`; keep only what the weight gradients need.

        Weight gradients of layers that cannot be split are added now. The storages in `still_read`
        must not change until `backward_weight`.

        Raises:
            RuntimeError: A tensor that is needed was changed in place.
        """

    def backward_weight(self, index: int) -> None:
        """Add the weight gradients that `backward_input` deferred, and free what it kept.

        Raises:
            RuntimeError: A tensor that is needed was changed in place after `backward_input`.
        """

    def infer(self, inputs: Sequence[Tensor]) -> Any:
        """Run the layers for evaluation, keep nothing, and return the output of the last layer."""

    def part_of(self, index: int) -> Box | None:
        """Return which part of the maps of labels the outputs of an index are; None: all."""

    def split_layers(self) -> SplitLayers:
        """Prepare the layers for a split backward once, and return them."""

    def watched(self, watch: Callable[[str, tuple[Any, ...]], None]) -> AbstractContextManager[Any]:
        """Pass the outputs of operations to `watch`, with the names of their modules.

        A stage that calls its modules passes nothing: hooks of the modules see their outputs.
        """

    def still_read(self, index: int) -> set[int]:
        """Return the addresses of the storages that `backward_weight` will read."""

    def brought_bytes(self, index: int) -> int:
        """Return by how many bytes a forward changed the kept memory."""

    def kept_bytes(self, index: int) -> int:
        """Return how many of the kept bytes a backward frees."""

    def held_bytes(self, index: int) -> int:
        """Return the bytes that `backward_input` left for `backward_weight`."""

    def reset(self) -> None:
        """Drop all micro-batches in flight after a failed step."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, their gradients, low copies and buffers."""

    @property
    def num_in_flight(self) -> int:
        """Return the number of micro-batches whose backward is not complete."""
