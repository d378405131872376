"""The machine of a rank, and the cluster preset: how a site starts ranks, and its limits.

Presets are data in `conf/cluster/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gems.config.fields import choice, flag, number, text
from gems.config.registries import LAUNCHERS, SCHEDULERS
from gems.utils.gpus import may_have_gpu

DEVICES = ("auto", "cpu", "cuda")
ORDERED_TRANSPORTS = NCCL, GLOO = "nccl", "gloo"  # which match messages by their order
TRANSPORTS = ("auto", "mpi", "host", *ORDERED_TRANSPORTS)
MACHINES = ("real", "emulated", "simulated", "probe")
MAX_WORLD = 2**20
GPU_REQUESTS = ("gpus-per-node", "gpus-per-task", "gres", "none")
CONTAINERS = ("none", "apptainer", "singularity", "pyxis", "shifter", "podman-hpc", "uenv")
STAGED = ("code", "image")
CHARGED = ("gpu-hour", "node-hour")
MAX_NODES = 2**20
MAX_PER_NODE = 2**16
MAX_MINUTES = 10**6
MAX_SIGNAL_S = 65535  # of sbatch's --signal
MAX_REQUEUES = 1000
GPU_BIND = re.compile(
    r"((verbose|quiet),)*(none|closest|(single|per_task):\d+|map_gpu:\d+(\*\d+)?(,\d+(\*\d+)?)*|"
    r"mask_gpu:(0x)?[0-9a-fA-F]+(,(0x)?[0-9a-fA-F]+)*)"
)
MAP = (
    r"(?:map_(?:cpu|ldom):(?P<map>\d+(?:,\d+)*)|"
    r"mask_(?:cpu|ldom):(?P<mask>(?:0x)?[0-9a-fA-F]+(?:,(?:0x)?[0-9a-fA-F]+)*))"
)
CPU_BIND = re.compile(
    rf"(?:(?:verbose|quiet),)*(?:none|cores|threads|sockets|ldoms|rank|rank_ldom|{MAP})"
)
CPU_BINDS = (
    "none, cores, threads, sockets, ldoms, rank, rank_ldom, map_cpu:LIST, mask_cpu:LIST,"
    " map_ldom:LIST, mask_ldom:LIST"
)
MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+=@-]*")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}(\[[0-9]+([,-][0-9]+)*\])?")
HOST = re.compile(r"[A-Za-z0-9.*?\[\]!_-]+")
LOCAL_DIR = re.compile(r"/[A-Za-z0-9._/-]*")
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
NOTIFY = re.compile(r"mail(:[^\s@,]+@[^\s@,]+)?|https?://[^\s/]+\S*|command:\s*\S.*")
LINE = "must be printable text on one line"


def _is_word(word: str) -> bool:
    return bool(word) and word.isprintable()


def _word(help: str, in_run_id: bool = True) -> str | None:
    return text(None, help, accepts=_is_word, form=f"{LINE}, or null", in_run_id=in_run_id)


def _lines(help: str, in_run_id: bool = True) -> list[str]:
    return text([], help, accepts=str.isprintable, form=LINE, in_run_id=in_run_id)


@dataclass(slots=True)
class QueueLimit:
    """What a site allows to jobs of some size.

    A row without a partition or QOS counts for jobs of any.
    """

    partition: str | None = text(None, "partition of the jobs; null: any")
    qos: str | None = text(None, "QOS of the jobs; null: any")
    min_nodes: int = number(1, "nodes of the smallest jobs", min=1)
    max_nodes: int | None = number(None, "nodes of the largest jobs; null: no limit", min=1)
    minutes: int | None = number(None, "longest time limit", min=1)
    node_hours: float | None = number(None, "most nodes times hours", above=0)
    queued_jobs: int | None = number(None, "jobs that a user may have queued", min=1)

    @property
    def is_of_size(self) -> bool:
        """Whether the row says which jobs may run, and not only how many may be queued."""
        return (self.min_nodes, self.max_nodes, self.minutes, self.node_hours) != (
            1,
            None,
            None,
            None,
        )


@dataclass(slots=True)
class ClusterConfig:
    """How ranks are started: on this machine by mpiexec, or by SLURM with the site's habits."""

    name: str = text("local", "name of the preset")
    scheduler: str = choice("slurm", SCHEDULERS, "batch system of the jobs", in_run_id=False)
    launcher: str = choice("mpiexec", LAUNCHERS, "program that starts the ranks")
    hosts: list[str] = text(
        [],
        "patterns of the names of login nodes, by which cluster=auto finds the preset",
        accepts=HOST.fullmatch,
        form="must be patterns of host names, as in [login*.site.org]",
        in_run_id=False,
    )
    nodes: int | None = number(
        None, "nodes of a job; null: as few as hold its ranks", min=1, max=MAX_NODES
    )
    ranks_per_node: int | None = number(
        None, "ranks of a node; null: one for each GPU", min=1, max=MAX_NODES
    )
    cpus_per_rank: int = number(
        1, "CPUs of a rank, as the site's SLURM counts them", min=1, max=MAX_PER_NODE
    )
    gpus_per_node: int = number(0, "GPUs of a node", max=MAX_PER_NODE)
    usable_cpus_per_node: int | None = number(
        None,
        "CPUs of a node that jobs may use, as the site's SLURM counts them",
        min=1,
        max=MAX_NODES,
    )
    node_memory_bytes: int | None = number(None, "host memory of a node", min=1)
    minutes: int = number(60, "time limit of a job", min=1, max=MAX_MINUTES, in_run_id=False)
    partition: str | None = _word("partition of a job")
    account: str | None = _word("account that a job is charged to", in_run_id=False)
    account_required: bool = flag(
        False, "whether the site takes no job without an account", in_run_id=False
    )
    account_suffix: str | None = _word("suffix that the site wants at the end of an account")
    mpi: str | None = _word("srun's --mpi")
    python: str | None = text(
        None,
        "interpreter of the ranks, in the container if there is one; null: this one",
        accepts=str.isprintable,
        form=LINE,
    )
    gpu_request: str = choice(
        "gpus-per-node", GPU_REQUESTS, "option that asks for GPUs; none: they come with the queue"
    )
    gpu_bind: str | None = text(
        "none",
        "srun's --gpu-bind",
        accepts=GPU_BIND.fullmatch,
        form="allowed: none, closest, single:N, per_task:N, map_gpu:LIST, mask_gpu:LIST",
    )
    cpu_bind: str | None = text(
        None, "srun's --cpu-bind", accepts=CPU_BIND.fullmatch, form=f"allowed: {CPU_BINDS}"
    )
    device_order: list[int] = number(
        [], "GPU of each local rank, among those visible; empty: in order"
    )
    supports_mem_option: bool = flag(True, "whether the site takes --mem")
    modules: list[str] = text(
        [],
        "environment modules to load",
        accepts=MODULE.fullmatch,
        form="must be names of modules, as in [gcc/13.2,openmpi]",
    )
    setup: list[str] = text([], "shell lines to run before the ranks")
    environment: dict[str, str] = text({}, "environment variables of the ranks")
    sbatch: dict[str, Any] = text({}, "more options of sbatch")
    srun: list[str] = _lines("more options of srun")
    flux_batch: dict[str, Any] = text({}, "more options of flux batch", in_run_id=False)
    flux_run: list[str] = _lines("more options of flux run", in_run_id=False)
    qsub: dict[str, Any] = text(
        {}, "more options of qsub by letter, and resources of -l by name", in_run_id=False
    )
    mpiexec: list[str] = _lines(
        "more options of the site's mpiexec (launcher hydra or pals)", in_run_id=False
    )
    container: str = choice(
        "none", CONTAINERS, "the site's container runtime, used with cluster.container_image"
    )
    container_image: str | None = text(
        None,
        "image that ranks run in",
        accepts=lambda word: word.isprintable() and not word.startswith("-"),
        form="must be an image's path or name on one line",
    )
    container_options: list[str] = _lines("the site's options of the container runtime")
    limits: list[QueueLimit] = text(
        [],
        "limits of the site's queues, as [{partition: a, minutes: 60}]; the first that fits a job"
        " counts",
        in_run_id=False,
    )
    charge_per: str | None = choice(None, CHARGED, "what is charged", in_run_id=False)
    charge_rate: float | None = number(None, "price of one cluster.charge_per", in_run_id=False)
    charge_unit: str | None = text(None, "unit of the price", in_run_id=False)
    archive_code: bool = flag(
        True, "run a job from the code as it was at submission", in_run_id=False
    )
    stage: list[str] = text(
        ["code"],
        "what jobs of many nodes copy to each node's own disk: code, image (the container's, if a"
        " file)",
        accepts=STAGED.__contains__,
        form=f"may have {' and '.join(STAGED)}",
        in_run_id=False,
    )
    stage_dir: str = text(
        "/tmp",
        "folder of each node for these copies",
        accepts=LOCAL_DIR.fullmatch,
        form="must be an absolute path of letters, digits and ._-/",
        in_run_id=False,
    )
    stage_above_nodes: int = number(
        64, "nodes up to which a job copies nothing", max=MAX_NODES, in_run_id=False
    )
    exclude: list[str] = text(
        [],
        "nodes not to use",
        accepts=NODE.fullmatch,
        form="must be names of nodes, as in [n001,'n[003-005]']",
        in_run_id=False,
    )
    array: bool = flag(
        True, "submit points of a study with equal jobs as one job array", in_run_id=False
    )
    max_parallel: int | None = number(
        None, "tasks of a job array that may run at once; null: all", min=1, in_run_id=False
    )
    runs_per_job: int = number(
        1, "one-node points of a study that share a job, in turn", min=1, in_run_id=False
    )
    confirm_above_gpu_hours: float | None = number(
        None, "GPU-hours above which to ask; null: never", in_run_id=False
    )
    signal_before_end_s: int = number(
        120,
        "seconds before the time limit at which a run is asked to save and stop; 0: never",
        max=MAX_SIGNAL_S,
        in_run_id=False,
    )
    notify: list[str] = text(
        [],
        "whom to tell that a run has ended, stalled or was requeued: mail or mail:ADDRESS (by the"
        " batch system), a web address that gets a POST of JSON, command:WORDS that get it on"
        " stdin",
        accepts=lambda word: word.isprintable() and NOTIFY.fullmatch(word),
        form="must be mail, mail:ADDRESS, http(s)://ADDRESS or command:WORDS",
        in_run_id=False,
    )
    max_requeues: int = number(
        3, "how often a stopped run is requeued by itself", max=MAX_REQUEUES, in_run_id=False
    )
    elastic: list[int] = number(
        [],
        "smaller numbers of nodes, falling, on which the run goes on by itself if nodes are lost or"
        " the queue is long; empty: only on its own",
        min=1,
        max=MAX_NODES,
        in_run_id=False,
    )
    elastic_wait_h: float | None = number(
        None,
        "hours until a job's estimated start above which a submission takes fewer nodes of"
        " cluster.elastic; null: it waits",
        in_run_id=False,
    )
    spare_nodes: int = number(
        0,
        "nodes that a job has beside those of the ranks, to take the place of bad ones",
        max=MAX_NODES,
        in_run_id=False,
    )
    check_nodes: bool | None = flag(
        None,
        "check each node of a job before its ranks start; null: with cluster.elastic or"
        " cluster.spare_nodes",
        in_run_id=False,
    )

    @property
    def outlives_nodes(self) -> bool:
        """Whether a job goes on when it loses a node."""
        return bool(self.elastic or self.spare_nodes)

    @property
    def checks_nodes(self) -> bool:
        """Whether nodes are checked before ranks start."""
        return self.outlives_nodes if self.check_nodes is None else self.check_nodes

    def smaller_nodes(self, nodes: int) -> list[int]:
        """Return the numbers of nodes that the run may go on with if it has fewer than `nodes`, the largest first."""
        return [number for number in self.elastic if number < nodes]

    @property
    def max_ranks_per_node(self) -> int:
        """How many ranks a node can hold, by its GPUs or else its CPUs.

        Those of the run if neither is known.
        """
        run_ranks = self.ranks_per_node or 1
        if self.gpus_per_node:
            return max(run_ranks, self.gpus_per_node)
        return (
            run_ranks
            if self.usable_cpus_per_node is None
            else max(run_ranks, self.usable_cpus_per_node // self.cpus_per_rank)
        )

    @property
    def mail_to(self) -> str | None:
        """The address that the batch system sends mail to.

        Empty for the user's own, None for no mail.
        """
        return next(
            (word.partition(":")[2] for word in self.notify if word.partition(":")[0] == "mail"),
            None,
        )

    @property
    def full_account(self) -> str | None:
        """The account with the site's suffix."""
        suffix = self.account_suffix or ""
        if self.account is None or self.account.endswith(suffix):
            return self.account
        return f"{self.account}{suffix}"


def num_bound(cpu_bind: str | None) -> int | None:
    """Return how many CPUs or masks a binding lists, or None for a word that lists none."""
    match = CPU_BIND.fullmatch(cpu_bind or "")
    places = match and (match["map"] or match["mask"])
    return len(places.split(",")) if places else None


@dataclass(slots=True)
class MachineConfig:
    """The device of a rank, its memory, and the links to other ranks.

    The defaults are one core of a server's processor.
    """

    name: str = text("auto", "name of the machine in reports")
    kind: str = choice(
        "real",
        MACHINES,
        "real; emulated: compute is a timed wait, messages are real; simulated: nothing runs; "
        "probe: each rank checks its place and ends",
    )
    device: str = choice("auto", DEVICES, "device of a rank; auto: its GPU if there is one")
    threads_per_rank: int = number(
        1, "threads of a rank's compute on a processor", min=1, max=2**12
    )
    deterministic: bool = flag(
        False, "let a GPU compute the same bits in each run; what has no such kernel fails"
    )
    cudnn_benchmark: bool = flag(
        False, "let cuDNN time its kernels for each shape once, and take the fastest"
    )
    tf32: bool | None = flag(
        None, "round float32 convolutions and products to TF32; null: as torch, convolutions only"
    )
    channels_last: bool = flag(
        False, "keep images, maps and weights in torch.channels_last, between ranks too"
    )
    transport: str = choice(
        "auto", TRANSPORTS, "what carries messages; auto: MPI, from a GPU's memory if it can"
    )
    link_latency_s: float = number(
        0.0, "latency of a message; with machine.ranks_per_node, of one between nodes"
    )
    link_bytes_per_s: float | None = number(
        None,
        "rate of a link; with machine.ranks_per_node, of one between nodes; null: no time per byte",
        above=0,
    )
    ranks_per_node: int | None = number(
        None, "ranks of a node, which have links of their own", min=1, max=MAX_WORLD
    )
    node_latency_s: float = number(0.0, "latency of a message inside a node")
    node_bytes_per_s: float | None = number(
        None, "rate of a link inside a node; null: no time per byte", above=0
    )
    contention: bool = flag(
        False, "let a rank's messages pass one at a time each way, and a node's through one link"
    )
    slow_rank: int | None = number(
        None, "world rank that is a straggler, emulated or simulated", max=MAX_WORLD
    )
    slowdown: float = number(1.0, "how many times longer machine.slow_rank computes", min=1)
    device_bytes: int | None = number(None, "memory of a device", min=1)
    library_bytes: int | None = number(
        None,
        "what cuBLAS and cuDNN hold of a device for each rank; null: as profile=measured found on a"
        " GPU, else 0",
        in_run_id=False,
    )
    host_bytes: int | None = number(
        None, "host memory of a node for the activations of its ranks together", min=1
    )
    d2h_bytes_per_s: float = number(5e9, "rate of pinned copies out of a device", above=0)
    h2d_bytes_per_s: float = number(5e9, "rate of pinned copies to a device", above=0)
    flops_per_s: float = number(
        6e10, "rate in float32, as torch's convolutions compute it", above=0
    )
    bfloat16_flops_per_s: float | None = number(
        None, "rate in bfloat16; null: the device has none", above=0
    )
    float64_flops_per_s: float | None = number(
        None, "rate in float64; null: half that of float32", above=0
    )
    memory_bytes_per_s: float = number(1e10, "rate of the device's memory", above=0)
    efficiency: float = number(
        1.0, "share of the rates that kernels reach, for times of profile=fake", above=0
    )
    launch_s: float | None = number(
        None,
        "host time to launch an operator without CUDA graphs, for times of profile=fake; null:"
        " times by rates alone",
        in_run_id=False,
    )
    bfloat16_launch_s: float | None = number(
        None, "machine.launch_s in 16 bits; null: as float32", in_run_id=False
    )
    operator_s: float = number(
        0.0, "least time of an operator on the device, with machine.launch_s", in_run_id=False
    )
    operator_efficiency: float | None = number(
        None, "machine.efficiency with machine.launch_s; null: the same", above=0, in_run_id=False
    )
    memory_efficiency: float | None = number(
        None,
        "share of the memory's rate that operators reach, with machine.launch_s; null:"
        " machine.operator_efficiency",
        above=0,
        in_run_id=False,
    )
    multiprocessors: int | None = number(
        None,
        "multiprocessors of the device, with machine.launch_s: kernels of few blocks do not fill"
        " them, so small micro-batches compute at a lower rate; null: at any size at the same rate",
        min=1,
        in_run_id=False,
    )
    winograd: bool = flag(
        False,
        "3x3 convolutions of stride 1 in float32 take Winograd's algorithm, with"
        " machine.multiprocessors",
        in_run_id=False,
    )
    half_rate_channels: float = number(
        0.0,
        "channels with which convolutions and batch norms reach half of the memory's rate, with"
        " machine.launch_s",
        in_run_id=False,
    )
    bfloat16_half_rate_channels: float | None = number(
        None, "machine.half_rate_channels in 16 bits; null: as float32", in_run_id=False
    )
    launches_from: str | None = text(
        None, "what machine.launch_s and the keys after it were measured on", in_run_id=False
    )
    noise: float = number(
        0.0,
        "relative standard deviation of a compute's time, drawn by seed in predictions",
        max=0.5,
    )
    pace_factor: float | None = number(
        None,
        "how many times longer layers take in a run than alone (profile=measured); null: as"
        " calibrated here",
        above=0,
        in_run_id=False,
    )
    pace_pass_s: float = number(
        0.0, "host time of each layer's pass beside, with machine.pace_factor", in_run_id=False
    )
    calibrated_from: str | None = text(None, "what the figures were measured on")
    held_out_error: float | None = number(
        None, "median error of step times predicted for runs not used to calibrate"
    )

    @property
    def has_gpu(self) -> bool:
        """Whether the device of a rank is a GPU; for auto, whether this node has one."""
        return self.device == "cuda" or (self.device == "auto" and may_have_gpu())

    def launch_costs(self, is_low: bool) -> tuple[float | None, float]:
        """Return `launch_s` and `half_rate_channels`, of 16 bits if `is_low`."""
        launch_s = self.launch_s
        channels = self.half_rate_channels
        if is_low and self.bfloat16_launch_s is not None:
            launch_s = self.bfloat16_launch_s
        if is_low and self.bfloat16_half_rate_channels is not None:
            channels = self.bfloat16_half_rate_channels
        return launch_s, channels

    @property
    def is_real(self) -> bool:
        """Whether ranks compute the model's layers."""
        return self.kind == "real"

    @property
    def is_emulated(self) -> bool:
        """Whether compute is a timed wait, and messages are real."""
        return self.kind == "emulated"

    @property
    def is_probe(self) -> bool:
        """Whether ranks only check their places."""
        return self.kind == "probe"

    @property
    def has_ranks(self) -> bool:
        """Whether processes run, and the run is not simulated."""
        return self.kind != "simulated"

    @property
    def takes_steps(self) -> bool:
        """Whether ranks take steps, real or emulated, and speak MPI."""
        return self.is_real or self.is_emulated
