"""The page itself: head, styles, sections and script in one file that loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

from analysis.report.canvas_data import TRACKS, looks_json
from analysis.report.markup import Html, data_element, element, joined
from analysis.report.run_section import RunSection, source_mark
from analysis.report.table import Cell, Table

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
SCRIPT, STYLES = "report.js", "report.css"


def page(sections: Sequence[RunSection], study: Html | None, notes: Sequence[str]) -> str:
    """Return the whole page; every text in it that a run brought along is escaped."""
    name = sections[0].title if len(sections) == 1 else f"{len(sections)} runs"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{name} - gems-train"),
        element("style", _own_file(STYLES)),
    )
    made = datetime.now(UTC).isoformat(timespec="minutes")
    sources = dict.fromkeys(section.source for section in sections)
    marks = joined(joined([source_mark(source), " "]) for source in sources)
    header = element(
        "header", element("h1", "gems-train report"), element("p", marks, f"page made {made}"),
        *(element("p", note, class_="note") for note in notes if len(sections) > 1),
    )  # fmt: skip
    overview = [_overview(sections).html()] if len(sections) > 1 else []
    main = element("main", *overview, *([study] if study else []), *(section.html for section in sections))
    body = element(
        "body",
        header,
        main,
        element("div", class_="tip", id="tip", role="status", hidden=True),
        data_element("looks", {"looks": looks_json(), "tracks": TRACKS}),
        element("script", _own_file(SCRIPT)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _overview(sections: Sequence[RunSection]) -> Table:
    """Return the key figures of all runs side by side."""
    rows: list[tuple[Cell, ...]] = [
        (place, section.title, section.source, *section.overview.values())
        for place, section in enumerate(sections, start=1)
    ]
    return Table("overview", "Runs", ("no.", "run", "source", *sections[0].overview), rows)


def _own_file(name: str) -> Html:
    """Read a file of this package that goes into the page unchanged."""
    return Html(files(__package__).joinpath(name).read_text(encoding="utf-8"))
