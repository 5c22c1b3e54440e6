"""The names `cuda`, `types`, `math` and Python's own functions as a simulated kernel sees them.

`named("cuda.shared.array")` is what `nbcnn.gpu.compiler.named` gives of Numba's; `stand_in` exchanges what a kernel names of Python's.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbcnn.gpu.lockstep import numbers
from nbcnn.gpu.lockstep.lanes import active, lane_array, now, truth
from nbcnn.gpu.lockstep.launch import WARP, NotSimulated
from nbcnn.gpu.lockstep.numbers import BOOL, F4, F8, I4, I8, U4, cast
from nbcnn.gpu.lockstep.storage import Global, Local


class NumberType:
    """A type of numbers: casts in kernels, and says what an array holds."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, np.dtype(name)

    def __call__(self, value: Any) -> Any:
        return cast(value, self.dtype)

    def __repr__(self) -> str:
        return self.name


def _dtype(kind: Any) -> np.dtype:
    return kind.dtype if isinstance(kind, NumberType) else np.dtype(kind)


class _Index:
    """threadIdx and the like: the attribute of `now.block` that has x, y and z."""

    def __init__(self, attribute: str) -> None:
        self._of = attrgetter(attribute)

    x = property(lambda self: self._of(now.block)[0])
    y = property(lambda self: self._of(now.block)[1])
    z = property(lambda self: self._of(now.block)[2])


def _grid(axes: int) -> Any:
    """The thread's number in the grid, int64."""
    found = []
    for axis in range(axes):
        block, thread = now.block.block_index[axis], now.block.thread_index[axis]
        found.append(cast(block, I8) * now.block.block_dim[axis] + thread)
    return found[0] if axes == 1 else tuple(found)


def _gridsize(axes: int) -> Any:
    """The threads of the grid along each axis, int64."""
    found = [I8.type(now.block.block_dim[axis] * now.block.grid_dim[axis]) for axis in range(axes)]
    return found[0] if axes == 1 else tuple(found)


def _shared_array(shape: Any, dtype: Any, alignment: int | None = None) -> Any:
    frame = sys._getframe(1)
    # Two device functions made by one factory have the same code, and shared arrays of their own only if those differ.
    key = frame.f_code, frame.f_lasti, shape, str(dtype)
    return now.block.shared(key, tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),), _dtype(dtype))


def _local_array(shape: Any, dtype: Any, alignment: int | None = None) -> Local:
    return Local(shape, _dtype(dtype))


def barrier() -> None:
    """`syncthreads`: all lanes are here already, as far as they come here at all."""
    if now.block.launch.watch is not None:
        now.block.launch.watch.barrier()


def warp_barrier(mask: Any = 0) -> None:
    """`syncwarp`."""
    if now.block.launch.watch is not None:
        now.block.launch.watch.warp_barrier()


def _fence() -> None:
    """`threadfence`: what is written is seen at once."""
    if now.block.launch.watch is not None:
        now.block.launch.watch.fence()


def shuffled(value: Any, source: Callable[[np.ndarray], Any], key: Any) -> Any:
    """`value` of another lane of the warp: `source` gives, of each lane's number in the warp, the one it asks; outside of both it asks itself."""
    if type(value) is not np.ndarray:
        return value
    block = now.block
    index = block.cache.get(key)
    if index is None:
        own = block.lane_of_warp
        wanted = np.broadcast_to(np.asarray(source(own), np.int64), own.shape)
        thread = block.thread - own + wanted
        inside = (wanted >= 0) & (wanted < WARP) & (thread < block.threads)
        index = np.where(inside, np.arange(now.lanes) - own + wanted, np.arange(now.lanes))
        if key is not None:
            block.cache[key] = index
    if block.launch.watch is not None:
        block.launch.watch.shuffle(index)
    return value.take(index)


def _key(name: str, of: Any) -> Any:
    return None if type(of) is np.ndarray else (name, int(of))


