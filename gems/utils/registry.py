"""Registries: entries that users choose by name, from the toolkit and from plugins."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from gems.errors import ConfigError, nearest, one_of
from gems.utils.targets import package_folder, search_first

ENTRY_POINTS = "gems.plugins"
KEY = "plugins"
Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries by name.

    The modules that register the toolkit's own entries are imported at the first lookup. A module
    named `package.*` represents all modules of the package. Entries have the order of the package's
    tuple `ORDER`, in whatever order modules were imported; entries that it does not name follow.
    """

    def __init__(self, key: str, *modules: str) -> None:
        self.key = key
        self.entries: dict[str, Entry] = {}
        self._modules = list(modules)

    def register(self, name: str, entry: Entry) -> Entry:
        """Add an entry and return it.

        Raises:
            ValueError: Another entry has the name.
        """
        if self.entries.setdefault(name, entry) is not entry:
            raise ValueError(f"{self.key}={name} is registered already")
        return entry

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a name.

        Raises:
            ConfigError: There is no such entry.
        """
        self._fill()
        if name not in self.entries:
            raise ConfigError(
                self.key,
                name,
                one_of(sorted(self.entries)),
                f"nearest: {', '.join(nearest(name, self.entries))}",
            )
        return self.entries[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry of a name, or `default`."""
        self._fill()
        return self.entries.get(name, default)

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        self._fill()
        return iter(list(self.entries))

    def __len__(self) -> int:
        self._fill()
        return len(self.entries)

    def _fill(self) -> None:
        if self._modules:
            modules = self._modules
            self._modules = []
            order: list[str] = []
            for module in modules:
                package, is_whole, _ = module.partition(".*")
                imported = importlib.import_module(package)
                for submodule in pkgutil.iter_modules(imported.__path__) if is_whole else ():
                    importlib.import_module(f"{package}.{submodule.name}")
                order += getattr(imported, "ORDER", ())
            places = {name: place for place, name in enumerate(order)}
            entries = sorted(
                self.entries.items(), key=lambda item: places.get(item[0], len(places))
            )
            self.entries.clear()
            self.entries.update(entries)
        _load_installed()


def load_plugins(names: Sequence[str], folder: str | None = None) -> None:
    """Import the user's modules, which register their entries.

    `folder` contains the modules that are not installed.

    Raises:
        ConfigError: A module does not exist or cannot be imported.
    """
    for name in names if folder is not None else ():
        search_first(str(folder), name)
    importlib.invalidate_caches()
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not f"{name}.".startswith(f"{error.name}."):
                raise ConfigError(
                    KEY, name, f"imports {error.name}, which is not installed"
                ) from error
            raise ConfigError(
                KEY,
                name,
                f"is no module of {folder or 'this Python'}",
                "run where its file is, or install it",
            ) from error
        except Exception as error:
            raise ConfigError(
                KEY, name, f"cannot be imported ({type(error).__name__}: {error})"
            ) from error


def plugin_folder(names: Sequence[str]) -> str | None:
    """Return the folder of the first plugin that is not installed, or None."""
    for name in names:
        if (folder := package_folder(name.partition(".")[0])) is not None:
            return os.path.abspath(folder)
    return None


@cache
def _load_installed() -> None:
    """Import the plugins of installed packages.

    Raises:
        ConfigError: A plugin cannot be imported.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        load_plugins([entry.value.partition(":")[0]])
