"""ldmatrix (sm_75), stmatrix (sm_90): a warp moves 8×8 matrices of 16-bit elements between shared memory and the fragments of `mma.sync`.

Lanes 8i … 8i+7 give the addresses of the rows of matrix i, 16 bytes each, 16-aligned. Of each matrix, lane l gets the word
(two elements, or one of 32 bits) that is the (l mod 4)-th of row l/4; transposed, elements 2(l mod 4) and the next of column l/4.
"""

from __future__ import annotations

from nbcnn.gpu.language import u4
from nbcnn.ops.ptx.asm import instruction

_X4 = ".m8n8.x4{}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
_X2 = ".m8n8.x2{}.shared.b16 {{$0,$1}}, [$2];"

ldmatrix_x4 = instruction("ldmatrix_x4", "ldmatrix.sync.aligned" + _X4.format(""), (u4,) * 4, (u4,))
"""(shared byte address of this lane's row) -> a word of each of four matrices."""
ldmatrix_x2 = instruction("ldmatrix_x2", "ldmatrix.sync.aligned" + _X2.format(""), (u4,) * 2, (u4,))
"""(shared byte address; lanes 0 … 15) -> a word of each of two matrices."""
ldmatrix_x4_trans = instruction("ldmatrix_x4_trans", "ldmatrix.sync.aligned" + _X4.format(".trans"), (u4,) * 4, (u4,))
"""(shared byte address of this lane's row) -> a word of each of four transposed matrices, where k runs down the rows; 16-bit elements."""
ldmatrix_x2_trans = instruction("ldmatrix_x2_trans", "ldmatrix.sync.aligned" + _X2.format(".trans"), (u4,) * 2, (u4,))
"""(shared byte address; lanes 0 … 15) -> a word of each of two matrices, transposed."""
stmatrix_x2_trans = instruction("stmatrix_x2_trans", "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1,$2};", None, (u4, u4, u4))
"""(shared byte address; lanes 0 … 15, word, word): two matrices, each stored transposed: lane 8i + j gives where column j of matrix i goes."""
stmatrix_x4_trans = instruction(
    "stmatrix_x4_trans", "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1,$2,$3,$4};", None, (u4, u4, u4, u4, u4)
)
"""(shared byte address, four words): four matrices, each stored transposed."""
