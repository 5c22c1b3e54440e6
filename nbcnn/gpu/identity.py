"""This module says what a kernel is, so that another process understands it: a digest of all that its code is made of, and how to make it again.

The *digest* covers what the compiler freezes: options, closure and globals of the function, and the same of every device function and
instruction that they name. The code itself is covered by the hash of the sources (`kernel_cache.SOURCES`); of functions that stand elsewhere
(a user's own op, a test) the bytecode enters the digest, with the version of Python.

The *recipe* is JSON: the module and the name of a kernel, or of the factory that made it, with the factory's arguments. A compile worker
follows it and compares the digest, so a recipe that leads to another kernel is noticed. What has no recipe (a kernel made in an interactive
session, or by a factory whose arguments are closures) is compiled by the process that needs it.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import json
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import numpy as np

import nbcnn
from nbcnn.gpu.kernel_cache import SOURCE_PATHS
from nbcnn.gpu.language import Function, Intrinsic, Name, listening

_ROOT = str(Path(nbcnn.__file__).parent) + "/"


class Unknown(Exception):
    """A kernel names something of which nobody knows whether it changes its code; or there is no recipe."""


def digest(kernel: Function) -> str:
    """SHA-256 of what the kernel's code is made of, beside the sources. Raises Unknown, naming the thing."""
    return hashlib.sha256(json.dumps(_Walk().function(kernel)).encode()).hexdigest()


_digests: weakref.WeakKeyDictionary[Function, str] = weakref.WeakKeyDictionary()
"""The digests of functions that name none of those that name them."""


class _Walk:
    """One walk through what a kernel names."""

    def __init__(self) -> None:
        self._path: list[Function] = []
        self._modules: list[str] = []
        self._highest = 0
        """How far up in `_path` something below the present function refers."""

    def function(self, function: Function) -> Any:
        if (known := _digests.get(function)) is not None:
            return ["function", known]
        depth = len(self._path)
        for at, above in enumerate(self._path):
            if above is function:
                self._highest = min(self._highest, at)
                return ["above", depth - at]
        before, self._highest = self._highest, depth
        self._path.append(function)
        content = [*self._python(function.py_func), self.value(function.options)]
        self._path.pop()
        highest, self._highest = self._highest, min(before, self._highest)
        if highest < depth:  # part of a circle: it is known from its first member only
            return ["function", content]
        _digests[function] = found = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return ["function", found]

    def _python(self, function: FunctionType) -> list[Any]:
        names = _sorted_names(function.__code__)
        found = {name: self.value(function.__globals__[name], names) for name in names if name in function.__globals__}
        cells = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells.append([name, self.value(cell.cell_contents, names)])
            except ValueError:  # not filled
                cells.append([name])
        defaults = self.value((function.__defaults__, function.__kwdefaults__))
        return [function.__module__, function.__code__.co_qualname, _code_elsewhere(function.__code__), found, cells, defaults]

    def value(self, value: Any, names: Mapping[str, None] | None = None) -> Any:
        """`value` in JSON. Of a module, those attributes that are among `names`."""
        if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
            return value
        if isinstance(value, float | complex | bytes | np.generic | np.dtype):
            return [type(value).__name__, repr(value)]
        if isinstance(value, Function):
            return self.function(value)
        if isinstance(value, Intrinsic):
            return ["instruction", value.__name__, value.made_by]
        if isinstance(value, Name):
            return ["name", repr(value)]
        if isinstance(value, tuple | list):
            return [type(value).__qualname__, *(self.value(part) for part in value)]
        if isinstance(value, dict):
            return ["dict", *([self.value(key), self.value(part)] for key, part in value.items())]
        if isinstance(value, np.ndarray):
            return ["array", str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] != "nbcnn" or value.__name__ in self._modules:
                return ["module", value.__name__]
            inside = vars(value)
            self._modules.append(value.__name__)
            found = {name: self.value(inside[name], names) for name in names or () if name in inside}
            self._modules.pop()
            return ["module", value.__name__, found]
        if isinstance(value, enum.Enum):
            return ["enum", _path(type(value)), value.name]
        if is_dataclass(value) and not isinstance(value, type):
            return ["dataclass", _path(type(value)), {field.name: self.value(getattr(value, field.name)) for field in fields(value)}]
        if isinstance(value, FunctionType):
            return ["python", value.__module__, value.__qualname__, _code_elsewhere(value.__code__)]
        if isinstance(value, type | BuiltinFunctionType | MethodDescriptorType | np.ufunc | EllipsisType) or callable(value):
            return ["python", *(str(getattr(value, of, "")) for of in ("__module__", "__qualname__", "__name__"))]
        raise Unknown(f"{type(value).__name__} {value!r:.80}")


