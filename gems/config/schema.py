"""The configuration: a dataclass schema that Hydra fills, and the resolved `RunSpec` that ranks read.

A field's default is the toolkit's default; `conf/` only chooses among them. `None` means "derive it":
`gems.config.resolve` fills every such field, so a `RunSpec` holds none that the engine needs.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from gems.config.cluster import ClusterConfig as ClusterConfig
from gems.config.machine import MachineConfig as MachineConfig
from gems.config.renamed_keys import with_new_names
from gems.config.value_types import check_types
from gems.errors import ConfigError, nearest, one_of


@dataclass(slots=True)
class ModelConfig:
    """A network by family and size; a family reads of these what it has. Or a user's own by `target`.

    `width` is the channels of the first convolution, to which the others keep their proportion. `dropout` is the rate
    in the classifier, `auxiliary` adds the auxiliary classifier of Inception v3. Of a model of language `width` is the
    size of what its layers hand on, and `vocabulary` the number of tokens that it tells apart.

    `target` is "package.module.Class", `kwargs` its keyword arguments, `path` the folder that holds the package; the
    name of such a network is that of its class.
    """

    name: str = "resnet"
    depth: int = 20
    version: int = 1
    block: str = "auto"
    shortcut: str = "auto"
    width: int = 16
    norm: str = "batch"
    dropout: float = 0.0
    auxiliary: bool = False
    vocabulary: int = 32000
    target: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    path: str | None = None


@dataclass(slots=True)
class DataConfig:
    """Where samples come from and their shape.

    Samples are images, or sequences of `length` tokens, of which `num_classes` different ones occur.
    """

    name: str = "synthetic"
    height_px: int = 32
    width_px: int = 32
    channels: int = 3
    num_classes: int = 2
    length: int = 64
    path: str | None = None
    field_of_view_px: int | None = None
    train_samples: int = 1024
    validation_samples: int = 256
    augment: bool = True
    prefetch_steps: int = 2


@dataclass(slots=True)
class ParallelConfig:
    """How a step is spread over ranks: world size = partitions x replicas, and `gpus` where that is given.

    `gpus` is what a plan may spend; a run is held to it.
    """

    partitions: int = 1
    replicas: int = 1
    replications: int | None = None
    parts: int | None = None
    micro_batches: int | None = None
    micro_batch_size: int = 1
    boundaries: list[int] | None = None
    gpus: int | None = None


@dataclass(slots=True)
class ScheduleConfig:
    """The order of work, by its published name, or found under a cap (`capped`), or read from a file (`file`)."""

    name: str = "gems_master"
    chunks: int = 2
    activation_cap: float | None = None
    activation_cap_bytes: int | None = None
    memory_actions: list[str] = field(default_factory=list)
    placements: list[str] = field(default_factory=list)
    max_stages: int | None = None
    budget_s: float = 5.0
    path: str | None = None


@dataclass(slots=True)
class ProfileConfig:
    """What the layers cost: how it is found out (fake, measured, incremental), or the file that has it.

    `fake` needs no device: bytes from fake tensors, times from the rates of `machine`. `measured` runs each layer
    `repetitions` times or more on this device. `incremental` adds layers to a device one by one, as mCAP does, on the real
    device or on fake tensors (`on`). With `path`, a file of `gems profile --json`, nothing is found out. `whole_model_peak` adds to
    a fake profile the peak of the unsplit model by torch's own tracker, which takes long for deep ones.
    """

    name: str = "fake"
    path: str | None = None
    repetitions: int = 5
    on: str = "real"
    whole_model_peak: bool = False


@dataclass(slots=True)
class PartitionConfig:
    """Where the model is cut, by the name of a method, unless parallel.boundaries says it.

    `objective` is what the exact method makes least of, on the rank that has most: peak_bytes, or time (where
    machine.device_bytes is given, among the cuts that fit). `auto` is time for a run, which wants the fastest cut that
    fits, and peak_bytes for `gems partition`, which shows how small a device may be.
    """

    name: str = "exact"
    objective: str = "auto"
    budget_s: float = 30.0


@dataclass(slots=True)
class MemoryConfig:
    """What becomes of activations between forward and backward, by the name of a policy.

    `keep` leaves them on the device. `vdnn_all`, `vdnn_conv` and `vdnn_dyn` offload the layers' inputs as vDNN does,
    with its wait at the end of each layer unless `asynchronous`. `lms` swaps by distance in the graph, with the four
    parameters of TFLMSv2, each found by its tuner where it is None; `lms_limit` swaps the least recently used under
    `limit_bytes`, choosing the first that is large enough or the one that fits best (`reclaim`: first, size).
    `recompute` runs forward again: of the whole stage, of each of `segments` segments (None: as many as the root of the
    layers), or of what is `cheap` in each layer. `plan` chooses for each layer, so that the peak is at most
    `limit_bytes`, or the activations' peak is less by the share `target_reduction`, and the predicted time is least.

    `limit_bytes` is machine.device_bytes unless given; `ratio` the share of what parameters leave of it that `lms` may
    use (None: 0.9, and 0.8 with replicas). Storages below `min_offload_bytes` stay on the device. `budget_s` bounds the plan's
    search; above 10 s the bound is followed further too.
    """

    name: str = "keep"
    asynchronous: bool = False
    swapout_threshold: int | None = None
    swapin_ahead: int | None = None
    swapin_groupby: int | None = None
    sync_mode: int | None = None
    ratio: float | None = None
    reclaim: str = "first"
    recompute: str = "segment"
    segments: int | None = None
    target_reduction: float | None = None
    limit_bytes: int | None = None
    min_offload_bytes: int = 65536
    budget_s: float = 10.0


@dataclass(slots=True)
class CostConfig:
    """Costs of one micro-batch on one of P equal parts of the model, in units of time, activations and bytes.

    `unit_s` says how long a unit of time is, `activation_bytes` how large a unit of activations. `input_load` is the time in
    which a rank where a direction begins reads the input of a micro-batch, one after the other, on an emulated or
    simulated machine.
    """

    name: str = "uniform"
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    link: float = 0.0
    recompute: float | None = None
    offload: float = 0.0
    input_load: float = 0.0
    times: list[float] = field(default_factory=lambda: [1.0])
    activations: list[float] = field(default_factory=lambda: [1.0])
    unit_s: float = 1.0
    activation_bytes: int = 0
    boundary_bytes: int = 0
    param_bytes: int = 0


RESUME_AUTO, RESUME_NEVER = "auto", "never"


@dataclass(slots=True)
class TrainConfig:
    """The training loop.

    A checkpoint of the whole state is taken every `checkpoint_steps` steps, every `checkpoint_s` seconds, or with neither
    only when the run is asked to stop; the last `keep_checkpoints` stay. `resume` says where a run begins: `auto` at the
    newest whole checkpoint of its folder, `never` at the first step, or else at the newest of another run's folder.
    """

    steps: int = 100
    warmup_steps: int = 2
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    dtype: str = "float32"
    evaluate: bool = True
    hang_timeout_s: float = 600.0
    sample_interval_s: float = 0.5
    initial_checkpoint: str | None = None
    checkpoint_steps: int | None = None
    checkpoint_s: float | None = None
    keep_checkpoints: int = 2
    resume: str = RESUME_AUTO


@dataclass(slots=True)
class StudyConfig:
    """A study: runs that differ in some keys. It is no part of a `RunSpec`: each point is a run by itself.

    A point's overrides are `base`, then one choice of every axis, then one entry of `points`: all products of these.
    A choice is a value of the key that names the axis, or a list of overrides. Each of `repetitions` has its own seed.
    """

    base: list[str] = field(default_factory=list)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    points: list[list[str]] = field(default_factory=list)
    repetitions: int = 1


@dataclass(slots=True)
class RunSpec:
    """One run, whole. Built by `gems.config.resolve.resolve`, written to run.yaml, read by every rank."""

    name: str = "run"
    seed: int = 0
    runs_dir: str = "runs"
    cache_dir: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def world_size(self) -> int:
        """Number of MPI processes: partitions x replicas."""
        return self.parallel.partitions * self.parallel.replicas

    def to_dict(self) -> dict[str, Any]:
        """Return the nested plain dictionary that run.yaml holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunSpec:
        """Read what `to_dict` gave.

        Raises:
            ConfigError: a key that the schema does not know, a section that is no mapping, or a value of another type.
        """
        sections = {f.name: f.default_factory for f in fields(cls) if f.default_factory is not MISSING}
        known = [f.name for f in fields(cls)]
        built: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise ConfigError(key, value, one_of(nearest(str(key), known)))
            if key not in sections:
                built[key] = value
                continue
            if not isinstance(value, dict):
                raise ConfigError(key, value, "must be a mapping of keys to values")
            section: Any = sections[key]
            value = with_new_names(key, value)
            for inner in value:
                if inner not in section.__dataclass_fields__:
                    raise ConfigError(
                        f"{key}.{inner}", value[inner], one_of(nearest(str(inner), section.__dataclass_fields__))
                    )
            check_types(section, value, f"{key}.")
            built[key] = section(**value)
        check_types(cls, {key: value for key, value in built.items() if key not in sections})
        return cls(**built)
