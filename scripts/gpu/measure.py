"""Part 2, measure: copies, profiles, peaks, memory policies, split backward, kernels."""

from __future__ import annotations

from scripts.bench.rig import call_argv
from scripts.gpu import cases
from scripts.gpu.row import Row, answer

TITLE = "Measure"
POLICIES = "keep,vdnn_all,recompute,plan memory.target_reduction=0.5"
MEMORY_GPU = ("scripts.bench.memory_gpu", "--json", "--part")
FEW_COPIES = ("--copies", "256", "--round-mib", "256")
FEW_SMALL_COPIES = ("--copies", "1", "--round-mib", "4")


def rows(is_small: bool, device: str) -> tuple[Row, ...]:
    """Return the rows in order of value; `is_small` is for a device that is slow."""
    model, side_px, steps, precisions = (
        ("resnet20_v1", 32, 2, cases.PRECISIONS[-1:])
        if is_small
        else ("resnet110_v2", 1024, 5, cases.PRECISIONS)
    )
    split = ("--only", "conv 1x1, 64 ch", "--rounds", "3") if is_small else ("--rounds", "9")
    return (
        *_memory_rows(is_small),
        Row(
            "split backward",
            "What do separate input and weight gradients cost, compared with a whole backward?",
            ("scripts.bench.split", "--json", "--device", "cuda", *split),
            70,
            read=answer("cases"),
            columns=(
                "case full_ms ours_ratio ours_input_share torch_ratio bit_equal"
                " held_for_weights_bytes stash_bytes"
            ),
        ),
        Row(
            "kernels",
            "How do precision, cudnn_benchmark, TF32 and channels_last change a step?",
            call_argv(cases.kernels, model, side_px, steps, 60, precisions),
            150,
        ),
    )


def _memory_rows(is_small: bool) -> tuple[Row, ...]:
    copies = ("--copies", "1,4", "--round-mib", "16") if is_small else ()
    few = FEW_SMALL_COPIES if is_small else FEW_COPIES
    model, side_px, sizes = (
        ("resnet20_v1", "64", "32") if is_small else ("resnet152", "1024", "1024,2048")
    )
    case = ("--models", model, "--sizes", side_px)
    profiled = ("--part", "layers", "--only", "resnet110_v2", "--sizes", sizes)
    return (
        Row(
            "copy rates",
            "How fast are copies between the GPU and pinned or pageable host memory?",
            (*MEMORY_GPU, "bandwidth", *copies),
            60,
            read=answer("bandwidth"),
        ),
        Row(
            "profile",
            "How far are layer times and bytes, predicted without a device, from measurements?",
            ("scripts.bench.profile", "--json", "--device", "cuda", *profiled),
            110,
            read=answer("rows"),
        ),
        Row(
            "peaks",
            "How far is the predicted peak from the allocator's, under four policies?",
            (*MEMORY_GPU, "peaks", *few, *case, "--policies", POLICIES),
            150,
            read=answer("peaks"),
            columns=(
                "model side_px policy predicted_bytes allocated_bytes error reserved_bytes"
                " nvml_bytes step_s"
            ),
        ),
        Row(
            "half the memory",
            "What does halving the activations cost, compared with torch's own methods?",
            (*MEMORY_GPU, "overhead", *few, *case, "--rounds", "2" if is_small else "5"),
            130,
            read=answer("overhead"),
            columns="model side_px way step_s held_bytes overhead saved",
        ),
    )
