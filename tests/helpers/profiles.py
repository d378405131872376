"""Profiles of made-up models."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gems.profile import LayerProfile, ModelProfile


def profile(layers: Sequence[LayerProfile], input_bytes: int = 700) -> ModelProfile:
    return ModelProfile(
        "made_up", 8, 8, 1, "float32", "cpu", "analytic", tuple(layers), input_bytes
    )


def random_profile(num_layers: int, seed: int = 0, decay: float = 1.0) -> ModelProfile:
    """A chain whose activations shrink with depth by `decay` a layer while its parameters grow."""
    rng = random.Random(seed)
    layers = []
    for index in range(num_layers):
        size = max(1, round(rng.randint(200, 2000) * decay**index))
        output = max(1, size // rng.randint(2, 4))
        later = ((1, output),) if index + 1 < num_layers and rng.random() < 0.7 else ()
        layers.append(
            LayerProfile(
                f"layer{index}",
                "made_up",
                rng.random(),
                rng.random(),
                rng.random(),
                rng.random(),
                param_bytes=rng.randint(0, 100 * (index + 1)),
                buffer_bytes=rng.randint(0, 20),
                stash_bytes=size,
                saved_later=later,
                output_bytes=output,
                output_grad_bytes=output,
                unsaved_input_bytes=0 if later else output,
                workspace_bytes=size // 5,
                forward_peak_bytes=size + output + size // 5,
                backward_peak_bytes=2 * output + size // 5,
                held_for_weights_bytes=size // 2,
            )
        )
    return profile(layers)
