"""Fit the launch costs of conf/machine/h200.yaml to the passes that docs/gpu.jsonl has.

A row is forward and backward of one micro-batch, in one CUDA graph and by an eager rank. The costs
of the device are fitted to the graphs by least squares of relative errors, the two launches of the
host, of float32 and of 16 bits, to the eager rows so that the largest relative error is least.
`without` is the error of a row that a fit without that row predicts: all from the other rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from gems.config.schema import MachineConfig
from gems.models.mixed import Precision
from gems.profile.profilers.chain import profile_model
from gems.profile.profilers.fake import Roofline, fake_lab, machine_rates
from gems.profile.profilers.layer_run import LayerCall, Times, give_gradients
from gems.profile.work import Operator, Rates
from scripts.bench.rig import Table, answered, composed, log, options, square

LINES = Path(__file__).resolve().parents[2] / "docs" / "gpu.jsonl"
DEVICE = ("operator_s", "operator_efficiency", "half_rate_channels", "bfloat16_half_rate_channels")
HOST = ("launch_s", "bfloat16_launch_s")
START = (5e-6, 0.5, 20.0, 10.0)  # of DEVICE
LAUNCHES_S = np.geomspace(1e-5, 1e-4, 300)
ROWS = {"graph_s": "graph", "engine_s": "eager"}


@dataclass(frozen=True)
class Case:
    """A row of the table; `figures` are measured."""

    figures: dict[str, Any]

    @property
    def name(self) -> str:
        """What the row is called."""
        return " ".join(str(self.figures[key]) for key in ("model", "side_px", "precision"))

    @property
    def is_low(self) -> bool:
        """Whether it computes in 16 bits."""
        return self.figures["precision"] != "float32"

    @cached_property
    def passes(self) -> list[list[Operator]]:
        """The operators of each layer's forward and backward."""
        figures = self.figures
        spec = composed(
            f"model={figures['model']} data=synthetic {square(figures['side_px'])} machine=h200"
            f" train.precision={figures['precision']}"
        )
        kinds: list[tuple[list[Operator], list[Operator]]] = []

        def record(call: LayerCall) -> Times:
            give_gradients(call.module)
            kinds.append(call.forward_and_backward(_operators))
            return Times(forward_s=len(kinds) - 1.0)  # the place of its passes; alike layers share

        dtype = spec.train.layer_dtype
        lab = replace(fake_lab(spec.machine, Precision.of(dtype)), times=record)
        profile = profile_model(spec.model, spec.data, 1, dtype, lab, "h200", "fake", {})
        return [kind for layer in profile.layers for kind in kinds[int(layer.forward_s)]]

    def predicted_s(self, machine: MachineConfig, key: str) -> float:
        """Return the time of all passes, replayed or launched one operator after the other."""
        if key == "graph_s":
            machine = replace(machine, launch_s=0.0, bfloat16_launch_s=0.0)
        rates = machine_rates(machine, Precision.of(self.figures["precision"]))
        return sum(map(rates.pass_s, self.passes))

    def error(self, machine: MachineConfig, key: str) -> float:
        """Return the prediction's error, relative to the measurement."""
        return self.predicted_s(machine, key) / float(self.figures[key]) - 1


def _operators(run: Callable[[], object]) -> list[Operator]:
    with Roofline(Rates(1.0, 1.0, launch_s=0.0)) as roofline:
        run()
    return roofline.operators


def fitted(machine: MachineConfig, cases: Sequence[Case]) -> MachineConfig:
    """Return the machine with the launch costs that fit the cases best."""

    def with_device(logs: Sequence[float]) -> MachineConfig:
        values = dict(zip(DEVICE, np.exp(logs).tolist(), strict=True))
        return replace(machine, **values)

    def errors(logs: Sequence[float]) -> list[float]:
        return [float(np.log1p(case.error(with_device(logs), "graph_s"))) for case in cases]

    machine = with_device(least_squares(errors, np.log(START)).x)
    for key, is_low in zip(HOST, (False, True), strict=True):
        of_key = [case for case in cases if case.is_low == is_low]
        tries = [replace(machine, **{key: float(launch_s)}) for launch_s in LAUNCHES_S]
        machine = min(tries, key=lambda one: max(abs(c.error(one, "engine_s")) for c in of_key))
    return machine


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, and print the constants and the errors of each row."""
    arguments = options(__doc__, argv, json=False)
    sheet = composed("machine=h200").machine
    lines = [json.loads(line) for line in LINES.read_text().splitlines()]
    table = next(line["figures"] for line in lines if line["row"] == "launches")
    cases = [Case(figures) for figures in table]
    machine = fitted(sheet, cases)
    constants = {key: float(f"{getattr(machine, key):.3g}") for key in (*HOST, *DEVICE)}
    log(", ".join(f"{key}: {value}" for key, value in constants.items()))
    shown = Table(
        "row:<38",
        "step:<6",
        "measured ms=s:>12.2f",
        "predicted ms=predicted_s:>13.2f",
        "error %=error:>+8.1f",
        "without %=without:>+10.1f",
        "operators:>10",
    )
    rows = []
    for case in cases:
        without = fitted(sheet, [other for other in cases if other is not case])
        for key, step in ROWS.items():
            rows.append(
                shown.row(
                    {
                        "row": case.name,
                        "step": step,
                        "s": case.figures[key],
                        "predicted_s": case.predicted_s(machine, key),
                        "error": case.error(machine, key),
                        "without": case.error(without, key),
                        "operators": sum(map(len, case.passes)),
                    }
                )
            )
    for column in ("error", "without"):
        sizes = [abs(row[column]) for row in rows]
        log(f"{column}: median {median(sizes):.1%}, largest {max(sizes):.1%}")
    return answered({"constants": constants, "rows": rows}, False, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
