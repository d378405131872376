"""The pages of the documentation as data: code blocks, links, and the words in code font.

An HTML comment in the lines before a block says how its commands are tested:

    <!-- docs-test: add WORDS -->      words that make each command of the block quick; to a make line they go into ARGS
    <!-- docs-test: setup COMMAND -->  a command that is run first and not shown
    <!-- docs-test: run-by FILE -->    the commands need SLURM or minutes: this file of the repository runs them
    <!-- docs-test: needs WHAT -->     nothing here can run the commands: what they need
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DIRECTIVE = re.compile(r"<!-- docs-test: (add|setup|run-by|needs) (.+) -->")
FENCE = re.compile(r"^```(\w*)$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
ARGS = re.compile(r"""\bARGS=("[^"]*"|'[^']*'|\S*)""")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code: its language, the number of its first line, and the directives before it."""

    line: int
    language: str
    text: str
    added: str = ""
    setup: tuple[str, ...] = ()
    run_by: str | None = None
    needs: str | None = None

    def commands(self) -> list[str]:
        """Return the shell commands as they are run.

        Without comments, lines joined, with the words added.
        """
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in joined.splitlines()]
        return [with_words(line, self.added) for line in lines if line]


def with_words(command: str, words: str) -> str:
    """Return a command with more words.

    Before a redirection, and inside of ARGS where make takes them.
    """
    if not words:
        return command
    if not command.startswith("make "):
        before, arrow, file = command.partition(" > ")
        return f"{before} {words}{arrow}{file}"
    given = ARGS.search(command)
    if given is None:
        return f'{command} ARGS="{words}"'
    value = given[1].strip("\"'")
    return f'{command[: given.start()]}ARGS="{value} {words}"{command[given.end() :]}'


def name(page: Path) -> str:
    """Return a page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    added = ""
    setup = []
    run_by = None
    needs = None
    start = 0
    language = None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if language is not None:
            if line != "```":
                lines.append(line)
                continue
            found.append(
                Block(start, language, "\n".join(lines), added, tuple(setup), run_by, needs)
            )
            added = ""
            setup = []
            run_by = None
            needs = None
            language = None
        elif fence:
            start = number + 1
            language = fence[1]
            lines = []
        elif directive := DIRECTIVE.fullmatch(line):
            kind, value = directive.groups()
            if kind == "add":
                added = value
            elif kind == "setup":
                setup.append(value)
            elif kind == "run-by":
                run_by = value
            else:
                needs = value
        elif line.strip():
            assert not (added or setup or run_by or needs), (
                f"line {number}: a docs-test comment without a block below it"
            )
    assert language is None, f"line {start}: a block without an end"
    return found


def prose(text: str) -> str:
    """Return a page without its fenced blocks and comments."""
    return re.sub(
        r"<!--.*?-->", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.S
    )


def links(text: str) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return LINK.findall(prose(text))


def code_words(text: str) -> list[str]:
    """Return what stands in code font in the prose of a page."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(text), flags=re.M)
    return {
        re.sub(r"[\s_-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles
    }
