"""gems.launch.local_launcher and gems.launch.mpich_cleanup.

Command lines, environments, and processes that must end.
"""

from __future__ import annotations

import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gems.errors import ConfigError
from gems.launch import local_launcher as ranks
from gems.launch.mpich_cleanup import remove_stale_shared_memory
from tests.helpers.job_helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder alone on PATH, and an interpreter without an mpiexec beside it."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


class TestMpiexec:
    def test_beside_the_interpreter_goes_first(self, elsewhere: Path, tmp_path: Path) -> None:
        program(elsewhere, "mpiexec", "#!/bin/sh\necho 'HYDRA build details:'\n")
        beside = program(tmp_path / "python", "mpiexec", "#!/bin/sh\necho 'HYDRA build details:'\n")
        assert ranks.mpiexec_argv(4, ["prog", "a b"]) == [
            str(beside),
            "-print-all-exitcodes",
            "-n",
            "4",
            "prog",
            "a b",
        ]

    @pytest.mark.parametrize(("user", "as_root"), [(0, ["--allow-run-as-root"]), (1000, [])])
    def test_open_mpi_may_oversubscribe(
        self, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, user: int, as_root: list[str]
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: user)
        ranks._flags.cache_clear()
        found = program(elsewhere, "mpiexec", "#!/bin/sh\necho 'mpiexec (Open MPI) 4.1.4'\n")
        assert ranks.mpiexec_argv(2, ["p"]) == [
            str(found),
            "--oversubscribe",
            "--bind-to",
            "none",
            *as_root,
            "-n",
            "2",
            "p",
        ]

    def test_unknown_flavour_gets_no_flags(self, elsewhere: Path) -> None:
        found = program(elsewhere, "mpiexec", "#!/bin/sh\necho 'Some MPI'\n")
        assert ranks.mpiexec_argv(2, ["p"]) == [str(found), "-n", "2", "p"]

    def test_none_is_said_with_the_cure(self, elsewhere: Path) -> None:
        with pytest.raises(ConfigError, match="pip install mpich"):
            ranks.mpiexec_argv(2, ["p"])


