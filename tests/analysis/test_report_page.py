"""Test the page of a report.

Covers what stands in it, that it is safe and whole, and the columns that its pictures are drawn
from.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from analysis.__main__ import main
from analysis.io.load import default_out, find_runs
from analysis.metrics.run_metrics import run_metrics
from analysis.plots.timeline import LOOKS
from analysis.report.build import build_report, spread
from analysis.report.canvas_data import NOT_DRAWN, TRACKS, look_numbers, packed, timeline_block
from analysis.report.html import Html, data_element, element
from analysis.report.run_section import select_events
from analysis.report.run_tables import key_figures, stage_medians_s
from gems.errors import ConfigError
from gems.trace import KINDS, Trace, write_trace

MS = 1_000_000
EVIL = "</script><img src=x onerror=alert(1)>\"'&\u2028"
Simulate = Callable[..., Trace]


class Reader(HTMLParser):
    """Reads the elements of a page, and the texts of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self._name: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._name = dict(attrs).get("id") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._name is not None:
            self.data[self._name], self._name = json.loads(data), None


def unpacked(column: dict[str, Any]) -> np.ndarray:
    """Read a column as the page's script does."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(column["data"])), np.uint8)
    kind = np.dtype(f"<{column['type']}")
    stored = planes.reshape(kind.itemsize, column["count"]).T.copy().view(kind).ravel()
    return np.cumsum(stored.astype(float)) if column["is_sum"] else stored


def write_run(folder: Path, trace: Trace, **names: Any) -> Path:
    """Write a run folder, with other values in its configuration."""
    document = yaml.safe_load(trace.run_yaml) | names
    trace.run_yaml = yaml.safe_dump(document)
    folder.mkdir(parents=True, exist_ok=True)
    write_trace(folder / "trace.h5", trace)
    (folder / "run.yaml").write_text(trace.run_yaml)
    return folder


@pytest.fixture
def page(simulate: Simulate, tmp_path: Path) -> str:
    """Return the text of the page of a simulated run."""
    folder = write_run(tmp_path / "run", simulate(link_ns=MS // 5, reduce_ns=MS))
    return build_report([folder], tmp_path / "report.html").path.read_text()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1, 200], "u1"),
        ([-1, 3], "i1"),
        ([-200, 3], "i2"),
        ([70_000], "i4"),
        ([3_000_000_000], "u4"),
        ([1 << 40, -5], "f8"),
        ([0.5, 1.25], "f8"),
        ([], "i1"),
    ],
)
def test_a_column_is_read_back_from_the_narrowest_type(values: list[float], kind: str) -> None:
    column = packed(np.array(values, dtype=None if values else np.int64))
    assert (column["type"], column["count"]) == (kind, len(values))
    assert unpacked(column).tolist() == values


def test_a_column_of_sums_is_small_and_exact() -> None:
    times_ns = np.arange(100_000) * 1_000_003 + (1 << 45)
    column = packed(times_ns, is_sum=True)
    assert unpacked(column).tolist() == times_ns.tolist()
    assert len(column["data"]) < 5_000 < len(packed(times_ns)["data"])


def test_whole_numbers_that_javascript_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="2\\^53"):
        packed(np.array([(1 << 53) + 1]))


def test_texts_are_escaped_and_data_cannot_end_its_element() -> None:
    assert element("p", EVIL, Html("<b>"), title=EVIL).count("<") == 3
    shown = data_element("x", {"name": EVIL})
    assert shown.count("<") == 2 and "\u2028" not in shown
    assert Reader(shown).data["x"] == {"name": EVIL}


def test_a_run_of_an_evil_name_is_harmless(simulate: Simulate, tmp_path: Path) -> None:
    trace = simulate()
    trace.attributes |= {"hostnames": [EVIL] * 4, "git_commit": EVIL, "signature": EVIL}
    trace.schedule_rows = (EVIL,)
    trace.schedule_sha256 = EVIL
    trace.memory_plan = EVIL
    folder = write_run(tmp_path / EVIL.replace("/", "_"), trace, name=EVIL)
    other = write_run(tmp_path / "<img src=y>", simulate(partitions=2))
    text = build_report([folder, other], tmp_path / "report.html").path.read_text()
    read = Reader(text)
    assert "<img src=x" not in text and "<img src=y" not in text
    assert all(not name.startswith("on") for _, attributes in read.elements for name in attributes)
    images = [attributes["src"] or "" for tag, attributes in read.elements if tag == "img"]
    assert images and all(source.startswith("data:image/svg+xml;base64,") for source in images)
    scripts = [attributes for tag, attributes in read.elements if tag == "script"]
    assert [each.get("type") for each in scripts].count(None) == 1
    assert set(read.data) == {"data-0", "data-1", "looks"}


def test_the_page_names_its_source_its_figures_and_its_policy(page: str) -> None:
    read = Reader(page)
    (policy,) = [attributes for tag, attributes in read.elements if attributes.get("http-equiv")]
    assert policy["http-equiv"] == "Content-Security-Policy"
    allowed = policy["content"] or ""
    assert "default-src 'none'" in allowed and "http" not in allowed
    assert page.count("SIMULATED, a prediction") >= 3
    for words in (
        "images/s",
        "step time, median",
        "efficiency",
        "bubble",
        "peak on a device",
        "training loss",
    ):
        assert words in page
    assert not [
        attributes
        for _, attributes in read.elements
        if (attributes.get("src") or "").startswith("http")
    ]
    assert not [
        tag for tag, _ in read.elements if tag in ("link", "iframe", "object", "base", "form")
    ]
    assert len(re.findall(r"<canvas", page)) == 2


def test_the_script_is_strict_and_asks_nobody() -> None:
    text = (Path(__file__).resolve().parents[2] / "analysis/report/report.js").read_text()
    assert text.startswith('"use strict";')
    for word in (
        "eval(",
        "fetch(",
        "XMLHttpRequest",
        "import(",
        "WebSocket",
        "innerHTML",
        "http:",
        "https:",
        "Function(",
    ):
        assert word not in text


def test_the_timeline_holds_every_drawn_event_in_order(simulate: Simulate) -> None:
    trace = simulate(link_ns=MS // 5, reduce_ns=MS)
    block = timeline_block(trace, trace.events)
    columns = {name: unpacked(column) for name, column in block["columns"].items()}
    offsets = unpacked(block["offsets"]).astype(int)
    is_drawn = trace.events["end_ns"] > trace.events["start_ns"]
    assert block["count"] == offsets[-1] == is_drawn.sum()
    assert len(offsets) == len(block["ranks"]) * len(TRACKS) + 1
    found = set()
    for lane, rank in enumerate(block["ranks"]):
        for track in range(len(TRACKS)):
            mine = slice(*offsets[lane * len(TRACKS) + track :][:2])
            assert (np.diff(columns["start_ns"][mine]) >= 0).all()
            assert all(
                TRACKS[track] == (LOOKS[look].top, LOOKS[look].bottom)
                for look in columns["look"][mine]
            )
            times = columns["start_ns"][mine] + block["origin_ns"]
            rows = zip(
                times,
                columns["duration_ns"][mine],
                columns["kind"][mine],
                columns["micro_batch"][mine],
                columns["device_bytes"][mine],
                strict=True,
            )
            found |= {(rank, *map(int, row)) for row in rows}
    names = ("kind", "micro_batch", "device_bytes")
    assert found == {
        (
            int(each["rank"]),
            int(each["start_ns"]),
            int(each["end_ns"] - each["start_ns"]),
            *(int(each[n]) for n in names),
        )
        for each in trace.events[is_drawn]
    }


def test_every_kind_has_the_look_of_the_printed_timeline(simulate: Simulate) -> None:
    events = simulate().events[: len(KINDS)].copy()
    events["kind"] = np.arange(len(KINDS))
    for shade in (0, 1):
        events["direction"] = shade
        for kind, number in zip(KINDS, look_numbers(events).tolist(), strict=True):
            if number == NOT_DRAWN:
                assert all(kind not in look.kinds for look in LOOKS)
            else:
                assert kind in LOOKS[number].kinds and LOOKS[number].shade in (None, shade)


def test_of_too_many_events_the_last_whole_steps_are_kept(simulate: Simulate) -> None:
    trace = simulate(steps=6)
    of_step = len(trace.events) // 6
    assert select_events(trace, 10 * of_step)[1] == ""
    kept, note = select_events(trace, 2 * of_step + 1)
    assert np.unique(kept["step"]).tolist() == [4, 5]
    assert note == "shown: 2 steps from 4 on, of 6 steps in the trace"
    least, note = select_events(trace, of_step // 2)
    assert np.unique(least["rank"]).tolist() == [0, 1] and "first 2 ranks, of 4" in note


def test_medians_of_a_stage_add_up_its_segments(simulate: Simulate) -> None:
    trace = simulate(steps=3, forward_ns=2 * MS, backward_ns=6 * MS)
    whole = stage_medians_s(trace)
    assert sorted(whole) == [0, 1, 2, 3] and whole[2] == pytest.approx({"F": 0.002, "B": 0.006})
    twice = trace.events.copy()
    twice["segment"] += 1
    trace.events = np.concatenate([trace.events, twice])
    assert stage_medians_s(trace)[2] == pytest.approx({"F": 0.004, "B": 0.012})


def test_predictions_stand_beside_what_was_found(simulate: Simulate, tmp_path: Path) -> None:
    trace = simulate(source="emulated")
    trace.memory_plan = json.dumps({"predicted": {"step_s": 0.05, "peak_bytes": [9 << 20] * 4}})
    trace.attributes |= {
        "peak_activation_bytes": [4 << 20] * 4,
        "predicted_activation_bytes": [3 << 20] * 4,
    }
    trace.attributes["peak_allocated_bytes"] = [8 << 20] * 3 + [-1]
    text = build_report(
        [write_run(tmp_path / "run", trace)], tmp_path / "report.html"
    ).path.read_text()
    table = text[text.index('id="predictions-0"') :].split("</table>")[0]
    assert "Predicted beside emulated" in text and 'data-value="50.0"' in table
    assert table.count("peak, activations [MiB]") == 4 and table.count("peak, allocated [MiB]") == 3
    assert table.count(">-25.00<") == 4


def test_several_runs_have_a_scaling_section_and_share_the_room(
    simulate: Simulate, tmp_path: Path
) -> None:
    runs = [write_run(tmp_path / f"run{n}", simulate(partitions=n, steps=4)) for n in (2, 4)]
    made = build_report(runs, tmp_path / "report.html")
    text = made.path.read_text()
    assert made.runs == tuple(map(str, runs)) and made.notes == ()
    assert (
        'id="study"' in text
        and 'id="points"' in text
        and "base of gems_master" in text
        and 'id="rules"' in text
    )
    assert text.count('class="views"') == 2 and text.count("data:image/svg+xml;base64,") == 5


def test_of_very_many_runs_some_have_sections() -> None:
    runs = [Path(str(n)) for n in range(100)]
    kept = spread(runs, 16)
    assert len(kept) == len(set(kept)) == 16 and (kept[0], kept[-1]) == (runs[0], runs[-1])
    assert spread(runs[:3], 16) == runs[:3]


def test_runs_are_found_by_path_by_name_and_by_study(simulate: Simulate, tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / f"mine-0000000{n}", simulate(steps=2)) for n in (1, 2))
    study = tmp_path / "sweep"
    study.mkdir()
    points = [
        {"point": "a", "run_folder": second.name},
        {"point": "b", "run_folder": "gone-00000003"},
    ]
    (study / "study.json").write_text(
        json.dumps({"points": [*points, {"run_folder": "../out"}, 3]})
    )
    assert find_runs(["mine"], tmp_path) == [first, second]
    assert find_runs([first.name, str(first)], tmp_path) == [first]
    assert find_runs(["sweep"], tmp_path) == [second]
    assert find_runs([str(first / "trace.h5")], tmp_path) == [first / "trace.h5"]
    assert default_out(["sweep"], [second], tmp_path) == study / "report.html"
    assert default_out([first.name], [first], tmp_path) == first / "report.html"
    assert default_out(["mine"], [first, second], tmp_path) == tmp_path.resolve() / "report.html"
    with pytest.raises(ConfigError, match="nearest: mine-0000000"):
        find_runs(["mime"], tmp_path)


def test_a_run_that_was_stopped_has_a_page_that_says_so(
    write_parts: Callable[..., Trace], tmp_path: Path
) -> None:
    write_parts(tmp_path / "run", {"steps": 3}, {1: 2})
    made = build_report([tmp_path / "run"], tmp_path / "report.html")
    assert any("rank 1 finished 2 steps" in note for note in made.notes)
    assert "rank 1 finished 2 steps" in made.path.read_text()


def test_a_trace_without_events_has_a_page(simulate: Simulate, tmp_path: Path) -> None:
    trace = simulate()
    trace.events = trace.events[:0]
    made = build_report([write_run(tmp_path / "run", trace)], tmp_path / "report.html")
    assert made.num_events == 0 and "holds no events" in made.path.read_text()


def test_the_command_writes_beside_the_run_and_refuses_in_one_line(
    simulate: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "mine-00000001", simulate())
    assert main(["report", "mine", "--runs-dir", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["path"] == str(folder / "report.html")
    assert (
        answer["size_bytes"] == Path(answer["path"]).stat().st_size and answer["num_events"] > 100
    )
    assert main(["report", str(folder), "--out", str(tmp_path / "none" / "x.html")]) == 2
    assert capsys.readouterr().err.startswith("analysis: out=")
    assert main(["report", str(tmp_path / "gone")]) == 2
    assert "no run, no study" in capsys.readouterr().err


def test_the_median_step_has_its_interval_or_of_few_steps_their_range(simulate: Simulate) -> None:
    for num_steps, words in ((4, "fastest to slowest"), (9, "95 % interval")):
        trace = simulate(steps=num_steps)
        trace.steps["end_ns"] += np.arange(num_steps) ** 2 * 100_000
        trace.steps["start_ns"] = np.roll(trace.steps["end_ns"], 1) * (np.arange(num_steps) > 0)
        figure = key_figures(run_metrics(trace), trace)[1]
        assert figure.name == "step time, median" and figure.detail.startswith(words), figure
