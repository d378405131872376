#!/usr/bin/env bash
# Prove and measure on a machine with a GPU, in one call of at most eight minutes: scripts/on_gpu.sh [1|2|3] [--out FILE]
# [--only TEXT] [--small]; a number runs one part. Where Python lacks what the toolkit needs, a virtual environment without pip is made in VENV
# (.venv-gpu) that sees the packages of PYTHON (python3), and the wheels in GEMS_WHEELS are put into it; no network.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv-gpu}

# Prints what cannot be imported, or started, by the interpreter $1.
missing() {
  "$1" - <<'PYTHON'
import importlib.util, os, shutil, sys
names = ("torch", "numpy", "scipy", "h5py", "yaml", "safetensors", "skimage", "matplotlib", "pynvml", "tqdm", "pytest",
         "hydra", "omegaconf", "antlr4", "submitit", "mpi4py")
lacking = [name for name in names if importlib.util.find_spec(name) is None]
beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
if not os.access(beside, os.X_OK) and shutil.which("mpiexec") is None:
    lacking.append("mpiexec")
print(*lacking, sep=", ")
PYTHON
}

refuse() {
  echo "on_gpu.sh: $1" >&2
  exit 2
}

lacking=$(missing "$python") || refuse "PYTHON=$python does not run: name a Python 3.11 or later"
if [[ -n $lacking && -x $venv/bin/python ]]; then
  python=$venv/bin/python
  lacking=$(missing "$python") || refuse "VENV=$venv does not run: remove it"
fi
if [[ -n $lacking ]]; then
  wheels=${GEMS_WHEELS:-}
  [[ -n $wheels ]] || refuse "GEMS_WHEELS=: missing here: $lacking; name a folder of wheels, or install them"
  compgen -G "$wheels/*.whl" >/dev/null || refuse "GEMS_WHEELS=$wheels: there is no wheel in it; missing here: $lacking"
  base=${PYTHON:-python3}
  "$base" -m venv --without-pip "$venv"
  python=$venv/bin/python
  "$base" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_machine.pth"
  "$base" -m pip --python "$python" install --quiet --no-index --no-deps --disable-pip-version-check "$wheels"/*.whl \
    || refuse "GEMS_WHEELS=$wheels: its wheels do not suit $("$base" --version); take those of this Python"
  lacking=$(missing "$python")
  [[ -z $lacking ]] || refuse "GEMS_WHEELS=$wheels: still missing: $lacking; add their wheels"
fi
exec "$python" -m scripts.gpu "$@"
