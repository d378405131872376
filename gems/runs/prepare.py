"""Prepare a resolved run: write the run folder that its ranks read."""

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
from gems.runs.owner import check_free, not_writable
from gems.runs.provenance import share_bundle, write_bundle
from gems.utils.atomic_io import atomic_write, write_json


def prepare(
    spec: RunSpec,
    plan: Plan | None = None,
    needs_labels: bool = True,
    own: Callable[[RunFolder], object] = check_free,
    like: RunFolder | None = None,
) -> RunFolder:
    """Create the folder of a resolved run: configuration, schedule, partition and memory plan.

    A folder with the same configuration is used again; the files of the earlier attempt move to
    attempts/<number>/. `own` is called before anything is written: it makes the caller the owner of
    the folder, or checks that it has no owner. The code snapshot of `like`, a run just prepared, is
    shared instead of taken again.

    Raises:
        ConfigError: No permission, another configuration in the folder, another owner of it, a
            schedule that cannot be built or does not suit the model, or data that cannot be read or
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
        check_folder(folder, run_id(spec), spec.train.resume)
        own(folder)
        _write(folder, plan, like)
    except OSError as error:
        raise not_writable(spec.runs_dir, error) from error
    return folder


def _write(folder: RunFolder, plan: Plan, like: RunFolder | None) -> None:
    """Archive the files of an earlier attempt, and write those of the run."""
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
    """Continue a prepared run with another plan of the same steps.

    `step` is that of the checkpoint from which it continues, if any. The files of the plan are
    written before the change is recorded.

    Raises:
        OSError: The folder cannot be written.
    """
    numbers = [int(path.name) for path in (folder.path / "layouts").glob("[0-9]*")]
    number = 1 + max(numbers, default=1)
    target = RunFolder(folder.path / "layouts" / f"{number:04d}")
    target.path.mkdir(parents=True)
    _write_plan(target, plan)
    facts = {"step": step, "run_yaml_blake2b": hash_of(target.run_yaml)}
    folder.add_layout(number, plan.spec.layout, plan.spec.cluster.nodes, why, by, **facts)


def _write_plan(folder: RunFolder, plan: Plan) -> None:
    """Write the configuration of a plan and the other files that ranks read."""
    with atomic_write(folder.run_yaml) as partial:
        partial.write_text(to_yaml(plan.spec.to_dict()))
    if plan.costs != plan.spec.cost:
        write_json(folder.costs_json, asdict(plan.costs), indent=None)
    folder.write_schedule(plan.schedule)
    # the prediction is for eager layers; compiled ones save other tensors
    peaks = None if plan.spec.train.compile else plan.peak_bytes
    folder.write_boundaries(plan.boundaries, peaks)
    if plan.profile is not None:
        write_json(folder.profile_json, plan.profile.to_json(), indent=None)
    if plan.memory_plan is not None:
        write_json(
            folder.memory_json, plan.memory_plan.to_json() | {"predicted": plan.memory.to_json()}
        )


def check_folder(folder: RunFolder, own_id: str, resume: str) -> None:
    """Check that the run `own_id`, with this `train.resume`, can use its folder.

    Raises:
        ConfigError: The folder has another configuration, or a checkpoint of another version.
    """
    if not folder.run_yaml.exists():
        return
    present_id = run_id(folder.read_own_spec())
    if present_id != own_id:
        raise ConfigError(
            "run folder",
            folder.path,
            f"holds another configuration ({present_id}, not {own_id})",
            "choose another name= or runs_dir=, or move that folder away",
        )
    if resume != RESUME_NEVER and not folder.result_json.exists():
        check_schema("train.resume", resume, folder.path)
