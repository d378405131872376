"""Build a launcher's command line from a job's resources, in a container if the site needs one.

All functions raise ConfigError for a path that the container's runtime would misread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gems.config import registries
from gems.errors import ConfigError
from gems.launch import placement_check
from gems.launch.local_launcher import mpiexec_argv
from gems.runs.code_archive import code_root, from_snapshot
from gems.runs.folder import RunFolder
from gems.utils.registry import Registry
from gems.utils.run_module import INSTALLED, RUN_MODULE
from jobs.batch.resources import CODE as STAGED_CODE
from jobs.batch.resources import IMAGE, SIMULATED, JobSpec

RANK = "gems.engine.run"
DEPUTY = "jobs.launch.deputy"
CODE = code_root()
CHECKOUT = CODE / "setup.cfg"  # if missing, the code is installed, and the image needs its own
Launcher = Callable[[JobSpec, RunFolder], list[str]]


def command(job: JobSpec, folder: RunFolder) -> list[str]:
    """Return the command line that runs all ranks of a job.

    Raises:
        ConfigError: The launcher does not exist.
    """
    start = by_simulator if job.launcher == SIMULATED else LAUNCHERS[job.launcher]
    return start(job, folder)


def rank_program(job: JobSpec, folder: RunFolder, module: str = RANK, *arguments: str) -> list[str]:
    """Return the command line of one rank, in its container.

    By default, its argument is the run folder.
    """
    words = [*_module(job, folder, module), *(arguments or (str(folder.path),))]
    # for a start in milliseconds, run the file without site packages, except in a container
    if job.checks_placement:
        is_bare = job.cluster.container_image is None
        bare = ["-I", "-S"] if is_bare else []
        name = placement_check.__name__
        expected = (job.tasks, job.tasks_per_node, job.gpus_per_node)
        program = [str(Path(placement_check.__file__).resolve())] if is_bare else _words(job, name)
        program = from_snapshot(_code_zip(job, folder), name) if job.snapshot else program
        words = [*job.python, *bare, *program, str(folder.path), *map(str, expected)]
    return _in_container(job, words, folder.path)


def by_mpiexec(job: JobSpec, folder: RunFolder) -> list[str]:
    """Return the command line for ranks on this machine, each with an exit watcher."""
    watcher = [sys.executable, *RUN_MODULE, "gems.launch.exit_watcher", str(folder.path)]
    return mpiexec_argv(job.tasks, [*watcher, *rank_program(job, folder)])


def by_srun(job: JobSpec, folder: RunFolder, program: Sequence[str] | None = None) -> list[str]:
    """Return the command line for one srun step of all ranks, or of another program.

    It runs inside a SLURM allocation. Tasks per node are given because a block distribution would
    fill the first nodes. CPUs per task are given because srun has ignored sbatch's since 22.05.
    Unless the preset binds GPUs, each rank sees all GPUs of its node and chooses one by local rank:
    CUDA IPC between ranks fails if GPUs are bound to tasks. One failed rank ends the step.
    """
    cluster = job.cluster
    gpus = job.gpu_option
    return [
        "srun",
        *_shape(job, job.tasks_per_node),
        f"--cpus-per-task={job.cpus_per_task}",
        *([f"--mpi={cluster.mpi}"] if cluster.mpi else []),
        *("--kill-on-bad-exit=1", "--wait=60", "--label", "--unbuffered"),
        *([f"--{gpus[0]}={gpus[1]}"] if gpus else []),
        *([f"--gpu-bind={cluster.gpu_bind}"] if gpus and cluster.gpu_bind else []),
        *([f"--cpu-bind={cluster.cpu_bind}"] if cluster.cpu_bind else []),
        *_container_options(job, folder.path),
        *cluster.srun,
        *(program or rank_program(job, folder)),
    ]


def by_flux(job: JobSpec, folder: RunFolder, program: Sequence[str] | None = None) -> list[str]:
    """Return the command line for one job of all ranks in the Flux instance of a batch script.

    GPUs that do not divide evenly among a node's ranks are not requested again: the instance has
    them. Unless the preset binds GPUs, each rank sees all GPUs of its node, as with srun.
    """
    cluster = job.cluster
    per_rank, rest = divmod(job.gpus_per_node, job.tasks_per_node)
    asks = job.gpu_option is not None and per_rank and not rest
    affinity = "off" if not asks or cluster.gpu_bind in (None, "none") else "per-task"
    return [
        "flux",
        "run",
        f"--nodes={job.nodes}",
        f"--ntasks={job.tasks}",
        f"--cores-per-task={job.cpus_per_task}",
        *([f"--gpus-per-task={per_rank}"] if asks else []),
        *(
            "--label-io",
            "--unbuffered",
            "--setopt=exit-on-error",
            f"--setopt=gpu-affinity={affinity}",
        ),
        *cluster.flux_run,
        *(program or rank_program(job, folder)),
    ]


def by_hydra(job: JobSpec, folder: RunFolder, program: Sequence[str] | None = None) -> list[str]:
    """Return the command line of the site's mpiexec (MPICH or Intel MPI).

    It finds the job's nodes by itself.
    """
    shape = ["mpiexec", "-n", str(job.tasks), "-ppn", str(job.tasks_per_node)]
    return [*shape, *job.cluster.mpiexec, *(program or rank_program(job, folder))]


def by_pals(job: JobSpec, folder: RunFolder, program: Sequence[str] | None = None) -> list[str]:
    """Return the command line of HPE Cray's mpiexec (PALS); each rank is bound to its CPUs."""
    shape = ["mpiexec", "-n", str(job.tasks), "--ppn", str(job.tasks_per_node)]
    depth = ["--depth", str(job.cpus_per_task), "--cpu-bind", "depth"]
    return [*shape, *depth, *job.cluster.mpiexec, *(program or rank_program(job, folder))]


