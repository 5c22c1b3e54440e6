"""RBF kernel values from dot products: k = exp(-gamma |a - b|²), |a - b|² = |a|² + |b|² - 2 a·b.

It is the epilogue of a GEMM as a kernel of its own: the Gram matrix of a support vector machine is one product and one of these, in place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.ops.kernel.call import Launch, blocks

THREADS = 256
_PART_VALUES = 1 << 18


def rbf(row_norms: np.ndarray, col_norms: np.ndarray, k: np.ndarray, *, gamma: float) -> None:
    """k (M, N): dot products a·b on entry, exp(-gamma |a - b|²) on exit; `row_norms` (M,) and `col_norms` (N,) are |a|² and |b|².

    A distance that rounding made negative counts as 0.
    """
    # In parts that stay in the cache: six passes over memory become one.
    step = max(1, _PART_VALUES // max(1, k.shape[1]))
    for start in range(0, len(k), step):
        part = k[start : start + step]
        part *= -2
        part += row_norms[start : start + step, None]
        part += col_norms
        np.maximum(part, 0, out=part)
        part *= -gamma
        np.exp(part, out=part)


@jit()
def rbf_kernel(row_norms, col_norms, k, N, pitch, count, gamma):
    """k = exp(-gamma · max(|a|² + |b|² - 2k, 0)), in place, in rows of `pitch` values of which the first N count.

    grid   ⌈M·N / 256⌉; block 256; a thread owns one value
    moves  8·M·N + 4·(M + N) bytes
    """
    at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if at < count:
        row = at // N
        to = i8(row) * pitch + (at - row * N)
        squared = row_norms[row] + col_norms[at - row * N] - 2.0 * k[to]
        k[to] = math.exp(-gamma * max(squared, 0.0))


def launch_rbf(row_norms: Any, col_norms: Any, k: Any, M: int, N: int, gamma: float, pitch: int | None = None) -> Launch:
    """`rbf` on flat float32 device arrays, k in rows of `pitch` values (N if None); M·N must be below 2^31."""
    args = (row_norms, col_norms, k, np.int32(N), np.int32(pitch or N), np.int32(M * N), np.float32(gamma))
    return Launch(rbf_kernel, blocks(M * N, THREADS), THREADS, args)


def traffic(M: int, N: int) -> int:
    """Bytes that `rbf_kernel` moves: k read and written, each norm once."""
    return 8 * M * N + 4 * (M + N)
