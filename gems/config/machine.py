"""What a rank computes on, and the links of its messages."""

from __future__ import annotations

from dataclasses import dataclass

from gems.config.fields import choice, flag, number, text

DEVICES = ("auto", "cpu", "cuda")
ORDERED_TRANSPORTS = NCCL, GLOO = "nccl", "gloo"  # which match messages by their order
TRANSPORTS = ("auto", "mpi", "host", *ORDERED_TRANSPORTS)
MACHINES = ("real", "emulated", "simulated", "probe")
MAX_WORLD = 2**20


@dataclass(slots=True)
class MachineConfig:
    """What a rank computes on, and how its messages travel.

    The defaults are one core of a server's processor.
    """

    name: str = text("auto", "name of the machine in reports")
    kind: str = choice(
        "real",
        MACHINES,
        "real; emulated: compute is a timed wait, messages are real; simulated: nothing runs; "
        "probe: each rank checks its place and ends",
    )
    device: str = choice("auto", DEVICES, "device of a rank; auto: its GPU if there is one")
    threads_per_rank: int = number(
        1, "threads of a rank's compute on a processor", min=1, max=2**12
    )
    deterministic: bool = flag(
        False, "let a GPU compute the same bits in each run; what has no such kernel fails"
    )
    cudnn_benchmark: bool = flag(
        False, "let cuDNN time its kernels for each shape once, and take the fastest"
    )
    tf32: bool | None = flag(
        None, "round float32 convolutions and products to TF32; null: as torch, convolutions only"
    )
    channels_last: bool = flag(
        False, "keep images, maps and weights in torch.channels_last, between ranks too"
    )
    transport: str = choice(
        "auto", TRANSPORTS, "what carries messages; auto: MPI, from a GPU's memory if it can"
    )
    link_latency_s: float = number(
        0.0, "latency of a message; with machine.ranks_per_node, of one between nodes"
    )
    link_bytes_per_s: float | None = number(
        None,
        "rate of a link; with machine.ranks_per_node, of one between nodes; null: no time per byte",
        above=0,
    )
    ranks_per_node: int | None = number(
        None, "ranks of a node, which have links of their own", min=1, max=MAX_WORLD
    )
    node_latency_s: float = number(0.0, "latency of a message inside a node")
    node_bytes_per_s: float | None = number(
        None, "rate of a link inside a node; null: no time per byte", above=0
    )
    contention: bool = flag(
        False, "let a rank's messages pass one at a time each way, and a node's through one link"
    )
    slow_rank: int | None = number(
        None, "world rank that is a straggler, emulated or simulated", max=MAX_WORLD
    )
    slowdown: float = number(1.0, "how many times longer machine.slow_rank computes", min=1)
    device_bytes: int | None = number(None, "memory of a device", min=1)
    library_bytes: int | None = number(
        None,
        "what cuBLAS and cuDNN hold of a device for each rank; null: as profile=measured found on a"
        " GPU, else 0",
        in_run_id=False,
    )
    host_bytes: int | None = number(
        None, "host memory of a node for the activations of its ranks together", min=1
    )
    d2h_bytes_per_s: float = number(5e9, "rate of pinned copies out of a device", above=0)
    h2d_bytes_per_s: float = number(5e9, "rate of pinned copies to a device", above=0)
    flops_per_s: float = number(
        6e10, "rate in float32, as torch's convolutions compute it", above=0
    )
    bfloat16_flops_per_s: float | None = number(
        None, "rate in bfloat16; null: the device has none", above=0
    )
    float64_flops_per_s: float | None = number(
        None, "rate in float64; null: half that of float32", above=0
    )
    memory_bytes_per_s: float = number(1e10, "rate of the device's memory", above=0)
    efficiency: float = number(
        1.0, "share of the rates that kernels reach, for times of profile=fake", above=0
    )
    noise: float = number(
        0.0,
        "relative standard deviation of a compute's time, drawn by seed in predictions",
        max=0.5,
    )
    pace_factor: float | None = number(
        None,
        "how many times longer layers take in a run than alone (profile=measured); null: as"
        " calibrated here",
        above=0,
        in_run_id=False,
    )
    pace_pass_s: float = number(
        0.0, "host time of each layer's pass beside, with machine.pace_factor", in_run_id=False
    )
    calibrated_from: str | None = text(None, "what the figures were measured on")
    held_out_error: float | None = number(
        None, "median error of step times predicted for runs not used to calibrate"
    )

    @property
    def is_real(self) -> bool:
        """Whether ranks compute the model's layers."""
        return self.kind == "real"

    @property
    def is_emulated(self) -> bool:
        """Whether compute is a timed wait, and messages are real."""
        return self.kind == "emulated"

    @property
    def is_probe(self) -> bool:
        """Whether ranks only check their places."""
        return self.kind == "probe"

    @property
    def has_ranks(self) -> bool:
        """Whether processes run, and the run is not simulated."""
        return self.kind != "simulated"

    @property
    def takes_steps(self) -> bool:
        """Whether ranks take steps, real or emulated, and speak MPI."""
        return self.is_real or self.is_emulated
