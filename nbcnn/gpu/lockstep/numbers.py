"""Arithmetic of lanes by the rules of `nbcnn.gpu.typing32`: 32 bits unless 64 are asked for.

A value is an array with one element per lane, or one number that all lanes share: NumPy's, of a certain type, or Python's, a literal that takes the
type of what it meets. NumPy 2 has the same rules but for a few pairs of types; an operator first does what NumPy does, and looks again only where the
result's type may be another than the rules say.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from nbcnn.gpu.lockstep.lanes import BOOL, I4, lane_array, now, truth

U4, I8, U8, F4, F8 = (np.dtype(name) for name in ("uint32", "int64", "uint64", "float32", "float64"))
_SMALL = {np.dtype(name) for name in ("bool", "int8", "uint8", "int16", "uint16")}
_FITS_I4 = range(-(2**31), 2**31)
_FITS_U4 = range(2**32)


def _type(value: Any) -> Any:
    """The dtype of a value, with small integers as int32; `int` or `float` for a literal."""
    kind = type(value)
    if kind is int or kind is float:
        return kind
    if kind is bool:
        return I4
    dtype = value.dtype
    return I4 if dtype in _SMALL else dtype


def cast(value: Any, dtype: np.dtype) -> Any:
    """`value` as `dtype`; integers keep their low bits, and floats become integers as PTX converts them."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if value.dtype is dtype:
            return value
        return _rounded_to_zero(value, dtype) if value.dtype.kind == "f" and dtype.kind in "iu" else value.astype(dtype)
    if isinstance(value, int | float):
        if isinstance(value, float) and dtype.kind in "iu":
            return _rounded_to_zero(np.float64(value), dtype)
        if dtype.kind in "iu":
            bits = int(value) & (1 << 8 * dtype.itemsize) - 1
            return np.uint64(bits).astype(dtype)
        return dtype.type(value)
    return value  # an address


def _rounded_to_zero(value: Any, dtype: np.dtype) -> Any:
    """Floats as integers, as `cvt.rzi` makes them: what lies beyond the integers becomes the nearest of them, and NaN 0 where both have 32 bits, else
    the integer whose highest bit alone is set. Integers of less than 32 bits are the low bits of one of 32."""
    wide = dtype if dtype.itemsize >= 4 else I4
    ends = np.iinfo(wide)
    below, above = value < float(ends.min), value >= float(ends.max) + (1.0 if wide.itemsize == 4 else 0.0)
    with np.errstate(invalid="ignore"):
        made = value.astype(wide)
    if not np.any(below | above | (value != value)):
        return made.astype(dtype, copy=False)
    both_small = value.dtype.itemsize <= 4 and wide.itemsize == 4
    nan = wide.type(0 if both_small else ends.min or 1 << (ends.bits - 1))
    made = np.where(below, wide.type(ends.min), np.where(above, wide.type(ends.max), np.where(value != value, nan, made)))
    return made.astype(dtype) if np.ndim(value) else dtype.type(made.astype(dtype))


def _common(a: Any, b: Any, divides: bool) -> np.dtype | None:
    """The type in which two values meet; None where NumPy's is right."""
    kinds = {_type(a), _type(b)}
    if F8 in kinds:
        return None
    if F4 in kinds or (float in kinds and not kinds & {I8, U8}):
        return None if kinds & {I8, U8} else F4
    if divides:
        return F4 if not kinds & {I8, U8} else None
    if kinds & {I8, U8}:
        return None
    for literal in (a, b):
        if type(literal) is int and literal not in _FITS_I4 and not (U4 in kinds and literal in _FITS_U4):
            return I8
    return U4 if U4 in kinds else I4


def _again(op: Callable[[Any, Any], Any], a: Any, b: Any, divides: bool = False) -> Any:
    common = _common(a, b, divides)
    return op(a, b) if common is None else op(cast(a, common), cast(b, common))


