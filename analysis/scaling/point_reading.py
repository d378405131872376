"""The points of a scaling study, read from the traces of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from analysis.io.run_config import read_head, read_section
from analysis.metrics.run_metrics import NS, step_times_s
from analysis.scaling.points import Point, Setting
from gems.config.schema import CostConfig, DataConfig, ModelConfig, ParallelConfig, ScheduleConfig
from gems.errors import ConfigError
from gems.trace import SOURCES

DOCUMENTED = ("git_commit", "versions", "created_utc")


def read_point(path: Path) -> Point:
    """Read one run, its steps and configuration alone.

    Raises:
        ConfigError: no trace there, an unreadable one, one without its configuration, or no step after warm-up.
    """
    head = read_head(path)
    attributes, steps, document = head.attributes, head.steps, head.document
    counted = steps[steps["is_warmup"] == 0]
    if not len(counted):
        raise ConfigError("trace", path, "holds no whole step after warm-up", "raise train.steps")
    parallel, cost = read_section(document, "parallel", ParallelConfig), read_section(document, "cost", CostConfig)
    source = str(attributes["source"])
    work_s = None if source == "measured" else _work_s(parallel, cost)
    return Point(
        line=_line(read_section(document, "schedule", ScheduleConfig), parallel),
        source=source,
        ranks=int(attributes["world_size"]),
        partitions=parallel.partitions,
        replicas=parallel.replicas,
        micro_batches=parallel.micro_batches or 0,
        images_per_step=int(counted["images"][0]),
        problem=_problem(document) if work_s is None else (float(f"{work_s:.9g}"),),
        work_s=work_s,
        step_s=tuple(step_times_s(steps)[steps["is_warmup"] == 0].tolist()),
        signatures=(str(attributes.get("signature", "")),),
        num_images=int(counted["images"].sum()),
        setting=_setting(attributes, len(steps) - len(counted)),
        run_steps=(len(counted),),
        model=_model_name(read_section(document, "model", ModelConfig))
        if work_s is None or cost.name == "profile"
        else "",
        held_out_error=None if (error := attributes.get("held_out_error")) is None else float(error),
    )


def read_points(paths: Iterable[Path]) -> list[Point]:
    """Read runs and return their points by line, ranks and source; runs of one point are pooled.

    If a line has several models, or pipelines of several lengths, on as many ranks, each of them is a line of its own.

    Raises:
        ConfigError: as `read_point`.
    """
    pooled: dict[Point, Point] = {}
    for path in paths:
        read = read_point(path)
        place = replace(read, step_s=(), signatures=(), num_images=None, setting=Setting(), run_steps=())
        known = pooled.get(place)
        pooled[place] = read if known is None else _together(known, read)
    named = list(pooled.values())
    several = {
        point.line
        for point in named
        if any(_same_place(point, other) and point.model != other.model for other in named)
    }
    named = [_in_line(point, point.model) if point.line in several else point for point in named]
    crowded = {point.line for point in named if sum(_same_place(point, other) for other in named) > 1}
    named = [_in_line(point, f"pipelines of {point.partitions}") if point.line in crowded else point for point in named]
    return sorted(named, key=lambda point: (point.line, point.ranks, SOURCES.index(point.source)))


def _together(point: Point, other: Point) -> Point:
    return replace(
        point,
        step_s=point.step_s + other.step_s,
        signatures=point.signatures + other.signatures,
        num_images=(point.num_images or 0) + (other.num_images or 0),
        setting=point.setting.with_(other.setting),
        run_steps=point.run_steps + other.run_steps,
    )


def _in_line(point: Point, name: str) -> Point:
    """Return the point in a line of its own, with a longer name."""
    return replace(point, line=f"{point.line}, {name}") if name else point


def _model_name(model: ModelConfig) -> str:
    """Return a network's name as people write it: resnet-1001-v2."""
    parts = [model.name, str(model.depth)] if model.name in ("resnet", "vgg") else [model.name]
    return "-".join([*parts, *([f"v{model.version}"] if model.name == "resnet" else [])])


def _same_place(point: Point, other: Point) -> bool:
    return (point.line, point.source, point.ranks) == (other.line, other.source, other.ranks)


def _setting(attributes: Mapping[str, Any], num_warmup_steps: int) -> Setting:
    needed = DOCUMENTED if attributes["source"] == "simulated" else (*DOCUMENTED, "hostnames")
    commit = str(attributes.get("git_commit", "unknown"))
    missing = [name for name in needed if not attributes.get(name) or attributes[name] == "unknown"]
    return Setting(
        missing=tuple(sorted(missing)),
        commits=() if commit == "unknown" else (commit,),
        versions=tuple(sorted(map(str, attributes.get("versions", ())))),
        num_warmup_steps=num_warmup_steps,
        clock_error_s=max(map(float, attributes.get("clock_error_ns", ())), default=0.0) * NS,
    )


def _line(schedule: ScheduleConfig, parallel: ParallelConfig) -> str:
    parts = [schedule.name]
    if schedule.name == "gems_master" and (parallel.parts or 1) > 1:
        parts.append(f"{parallel.parts} parts")
    if schedule.activation_cap is not None:
        parts.append(f"cap {schedule.activation_cap:g}")
    if schedule.activation_cap_bytes is not None:
        parts.append(f"cap {schedule.activation_cap_bytes} bytes")
    return ", ".join([*parts, *(f"with {action}" for action in schedule.memory_actions)])


def _work_s(parallel: ParallelConfig, cost: CostConfig) -> float:
    units = parallel.partitions * (cost.forward + cost.input_grad + cost.weight_grad)
    return units * cost.unit_s / parallel.micro_batch_size


def _problem(document: dict[str, Any]) -> tuple[Any, ...]:
    data = read_section(document, "data", DataConfig)
    model = sorted(asdict(read_section(document, "model", ModelConfig)).items())
    seen = ((key, str(value)) for key, value in model)  # values may be lists and mappings
    return (*seen, data.channels, data.height_px * data.width_px)