def by_simulator(job: JobSpec, folder: RunFolder) -> list[str]:
    """Return the command line of the single process that simulates all ranks."""
    return [*job.python, *_words(job, "gems.runs.simulated_run"), str(folder.path)]


def module_on_each_node(
    job: JobSpec, folder: RunFolder, module: str, *words: str, asks_gpus: bool = False
) -> list[str]:
    """Return the command line that runs one of our modules once on each node of a job."""
    name, gpus = (job.gpu_option if asks_gpus else None) or ("", "")
    if name == "gpus-per-task":  # a task here is a node
        name, gpus = "gpus-per-node", str(job.gpus_per_node)
    return [
        *on_each_node(job),
        *([f"--{name}={gpus}"] if name else []),
        *_container_options(job, folder.path),
        *_in_container(job, [*_module(job, folder, module), *words], folder.path),
    ]


def deputy_by_srun(job: JobSpec, folder: RunFolder, node: str, batch_node: str) -> list[str]:
    """Return the command line that runs the batch script's deputy beside the ranks of a node."""
    program = from_snapshot(folder.code_zip, DEPUTY) if job.snapshot else [*RUN_MODULE, DEPUTY]
    words = [
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--cpus-per-task=1",
        "--mpi=none",
    ]
    # share the memory: by default a step may take all of it
    words += ["--mem=0"] if job.cluster.supports_mem_option else []
    return [*words, sys.executable, *program, str(folder.path), batch_node]


def on_each_node(job: JobSpec) -> list[str]:
    """Return the command prefix that runs a program without MPI once on each node of a job."""
    return ["srun", *_shape(job, 1), "--cpus-per-task=1", "--mpi=none"]


def _module(job: JobSpec, folder: RunFolder, name: str) -> list[str]:
    """Return the command that runs one of our modules.

    In a job it uses the run's code archive, otherwise the code in place.
    """
    return [
        *job.python,
        *(from_snapshot(_code_zip(job, folder), name) if job.snapshot else _words(job, name)),
    ]


