"""The modules of stages: layers of the model or, if stages form a graph, its operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gems.autograd.outputs import as_tuple
from gems.config.schema import RunSpec
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.models import Layer, layers_of
from gems.models.blocks.chain import operator_module
from gems.models.build import (
    Dtype,
    TensorSpec,
    as_precision,
    boundary_shapes,
    build_layer,
    build_layers,
    input_spec,
    model_output,
)
from gems.models.mixed import Precision, compute_in
from gems.models.steps import Operator, operators_of
from gems.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class StageModules:
    """What each stage consists of.

    `layers[boundaries[s]:boundaries[s + 1]]`, or `operators[s]` if there are any.
    """

    layers: tuple[Layer, ...]
    boundaries: tuple[int, ...]
    operators: tuple[Operator, ...] = ()

    @classmethod
    def from_spec(
        cls, spec: RunSpec, placement: Placement, boundaries: tuple[int, ...]
    ) -> StageModules:
        """Return those of a run; `boundaries` are empty if the stages form a graph."""
        layers = layers_of(spec.model, spec.data)
        return cls(layers, boundaries, () if placement.feeders is None else operators_of(layers))

    def layer_names(self, stage: int) -> list[str]:
        """Return the names of the layers of which a stage has all, or a part."""
        if self.operators:
            return [self.layers[self.operators[stage].layer].name]
        return [
            layer.name for layer in self.layers[self.boundaries[stage] : self.boundaries[stage + 1]]
        ]

    def unit_names(self, stage: int) -> list[str]:
        """Return the names of what only this stage has: layers, or an operator."""
        return [self.operators[stage].name] if self.operators else self.layer_names(stage)

    def numbered(self, stage: int, modules: Iterable[nn.Module]) -> list[NumberedLayer]:
        """Return the modules of a stage with the places of their layers in the whole model."""
        first = self.operators[stage].layer if self.operators else self.boundaries[stage]
        names = self.layer_names(stage)
        return [NumberedLayer(first + i, names[i], module) for i, module in enumerate(modules)]

    def build(
        self, stages: Iterable[int], seed: int, dtype: Dtype, device: torch.device | str
    ) -> dict[int, nn.ModuleList]:
        """Build the modules of stages.

        Parameters depend on seed and layer alone, wherever they are built.
        """
        if not self.operators:
            return {
                stage: nn.ModuleList(
                    build_layers(
                        self.layers,
                        self.boundaries[stage],
                        self.boundaries[stage + 1],
                        seed,
                        dtype,
                        device,
                    )
                )
                for stage in stages
            }
        built: dict[int, nn.ModuleList] = {}
        precision = as_precision(dtype)
        whole = nn.Module()
        last: int | None = None
        for stage in sorted(stages):
            operator = self.operators[stage]
            if operator.layer != last:
                last = operator.layer
                whole = build_layer(self.layers[last], last, seed, precision.parameters, device)
            part = operator_module(operator, whole)
            built[stage] = nn.ModuleList(
                [part if device == "meta" else compute_in(part, precision)]
            )
        return built

    def output(self, spec: RunSpec, dtype: torch.dtype) -> Any:
        """Return the model's output for one training micro-batch, as meta tensors of torch."""
        given = input_spec(spec.data, spec.parallel.micro_batch_size, dtype)
        shapes = [(given,), *boundary_shapes(self.layers[:-1], given.shape, dtype, given.dtype)]
        return model_output(self.layers[-1], shapes[-1], dtype)

    def output_specs(
        self, spec: RunSpec, precision: Precision, training: bool = True
    ) -> Sequence[tuple[TensorSpec, ...]]:
        """Return the output tensors of each stage except the last, of one micro-batch."""
        given = input_spec(spec.data, spec.parallel.micro_batch_size, precision.parameters)
        if not self.operators:
            shapes = boundary_shapes(self.layers, given.shape, precision, given.dtype, training)
            return [shapes[boundary - 1] for boundary in self.boundaries[1:-1]]
        start = (torch.empty(given.shape, dtype=given.dtype, device="meta"),)
        modules = self.build(range(len(self.operators)), 0, precision.parameters, "meta")
        outputs: list[tuple[torch.Tensor, ...]] = []
        with torch.no_grad():
            for stage, operator in enumerate(self.operators[:-1]):
                inputs = (
                    tuple(tensor for feeder in operator.feeders for tensor in outputs[feeder])
                    or start
                )
                outputs.append(as_tuple(modules[stage].eval()[0](*inputs)))
        return [
            tuple(
                TensorSpec(
                    f"{operator.name}.{index}",
                    tuple(tensor.shape),
                    precision.compute if tensor.dtype is precision.parameters else tensor.dtype,
                )
                for index, tensor in enumerate(tensors)
            )
            for operator, tensors in zip(self.operators[:-1], outputs, strict=True)
        ]
