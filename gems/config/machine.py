"""The machine: what a rank computes on, and how its messages travel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MachineConfig:
    """What a rank computes on, and how its messages travel.

    `kind` is real, or emulated: then compute is a timed wait from `cost` and the messages are real; or simulated: then
    nothing runs, and both are played on paper; or probe: then each rank looks at the place that it was given, and ends.
    Links without a rate take no time per byte; `ranks_per_node` tells neighbours inside a node, which have a link of their own.

    `device_bytes` is the memory of one device, `host_bytes` what a node's ranks together may use of host memory for
    activations, `d2h_bytes_per_s` and `h2d_bytes_per_s` the rates of pinned copies out of a device and back, each way
    by itself. `flops_per_s` (float32, as torch's convolutions compute it) and
    `memory_bytes_per_s` are a datasheet's, and `efficiency` the share of them that kernels reach: with them
    profile=fake predicts times. The defaults are one core of a server's processor.

    `noise` is the relative standard deviation of a rank's compute from step to step, which predictions draw by `seed`.
    `calibrated_from` says what the figures were measured on, and `held_out_error` how far step times predicted with them
    were off (median, of 1) in runs that were not used: predictions carry both. `contention` lets a rank's messages pass
    one at a time each way, and a node's through one link.
    Emulated or simulated, the world rank `slow_rank` takes `slowdown` times as long to compute as `cost` says.
    """

    name: str = "auto"
    kind: str = "real"
    device: str = "auto"
    threads_per_rank: int = 1
    transport: str = "auto"
    link_latency_s: float = 0.0
    link_bytes_per_s: float | None = None
    ranks_per_node: int | None = None
    node_latency_s: float = 0.0
    node_bytes_per_s: float | None = None
    contention: bool = False
    slow_rank: int | None = None
    slowdown: float = 1.0
    device_bytes: int | None = None
    host_bytes: int | None = None
    d2h_bytes_per_s: float = 5e9
    h2d_bytes_per_s: float = 5e9
    flops_per_s: float = 6e10
    bfloat16_flops_per_s: float | None = None
    float64_flops_per_s: float | None = None
    memory_bytes_per_s: float = 1e10
    efficiency: float = 1.0
    noise: float = 0.0
    calibrated_from: str | None = None
    held_out_error: float | None = None
