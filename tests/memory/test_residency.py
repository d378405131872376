"""gems.memory.residency: what a copy takes, when memory is free, and when it is back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gems.memory.residency import Residency


def test_a_storage_leaves_with_its_last_saver_and_stays_until_its_first() -> None:
    holdings = Residency({0, 1})
    holdings.save("own", 10, 0)
    holdings.save("shared", 5, 0)
    assert holdings.offload(0, {"shared"}) == ["own", "shared"], (
        "the next one leaves too, and may share the copy"
    )
    assert (holdings.device_bytes, holdings.host_bytes) == (15, 15), (
        "until the copy has ended, both"
    )
    assert not holdings.save("shared", 5, 1), "it is there"
    assert holdings.free(0) == ["own", "shared"]
    assert holdings.offload(1) == [], "it has been copied"
    assert holdings.free(1) == [] and holdings.device_bytes == 0
    assert holdings.prefetch(1) == ["shared"]
    assert holdings.done(1) == [], "segment 0 has still to read it"
    assert holdings.prefetch(0) == ["own"]
    assert holdings.done(0) == ["own", "shared"]
    assert (holdings.device_bytes, holdings.host_bytes) == (0, 0)


def test_what_a_segment_saves_that_stays_is_not_moved() -> None:
    holdings = Residency({0})
    holdings.save("own", 10, 0)
    holdings.save("output", 5, 0)
    assert holdings.offload(0, {"output"}) == ["own"], "the next segment may want it"
    holdings.save("output", 5, 1)
    assert holdings.free(0) == ["own"]
    assert holdings.device_bytes == 5


def test_what_has_left_and_is_saved_by_one_that_stays_is_held_again() -> None:
    """A copy takes a carried tensor before a later segment, which is kept, saves it.

    While the value is in use.
    """
    holdings = Residency({0, 1})
    holdings.save("skip", 7, 0)
    holdings.offload(0, {"skip"})
    holdings.free(0)
    assert holdings.save("skip", 7, 2), "it is on the device anew"
    assert (holdings.device_bytes, holdings.is_on_device("skip")) == (7, True)
    assert holdings.prefetch(0) == [], "and has not to come back"


def test_what_a_segment_saves_after_its_prefetch_stays() -> None:
    """A recompute saves its inputs again, and what it makes, while they are read."""
    holdings = Residency({0, 1})
    holdings.save("input", 7, 1)
    holdings.offload(1)
    holdings.free(1)
    assert holdings.prefetch(1) == ["input"]
    assert not holdings.save("input", 7, 1) and holdings.save("made", 5, 1)
    assert holdings.offload(0) == holdings.free(0) == holdings.free(1) == []
    assert (holdings.device_bytes, holdings.host_bytes) == (12, 7)
    assert (
        holdings.done(1) == ["input", "made"] and holdings.device_bytes == holdings.host_bytes == 0
    )


def test_a_copy_already_made_frees_the_memory_with_the_new_last_saver() -> None:
    holdings = Residency({0, 1, 3})
    holdings.save("skip", 7, 0)
    assert holdings.offload(0, {"skip"}) == ["skip"]
    holdings.save("skip", 7, 2)  # stays
    assert holdings.free(0) == [] and holdings.device_bytes == 7
    holdings.save("skip", 7, 3)  # leaves
    assert holdings.offload(3) == [], "it has a copy"
    assert holdings.free(3) == ["skip"]
    assert holdings.prefetch(3) == ["skip"]


def test_small_ones_are_held_and_not_moved() -> None:
    holdings = Residency({0})
    holdings.save("small", 1, 0, is_movable=False)
    assert holdings.offload(0) == holdings.free(0) == holdings.prefetch(0) == []
    assert holdings.device_bytes == 1


def test_one_may_leave_once_a_segment_allows_it() -> None:
    holdings = Residency({0, 1, 2})
    holdings.save("activation", 1, 0, is_movable=False)
    assert holdings.offload(0, {"activation"}) == [], "only an activation has saved it yet"
    holdings.save("activation", 1, 1)
    assert holdings.offload(1) == ["activation"], "a convolution has"
    holdings.save("activation", 1, 2, is_movable=False)
    assert holdings.free(1) == ["activation"], "a pooling does not keep it here"


def test_what_only_weight_gradients_read_is_on_the_device_and_has_no_copy() -> None:
    holdings = Residency({0})
    holdings.save("x", 4, 0)
    holdings.offload(0)
    holdings.free(0)
    holdings.prefetch(0)
    holdings.save("x", 4, ~0)
    assert holdings.done(0) == []
    assert (holdings.device_bytes, holdings.host_bytes) == (4, 0)
    assert holdings.done(~0) == ["x"]


def test_a_miss_is_fetched() -> None:
    holdings = Residency({0})
    holdings.save("x", 4, 0)
    holdings.offload(0)
    holdings.free(0)
    holdings.fetch("x")
    assert holdings.device_bytes == 4 and holdings.prefetch(0) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_each_storage_is_moved_at_most_once_each_way_and_is_there_when_it_is_read(
    data: st.DataObject,
) -> None:
    """Brute force: which storages are where is followed one by one beside the sums."""
    num = data.draw(st.integers(1, 6))
    segments = range(num)
    offloaded = set(data.draw(st.lists(st.sampled_from(segments), unique=True)))
    makers = data.draw(st.lists(st.sampled_from(segments), max_size=8))
    spans = [
        (maker, data.draw(st.integers(maker, num - 1))) for maker in makers
    ]  # last segment that is given it
    savers = [
        sorted(data.draw(st.sets(st.integers(maker, last), min_size=1))) for maker, last in spans
    ]
    sizes = [2**key for key in range(len(makers))]
    holdings = Residency(offloaded)
    out: Counter[int] = Counter()
    back: Counter[int] = Counter()
    for segment in segments:
        for key in range(len(makers)):
            if segment in savers[key]:
                holdings.save(key, sizes[key], segment)
        if segment in offloaded:
            out.update(
                holdings.offload(
                    segment, {key for key, (_, last) in enumerate(spans) if last > segment}
                )
            )
            holdings.free(segment)
    for key in range(len(makers)):
        if not offloaded & set(savers[key]):
            assert not out[key] and holdings.is_on_device(key), "nobody asked for it to leave"
    for segment in reversed(segments):
        if segment in offloaded:
            back.update(holdings.prefetch(segment))
        wanted = [key for key in range(len(makers)) if segment in savers[key]]
        assert all(holdings.is_on_device(key) for key in wanted)
        assert holdings.device_bytes == sum(
            sizes[key] for key in range(len(makers)) if holdings.is_on_device(key)
        )
        assert set(holdings.done(segment)) == {key for key in wanted if savers[key][0] == segment}
    assert max(out.values(), default=0) <= 1 and max(back.values(), default=0) <= 1
    assert (holdings.device_bytes, holdings.host_bytes) == (0, 0)
