"""Device functions that read and write activations the way they are stored (`nbcnn.plan.storage`), as float32: a store rounds.

A kernel factory takes the kind ("float32", "tfloat32", "bfloat16") and asks here for its accesses; for float32 these are the
plain ones, so that a kernel of float32 is what it would be without this file. Four bfloat16 are one access of 8 bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.ptx import cvt, vector


def kinds(call: Call) -> tuple[str, str]:
    """How the first input and the first output of a call are stored; float32 where the call does not say."""
    return (call.in_dtypes or ("float32",))[0], (call.out_dtypes or ("float32",))[0]


@cache
def scalar_io(kind: str) -> tuple[Any, Any]:
    """Device functions load(array, i) -> float32 and store(array, i, value)."""
    if kind == "bfloat16":

        @jit(device=True)
        def load(array, i):
            return cvt.bf16_float(array[i])

        @jit(device=True)
        def store(array, i, value):
            array[i] = cvt.bf16(value)
    elif kind == "tfloat32":

        @jit(device=True)
        def load(array, i):
            return array[i]

        @jit(device=True)
        def store(array, i, value):
            array[i] = cvt.tf32(value)
    else:

        @jit(device=True)
        def load(array, i):
            return array[i]

        @jit(device=True)
        def store(array, i, value):
            array[i] = value

    return load, store


@cache
def vector_io(kind: str) -> tuple[Any, Any]:
    """Device functions load(array, i) -> four float32 and store(array, i, a, b, c, d); i is a multiple of four."""
    if kind == "bfloat16":

        @jit(device=True)
        def load(array, i):
            low, high = vector.load_bf16x4(array, i)
            return cvt.bf16_low(low), cvt.bf16_high(low), cvt.bf16_low(high), cvt.bf16_high(high)

        @jit(device=True)
        def store(array, i, a, b, c, d):
            vector.store_bf16x4(array, i, cvt.bf16x2(a, b), cvt.bf16x2(c, d))
    elif kind == "tfloat32":
        load = vector.load4

        @jit(device=True)
        def store(array, i, a, b, c, d):
            vector.store4(array, i, cvt.tf32(a), cvt.tf32(b), cvt.tf32(c), cvt.tf32(d))
    else:
        load, store = vector.load4, vector.store4

    return load, store


@cache
def vector_load_if(kind: str) -> Any:
    """Device function load(array, i, wanted) -> four float32, zeros where `wanted` is 0 (nothing is then read)."""
    if kind != "bfloat16":
        return vector.load4_if

    @jit(device=True)
    def load(array, i, wanted):
        low, high = vector.load_bf16x4_if(array, i, wanted)
        return cvt.bf16_low(low), cvt.bf16_high(low), cvt.bf16_low(high), cvt.bf16_high(high)

    return load
