"""Prove and measure on this machine's GPU.

`python -m scripts.gpu` proves, measures and tests the claims within eight minutes: the proofs side
by side where there are cores for it, then the rest one by one in order of value. `python -m
scripts.gpu 1|2|3` runs one of these parts, `--render` makes a page of what was measured.
`scripts/on_gpu.sh` prepares a bare machine first. `--out FILE` takes the lines (runs/gpu.jsonl),
`--only TEXT` chooses rows by their names, `--small` takes small sizes, as a device made of host
memory gets them by itself; what is measured there is printed, and kept only with `--out`. `--render
FILE` prints the page, or writes it to `--page`; without FILE it is that of nothing measured. The
exit code is 1 if a row failed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gems.errors import ConfigError, GemsError
from scripts.bench.rig import answered, in_child, options
from scripts.gpu import cases
from scripts.gpu.page import page
from scripts.gpu.parts import LIMIT_S, MARGIN_S, TITLES, rows_of
from scripts.gpu.record import Line, has_failed, read_lines, run_part

OUT = Path("runs/gpu.jsonl")
FACTS_LIMIT_S = 60.0
PROOFS = "Prove"  # the part whose rows may run side by side
CORES_OF_A_PROOF = 4  # of which some run on four ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part or render the page: one line on stderr and exit code 2 for bad input."""
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    arguments = options(
        __doc__,
        argv,
        number={"nargs": "?", "metavar": "PART"},
        out=file,
        only="",
        small=False,
        json=False,
        limit_s=LIMIT_S,
        render=file | {"nargs": "?", "const": Path()},
        page=file,
    )
    try:
        if arguments.render is not None:
            return _render(arguments.render, arguments.page)
        lines = _measure(
            _parts(arguments.number),
            arguments.only,
            arguments.small,
            arguments.out,
            arguments.limit_s,
        )
    except GemsError as refused:
        print("on_gpu:", refused, file=sys.stderr)
        return refused.exit_code
    return answered(lines, has_failed(lines), arguments.json)


def _parts(word: str | None) -> tuple[int, ...]:
    if word is None:
        return tuple(TITLES)
    if not word.isdigit() or int(word) not in TITLES:
        allowed = ", ".join(f"{part} ({title.lower()})" for part, title in TITLES.items())
        raise ConfigError("PART", word, f"allowed are {allowed}", "name one of them, or none")
    return (int(word),)


def _measure(
    parts: Sequence[int], only: str, is_small: bool, out: Path | None, limit_s: float
) -> list[Line]:
    """Run the rows of some parts, and return their lines.

    Raises:
        ConfigError: No row is named so, torch sees no GPU here, or the file cannot be written.
    """
    end_s = time.monotonic() + limit_s - MARGIN_S
    names = [row.name for part in parts for row in rows_of(part)]
    if not any(only in name for name in names):
        raise ConfigError("--only", only, "is in no name of a row", f"they are {', '.join(names)}")
    machine = _machine()
    if out is None and not machine["is_fake"]:
        out = OUT
    lines = []
    for part in parts:
        rows = rows_of(part, is_small or machine["is_fake"], machine["is_fake"])
        chosen = [row for row in rows if only in row.name]
        is_proof = TITLES[part] == PROOFS
        side_by_side = max(1, (os.cpu_count() or 1) // CORES_OF_A_PROOF) if is_proof else 1
        lines += run_part(part, chosen, machine, out, end_s - time.monotonic(), side_by_side)
    return lines


def _machine() -> dict[str, Any]:
    facts = in_child(cases.facts, limit_s=FACTS_LIMIT_S)
    if "failed" in facts:
        raise ConfigError(
            "GPU",
            None,
            f"{facts['failed']}: nothing was measured",
            "run it on a machine with a GPU",
        )
    return facts


def _render(path: Path, out: Path | None) -> int:
    text = page(read_lines(path) if path != Path() else [])
    if out is None:
        print(text, end="")
        return 0
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(
            "--page", out, f"cannot be written ({error.strerror})", "choose another file"
        ) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
