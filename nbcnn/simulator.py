"""The simulator for kernels of your own, written for numba-cuda or numba-cuda-mlir: it finds what is wrong, without a GPU or a compiler.

    from nbcnn.simulator import checking, simulated

    with checking() as found:
        simulated(kernel)[grid, block](x, y)
    print(*found.faults, *found.costly(), sep="\\n")

Nothing needs to be set in the environment, and nothing is compiled. Numbers have 32 bits unless the kernel asks for 64 (`nbcnn.gpu.typing32`), where
Numba computes in int64 and float64; an index below zero is out of bounds, where Numba counts from the end.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.gpu.language import Name
from nbcnn.gpu.lockstep import arrays, names
from nbcnn.gpu.lockstep.check import checking
from nbcnn.gpu.lockstep.findings import Fault, Found, LaunchReport, Line
from nbcnn.gpu.lockstep.launch import Kernel, NotSimulated

__all__ = ["Fault", "Found", "LaunchReport", "Line", "NotSimulated", "checking", "simulated"]

_COMPILERS = ("numba", "numba_cuda", "numba_cuda_mlir")


def simulated(kernel: Any) -> Kernel:
    """`kernel`, to be launched in the simulator as `simulated(kernel)[grid, block](*args)`; stream and bytes of shared memory may follow the block.

    kernel  what `@cuda.jit` of numba-cuda or numba-cuda-mlir made, or `nbcnn.gpu.language.jit`, or a plain function of that form. Device functions
            that it names are simulated with it. Its source must be in a file or a cell of a notebook.

    A launch takes contiguous NumPy arrays of any shape, changes them in place, and numbers. Every launch runs to its end before the next line. Under
    `checking` it is looked at; without, accesses out of bounds raise IndexError.

    Raises UsageError for what is no kernel; a launch raises `NotSimulated` for names of `cuda` that the simulator does not have, and SyntaxError for
    statements that no GPU takes.

    Example:
        >>> import numpy as np
        >>> from nbcnn.gpu.language import cuda, jit
        >>> from nbcnn.simulator import checking, simulated
        >>> @jit()
        ... def shifted(x, y):
        ...     y[cuda.grid(1)] = x[cuda.grid(1) + 1]
        >>> with checking() as found:
        ...     simulated(shifted)[2, 32](np.zeros(64, np.float32), np.zeros(64, np.float32))
        >>> found.kinds()
        {'out of bounds'}
    """
    function = _function(kernel)
    if function is None:
        raise UsageError(f"the simulator takes kernels, which are functions; this is {quoted(kernel)}")
    return Kernel(arrays.lanes_of(function, True, _inside), dict(getattr(kernel, "options", None) or {}))


def _function(value: Any) -> Any:
    """The Python function of a dispatcher, or of a kernel of Numba's own simulator; a plain function itself; None for anything else."""
    for found in (getattr(value, "py_func", None), getattr(value, "fn", None), value):
        if hasattr(found, "__code__"):
            return found
    return None


class _Root:
    """What stands for a module of a compiler: its names, and a word for those that the simulator does not have."""

    def __init__(self, path: str, content: Any) -> None:
        self._path, self._content = path, content

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # Python asks for such names to find out what an object can do
        try:
            found = getattr(self._content, name)
        except AttributeError:
            raise NotSimulated(f"the simulator has no {self._path}.{name}") from None
        return _Root(f"{self._path}.{name}", found) if isinstance(found, SimpleNamespace) else found


_CUDA, _TYPES = _Root("cuda", names.cuda), _Root("types", names.types)
_WHOLE = _Root("numba", SimpleNamespace(**vars(names.types), cuda=names.cuda, types=names.types))
_MODULES = {"cuda": _CUDA, "types": _TYPES}


def _inside(value: Any) -> Any:
    """What a kernel sees in place of `value`, which it names."""
    if isinstance(value, Name):
        root, _, rest = repr(value).partition(".")
        return attrgetter(rest)(_MODULES[root]) if rest else _MODULES[root]
    path = value.__name__ if isinstance(value, ModuleType) else getattr(type(value), "__module__", "")
    if str(path).partition(".")[0] not in _COMPILERS and getattr(value, "__module__", "").partition(".")[0] not in _COMPILERS:
        return arrays.inside(value)
    if isinstance(value, ModuleType):
        return _MODULES.get(path.rpartition(".")[2], _WHOLE)
    if (function := _function(value)) is not None and hasattr(value, "py_func"):
        return arrays.lanes_of(function, False, _inside)
    kind = getattr(names.types, "boolean" if getattr(value, "name", "") == "bool" else str(getattr(value, "name", "")), None)
    return kind if kind is not None else _named(value)


def _named(value: Any) -> Any:
    """What stands for a thing that `from numba.cuda import …` gave."""
    for root in ("numba.cuda", "numba_cuda_mlir.cuda"):
        for name, own in vars(sys.modules.get(root, SimpleNamespace())).items():
            if own is value and hasattr(names.cuda, name):
                return getattr(_CUDA, name)
    raise NotSimulated(f"the simulator has no {quoted(value)}")