def _words(job: JobSpec, module: str) -> list[str]:
    """Return the arguments that run a module in place.

    Another interpreter must have the code installed, unless this is a checkout.
    """
    is_here = job.python == (sys.executable,) or CHECKOUT.exists()
    return [*RUN_MODULE, module] if is_here else [*INSTALLED, module]


def _code_zip(job: JobSpec, folder: RunFolder) -> Path:
    return Path(job.stage_path(STAGED_CODE)) if STAGED_CODE in job.staged else folder.code_zip


def _image(job: JobSpec) -> str | None:
    return job.stage_path(IMAGE) if IMAGE in job.staged else job.cluster.container_image


def _shape(job: JobSpec, tasks_per_node: int) -> list[str]:
    tasks = job.nodes * tasks_per_node
    nodelist = [f"--nodelist={','.join(job.nodelist)}"] if job.nodelist else []
    return [
        f"--nodes={job.nodes}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks_per_node}",
        *nodelist,
    ]


def _in_container(job: JobSpec, program: Sequence[str], folder: Path) -> list[str]:
    """Return the command that runs `program`, in the job's container if it has one."""
    return [*_container(job, folder)[1], *program]


def _container_options(job: JobSpec, folder: Path) -> list[str]:
    """Return the container options of srun itself."""
    return _container(job, folder)[0]


def _container(job: JobSpec, folder: Path) -> tuple[list[str], list[str]]:
    """Return the options of srun, and the words before a program, of the job's container.

    pyxis and uenv are srun plug-ins. A uenv sees all file systems. shifter keeps the working
    directory and mounts the site's file systems by itself.
    """
    runtime = job.cluster.container
    options = job.cluster.container_options
    image = _image(job)
    if image is None:
        return [], []
    if runtime == "uenv":
        return [f"--uenv={image}", *options], []
    if runtime == "shifter":
        return [], ["shifter", f"--image={image}", *options]
    shared = _shared(job, folder)
    home = _home(job, folder)
    if runtime == "pyxis":
        mounts = ",".join(f"{path}:{path}" for path in shared)
        words = [f"--container-image={image}", f"--container-mounts={mounts}"]
        return [*words, *(f"--container-workdir={path}" for path in home), *options], []
    start, bind, workdir = [runtime, "exec"], "--bind={0}", "--pwd={0}"
    if runtime == "podman-hpc":
        start = [runtime, "run", "--rm", "--env-host"]
        bind, workdir = "--volume={0}:{0}", "--workdir={0}"
    return [], [*start, *map(bind.format, shared), *map(workdir.format, home), *options, image]


def _home(job: JobSpec, folder: Path) -> list[Path]:
    """Return the working directory inside the container.

    A code archive is in the run folder, so no other folder is needed there.
    """
    if job.snapshot:
        return [folder]
    return [CODE] if CHECKOUT.exists() else []


def _shared(job: JobSpec, folder: Path) -> list[Path]:
    code = [CODE] if CHECKOUT.exists() and not job.snapshot else []
    paths = [*code, folder]
    for path in paths:
        if any(character in str(path) for character in ",:\\"):
            key = "runs_dir" if path == folder else "folder of the code"
            text = "must have no ',', ':' or '\\' "
            raise ConfigError(
                key, path, f"{text}to be seen in a container", "choose another runs_dir= or name="
            )
    return [*paths, *([_code_zip(job, RunFolder(folder))] if STAGED_CODE in job.staged else [])]


LAUNCHERS: Registry[Launcher] = registries.LAUNCHERS
LAUNCHERS.register("mpiexec", by_mpiexec)
LAUNCHERS.register("srun", by_srun)
# ibrun is the site's own launcher
LAUNCHERS.register("ibrun", lambda job, folder: ["ibrun", *rank_program(job, folder)])
LAUNCHERS.register("flux", by_flux)
LAUNCHERS.register("hydra", by_hydra)
LAUNCHERS.register("pals", by_pals)
