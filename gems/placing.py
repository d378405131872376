"""Placing: a run's operators and devices, from its profile and its machine."""

from __future__ import annotations

from gems.config import RunSpec
from gems.errors import ConfigError
from gems.plan.dlplacer.devices import Devices
from gems.plan.dlplacer.graph import OpGraph
from gems.plan.dlplacer.place import Placement, place
from gems.profile.store import operators_taken
from gems.program import network_in_seconds


def placement_of(spec: RunSpec, num_devices: int, method: str = "auto") -> Placement:
    """Places the operators of a resolved run's model, one micro-batch of a step, within partition.budget_s.

    Raises:
        ConfigError: operators that cannot be profiled, or a method that is not there.
        DoesNotFitError: nothing that was found keeps machine.device_bytes.
    """
    return place(graph_of(spec), devices_of(spec, num_devices), spec.partition.budget_s, method, spec.seed)


def graph_of(spec: RunSpec) -> OpGraph:
    """Gives the operators of a resolved run's model, with the roofline's times on its machine.

    Raises:
        ConfigError: another profile than profile=fake, or one that could not be taken.
    """
    if spec.profile.name != "fake" or spec.profile.path is not None:
        raise ConfigError(
            "profile", spec.profile.path or spec.profile.name, "knows whole layers only",
            "use profile=fake, which takes operators by the rates of machine=",
        )  # fmt: skip
    return OpGraph.from_json(operators_taken(spec))


def devices_of(spec: RunSpec, num: int) -> Devices:
    """Gives equal devices with the machine's links: those of neighbours, as ranks 0 and 1 are."""
    network = network_in_seconds(spec)
    latency_s, s_per_byte = network.parts(0, 1, 1.0)
    return Devices(num, latency_s, s_per_byte, spec.machine.device_bytes, network.has_contention)
