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

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.conv.frame.split import launch_sum_planes, sum_planes_traffic
from nbcnn.ops.conv.simt.loaders import gather_rows
from nbcnn.ops.conv.simt.register_tile import Loader, block_corner, block_part, matrix_product, shared_floats, store_tile
from nbcnn.ops.conv.simt.tiles import Tile, choices
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div
from nbcnn.ops.kernel.refusals import too_large
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.tiles import partial_bytes, unsplit
from nbcnn.ops.kernel.traffic import Traffic, clipped, element, outputs
from nbcnn.ops.ptx.vector import load4, shared_store1

TILE = Tile(128, 128, 16, 8, 8)
"""For K a multiple of 16."""
RAGGED_TILE = Tile(64, 64, 16, 4, 4)
"""For any K."""
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
def whole_rows(tile: Tile, side: int) -> Loader:
    """Rows of a row-major matrix, k contiguous, where BK divides K: no predicates, one addition a k-tile.

    Beyond the last row the last one is read again, and behind the last k-tile that one: for sums that nobody stores. extents: (rows, K, …).
    """
    ACROSS, PITCH, BK = tile.threads // side, side + 4, tile.BK
    LOADS = BK // (4 * ACROSS)
    if (ACROSS * side, LOADS * ACROSS * 4) != (tile.threads, BK):
        raise ValueError(f"{tile}: {tile.threads} threads cannot share {side}×{BK} elements, 4 at a time")

    @jit(device=True)
    def start(state, extents, origin, first):
        tid = cuda.threadIdx.x
        row = min(origin + tid // ACROSS, extents[0] - 1)
        k = min(first * BK, extents[1])
        state[0] = row * extents[1] + k + tid % ACROSS * 4

    @jit(device=True)
    def fetch(stage, array, state, extents, inside):
        first = i8(state[0] - (0 if inside else BK))
        for j in range(LOADS):
            v = load4(array, first + i8(j * 4 * ACROSS))
            stage[4 * j], stage[4 * j + 1], stage[4 * j + 2], stage[4 * j + 3] = v[0], v[1], v[2], v[3]
        state[0] = state[0] + BK

    @jit(device=True)
    def stash(stage, shared, begin):
        tid = cuda.threadIdx.x
        corner = begin + tid % ACROSS * (4 * PITCH) + tid // ACROSS
        for j in range(LOADS):
            for q in range(4):
                shared_store1(shared, corner + (j * 4 * ACROSS + q) * PITCH, stage[4 * j + q])

    return Loader(start, fetch, stash, PITCH, 1, 4 * LOADS)


@functools.cache
def gemm_nt_kernel_for(tile: Tile, vector: int, whole_tiles: bool, vector_out: bool) -> Any:
    def rows(side: int) -> Loader:
        return whole_rows(tile, side) if whole_tiles else gather_rows(tile, side, 1, 1, 1, 1, vector, False)

    A, B = rows(tile.BM), rows(tile.BN)
    product, store = matrix_product(tile, A, B), store_tile(tile, vector_out)
    corner, part = block_corner(tile), block_part(tile)
    ACC, FLOATS_A, FLOATS_B, MEMORY = tile.TM * tile.TN, A.floats, B.floats, shared_floats(tile, A, B)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def gemm_nt_kernel(a, b, c, M, N, K, k_tiles):
        """c[m][n] = Σ_k a[m][k] · b[n][k].

        gemm: GM, GN, GK = M, N, K. grid: (tiles of BM×BN, parts of k_tiles·BK); owns: a block BM×BN, a thread TM×TN.
        shared: 2·BK·(BM + BN + 8)·4 bytes; moves per block: 4·(K + BK)·(BM + BN) + 4·BM·BN bytes.
        """
        m0, n0 = corner(N)
        first, last = part(K, k_tiles)
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        one, none = 1, 0
        rows_a = (M, K, one, one, one, one, none, none)
        rows_b = (N, K, one, one, one, one, none, none)
        product(acc, stage_a, stage_b, shared, a, b, rows_a, rows_b, m0, n0, first, last)
        store(acc, c, m0, n0, M, N, cuda.blockIdx.y, (c, c, none, one))

    return gemm_nt_kernel


@functools.cache
def simple_kernel(kind: str) -> Any:
    load, store = scalar_io(kind)

    @jit()
    def gemm_simple_kernel(a, b, c, M, N, K):
        """c[m][n] = Σ_k a[m][k] · b[n][k], added in float32.

        grid: (⌈N/32⌉, ⌈M/8⌉), block 32×8; owns: a thread one result, neighbours share a row of a.
        shared none; moves 8 bytes a product through the caches, and c once. source: the definition.
        """
        n, m = cuda.blockIdx.x * ACROSS + cuda.threadIdx.x, cuda.blockIdx.y * DOWN + cuda.threadIdx.y
        if m < M and n < N:
            total = 0.0
            for k in range(K):
                total += load(a, i8(m) * K + k) * load(b, i8(n) * K + k)
            store(c, i8(m) * N + n, total)

    return gemm_simple_kernel


def launch_gemm_nt(a: Any, b: Any, c: Any, M: int, N: int, K: int, tile: Tile | None = None) -> Launch:
    """Launch of c = a·bᵀ on flat float32 arrays that start at 16-byte addresses: a (M,K), b (N,K), c (M,N), any M, N, K.

    a and b must have fewer than 2³¹ elements each; c may have more. With a split tile c is `tile.split` planes of partial results.
    """
    if tile is None:
        tile = TILE if K % TILE.BK == 0 else RAGGED_TILE
    kernel = gemm_nt_kernel_for(unsplit(tile), 4 if K % 4 == 0 else 1, K % tile.BK == 0, N % 4 == 0)
    sizes = (M, N, K, tile.k_tiles(K))
    return Launch(kernel, tile.grid(M, N), tile.threads, (a, b, c, *(np.int32(size) for size in sizes)), name="gemm_nt")


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
    return [launch_gemm_nt(a, b, parts, M, N, K, tile), launch_sum_planes(parts, None, c, M * N, N, tile.split)]


def bind_simple(call: Call) -> list[Launch]:
    """One launch."""
    M, N, K = extents(call)
    grid = (ceil_div(N, ACROSS), ceil_div(M, DOWN))
    return [Launch(simple_kernel(kinds(call)[0]), grid, (ACROSS, DOWN), (*call.ins, *call.outs, *map(np.int32, (M, N, K))))]


def scratch(call: Call) -> int:
    """Bytes of the parts of a split sum."""
    M, N, _ = extents(call)
    return partial_bytes(call.tile.split, M * N)


def supports(call: Call) -> str | None:
    """None, or the reason in words why 32-bit offsets do not reach."""
    return too_large(*call.in_shapes, *call.out_shapes, what="a matrix")


def traffic(call: Call) -> list[Traffic]:
    """Bytes of the launches: a once a column of tiles, b once a row of tiles; `whole_rows` reads more, again, where a tile or a part ends."""
    M, N, K = extents(call)
    tile = call.tile
    down, across, whole = ceil_div(M, tile.BM), ceil_div(N, tile.BN), K % tile.BK == 0
    rows, columns = (down * tile.BM, across * tile.BN) if whole else (clipped(M, tile.BM), clipped(N, tile.BN))
    read = 4 * (K + whole * tile.split * tile.BK) * (rows * across + columns * down)
    product = Traffic(read, 4 * M * N * tile.split, 4 * K * (M + N))
    return [product] if tile.split == 1 else [product, sum_planes_traffic(M * N, tile.split, False)]


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
            op="conv_fprop",
            in_shapes=((images, K, side, side), (N, K, 1, 1)),
            out_shapes=((images, N, side, side),),
            attrs={"stride": 1, "pad": 0},
            packed=call.ins[1] if call.ins else None,
        )

    def refused(call: Call) -> str | None:
        K = extents(call)[2]
        if K % WHOLE:
            return f"{K} products a sum are no multiple of {WHOLE}: rows of b would have to be padded"
        return supports(call) or conv.supports(as_conv(call))

    def bytes_of(call: Call) -> Sequence[Traffic]:
        assert conv.traffic is not None
        return conv.traffic(as_conv(call))

    return replace(
        conv,
        bind=lambda call: conv.bind(as_conv(call)),
        scratch=lambda call: conv.scratch(as_conv(call)),
        supports=refused,
        tile=lambda call, multiprocessors: conv.tile(as_conv(call), multiprocessors),
        candidates=lambda call, multiprocessors: conv.candidates(as_conv(call), multiprocessors),
        pack=None,
        traffic=bytes_of if conv.traffic else None,
    )


IMPL = Impl(bind, scratch, supports, traffic=traffic, **choices(lambda call: (*extents(call), extents(call)[2] % 16 == 0, False)))
SIMPLE = Impl(bind_simple, supports=supports, traffic=traffic_simple)


HOST = {"gemm": host(gemm)}


def cases(sizes: Shapes = ((5, 7, 3), (33, 64, 40), (20, 36, 9))) -> Iterator[Case]:
    """Products of matrices, sizes M, K, N."""
    for m, k, n in sizes:
        yield Case("gemm", label_of((m, k, n)), (normal(24, m, k), normal(25, n, k)), (((m, n), "float32"),), {}, k)
