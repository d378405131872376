"""Plain data of the work and memory in each strip of an image, by layer and stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "gems.strips/3"
WORK_SCHEMA = "gems.strip_work/1"
# fact of a profile: the share of each layer's work in each strip
STRIP_SHARES = "strip_shares"
# fact of a profile: how many times as long as whole images strips take
STRIPS_OVER_WHOLE = "strips_over_whole"
Sizes = tuple[int, ...]  # bytes of storages


@dataclass(frozen=True, slots=True)
class StripBytes:
    """One strip of one micro-batch on one stage, in bytes.

    Attributes:
        given: inputs from the previous stage, or its rows of the images.
        handed_on: outputs to the next stage.
        given_back, handed_back: the gradients of `handed_on` and of `given`.
        saved: storages that it makes and saves for backward.
        saved_outputs: saved storages that are also outputs.
        carried: storages carried over from earlier strips.
        saved_carried: carried storages that it saves for backward.
        saved_by_loss: storages that the loss makes and saves, for the last strip.
        left: carries that wait for later strips.
        waiting: inputs of the loss that nothing else reads, until the loss has run.
        loss_gradient: for the last strip, the gradients of earlier strips' inputs of the loss,
            until the backward of the first strip has run.
        carried_back: gradients of the carries of this and later strips, until the strips that made
            them have read these gradients in their backward.
        slot: its bytes in a slot of CUDA graphs.
        shared_slot: the bytes that its graphs need of the slot that strips under a memory policy
            share, with what was carried to it and what it leaves.
        held_for_weights: bytes kept from its input gradient to its weight gradient.
        made_for_weights: the part of these bytes that forward has neither saved nor received.
        made_by_backward: the part of those that are no gradients of what the strip gives or leaves.
        forward_peak: the peak of its forward; likewise the three below, beyond the saved bytes.
    """

    given: int
    handed_on: int
    given_back: int
    handed_back: int
    saved: Sizes
    saved_outputs: Sizes
    carried: Sizes
    saved_carried: Sizes
    saved_by_loss: Sizes
    left: int
    waiting: int
    loss_gradient: int
    carried_back: int
    slot: int
    shared_slot: int
    held_for_weights: int
    made_for_weights: int
    made_by_backward: int
    forward_peak: int
    backward_peak: int
    input_gradient_peak: int
    weight_gradient_peak: int

    @property
    def kept(self) -> int:
        """Bytes that forward keeps until backward."""
        return sum((*self.saved, *self.saved_outputs, *self.saved_carried, *self.saved_by_loss))


@dataclass(frozen=True, slots=True)
class StripProfile:
    """The strips of each stage, first to last, of a model that is cut at `boundaries`.

    If ranks read images strip by strip (`reads_rows`), they never hold a whole one. If they hold them
    as bytes until strips take their rows, `byte_images` are those of a micro-batch. `masks` are the
    bytes of the parts of masks that the losses of strips take, or those of whole masks if the loss
    follows the last strip; with `reads_masks` the parts are read with their strips.
    """

    boundaries: tuple[int, ...]
    stages: tuple[tuple[StripBytes, ...], ...]
    reads_rows: bool = False
    byte_images: int = 0
    masks: Sizes = ()
    reads_masks: bool = False

    @property
    def num_strips(self) -> int:
        """Strips of an image."""
        return len(self.stages[0])

    def most(self, stage: int, name: str) -> int:
        """Return the largest value of a field over the strips of a stage."""
        return max(int(getattr(strip, name)) for strip in self.stages[stage])

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of the cache."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StripProfile:
        """Read a document of `to_json`."""

        def read(strip: Mapping[str, Any]) -> StripBytes:
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in strip.items()
            }
            return StripBytes(**fields)

        stages = tuple(tuple(map(read, stage)) for stage in document["stages"])
        return cls(tuple(document["boundaries"]), stages, masks=tuple(document["masks"]))


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The shares of a layer's work in each strip, and the strips that it takes at once.

    The shares sum to 1. The strips at once are those of its largest operation.
    """

    at_once: int
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StripWork:
    """The work of each layer of a model by strip."""

    layers: tuple[LayerWork, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of the cache."""
        return {"schema": WORK_SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StripWork:
        """Read a document of `to_json`."""
        return cls(
            tuple(
                LayerWork(entry["at_once"], tuple(entry["shares"])) for entry in document["layers"]
            )
        )
