"""Device functions that read and write activations the way they are stored (`nbcnn.plan.storage`), as float32: a store rounds.

A kernel factory takes the kind ("float32", "tfloat32", "bfloat16", "float16") and asks here for its accesses; for float32 these are the
plain ones, so that a kernel of float32 is what it would be without this file. Four bfloat16, or four float16, are one access of 8 bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.ptx import cvt, vector
from nbcnn.plan.storage import HALVES


class Halves(NamedTuple):
    """Device functions of a kind of 16 bits: of a word of two to float32, and of two float32, the lower one first, to a word; of one, a uint16."""

    low: Any
    high: Any
    pack: Any
    float: Any
    round: Any


PAIRS = {
    "bfloat16": Halves(cvt.bf16_low, cvt.bf16_high, cvt.bf16x2, cvt.bf16_float, cvt.bf16),
    "float16": Halves(cvt.f16_low, cvt.f16_high, cvt.f16x2, cvt.f16_float, cvt.f16),
}
"""By kind."""


def widest(kind: str) -> int:
    """Elements of 16 bytes, the widest access."""
    return 8 if kind in HALVES else 4


def kinds(call: Call) -> tuple[str, str]:
    """How the first input and the first output of a call are stored; float32 where the call does not say."""
    return (call.in_dtypes or ("float32",))[0], (call.out_dtypes or ("float32",))[0]


@cache
def scalar_io(kind: str) -> tuple[Any, Any]:
    """Device functions load(array, i) -> float32 and store(array, i, value)."""
    if kind in HALVES:
        widen, narrow = PAIRS[kind].float, PAIRS[kind].round

        @jit(device=True)
        def load(array, i):
            return widen(array[i])

        @jit(device=True)
        def store(array, i, value):
            array[i] = narrow(value)
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
    if kind in HALVES:
        lower, upper, pack = PAIRS[kind][:3]

        @jit(device=True)
        def load(array, i):
            low, high = vector.load_halves4(array, i)
            return lower(low), upper(low), lower(high), upper(high)

        @jit(device=True)
        def store(array, i, a, b, c, d):
            vector.store_halves4(array, i, pack(a, b), pack(c, d))
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
    if kind not in HALVES:
        return vector.load4_if
    lower, upper = PAIRS[kind][:2]

    @jit(device=True)
    def load(array, i, wanted):
        low, high = vector.load_halves4_if(array, i, wanted)
        return lower(low), upper(low), lower(high), upper(high)

    return load
