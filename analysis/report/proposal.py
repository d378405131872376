"""The section for a compute-time proposal: strong and weak scaling, the request, and the method."""

from __future__ import annotations

from analysis.plots.figure import SOURCE_MARKS, as_svg
from analysis.plots.scaling import scaling_figure
from analysis.report.html import Cell, Html, Table, element, picture
from analysis.scaling.fits import fit_points
from analysis.scaling.proposal import Proposal

COLUMNS = {
    "scaling": "scaling",
    "schedule": "series",
    "source": "source",
    "ranks": "GPUs",
    "step_median_s": "step, median [s]",
    "step_low_s": "from [s]",
    "step_high_s": "to [s]",
    "images_per_s": "images/s",
    "parallel_efficiency": "efficiency",
    "parallel_efficiency_low": "from",
    "parallel_efficiency_high": "to",
    "gpu_hours": "GPU-hours",
}


def proposal_section(proposal: Proposal) -> Html:
    """Build the section, which is printed on separate pages."""
    figures = [
        picture(
            as_svg(scaling_figure(points, fit_points(points))),
            f"{kind} scaling: images/s and efficiency over GPUs",
        )
        for kind, points in proposal.points.items()
    ]
    rows: list[tuple[Cell, ...]] = [tuple(row[key] for key in COLUMNS) for row in proposal.rows]
    sources = dict.fromkeys(row["source"] for row in proposal.rows)
    marks = " and ".join(SOURCE_MARKS[source] for source in sources)
    return element(
        "section",
        element("h2", "Scaling, for a compute-time proposal"),
        element("p", f"All figures: {marks}."),
        *figures,
        Table("asked", "Points", tuple(COLUMNS.values()), rows, (3,) * len(COLUMNS)).html(),
        *(element("p", note, class_="note") for note in proposal.missing),
        element("p", element("strong", f"Asked for: {proposal.request}")),
        element("p", f"Method. {proposal.method}"),
        id="proposal",
    )