def shuffle_xor(mask: Any, value: Any, bits: Any) -> Any:
    return shuffled(value, lambda lane: lane ^ cast(bits, I4), _key("xor", bits))


def _shuffle_down(mask: Any, value: Any, by: Any) -> Any:
    return shuffled(value, lambda lane: lane + cast(by, I4), _key("down", by))


def _shuffle_up(mask: Any, value: Any, by: Any) -> Any:
    return shuffled(value, lambda lane: lane - cast(by, I4), _key("up", by))


def _shuffle(mask: Any, value: Any, lane: Any) -> Any:
    return shuffled(value, lambda own: cast(lane, I4) % WARP, _key("of", lane))


def _ballot(mask: Any, predicate: Any) -> Any:
    """A word a warp, with the bits of the active lanes whose predicate holds."""
    block = now.block
    holds = truth(np.array(lane_array(predicate)))
    if now.mask is not None:
        holds = holds & now.mask
    words = np.zeros(block.count * block.warps, np.uint64)
    np.add.at(words, block.warp, holds.astype(np.uint64) << block.lane_of_warp.astype(np.uint64))
    return words.astype(U4)[block.warp]


def _ffs(word: Any) -> Any:
    """The lowest bit's number, from 1; 0 of 0."""
    lanes = np.atleast_1d(np.asarray(word)).astype(np.int64) & 0xFFFFFFFF
    low = lanes & -lanes
    found = np.where(low > 0, np.log2(np.maximum(low, 1)).astype(I4) + 1, 0).astype(I4)
    return found if type(word) is np.ndarray else found[0]


def _popc(word: Any) -> Any:
    return np.bitwise_count(cast(word, U4) if not isinstance(word, int) else np.uint32(word & 0xFFFFFFFF)).astype(I4)


