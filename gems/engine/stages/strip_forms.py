"""A rank's stages in strips, for training and evaluation, and the tensors passed with each."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gems.autograd.random_draws import RandomDraws
from gems.config.schema import DataConfig, ParallelConfig
from gems.engine.stage import StageKey
from gems.engine.stage_modules import StageModules
from gems.engine.stages.boundary_tensors import BoundaryTensors
from gems.errors import ConfigError
from gems.models.build import TensorSpec, input_spec
from gems.models.mixed import Precision, compute_in
from gems.models.streaming_errors import KEY, config_errors, until_in
from gems.streaming.block_plan import Box
from gems.streaming.strip_run import Draws
from gems.streaming.strip_stage import Boundary, StripStage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StripForms:
    """The streaming forms of a rank's stages, and the tensors between all stages.

    `norm_ends` are the ends of the per-strip norms of all stages; with them, one process normalizes
    in the same way. `parts` are the parts of maps that the strips of the last stage give, if it
    gives such maps.
    """

    forms: Mapping[StageKey, StripStage]
    specs: Sequence[tuple[TensorSpec, ...]]  # for each strip of each stage but the last, in order
    norm_ends: Mapping[str, tuple[int, ...]]
    parts: Sequence[Box] | None = None


def find_forms(
    data: DataConfig,
    parallel: ParallelConfig,
    stages: StageModules,
    modules: Mapping[StageKey, nn.ModuleList],
    precision: Precision,
    is_training: bool = True,
) -> StripForms:
    """Return the streaming forms of a run's stages, the same on all ranks.

    Each rank traces the whole model. Stages of other ranks are traced without memory, to find the
    rows that they give in each strip. Layers are traced in the mode of training or of evaluation,
    and left in training mode.

    Raises:
        ConfigError: A layer needs the whole image.
    """
    strips = parallel.num_strips
    grid = parallel.grid
    spec = input_spec(data, parallel.micro_batch_size, precision.compute)
    passed = BoundaryTensors((Boundary.even(spec.shape, spec.dtype, grid),), strips)
    forms: dict[StageKey, StripStage] = {}
    specs: list[tuple[TensorSpec, ...]] = []
    norm_ends: dict[str, tuple[int, ...]] = {}
    num_stages = len(stages.boundaries) - 1
    layers = [layer.name for layer in stages.layers]
    form = None
    for stage in range(num_stages):
        names = stages.layer_names(stage)
        until = until_in(names, layers, parallel.strips_until)
        form = None
        for key in [key for key in modules if key[1] == stage]:
            form = forms[key] = _form(
                zip(names, modules[key], strict=True), passed, parallel, is_training, until
            )
        if form is None:
            built = stages.build([stage], 0, precision, "meta")[stage]
            # `build` does not set layers without memory to compute in low precision
            low = (compute_in(module, precision) for module in built)
            form = _form(zip(names, low, strict=True), passed, parallel, is_training, until)
        norm_ends |= form.norm_ends
        passed = BoundaryTensors(form.outputs, strips)
        if stage < num_stages - 1:
            specs += map(passed.specs, range(strips))
    assert form is not None
    return StripForms(forms, specs, norm_ends, form.parts_of(data.sides_px))


def find_evaluation_forms(
    data: DataConfig,
    parallel: ParallelConfig,
    stages: StageModules,
    modules: Mapping[StageKey, nn.ModuleList],
    precision: Precision,
    is_logged: bool,
) -> StripForms | None:
    """Return the forms of the stages for evaluation, in direction 0.

    Return None if a layer needs whole images in evaluation only.
    """
    try:
        forward = {key: modules[key] for key in modules if not key[0]}
        return find_forms(data, parallel, stages, forward, precision, False)
    except ConfigError as error:
        if is_logged:
            _log.warning(
                "evaluation runs whole images, since not all layers run in strips there: %s", error
            )
        return None


def draws_in(layers: Iterable[tuple[str, nn.Module]], draws: RandomDraws) -> Draws:
    """Return the seeds of named layers' modules, by the checksums of their names in a trace.

    The modules draw from the same seeds without strips.
    """
    streams = {}
    for name, layer in layers:
        for path, _ in layer.named_modules():
            traced = f"{name}.{path}" if path else name
            streams[zlib.crc32(traced.encode())] = zlib.crc32(draws.name_of(name, path).encode())
    return lambda checksum: draws.seed_of(streams[checksum])


def _form(
    layers: Iterable[tuple[str, nn.Module]],
    passed: BoundaryTensors,
    parallel: ParallelConfig,
    is_training: bool,
    until: str | None,
) -> StripStage:
    named = [(name, module.train(is_training)) for name, module in layers]
    try:
        with torch.set_grad_enabled(is_training), config_errors(parallel.strips):
            form = StripStage(
                named, passed.boundaries, parallel.grid, parallel.min_strip_positions, until
            )
    finally:
        for _, module in named:
            module.train()
    if form.draws_by_row is not None:
        raise ConfigError(
            KEY,
            parallel.strips,
            f"layer {form.draws_by_row} drops values of a map, at random by rows, which no "
            "process without strips does alike",
            f"use nn.Dropout2d, set its rate to 0, or set {KEY}=1",
        )
    if form.draws and not is_training:
        raise ConfigError(
            KEY, parallel.strips, "layers draw random numbers in evaluation too", f"set {KEY}=1"
        )
    return form
