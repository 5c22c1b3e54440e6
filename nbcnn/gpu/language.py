"""This module is the language of kernels: `jit`, `cuda`, `types`, `f4`, `i4`, `u4`, `i8`. Nothing here imports Numba.

Each of them is a *description* of something of the compiler's. A kernel is a Python function whose globals and closure name
descriptions; when it is first launched or compiled, a copy of the function is made that has the real things in their places
(`Function.resolve`), and the copy is what Numba sees. Code, file and line stay those of the original, so a traceback shows the
kernel's own lines. A description is resolved once, so that two kernels share a device function.

Number types cast on the host, too, as Numba's do: `i4(7)` is `np.int32(7)`. Everything else is for kernels only.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np

from nbcnn.gpu import compiler
from nbcnn.gpu.compiler import LOCKSTEP, NUMBA_SIMULATOR, SIMULATOR

__all__ = [
    "NUMBA_SIMULATOR",
    "SIMULATOR",
    "Description",
    "Function",
    "Intrinsic",
    "Number",
    "cuda",
    "f4",
    "i4",
    "i8",
    "jit",
    "resolved",
    "types",
    "u4",
]

_RESOLVING = threading.RLock()
_UNDER_WAY: list[Function] = []
"""Functions that the outermost call of `Function.resolve` has resolved so far."""
_OF_A_MODULE = ("__builtins__", "__name__", "__package__", "__file__")
"""Globals that a function needs beside those that its code names."""


class Description:
    """Something that stands in kernels for one of the compiler's things."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        raise TypeError(f"{self!r} is for kernels: the host cannot call it")

    def resolve(self) -> Any:
        """What it stands for, the same object every time. Raises PackageMissing without Numba-CUDA."""
        raise NotImplementedError


class Name(Description):
    """A name of Numba's, such as `cuda.shared.array`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Python, copy and inspect ask for such names to find out what an object can do.
            raise AttributeError(name)
        return Name(f"{self._path}.{name}")

    def __repr__(self) -> str:
        return self._path

    def resolve(self) -> Any:
        return compiler.named(self._path)


class Number(Name):
    """A type of numbers."""

    def __init__(self, name: str) -> None:
        super().__init__(f"types.{name}")
        self.name = name

    def __call__(self, value: Any) -> Any:
        """`value` as this type, by NumPy."""
        return getattr(np, self.name)(value)


class _Types(Name):
    """Numba's types; those of numbers cast on the host."""

    def __init__(self) -> None:
        super().__init__("types")
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"):
            setattr(self, name, Number(name))


class Intrinsic(Description):
    """An instruction: `make(*args)`, a function of `nbcnn.gpu.compiler`, gives Numba's intrinsic. Numba's simulator has none."""

    def __init__(self, name: str, make: Callable[..., Any], *args: Any) -> None:
        self.__name__, self._make, self._args, self._real = name, make, args, None
        self.made_by = [make.__name__, *args]

    def __repr__(self) -> str:
        return f"<instruction {self.__name__}>"

    def resolve(self) -> Any:
        if LOCKSTEP:
            from nbcnn.gpu.lockstep import instructions

            return instructions.named(self.__name__, self.made_by)
        if NUMBA_SIMULATOR:
            return self  # a kernel may name it where it does not come to in the simulator
        with _RESOLVING:
            if self._real is None:
                self._real = self._make(*self._args)
            return self._real


