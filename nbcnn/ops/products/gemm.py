"""Plain matrix product: c = a·bᵀ, with a and b row-major and their rows along the summed axis.

This is what a Gram matrix is (`b` is `a`), what a linear layer computes, and a convolution of 1×1 images with 1×1 filters: a row of a is
an image, a row of b a filter. So the register-tiled product of the convolutions serves it on CUDA cores, and their tensor-core engines do
in every precision (`engine`). In bf16 and tf32 Hopper has a kernel for it alone (`gemm_wgmma.py`).

    IMPL    CUDA cores, fp32, register tiles          engine(…)    an engine's convolution
    SIMPLE  one thread a result, any shape and storage

    gemm              a (M,K), b (N,K) -> c (M,N)                                             c = a·bᵀ
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.split import launch_sum_partials
from nbcnn.ops.conv.simt.pointwise import launch_gemm_nt, product_traffic
from nbcnn.ops.conv.simt.tiles import Product, choices
from nbcnn.ops.kernel.call import Call, Impl, Launch, around, host
from nbcnn.ops.kernel.case import Case, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.refusals import too_large
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.tiles import partial_bytes
from nbcnn.ops.kernel.traffic import Traffic, element, outputs
from nbcnn.plan.op import Op

ACROSS, DOWN = 32, 8
"""Block of the simple kernel."""
SIDE = 8
"""An engine sees the rows of a as images of SIDE×SIDE pixels where they are as many: TMA then fetches pixels of one image together."""
WHOLE = 64
"""K of an engine's product is a multiple of this: 128 bytes of bfloat16, a row of its tiles."""


def gemm(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """c = a·bᵀ: a (M,K), b (N,K), c (M,N)."""
    np.matmul(a, b.T, out=c)


@functools.cache
def simple_kernel(kind: str) -> Any:
    load, store = scalar_io(kind)

    @jit()
    def gemm_simple_kernel(a, b, c, M, N, K):
        """c[m][n] = Σ_k a[m][k] · b[n][k], added in float32.

        grid: (⌈N/32⌉, ⌈M/8⌉), block 32×8; owns: per thread one result, neighbours share a row of a.
        shared none; moves 8 bytes per product through the caches, and c once. source: the definition.
        """
        n, m = cuda.blockIdx.x * ACROSS + cuda.threadIdx.x, cuda.blockIdx.y * DOWN + cuda.threadIdx.y
        if m < M and n < N:
            total = 0.0
            for k in range(K):
                total += load(a, i8(m) * K + k) * load(b, i8(n) * K + k)
            store(c, i8(m) * N + n, total)

    return gemm_simple_kernel


def extents(call: Call) -> tuple[int, int, int]:
    """M, N, K of a call."""
    (M, K), (N, _) = call.in_shapes
    return M, N, K


def bind(call: Call) -> list[Launch]:
    """The product, and if its sum is split the sum of its parts."""
    (a, b), (c,), (M, N, K), tile = call.ins, call.outs, extents(call), call.tile
    if tile.split == 1:
        return [launch_gemm_nt(a, b, c, M, N, K, tile)]
    parts = call.scratch[: scratch(call)].view(np.float32)
    return [launch_gemm_nt(a, b, parts, M, N, K, tile), launch_sum_partials(parts, None, c, M * N, N, tile.split)]


def bind_simple(call: Call) -> list[Launch]:
    """One launch."""
    M, N, K = extents(call)
    grid = (ceil_div(N, ACROSS), ceil_div(M, DOWN))
    return [Launch(simple_kernel(kinds(call)[0]), grid, (ACROSS, DOWN), (*call.ins, *call.outs, *map(np.int32, (M, N, K))))]


def scratch(call: Call) -> int:
    """Bytes of the parts of a split sum."""
    M, N, _ = extents(call)
    return partial_bytes(call.tile.split, M * N)


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words why 32-bit offsets do not reach."""
    return too_large(*call.in_shapes, *call.out_shapes, what="a matrix")


def traffic(call: Call) -> list[Traffic]:
    """Bytes of the launches."""
    return product_traffic(call.tile, *extents(call))


def traffic_simple(call: Call) -> list[Traffic]:
    """Bytes of the launch: a row of each for every result."""
    M, N, K = extents(call)
    return [Traffic(2 * element(call) * M * N * K, outputs(call), element(call) * K * (M + N))]


def engine(conv: Impl) -> Impl:
    """The product as a convolution of `conv`, an engine's conv_fprop whose packed 1×1 filters are the rows of b as they are."""

    def as_conv(call: Call) -> Call:
        M, N, K = extents(call)
        side = SIDE if M % SIDE**2 == 0 else 1
        images = M // side**2
        return replace(
            call,
            op=Op("conv", "fprop"),
            in_shapes=((images, K, side, side), (N, K, 1, 1)),
            out_shapes=((images, N, side, side),),
            attrs={"stride": 1, "pad": 0},
            packed=call.ins[1] if call.ins else None,
        )

    def refused(call: Call, target: Target) -> str | None:
        K = extents(call)[2]
        if K % WHOLE:
            return f"{K} products per sum are no multiple of {WHOLE}: rows of b would have to be padded"
        return supports(call, target) or conv.supports(as_conv(call), target)

    def bytes_of(call: Call) -> Sequence[Traffic]:
        assert conv.traffic is not None
        return conv.traffic(as_conv(call))

    return replace(
        conv,
        bind=lambda call: conv.bind(as_conv(call)),
        scratch=lambda call: conv.scratch(as_conv(call)),
        supports=refused,
        estimate=around(conv, as_conv),
        tile=lambda call, target: conv.tile(as_conv(call), target),
        candidates=lambda call, target: conv.candidates(as_conv(call), target),
        pack=None,
        traffic=bytes_of if conv.traffic else None,
    )


IMPL = Impl(bind, scratch, supports, **choices(lambda call: Product(*extents(call), extents(call)[2] % 16 == 0), traffic))
SIMPLE = Impl(bind_simple, supports=supports, traffic=traffic_simple)


HOST = {Op("gemm"): host(gemm)}


def cases(sizes: Shapes = ((5, 7, 3), (33, 64, 40), (20, 36, 9))) -> Iterator[Case]:
    """Products of matrices, sizes M, K, N."""
    for m, k, n in sizes:
        yield Case(Op("gemm"), label_of((m, k, n)), (normal(24, m, k), normal(25, n, k)), (((m, n), "float32"),), {}, k)
