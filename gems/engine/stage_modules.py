"""The modules of stages: layers of the model, or operators of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gems.config.schema import DataConfig, RunSpec
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.models import Layer, layers_of
from gems.models.blocks.chain import operator_module
from gems.models.build import TensorSpec, boundary_shapes, build_layer, input_spec, model_output
from gems.models.imported.parts import release
from gems.models.mixed import Precision, compute_in
from gems.models.steps import Operator, operators_of, whole_layers
from gems.plan.draft import Draft
from gems.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StageModules:
    """The parts of the model of each stage: `units[boundaries[s]:boundaries[s + 1]]`.

    Units are whole layers, or operators if stages form a graph, in which each operator is a stage.
    """

    layers: tuple[Layer, ...]
    units: tuple[Operator, ...]
    boundaries: tuple[int, ...]

    @classmethod
    def from_spec(
        cls, spec: RunSpec, schedule: Schedule, boundaries: tuple[int, ...] | None
    ) -> StageModules:
        """Return those of a run; a chain of stages without `boundaries` is cut anew."""
        layers = layers_of(spec.model, spec.data)
        if schedule.placement.is_chain:
            boundaries = boundaries or Draft(spec).partition(schedule).boundaries
            return cls(layers, whole_layers(layers), boundaries)
        units = operators_of(layers)
        return cls(layers, units, tuple(range(len(units) + 1)))

    def units_of(self, stage: int) -> tuple[Operator, ...]:
        """Return the parts of a stage, in order."""
        return self.units[self.boundaries[stage] : self.boundaries[stage + 1]]

    def layer_names(self, stage: int) -> list[str]:
        """Return the names of the layers to which the parts of a stage belong."""
        return [self.layers[unit.layer].name for unit in self.units_of(stage)]

    def unit_names(self, stage: int) -> list[str]:
        """Return the names of the parts of a stage."""
        return [unit.name for unit in self.units_of(stage)]

    def numbered(self, stage: int, modules: Iterable[nn.Module]) -> list[NumberedLayer]:
        """Return the modules of a stage with the places of their layers in the whole model."""
        return [
            NumberedLayer(unit.layer, self.layers[unit.layer].name, module)
            for unit, module in zip(self.units_of(stage), modules, strict=True)
        ]

    def build(
        self, stages: Iterable[int], seed: int, precision: Precision, device: torch.device | str
    ) -> dict[int, nn.ModuleList]:
        """Build the modules of stages.

        Parameters depend on seed and layer alone, wherever they are built. Modules on the meta
        device are not set to compute in low precision.
        """
        built: dict[int, nn.ModuleList] = {}
        whole = nn.Module()
        last: int | None = None
        for stage in sorted(stages):
            built[stage] = nn.ModuleList()
            for unit in self.units_of(stage):
                if unit.layer != last:
                    last = unit.layer
                    whole = build_layer(self.layers[last], last, seed, precision.parameters, device)
                part = operator_module(unit, whole)
                built[stage].append(part if device == "meta" else compute_in(part, precision))
        release()
        return built

    def output(self, data: DataConfig, size: int, dtype: torch.dtype) -> Any:
        """Return the model's output for a micro-batch of `size` samples, as meta tensors."""
        given = input_spec(data, size, dtype)
        shapes = [(given,), *boundary_shapes(self.layers[:-1], given.shape, dtype, given.dtype)]
        return model_output(self.layers[-1], shapes[-1], dtype)

    def output_specs(
        self, data: DataConfig, size: int, precision: Precision, training: bool = True
    ) -> Sequence[tuple[TensorSpec, ...]]:
        """Return the output tensors of each stage but the last, of `size` samples at once."""
        wide = precision.parameters
        given = input_spec(data, size, wide)
        of_layers = boundary_shapes(self.layers, given.shape, precision, given.dtype, training)
        inner = [number for number, unit in enumerate(self.units) if unit.path != ""]
        parts = self.build(inner, 0, precision, "meta")  # each of them is a stage
        specs: list[tuple[TensorSpec, ...]] = []
        for number, unit in enumerate(self.units):
            if number not in parts:
                specs.append(of_layers[unit.layer])
                continue
            inputs = [spec for other in unit.predecessors for spec in specs[other]] or [given]
            tensors = [torch.empty(spec.shape, dtype=wide, device="meta") for spec in inputs]
            with torch.no_grad():
                output = parts[number].eval()[0](*tensors)
            specs.append((TensorSpec(unit.name, tuple(output.shape), precision.compute),))
        return [specs[boundary - 1] for boundary in self.boundaries[1:-1]]
