"""A model's profile as plain data: time, bytes and storages of every layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gems.errors import ConfigError
from gems.utils.units import sides_of


@dataclass(frozen=True, slots=True)
class Saved:
    """`count` equal storages that a layer makes, each of `num_bytes`.

    Layers are numbered relative to the maker, which is 0. Without savers, backward never reads the
    storage.

    Attributes:
        savers: the layers that save it for backward, in order.
        last_use: the last layer that receives it, to read it or to pass it on.
        is_product: whether a convolution or a matrix product made it, so that a selective recompute
            keeps it.
        weight_readers: later layers whose weight gradient reads it.
        conv_savers: the savers in which a convolution saves it as its input.
    """

    num_bytes: int
    savers: tuple[int, ...] = (0,)
    last_use: int = 0
    count: int = 1
    is_product: bool = False
    weight_readers: tuple[int, ...] = ()
    conv_savers: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_bytes * self.count

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Saved:
        """Read a storage from a JSON document."""
        return cls(
            int(entry["num_bytes"]),
            tuple(int(saver) for saver in entry["savers"]),
            int(entry["last_use"]),
            int(entry["count"]),
            bool(entry["is_product"]),
            tuple(int(reader) for reader in entry.get("weight_readers", ())),
            tuple(int(saver) for saver in entry.get("conv_savers", ())),
        )


def counted(storages: Iterable[Saved]) -> tuple[Saved, ...]:
    """Merge equal storages, in order of first occurrence."""
    numbers: Counter[Saved] = Counter()
    for storage in storages:
        numbers[replace(storage, count=1)] += storage.count
    return tuple(replace(storage, count=number) for storage, number in numbers.items())


def stash_of(saved: Iterable[Saved]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return `stash_bytes` and `saved_later` of a layer from its saved storages."""
    by_first: dict[int, int] = {}
    for storage in saved:
        if storage.savers:
            first = storage.savers[0]
            by_first[first] = by_first.get(first, 0) + storage.total_bytes
    return by_first.pop(0, 0), tuple(sorted(by_first.items()))


def product_bytes_of(storages: Iterable[Saved]) -> int:
    """Return the bytes that a selective recompute keeps."""
    return sum(storage.total_bytes for storage in storages if storage.is_product)


def saved_from(
    stash_bytes: int, saved_later: Iterable[tuple[int, int]], cheap_bytes: int = 0
) -> tuple[Saved, ...]:
    """Return storages, one per first saver, that match the sums of a profile without storages."""
    cheap = min(cheap_bytes, stash_bytes)
    own = (Saved(cheap, is_product=True), Saved(stash_bytes - cheap))
    later = (Saved(num_bytes, (ahead,), ahead) for ahead, num_bytes in saved_later)
    return tuple(storage for storage in (*own, *later) if storage.num_bytes)


SCHEMA = "gems.profile/1"
# keys of facts
LIBRARY_BYTES = "library_bytes"
CUDA_GRAPHS = "cuda_graphs"


