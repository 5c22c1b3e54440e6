"""Weight gradient as one matrix product on CUDA cores (rows `im2col` and `cudacore`, fp32, NHWC), with the bias gradient on the way.

    dw[k][(r,s,c)] = Σ_(n,p,q) dy[(n,p,q)][k] · x[(n,p,q) moved by tap (r,s)][c]        GM, GN, GK = K, RSC, NPQ
    db[k]          = Σ_(n,p,q) dy[(n,p,q)][k]

Both factors have GK, the pixels, down their rows and lie in memory as shared memory wants them: no transpose. There are
few output tiles (18 of 128×128 for 128 filters of 256×3×3) and a long GK, so the pixels are always cut into parts
(frame/split.py), whose sum also brings the weights from [K][R][S][C] into (K,C,R,S) order.

The bias gradient costs an addition for each dy that a thread loads anyway; only blocks that own the first columns keep it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.conv.frame.split import IN_FLIGHT, launch_sum_filters, sum_filters_traffic
from nbcnn.ops.conv.simt.loaders import gather_columns, lines_of_a_tile, matrix
from nbcnn.ops.conv.simt.register_tile import Loader, block_corner, block_part, matrix_product, shared_floats, store_tile
from nbcnn.ops.conv.simt.tiles import Product, Tile
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.kernel.traffic import Traffic, windows
from nbcnn.plan.shapes import ConvShape


def with_sums(loader: Loader, vector: int) -> Loader:
    """`loader`, which also adds up what passes through a thread: `vector` sums at the end of `stage`."""
    stash_alone, FLOATS = loader.stash, loader.floats

    @jit(device=True)
    def stash(stage, shared, at):
        stash_alone(stage, shared, at)
        for i in range(FLOATS):
            stage[FLOATS + i % vector] += stage[i]

    return Loader(loader.start, loader.fetch, stash, loader.pitch, loader.ints, FLOATS + vector)


@functools.cache
def column_sums(side: int, vector: int, sums: int, across: int, rows: int) -> Any:
    """Device function (stage, shared, db, first, count, plane): db[plane][column] from the sums that `with_sums` left in `stage`.

    `rows` threads hold partial sums of the same columns: shared[row][column], added in row order. All threads must call it.
    """

    @jit(device=True)
    def run(stage, shared, db, first, count, plane):
        tid = cuda.threadIdx.x
        for q in range(vector):
            shared[tid // across * side + tid % across * vector + q] = stage[sums + q]
        cuda.syncthreads()
        if tid < side and first + tid < count:
            total = 0.0
            for row in range(rows):
                total += shared[row * side + tid]
            db[i8(plane) * count + (first + tid)] = total

    return run


@functools.cache
def pixel_product(tile: Tile, R: int, S: int, stride: int, vector_k: int, vector_c: int, whole_tiles: bool, lines: int, sums: str) -> Any:
    """The kernel; sums: "" none, "A" of the columns of dy (the bias gradient), "B" of those of im2col(x)."""
    plain = matrix(tile, tile.BM, vector_k, whole_tiles)
    gathered = gather_columns(tile, tile.BN, R, S, stride, vector_c, whole_tiles, lines)
    A = with_sums(plain, vector_k) if sums == "A" else plain
    B = with_sums(gathered, vector_c) if sums == "B" else gathered
    product, store = matrix_product(tile, A, B), store_tile(tile, vector_c == 4)
    corner, part = block_corner(tile), block_part(tile)
    ACC, FLOATS_A, FLOATS_B = tile.TM * tile.TN, A.floats, B.floats
    MEMORY = shared_floats(tile, A, B)
    OF_A, OF_B = sums == "A", sums == "B"
    SIDE, VECTOR, SUMS = (tile.BN, vector_c, gathered.floats) if OF_B else (tile.BM, vector_k, plain.floats)
    ACROSS = SIDE // VECTOR
    ROWS = tile.threads // ACROSS
    reduce_columns = column_sums(SIDE, VECTOR, SUMS, ACROSS, ROWS)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def pixel_product_kernel(x, dy, dw, db, K, pixels, C, H, W, P, Q, pad, k_tiles):
        """dw[z][k][(r,s,c)] = Σ_pixel dy[pixel][k] · x[pixel moved by (r,s)][c], db[z] = Σ_pixel of the columns summed, over part z.

        gemm: GM = K, GN = R·S·C, GK = pixels = N·P·Q.
        grid: (tiles of BM×BN, parts of k_tiles·BK pixels); owns: per block BM×BN, per thread TM×TN.
        shared: 2·BK·(BM + BN)·4 bytes; moves per block: 4·GK/parts·(BM + BN) + 4·BM·BN bytes.
        """
        GN = C * (R * S)
        plane = cuda.blockIdx.y
        m0, n0 = corner(GN)
        first, last = part(pixels, k_tiles)
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        if OF_A:
            for q in range(VECTOR):
                stage_a[SUMS + q] = 0.0
        if OF_B:
            for q in range(VECTOR):
                stage_b[SUMS + q] = 0.0
        product(acc, stage_a, stage_b, shared, dy, x, (pixels, K), (pixels, C, H, W, P, Q, pad), m0, n0, first, last)
        store(acc, dw, m0, n0, K, GN, plane, (dw, dw, 0, Q))
        if OF_A and n0 == 0:
            reduce_columns(stage_a, shared, db, m0, K, plane)
        if OF_B and m0 == 0:
            reduce_columns(stage_b, shared, db, n0, GN, plane)

    return pixel_product_kernel


def shape_of(call: Call) -> ConvShape:
    """The convolution behind a call of wgrad."""
    N, C, H, W = call.in_shapes[0]
    K, _, R, S = call.out_shapes[0]
    return ConvShape(N, C, H, W, K, R, S, call.attrs["stride"], call.attrs["pad"])


def bind(call: Call) -> list[Launch]:
    """x (N,C,H,W), dy (N,K,P,Q) -> dw (K,C,R,S)[, db (K)]."""
    c, tile = shape_of(call), call.tile
    (x, dy), dw, db = call.ins, call.outs[0], call.outs[1] if len(call.outs) == 2 else None
    product, partials, partials_b = launch_product(call, c, x, dy, "" if db is None else "A")
    return [product, launch_sum_filters(partials, partials_b, dw, db, c.K, c.C, c.R * c.S, tile.split)]


def launch_product(call: Call, c: ConvShape, x: Any, dy: Any, sums: str) -> tuple[Launch, Any, Any]:
    """The launch of the product, the partial results in scratch, and the partial column sums behind them."""
    tile = call.tile
    GM, GN, GK = c.gemm("wgrad")
    partials = call.scratch.view(np.float32)
    partials_b = partials[tile.split * GM * GN :] if sums else partials
    widths = 4 if c.K % 4 == 0 else 1, 4 if c.C % 4 == 0 else 1
    lines = lines_of_a_tile(tile, tile.BN, widths[1], c.P, c.Q)
    kernel = pixel_product(unsplit(tile), c.R, c.S, c.stride, *widths, GK % tile.BK == 0, lines, sums)
    sizes = (c.K, GK, c.C, c.H, c.W, c.P, c.Q, c.pad, tile.k_tiles(GK))
    args = (x, dy, partials, partials_b, *(np.int32(size) for size in sizes))
    return Launch(kernel, tile.grid(GM, GN), tile.threads, args, name=call.op), partials, partials_b


def product(call: Call) -> Product:
    """The product of wgrad."""
    c = shape_of(call)
    return Product(*c.gemm("wgrad"), c.C % 4 == 0 and c.K % 4 == 0, always_sums=True)


def waits(call: Call) -> int:
    """Loads that follow one another where the parts are added: IN_FLIGHT are under way at once."""
    return ceil_div(call.tile.split, IN_FLIGHT)


def scratch(call: Call) -> int:
    """Bytes of the partial weight gradients, and of the partial bias gradients behind them."""
    GM, GN, _ = shape_of(call).gemm("wgrad")
    return 4 * call.tile.split * (GM * GN + GM)


def product_traffic(tile: Tile, c: ConvShape, sums: str) -> Traffic:
    """Bytes of `launch_product`: dy once per column of tiles, x once per row of tiles and tap."""
    GM, GN, GK = c.gemm("wgrad")
    down, rows = windows(c.P, c.R, c.H, c.stride, c.pad)
    across, columns = windows(c.Q, c.S, c.W, c.stride, c.pad)
    dy = 4 * GK * GM
    read = dy * ceil_div(GN, tile.BN) + 4 * c.N * c.C * down * across * ceil_div(GM, tile.BM)
    beside = {"": 0, "A": GM, "B": GN}[sums]
    return Traffic(read, 4 * tile.split * (GM * GN + beside), dy + 4 * c.N * c.C * rows * columns)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    c, bias = shape_of(call), len(call.out_shapes) == 2
    return [product_traffic(call.tile, c, "A" if bias else ""), sum_filters_traffic(c.K, c.C, c.R * c.S, call.tile.split, bias)]
