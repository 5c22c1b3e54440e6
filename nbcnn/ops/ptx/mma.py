"""mma.sync (sm_80, of float16 sm_75): a warp multiplies fragments in registers and adds in float32.

Fragments of D (16×8) += A (16×k) · B (k×8), of lane l with g = l/4 and t = l mod 4:

    D, float32   d0, d1 at row g, columns 2t, 2t+1; d2, d3 eight rows further
    A, bfloat16  k16, two to a word: a0 at row g, k 2t, 2t+1; a1 at row g+8; a2, a3 as a0, a1 with k + 8
    B, bfloat16  k16, two to a word: b0 at k 2t, 2t+1 of column g; b1 at k + 8
    A, float16   k8, two to a word:  a0 at row g, k 2t, 2t+1; a1 at row g+8
    B, float16   k8, two to a word:  b0 at k 2t, 2t+1 of column g
    A, tf32      k8, one to a word:  a0 at row g, k t; a1 at row g+8; a2, a3 as a0, a1 with k + 4
    B, tf32      k8, one to a word:  b0 at k t of column g; b1 at k + 4

Counted in words, bfloat16 and tf32 lie alike, and so do two products of float16, one behind the other: `ldmatrix` brings all from shared memory.
"""

from __future__ import annotations

from nbcnn.gpu.language import f4, u4
from nbcnn.ops.ptx.asm import instruction

_OPERANDS = " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
_TYPES = (u4,) * 6 + (f4,) * 4

mma_bf16 = instruction("mma_m16n8k16_bf16", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" + _OPERANDS, (f4,) * 4, _TYPES, pure=True)
"""(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3) -> c + A·B, 16 k of bfloat16."""
_F16 = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{{}}}, {{{}}}, {{{}}}, {{{}}};"
mma_f16 = instruction(
    "mma_two_m16n8k8_f16",
    "{ .reg .f32 d<4>; "
    + _F16.format("d0,d1,d2,d3", "$4,$5", "$8", "$10,$11,$12,$13")
    + " "
    + _F16.format("$0,$1,$2,$3", "$6,$7", "$9", "d0,d1,d2,d3")
    + " }",
    (f4,) * 4,
    _TYPES,
    pure=True,
)
"""(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3) -> c + A·B, 16 k of float16, in two instructions of compute capability 7.5: a0, a1, b0 first."""
mma_tf32 = instruction("mma_m16n8k8_tf32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" + _OPERANDS, (f4,) * 4, _TYPES, pure=True)
"""(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3) -> c + A·B, 8 k of tf32. Bits below tf32's are ignored: truncation, not rounding."""
