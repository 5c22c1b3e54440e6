"""This module defines how values are stored: float32, tfloat32 (a float32 already rounded to tf32's 10 mantissa bits), bfloat16, float16.

The dtype of a Buf says how whoever writes it rounds. A tensor-core kernel can then take its operands as they lie.
bfloat16 is kept as uint16 (NumPy has no such type): the upper half of a float32. float16 is kept as uint16, too, so that kernels move either alike.
tfloat32 is kept as float32. All round to nearest: bfloat16 and float16 ties to even (`cvt.rn.bf16`, `cvt.rn.f16`), tf32 ties away from zero
(`cvt.rna.tf32`). Beyond 65,504 a float16 is infinite, below 2^-14 it is subnormal, a multiple of 2^-24.
"""

from __future__ import annotations

import numpy as np

FLOATING = ("float32", "tfloat32", "bfloat16", "float16")
"""Dtypes that an activation can be stored in."""

HALVES = ("bfloat16", "float16")
"""The dtypes of 16 bits."""

ITEMSIZE = {"float32": 4, "tfloat32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int32": 4, "int64": 8}

UNIT_ROUNDOFF = {"float32": 2.0**-24, "tfloat32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of one rounding, of a float16 where it is not subnormal."""

_NUMPY = {"tfloat32": "float32", "bfloat16": "uint16", "float16": "uint16"}


def numpy_dtype(dtype: str) -> np.dtype:
    """The NumPy dtype of an array that holds `dtype`."""
    return np.dtype(_NUMPY.get(dtype, dtype))


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 `values` rounded to `dtype`, as an array of `numpy_dtype(dtype)`; NaN stays NaN."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, np.float32).astype(np.float16).view(np.uint16).reshape(values.shape)
    if dtype not in ("tfloat32", "bfloat16"):
        return values.astype(numpy_dtype(dtype), copy=False)
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    stored = np.empty(bits.size, numpy_dtype(dtype))
    words = stored.view(np.uint32 if dtype == "tfloat32" else np.uint16)
    round_bits = _tf32_bits if dtype == "tfloat32" else _bf16_bits
    for start in range(0, bits.size, _CHUNK):
        words[start : start + _CHUNK] = round_bits(bits[start : start + _CHUNK])
    return stored.reshape(values.shape)


_CHUNK = 1 << 16
"""Elements that are rounded at once: they and what is made of them stay in a core's cache."""


def _tf32_bits(bits: np.ndarray) -> np.ndarray:
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    return np.where(special, bits, rounded) if special.any() else rounded


def _bf16_bits(bits: np.ndarray) -> np.ndarray:
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    if not special.any():
        return rounded
    quiet = (bits >> np.uint32(16)) | np.where((bits & np.uint32(0x7FFFFF)) != 0, np.uint32(0x40), np.uint32(0))
    return np.where(special, quiet, rounded)


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of an array written by `encode` (or by a kernel)."""
    if dtype == "float16":
        return stored.view(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return stored
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
