"""The pages: links lead somewhere, and keys, commands and files that they name are there."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from analysis.__main__ import VERBS as ANALYSIS_VERBS
from gems.__main__ import VERBS as GEMS_VERBS
from gems.config.schema import RunSpec
from jobs.__main__ import VERBS as JOBS_VERBS
from tests.helpers.pages import PAGES, ROOT, Block, anchors, blocks, code_words, links, name, prose

pytestmark = pytest.mark.docs
MAX_README_WORDS = 700
VERBS = {"gems": GEMS_VERBS, "jobs": JOBS_VERBS, "analysis": ANALYSIS_VERBS}
GROUPS = {f.name: f.default_factory for f in fields(RunSpec) if is_dataclass(f.default_factory)}
KEY = re.compile(rf"\b({'|'.join(GROUPS)})\.([a-z]\w*)")
FREE = ("cluster.sbatch", "cluster.environment", "cluster.KEY", "model.kwargs", "metrics.")
FILE = re.compile(r"\b(?:gems|jobs|analysis|conf|scripts|tests|examples|docs)/[\w./-]*\w")
FILE_ENDINGS = ("h5", "json", "png", "safetensors")
MADE = ("conf/cluster/NAME", "conf/experiment/")


def every(find: str) -> list[pytest.param]:
    return [pytest.param(page, id=name(page)) for page in PAGES if find in page.read_text()]


def test_readme_has_few_words(capsys: pytest.CaptureFixture[str]) -> None:
    count = len((ROOT / "README.md").read_text().split())
    with capsys.disabled():
        print(f"\nREADME.md has {count} words of at most {MAX_README_WORDS}")
    assert count <= MAX_README_WORDS


@pytest.mark.parametrize("page", every("]("))
def test_links(page: Path) -> None:
    for link in links(page.read_text()):
        target, _, anchor = link.partition("#")
        if target.startswith("https://"):
            continue
        file = (page.parent / target) if target else page
        assert file.exists(), f"{name(page)} links to {link}"
        assert not anchor or anchor in anchors(file.read_text()), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", every("."))
def test_keys_are_those_of_the_schema(page: Path) -> None:
    text = "\n".join(
        [
            *code_words(page.read_text()),
            *(block.text for block in blocks(page.read_text()) if block.language == "sh"),
        ]
    )
    for group, key in KEY.findall(text):
        if not f"{group}.{key}".startswith(FREE) and f"{group}.{key}" not in (
            "model.path",
            "data.path",
        ):
            known = {f.name for f in fields(GROUPS[group])}
            assert (
                key in known
                or (ROOT / "gems" / group / f"{key}.py").exists()
                or key in FILE_ENDINGS
            ), f"{name(page)} names {group}.{key}"


@pytest.mark.parametrize("page", every("gems"))
def test_verbs_are_those_of_the_programs(page: Path) -> None:
    text = "\n".join(block.text for block in blocks(page.read_text()) if block.language == "sh")
    text += "\n" + "\n".join(code_words(page.read_text()))
    for program, verb in re.findall(r"^(gems|gems-jobs|gems-analysis) (\w[\w-]*)", text, re.M):
        assert verb in VERBS[program.removeprefix("gems-")] or verb == "VERB", (
            f"{name(page)}: {program} {verb}"
        )


@pytest.mark.parametrize("page", every("`make "))
def test_targets_are_those_of_the_makefile(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    known = set(" ".join(re.findall(r"^(?:\.PHONY:|BENCHES =)(.*)$", makefile, flags=re.M)).split())
    for word in code_words(page.read_text()):
        target = re.match(r"make ([a-z][\w-]*)", word)
        assert target is None or target[1] in known, f"{name(page)}: {word}"


@pytest.mark.parametrize("page", every("/"))
def test_files_are_in_the_repository(page: Path) -> None:
    for path in FILE.findall("\n".join(code_words(page.read_text()))):
        is_there = (
            (ROOT / path).exists()
            or (ROOT / f"{path}.py").exists()
            or (ROOT / f"{path}.sh").exists()
        )
        assert is_there or path.startswith(MADE), f"{name(page)} names {path}"


@pytest.mark.parametrize("page", every("```"))
def test_commands_stand_in_blocks_that_are_tested(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language not in ("sh", "text", ""):
            continue
        if block.language != "sh":
            assert not re.search(r"^(make|python3?|gems) ", block.text, flags=re.M), (
                f"{name(page)}:{block.line}"
            )
        assert block.run_by is None or (ROOT / block.run_by).is_file(), (
            f"{name(page)}: no file {block.run_by}"
        )


def test_prose_and_blocks_are_told_apart() -> None:
    text = (
        "# A b\n`model.x` [c](d.md)\n<!-- docs-test: add k=1 -->\n"
        "```sh\nmake run ARGS='a=1' # now\nx \\\n  y > z\n```\n"
    )
    assert (code_words(text), links(text), anchors(text)) == (["model.x"], ["d.md"], {"a-b"})
    assert "make" not in prose(text)
    (block,) = blocks(text)
    assert block == Block(5, "sh", "make run ARGS='a=1' # now\nx \\\n  y > z", "k=1")
    assert block.commands() == ['make run ARGS="a=1 k=1"', "x y k=1 > z"]
    with pytest.raises(AssertionError, match="without a block"):
        blocks("<!-- docs-test: add k=1 -->\ntext\n")
