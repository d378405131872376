"""The projections of Pal et al.

(2019) from their inputs; `--out FILE` draws them, `--json` prints one object.
"""

import sys

from analysis.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["hybrid", *sys.argv[1:]]))
