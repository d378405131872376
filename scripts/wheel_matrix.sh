#!/usr/bin/env bash
# Test the wheel as a user installs it: scripts/wheel_matrix.sh [TORCH_VERSION ...], by default the pinned torch.
# For each version: a fresh virtual environment, and from an empty folder a simulation, three steps and a verification;
# then the same with the newest Hydra, pre-releases included.
# A torch that pip has only for CUDA brings gigabytes of packages.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${PYTHON:-python3.11}")
pinned=$(sed -n 's/^torch==//p' constraints.txt)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

mkdir "$scratch/source"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --create | tar --extract --directory "$scratch/source"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$scratch" "$scratch/source"
wheels=("$scratch"/*.whl)
grep -v '^torch\(vision\)\?==' constraints.txt > "$scratch/constraints.txt"
size=(schedule=1f1b parallel.partitions=2 parallel.micro_batches=2 data=synthetic data.height_px=16 data.width_px=16)

use() {  # WORDS: run the wheel in $venv, and say that it passed with what the words name
  mkdir "$empty"
  (
    cd "$empty"
    unset PYTHONPATH
    "$venv/bin/gems" simulate "${size[@]}" > simulate.txt
    "$venv/bin/gems-jobs" submit cluster=local "${size[@]}" train.steps=3 train.evaluate=false benchmark.skip_steps=0 > submit.txt
    "$venv/bin/gems" verify "${size[@]}" > verify.txt
  )
  rm -rf "$empty"
  echo "$1: simulate, 3 steps and verify from a wheel passed"
}

for torch in "${@:-$pinned}"; do
  venv=$scratch/venv-$torch
  empty=$scratch/empty-$torch
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$scratch/constraints.txt" \
    "torch==$torch" "${wheels[0]}[mpich]"
  use "torch $torch"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --pre --upgrade hydra-core omegaconf
  use "torch $torch, $("$venv/bin/python" -m pip freeze | grep '^hydra-core')"
  rm -rf "$venv"
done
