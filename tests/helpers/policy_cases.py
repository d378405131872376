"""Made-up networks for memory policies.

Convolutions with their activation, poolings and a classifier, in MiB.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from gems.memory.case import MemoryCase
from gems.partition.even import even
from gems.profile import LayerProfile, ModelProfile
from gems.profile.model_profile import Saved, product_bytes_of, stash_of
from gems.schedule import generate

MIB = 1 << 20
SCHEDULES = (
    ("gpipe", 1, 1),
    ("1f1b", 3, 6),
    ("gems_master", 4, 8),
    ("zb_h1", 3, 6),
    ("interleaved_1f1b", 2, 4),
)


def made_layer(
    name: str,
    kind: str,
    saved: Sequence[Saved],
    output: int,
    seconds: float,
    params: int = 0,
    spare: int = 0,
) -> LayerProfile:
    """A layer whose sums follow from its storages; `spare` is workspace that its kernels let go."""
    stash, later = stash_of(saved)
    kept = stash + sum(size for _, size in later)
    return LayerProfile(
        name,
        kind,
        seconds,
        seconds,
        seconds if params else 0.0,
        seconds,
        cheap_s=seconds / 10,
        param_bytes=params,
        stash_bytes=stash,
        saved_later=later,
        output_bytes=output,
        output_grad_bytes=output,
        workspace_bytes=spare,
        forward_peak_bytes=max(kept, output) + spare,
        backward_peak_bytes=2 * output + spare,
        held_for_weights_bytes=output if params else 0,
        cheap_bytes=product_bytes_of(saved),
        saved=tuple(saved),
    )


def network(
    kinds: str, sizes: Sequence[int] = (), spare: int = 0, device: str = "cpu"
) -> ModelProfile:
    """Build a chain of layers from its letters.

    c is a convolution, p a pooling, b a block with a norm, i a layer that saves nothing, l a linear
    layer.

    u is a convolution whose product nobody saves, with a norm behind it.

    `sizes` are the outputs in MiB, 64 for each unless given. A convolution's output is saved by its
    own activation and by the layer behind, a pooling's by the layer behind; a block saves two more
    storages, one of which is no product.
    """
    layers = []
    for index, letter in enumerate(kinds):
        size = (sizes[index] if sizes else 64) * MIB
        ahead = (1,) if index + 1 < len(kinds) and kinds[index + 1] != "i" else ()
        last = 1 if index + 1 < len(kinds) else 0
        output = Saved(size, (0, *ahead), last, is_product=True)
        name = f"{letter}{index}"
        if letter == "c":
            layers.append(made_layer(name, "conv", (output,), size, 0.02, MIB, spare * MIB))
        elif letter == "p":
            indices = Saved(size // 2)
            layers.append(
                made_layer(
                    name,
                    "pool",
                    (indices, *((Saved(size, ahead, last),) * bool(ahead))),
                    size,
                    0.005,
                )
            )
        elif letter == "b":
            inner = (Saved(size, is_product=True), Saved(size))
            layers.append(
                made_layer(name, "residual", (*inner, output), size, 0.03, 2 * MIB, spare * MIB)
            )
        elif letter == "u":
            inner = (Saved(size, (), is_product=True), Saved(size // 2))
            behind = replace(output, is_product=False)
            layers.append(made_layer(name, "conv", (*inner, behind), size, 0.02, MIB, spare * MIB))
        elif letter == "i":
            layers.append(made_layer(name, "pool", (), size, 0.001))
        else:
            layers.append(
                made_layer(
                    name,
                    "linear",
                    (Saved(size // 64, (0, *ahead), last),),
                    size // 64,
                    0.001,
                    32 * MIB,
                )
            )
    return ModelProfile("made_up", 8, 8, 1, "float32", device, "measured", tuple(layers), MIB)


def random_network(seed: int, num_layers: int = 12, letters: str = "cccpb") -> ModelProfile:
    """Letters and sizes at random, with a classifier at the end."""
    rng = random.Random(seed)
    kinds = "".join(rng.choice(letters) for _ in range(num_layers - 1)) + "l"
    return network(kinds, [rng.randint(8, 96) for _ in kinds], rng.randint(0, 20))


def case_of(
    profile: ModelProfile,
    name: str = "gpipe",
    num_ranks: int = 1,
    num_micro_batches: int = 1,
    limit_share: float | None = None,
    rate: float = 5e9,
) -> MemoryCase:
    """A case on equal parts; `limit_share` of what the ranks hold when all is kept."""
    schedule = generate(name, num_ranks, num_micro_batches)
    boundaries = tuple(even(profile.num_layers, schedule.num_stages))
    case = MemoryCase(
        profile, schedule, boundaries, d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, least_bytes=65536
    )
    if limit_share is None:
        return case
    return replace(case, limit_bytes=int(limit_share * max(case.kept.peak_bytes)))
