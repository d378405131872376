"""Notifications of a run's end: over HTTP, to a command, and by the batch system's mail."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import write_json
from jobs.launch import notify as notify_module
from jobs.launch.batch import BatchJob
from jobs.launch.launch import launch
from jobs.launch.notify import describe, notify, send
from tests.helpers.job_helpers import (
    Capture,
    MonkeyPatch,
    Prepared,
    Resolved,
    Tiny,
    refused,
    script_of,
    with_cluster,
)

pytestmark = pytest.mark.timeout(120)


class Hook:
    """A web server on this machine that keeps what it is sent, and answers with `code`."""

    def __init__(self) -> None:
        self.code, self.got = 200, list[dict[str, Any]]()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.append(
                    {"path": self.path, "type": self.headers["Content-Type"], **json.loads(text)}
                )
                self.send_response(hook.code)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?key=secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook(monkeypatch: MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def told(spec: RunSpec, *targets: str) -> RunFolder:
    """Prepare a run that tells these."""
    return prepare(with_cluster(spec, notify=[*targets]))


@pytest.fixture
def folder(resolved: Resolved, tmp_path: Path) -> Prepared:
    """Prepare a run that tells some targets."""
    return lambda *targets: told(replace(resolved(), runs_dir=str(tmp_path / "runs")), *targets)


def test_a_run_of_this_machine_tells_its_end(
    tiny: Tiny, hook: Hook, collected: list[RunFolder]
) -> None:
    _, spec = tiny()
    run = told(replace(spec, name="another"), hook.url)
    assert launch(run, run.read_spec(), echo=False) == 0
    (got,) = hook.got
    assert (got["path"], got["type"]) == ("/hook?key=secret", "application/json")
    assert (got["event"], got["state"], got["exit_code"], got["run"]) == (
        "ended",
        "finished",
        0,
        run.path.name,
    )


def test_a_job_tells_once_how_its_run_failed(
    tiny: Tiny, hook: Hook, collected: list[RunFolder], monkeypatch: MonkeyPatch
) -> None:
    _, spec = tiny(TINY="raise:1", CODE="5")
    run = told(replace(spec, name="another"), hook.url)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    run.write_status("submitted", job_id="41")
    with pytest.raises(SystemExit):
        BatchJob((str(run.path),))()
    (got,) = hook.got
    assert (got["event"], got["state"], got["exit_code"]) == ("stalled", "failed", 5)
    assert got["cause"] and got["cause"] == run.read_status()["cause"]


@pytest.mark.parametrize(
    ("status", "event", "step"),
    [
        ({"state": "requeued", "job_id": "41", "stopped_step": 9}, "requeued", 9),
        ({"state": "failed", "exit_code": 5, "cause": "no rank moves"}, "stalled", 7),
        ({"state": "finished", "exit_code": 0}, "ended", 7),
    ],
)
def test_what_is_sent(folder: Prepared, status: dict[str, Any], event: str, step: int) -> None:
    run = folder()
    write_json(run.progress_json, {"step": 7})
    run.write_status(**status)
    document = describe(run)
    assert (document["event"], document["step"]) == (event, step)
    assert {name: document[name] for name in status if name != "stopped_step"} == {
        name: value for name, value in status.items() if name != "stopped_step"
    }


def test_a_command_gets_it_on_stdin(folder: Prepared, tmp_path: Path) -> None:
    out = tmp_path / "it's told"
    code = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    run = folder(f"command:{shlex.join([sys.executable, '-c', code, str(out)])}")
    run.write_status("finished")
    notify(run)
    assert json.loads(out.read_text())["state"] == "finished"


def test_what_fails_is_one_line_without_the_address(
    folder: Prepared, hook: Hook, capsys: Capture
) -> None:
    hook.code = 503
    fails = shlex.join(["command:" + sys.executable, "-c", "raise SystemExit('no mail here')"])
    run = folder(hook.url, fails, "command:/no/such/program", "http://127.0.0.1:9/x", "mail")
    run.write_status("finished")
    notify(run)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("jobs: cluster.notify: ") for line in lines)
    assert lines[0].endswith("127.0.0.1 was not told (HTTP Error 503: Service Unavailable)")
    assert lines[1].endswith(f"({sys.executable} failed: no mail here)")
    assert "(/no/such/program is not on PATH)" in lines[2] and "Connection refused" in lines[3]
    assert "secret" not in "".join(lines)
    assert run.read_status()["state"] == "finished"


def test_nobody_is_waited_for_longer_than_the_limit(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(notify_module, "LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = send(f"http://127.0.0.1:{silent.getsockname()[1]}/", {})
    assert error is not None and ("no answer within 0.2 s" in error or "timed out" in error)
    assert send("command:sleep 60", {}) == "sleep did not answer within 0.2 s"


@pytest.mark.parametrize(
    ("system", "notify", "lines"),
    [
        (
            "mini",
            "mail:me@site.org",
            ["#SBATCH --mail-type=END,FAIL,REQUEUE", "#SBATCH --mail-user=me@site.org"],
        ),
        ("mini", "mail", ["#SBATCH --mail-type=END,FAIL,REQUEUE"]),
        ("pbs", "mail:me@site.org", ["#PBS -m ae", "#PBS -M me@site.org"]),
        ("pbs", "mail", ["#PBS -m ae"]),
    ],
)
def test_mail_is_the_batch_systems(
    resolved: Resolved, system: str, notify: str, lines: list[str]
) -> None:
    spec = resolved(f"cluster={system}", f"cluster.notify=['{notify}']")
    script = script_of(spec)
    assert [
        line for line in script.splitlines() if "mail" in line or line[:7] in ("#PBS -m", "#PBS -M")
    ] == lines


def test_flux_sends_no_mail(resolved: Resolved) -> None:
    spec = resolved("cluster=flux", "cluster.notify=[mail]")
    with refused(r"cluster\.notify=\['mail'\]: Flux sends no mail; use command:WORDS"):
        script_of(spec)
