"""Traces for the tests: real schedules, replayed with given costs and written down as simulated runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gems.config.schema import CostConfig, ModelConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.schedule import generate
from gems.schedule.action import Action, Kind
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation
from gems.trace import (
    DTYPES,
    KINDS,
    STREAMS,
    Trace,
    TracePart,
    part_path,
    root_attributes,
    write_trace,
)
from tests.helpers.drawings import play

STASH_BYTES = 3 << 20
WEIGHT_BYTES = 5 << 20
COMPUTE = STREAMS.index("compute")
LINK = STREAMS.index("link")
UNKNOWN = (np.nan, np.nan)  # norm of the gradient and learning rate of a step


@dataclass(frozen=True)
class Simulated:
    """A run on paper: a schedule, its costs in ns, and how many steps of it there are."""

    name: str = "gems_master"
    partitions: int = 4
    micro_batches: int = 8
    parts: int = 1
    replicas: int = 1
    steps: int = 3
    warmup_steps: int = 1
    forward_ns: int = 1_000_000
    backward_ns: int = 2_000_000
    link_ns: int = 0
    reduce_ns: int = 0
    step_ns: int = 0
    images_per_step: int = 16
    source: str = "simulated"

    def spec(self) -> RunSpec:
        """Return the configuration of the run."""
        parallel = ParallelConfig(
            partitions=self.partitions,
            replicas=self.replicas,
            micro_batches=self.micro_batches,
            parts=self.parts,
        )
        return RunSpec(
            model=ModelConfig(), parallel=parallel, schedule=ScheduleConfig(name=self.name)
        )

    def cost(self, action: Action) -> float:
        """Return the time of an action on its rank."""
        costs = {
            Kind.F: self.forward_ns,
            Kind.B: self.backward_ns,
            Kind.REDUCE_GRAD: self.reduce_ns,
        }
        return float({**costs, Kind.STEP: self.step_ns}.get(action.kind, 0))

    def play(self) -> tuple[Schedule, Simulation]:
        """Replay one step."""
        schedule = lower(generate(self.name, self.partitions, self.micro_batches, self.parts))
        return schedule, play(schedule, self.cost, self.link_ns)

    def trace(self) -> Trace:
        """Build the trace of all steps, one behind the other."""
        schedule, played = self.play()
        span_ns = round(played.span)
        rows = [
            row
            for step in range(self.steps)
            for row in self.step_rows(step, step * span_ns, schedule, played)
        ]
        events = np.array(rows, DTYPES["events"])
        events = events[np.lexsort((events["start_ns"], events["rank"]))]
        steps = [
            (
                k,
                k * span_ns,
                (k + 1) * span_ns,
                self.images_per_step,
                2.0 / (k + 1),
                int(k < self.warmup_steps),
                1,
                *UNKNOWN,
            )
            for k in range(self.steps)
        ]
        return Trace(
            attributes=root_attributes(
                self.source, "0123456789ab", self.partitions * self.replicas
            ),
            events=events,
            steps=np.array(steps, DTYPES["steps"]),
            run_yaml=yaml.safe_dump(self.spec().to_dict()),
        )

    def step_rows(
        self, step: int, at_ns: int, schedule: Schedule, played: Simulation
    ) -> list[tuple[int, ...]]:
        """Return the event rows of one step on every world rank.

        The ledger holds one stash from F to B.
        """
        rows: list[tuple[int, ...]] = []
        for replica in range(self.replicas):
            for rank, actions in enumerate(schedule.rank_schedules):
                for i, action in enumerate(actions):
                    is_link = "SEND" in action.kind.value or "RECV" in action.kind.value
                    rows.append(
                        (
                            replica * schedule.num_ranks + rank,
                            step,
                            KINDS.index(action.kind.value),
                            action.stage,
                            -1,
                            action.direction,
                            -1 if action.micro_batch is None else action.micro_batch,
                            LINK if is_link else COMPUTE,
                            at_ns + round(played.start[rank][i]),
                            at_ns + round(played.end[rank][i]),
                            1 << 16 if is_link else 0,
                            held_bytes(actions, played.end[rank], played.end[rank][i]),
                            0,
                        )
                    )
        return rows


def held_bytes(actions: Sequence[Action], ends: Sequence[float], now: float) -> int:
    """Return what the device holds.

    Weights, and one stash from the end of an F to the end of its B.
    """
    kinds = [action.kind for action, end in zip(actions, ends, strict=True) if end <= now]
    return WEIGHT_BYTES + STASH_BYTES * (kinds.count(Kind.F) - kinds.count(Kind.B))


Simulate = Callable[..., Trace]


@pytest.fixture
def simulate() -> Simulate:
    """Return the function that builds a simulated trace: fields of `Simulated` by name."""
    return lambda **fields: Simulated(**fields).trace()


@pytest.fixture
def write_parts() -> Callable[..., Trace]:
    """Return the function that writes a run as the parts of its ranks, some of which ended early."""
    return _write_parts


def _write_parts(
    folder: Path,
    run: dict[str, object],
    steps_of: dict[int, int] | None = None,
    offsets_ns: dict[int, int] | None = None,
) -> Trace:
    """Write the parts: rank r has `steps_of[r]` steps (default all), its clock is `offsets_ns[r]` ahead."""
    simulated = replace(Simulated(), **run)  # type: ignore[arg-type]
    trace = simulated.trace()
    for rank in range(trace.world_size):
        ahead_ns = (offsets_ns or {}).get(rank, 0)
        attributes = {
            **trace.attributes,
            "hostname": f"node{rank}",
            "clock_offset_ns": ahead_ns,
            "clock_error_ns": 5,
        }
        part = TracePart(part_path(folder, rank), rank, attributes)
        for row in trace.steps[: (steps_of or {}).get(rank, simulated.steps)]:
            for event in trace.events[
                (trace.events["rank"] == rank) & (trace.events["step"] == row["step"])
            ]:
                event["start_ns"] += ahead_ns
                event["end_ns"] += ahead_ns
                part.add("events", tuple(event))
            step, start_ns, end_ns, images, loss, is_warmup, *_ = row.item()
            known = loss if rank == trace.world_size - 1 else float("nan")
            part.add(
                "rank_steps",
                (
                    rank,
                    step,
                    start_ns + ahead_ns,
                    end_ns + ahead_ns,
                    images,
                    known,
                    is_warmup,
                    *UNKNOWN,
                ),
            )
            part.add(
                "samples",
                (rank, end_ns + ahead_ns, -1, (rank + 1) << 20, float("nan"), float("nan")),
            )
            part.flush()
        part.close()
    if not (folder / "run.yaml").exists():  # of a run that was prepared
        (folder / "run.yaml").write_text(trace.run_yaml)
    return trace


SHAPE = {"partitions": 4, "replicas": 1, "micro_batches": 8, "micro_batch_size": 2}


def step_rows(times_ms: Sequence[float], images: int, warmup_steps: int) -> np.ndarray:
    """Return the steps of a trace, one after another without a gap."""
    rows = []
    at_ns = 0
    for step, time_ms in enumerate(times_ms):
        end_ns = at_ns + round(time_ms * 1e6)
        is_warmup = int(step < warmup_steps)
        rows.append((step, at_ns, end_ns, images, np.nan, is_warmup, 1, np.nan, np.nan))
        at_ns = end_ns
    return np.array(rows, DTYPES["steps"])


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return the function that writes a run folder with a trace of steps alone.

    Its step times are in ms. Numbers are sizes of SHAPE, dictionaries are sections of the
    configuration, and `attributes` those of the trace.
    """

    def make(
        name: str = "1f1b",
        source: str = "measured",
        times_ms: tuple[float, ...] = (50.0, 10.0),
        warmup_steps: int = 1,
        unit_s: float = 0.001,
        attributes: dict[str, Any] | None = None,
        **more: Any,
    ) -> Path:
        sizes = {key: more.pop(key, size) for key, size in SHAPE.items()}
        document = RunSpec(
            parallel=ParallelConfig(**sizes),
            schedule=ScheduleConfig(name=name),
            cost=CostConfig(unit_s=unit_s),
        ).to_dict()
        for section, values in more.items():
            document[section] |= values
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        images = sizes["replicas"] * sizes["micro_batches"] * sizes["micro_batch_size"]
        trace = Trace(
            root_attributes(
                source, folder.name, sizes["partitions"] * sizes["replicas"], **(attributes or {})
            ),
            steps=step_rows(times_ms, images, warmup_steps),
            run_yaml=yaml.safe_dump(document),
        )
        folder.mkdir()
        write_trace(folder / "trace.h5", trace)
        return folder

    return make
