"""Runs on paper for the tests of attribution, and traces written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from analysis.attribution.causes import CAUSES, Attribution
from gems.config.resolve import resolve
from gems.config.schema import (
    BenchmarkConfig,
    CostConfig,
    MachineConfig,
    ParallelConfig,
    RunSpec,
    ScheduleConfig,
    TrainConfig,
)
from gems.plan.draft import Draft
from gems.runs.simulated_run import simulated_trace
from gems.trace import DTYPES, KINDS, STREAMS, Trace, root_attributes

MS = 1_000_000


def spec_of(
    name: str = "1f1b",
    partitions: int = 4,
    micro_batches: int = 8,
    replicas: int = 1,
    path: Path | None = None,
    machine: dict[str, object] | None = None,
    **cost: object,
) -> RunSpec:
    """Resolve a simulated run of 2 counted steps, a unit of time being a second."""
    return resolve(
        RunSpec(
            schedule=ScheduleConfig(name=name, path=None if path is None else str(path)),
            parallel=ParallelConfig(
                partitions=partitions, micro_batches=micro_batches, replicas=replicas
            ),
            cost=CostConfig(**cost),  # type: ignore[arg-type]
            machine=MachineConfig(**{"kind": "simulated"} | (machine or {})),  # type: ignore[arg-type]
            train=TrainConfig(steps=3),
            benchmark=BenchmarkConfig(skip_steps=1),
        )
    )


def trace_of(spec: RunSpec) -> Trace:
    """Simulate a run as its trace file would hold it."""
    trace = simulated_trace(spec, Draft(spec).lowered)
    trace.run_yaml = yaml.safe_dump(spec.to_dict())
    return trace


def check_sums(found: Attribution) -> None:
    """Check that ideal and causes give the step's time, for the run and on every rank."""
    assert found.ideal_s + sum(found.run_s.values()) == pytest.approx(found.step_s, rel=1e-9)
    for rank in range(len(found.causes_s["bubble"])):
        lost_s = sum(found.causes_s[cause][rank] for cause in CAUSES)
        assert found.ideal_s + lost_s == pytest.approx(found.step_s, rel=1e-9), rank


def by_hand(
    rows: tuple[str, ...],
    events_ms: list[tuple[int, str, int, int, float, float]],
    step_ms: tuple[float, float],
    rank_ms: list[tuple[float, float]] | None = None,
    source: str = "measured",
) -> Trace:
    """Write a trace of one counted step: events are (rank, kind, stage, micro-batch, begin, end)."""
    count = len(rows)
    events = [
        (
            rank,
            1,
            KINDS.index(kind),
            stage,
            -1,
            0,
            micro_batch,
            STREAMS.index("compute"),
            start * MS,
            end * MS,
            0,
            0,
            0,
        )
        for rank, kind, stage, micro_batch, start, end in events_ms
    ]
    begin, over = step_ms
    spans = rank_ms or [step_ms] * count
    table = np.array(events, DTYPES["events"])
    return Trace(
        root_attributes(source, "0123456789ab", count, device="cpu"),
        table[np.lexsort((table["start_ns"], table["rank"]))],
        np.array([(1, begin * MS, over * MS, 8, 0.5, 0, 1, np.nan, np.nan)], DTYPES["steps"]),
        np.array(
            [
                (r, 1, start * MS, end * MS, 8, 0.5, 0, np.nan, np.nan)
                for r, (start, end) in enumerate(spans)
            ],
            DTYPES["rank_steps"],
        ),
        schedule_rows=rows,
    )
