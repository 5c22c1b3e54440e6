"""Conversions between float32, float16, bfloat16 and tf32: `cvt.rn.f16`, `cvt.rn.bf16x2`, `cvt.rna.tf32` (the last two need sm_80), and bit
casts by `mov.b32`.

Two bfloat16, or two float16, travel as one uint32 word, the one at the lower address in the lower half. The simulator does the same in NumPy.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import NUMBA_SIMULATOR, f4, i4, jit, types, u4

if NUMBA_SIMULATOR:
    from nbcnn.plan.storage import encode

    @jit(device=True)
    def float_bits(x):
        return np.float32(x).view(np.uint32)

    @jit(device=True)
    def bits_float(word):
        return np.uint32(word).view(np.float32)

    @jit(device=True)
    def bf16x2(low, high):
        a, b = encode(np.array([low, high], np.float32), "bfloat16")
        return np.uint32(int(a) | int(b) << 16)

    @jit(device=True)
    def f16(x):
        return np.float16(x).view(np.uint16)

    @jit(device=True)
    def f16_float(half):
        return np.float32(np.uint16(half).view(np.float16))

    @jit(device=True)
    def f16x2(low, high):
        a, b = encode(np.array([low, high], np.float32), "float16")
        return np.uint32(int(a) | int(b) << 16)

    @jit(device=True)
    def f16_low(word):
        return f16_float(int(word) & 0xFFFF)

    @jit(device=True)
    def f16_high(word):
        return f16_float(int(word) >> 16)

    @jit(device=True)
    def unknown(x):
        return x

    @jit(device=True)
    def unknown_word(x):
        return x

    @jit(device=True)
    def tf32(x):
        return encode(np.array([x], np.float32), "tfloat32")[0]
else:
    from nbcnn.ops.ptx.asm import instruction

    float_bits = instruction("float_bits", "mov.b32 $0, $1;", u4, (f4,), pure=True)
    """The 32 bits of a float32, as uint32."""
    bits_float = instruction("bits_float", "mov.b32 $0, $1;", f4, (u4,), pure=True)
    """The float32 with these 32 bits."""
    f16 = instruction("cvt_rn_f16_f32", "cvt.rn.f16.f32 $0, $1;", types.uint16, (f4,), pure=True)
    """A float32 rounded to float16 (to nearest, ties to even), as the uint16 that an array keeps."""
    f16_float = instruction("cvt_f32_f16", "cvt.f32.f16 $0, $1;", f4, (types.uint16,), pure=True)
    """The float32 of a float16 (exact)."""
    f16x2 = instruction(
        "cvt_rn_f16x2_f32",
        "{ .reg .b16 l, h; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2; mov.b32 $0, {l, h}; }",
        u4,
        (f4, f4),
        pure=True,
    )
    """Two float32 rounded to float16 (to nearest, ties to even) in one word, the first in the lower half: `cvt.rn.f16x2` needs sm_80."""
    f16_low = instruction("cvt_f32_f16_low", "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", f4, (u4,), pure=True)
    """The float16 in the lower half of a word, as float32 (exact)."""
    f16_high = instruction("cvt_f32_f16_high", "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }", f4, (u4,), pure=True)
    """The float16 in the upper half of a word, as float32 (exact)."""
    unknown = instruction("unknown", "mov.b32 $0, $1;", i4, (i4,))
    """The same int32, of which the compiler knows nothing: what is made of it is made here, not kept in registers from before a loop."""
    unknown_word = instruction("unknown_word", "mov.b32 $0, $1;", u4, (u4,))
    """The same uint32, of which the compiler knows nothing: a word of bits stays one, and the tests that made them are not kept instead."""
    _cvt_bf16x2 = instruction("cvt_rn_bf16x2_f32", "cvt.rn.bf16x2.f32 $0, $1, $2;", u4, (f4, f4), pure=True)
    tf32 = instruction("cvt_rna_tf32_f32", "{ .reg .b32 t; cvt.rna.tf32.f32 t, $1; mov.b32 $0, t; }", f4, (f4,), pure=True)
    """A float32 rounded to tf32's 10 mantissa bits, to nearest, ties away from zero; still a float32."""

    @jit(device=True)
    def bf16x2(low, high):
        """Two float32 rounded to bfloat16 (to nearest, ties to even) in one word: `low` in the lower half."""
        return _cvt_bf16x2(high, low)


@jit(device=True)
def bf16_low(word):
    """The bfloat16 in the lower half of a word, as float32 (exact)."""
    return bits_float(word << 16)


@jit(device=True)
def bf16_high(word):
    """The bfloat16 in the upper half of a word, as float32 (exact)."""
    return bits_float(word & 0xFFFF0000)


@jit(device=True)
def bf16(x):
    """A float32 rounded to bfloat16 (to nearest, ties to even), as the uint16 that an array keeps."""
    return types.uint16(bf16x2(x, 0.0) & 0xFFFF)


@jit(device=True)
def bf16_float(half):
    """The float32 of a bfloat16 read from an array as uint16 (exact)."""
    # In the simulator a uint16 stays one, and loses all its bits when it is shifted by 16.
    return bits_float(u4(half) << 16)
