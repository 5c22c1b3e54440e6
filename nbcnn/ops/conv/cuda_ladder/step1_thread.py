"""Step 1, one thread per result: each thread evaluates the definition of its own y, with nothing shared and nothing kept."""

from __future__ import annotations

from typing import Any

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.conv.cuda_ladder.parts import THREADS, sizes, step
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, met, windows
from nbcnn.plan.shapes import ConvShape, numel


@jit()
def thread_kernel(x, w, y, C, H, W, K, P, Q, R, S, stride, pad, count):
    """y[n,k,p,q] = Σ_{c,r,s} w[k,c,r,s] · x[n,c,p·stride+r−pad,q·stride+s−pad].

    grid ⌈NKPQ/256⌉, block 256.
    owns per thread one y; neighbours are neighbours in a row, so their loads of x and stores of y coalesce.
    shared none.
    moves 8 bytes per product, through the caches; y once.
    source the definition.
    """
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        q, p, k, n = i % Q, i // Q % P, i // (Q * P) % K, i // (Q * P * K)
        total = 0.0
        for c in range(C):
            for r in range(R):
                for s in range(S):
                    h, v = p * stride + r - pad, q * stride + s - pad
                    if 0 <= h < H and 0 <= v < W:
                        total += w[((k * C + c) * R + r) * S + s] * x[((n * C + c) * H + h) * W + v]
        y[i] = total


def products(s: ConvShape) -> tuple[int, int]:
    """(products with pixels inside the image, different bytes of x and w that they read)."""
    rows, columns = (s.P, s.R, s.H, s.stride, s.pad), (s.Q, s.S, s.W, s.stride, s.pad)
    pixels = s.N * s.C * windows(*rows)[1] * windows(*columns)[1]
    weights = s.K * s.C * met(*rows)[1] * met(*columns)[1]
    return s.N * s.K * s.C * windows(*rows)[0] * windows(*columns)[0], 4 * (pixels + weights)


def traffic(s: ConvShape) -> Traffic:
    """Two operands per product."""
    count, distinct = products(s)
    return Traffic(8 * count, 4 * numel(s.y_shape), distinct)


def launch(s: ConvShape, arrays: tuple[Any, ...]) -> Launch:
    """One launch of a thread per result."""
    count = numel(s.y_shape)
    return Launch(thread_kernel, ceil_div(count, THREADS), THREADS, (*arrays, *sizes(s), count))


IMPL = step(launch, traffic)
