"""Two bfloat16 in a word at a time, and bytes moved between words: `cvt.rn.relu.bf16x2`, `max.bf16x2`, `set.gt.f16x2`, `prmt` (sm_80)."""

from __future__ import annotations

from nbcnn.gpu.language import f4, jit, u4
from nbcnn.ops.ptx.asm import instruction

_cvt_relu = instruction("cvt_rn_relu_bf16x2_f32", "cvt.rn.relu.bf16x2.f32 $0, $1, $2;", u4, (f4, f4), pure=True)
max_bf16x2 = instruction("max_bf16x2", "max.bf16x2 $0, $1, $2;", u4, (u4, u4), pure=True)
"""The larger of each of two pairs of bfloat16."""
greater_bf16x2 = instruction("set_gt_u32_f16x2", "set.gt.u32.f16x2 $0, $1, $2;", u4, (u4, u4), pure=True)
"""16 ones where a half of the first word is greater than that of the second, else zeros; neither negative, both below 2^121.

It compares float16 of the same bits, for bfloat16 there is no such instruction before sm_90. Floats that are not negative have the order
of their bits in either format, up to where float16 has its infinity.
"""
permute_bytes = instruction("prmt_b32", "prmt.b32 $0, $1, $2, $3;", u4, (u4, u4, u4), pure=True)
"""(a, b, selector): byte i is the one that the i-th nibble of the selector numbers, 0 … 3 of a, 4 … 7 of b; plus 8: its sign bit, 8 times."""


@jit(device=True)
def relu_bf16x2(low, high):
    """Two float32, or zero where they are negative, rounded to bfloat16 in one word: `low` in the lower half."""
    return _cvt_relu(high, low)