class TestEnvironment:
    def test_threads_and_switches(self) -> None:
        environment = ranks.rank_environment(3)
        assert {environment[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"3"}
        assert environment["HDF5_USE_FILE_LOCKING"] == "FALSE"
        assert environment["PYTHONFAULTHANDLER"] == environment["PYTHONUNBUFFERED"] == "1"

    def test_allocation_is_hidden_from_mpiexec_and_kept_for_srun(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = (
            "SLURM_JOB_ID",
            "SLURMD_NODENAME",
            "SBATCH_PARTITION",
            "PMI_RANK",
            "PMIX_RANK",
            "OMPI_COMM_WORLD_SIZE",
        )
        for name in (*left, "SLURM_CONF", "OMPI_MCA_btl", "PMIX_MCA_gds"):
            monkeypatch.setenv(name, "7")
        hidden = ranks.rank_environment(1)
        assert not hidden.keys() & set(left)
        assert hidden.keys() >= {"SLURM_CONF", "OMPI_MCA_btl", "PMIX_MCA_gds", "PATH"}
        assert ranks.rank_environment(1, keep_slurm=True).keys() >= set(left)

    def test_mpiexec_inside_an_allocation_starts_ranks_here(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hydra takes SLURM's variables for an order to start its proxies by srun on the nodes they name."""
        nodes = {"SLURM_NODELIST": "x[1-2]", "SLURM_JOB_NODELIST": "x[1-2]", "SLURM_NNODES": "2"}
        allocation = {
            "SLURM_JOB_ID": "1",
            "SLURM_JOBID": "1",
            "SLURM_TASKS_PER_NODE": "1(x2)",
            **nodes,
        }
        for name, value in allocation.items():
            monkeypatch.setenv(name, value)
        lines: list[str] = []
        program = "import os; print('rank ' + os.environ['PMI_RANK'] + '\\n', end='')"
        argv = ranks.mpiexec_argv(2, [sys.executable, "-c", program])
        ended = ranks.run_ranks(
            argv, ranks.rank_environment(1), ranks.Output(None, False, lines.append), 60
        )
        assert ended.returncode == 0
        assert {"rank 0", "rank 1"} <= set(lines)


class TestSharedMemory:
    def test_only_unmapped_old_files_of_ours_go(self, tmp_path: Path) -> None:
        stale, mapped, young, other = (
            tmp_path / name for name in ("mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_3_0", "x")
        )
        for path in (stale, mapped, young, other):
            path.write_bytes(b"0" * 4096)
        for path in (stale, mapped, other):
            os.utime(path, (1, 1))
        with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert remove_stale_shared_memory(tmp_path, min_age_s=60) == [stale]
        assert sorted(tmp_path.iterdir()) == sorted([mapped, young, other])
        assert remove_stale_shared_memory(tmp_path, min_age_s=60) == [mapped]

    def test_another_users_file_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mpich_shm_1_0").write_bytes(b"0")
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
        assert remove_stale_shared_memory(tmp_path, min_age_s=0) == []

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert remove_stale_shared_memory(tmp_path / "missing") == []


def python(text: str, *words: str) -> list[str]:
    return [sys.executable, "-c", text, *words]


class TestRunRanks:
    def test_output_goes_everywhere_and_the_code_comes_back(
        self, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        log = tmp_path / "ranks.log"
        lines = []
        text = (
            "import sys\nprint('out')\nprint('err',"
            " file=sys.stderr)\nprint('10%\\r20%')\nsys.exit(7)"
        )
        ended = ranks.run_ranks(
            python(text),
            {**os.environ, "PYTHONUNBUFFERED": "1"},
            ranks.Output(log, True, lines.append),
        )
        assert ended == ranks.Ended(7, ("out", "err", "10%", "20%"))
        assert log.read_bytes() == b"out\nerr\n10%\r20%\n" == capfdbinary.readouterr().err
        assert lines == list(ended.tail)

    def test_a_progress_bar_is_shown_before_its_line_ends(
        self, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        go = tmp_path / "go"
        text = (
            "import os, sys, time\nsys.stderr.write('half'); sys.stderr.flush()\n"
            "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.stderr.write(' whole')"
        )
        seen = bytearray()

        def watch() -> None:
            def shown() -> bool:
                seen.extend(capfdbinary.readouterr().err)
                return b"half" in seen

            wait_until(shown)
            go.touch()

        watcher = threading.Thread(target=watch)
        watcher.start()
        ended = ranks.run_ranks(python(text, str(go)), os.environ, timeout_s=60)
        watcher.join()
        assert ended.tail == ("half whole",)
        assert not ended.timed_out

    def test_the_launchers_table_of_exit_codes_is_heard_but_not_shown(
        self, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        lines: list[str] = []
        noise = ["=" * 83, "=   PID 7 RUNNING AT n1", "[mpiexec@n1] Exit codes: [n1] 0,768,0"]
        text = f"print({chr(10).join(noise)!r}); print('[mpiexec@n1] other'); print('=== ours')"
        ranks.run_ranks(python(text), os.environ, ranks.Output(on_line=lines.append))
        assert lines == [*noise, "[mpiexec@n1] other", "=== ours"]
        assert capfdbinary.readouterr().err == b"[mpiexec@n1] other\n=== ours\n"

    def test_the_tail_is_bounded(self) -> None:
        ended = ranks.run_ranks(
            python("for k in range(5000): print(k, 'x' * 5000)"), os.environ, ranks.QUIET
        )
        assert len(ended.tail) == ranks.TAIL_LINES
        assert ended.tail[-1].startswith("4999 ") and len(ended.tail[-1]) == 2000

    def test_missing_program_is_a_clear_error(self) -> None:
        with pytest.raises(ConfigError, match="no-such-launcher"):
            ranks.run_ranks(["no-such-launcher"], os.environ)

    @pytest.mark.timeout(60)
    def test_time_out_ends_the_whole_family(self, tmp_path: Path) -> None:
        """A child in a session of its own that ignores SIGTERM, below a parent that ignores it as well."""
        pids = tmp_path / "pids"
        stubborn = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        child = stubborn + "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
        parent = (
            stubborn
            + "import subprocess\nargv = [sys.executable, '-c', sys.argv[2], sys.argv[1]]\n"
            "subprocess.Popen(argv, start_new_session=True).wait()\n"
        )
        grace_s = ranks.GRACE_S
        ranks.GRACE_S = 0.2
        try:
            ended = ranks.run_ranks(python(parent, str(pids), child), os.environ, ranks.QUIET, 3.0)
        finally:
            ranks.GRACE_S = grace_s
        assert ended.timed_out and ended.returncode == -signal.SIGKILL
        wait_until(lambda: not alive(int(pids.read_text())))

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
    def test_a_signal_to_us_ends_real_ranks(self, tmp_path: Path, name: str) -> None:
        rank = (
            "import os, pathlib, sys, time\npathlib.Path(sys.argv[1],"
            " os.environ['PMI_RANK']).write_text(str(os.getpid()))\ntime.sleep(600)"
        )
        caller = (  # the tests themselves may run under nohup, or in the background
            "import os, signal, sys\nfrom gems.launch import local_launcher\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "argv = local_launcher.mpiexec_argv(2, [sys.executable, '-c', *sys.argv[1:]])\n"
            "print(local_launcher.run_ranks(argv, os.environ).stopped_by)\n"
        )
        us = subprocess.Popen(
            python(caller, rank, str(tmp_path)),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

        def pids() -> list[int]:
            return [int(text) for path in tmp_path.iterdir() if (text := path.read_text())]

        wait_until(lambda: len(pids()) == 2)
        us.send_signal(getattr(signal, name))
        out, err = us.communicate(timeout=30)
        if name == "SIGINT":
            assert "KeyboardInterrupt" in err
        else:
            assert (us.returncode, out) == (0, f"{name}\n")
        wait_until(lambda: not any(alive(pid) for pid in pids()))

    @pytest.mark.parametrize("own", [signal.SIG_IGN, lambda number, frame: None])
    def test_nohup_and_the_callers_own_handler_of_sighup_stay(self, own: Any) -> None:
        before = signal.signal(signal.SIGHUP, own)
        try:
            ended = ranks.run_ranks(
                python(f"import os; os.kill({os.getpid()}, 1)"), os.environ, ranks.QUIET
            )
            assert (ended.returncode, ended.stopped_by) == (0, None) and signal.getsignal(
                signal.SIGHUP
            ) is own
        finally:
            signal.signal(signal.SIGHUP, before)
