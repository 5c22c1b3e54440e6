"""Exponential moving average of the weights: e ← e + (1 − d)·(w − e) with d = min(decay, (1 + t)/(10 + t)), t = STEP + 1.

The second bound lets the average follow the weights closely in the first steps, where it would otherwise stay near the random first weights for
about 1/(1 − decay) steps. d depends on the step alone, so a resumed training goes on with the same bits.
Sources: B. T. Polyak, A. B. Juditsky, "Acceleration of stochastic approximation by averaging", 1992; the bound is that of
tf.train.ExponentialMovingAverage (num_updates).

    ema               e (P), w (P), state -> e   (in place)                                         decay
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.ops.ptx.vector import load4, store4
from nbcnn.ops.update.advance import STEP, example_state
from nbcnn.plan.shapes import numel

THREADS = 256

f8: Any = types.float64


def ema(average: np.ndarray, w: np.ndarray, state: np.ndarray, out: np.ndarray, *, decay: float) -> None:
    """One step in place: average and w (P), state (8) int64; `out` is `average` itself."""
    t = int(state[STEP]) + 1
    share = w.dtype.type(1 - min(decay, (1 + t) / (10 + t)))
    np.add(average, share * (w - average), out=out)


@jit()
def ema_kernel(average, w, state, count, decay):
    """average += share·(w − average), share = 1 − min(decay, (1 + t)/(10 + t)) worked out in float64 by every thread.

    grid    ⌈P / 1024⌉, block 256
    owns    thread: four neighbours, and the first threads one each of the last P % 4
    shared  none
    moves   12·P bytes; 16-byte aligned arrays
    """
    t = f8(state[STEP] + i8(1))
    share = f4(f8(1) - min(decay, (f8(1) + t) / (f8(10) + t)))
    thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    quads = count >> 2
    if thread < quads:
        i = 4 * thread
        a, b, c, d = load4(average, i)
        p, q, r, s = load4(w, i)
        store4(average, i, a + share * (p - a), b + share * (q - b), c + share * (r - c), d + share * (s - d))
    j = 4 * quads + thread
    if j < count:
        average[j] = average[j] + share * (w[j] - average[j])


def bind(call: Call) -> list[Launch]:
    """One launch."""
    average, w, state = call.ins
    count = numel(call.in_shapes[0])
    return [Launch(ema_kernel, blocks(count, 4 * THREADS), THREADS, (average, w, state, np.int32(count), np.float64(call.attrs["decay"])))]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`; the averages of the last P % 4 are read once more."""
    distinct, again = size(call, "in", 0) + size(call, "in", 1), 4 * (numel(call.in_shapes[0]) % 4)
    return [Traffic(distinct + again, size(call, "out", 0), distinct)]


HOST, OPS = {"ema": host(ema)}, {"ema": Impl(bind, traffic=traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """An early step, where the step bounds the decay, and a decay that is smaller than its bound."""
    for decay in (0.999, 0.1):
        yield Case("ema", f"{decay}", (normal(17, count), normal(18, count), example_state()), (0,), {"decay": decay}, 2)
