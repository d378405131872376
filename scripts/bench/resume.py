"""Resume against an undisturbed run.

A rank is killed at random moments again and again, and the ends are compared.
A small run is started by `gems-jobs submit` and killed by SIGKILL in a random rank, in a random
step and at a random moment of it, `kills=20` times; each time the same command resumes from the
newest checkpoint. Its losses and weights are compared with those of an undisturbed run, bit by bit.
Then a run with another number of partitions and replicas goes on from the middle of the undisturbed
one, and the largest relative differences of losses and parameters are reported. Takes `kills=`,
`seed=` and Hydra overrides. Prints a table on stderr and JSON on stdout; the exit code is 1 if bits
differ.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gems.runs.heartbeat import read_beat
from scripts.bench.rig import answered, log, machine

STEPS = 96
MIDDLE = 48
LIMIT_S = 240.0
LOOK_S = 0.001
REL_LIMIT = 1e-6
OVERRIDES = [
    "model=resnet20_v2",
    "model.width=4",
    "model.norm=group",
    "data=synthetic",
    "data.height_px=32",
    "data.width_px=32",
    "data.train_samples=256",
    "data.validation_samples=8",
    "parallel.partitions=2",
    "parallel.micro_batch_size=2",
    "parallel.replications=2",
    "parallel.parts=1",
    "schedule=gems_master",
    "machine.device=cpu",
    "optimizer.name=adam",
    "optimizer.lr=0.001",
    f"train.steps={STEPS}",
    "train.checkpoint_steps=2",
    "cluster=local",
]
# as many images a step: two pipelines of one rank each, without GEMS's second direction
OTHER = [
    "parallel.partitions=1",
    "parallel.replicas=2",
    "schedule=1f1b",
    "parallel.replications=null",
    "parallel.parts=null",
    "parallel.micro_batches=1",
]


def main(words: list[str]) -> int:
    """Run all and return 1 if a bit differs, or another partition by more than REL_LIMIT."""
    own = dict(word.split("=", 1) for word in words if word.startswith(("kills=", "seed=")))
    overrides = [*OVERRIDES, *(word for word in words if not word.startswith(("kills=", "seed=")))]
    kills = int(own.get("kills", 20))
    chance = random.Random(int(own.get("seed", 0)))
    machine()
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch)
        begin_s = time.monotonic()
        whole = run(runs, [*overrides, "name=whole", f"train.keep_checkpoints={STEPS}"])
        log(f"undisturbed: {STEPS} steps, {time.monotonic() - begin_s:.1f} s")
        made = 0
        while (
            made < kills
            and (kill := run_and_kill(runs, [*overrides, "name=killed"], chance)) is not None
        ):
            made += 1
            log(f"kill {made:>2}: {kill}")
        ended = [
            path.parent for path in runs.glob("killed-*/result.json")
        ]  # before it could be killed again
        killed = ended[0] if ended else run(runs, [*overrides, "name=killed"])
        attempts = 1 + len(list((killed / "attempts").iterdir()))
        result: dict[str, Any] = {"kills": made, "attempts": attempts, **bits(whole, killed)}
        # one that was due while another was being written was taken a step later
        taken = [path.parent for path in (whole / "checkpoints").glob("step*/manifest.json")]
        steps = {int(path.name.removeprefix("step")): path for path in taken}
        step = min(steps, key=lambda step: abs(step - MIDDLE))
        other = run(runs, [*overrides, *OTHER, "name=other", f"train.resume={steps[step]}"])
        result |= {
            f"other_cut_{key}": value for key, value in differences(whole, other, step).items()
        }
    for key, value in result.items():
        log(f"{key:<22}{value}")
    is_good = (
        result["equal_losses"]
        and result["equal_weights"]
        and result["other_cut_losses"] <= REL_LIMIT
    )
    return answered(result, not is_good)


def _command(runs: Path, overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", "jobs", "submit", "--json", f"runs_dir={runs}", *overrides]


def run(runs: Path, overrides: list[str]) -> Path:
    """Start a run or continue it, wait for its end and return its folder."""
    ended = subprocess.run(
        _command(runs, overrides), capture_output=True, text=True, timeout=LIMIT_S
    )
    if ended.returncode:
        raise SystemExit(f"exit code {ended.returncode}\n{ended.stderr[-3000:]}")
    return Path(json.loads(ended.stdout)["run_folder"])


def run_and_kill(runs: Path, overrides: list[str], chance: random.Random) -> str | None:
    """Continue a run and kill a rank some steps later.

    Return where it was, or None if the run ended before.
    """
    old = {
        beat.pid
        for path in runs.glob("killed-*/heartbeat/rank*")
        if (beat := read_beat(path)) is not None
    }
    process = subprocess.Popen(
        _command(runs, overrides), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    rank = chance.randrange(2)
    wait = chance.randrange(1, 5)
    victim = None
    moment_s = chance.random() * 0.2
    goal: int | None = None
    deadline_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        path = next(runs.glob(f"killed-*/heartbeat/rank{rank:04d}"), None)
        beat = None if path is None else read_beat(path)
        if path is not None and beat is not None and beat.pid not in old and beat.step >= 0:
            goal = beat.step + wait if goal is None else goal
            if beat.step >= goal:
                time.sleep(moment_s)
                victim = read_beat(path)
                break
        time.sleep(LOOK_S)
    if victim is None or victim.step < 0:
        process.wait(LIMIT_S)
        return None
    os.kill(victim.pid, signal.SIGKILL)
    process.wait(LIMIT_S)
    return f"rank {rank}, step {victim.step}, {victim.action}"


def bits(whole: Path, killed: Path, steps: int = STEPS) -> dict[str, Any]:
    """Return whether two runs have the same losses and the same weights to the bit."""
    curves, states = _outcomes(whole, killed)
    same_names = [list(layer) for layer in states[0].values()] == [
        list(layer) for layer in states[1].values()
    ]
    return {
        "equal_losses": (
            curves[0]["loss"].tobytes() == curves[1]["loss"].tobytes() and len(curves[0]) == steps
        ),
        "equal_weights": same_names and all(value.equal(other) for value, other in _pairs(states)),
        "attempts_in_curve": len(set(curves[1]["attempt"].tolist())),
    }


def differences(whole: Path, other: Path, begin: int) -> dict[str, float]:
    """Return the largest relative differences of losses from a step on, and of layers' weights in the maximum norm."""
    curves, states = _outcomes(whole, other)
    first, second = (curve["loss"][curve["step"] >= begin] for curve in curves)
    weights = [
        float((value - changed).abs().max() / value.abs().max())
        for value, changed in _pairs(states)
        if value.is_floating_point() and float(value.abs().max())
    ]
    return {"losses": float(abs(second / first - 1).max()), "weights": max(weights)}


def _outcomes(*folders: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    from analysis.io.load import load_trace
    from gems.engine.checkpoint import weights

    return [load_trace(folder).trace.steps for folder in folders], [
        weights.load(folder) for folder in folders
    ]


def _pairs(states: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
    for name, layer in states[0].items():
        for key, value in layer.items():
            yield value, states[1][name][key]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
