"""The placement of a run's operators on devices, and on the ranks of schedule=placed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gems.config.schema import MachineConfig
from gems.errors import ConfigError
from gems.partition.dlplacer.devices import Devices, TimedPlacement
from gems.partition.dlplacer.place import OperatorPlacement, place
from gems.partition.links import machine_links
from gems.profile.operator_graph import OpGraph
from gems.profile.store import operators_taken
from gems.profile.subject import Subject
from gems.schedule.costs import StageCosts
from gems.schedule.families.given_placement import placed
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.utils.cache import cached


def place_operators(
    subject: Subject, num_devices: int, budget_s: float, seed: int, method: str = "auto"
) -> OperatorPlacement:
    """Place the operators of a model for one micro-batch, within `budget_s`.

    Raises:
        ConfigError: The operators cannot be profiled, or the method is not available.
        DoesNotFitError: No placement that was found keeps machine.device_bytes.
    """
    devices = equal_devices(subject.machine, num_devices)
    return place(operator_graph(subject), devices, budget_s, method, seed)


def operator_graph(subject: Subject) -> OpGraph:
    """Return the operators of a model, with roofline times on its machine.

    Raises:
        ConfigError: The profile is not profile=fake, or cannot be computed.
    """
    source = subject.profile
    if source.name != "fake" or source.path is not None:
        raise ConfigError(
            "profile",
            source.path or source.name,
            "knows whole layers only",
            "use profile=fake, which takes operators by the rates of machine=",
        )
    return OpGraph.from_json(operators_taken(subject))


def equal_devices(machine: MachineConfig, num: int) -> Devices:
    """Return equal devices with the machine's links between neighbours, such as ranks 0 and 1."""
    network = machine_links(machine)
    latency_s, s_per_byte = network.parts(0, 1, 1.0)
    return Devices(num, latency_s, s_per_byte, machine.device_bytes, network.has_contention)


def placed_on(subject: Subject, budget_s: float, seed: int) -> Schedule:
    """Return the compute-only schedule of schedule=placed.

    Each operator is a stage, on the ranks of the placement. The placement is cached, so that all
    callers get the same one.

    Raises:
        ConfigError: As in `place_operators`, or the model has no branches, so no ranks could run in
            parallel.
        DoesNotFitError: As in `place_operators`.
    """
    graph = operator_graph(subject)
    num_ranks = subject.parallel.partitions
    devices = equal_devices(subject.machine, num_ranks)
    key = repr((graph, devices, budget_s, seed))

    def make() -> dict[str, Any]:
        return asdict(place_operators(subject, num_ranks, budget_s, seed).timed)

    timed = TimedPlacement(**cached(subject.cache_dir, "placement", key, make))
    unused = sorted(set(range(num_ranks)) - set(timed.places))
    if unused:
        raise ConfigError(
            "parallel.partitions",
            num_ranks,
            f"is more than the branches of {subject.model.name} can use: "
            f"the fastest placement leaves rank {unused[0]} without work",
            "use fewer, or a model with branches (inception_v3, googlenet)",
        )
    by_forward = sorted(graph.order, key=lambda v: timed.forward_start_s[v])
    by_backward = sorted(graph.order[::-1], key=lambda v: timed.backward_start_s[v])
    placement = Placement(num_ranks, (tuple(timed.places),), graph.predecessors)
    return placed(placement, subject.parallel.micro_batches or 1, by_forward, by_backward)


def operator_costs(graph: OpGraph) -> StageCosts:
    """Return the costs of the stages of schedule=placed, in seconds and bytes."""
    backward = tuple(op.backward_s for op in graph.ops)
    return StageCosts(
        forward=tuple(op.forward_s for op in graph.ops),
        input_grad=backward,
        weight_grad=(0.0,) * graph.num_ops,
        activation=tuple(float(op.held_bytes - op.state_bytes) for op in graph.ops),
        boundary_bytes=tuple(float(op.output_bytes) for op in graph.ops),
    )
