"""Networks of torchvision, timm and segmentation_models_pytorch, cut over two ranks, against the uncut ones.

Each is compared by `gems verify` in float64 with its own dropout and stochastic depth, chosen by
model.target and model.kwargs alone. Takes `only=NAME,NAME` and Hydra overrides. Prints a table on
stderr and JSON on stdout; the exit code is 1 if one is off by more than 1e-12. Needs `pip install
'gems-train[vision]' segmentation-models-pytorch`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from scripts.bench.rig import answered, log, machine

LIMIT = 1e-12
LIMIT_S = 900
SIZE_PX = 64
OVERRIDES = (
    "data=synthetic",
    "schedule=1f1b",
    "partition=even",
    "parallel.partitions=2",
    "parallel.micro_batches=2",
    "parallel.micro_batch_size=2",
    "data.num_classes=2",
)
TORCHVISION = (
    "resnet50",
    "densenet121",
    "convnext_tiny",
    "efficientnet_b0",
    "swin_t",
    "vit_b_16",
    "googlenet",
    "mobilenet_v3_small",
    "regnet_y_400mf",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
)
TIMM = ("vit_tiny_patch16_224", "convnextv2_atto", "resnet26", "regnetx_002", "mobilenetv2_100")
SEGMENTATION = ("smp_unet", "deeplabv3_resnet50")
# What a network needs to take images of 64 px, or to give one tensor.
MORE = {
    "vit_b_16": ("model.kwargs.image_size=64",),
    "vit_tiny_patch16_224": ("model.kwargs.img_size=64", "model.kwargs.drop_rate=0.1"),
    "convnextv2_atto": ("model.kwargs.drop_path_rate=0.1",),
    "smp_unet": (
        "model.target=segmentation_models_pytorch.Unet",
        "model.kwargs.encoder_name=resnet18",
        "+model.kwargs.encoder_weights=null",
        "model.kwargs.classes=2",
        "data.task=segmentation",
    ),
    "deeplabv3_resnet50": (
        "model.target=torchvision.models.segmentation.deeplabv3_resnet50",
        "+model.kwargs.weights_backbone=null",
        "model.kwargs.num_classes=2",
        "model.kwargs.aux_loss=true",
        "data.task=segmentation",
        "loss.output=out",
    ),
    "googlenet": ("model.kwargs.init_weights=false", "loss.output=logits"),
}


def words_of(name: str) -> list[str]:
    """Return the overrides that choose a network."""
    if name in SEGMENTATION:
        return list(MORE[name])
    if name in TIMM:
        target = ["model.target=timm.create_model", f"model.kwargs.model_name={name}"]
    else:
        target = [f"model.target=torchvision.models.{name}"]
    return [*target, "model.kwargs.num_classes=2", *MORE.get(name, ())]


def verify(name: str, more: list[str]) -> dict[str, Any]:
    """Return what `gems verify --json` prints of a network, or why it ended."""
    size = [f"data.height_px={SIZE_PX}", f"data.width_px={SIZE_PX}"]
    argv = [
        sys.executable,
        "-m",
        "gems",
        "verify",
        "--json",
        *OVERRIDES,
        *size,
        *words_of(name),
        *more,
    ]
    ended = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    try:
        found = json.loads(ended.stdout)
    except ValueError:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        return {"name": name, "max_rel_error": None, "worst": lines[-1]}
    return {"name": name, "max_rel_error": found["max_rel_error"], "worst": found["worst"]}


def main(argv: list[str]) -> int:
    """Verify each network, and print their largest relative errors."""
    only = next(
        (word.removeprefix("only=").split(",") for word in argv if word.startswith("only=")), None
    )
    more = [word for word in argv if not word.startswith("only=")]
    rows = []
    for name in only or (*TORCHVISION, *TIMM, *SEGMENTATION):
        rows.append(verify(name, more))
        error = rows[-1]["max_rel_error"]
        log(f"{name:24} {'-' if error is None else f'{error:.2e}':10} {rows[-1]['worst']}")
    errors = [row["max_rel_error"] for row in rows]
    return answered(
        {"networks": rows, **machine()},
        not all(error is not None and error <= LIMIT for error in errors),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
