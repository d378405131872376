"""MkDocs hooks: parts of the reference that are generated from the code, so that they cannot differ from it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from gems.config.fields import Key

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each `<!-- name -->` that names a generated part, and `<!-- include FILE -->` by the file's code."""
    markdown = re.sub(
        r"^<!-- include (\S+) -->$", lambda m: _code(ROOT / m[1]), markdown, flags=re.M
    )
    return re.sub(
        r"^<!-- ([a-z-]+) -->$",
        lambda m: PARTS[m[1]]() if m[1] in PARTS else m[0],
        markdown,
        flags=re.M,
    )


def _code(path: Path) -> str:
    return f"```python\n{path.read_text().rstrip()}\n```"


def configuration() -> str:
    """Return a section for each group of the schema, with a table of its keys."""
    from gems.config.fields import keys
    from gems.config.overrides import options_of
    from gems.config.schema import RunSpec, StudyConfig

    groups = {f.name: f.default_factory for f in fields(RunSpec) if is_dataclass(f.default_factory)}
    found = list(keys(RunSpec))
    top = [key for key in found if key.name.split(".")[0] not in groups]
    sections = ["## Top level\n\n" + _key_table(top)]
    for name, group in (*groups.items(), ("study", StudyConfig)):
        options = options_of(name)
        chosen = (
            f"\n\nOptions, `{name}=`: " + ", ".join(f"`{option}`" for option in options) + "."
            if options
            else ""
        )
        mine = [key for key in found if key.name.startswith(f"{name}.")]
        sections.append(
            f"## {name}\n\n{_docstring(group)}{chosen}\n\n{_key_table(mine) if mine else ''}"
        )
    return "\n\n".join(sections)


def _key_table(found: Iterable[Key]) -> str:
    rows = ["| key | type | default | meaning | allowed |", "|---|---|---|---|---|"]
    for key in found:
        kind = (
            getattr(key.kind, "__name__", str(key.kind))
            if not get_args(key.kind)
            else str(key.kind).replace("typing.", "")
        )
        default = json.dumps(key.default).strip('"') or '""'
        allowed = _escaped(key.rule.allowed(key.entry).removeprefix("must be "))
        help_text = _escaped(key.rule.help)
        rows.append(
            f"| `{key.name}` | `{kind}{' or null' * key.is_optional}` | `{default}` | {help_text} |"
            f" {allowed} |"
        )
    return "\n".join(rows)


def _escaped(value: object) -> str:
    return str(value).replace("|", "\\|")


def _docstring(thing: object) -> str:
    return "\n".join(line.strip() for line in (thing.__doc__ or "").strip().splitlines())


def commands() -> str:
    """Return a table of verbs for each of the three programs."""
    from analysis.__main__ import VERBS as ANALYSIS
    from gems.__main__ import VERBS as GEMS
    from gems.cli.framework import command_name
    from jobs.__main__ import VERBS as JOBS

    tables = []
    for program, verbs in (("gems", GEMS), ("jobs", JOBS), ("analysis", ANALYSIS)):
        rows = [f"| `{name}` | {_escaped(verb.help)} |" for name, verb in verbs.items()]
        tables.append(
            "\n".join([f"## {program}", "", f"| `{command_name(program)}` | |", "|---|---|", *rows])
        )
    return "\n\n".join(tables)


def make_help() -> str:
    """Return what `make help` prints."""
    return subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.rstrip()


def folders() -> str:
    """Return a table of the packages' folders, in the order in which they may import, by their docstrings."""
    order = _folder_order()
    rows = ["| folder | holds |", "|---|---|"]
    for name in order:
        init = ROOT / name.replace(".", "/") / "__init__.py"
        if not init.exists():
            init = ROOT / (name.replace(".", "/") + ".py")
        text = (ast.get_docstring(ast.parse(init.read_text())) or "").split("\n\n")[0]
        rows.append(f"| `{name.replace('.', '/')}` | {_escaped(' '.join(text.split()))} |")
    return "\n".join(rows)


def _folder_order() -> list[str]:
    """Return the folders in the order that tests/test_structure.py holds."""
    tree = ast.parse((ROOT / "tests" / "test_structure.py").read_text())
    for node in tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "FOLDERS"
        ):
            assert isinstance(node.value, ast.Dict)
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError("tests/test_structure.py has no FOLDERS")


def trace_columns() -> str:
    """Return a table of columns for each table of a trace."""
    from gems.trace.layout import COLUMNS

    tables = []
    for name, columns in COLUMNS.items():
        rows = [
            f"| `{column}` | `{kind}` | {units} | {_escaped(text)} |"
            for column, kind, units, text in columns
        ]
        tables.append(
            "\n".join(
                [
                    f"## /{name}",
                    "",
                    "| column | type | units | meaning |",
                    "|---|---|---|---|",
                    *rows,
                ]
            )
        )
    return "\n\n".join(tables)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "configuration": configuration,
    "folders": folders,
    "make-help": make_help,
    "trace-columns": trace_columns,
}
