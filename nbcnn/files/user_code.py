"""This module imports functions of the user's that a flag names: file.py:function, or package.module:function."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from nbcnn.files import regular
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest

_LOADED: dict[tuple[str, str], tuple[bytes, str, list[str]]] = {}
"""By flag and the name that a file has there: the source that was run, its package, and the folders in which it may import what ranks compare."""


def hashes() -> dict[str, bytes]:
    """The SHA-256 of the files that flags have loaded, by words for each, for ranks to compare; but --callback's, which rank 0 alone runs.

    So have the modules that these files import, and these import again, if they stand beside the file or in the present folder; what a module of an
    installed package imports is left out. Imports are read in the sources, not in what is loaded, since --callback imports on rank 0 alone.
    """
    found: dict[str, bytes] = {}
    for (flag, where), (source, package, folders) in sorted(_LOADED.items()):
        if flag != "--callback":
            found[f"{where} ({flag})"] = source
            found |= {f"{file} ({flag} {where})": content for file, content in _imported(source, package, folders).items()}
    return {name: hashlib.sha256(content).hexdigest().encode() for name, content in found.items()}


def _compared(folder: Path) -> list[str]:
    """The folder in which ranks compare what a module of it imports; none for the folders of installed packages and of Python itself."""
    installed = folder.name in ("site-packages", "dist-packages") or folder == Path(sysconfig.get_path("stdlib"))
    return [] if installed else [str(folder)]


def _imported(source: bytes, package: str, folders: list[str]) -> dict[str, bytes]:
    """The sources of the modules in `folders` that a module's `source` imports, and these modules' own, by their paths in the folder."""
    found: dict[str, bytes] = {}
    seen = {"nbcnn"}  # compared as a whole
    waiting = [*_names(source, package)]
    while waiting:
        name = waiting.pop()
        places: list[str] | None = folders
        for length in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:length])
            spec = PathFinder.find_spec(part, places)
            if spec is None or part == "nbcnn":
                break
            places = list(spec.submodule_search_locations or [])
            if part not in seen and spec.origin and spec.origin.endswith(".py"):
                content = found["/".join(part.split(".")) + (f"/{Path(spec.origin).name}" if places else ".py")] = regular.read(spec.origin)
                waiting += _names(content, part if places else part.rpartition(".")[0])
            seen.add(part)
    return found


def _names(source: bytes, package: str) -> Iterator[str]:
    """What the `source` of a module of `package` imports: modules, and names in them that may be modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # whoever imports it says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            yield from (f"{base}.{each.name}" for each in node.names)


def is_function(name: str) -> bool:
    """Whether `name` has the form file.py:function or package.module:function.

    Example:
        >>> is_function("leaves.py:load"), is_function("folder:photographs/leaves"), is_function("cifar10")
        (True, False, False)
    """
    where, colon, function = name.rpartition(":")
    return bool(colon) and function.isidentifier() and (where.endswith(".py") or all(part.isidentifier() for part in where.split(".")))


def names_function(part: str, form: str, only: bool = False) -> bool:
    """Whether `part`, a word of a flag that takes functions of the user's beside names, is a function; `only` where there are no names.

    Raises UsageError with the line to write (`without_function`) for a file without a function, and with `only` for any other word.
    """
    if is_function(part):
        return True
    if only or ".py" in (part[-3:], part.rpartition(":")[0][-3:]):
        raise UsageError(without_function(part, form))
    return False


def without_function(path: str, form: str) -> str:
    """What to say of a file whose function is not named: the line to write, with the names that the file defines. `form` says how it is written.

    Example:
        >>> without_function("there-is-none.py", "a network is FILE.py:FUNCTION")
        "'there-is-none.py' names no function: a network is FILE.py:FUNCTION"
    """
    try:
        body = ast.parse(regular.read(path)).body
    except (OSError, SyntaxError, ValueError):  # whoever imports it says so
        body = []
    found = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    found += [node.targets[0].id for node in body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    names = [f"{path}:{name}" for name in found if not name.startswith("_")]
    return f"{quoted(path)} names no function: {form}" + (f", here {', '.join(names[:5])}" if names else "")


def function_of(name: str, flag: str) -> Callable[..., Any]:
    """The function that `name` says, the value of `flag`; its file or module is run.

    Raises UsageError if there is no such file, module or function, or if the file raises.
    """
    where, _, function = name.rpartition(":")
    module = _module(where, flag)
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise UsageError(f"{flag}: {where} has no function {quoted(function)}{nearest(function, known)}; it has {', '.join(known) or 'none'}")
    return found


def _module(where: str, flag: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))  # a console script does not have the present folder there, `python -m` has
            module = importlib.import_module(where)
            if (file := getattr(module, "__file__", None)) and Path(file).is_file():
                top = len(where.split(".")) - (Path(file).name != "__init__.py")
                _LOADED[flag, where] = regular.read(file), module.__package__ or "", _compared(Path(file).parents[top])
            return module
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"{flag}: there is no file {path}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # where dataclasses look for it
        source = regular.read(path)
        _LOADED[flag, where] = source, "", [str(path.parent), str(Path.cwd())]
        # The bytes that were hashed are run: a loader would read the file again, or take an older .pyc of the same size and second.
        exec(compile(source, str(module.__file__), "exec", dont_inherit=True), vars(module))  # noqa: S102
        return module
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{flag}: {where} cannot be imported: {type(error).__name__}: {error}") from error
