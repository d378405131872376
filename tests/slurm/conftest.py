"""A real SLURM on this machine for the tests of this folder (scripts/mini_slurm.sh)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.helpers import mini_runs
from tests.helpers.fault_runs import going, submit
from tests.helpers.fault_table import ROWS, Fault, table
from tests.helpers.mini_runs import no_job_is_left
from tests.helpers.warm_python import STARTS_ORDINARY

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SLURM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"])
__all__ = ["going", "no_job_is_left", "submit"]  # for pytest, which looks for fixtures here
FAULT = "fault"  # the name of a row in a test's report
MAX_TMP_CHARS = (
    30  # the cluster's sockets lie below, and a socket's path has 107 characters at most
)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what an outer SLURM job or user left in it."""
    prefixes = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_")
    return {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}


@dataclass(frozen=True, slots=True)
class MiniSlurm:
    """A mini cluster in one folder, up or not."""

    folder: Path

    @property
    def conf(self) -> Path:
        """The path of its slurm.conf."""
        return self.folder / "slurm.conf"

    def script(
        self, verb: str, *options: str, env: dict[str, str] | None = None, timeout_s: float = 150
    ) -> subprocess.CompletedProcess[str]:
        """Run `mini_slurm.sh verb --dir FOLDER options`.

        Raises TimeoutExpired, never for an exit code.
        """
        return subprocess.run(
            [str(SCRIPTS / "mini_slurm.sh"), verb, "--dir", str(self.folder), *options],
            env=env or clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def run(
        self,
        *command: str,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a SLURM command on this cluster; raises TimeoutExpired, never for an exit code."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=clean_environment() | {"SLURM_CONF": str(self.conf)} | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def settings(self) -> dict[str, str]:
        """Return what `up` chose: nodes, cpus, gpus, port, auth, host_names (uts, userns or shared)."""
        lines = (self.folder / ".mini_slurm").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def has_own_host_names(self) -> bool:
        """Return whether every node has a host name of its own; the kernel may forbid it."""
        return self.settings()["host_names"] != "shared"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of this folder."""
    config.addinivalue_line("markers", "slurm: needs slurm-wlm and munge; starts a real SLURM here")


@pytest.fixture(autouse=True)
def _report_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give the rows of a test to its report, which comes to the process that prints the table."""
    before = len(ROWS)
    yield
    request.node.user_properties.extend((FAULT, asdict(row)) for row in ROWS[before:])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what became of the runs that faults befell."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    ended = [report for report in reports if getattr(report, "when", "") == "teardown"]
    rows = [
        Fault(**value)
        for report in ended
        for name, value in report.user_properties
        if name == FAULT
    ]
    if rows:
        terminalreporter.section("faults")
        for line in table(rows):
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True, scope="session")
def _warm_commands(warm_executable: str) -> Iterator[None]:
    """Fork the commands of the tests; their jobs, on nodes with other host names, start ordinary processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_runs, "PYTHON", warm_executable)
        patch.setenv(STARTS_ORDINARY, "1")
        yield


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skip where slurm-wlm is not installed; GEMS_REQUIRE_SLURM=1 makes that a failure."""
    if shutil.which("slurmctld", path=SLURM_PATH) is None:
        reason = (
            "slurm-wlm is not installed: apt-get install -y --no-install-recommends slurm-wlm munge"
        )
        if os.environ.get("GEMS_REQUIRE_SLURM") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """Yield a folder whose path is short enough for the cluster's sockets."""
    base = tempfile.gettempdir()
    if len(base) > MAX_TMP_CHARS:
        base = "/tmp"
    with tempfile.TemporaryDirectory(prefix="gems-", dir=base) as path:
        yield Path(path)


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[MiniSlurm]:
    """Keep a cluster up in a folder."""
    cluster = MiniSlurm(folder)
    try:
        up = cluster.script("up", *options)
        assert up.returncode == 0, up.stderr
        yield cluster
    finally:
        down = cluster.script("down")
    assert down.returncode == 0, down.stderr


@pytest.fixture(scope="session")
def mini_slurm(slurm_installed: None, short_tmp: Path) -> Iterator[MiniSlurm]:
    """Yield a cluster of 2 nodes x 4 CPUs that is up; a test that takes it finds SLURM_CONF set."""
    with running(short_tmp / "session", "--nodes", "2", "--cpus", "4") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def preempt_slurm(slurm_installed: None, short_tmp: Path) -> Iterator[MiniSlurm]:
    """Yield a cluster of 2 nodes x 4 CPUs with a partition whose jobs are preempted.

    Its daemons may be ended.
    """
    with running(
        short_tmp / "preempt", "--nodes", "2", "--cpus", "4", "--preempt", "20"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def five_nodes(slurm_installed: None, short_tmp: Path) -> Iterator[MiniSlurm]:
    """Yield a cluster of 5 nodes x 2 CPUs, of which jobs may lose some."""
    with running(short_tmp / "five", "--nodes", "5", "--cpus", "2") as cluster:
        yield cluster


@pytest.fixture
def cluster_in() -> Callable[[Path], MiniSlurm]:
    """Return the class, for a test that wants a cluster in a folder of its own choice and cleans up itself."""
    return MiniSlurm


@pytest.fixture
def other_cluster(slurm_installed: None, short_tmp: Path) -> Iterator[MiniSlurm]:
    """Yield a cluster of a test's own, not up yet; whatever the test leaves is stopped."""
    cluster = MiniSlurm(short_tmp / "other")
    try:
        yield cluster
    finally:
        down = cluster.script("down")
    assert down.returncode == 0, down.stderr


@pytest.fixture(autouse=True)
def _slurm_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(key)
    for name in ("mini_slurm", "preempt_slurm", "five_nodes"):
        if name in request.fixturenames:
            monkeypatch.setenv("SLURM_CONF", str(request.getfixturevalue(name).conf))
