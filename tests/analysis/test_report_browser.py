"""The page in a headless Chromium: no error, no request, zoom, hover, sorting.

One browser and one page for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.report.build import build_report
from gems.trace import Trace
from tests.analysis.conftest import Simulated
from tests.analysis.test_report_page import EVIL, write_run
from tests.helpers.browser import Page, browser, find_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(200)]
MS = 1_000_000
NUM_STEPS = 40
Simulate = Callable[..., Trace]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the page, of the browser's own things and of the screenshot."""
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Page]:
    """Open the page of two runs, one of which has an evil name."""
    find_browser()
    run = Simulated(steps=NUM_STEPS, link_ns=MS // 5, reduce_ns=MS, source="emulated")
    first = write_run(folder / "first", run.trace())
    other = write_run(
        folder / EVIL.replace("/", "_"), Simulated(partitions=16, steps=3).trace(), name=EVIL
    )
    report = build_report([first, other], folder / "report.html")
    with browser(folder) as opened:
        opened.open(report.path)
        yield opened


@pytest.fixture
def canvas(page: Page) -> dict[str, float]:
    """Scroll to the first timeline, shows its first step, and gives the place of its canvas."""
    page.evaluate("gemsReport.load(0)")
    page.evaluate("document.querySelector('canvas.timeline').scrollIntoView({block: 'center'})")
    page.evaluate(
        "for (let i = 0; i < 60; i++) document.querySelector('[data-act=previous]').click()"
    )
    box: dict[str, float] = page.evaluate(
        "(() => { const box = document.querySelector('canvas.timeline').getBoundingClientRect();"
        " return {left: box.left, top: box.top, width: box.width, height: box.height}; })()"
    )
    return box


def view(page: Page) -> tuple[float, float]:
    found = page.evaluate("gemsReport.view(0)")
    return found["from_ns"], found["to_ns"]


def span(page: Page) -> float:
    begin, end = view(page)
    return end - begin


def column(page: Page, table: str, place: int) -> list[str]:
    cells: list[str] = page.evaluate(
        f"[...document.querySelectorAll('#{table} tbody tr')].map((row) =>"
        f" row.cells[{place}].textContent)"
    )
    return cells


def test_the_page_asks_for_nothing_and_says_nothing_to_the_console(
    page: Page, folder: Path
) -> None:
    assert page.evaluate("gemsReport.load(0)") > 1000
    assert page.evaluate("gemsReport.load(1)") > 100
    assert page.evaluate("document.querySelectorAll('img[src^=x], img[onerror]').length") == 0
    assert page.errors == []
    assert page.requests == [(folder / "report.html").resolve().as_uri()]


def test_the_wheel_zooms_about_the_pointer_and_drag_moves(
    page: Page, canvas: dict[str, float]
) -> None:
    x = canvas["left"] + 0.5 * canvas["width"]
    y = canvas["top"] + 40
    before = span(page)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    page.wait_for(f"gemsReport.view(0).to_ns - gemsReport.view(0).from_ns < {0.6 * before}")
    begin, end = view(page)
    middle_ns = before * (x - canvas["left"] - 46) / (canvas["width"] - 46)
    at_ns = (begin + end) / 2
    assert at_ns == pytest.approx(middle_ns, rel=0.1)
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    page.wait_for(f"gemsReport.view(0).from_ns > {begin + 1}")
    moved = view(page)
    assert moved[0] - begin == pytest.approx(100 * (end - begin) / (canvas["width"] - 46), rel=0.02)
    assert moved[1] - moved[0] == pytest.approx(end - begin)


def test_keys_and_buttons_do_the_same(page: Page, canvas: dict[str, float]) -> None:
    before = span(page)
    page.evaluate("document.querySelector('canvas.timeline').focus()")
    page.key("+")
    assert span(page) == pytest.approx(before / 2)
    page.key("-")
    assert span(page) == pytest.approx(before)
    begin = view(page)[0]
    page.key("ArrowRight")
    assert view(page)[0] == pytest.approx(begin + before / 4)
    page.evaluate("document.querySelector('[data-act=all]').click()")
    assert span(page) == pytest.approx(NUM_STEPS * before, rel=0.05)


def test_hover_tells_of_the_very_event(page: Page, canvas: dict[str, float]) -> None:
    for number in (0, 3, 10):
        event: dict[str, Any] = page.evaluate(f"gemsReport.event(0, {number})")
        point = page.evaluate(f"gemsReport.pointOf(0, {number})")
        page.mouse("mouseMoved", point["x"], point["y"])
        told = page.evaluate("gemsReport.tip()")
        assert told.startswith(f"{event['kind']} on rank {event['rank']}, emulated"), told
        place = (
            f"stage {event['stage']}, micro-batch {event['micro_batch']}, direction"
            f" {event['direction']}, step 0"
        )
        assert place in told
        assert f"takes {event['duration_ns'] // MS} ms" in told
        assert "MiB on the device" in told
    page.mouse("mouseMoved", canvas["left"] + 60, canvas["top"] - 60)
    page.wait_for("gemsReport.tip() === null")


def test_hover_in_the_memory_curve_tells_the_bytes(page: Page, canvas: dict[str, float]) -> None:
    page.evaluate("document.querySelector('canvas.memory').scrollIntoView({block: 'center'})")
    box = page.evaluate(
        "(({left, top, width}) => ({left, top, width}))"
        "(document.querySelector('canvas.memory').getBoundingClientRect())"
    )
    page.mouse("mouseMoved", box["left"] + box["width"] / 2, box["top"] + 40)
    told = page.evaluate("gemsReport.tip()")
    assert told.startswith("rank 0: ") and "MiB" in told and "held on the device" in told


def test_a_click_sorts_a_table_by_its_numbers(page: Page) -> None:
    assert column(page, "ranks-1", 0) == [str(rank) for rank in range(16)]
    head = "document.querySelector('#ranks-1 thead').rows[0].cells[{}].firstChild.click()"
    page.evaluate(head.format(0))
    page.evaluate(head.format(0))
    assert column(page, "ranks-1", 0) == [str(rank) for rank in reversed(range(16))]
    assert (
        page.evaluate("document.querySelector('#ranks-1 th').getAttribute('aria-sort')")
        == "descending"
    )
    page.evaluate(head.format(4))
    peaks = [float(cell) for cell in column(page, "ranks-1", 4)]
    assert peaks == sorted(peaks)


def test_a_picture_of_the_page_is_kept_wide_and_narrow(
    page: Page, folder: Path, canvas: dict[str, float]
) -> None:
    for width_px in (1280, 400):
        page.resize(width_px, 900)
        page.evaluate("document.querySelector('.views').scrollIntoView()")
        page.wait_for(f"document.documentElement.clientWidth === {width_px}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width_px, (
            "nothing sticks out"
        )
        page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        kept = page.screenshot(folder / f"report-{width_px}.png")
        assert kept.stat().st_size > 10_000
        print(json.dumps({"screenshot": str(kept)}))
    page.resize(1280, 900)
    ink = page.evaluate(
        "(() => { const one = document.querySelector('canvas.timeline'), box ="
        " one.getContext('2d').getImageData(0, 0, one.width, one.height).data; const found = new"
        " Set(); for (let i = 0; i < box.length; i += 4) found.add(box.slice(i, i + 3).join());"
        " return found.size; })()"
    )
    assert ink > 8
    assert page.errors == []
    assert len(page.requests) == 1


def test_the_policy_would_hold_a_request_back(page: Page) -> None:
    blocked = page.evaluate(
        "new Promise((done) => { document.addEventListener('securitypolicyviolation', (event) =>"
        " done(event.effectiveDirective), {once: true}); fetch('http://127.0.0.1:9/x').catch(() =>"
        " 0); })"
    )
    assert blocked == "connect-src"
    assert not [address for address in page.requests if address.startswith("http")]
