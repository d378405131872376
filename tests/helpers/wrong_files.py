"""Files that hold something else than their place says, for commands that read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

JUNK = [
    b"",
    b"\0",
    b"\xff\xfe\x00junk",
    bytes(range(256)),
    b"{",
    b"[",
    b"a: [1\nb: 2",
    b"\t- x",
    b"null",
    b"5",
    b"[]",
    b"{}",
    b"true",
    b'"x"',
    b"a: &a [*a]",
    b"!!python/object/apply:os.system ['touch owned']",
    b"? [a]\n: b",
    b"---\na\n---\nb",
    b"[" * 3000,
    b"{a: " * 1500,
    b"\x89HDF\r\n\x1a\n" + bytes(64),
    b"<html></html>",
    b"1e400",
    b"NaN",
    b"%YAML 9",
    b"a: 'b",
    b"@",
    b"\xef\xbb\xbf{}",
]
YAMLS = [
    "defaults: 5",
    "defaults: [5]",
    "defaults: [no_such]",
    "defaults: [{no_such: x}]",
    "defaults: [{override /model: no_such}]",
    "defaults: [{override model: [}]",
    "defaults: [{override /no_such: x}]",
    "parallel: 5",
    "parallel: [1]",
    "parallel: null",
    "seed: [1]",
    "seed: {a: 1}",
    "no_such: 1",
    "model: {no_such: 1}",
    "parallel: {partitions: x}",
    "parallel: {partitions: -1}",
    "train: {steps: 1e40}",
    "name: null",
    'name: "a\\0b"',
    'name: "a\\nb"',
    'runs_dir: "a\\0b"',
    "name: ${oops}",
    "name: ${name}",
    "seed: !!binary aGVsbG8=",
    "seed: 2020-01-01",
    "optimizer: {lr: .nan}",
    "optimizer: {lr: .inf}",
    "cluster: {environment: {A: [1]}}",
    'cluster: {python: "a\\0b"}',
    "cost: {times: {a: 1}}",
    "cost: {times: [[1]]}",
    "model: {target: 5}",
    "? {a: b}\n: c",
    "1: 2",
    "null: 3",
    "true: 1",
    "[a]: 1",
    "parallel: {1: 2}",
    "parallel: {boundaries: [0, x]}",
    "parallel: {boundaries: {0: 1}}",
    "model: ???",
    "seed: ???",
    "cluster: {limits: 5}",
    "cluster: {limits: [5]}",
    "cluster: {limits: [{minutes: -1}]}",
    "cluster: {limits: [{no_such: 1}]}",
    "cluster: {setup: [{a: b}]}",
    "defaults: [_self_, _self_]",
    "defaults: [mine]",
    "defaults: [/experiment/mine]",
    "hydra: 5",
    "hydra: {run: 5}",
]
SCHEDULE: dict[str, Any] = {
    "schema": "gems.schedule/1",
    "name": "x",
    "ranks": 1,
    "stages": 1,
    "micro_batches": 2,
    "directions": 1,
    "placement": [[0]],
    "actions": [[["F", 0, 0, 0], ["B", 0, 0, 0], ["F", 0, 0, 1], ["B", 0, 0, 1]]],
}
PROFILE: dict[str, Any] = {
    "schema": "gems.profile/1",
    "model": "resnet",
    "height_px": 32,
    "width_px": 32,
    "micro_batch_size": 1,
    "dtype": "float32",
    "device": "cpu",
    "source": "fake",
    "layers": [{"name": "a", "kind": "conv", "saved_later": [[1, 2]]}],
}
VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    10**40,
    1e300,
    float("nan"),
    "x",
    "",
    [],
    [[]],
    [None],
    [[None]],
    {},
    {"a": 1},
    True,
    [1, 2, 3, 4, 5, 6],
    [["F"]],
    [[["F", 0, 0, 10**9]]],
    [[["Z", 0, 0, 0]]],
    [[["F", -1, 0, 0]]],
    [[["F", 0, 5, 0]]],
    [[["F", 0, 0, None]]],
    [{"name": 5}],
    [{"kind": "a"}],
]
CSVS = [
    "",
    "0F0",
    "0F0,0B0\n\n",
    "0F0,0B0\n0F0",
    "F",
    "0X0",
    "9F0",
    "0F999999999999",
    "0F0;1",
    "(0F0;0B0)OVERLAP_F_B",
    '"',
    "0F0," * 50,
]
STATUS = [
    "status.json",
    "progress.json",
    "result.json",
    "run.yaml",
    "cancelled.json",
    "FAILED.rank0000.json",
]


@dataclass(frozen=True, slots=True)
class Folder:
    """Files by their paths in a folder (None: a folder in the place of a file), and the words that read them.

    In words {} stands for the folder. `named` must be in the line that refuses them.
    """

    files: tuple[tuple[str, bytes | None], ...]
    words: tuple[str, ...]
    named: str = ""
    is_wrong: bool = True

    def make(self, where: Path) -> list[str]:
        """Write the files and gives the command line."""
        for name, data in self.files:
            path = where / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if data is None else path.write_bytes(data)
        return [word.replace("{}", str(where)) for word in self.words]


def changed(document: dict[str, Any]) -> SearchStrategy[bytes]:
    """Return a document of the right schema with one field that is wrong or missing."""
    keys = st.sampled_from(sorted(document))
    return st.one_of(
        st.tuples(keys, st.sampled_from(VALUES)).map(lambda two: document | {two[0]: two[1]}),
        keys.map(lambda key: {name: value for name, value in document.items() if name != key}),
    ).map(lambda made: json.dumps(made).encode())


def _experiment(data: bytes | None) -> Folder:
    words = ("submit", "--dry-run", "--config-dir={}", "experiment=mine")
    return Folder((("experiment/mine.yaml", data),), words, is_wrong=False)


def _in(group: str, data: bytes | None) -> Folder:
    return Folder(
        ((f"{group}/mine.yaml", data),),
        ("submit", "--dry-run", "--config-dir={}", f"{group}=mine"),
        is_wrong=False,
    )


def _schedule(data: bytes | None, name: str = "s.json") -> Folder:
    words = (
        "submit",
        "--dry-run",
        "schedule=file",
        f"schedule.path={{}}/{name}",
        "parallel.micro_batches=2",
        "machine=simulated",
    )
    return Folder(((name, data),), words, is_wrong=False)


def _profile(data: bytes | None, name: str = "p.json") -> Folder:
    return Folder(
        ((name, data),),
        ("submit", "--dry-run", "parallel.partitions=2", f"profile.path={{}}/{name}"),
        "profile.path",
    )


def _checkpoint(key: str, data: bytes | None) -> Folder:
    return Folder((("c/stage0000.txt", data),), ("submit", "--dry-run", f"{key}={{}}/c"), key)


def _study(data: bytes | None) -> Folder:
    return Folder((("s.yaml", data),), ("study", "--dry-run", "study={}/s.yaml"), is_wrong=False)


def _run(name: str, data: bytes | None, verb: str) -> Folder:
    files = {"runs/x-12345678/run.yaml": b"name: x\n", f"runs/x-12345678/{name}": data}
    words = {
        "status": ("status", "runs_dir={}/runs"),
        "one": ("status", "{}/runs/x-12345678"),
        "logs": ("logs", "{}/runs/x-12345678", "--rank", "0"),
        "cancel": ("cancel", "{}/runs/x-12345678", "--yes"),
        "summary": ("analysis", "summary", "{}/runs/x-12345678"),
        "timeline": ("analysis", "timeline", "{}/runs/x-12345678"),
        "scaling": ("analysis", "scaling", "{}/runs/x-12345678"),
    }
    return Folder(tuple(files.items()), words[verb], is_wrong=False)


def _picture(data: bytes | None, verb: str) -> Folder:
    out = ("{}/out.svg",) if verb == "draw" else ("--out", "{}/out.svg")
    return Folder(
        (("answer.json", data),), ("analysis", verb, "{}/answer.json", *out), is_wrong=False
    )


_DATA = st.sampled_from([*JUNK, None])
_YAML = _DATA | st.sampled_from(YAMLS).map(lambda text: b"# @package _global_\n" + text.encode())
_STATES = st.sampled_from(
    ["running", "submitted", "failed", "prepared", "x", "", None, 5, [], {"a": 1}]
)
_STATUS = st.fixed_dictionaries(
    {"state": _STATES},
    optional={
        key: st.sampled_from(VALUES)
        for key in (
            "pid",
            "host",
            "job_id",
            "exit_code",
            "updated_utc",
            "cause",
            "pid_started",
            "step",
            "time_ns",
            "images_per_s",
            "loss",
            "steps",
            "num_steps",
            "rank",
            "utc",
        )
    },
).map(lambda made: json.dumps(made).encode())
MANGLED = st.one_of(
    _YAML.map(_experiment),
    st.sampled_from(YAMLS).map(lambda text: _experiment(b"# @package _global_\n" + text.encode())),
    st.builds(
        _in, st.sampled_from(["model", "data", "cluster", "schedule", "machine", "memory"]), _DATA
    ),
    (_DATA | changed(SCHEDULE)).map(_schedule),
    changed(SCHEDULE).map(_schedule),
    st.sampled_from(CSVS).map(lambda text: _schedule(text.encode(), "s.csv")),
    (_DATA | changed(PROFILE)).map(_profile),
    _DATA.map(lambda data: _profile(data, "p.h5")),
    st.builds(_checkpoint, st.sampled_from(["train.initial_checkpoint", "train.resume"]), _DATA),
    _YAML.map(_study),
    st.builds(
        _run, st.sampled_from(STATUS), _DATA | _STATUS, st.sampled_from(["status", "one", "logs"])
    ),
    st.builds(_run, st.sampled_from(STATUS), _DATA, st.just("cancel")),
    st.builds(
        _run,
        st.sampled_from(["trace.h5", "trace/rank0000.h5"]),
        _DATA,
        st.sampled_from(["summary", "timeline", "scaling"]),
    ),
    st.builds(
        _picture, _DATA | changed(SCHEDULE), st.sampled_from(["draw", "partition", "memory"])
    ),
)
