"""`python -m gems VERB`: schedules and checks of a configuration, without an allocation."""

from __future__ import annotations

import sys

from gems.cli import Verb, main

VERBS = {
    "schedule": Verb("gems.show_schedule:show_schedule", "prints the schedule: grid, or JSON; level=lowered shows all actions",
                     flags=("level=lowered", "level=compute")),
    "verify": Verb("gems.verify:verify", "compares the configured run with one unsplit process: max relative error"),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main("gems", VERBS, sys.argv[1:]))
