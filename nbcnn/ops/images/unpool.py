"""Un-pooling: the gradient behind a 2×2 max pooling goes back to the elements that its packed index names (NHWC).

    dx[n, 2p+r, 2q+s, k] = dy[n,p,q,k] if the index of (n,p,q,k) is 2r+s, else 0

The index holds four channels per byte (conv/fused.py, which also has the reference). Nothing is computed: bandwidth is the
only limit, and three quarters of what moves is the writing of dx.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.stored import kinds
from nbcnn.ops.kernel.traffic import Traffic, outputs, size
from nbcnn.ops.kernel.windows import lane_io, launch, offset_of, position, split
from nbcnn.ops.ptx.vector import load_halves8, store_halves8
from nbcnn.plan.storage import HALVES


@jit(device=True)
def _kept(word, argmax, tap):
    """The two halves of a word, each where its argmax (the lower and the next two bits of `argmax`) is `tap`, else 0."""
    low = 0xFFFF if (argmax & 3) == tap else 0
    high = u4(0xFFFF0000) if ((argmax >> 2) & 3) == tap else 0
    return word & (low | high)


@jit()
def unpool_pairs_kernel(dy, index, dx, count, P, Q, groups):
    """`unpool_kernel` for bfloat16 or float16 and channels in eights: words of two, and index as uint16, eight channels each.

    grid    ceil(count / 256), block 256, count = N·P·Q·groups, groups = K/8
    owns    thread: 8 channels of one 2 × 2 window
    moves   (2 + 1/4)·dy + 2·dx bytes, 16 at a time
    """
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i >= count:
        return
    n, p, q, group = position(i, P, Q, groups)
    argmax = index[i]
    a, b, c, d = load_halves8(dy, 8 * i)
    for r in range(2):
        for s in range(2):
            tap = 2 * r + s
            at = offset_of(n, 2 * p + r, 2 * q + s, group, 2 * P, 2 * Q, groups)
            kept_a, kept_b = _kept(a, argmax, tap), _kept(b, argmax >> 4, tap)
            kept_c, kept_d = _kept(c, argmax >> 8, tap), _kept(d, argmax >> 12, tap)
            store_halves8(dx, 8 * at, kept_a, kept_b, kept_c, kept_d)


@cache
def unpool_kernel(kind: str, lanes: int) -> Any:
    """The kernel of the formula above; dy and dx stored as `kind`, `lanes` (4 or 1) channels per thread.

    grid    ceil(count / 256), block 256, count = N·P·Q·groups, groups = K/lanes
    owns    thread: `lanes` channels of one 2 × 2 window
    moves   4·dy + dy/4 + 4·dx bytes of float32
    """
    load, store = lane_io(lanes, kind)

    @jit()
    def unpool_kernel(dy, index, dx, count, P, Q, groups):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        n, p, q, group = position(i, P, Q, groups)
        value, kept = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        load(dy, i, value)
        if lanes == 4:
            argmax = index[i]
        else:
            window, channel = split(i, groups)
            bytes_a_window = groups + 3 >> 2
            argmax = index[window * bytes_a_window + (channel >> 2)] >> 2 * (channel & 3)
        for r in range(2):
            for s in range(2):
                for lane in range(lanes):
                    kept[lane] = value[lane] if ((argmax >> 2 * lane) & 3) == 2 * r + s else 0.0
                at = offset_of(n, 2 * p + r, 2 * q + s, group, 2 * P, 2 * Q, groups)
                store(dx, at, kept)

    return unpool_kernel


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    return maps.supports(call, target) if call.layout == "NHWC" else "the packed index of a pooling goes with images stored NHWC"


def bind(call: Call) -> list[Launch]:
    """dy (N,K,P,Q), index (N,⌈K/4⌉,P,Q) uint8 -> dx (N,K,2P,2Q)."""
    (dy, index), (dx,) = call.ins, call.outs
    N, K, P, Q = call.in_shapes[0]
    kind, _ = kinds(call)
    if kind in HALVES and K % 8 == 0:
        return launch(unpool_pairs_kernel, N * P * Q * K // 8, (dy, index.view(np.uint16), dx), P, Q, K // 8)
    lanes = 4 if K % 4 == 0 else 1
    return launch(unpool_kernel(kind, lanes), N * P * Q * K // lanes, (dy, index, dx), P, Q, K // lanes)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: the index byte of four channels is read for each of them where channels are handled one by one."""
    N, K, P, Q = call.in_shapes[0]
    dy, index = size(call, "in", 0), size(call, "in", 1)
    return [Traffic(dy + (index if K % 4 == 0 else N * K * P * Q), outputs(call), dy + index)]


IMPL = Impl(bind, supports=supports, traffic=traffic)
