"""Comparison of a run with the unsplit reference, value by value; the program of the ranks of `gems verify`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from gems.config.schema import RunSpec
from gems.data import open_dataset
from gems.engine.batch_loader import BatchLoader
from gems.engine.device import DTYPES, open_device
from gems.engine.pipeline import build_pipeline
from gems.engine.supervision.failure import abort_all_ranks, ensure_exit, report_failure
from gems.engine.supervision.memory_report import memory_report
from gems.engine.transport.environment import launched_rank
from gems.engine.transport.mpi import Comm, world
from gems.engine.verification.reference import collect_values, train_unsplit
from gems.memory.plan import MemoryPlan
from gems.runs.folder import RunFolder
from gems.schedule.schedule import Schedule
from gems.utils.atomic_io import write_json
from gems.utils.logs import set_up_rank_logging

FLOOR = 1e-9  # of the largest value of its kind, with which smaller tensors are compared


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest relative errors over all steps, ranks, directions and replicas, and where the worst was.

    The last three fields are those of the `MemoryReport`.
    """

    max_rel_error: float
    parameter_error: float
    gradient_error: float
    statistics_error: float
    worst: str
    peak_activation_bytes: tuple[int, ...] = ()
    predicted_activation_bytes: tuple[int, ...] = ()
    unsplit_layers: tuple[str, ...] = ()


def relative_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest of max |a - b| / max |b| over the tensors of `ours`, and the name of that tensor.

    A tensor that is zero except for rounding, such as a bias before a normalisation, is compared with FLOOR times the
    largest value in all of `reference`.
    """
    if not ours:
        return 0.0, ""
    floor = FLOOR * max(float(value.abs().max()) for value in reference.values())
    errors = {
        name: float((value - reference[name]).abs().max()) / max(float(reference[name].abs().max()), floor, 1e-300)
        for name, value in ours.items()
    }
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return errors[worst], worst


def compare(
    spec: RunSpec,
    comm: Comm,
    device: torch.device,
    schedule: Schedule | None = None,
    boundaries: tuple[int, ...] | None = None,
    plan: MemoryPlan | None = None,
) -> Difference:
    """Run the schedule and compare each copy of each tensor after every step; collective."""
    pipeline = build_pipeline(spec, comm, device, schedule=schedule, boundaries=boundaries, plan=plan)
    loader = BatchLoader(spec, open_dataset(spec.data, spec.seed), pipeline.replica, pipeline.image_micro_batches,
    pipeline.label_micro_batches,
                DTYPES[spec.train.dtype], device)  # fmt: skip
    pipeline.set_training(True)
    reference = train_unsplit(spec, pipeline.schedule, device) if comm.rank == 0 else None
    worst = [(0.0, "")] * 3
    for step in range(spec.train.steps):
        pipeline.train.run(step, loader.batch(step))
        found = None if reference is None else next(reference)
        pipeline.control.barrier()
        expected = comm.bcast(found)
        for mine in (collect_values(pipeline.named_layers(key)) for key in pipeline.modules):
            for kind, values in enumerate(mine):
                error, name = relative_error(values, expected[kind])
                where = f"{name} at rank {comm.rank}, step {step}"
                worst[kind] = max(worst[kind], (error, where), key=_by_error)
    loader.close()
    everyone = comm.allgather(worst)
    parameter, gradient, statistics = (max((errors[kind] for errors in everyone), key=_by_error) for kind in range(3))
    largest = max((parameter, gradient, statistics), key=_by_error)
    return Difference(
        largest[0], parameter[0], gradient[0], statistics[0], largest[1],
        **asdict(memory_report(pipeline)),
    )  # fmt: skip


def _by_error(found: tuple[float, str]) -> float:
    return float("inf") if found[0] != found[0] else found[0]


def main(argv: list[str]) -> None:
    """Run one rank of the comparison of a run folder, to which rank 0 writes result.json."""
    set_up_rank_logging(launched_rank())
    folder = RunFolder(Path(argv[0]))
    try:
        spec = folder.read_spec()
        device = open_device(spec.machine, spec.cluster.device_order)
        comm = world()
        read = (folder.read_schedule(), folder.read_boundaries(), folder.read_memory_plan())
        difference = compare(spec, comm, device, *read)
        if comm.rank == 0:
            write_json(folder.result_json, asdict(difference))
    except BaseException as error:
        ensure_exit()
        abort_all_ranks(report_failure(folder, launched_rank(), error))


if __name__ == "__main__":
    main(sys.argv[1:])
