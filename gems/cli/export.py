"""`gems export`: the weights of a run as a plain state dict of the network's own class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gems.cli.evaluate import LAST, weights_folder
from gems.cli.framework import Options, print_json
from gems.engine.checkpoint.state_dict import SAFETENSORS, trained_model, write_state_dict
from gems.errors import ConfigError
from gems.models import title_of
from gems.runs.folder import RunFolder
from gems.runs.lookup import find_run

SUFFIXES = (SAFETENSORS, ".pt", ".pth")


def export(words: Sequence[str], options: Options) -> int:
    """Write the weights of a run, or of its newest checkpoint, to the file of --out.

    Raises:
        ConfigError: No run, none or no such file to write, or weights that do not fit the network's
        class.
    """
    if len(words) != 1:
        raise ConfigError(
            "run",
            " ".join(words) or "none",
            "must be one run",
            "gems export RUN --out model.safetensors",
        )
    out = Path(options.chosen.get("--out", f"model{SAFETENSORS}"))
    if out.suffix not in SUFFIXES:
        raise ConfigError("--out", out, "must end with " + ", ".join(SUFFIXES))
    if not out.absolute().parent.is_dir():
        raise ConfigError("--out", out, "its folder does not exist", "make the folder first")
    path = find_run(words[0])
    spec = RunFolder(path).read_spec()
    state = trained_model(
        weights_folder(path, options.chosen.get("--weights", LAST)), spec.model, spec.data
    ).state_dict()
    write_state_dict(state, out)
    num_bytes = sum(value.nbytes for value in state.values())
    name = spec.model.target or title_of(spec.model)
    if options.json:
        print_json(
            {
                "run": str(path),
                "out": str(out),
                "tensors": len(state),
                "bytes": num_bytes,
                "model": name,
            }
        )
    else:
        print(
            f"{out}: {len(state)} tensors, {num_bytes / 1e6:.1f} MB, for"
            f" load_state_dict(strict=True) of {name}"
        )
    return 0
