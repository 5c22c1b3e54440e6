"""Device functions on whole NumPy arrays: what the simulator does with a statement of a kernel, without a kernel around it.

A map's function is written once, for one element. `on_arrays` gives the function of arrays that the NumPy path calls, where the map has no reference
of its own: activations, and a user's optimizer or loss. It needs neither the simulator's variable of the environment nor Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CellType, FunctionType
from typing import Any

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.gpu.language import Description, Function, Intrinsic, Name
from nbcnn.gpu.lockstep import instructions, names, rewrite
from nbcnn.gpu.lockstep.lanes import lane_array, now
from nbcnn.gpu.lockstep.launch import _ONE_AT_A_TIME

CHUNK = 1 << 16
"""Elements that a statement runs over at a time: what it reads and makes stays in the second-level cache."""


def on_arrays(function: Function) -> Callable[..., Any]:
    """(arrays of one shape, and numbers) -> what `function` makes of their elements: an array like them, or a tuple of arrays.

    A new array is of the first operand's type, or of float64 where the function makes that. `out` of one value takes it, in place of a new array; it
    may be one of the operands.
    """
    made = _made(function)

    def run(*operands: Any, out: np.ndarray | None = None) -> Any:
        arrays = [each for each in operands if isinstance(each, np.ndarray) and each.ndim]
        shape, dtype, count = arrays[0].shape, arrays[0].dtype, arrays[0].size
        flat = [np.ascontiguousarray(each).reshape(-1) if isinstance(each, np.ndarray) and each.ndim else each for each in operands]
        outs = [out.reshape(-1)] if out is not None and out.flags.c_contiguous else []
        several = False
        for first in range(0, count, CHUNK):
            last = min(first + CHUNK, count)
            found = _one_chunk(made, [each[first:last] if isinstance(each, np.ndarray) and each.ndim else each for each in flat], last - first)
            several = isinstance(found, tuple)
            values = found if several else (found,)
            kinds = [np.result_type(dtype, each) if each.dtype.kind == "f" else dtype for each in values]
            if not outs and last == count:
                outs = [each.astype(kind, copy=False) for each, kind in zip(values, kinds, strict=True)]
                break
            outs = outs or [np.empty(count, kind) for kind in kinds]
            for each, value in zip(outs, values, strict=True):
                each[first:last] = value
        made_of_shape = tuple(each.reshape(shape) for each in outs)
        if out is not None and not out.flags.c_contiguous:
            np.copyto(out, made_of_shape[0])
        return made_of_shape if several else made_of_shape[0]

    return run


def _one_chunk(made: Callable[..., Any], operands: list[Any], lanes: int) -> Any:
    before = now.mask, now.empty, now.lanes, now.block
    with _ONE_AT_A_TIME, np.errstate(all="ignore"):
        try:
            now.mask, now.empty, now.lanes, now.block = None, np.zeros(lanes, np.bool_), lanes, None
            found = made(*operands)
            return tuple(lane_array(each) for each in found) if isinstance(found, tuple) else lane_array(found)
        finally:
            now.mask, now.empty, now.lanes, now.block = before


@cache
def _made(function: Function) -> Callable[..., Any]:
    """The rewritten function, with what stands in the simulator for the things that it names."""
    return lanes_of(function.py_func, False, inside)


def lanes_of(original: Any, is_kernel: bool, inside: Callable[[Any], Any]) -> Any:
    """A function rewritten to run for all lanes, with `inside(value)` in place of every value that it names."""
    code = rewrite.rewritten(original, is_kernel)
    known: dict[str, Any] = names.BUILTINS | rewrite.RUNTIME
    known |= {name: inside(value) for name in _names(original.__code__) if (value := original.__globals__.get(name)) is not None}
    cells = {name: CellType(inside(cell.cell_contents)) for name, cell in zip(original.__code__.co_freevars, original.__closure__ or (), strict=True)}
    return FunctionType(code, known, original.__name__, original.__defaults__, tuple(cells[name] for name in code.co_freevars))


def _names(code: Any) -> set[str]:
    return {*code.co_names, *(name for each in code.co_consts if hasattr(each, "co_names") for name in _names(each))}


def inside(value: Any) -> Any:
    """What a function sees in place of what it names of nbcnn's and Python's."""
    if isinstance(value, Function):
        return _made(value)
    if isinstance(value, Intrinsic):
        return instructions.named(value.__name__, value.made_by)
    if isinstance(value, Name):
        return names.named(repr(value))
    if isinstance(value, Description):
        raise names.NotSimulated(f"{quoted(value)} has no form for arrays")
    return names.stand_in(value)
