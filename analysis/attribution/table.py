"""An attribution as text, as one object for JSON, and as rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.attribution.causes import CAUSES, Attribution
from gems.utils.tables import table
from gems.utils.units import counted, time_unit

COLUMNS = ("rank", "part", "time_s", "share_of_step", "own_s")
LABELS = {cause: {"point_to_point": "point-to-point", "all_reduce": "all-reduce"}.get(cause, cause) for cause in CAUSES}


def attribution_dict(found: Attribution) -> dict[str, Any]:
    """Return an attribution as plain data: seconds of a step for the run, and lists of them by rank."""
    return {
        **{name: getattr(found, name) for name in ("source", "num_steps", "step_s", "ideal_s", "efficiency")},
        "causes_s": found.run_s, "rank_causes_s": found.causes_s, "rank_own_s": found.own_s,
        "residual_s": found.residual_s, "pace": found.times_from,
    }  # fmt: skip


def attribution_table(found: Attribution, with_ranks: bool = False) -> str:
    """Return a row for each part of the step, in time and percent of it.

    With `with_ranks` followed by a row for each rank.
    """
    unit = time_unit([found.step_s])
    parts = {"ideal": found.ideal_s} | {LABELS[cause]: time_s for cause, time_s in found.run_s.items()}
    rows = [
        (name, time_s / unit.size, _percent(time_s, found)) for name, time_s in (*parts.items(), ("step", found.step_s))
    ]
    head = f"{found.source} run, mean of {counted(found.num_steps, 'step')}; undisturbed times from {found.times_from}"
    shown = table({"": "", f"time [{unit.name}]": ".3f", "of the step [%]": ".2f"}, rows, title=head, indent=2)
    return f"{shown}\n\n{_rank_table(found)}" if with_ranks else shown


def _rank_table(found: Attribution) -> str:
    """Return a row for each rank, in percent of the step; ideal and causes sum to 100."""
    shares = {cause: [_percent(time_s, found) for time_s in found.causes_s[cause]] for cause in CAUSES}
    used = {LABELS[cause]: of_ranks for cause, of_ranks in shares.items() if any(map(abs, of_ranks))}
    rows = [
        (rank, _percent(found.ideal_s, found), *of_rank)
        for rank, of_rank in enumerate(zip(*used.values(), strict=True))
    ]
    columns = {"rank": "d", "ideal": ".2f"} | dict.fromkeys(used, ".2f")
    return table(columns, rows, title="% of the step", indent=2)


def largest_line(found: Attribution, count: int = 3) -> str:
    """Return the largest causes in one line: `bubble 27.3, host 1.2`."""
    parts = [f"{LABELS[cause]} {_percent(time_s, found):.1f}" for cause, time_s in found.largest(count)]
    return ", ".join(parts) or "nothing"


def attribution_rows(found: Attribution) -> list[dict[str, object]]:
    """Return a row for each part of the step, for the run (rank empty) and for each rank."""
    rows: list[tuple[object, ...]] = [("", "ideal", found.ideal_s, found.efficiency, found.ideal_s)]
    for rank in (None, *range(len(found.causes_s[CAUSES[0]]))):
        for cause in CAUSES:
            own = found.own_s[cause]
            time_s = found.run_s[cause] if rank is None else found.causes_s[cause][rank]
            own_s = float(np.mean(own)) if rank is None else own[rank]
            rows.append(("" if rank is None else rank, cause, time_s, time_s / found.step_s, own_s))
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def _percent(time_s: float, found: Attribution) -> float:
    share = 100 * time_s / found.step_s if found.step_s else 0.0
    return 0.0 if abs(share) < 0.005 else share
