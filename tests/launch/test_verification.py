"""What a verification says of the bytes that a run held."""

from __future__ import annotations

import pytest

from gems.launch.verification import Verification


@pytest.mark.cases
@pytest.mark.parametrize(
    ("held", "on_a_processor", "on_a_gpu"),
    [((45_144, 100), True, True), ((45_032, 100), False, True), ((45_144, 106), False, False)],
)
def test_bytes_are_exact_on_a_processor_and_near_on_a_gpu(
    held: tuple[int, int], on_a_processor: bool, on_a_gpu: bool
) -> None:
    def verification(is_on_gpu: bool) -> Verification:
        return Verification(
            "float64", 0.0, 0.0, 0.0, 0.0, "", held, (45_144, 100), (), is_on_gpu=is_on_gpu
        )

    assert verification(False).has_predicted_bytes is on_a_processor
    assert verification(True).has_predicted_bytes is on_a_gpu
