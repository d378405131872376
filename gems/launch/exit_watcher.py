"""The exit watcher records when a rank's process ends, before its launcher can know.

MPICH's mpiexec kills the other ranks as soon as one is gone, perhaps with the same signal that
ended that one, and reports the lowest of them, not the first. It learns of a death when the rank's
connections close. A watcher inherits these connections, waits for the rank's end and writes the
time before it closes them. So the earliest time belongs to the rank that ended by itself.

`python -m gems.launch.exit_watcher RUN_FOLDER PROGRAM...` becomes PROGRAM, with the same process
id.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = "witness"
# contains neither a module of ours nor the program's name, so that a search for the ranks'
# processes does not find this one
PROGRAM = (
    "import sys, time\nsys.stdin.buffer.read()\nopen(sys.argv[1], 'w').write(str(time.time_ns()))"
)


def main(argv: list[str]) -> None:
    """Start the watcher of this process if it is a rank of Hydra's, and become the program."""
    run_folder, *program = argv
    rank = os.environ.get("PMI_RANK")
    if rank is not None and rank.isdecimal():
        notes = Path(run_folder) / FOLDER
        notes.mkdir(parents=True, exist_ok=True)
        start(notes / f"rank{int(rank):04d}")
    os.execvp(program[0], program)


def start(note: Path) -> None:
    """Start a process that writes the time to `note` when this process has ended.

    This process may become another program in the meantime.
    """
    read_end, write_end = os.pipe()
    subprocess.Popen(
        [sys.executable, "-IS", "-c", PROGRAM, str(note)], stdin=read_end, close_fds=False
    )
    os.close(read_end)
    os.set_inheritable(write_end, True)


def read_notes(run_folder: Path) -> dict[int, int]:
    """Return the time in ns at which each rank's process ended, for those that have ended."""
    notes = {}
    for path in (run_folder / FOLDER).glob("rank*"):
        text = path.read_text()
        if text.isdecimal():
            notes[int(path.name.removeprefix("rank"))] = int(text)
    return notes


if __name__ == "__main__":
    main(sys.argv[1:])
