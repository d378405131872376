"""The runs that no constant is taken from, and those that the pace of real runs is taken from, as Hydra overrides."""

from __future__ import annotations

from dataclasses import dataclass

EMULATED = [
    "machine=emulated", "data=synthetic", "cost=uniform", "cost.unit_s=0.01", "cost.activation_bytes=1000000",
    "train.warmup_steps=1",
]  # fmt: skip
REAL = [
    "machine=cpu", "data=synthetic", "parallel.partitions=2", "profile=measured", "cost=profile", "train.evaluate=false",
    "train.warmup_steps=2",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration, by a name and its overrides."""

    name: str
    words: tuple[str, ...]


def emulated(schedule: str, ranks: int, micro_batches: int, size_bytes: int, *more: str) -> Case:
    """Return an emulated case; `size_bytes` is what a stage hands on."""
    words = (
        f"schedule={schedule}", f"parallel.partitions={ranks}", f"parallel.micro_batches={micro_batches}",
        f"cost.boundary_bytes={size_bytes}", *more,
    )  # fmt: skip
    short = " ".join(word.rpartition(".")[2] for word in more)
    return Case(f"{schedule} P={ranks} N={micro_batches} {size_bytes // 1000} kB {short}".rstrip(), words)


def real(schedule: str, side_px: int, micro_batches: int, micro_batch_size: int, *more: str) -> Case:
    """Return a case of a real run on 2 ranks."""
    words = (
        f"schedule={schedule}", f"data.height_px={side_px}", f"data.width_px={side_px}",
        f"parallel.micro_batches={micro_batches}", f"parallel.micro_batch_size={micro_batch_size}", *more,
    )  # fmt: skip
    return Case(f"{schedule} {side_px} px N={micro_batches} x {micro_batch_size}", words)


HELD_OUT_EMULATED = (
    emulated("1f1b", 4, 8, 100_000),
    emulated("gems_master", 4, 8, 1_000_000),
    emulated("gpipe", 4, 16, 4_000_000),
    emulated("zb_h1", 4, 8, 1_000_000),
    emulated("capped", 6, 12, 500_000, "schedule.activation_cap=1"),
    emulated("1f1b", 8, 16, 1_000_000),
    emulated("gems_master", 8, 8, 1_000_000),
    emulated("zb_v", 8, 16, 100_000),
    emulated("capped", 8, 16, 1_000_000, "schedule.activation_cap=2"),
    emulated("chimera", 8, 8, 2_000_000),
    emulated("interleaved_1f1b", 8, 16, 200_000),
    emulated("gems_master", 4, 4, 500_000, "parallel.replicas=2"),
    emulated("1f1b", 12, 24, 1_000_000),
    emulated("gems_master", 16, 4, 1_000_000),
)
CALIBRATING_REAL = (real("1f1b", 64, 8, 2), real("gpipe", 96, 4, 2), real("zb_h1", 96, 8, 1), real("1f1b", 144, 4, 2))
HELD_OUT_REAL = (
    real("1f1b", 64, 16, 4),
    real("gems_master", 96, 8, 2),
    real("zb_h1", 128, 8, 1),
    real("gpipe", 128, 4, 2),
)
