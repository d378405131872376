"""The prefetcher: order, distance, exceptions and closing, all by waiting on conditions."""

from __future__ import annotations

import queue
import threading

import pytest

from gems.data.prefetch import Prefetcher

LIMIT_S = 20.0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_by_step(depth: int) -> None:
    with Prefetcher(lambda step: step * step, depth) as prefetcher:
        assert [prefetcher.get(step) for step in range(20)] == [step * step for step in range(20)]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_loads_ahead_but_never_beyond_depth(depth: int) -> None:
    loaded: queue.Queue[int] = queue.Queue()
    asked = -1
    beyond: list[int] = []

    def load(step: int) -> int:
        if step > asked + depth:
            beyond.append(step)
        loaded.put(step)
        return step

    with Prefetcher(load, depth) as prefetcher:
        assert [loaded.get(timeout=LIMIT_S) for _ in range(depth)] == list(range(depth))
        for step in range(10):
            asked = step
            assert prefetcher.get(step) == step
            assert loaded.get(timeout=LIMIT_S) == step + depth
    assert beyond == []


def test_nothing_is_loaded_beyond_the_last_step() -> None:
    loaded: list[int] = []
    with Prefetcher(loaded.append, 4, first_step=2, last_step=5) as prefetcher:
        for step in range(2, 6):
            prefetcher.get(step)
        with pytest.raises(ValueError, match="beyond the last"):
            prefetcher.get(6)
    assert loaded == [2, 3, 4, 5]


def test_steps_jumped_over_are_dropped_and_none_comes_twice() -> None:
    with Prefetcher(lambda step: step, 2) as prefetcher:
        assert prefetcher.get(0) == 0
        assert prefetcher.get(50) == 50
        assert prefetcher.get(51) == 51
        for old in (50, 3):
            with pytest.raises(ValueError, match="given already"):
                prefetcher.get(old)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exception_comes_out_at_its_step_and_after(depth: int) -> None:
    def load(step: int) -> int:
        if step >= 3:
            raise OSError(f"cannot read step {step}")
        return step

    with Prefetcher(load, depth) as prefetcher:
        assert [prefetcher.get(step) for step in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="cannot read step 3"):
            prefetcher.get(3)
        with pytest.raises(OSError, match="cannot read step"):
            prefetcher.get(4)


def test_closing_ends_the_thread_and_refuses_more() -> None:
    prefetcher = Prefetcher(lambda step: step, 2)
    thread = prefetcher._thread
    assert thread.daemon
    prefetcher.get(0)
    prefetcher.close()
    prefetcher.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.get(1)


def test_closing_without_a_thread_refuses_more() -> None:
    prefetcher = Prefetcher(lambda step: step, 0)
    prefetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.get(0)


def test_closing_frees_a_caller_that_waits() -> None:
    release = threading.Event()
    entered = threading.Event()
    caught: queue.Queue[BaseException] = queue.Queue()

    def load(step: int) -> int:
        entered.set()
        release.wait(LIMIT_S)
        return step

    prefetcher = Prefetcher(load, 1)

    def wait() -> None:
        try:
            prefetcher.get(0)
        except RuntimeError as error:
            caught.put(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert entered.wait(LIMIT_S)
    prefetcher.close(timeout_s=0)
    assert "closed" in str(caught.get(timeout=LIMIT_S))
    release.set()
    prefetcher._thread.join(LIMIT_S)
    assert not prefetcher._thread.is_alive()


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=-1"):
        Prefetcher(lambda step: step, -1)
