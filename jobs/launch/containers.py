"""Ranks in a container: the command that opens its image, with the run folder and our code inside at their own paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gems.errors import ConfigError
from gems.runs.code_archive import code_root
from jobs.slurm.resources import JobSpec

CODE = code_root()
CHECKOUT = CODE / "setup.cfg"  # without it the code is installed, and the image must have its own
PYXIS = "pyxis"


def in_container(job: JobSpec, program: Sequence[str], folder: Path | None = None) -> list[str]:
    """Return the command that runs `program`, through `apptainer exec` or its like if the job's container needs that.

    Raises:
        ConfigError: a path that the runtime would read as something else.
    """
    container = job.container
    if container is None or container.runtime == PYXIS:
        return list(program)
    binds = [f"--bind={path}" for path in _shared(job, folder)]
    home = [f"--pwd={path}" for path in _home(job, folder)]
    return [container.runtime, "exec", *binds, *home, *container.options, container.image, *program]


def srun_options(job: JobSpec, folder: Path | None = None) -> list[str]:
    """Return the options for srun itself, of which pyxis is a plug-in.

    Raises:
        ConfigError: a path that the runtime would read as something else.
    """
    container = job.container
    if container is None or container.runtime != PYXIS:
        return []
    mounts = ",".join(f"{path}:{path}" for path in _shared(job, folder))
    return [
        f"--container-image={container.image}",
        *([f"--container-mounts={mounts}"] if mounts else []),
        *(f"--container-workdir={path}" for path in _home(job, folder)),
        *container.options,
    ]


def _home(job: JobSpec, folder: Path | None) -> list[Path]:
    """Return the working directory inside: a code archive is in the run folder, so nothing else need be there."""
    if job.snapshot:
        return [folder] if folder is not None else []
    return [CODE] if CHECKOUT.exists() else []


def _shared(job: JobSpec, folder: Path | None) -> list[Path]:
    code = [CODE] if CHECKOUT.exists() and not job.snapshot else []
    paths = [*code, *([folder] if folder is not None else [])]
    for path in paths:
        if any(character in str(path) for character in ",:\\"):
            raise ConfigError(
                "runs_dir" if path == folder else "folder of the code", path,
                "must have no ',', ':' or '\\' to be seen in a container", "choose another runs_dir= or name=",
            )  # fmt: skip
    return paths