def _value(default: Any, long_name: str) -> Any:
    """Return a field of `LayerProfile` with its default and its long name for trace files."""
    return field(default=default, metadata={"long_name": long_name})


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer on one micro-batch: times in seconds, sizes in bytes, pairs (layers away, bytes).

    Each storage that backward needs is counted once, at the layer that makes it: in `stash_bytes`
    if that layer saves it, in `saved_later` if a later layer is the first to save it. So a stage of
    layers i..j keeps their stashes, and the part of `saved_later` that is first saved up to j.
    `saved` lists these storages with all their savers; by default it follows from the two sums.
    `passing` has unsaved storages that a recomputed segment keeps: outputs, and results of
    convolutions and matrix products.

    Peaks of forward include stash and outputs, but not inputs. `backward_peak_bytes` includes
    gradients of outputs and inputs beyond the saved bytes, but not gradients of parameters, which
    always stay. `backward_peak_at` has different peaks for some ends of the stage, beyond the
    output gradients that the stage holds throughout, and `passed_at` the part of those that a stage
    beginning here passes on in a copy. `held_for_weights_bytes` includes `held_input_bytes` and
    `held_output_grad_bytes`, which a stage counts itself at its ends. Values named `cheap` belong
    to selective recomputation, which keeps the results of convolutions and matrix products.

    Raises:
        ValueError: `saved` and `passing` do not add up to `stash_bytes`, `saved_later` and
            `cheap_bytes`.
    """

    name: str
    kind: str
    forward_s: float = _value(0.0, "forward of one micro-batch")
    input_grad_s: float = _value(0.0, "input gradient of one micro-batch")
    weight_grad_s: float = _value(0.0, "weight gradient of one micro-batch")
    recompute_s: float = _value(0.0, "forward again, before backward")
    cheap_s: float = _value(0.0, "forward again without convolutions and matrix products")
    split_s: float = _value(0.0, "more of a backward where its two gradients are computed apart")
    param_bytes: int = _value(0, "parameters")
    buffer_bytes: int = _value(0, "buffers, such as running statistics")
    stash_bytes: int = _value(0, "made and saved by the layer itself")
    saved_later: tuple[tuple[int, int], ...] = _value(
        (), "made here, and saved first by the layer so many further on"
    )
    output_bytes: int = _value(0, "tensors handed on")
    output_grad_bytes: int = _value(0, "gradients of the tensors handed on")
    score_bytes: int = _value(0, "given to the loss, and saved by no layer")
    loss_bytes: int = _value(0, "saved by the loss")
    score_grad_bytes: int = _value(0, "gradients of the tensors given to the loss")
    unsaved_input_bytes: int = _value(0, "given and saved by no earlier layer")
    unsaved_from: tuple[tuple[int, int], ...] = _value(
        (), "given and not yet saved, made by the layer so many back"
    )
    workspace_bytes: int = _value(0, "used and let go within the layer")
    forward_peak_bytes: int = _value(0, "most made at once in forward")
    backward_peak_bytes: int = _value(0, "most at once in backward")
    backward_peak_at: tuple[tuple[int, int], ...] = _value(
        (), "most in backward where the stage ends so many layers further on"
    )
    passed_at: tuple[tuple[int, int], ...] = _value(
        (), "passed on as it is by a stage that begins here and ends so many layers further on"
    )
    input_grads_at: tuple[tuple[int, int], ...] = _value(
        (), "gradients of inputs that such a stage makes, if not one for each of them"
    )
    segment_grads_at: tuple[tuple[int, int], ...] = _value(
        (), "the same of a later segment of a stage, whose gradients stay as they are made"
    )
    held_for_weights_bytes: int = _value(0, "kept between input gradient and weight gradient")
    held_input_bytes: int = _value(0, "inputs among what is kept for the weight gradient")
    held_output_grad_bytes: int = _value(
        0, "gradients of outputs among what is kept for the weight gradient"
    )
    held_grad_bytes: int = _value(0, "made by the input gradient, and kept for the weight gradient")
    plain_peak_bytes: int = _value(0, "most made at once in a forward that keeps nothing")
    cheap_bytes: int = _value(0, "given by convolutions and matrix products")
    cheap_first_peak_bytes: int = _value(0, "most made at once in a forward that keeps only those")
    cheap_peak_bytes: int = _value(0, "most made at once in a second forward that is given those")
    saved: tuple[Saved, ...] = _value((), "made here and saved for backward")
    passing: tuple[Saved, ...] = _value((), "made here and saved by nobody")

    def __post_init__(self) -> None:
        if not self.saved:
            object.__setattr__(
                self, "saved", saved_from(self.stash_bytes, self.saved_later, self.cheap_bytes)
            )
            return
        stated = (
            self.stash_bytes,
            tuple(pair for pair in self.saved_later if pair[1]),
            self.cheap_bytes,
        )
        sums = (*stash_of(self.saved), product_bytes_of((*self.saved, *self.passing)))
        if stated != sums:
            raise ValueError(
                f"layer {self.name}: stash_bytes, saved_later and cheap_bytes are {stated}, "
                f"but its storages add up to {sums}"
            )

    @property
    def kept_bytes(self) -> int:
        """The bytes made by the layer that are saved for backward, by it or by a later layer."""
        return self.stash_bytes + sum(num_bytes for _, num_bytes in self.saved_later)

    @property
    def time_s(self) -> float:
        """Forward and whole backward of one micro-batch, in seconds."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


