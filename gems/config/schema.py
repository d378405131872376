"""The configuration: a dataclass schema that Hydra fills, and the resolved `RunSpec` that ranks read.

A field's default is the toolkit's default; `conf/` only chooses among them. `None` means "derive
it": `gems.config.resolve` fills every such field, so a `RunSpec` holds none that the engine needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from gems.config.cluster import MAX_WORLD
from gems.config.cluster import ClusterConfig as ClusterConfig
from gems.config.cluster import MachineConfig as MachineConfig
from gems.config.fields import build, choice, counts, flag, keys, number, text, with_new_names
from gems.config.recipe import TASKS
from gems.config.recipe import BenchmarkConfig as BenchmarkConfig
from gems.config.recipe import LossConfig as LossConfig
from gems.config.recipe import LrSchedulerConfig as LrSchedulerConfig
from gems.config.recipe import OptimizerConfig as OptimizerConfig
from gems.config.registries import COSTS, METHODS, POLICIES
from gems.config.training import TrainConfig as TrainConfig
from gems.schedule import ACTIONS, FAMILIES, FROM_FILE, PLACED, PLACEMENTS
from gems.utils.units import sides_of

LAYOUTS = ("auto", "chw", "hwc")
NORMALIZATIONS = ("fixed", "imagenet", "computed", "none")
RECOMPUTES = ("stage", "segment", "selective", "strip")
RECLAIMS = ("first", "size")
OBJECTIVES = ("auto", "peak_bytes", "rank_time", "time")
PROFILES = ("fake", "measured", "incremental")
# F actions of a step: a schedule of so many is made and validated within minutes.
MAX_FORWARDS = 2**19
MAX_LAYERS = 10**5
MAX_STRIPS = 2**12
MAX_SIDE = 2**20
MAX_COUNT = 2**31 - 1
# Linux's limits, with room for what a run adds to its name and folder.
MAX_NAME_BYTES = 200
MAX_PART_BYTES = 255
MAX_PATH_BYTES = 3000
NAME = (
    f"must be a folder's name: printable, at most {MAX_NAME_BYTES} bytes, without '/', not starting"
    " with '.'"
)
FOLDER = "must be a folder, whose path is not longer than a file system allows"


def _schedules() -> Iterator[str]:
    yield from (*FAMILIES, FROM_FILE, PLACED)


def _is_name(word: str) -> bool:
    is_short = 0 < len(word.encode()) <= MAX_NAME_BYTES
    return is_short and "/" not in word and word.isprintable() and not word.startswith(".")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_orientation(word: str) -> bool:
    return len(word) == 3 and set(word) <= set("LRPAIS")


def _is_folder(path: str) -> bool:
    longest = max(len(part.encode()) for part in path.split("/"))
    return 0 < len(path.encode()) <= MAX_PATH_BYTES and longest <= MAX_PART_BYTES


@dataclass(slots=True)
class ModelConfig:
    """A network by family and size, of which a family reads what it has, or by `target`."""

    name: str = text(
        "resnet", "family of the network; of a network of your own, the name of its class"
    )
    depth: int = number(20, "layers, as the family counts them", min=1, max=MAX_LAYERS)
    version: int = number(1, "form of a ResNet; of an amoebanet, 2: it averages", min=1, max=2)
    block: str = text(
        "auto", "residual block of a ResNet: basic, bottleneck, or auto, by depth and version"
    )
    shortcut: str = text(
        "auto", "shortcut of a ResNet: identity, projection, or auto, by block and version"
    )
    width: int = number(
        16,
        "channels of the first convolution, to which the others keep their proportion; of a"
        " language model, the size of hidden states",
        min=1,
        max=MAX_SIDE,
    )
    convs: int = number(2, "convolutions of a block of a simplified U-Net", min=1, max=MAX_LAYERS)
    norm: str = text(
        "batch",
        "normalization: batch, ghost_batch (by strip), frozen_batch (by running statistics; these"
        " of any network), group, layer (over channels), none; of a ResNet of version 2"
        " normalizer_free (weights standardized)",
    )
    dropout: float = number(0.0, "share of values that the classifier drops, below 1", max=1)
    stochastic_depth: float = number(
        0.0,
        "share of samples that skip the last residual branch of a ConvNeXt, earlier ones less;"
        " below 1",
        max=1,
    )
    auxiliary: bool = flag(False, "add the auxiliary classifier of Inception v3")
    vocabulary: int = number(32000, "tokens that a language model knows", max=MAX_COUNT)
    target: str | None = text(None, "a network of your own, as package.module.Class")
    kwargs: dict[str, Any] = text({}, "keyword arguments of model.target")
    path: str | None = text(None, "folder that holds the package of model.target")


@dataclass(slots=True)
class DataConfig:
    """Where samples come from, and their shape: images, or sequences of tokens."""

    name: str = text(
        "synthetic", "source of the samples; of a dataset of your own, the name of its class"
    )
    task: str | None = choice(
        None, TASKS, "what the labels of the samples are; null: as the source gives them"
    )
    depth_px: int | None = number(
        None, "depth of a volume, its first axis; null: images", min=1, max=MAX_SIDE
    )
    height_px: int = number(32, "height of an image", min=1, max=MAX_SIDE)
    width_px: int = number(32, "width of an image", min=1, max=MAX_SIDE)
    channels: int = number(3, "channels of an image", min=1, max=MAX_SIDE)
    num_classes: int = number(
        2,
        "classes of the labels, values of a label of several (multi_label, regression), or"
        " different tokens",
        min=1,
        max=MAX_COUNT,
    )
    ignore_label: int | None = number(
        None, "value of a mask whose pixels count for nothing, as negative ones do"
    )
    length: int = number(64, "tokens of a sequence", min=1, max=MAX_SIDE)
    path: str | None = text(
        None, "folder or file of the samples, or folder that holds the package of data.target"
    )
    target: str | None = text(None, "a map-style dataset of your own, as package.module.Class")
    kwargs: dict[str, Any] = text({}, "keyword arguments of data.target")
    validation_target: str | None = text(None, "dataset of the validation split; null: data.target")
    validation_kwargs: dict[str, Any] = text(
        {}, "keyword arguments of the validation split, over data.kwargs"
    )
    split_path: str | None = text(
        None,
        "file that says which samples are for validation: CSV (index,split) or JSON (lists train,"
        " validation)",
    )
    labels_path: str | None = text(
        None,
        "CSV file (file,label, and split if wanted) in place of a folder for each class; of slides"
        " also x,y",
    )
    class_map: dict[Any, int] = number(
        {}, "number of each class by its name, or by its value in a mask"
    )
    image_column: str = text("file", "column of a table that names the image files")
    label_columns: list[str] = text([], "columns of a table that hold the labels")
    image_key: str = text(
        "images", "HDF5 dataset of the images, first axis samples; {split} stands for the split"
    )
    label_key: str = text(
        "labels", "HDF5 dataset of the labels or masks; {split} stands for the split"
    )
    layout: str = choice(
        "auto", LAYOUTS, "axes of an HDF5 image; auto: by its attribute layout or its shape"
    )
    bits: int | None = number(
        None, "bits of a value of the files; null: 8, and wider ones are refused", min=1, max=16
    )
    page: int | None = number(
        None, "page of the files that is read; null: the only one", max=MAX_COUNT
    )
    nodata: str | None = text(
        None,
        "value of pixels without data, which are 0 after normalisation and ignored in masks; null:"
        " by the tag GDAL_NODATA of a TIFF file, or the attribute _FillValue of HDF5",
        accepts=_is_number,
        form="must be a number, or nan",
    )
    normalization: str = choice(
        "fixed",
        NORMALIZATIONS,
        "mean and deviation of image files: 0.5 and 64/255 of the range, ImageNet's, those of "
        "the training split, or none (values from 0 to 1)",
    )
    mean: list[float] | None = number(
        None, "mean of each channel as a share of the range, over data.normalization"
    )
    std: list[float] | None = number(
        None, "deviation of each channel as a share of the range", above=0
    )
    transform: str | None = text(
        None,
        "random transform of training images in place of flips, as torchvision.transforms.v2.Class,"
        " albumentations.Class or a function of your own",
    )
    transform_kwargs: dict[str, Any] = text({}, "keyword arguments of data.transform")
    field_of_view_px: int | None = number(
        None, "side of the slide that a tile shows; null: the tile's, 8 to 64", min=1
    )
    level: int | None = number(
        None,
        "level of the pyramid of a slide or OME-Zarr, 0 the finest; null: 0, unless another key"
        " says it",
    )
    mpp: float | None = number(
        None, "microns per pixel at which slides are read, from a finer level", above=0
    )
    coords_path: str | None = text(
        None, "folder of files of coords by TRIDENT or CLAM, one a slide, or one file"
    )
    window: list[float] | None = number(
        None,
        "values of volumes that become 0 and 1, as [-160,240] in Hounsfield units; others are cut"
        " to these",
        min=-MAX_COUNT,
    )
    spacing_mm: list[float] | None = number(
        None,
        "distance of voxels to which volumes are resampled, the outer axis first; null: as stored",
        above=0,
    )
    orientation: str | None = text(
        "RAS",
        "directions of the columns, rows and depth of volumes, of which the nearest are taken;"
        " null: as stored",
        accepts=_is_orientation,
        form="must be three letters of LRPAIS, as in RAS",
    )
    region: list[int] | None = number(
        None,
        "part of each slide that is divided into samples, as [x,y,width,height] at level 0; null:"
        " the tissue",
    )
    tissue_share: float = number(
        0.1, "share of a region that must show tissue; 0: regions of the whole slide", max=1
    )
    train_samples: int = number(1024, "samples of an epoch", min=1, max=MAX_COUNT)
    validation_samples: int = number(256, "samples of the validation split", min=1, max=MAX_COUNT)
    augment: bool = flag(True, "flip and rotate training images at random")
    prefetch_steps: int = number(
        2, "steps whose samples are read ahead, or strips whose rows are", max=10**4
    )
    num_workers: int = number(
        0,
        "processes of a rank that read its samples; 0: a thread of the rank",
        max=10**4,
        in_run_id=False,
    )

    @property
    def sides(self) -> dict[str, int]:
        """The size of a sample along each axis, by its key: of a volume, the depth first."""
        return sides_of(self)

    @property
    def sides_px(self) -> tuple[int, ...]:
        """The size of a sample along each axis: (height, width), or (depth, height, width)."""
        return tuple(self.sides.values())

    def __post_init__(self) -> None:
        if isinstance(self.class_map, dict):  # the values of a mask are numbers in YAML
            self.class_map = {str(name): label for name, label in self.class_map.items()}
        nodata: Any = self.nodata
        if isinstance(nodata, int | float):  # as Python code gives it
            self.nodata = str(nodata)


@dataclass(slots=True)
class ParallelConfig:
    """How a step is spread over ranks: world size = partitions x replicas."""

    partitions: int = number(1, "ranks of one pipeline", min=1, max=MAX_WORLD)
    replicas: int = number(1, "data-parallel copies of the pipeline", min=1, max=MAX_WORLD)
    replications: int | None = number(
        None,
        "GEMS's eta, how often the directions take turns in a step; null: from micro_batches and"
        " parts",
        min=1,
        max=MAX_FORWARDS,
    )
    parts: int | None = number(
        None, "micro-batches of a replication; null: derived", min=1, max=MAX_FORWARDS
    )
    micro_batches: int | None = number(
        None,
        "micro-batches of a pipeline's step; null: replications x parts",
        min=1,
        max=MAX_FORWARDS,
    )
    micro_batch_size: int = number(1, "samples of a micro-batch", min=1, max=MAX_WORLD)
    strips: Any = counts(
        1,
        "strips of rows in which a micro-batch runs, one after the other; 0: as many as make the"
        " step fastest; [rows, columns]: blocks, in so many rows and columns; of volumes"
        " [depth, rows, columns], or the first of these",
        max=MAX_STRIPS,
    )
    min_strip_positions: int = number(
        256,
        "rows x columns x samples of a map that a convolution or linear layer takes at least: it"
        " waits for strips until there are so many; 1: it runs in each strip",
        min=1,
        max=2**31,
    )
    strips_until: str | None = text(
        None,
        "layer after which whole maps are computed, in the last strip, so that any layer may follow;"
        " null: all layers run in strips",
        accepts=lambda name: name.isprintable() and name.split() == [name],
        form="must be the name of a layer",
    )
    boundaries: list[int] | None = number(
        None,
        "first layer of each stage and the number of layers, rising from 0; null: by partition=",
    )
    gpus: int | None = number(
        None, "GPUs that a plan may spend and a run must use", min=1, max=MAX_WORLD, in_run_id=False
    )

    @property
    def grid(self) -> tuple[int, ...]:
        """Parts of an image along each axis from the first on: strips, or blocks along several."""
        return tuple(self.strips) if isinstance(self.strips, list) else (self.strips,)

    def full_grid(self, num_axes: int) -> tuple[int, ...]:
        """Return the parts of an image along each of its axes, 1 along those that are not cut."""
        return (*self.grid, *[1] * (num_axes - len(self.grid)))

    @property
    def num_strips(self) -> int:
        """Strips or blocks of an image; 0 if that is left open."""
        return math.prod(self.grid)

    @property
    def world_size(self) -> int:
        """Number of MPI processes: partitions x replicas."""
        return self.partitions * self.replicas

    @property
    def global_batch(self) -> int:
        """Samples of one step of a resolved run, over all micro-batches and replicas."""
        return self.replicas * (self.micro_batches or 0) * self.micro_batch_size


@dataclass(slots=True)
class ScheduleConfig:
    """The order of work."""

    name: str = choice(
        "gems_master",
        _schedules,
        "order of the work: a published one, capped (found under a cap) or file",
    )
    chunks: int = number(
        2, "stages of a rank under schedules that let it be chosen", min=1, max=MAX_LAYERS
    )
    activation_cap: float | None = number(
        None,
        "activations that a rank may hold; 1 is one micro-batch on the heaviest rank; null: any, or"
        " of capped with a memory policy what is fastest under it",
        above=0,
    )
    activation_cap_bytes: int | None = number(None, "the same in bytes", min=1)
    memory_actions: list[str] = choice(
        [], ACTIONS, "what a search may do with activations under its cap"
    )
    placements: list[str] = choice(
        [], PLACEMENTS, "placements of stages that a search tries; empty: all"
    )
    max_stages: int | None = number(None, "stages that a search may make", min=1, max=MAX_LAYERS)
    budget_s: float = number(5.0, "seconds of a search for a schedule", above=0)
    path: str | None = text(None, "file of schedule=file, from `gems schedule --json`")

    @property
    def has_cap(self) -> bool:
        """Whether the activations of a rank are capped."""
        return self.activation_cap is not None or self.activation_cap_bytes is not None

    def num_stages(self, partitions: int) -> int:
        """Return the stages of a pipeline; 0 if only its search or its file tells them."""
        family = FAMILIES.get(self.name)
        return partitions * family.stages(self.chunks) if family else 0


@dataclass(slots=True)
class ProfileConfig:
    """What the layers cost, and how that is found out."""

    name: str = choice(
        "fake",
        PROFILES,
        "where a profile comes from: fake tensors and the rates of machine=, this device, or "
        "layers added to a device one by one (mCAP)",
    )
    path: str | None = text(None, "file of `gems profile --json` to use instead")
    repetitions: int = number(5, "how often each layer is measured at least", min=1, max=10**6)
    on: str = choice(
        "real",
        ("real", "fake"),
        "where profile=incremental adds layers: a real device or fake tensors",
    )
    whole_model_peak: bool = flag(
        False, "add the peak of the unsplit model by torch's tracker, slow for deep models"
    )


@dataclass(slots=True)
class PartitionConfig:
    """Where the model is cut into stages, unless parallel.boundaries is given."""

    name: str = choice("exact", METHODS, "method of partitioning")
    objective: str = choice(
        "auto",
        OBJECTIVES,
        "what the exact method minimizes: peak_bytes or compute (rank_time) of the worst rank, or"
        " the simulated step (time); times among the partitions that fit machine.device_bytes;"
        " auto: time for a run, peak_bytes for `gems partition`",
    )
    budget_s: float = number(30.0, "seconds of the exact method's search", above=0)


@dataclass(slots=True)
class MemoryConfig:
    """What becomes of activations between forward and backward."""

    name: str = choice("keep", POLICIES, "what becomes of activations between forward and backward")
    asynchronous: bool = flag(False, "let vDNN's copies go on past the end of their layer")
    swapout_threshold: int | None = number(
        None,
        "lms: distance in levels of the graph from which tensors are swapped; null: tuned",
        min=1,
    )
    swapin_ahead: int | None = number(
        None, "lms: levels ahead of its use at which a tensor comes back; null: tuned", min=1
    )
    swapin_groupby: int | None = number(
        None, "lms: levels whose tensors come back together; null: tuned"
    )
    sync_mode: int | None = number(
        None, "lms: copies that compute waits for: 0 none, 1 out, 2 in, 3 both", max=3
    )
    ratio: float | None = number(
        None,
        "lms: share of the memory left by parameters that it may use; null: 0.9, with replicas 0.8",
        above=0,
        max=1,
    )
    reclaim: str = choice(
        "first", RECLAIMS, "lms_limit: swap the first tensor that is large enough, or the best fit"
    )
    recompute: str = choice(
        "segment",
        RECOMPUTES,
        "what memory=recompute computes again: whole stages, segments of them, selected layers, or"
        " (parallel.strips) strips of stages",
    )
    segments: int | None = number(
        None,
        "segments of a stage under memory=recompute; null: the root of its layers",
        min=1,
        max=MAX_LAYERS,
    )
    offload_inputs: bool = flag(
        False,
        "let the inputs of segments that memory=recompute computes again leave for host memory"
        " until then",
    )
    except_last: bool = flag(False, "let memory=recompute keep what the last micro-batch saves")
    target_reduction: float | None = number(
        None, "share by which memory=plan must lower the peak of activations", above=0, max=1
    )
    limit_bytes: int | None = number(
        None, "bytes that a rank may use; null: machine.device_bytes", min=1
    )
    min_offload_bytes: int = number(65536, "smaller storages are never offloaded")
    budget_s: float = number(
        10.0, "seconds of the search of memory=plan; above 10 its bound is refined too", above=0
    )

    @property
    def keeps(self) -> bool:
        """Whether activations stay where they are, so that only the partition makes room."""
        return self.name == "keep"

    @property
    def policy(self) -> Any:
        """The `MemoryPolicy` of the name."""
        return POLICIES[self.name]

    @property
    def choice(self) -> str:
        """The override that chooses the policy, for messages."""
        return f"memory={self.name}"


@dataclass(slots=True)
class CostConfig:
    """Costs of one micro-batch on one of P equal parts of the model, in units of time, activations and bytes."""

    name: str = choice(
        "uniform", COSTS, "where costs come from: the keys below, or the model's profile"
    )
    forward: float = number(1.0, "time of a forward", above=0)
    input_grad: float = number(1.0, "time of a backward for the input's gradient", above=0)
    weight_grad: float = number(1.0, "time of a backward for the weights' gradient")
    link: float = number(0.0, "time of a message between neighbouring ranks")
    recompute: float | None = number(None, "time of a recompute; null: that of a forward")
    offload: float = number(0.0, "time of a copy of one rank's activations to or from the host")
    input_load: float = number(
        0.0, "time in which a direction's first rank reads a micro-batch, emulated or simulated"
    )
    times: list[float] = number(
        [1.0], "relative time of equal parts of the depth", above=0, needs_entries=True
    )
    activations: list[float] = number(
        [1.0], "relative activations of equal depth parts", above=0, needs_entries=True
    )
    stages: dict[str, Any] = text(
        {},
        "what each stage costs, over the keys above: a list for each of forward, input_grad,"
        " weight_grad and activation, and of recompute, copy, split, movable, held_for_weights,"
        " boundary, boundary_bytes and param_bytes if known",
    )
    unit_s: float = number(1.0, "seconds of a unit of time", above=0)
    activation_bytes: int = number(0, "bytes of a unit of activations")
    boundary_bytes: int = number(0, "bytes of a message between stages")
    param_bytes: int = number(0, "bytes of a rank's parameters")

    @property
    def from_layers(self) -> bool:
        """Whether the times of steps are those of the model's layers, and not the keys above."""
        return COSTS[self.name].times is not None


