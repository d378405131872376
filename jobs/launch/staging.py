"""Copy files that all ranks of a large job read to the nodes' own disks, before the ranks start.

A thousand ranks that open one file of a parallel file system wait for each other; sbcast sends it
through a tree of nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gems.runs.folder import RunFolder
from gems.utils.stdio import report
from jobs.batch.command import CommandResult, run_command
from jobs.batch.launchers import on_each_node
from jobs.batch.resources import CODE, IMAGE, JobSpec

COPY_LIMIT_S = 600.0  # a container's image has some GB
REMOVE_LIMIT_S = 10.0


@contextlib.contextmanager
def staged(job: JobSpec, folder: RunFolder) -> Iterator[JobSpec]:
    """Copy the files that `cluster.stage` names; yield the job with commands that use the copies.

    Remove the copies at the end. Files that cannot be copied are read in place. Jobs of few nodes,
    and of launchers other than srun, copy nothing.
    """
    copied: list[str] = []
    if job.launcher == "srun" and job.nodes > job.cluster.stage_above_nodes:
        for what, path in sources(job, folder).items():
            error = _run(["sbcast", "--force", str(path), job.stage_path(what)], COPY_LIMIT_S).error
            if error is None:
                copied.append(what)
            else:
                report("jobs", f"cluster.stage: {path} is read by all nodes where it is ({error})")
    try:
        yield replace(job, staged=tuple(copied))
    finally:
        if copied:
            _run([*on_each_node(job), "rm", "-f", *map(job.stage_path, copied)], REMOVE_LIMIT_S)


def sources(job: JobSpec, folder: RunFolder) -> dict[str, Path]:
    """Return the files to copy: the code archive, and the container image if it is a file."""
    image = job.cluster.container_image
    files = {
        CODE: folder.code_zip if job.snapshot else None,
        IMAGE: Path(image) if image is not None else None,
    }
    return {
        what: path
        for what in job.cluster.stage
        if (path := files[what]) is not None and path.is_file()
    }


def _run(argv: list[str], limit_s: float) -> CommandResult:
    """Run a command in this process's own job."""
    return run_command(argv, limit_s=limit_s, environment=os.environ)
