"""Contents: what the stages of a run consist of, layers of the model, or, where they form a graph, its operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gems.config.schema import RunSpec
from gems.models import Layer, layers_of
from gems.models.blocks.operator import operator_module
from gems.models.build import TensorSpec, as_tuple, boundary_shapes, build_layer, build_layers, input_spec
from gems.models.operators import Operator, operators_of
from gems.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Contents:
    """The stages of a run by number: stage s is layers[cuts[s]:cuts[s + 1]], or `operators[s]` where there are any."""

    layers: tuple[Layer, ...]
    cuts: tuple[int, ...]
    operators: tuple[Operator, ...] = ()

    @property
    def has_whole_layers(self) -> bool:
        """Whether each layer is in one stage."""
        return not self.operators

    def layers_in(self, stage: int) -> Sequence[int]:
        """Return the numbers of the layers that a stage has, or has a part of."""
        if self.operators:
            return (self.operators[stage].layer,)
        return range(self.cuts[stage], self.cuts[stage + 1])

    def names_in(self, stage: int) -> list[str]:
        """Return the names of the layers that a stage has, or has a part of."""
        return [self.layers[index].name for index in self.layers_in(stage)]

    def parts_in(self, stage: int) -> list[str]:
        """Return the names of what a stage has, which no other stage has: layers, or an operator."""
        return [self.operators[stage].name] if self.operators else self.names_in(stage)

    def build(
        self, stages: Iterable[int], seed: int, dtype: torch.dtype, device: torch.device | str
    ) -> dict[int, nn.ModuleList]:
        """Build the modules of stages. The values of a parameter depend on seed and layer alone, wherever it lies."""
        if not self.operators:
            return {
                stage: nn.ModuleList(
                    build_layers(self.layers, self.cuts[stage], self.cuts[stage + 1], seed, dtype, device)
                )
                for stage in stages
            }
        built: dict[int, nn.ModuleList] = {}
        whole: nn.Module = nn.Identity()
        last: int | None = None
        for stage in sorted(stages):
            operator = self.operators[stage]
            if operator.layer != last:
                last = operator.layer
                whole = build_layer(self.layers[last], last, seed, dtype, device)
            built[stage] = nn.ModuleList([operator_module(operator, whole)])
        return built

    def boundaries(self, spec: RunSpec, dtype: torch.dtype) -> list[tuple[TensorSpec, ...]]:
        """Return the tensors that each stage but the last hands on, of one micro-batch."""
        given = input_spec(spec.data, spec.parallel.micro_batch_size, dtype)
        if not self.operators:
            shapes = boundary_shapes(self.layers, given.shape, dtype, given.dtype)
            return [shapes[cut - 1] for cut in self.cuts[1:-1]]
        start = (torch.empty(given.shape, dtype=given.dtype, device="meta"),)
        modules = self.build(range(len(self.operators)), 0, dtype, "meta")
        outputs: list[tuple[torch.Tensor, ...]] = []
        with torch.no_grad():
            for stage, operator in enumerate(self.operators):
                inputs = tuple(tensor for feeder in operator.feeders for tensor in outputs[feeder]) or start
                outputs.append(as_tuple(modules[stage].eval()[0](*inputs)))
        return [
            tuple(
                TensorSpec(f"{operator.name}.{at}", tuple(tensor.shape), tensor.dtype)
                for at, tensor in enumerate(tensors)
            )
            for operator, tensors in zip(self.operators[:-1], outputs, strict=False)
        ]


def contents_of(spec: RunSpec, placement: Placement, cuts: tuple[int, ...]) -> Contents:
    """Return the contents of a run's stages: operators where they form a graph, the layers between `cuts` otherwise."""
    layers = layers_of(spec.model, spec.data)
    return Contents(layers, cuts, () if placement.feeders is None else operators_of(layers))
