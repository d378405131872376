"""Targets, the user's code named as "package.module.Class": find, call and report errors in it.

A process without torch asks a child process about such code (`ask_child`) and caches the answer by
the hash of the code. Errors name the line of the user's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import linecache
import os
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, cast

from gems.errors import ConfigError, nearest
from gems.utils.run_module import RUN_MODULE

_TIME_LIMIT_S = 600.0
_UNLOADED = ("nms", "qnms")  # operators that torchvision 0.28 declares at import
_libraries: list[Any] = []
_OWN_FOLDERS = ("gems/", "jobs/", "analysis/", "conf/")
# The package's folder as tracebacks name it; in an archive, this is not the path of a file.
_OURS = Path(nearest.__code__.co_filename).parent


def load_target(key: str, target: str, path: str | None = None) -> Callable[..., Any]:
    """Return the class or function that a target names.

    The form is "package.module.Class" or "package.module:Class". `path` is the folder of the user's
    packages. It stays first in `sys.path` for later imports.

    Raises:
        ConfigError: The module does not exist or cannot be imported, it has no such name, or the
            object cannot be called.
    """
    module_name, _, name = target.partition(":") if ":" in target else target.rpartition(".")
    if not module_name or not all(
        word.isidentifier() for word in f"{module_name}.{name}".split(".")
    ):
        raise ConfigError(key, target, "must be package.module.Class or package.module:Class")
    if path is not None:
        search_first(path, module_name)
    importlib.invalidate_caches()
    try:
        entry: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise target_error(key, target, "needs a module that is not there", error) from error
        where = f"no module named {error.name}" + (f" in {path}" if path else "")
        path_key = f"{key.rpartition('.')[0]}.path"
        raise ConfigError(
            key, target, where, f"set {path_key} to the folder that holds the package"
        ) from error
    except Exception as error:
        raise target_error(key, target, "cannot be imported", error) from error
    for word in name.split("."):
        if not hasattr(entry, word):
            near = nearest(word, [other for other, value in vars(entry).items() if callable(value)])
            advice = f"nearest: {', '.join(near)}" if near else ""
            raise ConfigError(key, target, f"nothing named {word} in {module_name}", advice)
        entry = getattr(entry, word)
    if not callable(entry):
        raise ConfigError(
            key, target, f"must name a class or a function, and is of type {type(entry).__name__}"
        )
    return cast(Callable[..., Any], entry)


def import_module(name: str) -> Any:
    """Import a module, even if it needs a torchvision for GPUs and torch is built without them.

    Such a torchvision declares operators that it cannot load. Only code that uses them fails.
    """
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or "operator torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _UNLOADED:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)  # keep it alive: its operators disappear with it
        return importlib.import_module(name)


def call_target(
    key: str, target: str, kwargs: Mapping[str, Any], path: str | None, *args: Any
) -> Any:
    """Call the object that a target names with `args` and `kwargs`, and return the result.

    Raises:
        ConfigError: As in `load_target`, or the object does not accept the keyword arguments, or
            the call fails.
    """
    make = load_target(key, target, path)
    check_kwargs(key, make, kwargs, *args)
    try:
        return make(*args, **kwargs)
    except ConfigError:
        raise
    except Exception as error:
        raise target_error(key, target, "cannot be constructed", error) from error


def check_kwargs(key: str, make: Callable[..., Any], kwargs: Mapping[str, Any], *args: Any) -> None:
    """Check that a callable accepts `args` and `kwargs`.

    Raises:
        ConfigError: It does not accept them; the message lists its parameters.
    """
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # written in C: the call itself will fail
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        empty = inspect.Parameter.empty
        words = ", ".join(
            str(parameter.replace(annotation=empty)) for parameter in signature.parameters.values()
        )
        name = getattr(make, "__qualname__", type(make).__name__)
        raise ConfigError(
            f"{key.rpartition('.')[0]}.kwargs",
            dict(kwargs),
            f"{name} does not take them ({error})",
            f"it takes ({words})",
        ) from error


def target_error(
    key: str, target: str, what: str, error: BaseException, why: str | None = None
) -> ConfigError:
    """Return the error that says what failed in the user's code, why, and at which line."""
    if why is None:
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    place = _place(error)
    return ConfigError(key, target, f"{what}{f' at {place}' if place else ''}: {why}")


def _place(error: BaseException) -> str:
    """Return "file:line `source`" of the innermost line outside torch and this toolkit, or ""."""
    if isinstance(error, SyntaxError):
        return f"{short_name(error.filename or '')}:{error.lineno} `{(error.text or '').strip()}`"
    torch = sys.modules.get("torch")
    not_theirs = {_OURS} if torch is None else {_OURS, Path(str(torch.__file__)).parent}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        if name.startswith("<") or not_theirs & set(Path(name).parents):
            continue
        return f"{short_name(name)}:{line} `{linecache.getline(name, line).strip()}`"
    return ""


def short_name(name: str) -> str:
    """Return a file's name relative to the current folder, if it is in that folder."""
    relative = os.path.relpath(name)
    return name if relative.startswith("..") else relative


