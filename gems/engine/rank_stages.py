"""The stages of a rank: their layers, and the ways in which these run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gems.autograd.random_draws import RandomDraws
from gems.config.training import captures_graphs
from gems.engine.optimization.parameter_groups import NumberedLayer, check_frozen
from gems.engine.stage import Stage, StageKey
from gems.engine.stage_modules import StageModules
from gems.engine.stages.open_stages import OpenStages, StageOptions
from gems.engine.stages.streamed import EvaluationInStrips, StripLayers
from gems.engine.stages.strip_forms import StripForms, draws_in, find_evaluation_forms, find_forms
from gems.engine.transport.mpi import Comm, allgather
from gems.losses.summed import SummedLoss
from gems.models.build import TensorSpec, freeze
from gems.models.mixed import Precision
from gems.plan.rank_plan import RankPlan
from gems.schedule.families.given_placement import forward_only
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from gems.streaming.block_plan import Box
from gems.streaming.strip_stage import StripStage

_log = logging.getLogger(__name__)
Specs = Sequence[tuple[TensorSpec, ...]]


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a rank in all directions.

    A rank builds only the layers of its own stages. Seed and layer index determine the weights, so
    all copies start equal.

    Attributes:
        of_model: What each stage of the model consists of.
        forms: The streaming forms of the stages, if the schedule runs strips.
    """

    plan: RankPlan
    rank: int  # of the run
    device: torch.device
    of_model: StageModules
    modules: Mapping[StageKey, nn.ModuleList]
    layers: Sequence[NumberedLayer]
    draws: RandomDraws
    precision: Precision
    forms: StripForms | None

    @classmethod
    def open(cls, plan: RankPlan, comm: Comm, device: torch.device, trains: bool) -> Stages:
        """Build the layers; collective.

        If it `trains`, layers that run in strips only in evaluation are refused.

        Raises:
            ConfigError: A pattern of optimizer.frozen matches nothing in the whole model, or a
                layer cannot run in strips.
        """
        spec = plan.spec
        placement = plan.schedule.placement
        precision = Precision.of(spec.train.precision)
        of_model = StageModules.from_spec(spec, plan.schedule, plan.boundaries)
        own_stages = placement.stages_on(plan.position(comm.rank)[1])
        built = [
            of_model.build(
                [stage for way, stage in own_stages if way == direction],
                spec.seed,
                precision,
                device,
            )
            for direction in range(placement.num_directions)
        ]
        modules = {(direction, stage): built[direction][stage] for direction, stage in own_stages}
        if spec.machine.channels_last:
            for of_stage in modules.values():
                of_stage.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        layers = [layer for key in modules for layer in of_model.numbered(key[1], modules[key])]
        _freeze(spec.optimizer.frozen, comm, layers)
        forms = None
        if plan.schedule.num_strips > 1:
            forms = find_forms(spec.data, spec.parallel, of_model, modules, precision, trains)
        draws = RandomDraws(spec.seed, spec.model.target is not None)
        for layer in layers:
            draws.watch(layer.name, layer.module)
        return cls(plan, comm.rank, device, of_model, modules, layers, draws, precision, forms)

    def named_layers(self, key: StageKey) -> list[tuple[str, nn.Module]]:
        """Return the modules of a stage on this rank, in order, with the names of their layers."""
        return list(zip(self.of_model.layer_names(key[1]), self.modules[key], strict=True))

    def set_training(self, is_training: bool) -> None:
        """Switch layers such as batch norm between batch and running statistics."""
        for modules in self.modules.values():
            modules.train(is_training)

    def output_specs(self) -> Specs:
        """Return the outputs of each stage of the model but the last in training."""
        if self.forms is not None:
            return self.forms.specs
        spec = self.plan.spec
        size = spec.parallel.micro_batch_size
        return self.of_model.output_specs(spec.data, size, self.precision)

    def options(self, trains: bool, num_sharers: int, loss: SummedLoss) -> StageOptions:
        """Return how the schedule runs the stages; `num_sharers` ranks share the host's memory.

        If the `loss` divides, the last stage computes it in each strip.
        """
        plan = self.plan
        spec = plan.spec
        host_bytes = spec.machine.host_bytes
        forms: Mapping[StageKey, StripStage] = {} if self.forms is None else self.forms.forms
        is_asked = spec.train.cuda_graphs is True  # then the first rank says why it has no effect
        return StageOptions(
            plan.schedule,
            plan.position(self.rank)[1],
            self.device,
            plan.memory_plan,
            spec.memory.min_offload_bytes,
            None if host_bytes is None else host_bytes // num_sharers,
            forms,
            {key: draws_in(self.named_layers(key), self.draws) for key in forms},
            self._parts(self.forms, loss),
            self.draws.is_drawing,
            spec.train.compile and trains,
            trains and (is_asked or captures_graphs(spec.train, self.device.type == "cuda")),
            spec.train.stage_wrappers,
        )

    def _parts(self, forms: StripForms | None, loss: SummedLoss) -> Sequence[Box] | None:
        """Return the parts of maps that each have a loss of their own, if strips give any."""
        if forms is None or forms.parts is None:
            return None
        if loss.divides():
            return forms.parts
        if self.rank == 0:
            _log.info(
                "the loss is no sum over pixels: its strips keep their outputs until the last one"
            )
        return None

    def for_evaluation(
        self, training: OpenStages, poll: Callable[[], None], trains: bool
    ) -> tuple[Schedule, OpenStages, Specs]:
        """Return the schedule of evaluation, the stages that it runs, and their outputs.

        They are the whole stages of `training` unless all layers run in strips in evaluation too.
        Micro-batches go forward in direction 0, as many at once as the stages need to be busy.
        """
        spec = self.plan.spec
        schedule = self.plan.schedule
        placement = schedule.placement
        forms = self.forms
        if forms is not None and trains:
            forms = find_evaluation_forms(
                spec.data,
                spec.parallel,
                self.of_model,
                self.modules,
                self.precision,
                self.rank == 0,
            )
        num_strips = 1 if forms is None else schedule.num_strips
        num_at_once = min(schedule.num_whole, math.ceil(2 * placement.num_stages / num_strips))
        forward = validate(lower(forward_only(placement, num_at_once, num_strips)))
        if forms is None:
            size = spec.parallel.micro_batch_size
            specs = self.of_model.output_specs(spec.data, size, self.precision, training=False)
            return forward, OpenStages.unstored(training.whole), specs
        last = placement.num_stages - 1
        stages: dict[StageKey, Stage] = {
            key: EvaluationInStrips(
                StripLayers(
                    self.modules[key],
                    form,
                    key[1] == 0,
                    poll,
                    self.device,
                    parts=forms.parts if key[1] == last else None,
                ),
                key[1] == last,
            )
            for key, form in forms.forms.items()
        }
        return forward, OpenStages.unstored(stages), forms.specs

    def begin_draws(self, step: int, micro_batch: int) -> None:
        """Let layers draw the random numbers of a micro-batch of this replica."""
        replica, _ = self.plan.position(self.rank)
        self.draws.at(step, replica * self.plan.schedule.num_whole + micro_batch)


def _freeze(patterns: Sequence[str], comm: Comm, layers: Sequence[NumberedLayer]) -> None:
    """Freeze the parameters that match optimizer.frozen; collective if there are patterns.

    Raises:
        ConfigError: A pattern matches nothing in the whole model.
    """
    if patterns:
        used = freeze(((layer.name, layer.module) for layer in layers), patterns)
        check_frozen(patterns, set().union(*allgather(comm, used)))
