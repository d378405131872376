"""gems.schedule.formats.torch_csv.

Torch's own validator and simulator accept our exports, and its schedules are read.
"""

from __future__ import annotations

import csv
import io
from types import ModuleType
from typing import Any

import pytest

from gems.errors import ConfigError
from gems.schedule import generate
from gems.schedule.action import COMPUTE_KINDS, Action
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.formats.torch_csv import from_torch_csv, to_torch_csv
from gems.schedule.lower import compute_only, lower
from gems.schedule.placement import linear, looped, v
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from tests.helpers.drawings import play, text_of, uniform_cost, with_rows

PLAIN = [
    "layer_parallel",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "group_interleaved",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
]


def as_torch_reads(schedules: ModuleType, text: str) -> dict[int, list[Any]]:
    """Return the actions as torch's `_load_csv` makes them."""
    cells = csv.reader(io.StringIO(text, newline=""))
    return {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(cells)
    }


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_torchs_validator_and_simulator_accept_our_exports(
    schedules: ModuleType, name: str, num_ranks: int, rounds: int
) -> None:
    made = generate(name, num_ranks, rounds * num_ranks)
    orders = as_torch_reads(schedules, to_torch_csv(made))
    placed = schedules._validate_schedule(
        orders, num_ranks, made.num_stages, made.num_micro_batches
    )
    assert placed == dict(enumerate(made.placement.ranks[0]))
    with_transfers = schedules._add_send_recv(orders, placed.__getitem__, made.num_stages)
    played = schedules._simulate_comms_compute(with_transfers, placed.__getitem__, made.num_stages)
    ran = {str(action) for row in played.values() for action in row if action is not None}
    assert {str(action) for _, action in made.actions()} <= ran
    hops = sum(
        a != b for a, b in zip(made.placement.ranks[0], made.placement.ranks[0][1:], strict=False)
    )
    assert len(ran) == sum(map(len, made.rank_schedules)) + 4 * hops * made.num_micro_batches


def test_torchs_validator_can_say_no(schedules: ModuleType) -> None:
    made = generate("1f1b", 2, 4)
    shorter = with_rows(made, [text_of(made)[0], text_of(made)[1].replace("1B2", "")])
    with pytest.raises(AssertionError):
        schedules._validate_schedule(as_torch_reads(schedules, to_torch_csv(shorter)), 2, 2, 4)


def test_what_is_written() -> None:
    text = to_torch_csv(lower(generate("1f1b", 2, 3)))
    assert text == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


@pytest.mark.parametrize("name", PLAIN)
def test_our_exports_come_back(name: str) -> None:
    made = generate(name, 4, 8)
    back = from_torch_csv(to_torch_csv(made), name)
    assert (back.rank_schedules, back.placement, back.num_micro_batches) == (
        made.rank_schedules,
        made.placement,
        8,
    )
    assert from_torch_csv(to_torch_csv(lower(made)), name) == compute_only(lower(made)) == made


def order_of(
    schedules: ModuleType, cls: str, placement: Any, num_micro_batches: int, **more: int
) -> str:
    """Return the CSV of one of torch's own schedules, made without its runtime."""
    made = object.__new__(getattr(schedules, cls))
    num_ranks = placement.num_ranks
    chunks = placement.num_stages // placement.num_ranks
    known = {
        "pp_group_size": num_ranks,
        "n_local_stages": chunks,
        "_num_stages": placement.num_stages,
        "_n_microbatches": num_micro_batches,
        "_stages": [None] * chunks,
    } | more
    for field, value in known.items():
        setattr(made, field, value)
    rows = [made._calculate_single_rank_operations(rank) for rank in range(num_ranks)]
    text = io.StringIO()
    writer = csv.writer(text)
    for row in rows:
        writer.writerow("" if action is None else str(action) for action in row)
    return text.getvalue()


@pytest.mark.parametrize(
    ("cls", "placement", "more"),
    [
        ("ScheduleLoopedBFS", looped(4, 2), {}),
        (
            "ScheduleInterleaved1F1B",
            looped(4, 2),
            {"number_of_rounds": 2, "microbatches_per_round": 4},
        ),
        ("ScheduleZBVZeroBubble", v(4), {"num_chunks": 2, "num_stages": 8}),
        ("ScheduleDualPipeV", v(4), {"num_chunks": 2}),
    ],
)
def test_torchs_own_schedules_are_read(
    schedules: ModuleType, cls: str, placement: Any, more: dict[str, int]
) -> None:
    """Its idle steps are passed over, and an overlapped forward and backward is one after the other."""
    made = validate(from_torch_csv(order_of(schedules, cls, placement, 8, **more), cls))
    assert (made.placement, made.num_micro_batches) == (placement, 8)
    validate(lower(made))
    assert play(made, uniform_cost(1, 2)).span > 0
    assert from_json(to_json(made)) == made


@pytest.mark.parametrize("name", ["gems_master", "gems_mast", "chimera"])
def test_two_directions_cannot_be_said(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"cannot say schedule {name}: it runs 2 directions; use --json"
    ):
        to_torch_csv(generate(name, 4, 4, 2))


@pytest.mark.parametrize(
    ("row", "what"),
    [("0F0 0R0 0B0", "recomputes"), ("0F0 0OFFLOAD0 0PREFETCH0 0B0", "copies to host memory")],
)
def test_memory_actions_cannot_be_said(row: str, what: str) -> None:
    made = with_rows(Schedule("one", 1, linear(1), ((),)), [row])
    with pytest.raises(ConfigError, match=f"cannot say schedule one: it {what}"):
        to_torch_csv(validate(made))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1F0,1X0\n", "'1X0': is no compute action in line 2"),
        ("0F0,0SEND_F0\n", "'0SEND_F0': is no compute action in line 1"),
        ("0F0,0UNSHARD\n", "is no compute action"),
        ("0F0,0B0\n0F0\n", "stage 0 is on rank 0 and on rank 1"),
        ("0F0\n2F0\n", "numbered from 0 on without gaps, not 0, 2"),
        ("", "without gaps, not none"),
    ],
)
def test_what_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_torch_csv(text)


def test_idle_cells_and_spaces() -> None:
    made = from_torch_csv("0F0, 0F1,,0B0,0B1\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\n")
    assert text_of(made) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert all(
        isinstance(action, Action) and action.kind in COMPUTE_KINDS for _, action in made.actions()
    )
    assert validate(made).num_micro_batches == 2