@cache
def _sorted_names(code: CodeType) -> dict[str, None]:
    return dict.fromkeys(sorted(_names(code)))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _code_elsewhere(code: CodeType) -> list[Any] | None:
    """Nothing for code of the hashed sources, else the code and the version of Python."""
    if code.co_filename.startswith(_ROOT) and code.co_filename[len(_ROOT) :].startswith(SOURCE_PATHS):
        return None
    return [list(sys.version_info[:2]), *_of_code(code)]


def _of_code(code: CodeType) -> list[Any]:
    constants = [_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, constants]


def _path(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def size(kernel: Function) -> int:
    """Bytes of the bytecode of a kernel and of all device functions that it names, each once: a guess of how long it takes to compile."""
    met: dict[int, FunctionType] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Function):
            if id(value) not in met:
                met[id(value)] = function = value.py_func
                for name in set(_names(function.__code__)):
                    walk(function.__globals__.get(name))
                for cell in function.__closure__ or ():
                    with suppress(ValueError):
                        walk(cell.cell_contents)
        elif isinstance(value, tuple | list):
            for part in value:
                walk(part)

    walk(kernel)
    return sum(len(function.__code__.co_code) for function in met.values())


# Recipes


def recipe(function: Function) -> Any:
    """JSON from which `made_again` makes the same function. Raises Unknown where there is none."""
    py_func = function.py_func
    if function.factory is not None:
        module, factory, arguments = function.factory
        made = {name: _argument(value) for name, value in arguments.items()}
        return {"factory": f"{module}:{factory}", "arguments": made, "name": py_func.__code__.co_qualname, "digest": digest(function)}
    if "<locals>" not in py_func.__code__.co_qualname and _found(_path(py_func)) is function:
        return {"of": _path(py_func)}
    raise Unknown(f"{function!r} is neither a module's own nor made by a factory that can be called again")


def _argument(value: Any) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum | np.generic)):
        return value
    if isinstance(value, Function):
        return {"function": recipe(value)}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, enum.Enum):
        return {"enum": _path(type(value)), "name": value.name}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": _path(type(value)), "parts": [_argument(part) for part in value]}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_argument(part) for part in value]}
    if is_dataclass(value) and not isinstance(value, type):
        return {"dataclass": _path(type(value)), "fields": {f.name: _argument(getattr(value, f.name)) for f in fields(value) if f.init}}
    path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    if "<locals>" not in path and _found(path) is value:
        return {"of": path}
    raise Unknown(f"argument {value!r:.80}")


def _found(path: str) -> Any:
    """What stands under "module:name" in the modules that are imported; None if nothing does."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def made_again(given: Any) -> Function:
    """The function that `recipe` described. Raises Unknown if what is made has another digest, ImportError and whatever a factory raises."""
    if "of" in given:
        made = _named(given["of"])
        if not isinstance(made, Function):
            raise Unknown(f"{given['of']} is no kernel")
        return made
    arguments = {name: _value(value) for name, value in given["arguments"].items()}
    with listening() as heard:
        _named(given["factory"])(**arguments)
    # A factory may keep what it makes, and give out the same when it is called again.
    known = _MADE.setdefault(given["factory"], [])
    known += heard
    for each in known:
        if each.py_func.__code__.co_qualname == given["name"] and digest(each) == given["digest"]:
            return each
    raise Unknown(f"{given['factory']} makes no {given['name']} with the digest {given['digest']}")


_MADE: dict[str, list[Function]] = {}
"""By factory, the functions that its calls from here have made."""


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _value(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    kind = next(iter(given))
    content = given[kind]
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](_value(part) for part in content)
    if kind == "named":
        return _named(content)(*(_value(part) for part in given["parts"]))
    if kind == "dataclass":
        return _named(content)(**{name: _value(value) for name, value in given["fields"].items()})
    makers: dict[str, Any] = {"function": made_again, "dtype": np.dtype, "of": _named, "enum": lambda path: _named(path)[given["name"]]}
    return makers[kind](content)
