"""What a preset makes of the script and of srun's line.

Requests, bindings, modules, containers, ibrun.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gems.config.schema import RunSpec
from gems.launch.local_launcher import Ended
from gems.runs.folder import RunFolder
from gems.utils.run_module import RUN_MODULE
from jobs.batch.launchers import command, module_on_each_node
from jobs.batch.resources import job_spec
from jobs.launch import launch as launch_module
from jobs.launch.launch import SWEEP
from tests.helpers.job_helpers import (
    ROOT,
    MonkeyPatch,
    Resolved,
    Tiny,
    refused,
    script_of,
    with_cluster,
)

FOLDER = RunFolder(Path("/runs/it's mine"))
CODE_ZIP = "/runs/it's mine/provenance/code.zip"
IN_JOB = [CODE_ZIP, "gems.engine.run", "/runs/it's mine"]


@pytest.fixture
def on(resolved: Resolved) -> Resolved:
    """Compose a run of two nodes on SLURM, with some values of a preset."""

    def make(**more: Any) -> RunSpec:
        spec = resolved("cluster=slurm", "parallel.replicas=2")
        return with_cluster(spec, **more)

    return make


def script(spec: RunSpec) -> list[str]:
    return script_of(spec).splitlines()


@pytest.mark.parametrize(
    ("values", "asked", "bound"),
    [
        ({}, "--gpus-per-node=4", ["--gpu-bind=none"]),
        ({"gpu_request": "gres", "gpu_bind": "closest"}, "--gres=gpu:4", ["--gpu-bind=closest"]),
        ({"gpu_request": "gpus-per-task", "gpu_bind": None}, "--gpus-per-task=1", []),
        ({"gpu_request": "none"}, None, []),
    ],
)
def test_gpus_are_asked_for_once_and_alike(
    on: Resolved, values: dict[str, Any], asked: str | None, bound: list[str]
) -> None:
    spec = on(**values)
    wanted = [asked] if asked else []
    assert [line for line in script(spec) if "gpu:" in line or "--gpus" in line] == [
        f"#SBATCH {word}" for word in wanted
    ]
    argv = command(job_spec(spec), FOLDER)
    assert [word for word in argv if word.startswith(("--gpu", "--gres"))] == [*wanted, *bound]
    assert job_spec(spec).gpus == 8, "what is charged does not depend on how it is asked for"


def test_cpu_binding_stands_before_free_options(on: Resolved) -> None:
    argv = command(job_spec(on(cpu_bind="map_cpu:1,2,3,4", srun=["--network=a b"])), FOLDER)
    assert argv[argv.index("--gpu-bind=none") + 1 :] == [
        "--cpu-bind=map_cpu:1,2,3,4",
        "--network=a b",
        sys.executable,
        *IN_JOB,
    ]


def test_modules_are_loaded_first_or_the_job_ends(on: Resolved, tmp_path: Path) -> None:
    lines = script(on(modules=["LUMI/25.03", "gcc"], setup=["ulimit -c 0"]))
    start = lines.index("# setup")
    assert lines[start + 1 : start + 4] == [
        "module load LUMI/25.03 gcc || exit 2",
        "ulimit -c 0",
        "export SRUN_CPUS_PER_TASK=8",
    ]
    for code in (0, 1):
        text = f"module() {{ echo $* >> loaded; return {code}; }}\n{lines[start + 1]}\nexit 7"
        assert subprocess.run(["bash", "-c", text], cwd=tmp_path).returncode == (2 if code else 7)
    assert (tmp_path / "loaded").read_text() == "load LUMI/25.03 gcc\n" * 2


def test_account_with_the_sites_suffix(on: Resolved) -> None:
    assert "#SBATCH --account=m1_g" in script(on(account="m1", account_suffix="_g"))


@pytest.mark.parametrize("option", ["mem", "mem_per_cpu", "--mem-per-gpu"])
def test_a_site_that_refuses_options_of_memory(on: Resolved, option: str) -> None:
    assert any("--mem" in line for line in script(on(sbatch={option: "1G"})))
    with refused(r"^cluster\.sbatch\.mem.*=1G: cluster slurm refuses options of memory; "):
        script(on(sbatch={option: "1G"}, supports_mem_option=False))


def test_gpus_by_hand_beside_the_presets_own(on: Resolved) -> None:
    assert "#SBATCH --gres=gpu:a100:2" in script(
        on(gpu_request="none", sbatch={"gres": "gpu:a100:2"})
    )
    with refused(r"^cluster\.sbatch\.gres=nvme: conflicts with cluster\.gpu_request=gres"):
        script(on(gpu_request="gres", sbatch={"gres": "nvme"}))


def test_ibrun(on: Resolved) -> None:
    spec = on(launcher="ibrun", gpus_per_node=0)
    assert command(job_spec(spec), FOLDER) == ["ibrun", sys.executable, *IN_JOB]
    lines = script(spec)
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks=8", "#SBATCH --ntasks-per-node=4"} <= set(lines)
    assert not any(line.startswith("#SBATCH --ntasks=") for line in script(on()))


@pytest.mark.parametrize(("launcher", "kept"), [("srun", True), ("ibrun", False)])
def test_ranks_of_ibrun_do_not_take_the_batch_scripts_place(
    on: Resolved, tiny: Tiny, monkeypatch: MonkeyPatch, launcher: str, kept: bool
) -> None:
    folder, _ = tiny()
    seen: list[dict[str, str]] = []

    def note(argv: list[str], environment: dict[str, str], *words: Any, **more: Any) -> Ended:
        seen.append(environment)
        return Ended(1, ())

    monkeypatch.setattr(launch_module, "run_ranks", note)
    for name, value in {"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    launch_module.launch(folder, on(launcher=launcher))
    assert ("SLURM_LOCALID" in seen[0], "SLURM_PROCID" in seen[0]) == (kept, kept)
    assert (seen[0]["SLURM_JOB_ID"], seen[0]["SLURM_EXPORT_ENV"]) == ("7", "ALL")
    assert folder.read_status()["job_id"] == "7"


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
def test_apptainer(on: Resolved, runtime: str) -> None:
    image = {"container": runtime, "container_image": "my image.sif", "container_options": ["--nv"]}
    argv = command(job_spec(on(**image)), FOLDER)
    assert argv[argv.index("--gpu-bind=none") + 1 :] == [
        runtime,
        "exec",
        "--bind=/runs/it's mine",
        "--pwd=/runs/it's mine",
        "--nv",
        "my image.sif",
        "python3",
        *IN_JOB,
    ]
    sweep = module_on_each_node(job_spec(on(**image, python="python3.12")), FOLDER, SWEEP)
    assert sweep[sweep.index(runtime) :] == [
        runtime,
        "exec",
        "--bind=/runs/it's mine",
        "--pwd=/runs/it's mine",
        "--nv",
        "my image.sif",
        "python3.12",
        CODE_ZIP,
        "gems.launch.mpich_cleanup",
    ]
    live = command(job_spec(on(**image, archive_code=False)), FOLDER)
    assert live[live.index("exec") + 1 :] == [
        f"--bind={ROOT}",
        "--bind=/runs/it's mine",
        f"--pwd={ROOT}",
        "--nv",
        "my image.sif",
        "python3",
        *RUN_MODULE,
        *IN_JOB[1:],
    ]


def test_pyxis(on: Resolved) -> None:
    image = {
        "container": "pyxis",
        "container_image": "site/image:1",
        "container_options": ["--no-container-mount-home"],
    }
    argv = command(job_spec(on(**image)), FOLDER)
    assert argv[argv.index("--gpu-bind=none") + 1 :] == [
        "--container-image=site/image:1",
        "--container-mounts=/runs/it's mine:/runs/it's mine",
        "--container-workdir=/runs/it's mine",
        "--no-container-mount-home",
        "python3",
        *IN_JOB,
    ]
    live = command(job_spec(on(**image, archive_code=False)), FOLDER)
    assert live[live.index("--gpu-bind=none") + 2 :] == [
        f"--container-mounts={ROOT}:{ROOT},/runs/it's mine:/runs/it's mine",
        f"--container-workdir={ROOT}",
        "--no-container-mount-home",
        "python3",
        *RUN_MODULE,
        *IN_JOB[1:],
    ]


def test_a_runtime_without_an_image_is_not_used(on: Resolved) -> None:
    spec = on(container="apptainer", container_options=["--nv"])
    assert command(job_spec(spec), FOLDER) == command(job_spec(on()), FOLDER)


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("shifter", ["shifter", "--image=site/image:1", "--module=gpu"]),
        (
            "podman-hpc",
            [
                "podman-hpc",
                "run",
                "--rm",
                "--env-host",
                "--volume=/runs/it's mine:/runs/it's mine",
                "--workdir=/runs/it's mine",
                "--module=gpu",
                "site/image:1",
            ],
        ),
        ("uenv", ["--uenv=site/image:1", "--module=gpu"]),  # options of srun
    ],
)
def test_containers_of_single_sites(on: Resolved, runtime: str, words: list[str]) -> None:
    image = {
        "container": runtime,
        "container_image": "site/image:1",
        "container_options": ["--module=gpu"],
    }
    argv = command(job_spec(on(**image)), FOLDER)
    assert argv[argv.index("--gpu-bind=none") + 1 :] == [*words, "python3", *IN_JOB]


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
@pytest.mark.parametrize("path", ["/runs/a:b", "/runs/a,b"])
def test_a_path_that_a_container_would_take_apart(on: Resolved, runtime: str, path: str) -> None:
    spec = on(container=runtime, container_image="i")
    with refused(r"^runs_dir=.*: must have no ',', ':'"):
        command(job_spec(spec), RunFolder(Path(path)))
