"""The table of `analysis scaling --table`: each forecast of a series, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.scaling.forecasts import PUBLISHED
from analysis.scaling.published import NOT_VERIFIED
from analysis.scaling.step_time import MAX_RATIO, WIDEST
from gems.utils.tables import RIGHT, table
from gems.utils.units import number


def published_report(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all series, and what to measure next where a forecast is too uncertain."""
    columns = {
        "series": "",
        "most weight": "",
        "fitted to": "d",
        "accelerators": "d",
        "batch": "d",
        "measured [s]": RIGHT,
        "predicted [s]": RIGHT,
        "95 % interval": RIGHT,
        "error [%]": RIGHT,
    }
    rows = []
    notes = []
    for answer in answers:
        weight = answer["weights"][answer["law"]]
        for point in answer["points"]:
            error = point["error"]
            measured = point["measured_step_s"]
            rows.append(
                (
                    answer["series"],
                    f"{answer['law']} {100 * weight:.0f} %",
                    answer["fit_to"],
                    point["accelerators"],
                    point["global_batch"],
                    "-" if measured is None else number(measured),
                    number(point["predicted_step_s"]),
                    f"{number(point['low_s'])}-{number(point['high_s'])}",
                    "-" if error is None else f"{100 * error:+.1f}",
                )
            )
        unreliable = [
            str(point["accelerators"]) for point in answer["points"] if not point["is_reliable"]
        ]
        if unreliable:
            following = answer["next"]
            why = (
                f"wider than +-{100 * WIDEST:.0f} %, or above {MAX_RATIO:.0f} times the"
                f" {answer['fit_to']} fitted to"
            )
            notes.append(
                f"{answer['series']}: too uncertain for {', '.join(unreliable)} accelerators"
                f" ({why}); to tell the laws apart, measure {following['accelerators']} with a"
                f" global batch of {following['global_batch']}"
            )
    is_published = all(answer["source"] == PUBLISHED for answer in answers)
    title = (
        f"published steps, {NOT_VERIFIED}" if is_published else "forecasts of the table's series"
    )
    return "\n".join([table(columns, rows, title=title), *notes])
