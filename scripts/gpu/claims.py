"""Part 3, claims: steps beside predictions, staging, the largest image, strips, learning."""

from __future__ import annotations

from scripts.bench.rig import call_argv, square
from scripts.gpu import cases
from scripts.gpu.row import Row, answer

TITLE = "Claims"
DEVICE_BYTES = 16_000_000_000
POLICIES = {
    "keep": "",
    "vdnn_all": "memory=vdnn_all",
    "plan, half": "memory=plan memory.target_reduction=0.5",
}
STRIPS = ("scripts.bench.strips", "--part", "time", "--width", "0", "--rounds", "1")
OF_STRIPS = ("machine=cuda", "train.precision=bf16_mixed")
OF_SMALL_STRIPS = ("machine=cuda", "train.steps=2", "train.evaluate=false")
NETWORKS = {"ResNet-50": "resnet50", "ConvNeXt-tiny": "convnext_tiny"}
STRIP_COLUMNS = "model height_px way step_s ratio activation_bytes predicted_bytes device_bytes"


def rows(is_small: bool, device: str) -> tuple[Row, ...]:
    """Return the rows in order of value; `is_small` is for a device that is slow."""
    sizes = (64, "2", 128, "4") if is_small else (2048, "8,32", 8192, "32,128")
    height_px, numbers, large_px, large_numbers = sizes
    quickstart = "experiment=quickstart"
    if is_small:
        quickstart += " train.steps=4 parallel.partitions=2"
    return (
        *_step_rows(is_small),
        *(_strips(name, "", height_px, numbers, 80, is_small) for name in NETWORKS),
        _largest(is_small),
        Row(
            "accuracy",
            "Does a short training on four ranks learn?",
            call_argv(cases.trained, [["quickstart", quickstart]]),
            90,
        ),
        *(
            _strips(name, " of large images", large_px, large_numbers, 140, is_small)
            for name in NETWORKS
        ),
    )


def _step_rows(is_small: bool) -> tuple[Row, ...]:
    network, side_px, steps, skip, micro_batches = (
        ("resnet20_v1", 32, 4, 1, 4) if is_small else ("resnet110_v2", 1024, 8, 2, 8)
    )
    base = (
        f"model={network} data=synthetic {square(side_px)} schedule=1f1b"
        f" parallel.micro_batches={micro_batches} parallel.micro_batch_size=1 train.steps={steps}"
        f" benchmark.skip_steps={skip} train.evaluate=false"
    )
    alone = [
        [name, f"{base} parallel.partitions=1 profile=measured cost=profile {words}"]
        for name, words in POLICIES.items()
    ]
    on_ranks = [
        ["1 rank" if number == 1 else f"{number} ranks", f"{base} parallel.partitions={number}"]
        for number in (1, 2, 4)
    ]
    return (
        Row(
            "steps",
            "How far is a predicted step of one rank from the measured one, under three policies?",
            call_argv(cases.trained, alone[:2] if is_small else alone, True),
            140,
        ),
        Row(
            "staging",
            "What does it cost to send messages through the host if ranks share the GPU?",
            call_argv(cases.staged, on_ranks),
            130,
        ),
    )


def _largest(is_small: bool) -> Row:
    words = (
        f"--copies 256 --round-mib 256 --first-px 1024 --step-px 256 --device-bytes {DEVICE_BYTES}"
    )
    if is_small:
        words = (
            "--copies 1 --round-mib 4 --largest-of resnet20_v1 --first-px 64 --step-px 64"
            " --device-bytes 24000000"
        )
    program = "scripts.bench.memory_gpu --json --part largest --policies keep,plan"
    return Row(
        "largest image",
        f"How large an image trains in {DEVICE_BYTES // 10**9} GB, with and without a plan?",
        (*program.split(), *words.split()),
        180,
        read=answer("largest"),
        columns="model policy side_px next_px predicted_bytes allocated_bytes step_s why",
    )


def _strips(
    name: str, of: str, height_px: int, numbers: str, limit_s: float, is_small: bool
) -> Row:
    program = (
        *STRIPS,
        "--models",
        NETWORKS[name],
        "--heights",
        str(height_px),
        "--strips",
        numbers,
    )
    words = OF_SMALL_STRIPS if is_small else OF_STRIPS
    question = "How much longer does a step take in strips than with the whole image?"
    return Row(f"strips{of}, {name}", question, (*program, *words), limit_s, columns=STRIP_COLUMNS)
