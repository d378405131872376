"""The studies of the vDNN paper (Rhu et al. 2016), simulated on its device.

`--json` prints one object.
"""

import sys

from analysis.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["vdnn", *sys.argv[1:]]))
