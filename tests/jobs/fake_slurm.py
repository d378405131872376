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

    def hangs(self, name: str) -> None:
        """Put a command there that does not answer."""
        self.says(name)
        (self.here / f"{name}.slow").touch()

    def asked(self) -> list[str]:
        """Return the command lines so far."""
        path = self.here / "asked"
        return path.read_text().splitlines() if path.exists() else []
