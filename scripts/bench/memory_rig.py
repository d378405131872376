"""A run of one rank under a memory policy, for the benchmarks: the engine's own step, its counters and its peaks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.data import open_dataset
from gems.engine.activation_store.store import Counters
from gems.engine.batch_loader import BatchLoader
from gems.engine.device import DTYPES, open_device
from gems.engine.pipeline import build_pipeline
from gems.engine.transport.mpi import world
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.memory_actions import add_memory
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.registry import plan_of
from gems.models import layers_of
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.simulation.build import compute_schedule
from gems.simulation.memory_case import memory_case

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Peaks:
    """Most bytes of one step: saved storages by the engine's count, the allocator's given out and reserved, host memory."""

    activation_bytes: int
    allocated_bytes: int
    reserved_bytes: int | None
    host_bytes: int


def spec_of(model: str, side_px: int, *words: str) -> RunSpec:
    """Return a run of one rank on square images; `words` are more Hydra overrides."""
    sizes = [f"data.height_px={side_px}", f"data.width_px={side_px}"]
    one = ["schedule=gpipe", "parallel.partitions=1", "train.warmup_steps=0"]
    return compose([f"model={model}", "data=synthetic", *sizes, *one, *words])


def case_of_run(spec: RunSpec) -> MemoryCase:
    """Return what the policies of a one-rank run plan for."""
    return memory_case(spec, compute_schedule(spec), (0, len(layers_of(spec.model, spec.data))))


def outcome_of(spec: RunSpec, case: MemoryCase) -> PlanOutcome:
    """Return what the configured policy makes of it."""
    return case.kept if spec.memory.name == "keep" else case.outcome(plan_of(spec.memory, case))


def ours_under(spec: RunSpec, outcome: PlanOutcome) -> Ours:
    """Return the run of a policy's outcome; one that keeps all runs its stage whole, as a user's does."""
    if spec.memory.name == "keep":
        return Ours(spec, lower(compute_schedule(spec)), None)
    return Ours(spec, outcome.schedule, outcome.plan)


def all_offloaded(spec: RunSpec) -> tuple[Schedule, MemoryPlan]:
    """Return the list and the plan by which every layer's saved tensors leave and come back on demand."""
    compute = compute_schedule(spec)
    cuts = (0, len(layers_of(spec.model, spec.data)))
    every = {layer: Segment(layer, layer + 1, Choice.OFFLOAD, free_after=0, ahead=0) for layer in range(cuts[-1])}
    plan = MemoryPlan.by_layer("all", cuts, every)
    return lower(add_memory(compute, plan)), plan


class Ours:
    """The engine on one rank, with one batch of images that every step uses."""

    def __init__(self, spec: RunSpec, schedule: Schedule, plan: MemoryPlan | None) -> None:
        self.device = open_device(spec.machine)
        cuts = (0, len(layers_of(spec.model, spec.data)))
        self.pipeline = build_pipeline(spec, world(), self.device, schedule=schedule, boundaries=cuts, plan=plan)
        self.pipeline.set_training(True)
        images, labels = self.pipeline.image_micro_batches, self.pipeline.label_micro_batches
        data = open_dataset(spec.data, spec.seed)
        loader = BatchLoader(spec, data, 0, images, labels, DTYPES[spec.train.dtype], self.device)
        self._batch = loader.batch(0)
        loader.close()
        self._step = 0

    @property
    def counters(self) -> Counters:
        """What the activation store has moved so far."""
        assert self.pipeline.segments is not None
        return self.pipeline.segments.store.counters

    def step(self) -> None:
        """Run one training step."""
        self.pipeline.train.run(self._step, self._batch)
        self._step += 1

    def peaks(self) -> Peaks:
        """Run a step to warm up and gives the most that the next one held."""
        self.step()
        executor, segments = self.pipeline.train, self.pipeline.segments
        store = None if segments is None else segments.store
        executor.activations.peak_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            found = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        else:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                self.step()
            found = (self._static_bytes() + _most(seen), None)
        host_bytes = 0 if store is None else store.on_host.peak_bytes
        return Peaks(executor.activations.peak_bytes, *found, host_bytes)

    def _static_bytes(self) -> int:
        """Return what is there before a step: parameters, gradients, optimizer state, buffers and the batch."""
        pipeline = self.pipeline
        modules = list(pipeline.modules.values())
        parameters = [parameter for kept in modules for parameter in kept.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [
            value
            for state in pipeline.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        buffers = [buffer for kept in modules for buffer in kept.buffers()]
        batch = [*self._batch.images.values(), *self._batch.labels.values()]
        memory = [tensor.untyped_storage() for tensor in (*parameters, *gradients, *states, *buffers, *batch)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


def _most(seen: profile) -> int:
    """Return the most bytes that a profiled block held at once beyond what was there before."""
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
