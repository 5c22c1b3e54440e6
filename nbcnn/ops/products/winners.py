"""Winners: between the two products of matrices of a spherical k-means, each patch keeps the atom that it resembles most.

    keep_winner      r (K,M) -> r, of every column only the value of the largest magnitude, 0 elsewhere (in place)

With r = atoms·patchesᵀ (a `gemm`), the next atoms are the normalised rows of keep_winner(r)·patches (another `gemm`): each patch is added to its
atom, multiplied by its coefficient. So no thread adds to what another one writes, and sums have the same order every time.

Source: A. Coates, A. Y. Ng, "Learning feature representations with k-means", 2012.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.ops.kernel.call import Launch, blocks

THREADS = 128


def keep_winner(r: np.ndarray) -> None:
    """r (K,M): 0 where another row of the column has a larger magnitude; of equal ones the first stays."""
    first, columns = np.abs(r).argmax(0), np.arange(r.shape[1])
    kept = r[first, columns]
    r.fill(0)
    r[first, columns] = kept


@jit()
def keep_winner_kernel(r, K, M):
    """r[k, m] = r[k, m] if k is the first of the rows with the largest |r[·, m]|, else 0.

    grid ⌈M/128⌉, block 128; owns: one thread per column, neighbours read neighbours; shared none; moves 12·K bytes per column; source: the
    definition.
    """
    m = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if m < M:
        best, largest = 0, -1.0
        for k in range(K):
            value = abs(r[i8(k) * M + m])
            if value > largest:
                best, largest = k, value
        for k in range(K):
            if k != best:
                r[i8(k) * M + m] = 0.0


def launch_keep_winner(r: Any, K: int, M: int) -> Launch:
    """Launch of `keep_winner` on a flat float32 array of K rows of M values."""
    return Launch(keep_winner_kernel, blocks(M, THREADS), THREADS, (r, np.int32(K), np.int32(M)))
