"""Files of a user's configuration folder in Hydra's own spelling.

`_target_` beside its keyword arguments.
"""

from __future__ import annotations

from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

SCHEME = "gems-file"
_TARGET = "_target_"
_HYDRA = ("_target_", "_partial_", "_convert_", "_recursive_")
# What stays a key of the group beside `_target_`; all others are keyword arguments of the target.
_KEYS = {
    "model": ("path",),
    "loss": ("path", "output"),
    "optimizer": ("path", "decay_norms_and_biases", "layer_decay", "frozen"),
    "lr_scheduler": ("path", "interval", "warmup_steps", "warmup_start"),
}


class TargetFileSource(FileConfigSource):
    """A folder of YAML files, of which those of groups with a target may have Hydra's spelling."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the folders in hydra.searchpath."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's configuration, with `_target_` as target and kwargs."""
        result = super().load_config(config_path)
        group = config_path.partition("/")[0]
        if group in _KEYS and isinstance(result.config, DictConfig) and _TARGET in result.config:
            values = OmegaConf.to_container(result.config)
            assert isinstance(values, dict)
            result.config = OmegaConf.create(
                _translated(group, {str(key): value for key, value in values.items()})
            )
        return result


def _translated(group: str, values: dict[str, Any]) -> dict[str, Any]:
    sections = {key: values[key] for key in (*_KEYS[group], "defaults") if key in values}
    target_kwargs = {
        key: value for key, value in values.items() if key not in (*sections, *_HYDRA, "kwargs")
    }
    return {
        **sections,
        "target": values[_TARGET],
        "kwargs": {**target_kwargs, **(values.get("kwargs") or {})},
    }


def register() -> None:
    """Let Hydra read folders of the scheme."""
    Plugins.instance().register(TargetFileSource)
