"""Provenance: the code, packages and environment of a run.

They are in `provenance/` in the run folder, with a summary beside it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.runs.code_archive import CODE_ZIP, PACKAGES, code_root, hash_of, share, take_snapshot
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json, write_json
from gems.utils.targets import source_of, sources_of
from gems.utils.units import now_utc

CODE_DIFF = "code.diff"
PACKAGES_TXT = "packages.txt"
ENVIRONMENT_JSON = "environment.json"
GIT_LIMIT_S = 10
MAX_DIFF_BYTES = 4 << 20
# Variables that affect how a run behaves. No other variables are stored: they may be private.
VARIABLES = re.compile(
    r"(SLURM|SRUN|SBATCH|PBS|FLUX|MPI|MPICH|OMPI|PRTE|PMIX|PMI|MV2|UCX|FI|OMP|KMP|MKL|OPENBLAS|NCCL|RCCL|GEMS|PYTORCH|TORCH|HSA"
    r"|MIOPEN|HDF5|I_MPI)_.*"
    r"|(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_DEVICE_MAX_CONNECTIONS|ROCR_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES)"
    r"|(PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|LOADEDMODULES|PE_ENV|MODULEPATH)"
)
# Words in the names of variables that hold secrets or personal data.
PRIVATE = re.compile(r"JWT|TOKEN|SECRET|PASS|KEY|CRED|AUTH|_USER$|_UID$|_GID$|MAIL", re.IGNORECASE)


def write_bundle(folder: Path, spec: RunSpec) -> dict[str, Any]:
    """Write the provenance of a prepared run to `folder`, and return the summary.

    The files are `code.zip`, the code itself; `code.diff`, its difference from its commit (none
    outside a checkout); `packages.txt`; and `environment.json`. The user's own packages are in the
    archive, unless they are installed.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        name: data for target, path in spec.own_code() for name, data in sources_of(target, path)
    }
    code_hash = take_snapshot(folder / CODE_ZIP, spec.cache_dir, own.items())
    diff = code_diff(code_root())
    if diff is not None:
        (folder / CODE_DIFF).write_bytes(diff)
    (folder / PACKAGES_TXT).write_text(packages())
    write_json(folder / ENVIRONMENT_JSON, {"prepared": environment()})
    summary: dict[str, Any] = {
        "git_commit": commit(code_root()),
        "code_blake2b": code_hash,
        "is_code_changed": None if diff is None else bool(diff),
        "prepared_utc": now_utc(),
    }
    if spec.model.target is not None:
        summary["model_code_sha256"] = source_of(spec.model.target, spec.model.path)
    return summary


def share_bundle(folder: RunFolder, like: RunFolder) -> dict[str, Any]:
    """Share the bundle of another run that has the same code, and return its summary.

    This saves the 0.2 s that git and the archive take.
    """
    folder.provenance.mkdir(parents=True, exist_ok=True)
    for name in (CODE_ZIP, CODE_DIFF, PACKAGES_TXT, ENVIRONMENT_JSON):
        if (like.provenance / name).exists():
            share(like.provenance / name, folder.provenance / name)
    return read_json(like.provenance_json)


def check_code(folder: Path, summary: dict[str, Any]) -> str | None:
    """Compare the archive in a bundle with its summary, and return the fault, or None."""
    expected = summary.get("code_blake2b")
    try:
        actual = hash_of(folder / CODE_ZIP)
    except OSError as error:
        return f"{folder / CODE_ZIP} cannot be read ({error.strerror})"
    if expected is not None and actual != expected:
        return (
            f"{folder / CODE_ZIP} is not what was prepared (BLAKE2b {actual[:16]}, not"
            f" {expected[:16]})"
        )
    return None


def check_run_yaml(run_yaml: Path, summary: dict[str, Any]) -> str | None:
    """Compare the ranks' configuration with the summary of a bundle; return the fault, or None."""
    expected = summary.get("run_yaml_blake2b")
    if expected is None or hash_of(run_yaml) == expected:
        return None
    return (
        f"its {run_yaml.name} is not what was prepared: it was edited, and schedule and partition"
        " were not made anew"
    )


def commit(root: Path) -> str:
    """Return the commit of a checkout, with "-dirty" if files differ from it.

    Return "unknown" outside a checkout.
    """
    output = _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return output.decode(errors="replace").strip() if output else "unknown"


def code_diff(root: Path) -> bytes | None:
    """Return the difference of our packages in a checkout from its commit, with new files.

    Return None outside a checkout. `git apply` accepts the result unless it was cut at
    MAX_DIFF_BYTES; then its last line says so.
    """
    diff = _git(root, "diff", "--no-color", "--no-ext-diff", "--binary", "HEAD", "--", *PACKAGES)
    patterns = (f"{name}/*.py" for name in PACKAGES)
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *patterns)
    if diff is None or new is None:
        return None
    for name in filter(None, new.decode(errors="surrogateescape").split("\0")):
        if len(diff) > MAX_DIFF_BYTES:
            break
        words = ("diff", "--no-color", "--no-ext-diff", "--no-index", "--", "/dev/null", name)
        diff += _git(root, *words, fine=(0, 1)) or b""
    if len(diff) > MAX_DIFF_BYTES:
        diff = (
            diff[:MAX_DIFF_BYTES].rpartition(b"\n")[0]
            + b"\n# cut here: the code itself is in code.zip\n"
        )
    return diff


def _git(root: Path, *words: str, fine: tuple[int, ...] = (0,)) -> bytes | None:
    """Return git's output in a checkout at `root` itself; None if git fails or there is none."""
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), *words]
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode in fine else None


@functools.cache
def packages() -> str:
    """Return the installed packages with their versions, one per line, as a requirements file."""
    known = (
        (package.metadata["Name"], package.metadata["Version"])
        for package in importlib.metadata.distributions()
    )
    return "".join(
        sorted(
            {f"{name}=={version}\n" for name, version in known if name and version}, key=str.lower
        )
    )


def environment() -> dict[str, Any]:
    """Return this process's interpreter, node, loaded modules and relevant variables, no secrets."""
    modules = os.environ.get("LOADEDMODULES", "")
    return {
        "hostname": os.uname().nodename,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "modules": [name for name in modules.split(":") if name],
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if VARIABLES.fullmatch(name) and not PRIVATE.search(name)
        },
    }