def _atomic(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """An atomic update: the lanes take their turns in the order of their numbers. Gives what each has found."""

    def apply(array: Any, index: Any, value: Any) -> Any:
        if type(index) is tuple:
            index = array.flat_index(index)
        lanes, mask = active(), now.mask
        at, by = lane_array(index), lane_array(cast(value, array.dtype))
        place = lane_array(array.position(index)) if hasattr(array, "position") else at
        old = np.zeros(now.lanes, array.dtype)
        wrong = (at[lanes] < 0) | (at[lanes] >= array.size)
        if wrong.any():
            array._refuse(index)
        if now.block.launch.watch is not None:
            now.block.launch.watch.atomic(array, index)
        for lane in lanes.tolist():
            old[lane] = array.flat[place[lane]]
            array.flat[place[lane]] = change(old[lane], by[lane])
        now.mask = mask
        return old

    return apply


def _nanosleep(nanoseconds: Any) -> None:
    """Nothing waits here."""


def fast_divide(a: Any, b: Any) -> Any:
    return numbers.divide(a, b)


_NUMBER_TYPES = {
    name: NumberType(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
}
cuda = SimpleNamespace(
    threadIdx=_Index("thread_index"),
    blockIdx=_Index("block_index"),
    blockDim=_Index("block_dim"),
    gridDim=_Index("grid_dim"),
    warpsize=WARP,
    grid=_grid,
    gridsize=_gridsize,
    shared=SimpleNamespace(array=_shared_array),
    local=SimpleNamespace(array=_local_array),
    syncthreads=barrier,
    syncwarp=warp_barrier,
    threadfence=_fence,
    threadfence_block=_fence,
    nanosleep=_nanosleep,
    shfl_xor_sync=shuffle_xor,
    shfl_down_sync=_shuffle_down,
    shfl_up_sync=_shuffle_up,
    shfl_sync=_shuffle,
    ballot_sync=_ballot,
    ffs=_ffs,
    popc=_popc,
    atomic=SimpleNamespace(
        add=_atomic(lambda old, by: old + by),
        max=_atomic(max),
        min=_atomic(min),
        exch=_atomic(lambda old, by: by),
        sub=_atomic(lambda old, by: old - by),
        and_=_atomic(lambda old, by: old & by),
        or_=_atomic(lambda old, by: old | by),
        xor=_atomic(lambda old, by: old ^ by),
    ),
    const=SimpleNamespace(array_like=lambda values: values),
    libdevice=SimpleNamespace(fast_fdividef=fast_divide),
)
types = SimpleNamespace(**_NUMBER_TYPES, boolean=NumberType("bool"))
_ROOTS = {"cuda": cuda, "types": types}


def named(path: str) -> Any:
    """What stands for a name of Numba's. Raises NotSimulated."""
    root, _, rest = path.partition(".")
    try:
        return attrgetter(rest)(_ROOTS[root]) if rest else _ROOTS[root]
    except AttributeError:
        raise NotSimulated(f"the simulator has no {path}; NUMBA_ENABLE_CUDASIM=1 asks Numba's") from None


# -- Python's own functions, and those of math


def _of_lanes(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of floats: float32 unless its argument is float64."""

    def apply(*args: Any) -> Any:
        if all(type(arg) in (int, float) for arg in args):
            try:
                return plain(*args)
            except (ValueError, OverflowError):
                pass
        wide = any(getattr(arg, "dtype", None) is F8 for arg in args)
        return function(*(cast(arg, F8 if wide else F4) for arg in args))

    return apply


def _value_by_value(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """A function of `math` that NumPy does not have, of an array or a number."""

    def apply(x: Any) -> Any:
        values = np.array([function(float(value)) for value in np.ravel(x)])
        return values.reshape(np.shape(x)).astype(x.dtype) if np.ndim(x) else x.dtype.type(values[0])

    return apply


_UFUNCS = ("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tan", "tanh", "sinh", "cosh", "isfinite", "isnan", "isinf")
_MATH: dict[str, Any] = {name: _of_lanes(getattr(np, name), getattr(math, name)) for name in _UFUNCS}
_MATH |= {
    "fabs": _of_lanes(np.abs, math.fabs),
    "pow": _of_lanes(np.power, math.pow),
    "atan2": _of_lanes(np.arctan2, math.atan2),
    "erf": _of_lanes(_value_by_value(math.erf), math.erf),
    "erfc": _of_lanes(_value_by_value(math.erfc), math.erfc),
    "floor": lambda x: cast(_of_lanes(np.floor, np.floor)(x), I8),
    "ceil": lambda x: cast(_of_lanes(np.ceil, np.ceil)(x), I8),
    "pi": math.pi,
    "e": math.e,
    "inf": math.inf,
    "nan": math.nan,
    "tau": math.tau,
}
_math = SimpleNamespace(**_MATH)
_PYTHON: dict[int, Any] = {id(getattr(math, name)): value for name, value in _MATH.items() if callable(value)}
BUILTINS: dict[str, Any] = {
    "min": numbers.smallest,
    "max": numbers.largest,
    "abs": numbers.absolute,
    "int": numbers.whole,
    "float": numbers.double,
    "bool": lambda value: truth(value) if type(value) is np.ndarray else bool(value),
}
_PYTHON |= {id(function): BUILTINS[function.__name__] for function in (min, max, abs)}


def stand_in(value: Any) -> Any:
    """What a kernel sees in place of a module `math`, a function of it or of Python's, or a constant array; `value` itself otherwise."""
    if value is math:
        return _math
    if callable(value) and id(value) in _PYTHON:
        return _PYTHON[id(value)]
    if isinstance(value, np.ndarray) and value.ndim:
        return Global(value, "constant")
    return value


def nanoseconds() -> Any:
    return np.int64(time.perf_counter_ns())


__all__ = ["BOOL", "BUILTINS", "F4", "cuda", "named", "stand_in", "types"]