def _operator(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        try:
            result = op(a, b)
        except OverflowError:
            return _again(op, a, b)
        except TypeError:
            if getattr(a, "dtype", None) is BOOL or getattr(b, "dtype", None) is BOOL:
                return _again(op, a, b)
            raise
        kind = type(result)
        if kind is int or kind is float:
            return result
        dtype = getattr(result, "dtype", None)
        if dtype is F4 or dtype is I4 or dtype is U4 or dtype is None:
            return result
        return _again(op, a, b)

    return apply


add, subtract, multiply, floor_divide, modulo = map(_operator, (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod))
_both_bits, _either_bit, _one_bit = map(_operator, (operator.and_, operator.or_, operator.xor))


def _logic(op: Callable[[Any, Any], Any], general: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        if type(a) is np.ndarray and a.dtype is BOOL and (type(b) in (bool, np.bool_) or (type(b) is np.ndarray and b.dtype is BOOL)):
            return op(a, b)
        if type(b) is np.ndarray and b.dtype is BOOL and type(a) in (bool, np.bool_):
            return op(a, b)
        if type(a) is type(b) is np.bool_:
            return op(a, b)
        return general(a, b)

    return apply


and_, or_, xor = _logic(operator.and_, _both_bits), _logic(operator.or_, _either_bit), _logic(operator.xor, _one_bit)


def divide(a: Any, b: Any) -> Any:
    """a / b: float32 of two integers."""
    try:
        result = a / b
    except ZeroDivisionError:
        result = np.float32(a) / np.float32(b)
    if type(result) is float or result.dtype is F4:
        return result
    return _again(operator.truediv, a, b, divides=True)


def _shift(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A shift is of the left side's type."""

    def apply(a: Any, b: Any) -> Any:
        left = _type(a)
        if left is int:
            if type(b) is int:
                return op(a, b)
            left = I8 if a not in _FITS_I4 else I4
        return op(cast(a, left), cast(b, left))

    return apply


shift_left, shift_right = _shift(operator.lshift), _shift(operator.rshift)


def power(a: Any, b: Any) -> Any:
    """a ** b."""
    return _again(operator.pow, a, b)


def _meet(a: Any, b: Any) -> tuple[Any, Any]:
    """Two values as they meet where branches do: of one type."""
    first, second = _type(a), _type(b)
    if first is second and first not in (int, float):
        small = {getattr(value, "dtype", None) for value in (a, b)}
        return (a, b) if len(small) == 1 else (cast(a, first), cast(b, first))
    kinds = {first, second}
    if type(a) is type(b) is bool:
        return np.bool_(a), np.bool_(b)
    if F8 in kinds:
        return cast(a, F8), cast(b, F8)
    if F4 in kinds or float in kinds:
        common = F8 if kinds & {I8, U8} else F4
        return cast(a, common), cast(b, common)
    if U4 in kinds:
        other = b if first is U4 else a
        if type(other) is int and other in _FITS_U4:
            return cast(a, U4), cast(b, U4)
        return cast(a, I8), cast(b, I8)
    if U8 in kinds and int in kinds:
        return cast(a, U8), cast(b, U8)
    wide = kinds & {I8, U8} or any(type(value) is int and value not in _FITS_I4 for value in (a, b))
    return (cast(a, I8), cast(b, I8)) if wide else (cast(a, I4), cast(b, I4))


_NUMBERS = (int, float, np.generic)
_MANY = 1 << 10
"""Lanes from which on four calls of NumPy are faster than one with a jump for each."""


def where(mask: np.ndarray, a: Any, b: Any) -> Any:
    """a in the lanes of `mask`, b in the others."""
    if a is b:
        return a
    kind = type(a)
    if kind is np.ndarray and type(b) is np.ndarray and a.dtype is b.dtype:
        return _chosen(mask, a, b)
    if kind is tuple:
        return tuple(where(mask, x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "merged"):
        return a.merged(mask, b)
    if kind is not np.ndarray and kind is type(b) and isinstance(a, _NUMBERS) and a == b:
        return a
    if b is None or a is None:
        return b if a is None else a
    return _chosen(mask, *_meet(a, b))


def _chosen(mask: np.ndarray, a: Any, b: Any) -> Any:
    """`np.where` of two values of one type. Of many it takes bits: np.where jumps for every element, which takes 6 ns where half of them go the other
    way, and three operations on bits take 0.6."""
    bits = {4: I4, 8: I8}.get(a.dtype.itemsize)
    if bits is None or mask.size < _MANY:
        return np.where(mask, a, b)
    other = b.view(bits)
    return ((-mask.astype(bits) & (a.view(bits) ^ other)) ^ other).view(a.dtype)


def put(old: Any, new: Any) -> Any:
    """A variable after an assignment: `new` in the active lanes, `old` in the others.

    A name may be used again for something of another kind, an address behind a number: that is another variable, as it is to a compiler.
    """
    if old is None or now.mask is None or _kind(old) != _kind(new):
        return new
    return where(now.mask, new, old)


def _kind(value: Any) -> Any:
    """Numbers are of one kind, tuples of one for each length, addresses and arrays each of their own."""
    if type(value) is np.ndarray or isinstance(value, _NUMBERS):
        return "number"
    return len(value) if type(value) is tuple else type(value)


def element(values: Any, i: Any) -> Any:
    """values[i], also of a tuple by an index that differs between lanes."""
    if type(values) is not tuple or type(i) is not np.ndarray:
        return values[i]
    result = values[-1]
    for k, value in enumerate(values[:-1]):
        result = where(i == k, value, result)
    return result


def select(condition: Any, a: Any, b: Any) -> Any:
    """`a if condition else b` of values that are there already."""
    if type(condition) is not np.ndarray:
        return a if condition else b
    return where(truth(condition), a, b)


def _extreme(plain: Callable[..., Any], lanes: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def two(a: Any, b: Any) -> Any:
        if type(a) in (int, float) and type(b) in (int, float):
            return plain(a, b)
        common = _common(a, b, divides=False)
        result = lanes(a, b) if common is None else lanes(cast(a, common), cast(b, common))
        return result

    def apply(*values: Any) -> Any:
        values = values[0] if len(values) == 1 else values
        result = values[0]
        for value in values[1:]:
            result = two(result, value)
        return result

    return apply


smallest, largest = _extreme(min, np.fmin), _extreme(max, np.fmax)


def absolute(value: Any) -> Any:
    """abs(value)."""
    return abs(value)


def whole(value: Any) -> Any:
    """int(value)."""
    kind = _type(value)
    return value if kind is int else int(value) if kind is float else value if kind.kind in "iu" else cast(value, I8)


def double(value: Any) -> Any:
    """float(value)."""
    return cast(value, F8)


__all__ = ["BOOL", "F4", "F8", "I4", "I8", "U4", "U8", "lane_array"]
