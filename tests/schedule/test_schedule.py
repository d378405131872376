"""gems.schedule.schedule: the rows and what can be asked of them."""

from __future__ import annotations

from gems.schedule import generate
from gems.schedule.lower import lower
from tests.helpers.drawings import text_of, with_rows

MADE = generate("gems_mast", 3, 2)


def test_directions_of_micro_batches() -> None:
    assert MADE.directions() == {0: 0, 1: 1}
    assert generate("1f1b", 2, 3).directions() == {0: 0, 1: 0, 2: 0}


def test_digest_tells_orders_apart() -> None:
    made = generate("1f1b", 3, 3)
    other_order = with_rows(
        made, [text_of(made)[0].replace("0F0 0F1", "0F1 0F0"), *text_of(made)[1:]]
    )
    schedules = [made, lower(made), generate("1f1b", 3, 4), generate("gpipe", 3, 3), other_order]
    assert len({schedule.digest() for schedule in schedules}) == len(schedules)
    assert generate("1f1b", 3, 3).digest() == made.digest()
    assert len(made.digest()) == 64
