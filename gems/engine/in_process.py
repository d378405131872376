"""Training in the processes of the caller, for programs that start their own ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gems.config.resolve import resolve
from gems.config.schema import MachineConfig, ParallelConfig, RunSpec
from gems.engine.run import run_rank
from gems.engine.supervision.failure import abort_all_ranks, ensure_exit, report_failure
from gems.engine.supervision.stop_request import StopListener
from gems.errors import ConfigError, GemsError
from gems.runs.folder import RunFolder
from gems.runs.owner import hold, release
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json
from gems.utils.given import target_of
from gems.utils.logs import set_up_rank_logging

if TYPE_CHECKING:  # this import starts MPI
    from gems.engine.transport.mpi import Comm


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The results of a finished training.

    These are the run folder, with trace, weights and logs, and the main figures. Steps are counted
    over all attempts together; losses are means over labels. There is no validation with
    train.evaluate=false.
    """

    folder: Path
    num_steps: int
    first_loss: float
    last_loss: float
    validation_accuracy: float | None = None
    validation_loss: float | None = None


def train(
    spec: RunSpec,
    model: Any = None,
    dataset: Any = None,
    validation_dataset: Any = None,
    loss: Any = None,
) -> TrainResult:
    """Train a configured run in the ranks of this MPI world; collective.

    `model` is the class of a network, a function that makes one, or a network, which training then
    starts from. `dataset` is a map-style dataset of (sample, label), or its class. `loss` is as in
    loss.target. They replace what the configuration names. Each rank keeps its own layers of the
    network, and only ranks that read samples use the dataset.

    A process that no launcher started is a world of one rank. Rank 0 writes the run folder; the run
    continues from the newest checkpoint in it, if there is one. A failure in a world of several
    ranks ends all of them with the exit code of the error, since the others would wait for this
    rank. In a world of one rank the error is raised.

    Raises:
        ConfigError: The configuration cannot be run, or there are not partitions x replicas ranks.
        DoesNotFitError: A rank would hold more than its device.
    """
    spec = _with_objects(spec, model, dataset, validation_dataset, loss)
    if not spec.machine.has_ranks:
        raise ConfigError(
            "machine.kind", "simulated", "has no ranks to train in", "call gems.simulate"
        )
    comm = _join_world(spec.parallel, spec.machine, spec.cluster.device_order)
    folder = _prepare_on_first(spec, comm)
    if not logging.getLogger("gems").hasHandlers():
        set_up_rank_logging(comm.rank)
    try:
        run_rank(folder, StopListener(None, sigterm_asks=False))
    except BaseException as error:
        if comm.rank == 0:
            folder.write_status("failed", cause=f"{type(error).__name__}: {error}")
            release(folder)
        if comm.size == 1:
            raise
        ensure_exit()
        abort_all_ranks(report_failure(folder, comm.rank, error), error)
    if comm.rank == 0:
        folder.write_status("finished", exit_code=0)
        release(folder)
    comm.Barrier()
    return _read_result(folder)


def _join_world(
    parallel: ParallelConfig, machine: MachineConfig, device_order: Sequence[int]
) -> Comm:
    """Return the world of the caller's ranks, once the device is open.

    Raises:
        ConfigError: There are not partitions x replicas ranks.
    """
    if machine.is_real:
        from gems.engine.device import open_device

        # before MPI, which looks at the current device
        open_device(machine, device_order)
    from gems.engine.transport.mpi import world

    comm = world()
    if comm.size != parallel.world_size:
        raise ConfigError(
            "parallel.partitions",
            parallel.partitions,
            f"with parallel.replicas={parallel.replicas} needs {parallel.world_size} ranks, "
            f"and this world has {comm.size}",
            f"start the program by mpiexec -n {parallel.world_size}",
        )
    return comm


def _prepare_on_first(spec: RunSpec, comm: Comm) -> RunFolder:
    """Prepare a run on rank 0, which then owns its folder; collective.

    Raises:
        GemsError: On all ranks, if it cannot be prepared.
    """
    from gems.engine.transport.mpi import broadcast

    outcome: RunFolder | GemsError | None = None
    if comm.rank == 0:
        try:
            outcome = prepare(spec, own=hold)
            outcome.write_status("running", host=os.uname().nodename, pid=os.getpid())
        except GemsError as error:
            outcome = error
    prepared = cast(RunFolder | GemsError, broadcast(comm, outcome))
    if isinstance(prepared, GemsError):
        raise prepared
    return prepared


def _read_result(folder: RunFolder) -> TrainResult:
    known = {field.name for field in fields(TrainResult)}
    values = {key: value for key, value in read_json(folder.result_json).items() if key in known}
    return TrainResult(folder=folder.path, **values)


def _with_objects(
    spec: RunSpec, model: Any, dataset: Any, validation_dataset: Any, loss: Any
) -> RunSpec:
    """Return the run with targets for the objects of a script."""
    if all(value is None for value in (model, dataset, validation_dataset, loss)):
        return spec
    model_config = spec.model
    data = spec.data
    if model is not None:
        target, kwargs, path = target_of("model", model)
        model_config = replace(
            model_config,
            target=target,
            kwargs=model_config.kwargs | kwargs,
            path=path or model_config.path,
        )
    if dataset is not None:
        target, kwargs, path = target_of("data", dataset)
        data = replace(data, target=target, kwargs=data.kwargs | kwargs, path=path or data.path)
    if validation_dataset is not None:
        target, kwargs, _ = target_of("data.validation", validation_dataset)
        data = replace(
            data, validation_target=target, validation_kwargs=data.validation_kwargs | kwargs
        )
    spec = replace(spec, model=model_config, data=data)
    if loss is not None:
        target, kwargs, path = target_of("loss", loss)
        spec = replace(spec, loss=replace(spec.loss, target=target, kwargs=kwargs, path=path))
    # what was derived of the model and data before is derived again
    cluster = replace(spec.cluster, nodes=None, ranks_per_node=None)
    return resolve(replace(spec, cluster=cluster))
