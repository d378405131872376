"""The figure of mCAP (Dreuning et al., Euro-Par 2022): parameters that fit, by partitioner.

The paper states 1.55 times in its abstract; its networks, rivals and GPUs could not be read. Here
`gems partition --largest depth` finds the deepest VGG and ResNet that each method trains on 16 GB,
by predicted peaks: shown are the parameters by mCAP, and by the exact partition, over those by
torchgpipe's two methods. Takes some minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product

from gems.utils.tables import RIGHT, table

FAMILIES = {"vgg": "vgg116", "resnet": "resnet110_v2"}
RANKS = (4, 8)
RIVALS = ("torchgpipe_size", "torchgpipe_time")
RUN = (
    "data=synthetic data.height_px=256 data.width_px=256 data.num_classes=1000 schedule=1f1b"
    " parallel.micro_batches=8 machine.device_bytes=16GB"
)


def largest(model: str, ranks: int) -> dict[str, int]:
    """Return the parameters of the deepest network of a family that each method trains."""
    words = [*RUN.split(), f"model={model}", f"parallel.partitions={ranks}"]
    argv = [sys.executable, "-m", "gems", "partition", "--largest", "depth", "--json", *words]
    answer = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
    return {row["method"]: row["num_parameters"] for row in answer["methods"]}


def main() -> None:
    """Print the ratios beside the paper's."""
    cells = []
    for (family, model), ranks in product(FAMILIES.items(), RANKS):
        sizes = largest(model, ranks)
        for method, rival in product(("mcap", "exact"), RIVALS):
            ratio = sizes[method] / max(1, sizes[rival])
            published = "1.55" if method == "mcap" else "-"
            cells.append((family, ranks, method, rival, ratio, published))
    columns = {"family": "", "ranks": "d", "method": "", "over": "", "ratio": ".2f"}
    title = "parameters that train on 16 GB, PREDICTED"
    print(table(columns | {"published": RIGHT}, cells, title=title))


if __name__ == "__main__":
    main()
