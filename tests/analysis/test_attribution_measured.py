"""Test the attribution of measured traces.

Covers stragglers among peers, gaps of the host, input, late messages, and what is refused.
"""

from __future__ import annotations

import numpy as np
import pytest

from analysis.attribution.causes import CAUSES, attribute
from analysis.attribution.graph import build_graph, schedule_from
from analysis.attribution.measured import measure
from gems.errors import ConfigError
from gems.trace import KINDS, LayerTimes, Trace
from tests.helpers.attributed import by_hand, check_sums, spec_of, trace_of

ONE_RANK = ("0F0 0B0 0REDUCE_GRAD 0STEP",)
TWO_RANKS = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")


def two_replicas() -> Trace:
    """Join a run with a slow rank 1 and one without into a measured trace of two replicas.

    The quick one waits.
    """
    quick, slow = (
        trace_of(spec_of(machine=machine)) for machine in ({}, {"slow_rank": 1, "slowdown": 1.5})
    )
    span_ns = int(slow.steps["end_ns"][0])
    parts = []
    for replica, trace in enumerate((quick, slow)):
        events = trace.events.copy()
        shift = events["step"].astype(np.int64) * (span_ns - int(trace.steps["end_ns"][0]))
        events["rank"] += 4 * replica
        for column in ("start_ns", "end_ns"):
            events[column] += shift
        parts.append(events)
    events = np.concatenate(parts)
    is_reduction, is_step = (
        events["kind"] == KINDS.index(kind) for kind in ("REDUCE_GRAD", "STEP")
    )
    for step in range(3):
        for rank in range(4):
            group = (events["step"] == step) & (events["rank"] % 4 == rank)
            over_ns = events["start_ns"][group & is_reduction].max()
            events["end_ns"][group & is_reduction] = over_ns
            for column in ("start_ns", "end_ns"):
                events[column][group & is_step] = over_ns
    slow.events = events[np.lexsort((events["start_ns"], events["rank"]))]
    slow.rank_steps = slow.rank_steps[:0]
    slow.attributes |= {"source": "measured", "world_size": 8, "identical_replicas": 1}
    return slow


def test_a_straggler_is_noise_where_it_has_peers() -> None:
    found = attribute(two_replicas())
    check_sums(found)
    assert found.times_from == "peers"
    expected = {cause: 0.0 for cause in CAUSES} | {"bubble": 9.0, "noise": 9.0}
    assert found.run_s == pytest.approx(expected, abs=1e-6)
    own = found.own_s["noise"]
    assert own == pytest.approx((0, 0, 0, 0, 0, 12, 0, 0), abs=1e-6)


def test_a_straggler_without_peers_is_a_slow_stage() -> None:
    trace = trace_of(spec_of(machine={"slow_rank": 1, "slowdown": 1.5}))
    trace.attributes["source"] = "measured"
    found = attribute(trace)
    check_sums(found)
    assert found.times_from == "own median" and found.run_s["noise"] == pytest.approx(0, abs=1e-6)
    # its 12 more units are useful here, 3 a rank, and the pipeline is as slow as its slowest stage
    assert found.ideal_s == pytest.approx(27) and found.run_s["imbalance"] == pytest.approx(
        42 - 27 - 9 * 27 / 24
    )


@pytest.mark.parametrize(("slowdown", "straggles"), [(1.5, True), (1.2, False)])
def test_a_straggler_without_peers_shows_against_a_measured_profile(
    slowdown: float, straggles: bool
) -> None:
    """Eight layers over four stages, as unequal as the profile says; rank 1 is slower than it says."""
    trace = trace_of(spec_of(times=[1, 1.5, 1, 1], machine={"slow_rank": 1, "slowdown": slowdown}))
    trace.attributes["source"] = "measured"
    trace.boundaries = (0, 2, 4, 6, 8)
    layer_s = tuple(0.1 * weight for weight in (1, 1, 1.5, 1.5, 1, 1, 1, 1))
    trace.layer_times = LayerTimes("measured", layer_s, layer_s, layer_s)
    found = attribute(trace)
    check_sums(found)
    without = attribute(trace_of(spec_of(times=[1, 1.5, 1, 1])))
    lost_s = found.step_s - without.step_s
    assert found.times_from == "own median and profile"
    assert found.run_s["noise"] == pytest.approx(lost_s if straggles else 0.0, abs=1e-6)
    trace.layer_times = LayerTimes("fake", layer_s, layer_s, layer_s)
    assert attribute(trace).run_s["noise"] == pytest.approx(0, abs=1e-6)


def test_the_other_direction_has_peers_too() -> None:
    trace = trace_of(spec_of("gems_master", machine={"slow_rank": 0, "slowdown": 1.5}))
    trace.attributes["source"] = "measured"
    found = attribute(trace)
    plain = attribute(trace_of(spec_of("gems_master")))
    assert found.times_from == "peers"
    assert found.run_s["noise"] == pytest.approx(found.step_s - plain.step_s)


def test_gaps_the_step_and_the_ends_are_the_hosts() -> None:
    """Begin 1, F 1 to 2, gap, B 2.5 to 4.5, STEP 5 to 6, end 6.5: 3 ms of compute in a step of 6.5."""
    trace = by_hand(
        ONE_RANK,
        [
            (0, "F", 0, 0, 1, 2),
            (0, "B", 0, 0, 2.5, 4.5),
            (0, "REDUCE_GRAD", 0, -1, 4.5, 4.5),
            (0, "STEP", 0, -1, 5, 6),
        ],
        (0, 6.5),
    )
    found = attribute(trace)
    assert found.ideal_s == pytest.approx(0.003) and found.step_s == pytest.approx(0.0065)
    assert found.run_s == pytest.approx({c: 0.0035 if c == "host" else 0.0 for c in CAUSES})


