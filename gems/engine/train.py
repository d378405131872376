"""Training: a run's steps on one rank, evaluation, and the rank's files in the run folder."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

from gems.data import task_of
from gems.engine.batch_loader import BatchLoader
from gems.engine.checkpoint import weights
from gems.engine.checkpoint.saver import Saver
from gems.engine.checkpoint.state import RankState, layer_owners, restore_state
from gems.engine.checkpoint.state_dict import restore
from gems.engine.evaluation.measure import evaluate, validation_metrics
from gems.engine.evaluation.metrics import Values, compute
from gems.engine.evaluation.picture import Predictions, write_picture
from gems.engine.evaluation.validator import Validator
from gems.engine.optimization.nonfinite import raise_nonfinite
from gems.engine.rank import Rank
from gems.engine.step_loop import (
    SteppedRun,
    StepResult,
    measure_offset,
    schedule_record,
    trace_attributes,
)
from gems.engine.supervision.loggers import LoggedRun, Loggers, open_loggers
from gems.engine.supervision.memory_report import memory_report
from gems.engine.supervision.monitor import Monitor, Sample
from gems.engine.supervision.stop_request import StopListener
from gems.engine.transport.mpi import Comm
from gems.engine.transport.polling import WaitState
from gems.plan.rank_plan import RankPlan
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.trace import TracePart, part_path
from gems.utils.atomic_io import write_json

# the columns of metrics.csv before those of validation
LOGGED = ("train_loss", "step_s", "grad_norm", "learning_rate")
_log = logging.getLogger(__name__)


def train(
    plan: RankPlan,
    folder: RunFolder,
    comm: Comm,
    device: torch.device,
    heartbeat: Heartbeat,
    stop: StopListener | None = None,
    wait_state: WaitState | None = None,
) -> None:
    """Run a whole training on one rank: set-up, steps, evaluation, weights, trace part; collective.

    The training continues from the state that an earlier attempt saved. If `stop` of any rank has a
    reason, all ranks save their state after the same step and end, without evaluation and result.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    attributes = trace_attributes(
        "measured", folder.run_id(plan.spec), comm, name, torch=torch.__version__
    )
    with closing(TracePart(part_path(folder.path, comm.rank), comm.rank, attributes)) as part:
        rank = Rank.open(plan, comm, device, part, heartbeat, wait_state)
        with closing(TrainingRun(rank, folder, part, heartbeat, stop)) as run:
            if not run.run():
                run.finish()
                rank.connections.close()


