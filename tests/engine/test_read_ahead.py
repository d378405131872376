"""Reading ahead in a thread: order, distance, exceptions and closing, all by waiting on conditions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from gems.engine.batch_loader import ReadAhead

LIMIT_S = 20.0


@pytest.mark.parametrize("depth", [1, 3])
def test_items_come_in_order_and_end(depth: int) -> None:
    ahead = ReadAhead(iter(range(20)), depth)
    assert list(ahead) == list(range(20))
    assert list(ahead) == []
    ahead.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_takes_items_ahead_but_never_beyond_depth(depth: int) -> None:
    taken: queue.Queue[int] = queue.Queue()
    given = -1
    beyond: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            if number > given + depth:
                beyond.append(number)
            taken.put(number)
            yield number

    ahead = ReadAhead(items(), depth)
    assert [taken.get(timeout=LIMIT_S) for _ in range(depth)] == list(range(depth))
    for number in range(10):
        given = number
        assert next(ahead) == number
        assert taken.get(timeout=LIMIT_S) == number + depth
    ahead.close()
    assert beyond == []


def test_an_exception_comes_out_in_its_place_and_after() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise OSError("cannot read 3")

    ahead = ReadAhead(items(), 2)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="cannot read 3"):
            next(ahead)
    ahead.close()


def test_closing_ends_the_thread_and_frees_a_caller_that_waits() -> None:
    release = threading.Event()
    entered = threading.Event()
    ended = threading.Event()

    def items() -> Iterator[int]:
        entered.set()
        release.wait(LIMIT_S)
        yield 0
        raise AssertionError("taken after closing")

    ahead = ReadAhead(items(), 2)
    assert ahead._thread.daemon

    def wait() -> None:
        list(ahead)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert entered.wait(LIMIT_S)
    ahead.close(timeout_s=0)
    release.set()
    ahead._thread.join(LIMIT_S)
    assert not ahead._thread.is_alive() and ended.wait(LIMIT_S)
    ahead.close()
