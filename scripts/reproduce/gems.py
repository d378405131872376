"""The scaling figure of GEMS (Jain et al., SC 2020).

ResNet-1001-v2 on up to 1024 V100, simulated, beside its 97.32 %.
Runs the missing points of conf/study/gems_1024.yaml, and prints and draws the study. Takes Hydra
overrides, as `runs_dir=DIR`.
"""

import subprocess
import sys

PUBLISHED = (
    "published: 97.32 % parallel efficiency of ResNet-1001-v2 on 1024 V100 (abstract; its base is"
    " not stated)"
)

if __name__ == "__main__":
    code = subprocess.call(
        [sys.executable, "-m", "jobs", "study", "study=gems_1024", *sys.argv[1:]]
    )
    print(PUBLISHED)
    sys.exit(code)
