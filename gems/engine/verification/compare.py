"""Comparison of a run with a reference, value by value: what the ranks of `gems verify` do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gems.engine.batch_loader import BatchLoader
from gems.engine.device import DTYPES
from gems.engine.rank import Rank
from gems.engine.supervision.memory_report import memory_report
from gems.engine.transport.mpi import MEET_SLEEP_S, Comm, allgather, broadcast
from gems.engine.verification.unsplit import (
    UnsplitTraining,
    Values,
    averaged_values,
    collect_values,
)
from gems.launch.verification import Verification
from gems.plan.rank_plan import RankPlan
from gems.runs.folder import RunFolder

# of the largest value of its kind, with which smaller tensors are compared; in 16 bits their
# spacing
FLOOR = 1e-9
ZERO = 1e-12  # of the largest value of all tensors
FLOOR_ABOVE = 1e-4
Error = tuple[float, str]  # and the tensor that has it


def relative_error(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], floor: float = FLOOR
) -> tuple[float, str]:
    """Return the largest of max |a - b| / max |b| over tensors of `ours`, and the tensor's name.

    A tensor that is zero except for rounding, such as a bias before a normalisation, is compared
    with `floor` times the largest value in all of `reference`. One that is zero within the rounding
    of float64, such as a bias before a softmax, is compared with that value itself.
    """
    if not ours:
        return 0.0, ""
    sizes = {name: float(value.abs().max()) for name, value in reference.items()}
    largest = max(sizes.values())
    errors = {
        name: (
            float((value - reference[name]).abs().max())
            / max(sizes[name] if sizes[name] > ZERO * largest else largest, floor * largest, 1e-300)
        )
        for name, value in ours.items()
    }
    worst = max(
        errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name]
    )
    return errors[worst], worst


class Comparison:
    """The largest errors of a rank's parameters, gradients and statistics so far."""

    def __init__(self, rank: Rank) -> None:
        spacing = torch.finfo(DTYPES[rank.plan.spec.train.compute_dtype]).eps
        self._floor = spacing if spacing > FLOOR_ABOVE else FLOOR
        self._rank = rank
        self._worst: list[Error] = [(0.0, "")] * 3
        self._rounding = 0.0

    def add_rounding(self, nudged: Sequence[Values], reference: Sequence[Values]) -> None:
        """Compare the references of images with and without the change of a last digit."""
        for changed, plain in zip(nudged, reference, strict=True):
            if changed and plain:
                error, _ = relative_error(changed, plain, self._floor)
                self._rounding = max(self._rounding, error)

    def add_step(self, step: int, reference: Sequence[Values]) -> None:
        """Compare each copy of each tensor on this rank after a step."""
        average = self._rank.update.average
        for key in self._rank.stages.modules:
            layers = self._rank.stages.named_layers(key)
            own_values = collect_values(layers)
            if average is not None:
                own_values[0].update(averaged_values(layers, average.by_parameter()))
            for kind, values in enumerate(own_values):
                if kind == 1 and not reference[kind]:
                    continue
                error, name = relative_error(values, reference[kind], self._floor)
                where = f"{name} at rank {self._rank.comm.rank}, step {step}"
                self._worst[kind] = max(self._worst[kind], (error, where), key=_by_error)

    def result(self) -> Verification:
        """Return the largest errors of all ranks, and the bytes of each; collective."""
        rank = self._rank
        everyone = allgather(rank.comm, self._worst)
        parameter, gradient, statistics = (
            max((errors[kind] for errors in everyone), key=_by_error) for kind in range(3)
        )
        largest = max((parameter, gradient, statistics), key=_by_error)
        return Verification(
            rank.plan.spec.train.layer_dtype,
            largest[0],
            parameter[0],
            gradient[0],
            statistics[0],
            largest[1],
            is_in_strips=rank.plan.schedule.num_strips > 1,
            rounding_error=broadcast(rank.comm, self._rounding),
            is_on_gpu=rank.device.type == "cuda",
            **memory_report(rank),
        )


def compare(plan: RankPlan, comm: Comm, device: torch.device) -> Verification:
    """Run the schedule and compare each copy of each tensor after every step; collective."""
    rank = Rank.open(plan, comm, device)
    control = rank.connections.control
    norm_ends = {} if rank.stages.forms is None else rank.stages.forms.norm_ends
    reference = nudged = None
    if comm.rank == 0:
        reference = UnsplitTraining(plan, device, norm_ends)
        if norm_ends:
            nudged = UnsplitTraining(plan, device, norm_ends, is_nudged=True)
    comparison = Comparison(rank)
    rank.stages.set_training(True)
    masks = rank.mask_parts(rank.train)
    with closing(BatchLoader.open(plan, comm, device, masks=masks)) as loader:
        for step in range(plan.spec.train.steps):
            rank.train.run(step, loader.batch(step))
            reference_values = None if reference is None else reference.step(step)
            if reference_values is not None and nudged is not None:
                comparison.add_rounding(nudged.step(step), reference_values)
            control.barrier(MEET_SLEEP_S)
            comparison.add_step(step, _broadcast(comm, reference_values))
    control.barrier(MEET_SLEEP_S)
    result = comparison.result()
    rank.connections.close()
    return result


def _broadcast(comm: Comm, of_steps: Sequence[Values] | None) -> list[Values]:
    """Give all ranks the values of rank 0, in float64.

    As arrays, for each tensor is pickled by a `torch.save`.
    """
    arrays = broadcast(
        comm,
        (
            None
            if of_steps is None
            else [
                {name: value.double().numpy() for name, value in kind.items()} for kind in of_steps
            ]
        ),
    )
    return [{name: torch.from_numpy(value) for name, value in kind.items()} for kind in arrays]


def _by_error(entry: tuple[float, str]) -> float:
    return float("inf") if entry[0] != entry[0] else entry[0]


def compare_run(folder: RunFolder, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Compare a prepared run; collective."""
    return asdict(compare(folder.read_plan(), comm, device))
