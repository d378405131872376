"""All events of a trace as CSV: the columns of the trace, whose names carry the units, kinds and streams by name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gems.trace import DTYPES, KINDS, STREAMS, Trace

ROWS = 1 << 14  # of a piece
WORDS = {"kind": np.array(KINDS), "stream": np.array(STREAMS)}


def csv_pieces(trace: Trace) -> Iterator[str]:
    """Yield the head line, and then some thousand rows at a time, in the order of the trace."""
    columns = DTYPES["events"].names or ()
    yield ",".join(columns) + "\r\n"
    for first in range(0, len(trace.events), ROWS):
        part = trace.events[first : first + ROWS]
        shown = [(WORDS[name][part[name]] if name in WORDS else part[name]).tolist() for name in columns]
        yield "".join(",".join(map(str, row)) + "\r\n" for row in zip(*shown, strict=True))