class Function(Description):
    """A kernel or a device function, as `jit` makes it: `py_func`, and the options of `cuda.jit`.

    A kernel is launched as `kernel[grid, block, stream, shared_bytes](*args)`, device functions are called by kernels.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], factory: tuple[str, str, dict[str, Any]] | None = None) -> None:
        functools.update_wrapper(self, function)
        self.py_func: Any = function
        self.options = options
        self.factory = factory
        """Module, name and arguments of the call that made it; None at module level, and where nobody can call that again."""
        self._real: Any = None
        self.loaded: dict[tuple[str, ...], Any] = {}
        """`launching.Kernel` by the types of the arguments (`kernel_store`)."""
        for heard in _LISTENING:
            heard.append(self)

    @property
    def _kind(self) -> str:
        return "device function" if self.options.get("device") else "kernel"

    def __repr__(self) -> str:
        code = self.py_func.__code__
        return f"<{self._kind} {self.py_func.__module__}.{self.py_func.__qualname__}, {code.co_filename}:{code.co_firstlineno}>"

    def __call__(self, *args: Any, **named: Any) -> Any:
        how = "it is called by kernels" if self.options.get("device") else "launch it as kernel[grid, block](…)"
        raise TypeError(f"the host cannot call {self!r}: {how}; its `py_func` is the Python function")

    def __getitem__(self, launch: Any) -> Any:
        """The kernel with its grid and block, and as they may be the stream and the bytes of shared memory: to be called with its arguments."""
        if self.options.get("device"):
            raise TypeError(f"the host cannot launch {self!r}: it is called by kernels")
        if SIMULATOR:
            return self.resolve()[launch]
        from nbcnn.gpu.kernel_store import loaded

        grid, block, *rest = launch
        stream, shared = rest + [None, 0][len(rest) :]
        return lambda *args: loaded(self, args).bind(grid, block, args, shared).run(stream)

    def resolve(self) -> Any:
        """Numba's dispatcher (the simulator's kernel) of a copy of the function that has the real things in place of descriptions."""
        with _RESOLVING:
            if self._real is None:
                function = self.py_func
                cells = tuple(CellType() for _ in function.__closure__ or ())
                known: dict[str, Any] = {name: function.__globals__[name] for name in _OF_A_MODULE if name in function.__globals__}
                made = _copied(function, known, cells, is_kernel=not self.options.get("device"))
                made.__kwdefaults__ = resolved(function.__kwdefaults__)
                made.__doc__, made.__module__, made.__qualname__ = function.__doc__, function.__module__, function.__qualname__
                made.__annotations__ = function.__annotations__
                # Known before what it names is looked at: it may name itself.
                self._real, outermost = compiler.dispatcher(made, self.options), not _UNDER_WAY
                _UNDER_WAY.append(self)
                try:
                    _fill(known, cells, function)
                except BaseException:
                    # What was resolved on the way may name this one.
                    for each in _UNDER_WAY[_UNDER_WAY.index(self) :]:
                        each._real = None
                    raise
                finally:
                    if outermost:
                        _UNDER_WAY.clear()
            return self._real


_LISTENING: list[list[Function]] = []


@contextmanager
def listening() -> Iterator[list[Function]]:
    """Within, the list has every kernel and device function that is made."""
    heard: list[Function] = []
    _LISTENING.append(heard)
    try:
        yield heard
    finally:
        # Not `remove`, which compares: two lists may be equal.
        _LISTENING[:] = [each for each in _LISTENING if each is not heard]


_VARARGS, _VARKEYWORDS = 0x04, 0x08


def _factory_call(function: Any, frame: FrameType | None) -> tuple[str, str, dict[str, Any]] | None:
    """(module, factory, arguments) of the outermost function in which `function` is being defined; None if it is defined at module level,
    or where that call has ended."""
    outer, inner, _ = function.__code__.co_qualname.partition(".<locals>.")
    while inner and frame is not None:
        code = frame.f_code
        if code.co_qualname == outer and frame.f_globals.get("__name__") == function.__module__:
            if code.co_flags & (_VARARGS | _VARKEYWORDS):
                return None
            values = frame.f_locals
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            return function.__module__, outer, {name: values[name] for name in names if name in values}
        frame = frame.f_back
    return None


def _copied(function: Any, known: dict[str, Any], cells: tuple[CellType, ...], is_kernel: bool) -> FunctionType:
    """A copy of a function with these globals and this closure, both to be filled; for the simulator its code is rewritten."""
    defaults = resolved(function.__defaults__)
    if not LOCKSTEP:
        return FunctionType(function.__code__, known, function.__name__, defaults, cells)
    from nbcnn.gpu.lockstep import names, rewrite

    code, by_name = rewrite.rewritten(function, is_kernel), dict(zip(function.__code__.co_freevars, cells, strict=True))
    known.update(names.BUILTINS | rewrite.RUNTIME)
    copy = FunctionType(code, known, function.__name__, defaults, tuple(by_name[name] for name in code.co_freevars))
    copy.__qualname__ = function.__qualname__
    return copy


def _fill(known: dict[str, Any], cells: tuple[CellType, ...], function: Any) -> None:
    """Put what `function` names into the globals and the closure of its copy."""
    names = dict.fromkeys(_names(function.__code__))
    for name in names:
        if name in function.__globals__:
            known[name] = _inside(function.__globals__[name], names)
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        try:
            content = original.cell_contents
        except ValueError:  # not filled, or not yet
            continue
        cell.cell_contents = _inside(content, names)


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in `code` and in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _inside(value: Any, names: dict[str, None], seen: tuple[ModuleType, ...] = ()) -> Any:
    """`resolved(value)`; for a module with descriptions among `names`, a copy with those attributes resolved."""
    if LOCKSTEP:
        from nbcnn.gpu.lockstep import names as simulated

        value = simulated.stand_in(value)
    if not isinstance(value, ModuleType):
        return resolved(value)
    if value in seen:
        return value
    content = vars(value)
    found = {name: _inside(content[name], names, (*seen, value)) for name in names if name in content}
    if all(found[name] is content[name] for name in found):
        return value
    # A name that cannot be imported: pickled for a worker process, the copy goes with what is in it, not as the name of the original.
    copy = ModuleType(f"{value.__name__}, resolved")
    vars(copy).update(found)
    return copy


def resolved(value: Any) -> Any:
    """`value` with what it describes in place of descriptions, also in tuples, lists and dictionaries; itself if there is none in it."""
    if isinstance(value, Description):
        return value.resolve()
    if isinstance(value, tuple | list):
        parts = [resolved(part) for part in value]
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        return type(value)._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, dict):
        items = {key: resolved(part) for key, part in value.items()}
        return value if all(items[key] is value[key] for key in items) else items
    return value


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Describe a kernel, or with `device=True` a device function; the options are those of Numba's `cuda.jit`.

    `launch_bounds=(threads, blocks)` says what the compiler may count on. `cluster=8`, which Numba does not have: every 8 blocks along x are a
    cluster (sm_90; `nbcnn.ops.ptx.cluster`), however the kernel is launched. Nothing is compiled before the first launch; compiled kernels are
    kept on disk (`nbcnn.gpu.kernel_cache`). The simulators leave out the options that they do not know.
    """
    return lambda function: Function(function, options, _factory_call(function, sys._getframe(1)))


cuda: Any = Name("cuda")
"""Indices, barriers, shared and local arrays, atomics, shuffles: Numba's `cuda` inside a kernel."""
types: Any = _Types()
f4: Any = types.float32
i4: Any = types.int32
u4: Any = types.uint32
i8: Any = types.int64
