"""The command `gems-analysis VERB`: figures and pictures from trace files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from analysis.cli.verbs import PROGRAM, VERBS, parser
from gems.errors import ConfigError, GemsError, of_the_system, one_of
from gems.utils.completion import answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, or 2 with one line on stderr for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        first = arguments[0] if arguments else "none"
        said = answer(
            PROGRAM, arguments, lambda: dict.fromkeys(VERBS, ("--help", "--json", "--out"))
        )
        if said is not None:
            print(said)
            return 0
        if first not in (*VERBS, "-h", "--help"):
            raise ConfigError("command", first, one_of(VERBS), f"see {PROGRAM} --help")
        options = parser().parse_args(arguments)
        VERBS[options.verb](options)
    except GemsError as error:
        print("analysis:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RecursionError) as error:
        print("analysis:", of_the_system(error), file=sys.stderr)
        return ConfigError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
