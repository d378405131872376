"""What all ranks must agree about before the first step."""

from __future__ import annotations

from gems.config.schema import RunSpec
from gems.engine.transport.mpi import Comm
from gems.errors import ConfigError
from gems.schedule.schedule import Schedule


def check_world(spec: RunSpec, comm: Comm) -> None:
    """Check the number of ranks against the configuration.

    Raises:
        ConfigError: it is not partitions x replicas.
    """
    if comm.size != spec.world_size:
        raise ConfigError(
            "parallel", f"{spec.parallel.partitions} partitions x {spec.parallel.replicas} replicas",
            f"needs {spec.world_size} ranks and was started with {comm.size}", f"start {spec.world_size} ranks",
        )  # fmt: skip


def check_same_schedule(schedule: Schedule, comm: Comm) -> None:
    """Compare the digest of the schedule across ranks; collective.

    Raises:
        ConfigError: two ranks have different schedules.
    """
    digests = comm.allgather(schedule.digest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(
                "schedule", schedule.name,
                f"rank {rank} has another schedule than rank 0 ({digest[:8]}, not {digests[0][:8]})",
                "use the same code and run.yaml on all ranks",
            )  # fmt: skip
