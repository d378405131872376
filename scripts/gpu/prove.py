"""Part 1, prove: tests of the engine, gradients, ranks that share a GPU, races, idle time."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.bench.rig import call_argv, square
from scripts.gpu import cases
from scripts.gpu.row import Figures, Row, answer, pytest_counts

TITLE = "Prove"
MACHINE = "machine"
ENGINE = (
    "activation_store",
    "batch_loader",
    "checkpoint",
    "checkpoint_files",
    "checkpoint_saver",
    "copies",
    "device",
    "executor",
    "gradients",
    "memory_format",
    "out_of_memory",
    "p2p_channels",
    "recorder",
    "segments",
    "split_executor",
    "staging",
    "transport",
)
# pytest without the settings of setup.cfg, whose plugins a machine may lack
PYTEST = ("pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-o", "addopts=")
TISSUE = (
    "experiment=pathology_1024 parallel.partitions=2 train.steps=8 benchmark.skip_steps=2"
    " train.evaluate=false"
)
TISSUE_SMALL = (
    f"{TISSUE} model.depth=20 {square(64)} parallel.micro_batches=2 train.steps=3"
    " benchmark.skip_steps=1 data.train_samples=16 data.validation_samples=4"
)


def rows(is_small: bool, device: str) -> tuple[Row, ...]:
    """Return the rows in order of value.

    `is_small` is for a device that is slow, `device` is what tests call it.
    """
    return (
        Row(
            MACHINE,
            "What are the hardware and the versions?",
            call_argv(cases.facts),
            60,
            read=machine_facts,
        ),
        Row(
            "engine tests",
            "Do the tests of the engine's parts pass on the GPU?",
            (*PYTEST, *(f"tests/engine/test_{name}.py" for name in ENGINE)),
            130,
            environment={"GEMS_TEST_DEVICE": device},
            read=pytest_counts,
        ),
        _on_ranks(
            "exactness on 4 ranks",
            "Do ranks that share the GPU compute the gradients of one process?",
            "exactness",
            "equals_one and gems_master-2-2" if is_small else "",
            150,
            device,
        ),
        _verify("float64 gradients of GEMS", "gems_master", is_small),
        _verify("float64 gradients of a split backward", "zb_h1", is_small),
        _on_ranks(
            "memory policies on 4 ranks",
            "Are results bit-identical, and bytes as predicted, if activations leave the GPU?",
            "memory",
            "bits_and_bytes and resnet-1f1b" if is_small else "",
            110,
            device,
        ),
        _on_ranks(
            "resume on 4 ranks",
            "Is a resumed run bit-identical?",
            "resume",
            "same_bits" if is_small else "",
            90,
            device,
        ),
        *_training_rows(is_small, device),
    )


def _training_rows(is_small: bool, device: str) -> tuple[Row, ...]:
    model, side_px = ("resnet20_v1", 32) if is_small else ("resnet110_v2", 256)
    idle = (model, [side_px], 2) if is_small else (model, [side_px, 512, 1024], 4)
    # it hears of allocations and waits from a torch for GPUs only
    sanitizer = {cases.SANITIZER: "1"} if device == "cuda" else {}
    training = [["two ranks", TISSUE_SMALL if is_small else TISSUE]]
    return (
        Row(
            "races",
            "Does torch's CUDA sanitizer see a race when activations leave the GPU and come back?",
            call_argv(cases.offloaded, model, side_px, "vdnn_all", 2),
            70,
            environment=sanitizer,
        ),
        Row(
            "tissue on 2 ranks",
            "Does the pathology network train at its tile size, cut over two ranks?",
            call_argv(cases.trained, training),
            110,
        ),
        Row(
            "idle share",
            "For what share of a step does no kernel run, on one rank?",
            call_argv(cases.idle_share, *idle),
            80,
        ),
    )


def _on_ranks(name: str, question: str, file: str, chosen: str, limit_s: float, device: str) -> Row:
    program = (*PYTEST, *(("-k", chosen) if chosen else ()), f"tests/mpi/test_{file}.py")
    return Row(
        name,
        question,
        program,
        limit_s,
        environment={"GEMS_TEST_DEVICE": device},
        read=pytest_counts,
    )


def _verify(name: str, schedule: str, is_small: bool) -> Row:
    words = [
        "experiment=quickstart",
        f"schedule={schedule}",
        "machine=cuda",
        "train.precision=float64",
    ]
    if is_small:
        words += ["parallel.partitions=2", "parallel.micro_batch_size=2"]
    if schedule != "gems_master":
        words += ["parallel.replications=null", "parallel.parts=null", "parallel.micro_batches=8"]
    columns = "schedule model partitions micro_batches max_rel_error is_equal worst"
    return Row(
        name,
        "How far are the gradients from those of one unsplit process?",
        ("gems", "verify", "--json", *words),
        70,
        columns=columns,
    )


def machine_facts(lines: Sequence[str]) -> Figures:
    """Read the facts of the machine as one figure."""
    (found,) = answer()(lines)
    return [found["hardware"] | found["versions"]] if "hardware" in found else [found]
