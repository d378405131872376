"""The page of measurements on GPUs, docs/gpu.md, from the lines of `record`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gems.utils.units import GIB, MIB
from scripts.gpu.parts import TITLES, rows_of
from scripts.gpu.record import Line
from scripts.gpu.row import MEASURED, NOT_MEASURED, NOTES, Row

MACHINE = "machine"  # the row whose figures head those of a GPU
HEAD = """# GPU

What one command proved and measured on a GPU; this page is generated from the lines that the
command wrote.
"""
NOTHING = """
Not measured on a GPU. The tables below say what the three parts will measure. All rows also run on
a CUDA device emulated in host memory (`make test-device ARGS=on_gpu`), without torch's sanitizer
and kernel profiler, which do not support it; those figures say nothing about a GPU and are not
kept.
"""
HOW = """
## Run it

You need one machine with a GPU and torch, and no network. The command ends within eight minutes:
the proofs run side by side, the rest one by one in order of value, each within its limit in
seconds; rows without time left say so. `GEMS_WHEELS` is a folder of wheels that the machine's
Python lacks; if it lacks none, nothing is installed.

<!-- docs-test: needs a machine with a GPU -->
```sh
# where there is a network, with the same version of Python
pip wheel --no-deps -w wheels hydra-core omegaconf antlr4-python3-runtime==4.9.3 \\
    submitit mpi4py mpich
GEMS_WHEELS=wheels scripts/on_gpu.sh         # all; or 1: prove, 2: measure, 3: claims
scripts/on_gpu.sh 2 --only peaks             # one row
cat runs/gpu.jsonl >>docs/gpu.jsonl
python -m scripts.gpu --render docs/gpu.jsonl --page docs/gpu.md
```

Each row runs in its own processes. As soon as it ends, its line is appended to `runs/gpu.jsonl` (or
`--out`): figures, or the reason why there are none, with hardware, versions, date, command and
commit. The file keeps the lines of earlier runs; the newest line of each GPU and row counts. Rows
without time left are recorded as not measured.
"""
UNITS: tuple[tuple[str, str, float, str], ...] = (
    ("bytes_per_s", "GB/s", 1e-9, ".1f"),
    ("images_per_s", "images/s", 1.0, ".2f"),
    ("_bytes", "MiB", 1 / MIB, ".1f"),
    ("_s", "ms", 1e3, ".2f"),
    ("_ms", "ms", 1.0, ".3f"),
    ("_px", "px", 1.0, "d"),
    ("rel_error", "", 1.0, ".1e"),
    ("error", "", 1.0, "+.3g"),
    ("_loss", "", 1.0, ".4f"),
)
FACTS = {
    "gpu": "GPU",
    "num_gpus": "GPUs",
    "gpu_bytes": "its memory",
    "compute_capability": "compute capability",
    "cpu": "processor",
    "num_cores": "cores",
    "host_bytes": "host memory",
}


def page(lines: Sequence[Line]) -> str:
    """Return the page's text; lines of a device that is no GPU are left out."""
    real = [line for line in lines if not line["is_fake"]]
    gpus = list(dict.fromkeys(line["hardware"]["gpu"] for line in real))
    parts = [HEAD] if gpus else [HEAD, NOTHING]
    for gpu in gpus:
        parts.append(_of_gpu(gpu, [line for line in real if line["hardware"]["gpu"] == gpu]))
    return "".join([*parts, *([] if gpus else [_planned()]), HOW])


def _planned() -> str:
    """Return the tables of planned measurements."""
    text = ""
    for part, title in TITLES.items():
        cells = [(row.name, row.question, f"{row.limit_s:.0f}") for row in rows_of(part)]
        text += f"\n## {part}. {title}\n\n" + table(("row", "question", "at most [s]"), cells)
    return text


def _of_gpu(gpu: str, lines: Sequence[Line]) -> str:
    # what was not measured once more, for want of time, leaves what was measured before
    by_value = sorted(lines, key=lambda line: line["status"] != NOT_MEASURED)
    newest = {(line["part"], line["row"]): line for line in by_value}
    last = max(lines, key=lambda line: line["date"])
    shown = {FACTS.get(key, key): _fact(key, value) for key, value in last["hardware"].items()} | {
        key: _cell(value, "") for key, value in last["versions"].items()
    }
    text = f"\n## {gpu}\n\n" + table(("machine", ""), [*shown.items()])
    for part, title in TITLES.items():
        text += f"\n### {part}. {title}\n"
        known = rows_of(part)
        gone = [
            line["row"]
            for of, line in newest.items()
            if of[0] == part and all(line["row"] != r.name for r in known)
        ]
        for name, row in [*((row.name, row) for row in known), *((name, None) for name in gone)]:
            if name != MACHINE:  # shown above
                text += _row(name, row, newest.get((part, name)))
    return text


def _row(name: str, row: Row | None, line: Line | None) -> str:
    """Return one row: its question, its figures or the error, its date and command."""
    head = f"\n**{name[:1].upper()}{name[1:]}.** {row.question if row else ''}".rstrip()
    if line is None:
        return f"{head} Not measured on a GPU.\n"
    commit, _, is_dirty = line["commit"].partition("-")
    changed = " with changes" if is_dirty else ""
    how = f"`{line['command']}`, {line['date']}, commit {commit[:12]}{changed}."
    why = "" if line["status"] == MEASURED and not line["reason"] else f" {_sentence(line)}"
    figures = line["figures"]
    columns = list(
        (row and row.columns.split()) or dict.fromkeys(key for figure in figures for key in figure)
    )
    notes = [key for figure in figures for key in figure if key in NOTES]
    columns += [key for key in dict.fromkeys(notes) if key not in columns]
    columns = [
        key for key in columns if any(figure.get(key) not in (None, "") for figure in figures)
    ]
    rows = [[_cell(figure.get(key), key) for key in columns] for figure in figures]
    return f"{head}{why} {how}\n" + (
        f"\n{table([_heading(key) for key in columns], rows)}" if columns else ""
    )


def _sentence(line: Line) -> str:
    said = "Measured, with" if line["status"] == MEASURED else f"{line['status'].capitalize()}:"
    return f"{said} {_escaped(line['reason'])}."


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n" for cells in lines
    )


def _unit(key: str) -> tuple[str, str, float, str]:
    found = next(
        (unit for unit in UNITS if key.endswith(unit[0]) or key == unit[0].lstrip("_")), None
    )
    return found or ("", "", 1.0, ".3g")


def _heading(key: str) -> str:
    """Return a column's heading: the figure's name and in brackets the unit that it is shown in."""
    ending, unit, _, _ = _unit(key)
    if not unit:
        return key.removeprefix("num_").replace("_", " ")
    return f"{key.removesuffix(ending).strip('_').replace('_', ' ') or 'speed'} [{unit}]"


def _cell(value: Any, key: str) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        _, unit, scale, spec = _unit(key)
        if isinstance(value, int) and not unit:
            return str(value)
        return format(round(value * scale) if spec == "d" else value * scale, spec)
    return _escaped(str(value))


def _fact(key: str, value: Any) -> str:
    return f"{value / GIB:.1f} GiB" if key.endswith("_bytes") and value else _cell(value, "")


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