@dataclass(slots=True)
class StudyConfig:
    """A study: runs that differ in some keys.

    It is no part of a `RunSpec`: each point is a run by itself.
    A point's overrides are `base`, then one choice of every axis, then one entry of `points`: all
    products of these. A choice is a value of the key that names the axis, or a list of overrides.
    Each of `repetitions` has its own seed.
    """

    base: list[str] = field(default_factory=list)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    points: list[list[str]] = field(default_factory=list)
    repetitions: int = 1


@dataclass(slots=True)
class RunSpec:
    """One run, whole.

    Built by `gems.config.resolve.resolve`, written to run.yaml, read by every rank.
    """

    name: str = text("run", "name of the run, and of its folder", accepts=_is_name, form=NAME)
    seed: int = number(0, "seed of all that is drawn at random")
    runs_dir: str = text(
        "runs", "folder of run folders", accepts=_is_folder, form=FOLDER, in_run_id=False
    )
    cache_dir: str | None = text(
        None,
        "folder of profiles, partitions and plans; null: $GEMS_CACHE_DIR or ~/.cache/gems",
        accepts=_is_folder,
        form=FOLDER,
        in_run_id=False,
    )
    plugins: list[str] = text([], "your modules that register schedules, policies, data and so on")
    plugins_dir: str | None = text(
        None, "folder of plugins that are not installed; null: current", in_run_id=False
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    metrics: dict[str, Any] = text(
        {},
        "metrics of validation beside those of the task, by name (auc, balanced_accuracy,"
        " confusion_matrix, r2) or by metrics.NAME.target with kwargs and path",
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def world_size(self) -> int:
        """Number of MPI processes: partitions x replicas."""
        return self.parallel.world_size

    @property
    def layout(self) -> str:
        """The ranks and nodes of a resolved run, in words."""
        nodes = self.cluster.nodes or 1
        ranks = f"{self.parallel.partitions} x {self.parallel.replicas} ranks"
        return f"{ranks} on {nodes} node{'s' if nodes > 1 else ''}"

    def changed_values(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults, with their values."""
        values = ((key, attrgetter(key.name)(self)) for key in keys(RunSpec))
        return {key.name: value for key, value in values if value != key.default}

    def own_code(self) -> Iterator[tuple[str, str]]:
        """Yield each target and plugin whose code is in a user's folder, with the folder."""
        sections = (self.model, self.data, self.loss, self.optimizer, self.lr_scheduler)
        places = [(section.target, section.path) for section in sections]
        places += [(f"{name}.plugin", self.plugins_dir) for name in self.plugins]
        for target, path in places:
            if target is not None and path is not None:
                yield str(target), str(path)

    def to_dict(self) -> dict[str, Any]:
        """Return the nested plain dictionary that run.yaml holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunSpec:
        """Return the run of a dictionary of `to_dict`, also of one with old names of keys.

        Raises:
            ConfigError: a key that the schema does not know, a section that is no mapping, or a
            value of another type.
        """
        return build(cls, with_new_names(values) if isinstance(values, dict) else values)