class TrainingRun(SteppedRun):
    """The training of one rank, from the state where an earlier attempt ended."""

    def __init__(
        self,
        rank: Rank,
        folder: RunFolder,
        part: TracePart,
        heartbeat: Heartbeat,
        stop: StopListener | None,
    ) -> None:
        """Restore the state, and open the data, checkpoints, validation and loggers; collective."""
        super().__init__(rank.plan, folder, rank.comm, part)
        self.rank = rank
        self._heartbeat = heartbeat
        self._restore()
        part.set_attributes(self.start.attributes() | measure_offset(rank.comm, "clock"))
        spec = rank.plan.spec
        self.loader = BatchLoader.open(
            rank.plan, rank.comm, rank.device, self.start.step, masks=rank.mask_parts(rank.train)
        )
        manifest = self.start.manifest(rank.plan, layer_owners(rank))
        control = rank.connections.control
        self.saver = Saver(folder, spec.train, control, manifest, heartbeat, RankState(rank), stop)
        self._monitor = Monitor(rank.device, spec.train.sample_interval_s)
        self._picture = Predictions(rank.training.loss.scores, spec.data.sides_px)
        self._measured: Values = {}
        steps_per_epoch = max(1, self.loader.num_train // spec.parallel.global_batch)
        self._validator = Validator(
            spec.train, folder, rank.comm, part, steps_per_epoch, self.start.step, self
        )
        known = compute(validation_metrics(rank))
        logged = (*LOGGED, *(name for name, value in known.items() if isinstance(value, float)))
        self._loggers = Loggers(())
        if rank.comm.rank == 0:
            values = spec.changed_values()
            run = LoggedRun(spec.name, folder.run_id(spec), folder.path, values, self.start.step)
            self._loggers = open_loggers(spec.train.loggers, run, logged)

    def _restore(self) -> None:
        rank = self.rank
        train = rank.plan.spec.train
        if self.start.checkpoint is not None:
            self.losses = restore_state(rank, *self.start.checkpoint)
            rank.recorder.optimizer.count_bytes(rank.update.state_bytes())
        elif train.initial_checkpoint is not None:
            match = restore(rank, Path(train.initial_checkpoint))
            if rank.comm.rank == 0:
                _log.info("starts with %s", match.describe(train.initial_checkpoint))

    def step(self, step: int) -> StepResult:
        """Run one step; collective.

        Raises:
            RankFailedError: The step is not finite, and the run stops for that.
        """
        rank = self.rank
        recorder = rank.recorder
        update = rank.update
        start_ns = time.perf_counter_ns()
        self._heartbeat.beat(step, "load")
        batch = self.loader.batch(step)
        if self.loader.reads:
            recorder.waited(step, start_ns, time.perf_counter_ns())
        loss_sum = rank.train.run(step, batch)
        if update.stops:
            self.saver.finish(retries=False)
            raise_nonfinite(rank, step, batch)
        del batch
        if step == 0:  # later steps have it from the start
            recorder.optimizer.count_bytes(update.state_bytes())
        end_ns = recorder.end_step()
        training = rank.training
        total = rank.connections.control.sum_to_first([loss_sum, training.step_weight.mine])
        self._add_samples(self._monitor.take())
        loss = float("nan") if total is None else training.loss.mean(*total)
        return StepResult(start_ns, end_ns, loss, update.grad_norm, update.learning_rate)

    def after(self, num_steps: int, done: StepResult) -> None:
        """Validate if it is due, and log the figures of the step; collective."""
        metrics = self._validator.after(num_steps)
        self.is_over = self._validator.is_over
        step_s = (done.end_ns - done.start_ns) / 1e9
        figures = dict(
            zip(LOGGED, (done.loss, step_s, done.grad_norm, done.learning_rate), strict=True)
        )
        self._loggers.log(num_steps, {**figures, **metrics})

    def measure(self) -> dict[str, float]:
        """Return the validation metrics, the same on all ranks; collective."""
        self._heartbeat.beat(self.plan.spec.train.steps, "validate")
        self._picture.maps.clear()
        has_maps = task_of(self.plan.spec.data) == "segmentation"
        self._measured = evaluate(self.rank, self.loader, [self._picture] if has_maps else ())
        return {name: value for name, value in self._measured.items() if isinstance(value, float)}

    def save(self, path: Path) -> None:
        """Write the weights that were measured; collective."""
        with self.rank.update.averaged():
            weights.save(self.rank, path)

    def run(self) -> bool:
        """Run all steps; return whether the run has stopped on request; collective."""
        self.rank.stages.set_training(True)
        try:
            stops = self.run_steps()
        finally:
            self._add_samples(self._monitor.close())
            if (energy_j := self._monitor.energy_j()) is not None:
                self.part.set_attributes({"energy_j": energy_j})
        self.rank.connections.control.barrier()
        self.part.set_attributes(measure_offset(self.comm, "clock_end"))
        device = self.rank.device
        if device.type == "cuda":  # peaks of torch's allocator, within actions too
            self.part.set_attributes(
                {
                    "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
                    "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
                }
            )
        return stops

    def finish(self) -> None:
        """Validate, and write weights and results; collective."""
        rank = self.rank
        folder = self.folder
        report = memory_report(rank, folder.profile_json)
        if rank.comm.rank == 0 and report["unsplit_layers"]:
            _log.info(
                "full backward at I, because it cannot be split: %s",
                ", ".join(report["unsplit_layers"]),
            )
        if self.plan.spec.train.evaluate:
            self._validator.validate()
        if self._picture.maps and rank.replica == 0 and self.loader.dataset is not None:
            write_picture(folder.predictions_png, self.loader.dataset, self._picture.maps)
        self.saver.finish()
        self._heartbeat.beat(self.plan.spec.train.steps, "checkpoint")
        weights.save(rank, folder.checkpoint)
        with rank.update.averaged() as is_averaged:
            if is_averaged:
                weights.save(rank, folder.average)
        energies_j = rank.comm.gather(self._monitor.energy_j())
        best = self._validator.best
        if energies_j is not None:
            write_json(
                folder.result_json,
                {
                    "num_steps": len(self.losses),
                    "first_loss": self.losses[0],
                    "last_loss": self.losses[-1],
                    **schedule_record(self.plan.schedule),
                    "energy_j": energies_j,
                    **report,
                    **self._measured,
                    **({} if best is None else {"best": asdict(best)}),
                },
            )

    def close(self) -> None:
        """Stop reading ahead, saving and logging."""
        for part in (self._loggers, self.saver, self.loader):
            part.close()

    def _add_samples(self, samples: list[Sample]) -> None:
        for sample in samples:
            self.part.add("samples", (self.comm.rank, *sample))
