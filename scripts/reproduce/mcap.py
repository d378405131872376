"""The figure of mCAP (Dreuning et al., Euro-Par 2022).

How many more parameters fit than by other partitioners.
The paper states 1.55 times in its abstract; its networks, rivals and GPUs could not be read. Here
the deepest VGG and ResNet are sought that each method trains on 16 GB, by predicted peaks (`make
bench-cuts`): parameters by mCAP, and by the exact partition, over those by torchgpipe's two
methods. `--json` prints one object.
"""

from __future__ import annotations

import sys
from typing import Any

from gems.utils.tables import table
from scripts.bench.cuts import DEVICE, largest_models
from scripts.bench.rig import answered, options

PUBLISHED = 1.55
RIVALS = ("torchgpipe_size", "torchgpipe_time")


def _ratios() -> list[dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, int]] = {}
    for row in largest_models():
        found.setdefault((row["family"], row["ranks"]), {})[row["method"]] = row["num_parameters"]
    return [
        {
            "family": family,
            "ranks": ranks,
            "method": method,
            "over": rival,
            "published": PUBLISHED if method == "mcap" else None,
            "ratio": parameters[method] / max(1, parameters[rival]),
        }
        for (family, ranks), parameters in found.items()
        for method in ("mcap", "exact")
        for rival in RIVALS
    ]


def main(argv: list[str]) -> int:
    """Print the ratios beside the paper's."""
    given = options(__doc__, argv, json=False)
    rows = _ratios()
    columns = {
        "family": "",
        "ranks": "d",
        "method": "",
        "over": "",
        "ratio": ".2f",
        "published": ".2f",
    }
    if not given.json:
        cells = ([row[name] for name in columns] for row in rows)
        print(table(columns, cells, title=f"trainable parameters on {DEVICE}, predicted"))
    return answered(
        {"source": "predicted", "device_bytes": DEVICE, "rows": rows}, False, given.json
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
