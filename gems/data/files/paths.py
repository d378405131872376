"""Paths of data: home folders, files in a folder, and folders of splits."""

from __future__ import annotations

from pathlib import Path

from gems.config.schema import DataConfig
from gems.data.dataset import Split
from gems.errors import ConfigError

# files and folders that operating systems leave next to data; hidden ones are left over, too
LEFT_OVERS = (
    "__MACOSX",
    "@eaDir",
    "Thumbs.db",
    "desktop.ini",
    "lost+found",
    "$RECYCLE.BIN",
    "System Volume Information",
)
# Names of a split's folder. `valid` may also be a class, if there is no folder `train`.
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "valid"),
}
_MAYBE_CLASS = "valid"


def expanded(key: str, text: str) -> Path:
    """Return the path in a key's text, with `~` replaced by the home folder.

    Raises:
        ConfigError: There is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        why = "begins with ~, and there is no such home folder"
        raise ConfigError(key, text, why, "set HOME, or give the whole path") from error


def data_folder(data: DataConfig, layouts: str) -> Path:
    """Return the folder data.path.

    Raises:
        ConfigError: There is no such folder; the error names the expected `layouts`.
    """
    root = None if data.path is None else expanded("data.path", data.path)
    if root is None or not root.is_dir():
        raise ConfigError("data.path", data.path, "no such directory", f"lay it out as {layouts}")
    return root


def is_left_over(name: str) -> bool:
    """Return whether a file or folder is hidden, or is left by the operating system."""
    return name.startswith(".") or name in LEFT_OVERS


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders, except hidden and system files."""
    if not folder.is_dir():
        return []
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(
        path for path in files if not any(map(is_left_over, path.relative_to(folder).parts))
    )


def folders_in(folder: Path) -> list[str]:
    """Return the sorted names of a folder's subfolders, except hidden and system folders."""
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not is_left_over(entry.name)
    )


def split_folders(root: Path, below: str = "", layouts: str = "") -> dict[Split, Path] | None:
    """Return the folders of train and validation in a folder, or None if it has neither.

    A folder for test is ignored.

    Args:
        root: The folder.
        below: The folder that each of them must contain.
        layouts: The expected layouts, for an error.

    Raises:
        ConfigError: Only one of them exists, or there are two folders for validation.
    """
    folders = {
        split: [root / name for name in names if (root / name / below).is_dir()]
        for split, names in SPLIT_NAMES.items()
    }
    if not folders["train"]:
        folders["validation"] = [
            path for path in folders["validation"] if path.name != _MAYBE_CLASS
        ]
    if len(folders["validation"]) > 1:
        names = " and ".join(f"{path.name}/" for path in folders["validation"])
        raise ConfigError(
            "data.path", root, f"has {names}, both for validation", "keep one of them"
        )
    present = [path for paths in folders.values() for path in paths]
    if len(present) == 1:
        what = "/".join(filter(None, (present[0].name, below)))
        raise ConfigError(
            "data.path", root, f"it has {what}/ but not the other split", f"expected {layouts}"
        )
    return {split: paths[0] for split, paths in folders.items()} if present else None