def locate(key: str, target: str, path: str | None) -> tuple[str, str | None]:
    """Return the name of a target, and the folder of its package if that is not installed.

    The folder is `path`, or otherwise the current folder or one of PYTHONPATH. No code runs.

    Raises:
        ConfigError: The target is not a dotted name, or the path is not a folder.
    """
    words = target.replace(":", ".").split(".")
    if len(words) < 2 or target.count(":") > 1 or not all(word.isidentifier() for word in words):
        raise ConfigError(key, target, "must be package.module.Class or package.module:Class")
    if path is not None and not Path(path).is_dir():
        raise ConfigError(f"{key.rpartition('.')[0]}.path", path, "is not a folder")
    folder = package_folder(words[0]) if path is None else path
    return words[-1], None if folder is None else str(Path(folder).absolute())


def package_folder(name: str) -> str | None:
    """Return the first folder with a package: the current one, one of PYTHONPATH, or None."""
    folders = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return next((folder for folder in folders if _find(name, [folder]) is not None), None)


@lru_cache(maxsize=64)
def source_of(target: str, path: str | None) -> str | None:
    """Return a hash of the code around a target, without running the code.

    Return None if the code is not on the path.
    """
    digest = hashlib.sha256()
    has_any = False
    for name, data in sources_of(target, path):
        digest.update(f"{name}:{len(data)}:".encode())
        digest.update(data)
        has_any = True
    return digest.hexdigest()[:16] if has_any else None


def sources_of(target: str, path: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the Python files around a target.

    These are the files of its outermost package, or those in the folder of its module. Names are
    relative to the folder that contains them. A process that runs from a code archive reads the
    files from the archive, if they are in it.
    """
    top = target.replace(":", ".").partition(".")[0]
    archive = code_archive()
    if archive is not None and (names := archived_names(archive, top)):
        with zipfile.ZipFile(archive) as code:
            yield from ((name, code.read(name)) for name in names)
        return
    spec = _find(top, [path] if path else None)
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    base = folders[0].parent if folders else Path(str(spec.origin)).parent
    files = (
        {file for folder in folders for file in folder.rglob("*.py")}
        if folders
        else set(base.glob("*.py"))
    )
    for file in sorted(file for file in files if file.is_file()):
        name = file.relative_to(base).as_posix() if file.is_relative_to(base) else file.name
        yield name, file.read_bytes()


def code_archive() -> Path | None:
    """Return the archive that this process runs from, or None if it runs from files."""
    spec = PathFinder.find_spec("gems", sys.path)
    root = Path(str(spec.origin)).parents[1] if spec is not None and spec.origin else None
    return root if root is not None and root.is_file() else None


def search_first(folder: str, module_name: str) -> None:
    """Put the folder of a user's module first in `sys.path`.

    Do nothing if this process runs from an archive that has the module.
    """
    archive = code_archive()
    if folder not in sys.path and not (
        archive and archived_names(archive, module_name.partition(".")[0])
    ):
        sys.path.insert(0, folder)


@lru_cache(maxsize=16)
def archived_names(archive: Path, top: str) -> tuple[str, ...]:
    """Return the user's Python files in an archive that belong to a top-level name.

    These are the files of its package, or all modules if it is a module.
    """
    with zipfile.ZipFile(archive) as file:
        names = sorted(
            name
            for name in file.namelist()
            if name.endswith(".py") and not name.startswith(_OWN_FOLDERS)
        )
    package = tuple(name for name in names if name.startswith(f"{top}/"))
    is_module = f"{top}.py" in names
    return package or (
        tuple(name for name in names if "/" not in name and name != "__main__.py")
        if is_module
        else ()
    )


def _find(name: str, folders: list[str] | None) -> ModuleSpec | None:
    PathFinder.invalidate_caches()
    return PathFinder.find_spec(name, folders)


def ask_child(key: str, target: str, module: str, *arguments: str) -> dict[str, Any]:
    """Return the answer of a module that runs the user's code in its own process.

    The module answers with `answer`.

    Raises:
        ConfigError: The module refuses, or the process ends without an answer.
    """
    ended = subprocess.run(
        [sys.executable, *RUN_MODULE, module, *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT_S,
    )
    try:
        document: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (ended.stderr.strip() or "nothing was said").splitlines()[-1]
        why = f"the process that reads it ended with code {ended.returncode} ({last})"
        raise ConfigError(key, target, why) from None
    if "refused" in document:
        raise ConfigError(*document["refused"])
    return document


def answer(
    make: Callable[[], dict[str, Any]], as_refusal: Callable[[Exception], ConfigError]
) -> None:
    """Print the result of `make`, or its refusal, as one line of JSON.

    All other output goes to stderr.
    """
    with contextlib.redirect_stdout(sys.stderr):
        try:
            document = make()
        except Exception as error:  # an error of the toolkit is also shown to the user as one line
            refusal = error if isinstance(error, ConfigError) else as_refusal(error)
            document = {
                "refused": [refusal.key, str(refusal.value), refusal.allowed, refusal.advice]
            }
    print(json.dumps(document), flush=True)