def _names(kind: str) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(LayerProfile) if entry.type == kind)


TIMES, SIZES, PAIRS, STORAGES = map(
    _names, ("float", "int", "tuple[tuple[int, int], ...]", "tuple[Saved, ...]")
)
LONG_NAMES = {
    each.name: each.metadata["long_name"] for each in fields(LayerProfile) if each.metadata
}


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """All layers of a model on one micro-batch of one shape, on one device."""

    model: str
    height_px: int
    width_px: int
    micro_batch_size: int
    dtype: str
    device: str
    source: str
    layers: tuple[LayerProfile, ...]
    input_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    depth_px: int | None = None

    @property
    def sides(self) -> dict[str, int]:
        """The size of a sample along each axis, by name: of a volume, the depth first."""
        return sides_of(self)

    @property
    def library_bytes(self) -> int:
        """The bytes that cuBLAS and cuDNN hold on each rank's device."""
        return int(self.facts.get(LIBRARY_BYTES, 0))

    @property
    def is_captured(self) -> bool:
        """Whether the layers run as CUDA graphs, whose memory is never freed."""
        return bool(self.facts.get(CUDA_GRAPHS, False))

    def captured(self, is_captured: bool) -> ModelProfile:
        """Return the profile of layers that run as CUDA graphs, or do not."""
        if is_captured == self.is_captured:
            return self
        return replace(self, facts={**self.facts, CUDA_GRAPHS: is_captured})

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def given_bytes(self, layer: int) -> int:
        """Return the bytes of a layer's inputs: the previous layer's outputs, or the images."""
        return self.layers[layer - 1].output_bytes if layer else self.input_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON document for `profile.path`."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], path: object = "document") -> ModelProfile:
        """Read a document of `to_json`.

        Raises:
            ConfigError: the schema is another one, a field is invalid, or there are no layers.
        """

        def refusal(text: str) -> ConfigError:
            return ConfigError(
                "profile.path", path, text, "make it again with `gems profile --json`"
            )

        schema = document.get("schema")
        if schema != SCHEMA:
            raise refusal(f"must hold a profile of schema {SCHEMA}, not {schema}")
        try:
            layers = tuple(_layer(entry) for entry in document["layers"])
            values = {f.name: document[f.name] for f in fields(cls) if f.name in document}
            _check_fields(cls, values)
            profile = cls(**(values | {"layers": layers}))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise refusal(f"holds no whole profile ({error})") from error
        if not profile.layers:
            raise refusal("holds no layers")
        return profile


def _check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a field of the wrong type, or an invalid time or size."""
    takes = {
        "str": str,
        "int": int,
        "int | None": int | None,
        "float": int | float,
        "Mapping[str, str]": Mapping,
        "Mapping[str, Any]": Mapping,
    }
    for entry in fields(kind):
        wanted = takes.get(str(entry.type))
        value = values.get(entry.name)
        if wanted is None or entry.name not in values:
            continue
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TypeError(f"{entry.name} is {value!r}, no {entry.type}")
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ValueError(f"{entry.name} is {value!r}, no size or time")


def _layer(entry: Mapping[str, Any]) -> LayerProfile:
    if not isinstance(entry, Mapping):
        raise TypeError(f"a layer is {entry!r}, no mapping")
    _check_fields(LayerProfile, entry)
    pairs = {
        name: tuple((int(layers), int(num_bytes)) for layers, num_bytes in entry.get(name, ()))
        for name in PAIRS
    }
    storages = {
        name: tuple(Saved.from_json(storage) for storage in entry.get(name, ()))
        for name in STORAGES
    }
    return LayerProfile(**(dict(entry) | pairs | storages))
