"""Preparation: a resolved run becomes a run folder with all that its ranks read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict

from gems.config.checkpoint_schema import check_schema
from gems.config.resolve import run_id
from gems.config.schema import RunSpec
from gems.config.training import RESUME_NEVER
from gems.data import find_source
from gems.data.inspection import inspect_data
from gems.errors import ConfigError
from gems.plan.evaluate import Plan, evaluate, with_strips_chosen
from gems.plan.strips_choice import thin_parts
from gems.profile.exactness import check_exact
from gems.profile.subject import Subject
from gems.runs.code_archive import hash_of
from gems.runs.folder import RunFolder, older_folders, to_yaml
from gems.runs.owner import check_free
from gems.runs.provenance import share_bundle, write_bundle
from gems.utils.atomic_io import atomic_write, write_json


def prepare(
    spec: RunSpec,
    plan: Plan | None = None,
    needs_labels: bool = True,
    own: Callable[[RunFolder], object] = check_free,
    like: RunFolder | None = None,
) -> RunFolder:
    """Make the folder of a resolved run and write what its ranks read.

    Configuration, schedule, partition, memory plan.
    A folder that already holds this configuration is used again: what the earlier attempt left
    moves to attempts/<number>/, so nothing recorded is lost. `own` is called before anything is
    written: it makes the caller the owner of the folder, or checks that nobody is. `like` is a run
    just prepared, whose code is taken for this one.

    Raises:
        ConfigError: no permission, another configuration in the folder, another owner of it, a
            schedule that cannot be made or does not suit the model, or data that cannot be read or
            have no labels.
    """
    if needs_labels and not find_source(spec.data).labelled:
        raise ConfigError(
            "data", spec.data.name, "has no labels", "predict it: gems predict RUN --input FILES"
        )
    spec = plan.spec if plan else with_strips_chosen(spec)
    folder = RunFolder.of(spec)
    for older in older_folders(folder.path) if not folder.path.exists() else ():
        print(
            f"gems: {older} is an older folder of this configuration, from an earlier version; "
            f"train.resume={older} goes on from it",
            file=sys.stderr,
        )
    plan = plan or evaluate(spec)
    if plan.profile is not None:
        thin = thin_parts(spec.parallel, spec.data, spec.machine.launch_s, plan.profile)
        if thin:
            print(f"gems: warning: {thin}", file=sys.stderr)
    if spec.machine.is_real:
        inspect_data(spec.data, spec.seed)
        split_by = plan.schedule.name if plan.schedule.has_split_backward else None
        check_exact(Subject.of(plan.spec), split_by)
    try:
        check_folder(folder, spec)
        own(folder)
        _write(folder, plan, like)
    except OSError as error:
        raise ConfigError(
            "runs_dir",
            spec.runs_dir,
            f"cannot write there ({error.strerror}: {error.filename})",
            "give runs_dir= a folder of yours",
        ) from error
    return folder


def _write(folder: RunFolder, plan: Plan, like: RunFolder | None) -> None:
    """Write the files of a run; archive those of an earlier attempt."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if folder.run_yaml.exists():
        folder.archive(also=[folder.checkpoints] if folder.result_json.exists() else [])
    if folder.layout != folder:
        nodes = plan.spec.cluster.nodes
        folder.add_layout(1, plan.spec.layout, nodes, "prepared again", "prepare")
    _write_plan(folder, plan)
    folder.logs.mkdir(exist_ok=True)
    folder.heartbeat(0).parent.mkdir(exist_ok=True)
    summary = (
        write_bundle(folder.provenance, plan.spec) if like is None else share_bundle(folder, like)
    )
    write_json(folder.provenance_json, {**summary, "run_yaml_blake2b": hash_of(folder.run_yaml)})
    folder.write_status("prepared")


def change_layout(folder: RunFolder, plan: Plan, why: str, by: str, step: int | None) -> None:
    """Let a prepared run go on by another plan of the same steps.

    Its files are written first, then it is recorded.
    `step` is that of the checkpoint from which it goes on, if there is one.

    Raises:
        OSError: the folder cannot be written.
    """
    taken = [int(path.name) for path in (folder.path / "layouts").glob("[0-9]*")]
    number = 1 + max(taken, default=1)
    target = RunFolder(folder.path / "layouts" / f"{number:04d}")
    target.path.mkdir(parents=True)
    _write_plan(target, plan)
    facts = {"step": step, "run_yaml_blake2b": hash_of(target.run_yaml)}
    folder.add_layout(number, plan.spec.layout, plan.spec.cluster.nodes, why, by, **facts)


def _write_plan(folder: RunFolder, plan: Plan) -> None:
    """Write the configuration of a plan and what ranks read beside it."""
    with atomic_write(folder.run_yaml) as partial:
        partial.write_text(to_yaml(plan.spec.to_dict()))
    if plan.costs != plan.spec.cost:
        write_json(folder.costs_json, asdict(plan.costs), indent=None)
    folder.write_schedule(plan.schedule)
    # of layers as they are, and compiled ones keep other tensors
    peaks = None if plan.spec.train.compile else plan.peak_bytes
    folder.write_boundaries(plan.boundaries, peaks)
    if plan.profile is not None:
        write_json(folder.profile_json, plan.profile.to_json(), indent=None)
    if plan.memory_plan is not None:
        write_json(
            folder.memory_json, plan.memory_plan.to_json() | {"predicted": plan.memory.to_json()}
        )


def check_folder(folder: RunFolder, spec: RunSpec) -> None:
    """Check that a run can use its folder.

    Raises:
        ConfigError: another configuration is in it, or a checkpoint of another version's schema.
    """
    if not folder.run_yaml.exists():
        return
    held = run_id(folder.read_own_spec())
    if held != run_id(spec):
        raise ConfigError(
            "run folder",
            folder.path,
            f"holds another configuration ({held}, not {run_id(spec)})",
            "choose another name= or runs_dir=, or move that folder away",
        )
    if spec.train.resume != RESUME_NEVER and not folder.result_json.exists():
        check_schema("train.resume", spec.train.resume, folder.path)
