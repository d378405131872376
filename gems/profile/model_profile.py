"""A model's profile as plain data: the time and the bytes of every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gems.errors import ConfigError
from gems.profile.saved_storages import Saved, product_bytes_of, saved_from, stash_of

SCHEMA = "gems.profile/1"
SOURCES = ("measured", "fake", "incremental", "analytic")


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer on one micro-batch. Times are seconds, sizes bytes.

    Of what backward needs, each storage is counted once, where it is made: `stash_bytes` are those that the layer
    makes and saves itself, `saved_later` those that it makes and hands on and that another layer is the first to save:
    pairs (how many layers further on, bytes). Inputs are counted where they were made. So a stage of layers i..j keeps
    the stashes of its layers, and of `saved_later` what is saved up to j.

    `forward_peak_bytes` is the most that the layer makes at once in forward, stash and outputs among it, beside what it
    was given; `unsaved_input_bytes` what it was given and no earlier layer has saved, held only while it runs, and
    `unsaved_from` who made that: pairs (how many layers back, bytes), none for the layer before.
    `backward_peak_bytes` is the most at once in its backward, output and input gradients among it, beyond all that is
    saved when it begins; the gradients of the parameters are not in it, since they stay. `backward_peak_at` has the
    cases where that is another: pairs (how many layers further on the stage ends, the most beyond the gradients that
    the stage was given for its outputs, which it holds throughout). `passed_at` is what of those a stage that begins
    with this layer passes on as it is, in a copy: pairs (how many layers further on it ends, bytes). `workspace_bytes` is the
    larger of what forward and backward use and let go within the layer. `held_for_weights_bytes` is what a split
    backward keeps of a layer between I and W; of that `held_input_bytes` are its inputs and `held_output_grad_bytes` the
    gradients of its outputs, which the stage counts itself where they are its own.

    `saved` has the storages behind `stash_bytes` and `saved_later` one by one, with all that save them, so that parts of a
    stage can keep different ones; where it is not given it is made from those two. `passing` has those that nobody saves
    and that a segment keeps that is run again: what is handed on, and what a convolution or a matrix product gave.
    `cheap_bytes` is what such operations gave, saved or not, which a cheap second run keeps from the first.
    `plain_peak_bytes` is the most that a forward makes at once that keeps nothing, because it will be run again,
    `cheap_first_peak_bytes` that of one that keeps what such operations gave, and `cheap_peak_bytes` the most that the second run makes at once beside what was kept, and `cheap_s` its time.

    Raises:
        ValueError: `saved` and `passing` do not add up to `stash_bytes`, `saved_later` and `cheap_bytes`.
    """

    name: str
    kind: str
    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    recompute_s: float = 0.0
    cheap_s: float = 0.0
    param_bytes: int = 0
    buffer_bytes: int = 0
    stash_bytes: int = 0
    saved_later: tuple[tuple[int, int], ...] = ()
    output_bytes: int = 0
    output_grad_bytes: int = 0
    unsaved_input_bytes: int = 0
    unsaved_from: tuple[tuple[int, int], ...] = ()
    workspace_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    backward_peak_at: tuple[tuple[int, int], ...] = ()
    passed_at: tuple[tuple[int, int], ...] = ()
    held_for_weights_bytes: int = 0
    held_input_bytes: int = 0
    held_output_grad_bytes: int = 0
    plain_peak_bytes: int = 0
    cheap_bytes: int = 0
    cheap_first_peak_bytes: int = 0
    cheap_peak_bytes: int = 0
    saved: tuple[Saved, ...] = ()
    passing: tuple[Saved, ...] = ()

    def __post_init__(self) -> None:
        if not self.saved:
            object.__setattr__(self, "saved", saved_from(self.stash_bytes, self.saved_later, self.cheap_bytes))
            return
        told = (self.stash_bytes, tuple(pair for pair in self.saved_later if pair[1]), self.cheap_bytes)
        found = (*stash_of(self.saved), product_bytes_of((*self.saved, *self.passing)))
        if told != found:
            raise ValueError(
                f"layer {self.name}: stash_bytes, saved_later and cheap_bytes are {told}, its storages say {found}"
            )

    @property
    def kept_bytes(self) -> int:
        """What the layer makes that is saved for backward, by itself or by a later layer."""
        return self.stash_bytes + sum(num_bytes for _, num_bytes in self.saved_later)

    @property
    def time_s(self) -> float:
        """Forward and whole backward of one micro-batch, in seconds."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


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

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def given_bytes(self, layer: int) -> int:
        """Return the bytes that the layer gets from the one before it, or from the data."""
        return self.layers[layer - 1].output_bytes if layer else self.input_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the profile as the document that `profile.path` reads."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], path: object = "document") -> ModelProfile:
        """Read what `to_json` gave.

        Raises:
            ConfigError: no profile, one of another schema, or one without layers.
        """
        schema = document.get("schema")
        if schema != SCHEMA:
            raise ConfigError(
                "profile.path", path, f"must hold a profile of schema {SCHEMA}, not {schema}",
                "make it again with `gems profile --json`",
            )  # fmt: skip
        try:
            layers = tuple(_layer(entry) for entry in document["layers"])
            values = {f.name: document[f.name] for f in fields(cls) if f.name in document}
            _check_fields(cls, values)
            profile = cls(**(values | {"layers": layers}))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                "profile.path", path, f"holds no whole profile ({error})", "make it again with `gems profile --json`"
            ) from error
        if not profile.layers:
            raise ConfigError("profile.path", path, "holds no layers", "make it again with `gems profile --json`")
        return profile


def _check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a field that is not of its type, or a number that is no time and no size."""
    takes = {"str": str, "int": int, "float": int | float, "Mapping[str, str]": Mapping, "Mapping[str, Any]": Mapping}
    for each in fields(kind):
        wanted, value = takes.get(str(each.type)), values.get(each.name)
        if wanted is None or each.name not in values:
            continue
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TypeError(f"{each.name} is {value!r}, no {each.type}")
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ValueError(f"{each.name} is {value!r}, no size or time")


def _layer(entry: Mapping[str, Any]) -> LayerProfile:
    if not isinstance(entry, Mapping):
        raise TypeError(f"a layer is {entry!r}, no mapping")
    _check_fields(LayerProfile, entry)
    pairs = {
        name: tuple((int(layers), int(num_bytes)) for layers, num_bytes in entry.get(name, ()))
        for name in ("saved_later", "unsaved_from", "backward_peak_at", "passed_at")
    }
    storages = {
        name: tuple(Saved.from_json(storage) for storage in entry.get(name, ())) for name in ("saved", "passing")
    }
    return LayerProfile(**(dict(entry) | pairs | storages))
