"""Prove and measure on this machine's GPU.

`python -m scripts.gpu 1|2|3`, or render what was measured as a page.
`scripts/on_gpu.sh` prepares a bare machine first. `--out FILE` takes the lines (runs/gpu.jsonl),
`--only TEXT` chooses rows by their names, `--small` takes small sizes, as a device made of host
memory gets them by itself; what is measured there is printed, and kept only with `--out`. `--render
FILE` prints the page, or writes it to `--page`; without FILE it is that of nothing measured. The
exit code is 1 if a row failed.
"""

from __future__ import annotations

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
from scripts.gpu.record import Line, Machine, has_failed, read_lines, run_part

OUT = Path("runs/gpu.jsonl")
FACTS_LIMIT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part or render the page: one line on stderr and exit code 2 for bad input."""
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    given = options(
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
        if given.render is not None:
            return _render(given.render, given.page)
        lines = _measure(_part(given.number), given.only, given.small, given.out, given.limit_s)
    except GemsError as refused:
        print("on_gpu:", refused, file=sys.stderr)
        return refused.exit_code
    return answered(lines, has_failed(lines), given.json)


def _part(word: str | None) -> int:
    if word is None or not word.isdigit() or int(word) not in TITLES:
        allowed = ", ".join(f"{part} ({title.lower()})" for part, title in TITLES.items())
        raise ConfigError("PART", word or "", f"allowed are {allowed}", "name one of them")
    return int(word)


def _measure(part: int, only: str, is_small: bool, out: Path | None, limit_s: float) -> list[Line]:
    """Run the rows of a part, and return their lines.

    Raises:
        ConfigError: no row is named so, torch sees no GPU here, or the file cannot be written.
    """
    begin_s = time.monotonic()
    if not any(only in row.name for row in rows_of(part)):
        names = ", ".join(row.name for row in rows_of(part))
        raise ConfigError(
            "--only", only, f"is in no name of a row of part {part}", f"they are {names}"
        )
    machine = _machine()
    rows = rows_of(part, is_small or machine.is_fake, machine.is_fake)
    if out is None and not machine.is_fake:
        out = OUT
    left_s = limit_s - MARGIN_S - (time.monotonic() - begin_s)
    return run_part(part, [row for row in rows if only in row.name], machine, out, left_s)


def _machine() -> Machine:
    found = in_child(cases.facts, limit_s=FACTS_LIMIT_S)
    if "failed" in found:
        raise ConfigError(
            "GPU",
            None,
            f"{found['failed']}: nothing was measured",
            "run it on a machine with a GPU",
        )
    return Machine(**found)


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