def test_waiting_for_the_batch_is_input() -> None:
    trace = by_hand(
        ONE_RANK,
        [
            (0, "INPUT", -1, -1, 0, 2),
            (0, "F", 0, 0, 2.5, 3.5),
            (0, "B", 0, 0, 3.5, 5.5),
            (0, "REDUCE_GRAD", 0, -1, 5.5, 6),
            (0, "STEP", 0, -1, 6, 6),
        ],
        (0, 6),
    )
    found = attribute(trace)
    assert found.run_s == pytest.approx(
        {c: {"input": 0.002, "host": 0.0005, "all_reduce": 0.0005}.get(c, 0.0) for c in CAUSES}
    )


def test_a_message_that_a_busy_rank_sees_late_flew_no_longer_than_others() -> None:
    """Micro-batch 0's message is waited for, 1 ms; that of 1 is seen at 7, though it was sent at 2."""
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )
    events = [
        (0, "F", 0, 0, 0, 1),
        (0, "SEND_F", 0, 0, 1, 2),
        (0, "F", 0, 1, 1, 2),
        (0, "SEND_F", 0, 1, 2, 3),
        (1, "RECV_F", 1, 0, 0, 2),
        (1, "F", 1, 0, 2, 5),
        (1, "RECV_F", 1, 1, 5, 7),
        (1, "B", 1, 0, 5, 7),
        (1, "SEND_B", 1, 0, 7, 8),
        (1, "F", 1, 1, 7, 8),
        (1, "B", 1, 1, 8, 10),
        (1, "SEND_B", 1, 1, 10, 11),
        (0, "RECV_B", 0, 0, 2, 8),
        (0, "B", 0, 0, 8, 9),
        (0, "RECV_B", 0, 1, 9, 11),
        (0, "B", 0, 1, 11, 12),
    ]
    trace = by_hand(rows, events, (0, 12))  # type: ignore[arg-type]
    graph = build_graph(schedule_from(trace))
    measured = measure(trace, graph)
    flights = {
        str(action): float(measured.times.lag_s[node].max() * 1e3)
        for node, action in enumerate(graph.actions)
        if action.kind.value.startswith("RECV")
    }
    assert flights == pytest.approx(
        {"1RECV_F0": 1.0, "1RECV_F1": 1.0, "0RECV_B0": 1.0, "0RECV_B1": 1.0}
    )
    check_sums(attribute(trace))


def test_copies_on_a_processor_hold_the_rank() -> None:
    """F 0 to 1, copied out to 2 and back to 3, B 3 to 5.

    Nothing hides them where they are made in place.
    """
    rows = ("0F0 0OFFLOAD0 0FREE0 0PREFETCH0 0AWAIT0 0B0 0REDUCE_GRAD 0STEP",)
    events = [
        (0, "F", 0, 0, 0, 1),
        (0, "OFFLOAD", 0, 0, 1, 2),
        (0, "PREFETCH", 0, 0, 2, 3),
        (0, "B", 0, 0, 3, 5),
        (0, "REDUCE_GRAD", 0, -1, 5, 5),
        (0, "STEP", 0, -1, 5, 5),
    ]
    for device in ("cpu", "NVIDIA H200"):
        trace = by_hand(rows, events, (0, 5))  # type: ignore[arg-type]
        trace.attributes["device"] = device
        found = attribute(trace)
        assert found.run_s == pytest.approx({c: 0.002 if c == "memory" else 0.0 for c in CAUSES}), (
            device
        )
        assert found.own_s["memory"] == pytest.approx((0.002,)), device


def test_ranks_that_begin_before_the_step_is_charged_are_told_as_they_were() -> None:
    """The other rank began 1 ms before the last step had ended.

    The replay still ends when the step did.
    """
    events = [
        (0, "F", 0, 0, 0, 1),
        (0, "SEND_F", 0, 0, 1, 2),
        (1, "RECV_F", 1, 0, -1, 2),
        (1, "F", 1, 0, 2, 3),
        (1, "B", 1, 0, 3, 5),
        (1, "SEND_B", 1, 0, 5, 5),
        (0, "RECV_B", 0, 0, 1, 5),
        (0, "B", 0, 0, 5, 7),
    ]
    found = attribute(by_hand(TWO_RANKS, events, (0, 7), [(0, 7), (-1, 5)]))  # type: ignore[arg-type]
    check_sums(found)
    assert found.residual_s == pytest.approx(0, abs=1e-12)
    assert found.run_s["point_to_point"] == pytest.approx(0.001) and found.run_s[
        "bubble"
    ] == pytest.approx(0.003)


def test_what_cannot_be_attributed_is_refused_in_one_line() -> None:
    whole = trace_of(spec_of())
    three = trace_of(spec_of(partitions=3))
    for spoil, line in (
        ({"schedule_rows": ()}, "holds no schedule of the ranks"),
        ({"schedule_rows": ("0B0",)}, "has stages without a forward"),
        ({"schedule_rows": ("0F0 1F0 0B0",)}, "waits for something that never happens"),
        ({"schedule_rows": whole.schedule_rows[:3]}, "waits for something that never happens"),
        ({"schedule_rows": three.schedule_rows}, "is no multiple of the 3 rows"),
        ({"steps": whole.steps[:1]}, "no step that every rank finished"),
        ({"events": whole.events[:-10]}, "lacks 3F6 on rank 3"),
    ):
        trace = trace_of(spec_of())
        for name, value in spoil.items():
            setattr(trace, name, value)
        with pytest.raises(ConfigError, match=line) as caught:
            attribute(trace)
        assert "\n" not in str(caught.value)
