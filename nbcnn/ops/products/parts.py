"""Products of parts of matrices on CUDA cores, with rows of any pitch: c = a·bᵀ, or c −= a·bᵀ, the sums as good as in float64.

32 products are added in float32, these sums in float64: of a sum of 50,000 kernel values times coefficients that nearly cancel, float32
alone would keep three digits.

    product_of_parts    a (M,K), b (N,K) -> c (M,N) = a·bᵀ, or c − a·bᵀ
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.square_tile import PITCH, SHARED, SIDE, STEP, THREADS, add_products_twice
from nbcnn.ops.ptx.vector import load4_if

f8: Any = types.float64


def product_of_parts(a: np.ndarray, b: np.ndarray, c: np.ndarray, *, subtract: bool = False) -> None:
    """c = a·bᵀ, or c −= a·bᵀ: a (M,K), b (N,K), c (M,N)."""
    made = a.astype(np.float64) @ b.astype(np.float64).T
    c[...] = c - made if subtract else made


@jit(device=True)
def _stash(shared, array, base, row0, rows, pitch, k0, K):
    """64 rows of 32 values, transposed; zeros outside the matrix. A thread moves two groups of four."""
    for half in range(2):
        at = cuda.threadIdx.x + half * THREADS
        row, k = at >> 3, (at & 7) * 4
        wanted = (row0 + row < rows) & (k0 + k < K)
        a, b, c, d = load4_if(array, base + i8(row0 + row) * pitch + k0 + k, wanted)
        shared[k * PITCH + row] = a
        shared[(k + 1) * PITCH + row] = b
        shared[(k + 2) * PITCH + row] = c
        shared[(k + 3) * PITCH + row] = d


@jit(launch_bounds=(THREADS, 2))
def product_of_parts_kernel(a, b, c, M, N, K, pitch_a, pitch_b, pitch_c, from_a, from_b, from_c, subtract):
    """c[m][n] = Σ_k a[m][k] · b[n][k], or that subtracted from c.

    gemm    GM, GN, GK = M, N, K.
    grid    (⌈N/64⌉, ⌈M/64⌉); block 256.
    owns    per block 64×64, per thread every 16th row and column: 4×4.
    shared  2·32·65·4 bytes; moves per block 4·K·128 + 4·64·64 bytes.
    needs   K, pitches and the first elements of a and b multiples of 4.
    source  the definition; sums in two levels as in Higham, "Accuracy and Stability of Numerical Algorithms", section 4.
    """
    shared_a = cuda.shared.array(SHARED, f4)
    shared_b = cuda.shared.array(SHARED, f4)
    acc = cuda.local.array(16, f4)
    total = cuda.local.array(16, f8)
    tid = cuda.threadIdx.x
    column, row = tid & 15, tid >> 4
    m0, n0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
    for j in range(16):
        total[j] = f8(0)
    for k0 in range(0, K, STEP):
        _stash(shared_a, a, from_a, m0, M, pitch_a, k0, K)
        _stash(shared_b, b, from_b, n0, N, pitch_b, k0, K)
        cuda.syncthreads()
        add_products_twice(total, acc, shared_a, shared_b, row, column)
        cuda.syncthreads()
    for i in range(4):
        for j in range(4):
            m, n = m0 + row + 16 * i, n0 + column + 16 * j
            if m < M and n < N:
                at = from_c + i8(m) * pitch_c + n
                c[at] = f8(c[at]) - total[4 * i + j] if subtract != 0 else total[4 * i + j]


def launch_product(
    a: Any, b: Any, c: Any, M: int, N: int, K: int, pitches: tuple[int, int, int], first: tuple[int, int, int] = (0, 0, 0), subtract: bool = False
) -> Launch:
    """Launch of `product_of_parts_kernel` on flat float32 arrays, from their elements `first` on, with rows of `pitches` elements."""
    if any(value % 4 for value in (K, *pitches[:2], *first[:2])):
        raise ValueError(f"rows of {K} values, pitches {pitches} from elements {first}: K and those of a and b must be multiples of 4")
    scalars = (*(np.int32(v) for v in (M, N, K, *pitches)), *(np.int64(v) for v in first), np.int32(subtract))
    return Launch(product_of_parts_kernel, (ceil_div(N, SIDE), ceil_div(M, SIDE)), THREADS, (a, b, c, *scalars))
