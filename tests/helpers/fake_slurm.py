"""Stand-ins for squeue, sacct and scancel, alone on PATH, that note what they are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

COMMAND = """#!/bin/sh
echo "{name} $*" >> {here}/asked
if [ -e {here}/{name}.slow ]; then exec /bin/sleep 60; fi
/bin/cat {here}/{name}.out
/bin/cat {here}/{name}.err >&2
exit {code}
"""
# sbatch numbers jobs from 41 and keeps each as jobs/NUMBER, a line of state and command;
# sbatch.before and sbatch.after run before and after the job is taken. squeue lists them as it is
# asked to: with a header or not.
SBATCH = """
case "$*" in *--test-only*) echo 'sbatch: Job 41 to start at 2030-01-02T03:04:05' >&2; exit 0 ;; esac
. {here}/sbatch.before
number=$(($(/bin/ls {here}/jobs | /usr/bin/wc -l) + 41))
until (set -C; echo "PENDING|$1" > {here}/jobs/$number) 2>/dev/null; do number=$((number + 1)); done
. {here}/sbatch.after
echo "Submitted batch job $number"
"""
SQUEUE = """
header=yes
case "$*" in *--noheader*) header= ;; *) echo "JOBID|STATE|COMMAND" ;; esac
for path in {here}/jobs/*; do
    number=${{path##*/}}
    case "$*" in *--user=*|*--jobs=*$number*) ;; *) continue ;; esac
    IFS='|' read -r state command < "$path"
    name=$(/bin/sed -n 's/^#SBATCH --job-name=//p' "$command")
    last=$(/bin/sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$command")
    tasks=none
    if [ "$last" ]; then tasks=$(/usr/bin/seq 0 "$last"); fi
    for task in $tasks; do
        id=$number
        if [ "$last" ]; then id="$number"_$task; fi
        if [ "$header" ]; then echo "$id|$state|$command"; else echo "$id|$state|N/A|None|$name"; fi
    done
done
"""
SCANCEL = """
for number; do
    if [ -e {here}/jobs/$number ]; then
        IFS='|' read -r state command < {here}/jobs/$number; echo "CANCELLED|$command" > {here}/jobs/$number
    fi
done
"""


@dataclass(frozen=True, slots=True)
class FakeSlurm:
    """A folder in which SLURM's commands stand; none of them until it has been given words."""

    here: Path

    def says(self, name: str, *lines: str, error: str = "", code: int = 0) -> None:
        """Put a command there that says these lines."""
        (self.here / f"{name}.out").write_text("".join(f"{line}\n" for line in lines))
        (self.here / f"{name}.err").write_text(error)
        path = self.here / name
        path.write_text(COMMAND.format(name=name, here=self.here, code=code))
        path.chmod(0o755)

    def does(self, name: str, script: str) -> None:
        """Put a command there that runs a shell script."""
        path = self.here / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.here}/asked\n{script}\n')
        path.chmod(0o755)

    def has_queue(self) -> None:
        """Put an sbatch, squeue and scancel there that share a queue, in which jobs wait for ever."""
        (self.here / "jobs").mkdir()
        for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL)):
            self.does(name, script.format(here=self.here))
            (self.here / f"{name}.before").touch()
            (self.here / f"{name}.after").touch()

    def jobs(self, state: str = "PENDING") -> list[str]:
        """Return the numbers of the jobs in a state."""
        found = sorted((self.here / "jobs").iterdir())
        return [path.name for path in found if path.read_text().startswith(f"{state}|")]

    def hangs(self, name: str) -> None:
        """Put a command there that does not answer."""
        self.says(name)
        (self.here / f"{name}.slow").touch()

    def asked(self) -> list[str]:
        """Return the command lines so far."""
        path = self.here / "asked"
        return path.read_text().splitlines() if path.exists() else []
