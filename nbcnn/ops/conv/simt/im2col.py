"""Convolution as one matrix product on CUDA cores (rows `im2col` and `cudacore`, fp32, NHWC): fprop and dgrad; the table of row `im2col`.

    fprop  y[(n,p,q)][k]  = Σ_(r,s,c) x[(n,p,q) moved by tap (r,s)][c] · w[(r,s,c)][k]          GM, GN, GK = NPQ, K, CRS
    dgrad  dx[(n,h,w)][c] = Σ_(r,s,k) dy[(n,h,w) moved by tap (r,s)][k] · w'[(r,s,k)][c]        GM, GN, GK = NHW, C, KRS

The left factor is the im2col matrix. It is never stored: each block computes the addresses of its tile of it while it
loads (`gather_rows`). The right factor is the weight, packed before every step so that GN is contiguous. Multiplying,
storing and cutting GK into parts are no business of a convolution: register_tile.py, frame/split.py.

dgrad is the same kernel. From y[p] = Σ_r x[p·stride - pad + r] w[r] follows, with r' = R-1-r,

    dx[h] = Σ_r' dy[(h - (R-1-pad) + r') / stride] · w[R-1-r']     where the division leaves no remainder,

a convolution of dy, dilated by the stride, with the filters flipped and C and K exchanged, at padding R-1-pad (which is
negative where a forward window skips the border). With stride 2 and even H and W it is four products instead, one for each parity of
h and w, without the zeros between strided pixels (frame/correlation.py).

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014 (implicit GEMM).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.frame.awkward import narrow
from nbcnn.ops.conv.frame.correlation import by_parity, image_part, in_phases, parity_filters
from nbcnn.ops.conv.frame.split import launch_sum_partials, sum_partials_traffic
from nbcnn.ops.conv.simt import im2col_wgrad
from nbcnn.ops.conv.simt.loaders import gather_rows, matrix
from nbcnn.ops.conv.simt.register_tile import block_corner, block_part, matrix_product, pool_tile, shared_floats, store_tile
from nbcnn.ops.conv.simt.split_fused import launch_sum_pooled, sum_pooled_traffic
from nbcnn.ops.conv.simt.tiles import Product, Tile, choices
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div
from nbcnn.ops.kernel.tiles import partial_bytes, unsplit
from nbcnn.ops.kernel.traffic import Traffic, clipped, windows
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, numel


@dataclass(frozen=True)
class Window:
    """What of an implicit GEMM is frozen into its kernel: the window, and what becomes of a result.

    dilate   zeros between source pixels (see dgrad above).
    after    None, the device function of an activation, "mask" (zero where another tensor is not positive), "pool" (ReLU, 2×2 maximum and index;
             rows are then numbered by windows), "windows" (rows numbered so, nothing else: parts of a sum that is pooled later).
    phases   four products over one source, each of which gives a phase of an image twice as large (folded.py).
    """

    R: int
    S: int
    stride: int = 1
    dilate: int = 1
    after: Any = None
    phases: bool = False


@functools.cache
def gather_product(tile: Tile, window: Window, vector_in: int, whole_taps: bool, vector_out: bool, bias: bool, parts: bool = False) -> Any:
    R, S, windows, phases = window.R, window.S, window.after in ("pool", "windows"), window.phases
    A = gather_rows(tile, tile.BM, R, S, window.stride, window.dilate, vector_in, whole_taps, windows)
    B = matrix(tile, tile.BN, 4, whole_taps)
    product = matrix_product(tile, A, B)
    store = pool_tile(tile, vector_out, bias) if window.after == "pool" else store_tile(tile, vector_out, bias, window.after, phases, parts)
    corner, part = block_corner(tile), block_part(tile)
    ACC, FLOATS_A, FLOATS_B = tile.TM * tile.TN, A.floats, B.floats
    MEMORY = shared_floats(tile, A, B)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def gather_product_kernel(x, w, b, other, y, GM, GN, pitch, C, H, W, P, Q, pad_h, pad_w, k_tiles, apart):
        """y[z][m][n] = Σ_k x[pixel m moved by the tap of k][channel of k] · w[k][n] (+ b[n]), over part z of the k.

        gemm: GM = output pixels, GN, GK = R·S·C; w has rows of `pitch` floats a phase (GN rounded up to 4).
        grid: (tiles of BM×BN, parts of k_tiles·BK, phases); owns: per block BM×BN, per thread TM×TN.
        shared: 2·BK·(BM + 4 + BN)·4 bytes; moves per block: 4·GK/parts·(BM + BN) + 4·BM·BN bytes (a fourth of that if it pools).
        other: what masks, or the index that pooling writes. parts: rows of y are those of a larger matrix, `apart` elements apart.
        """
        GK = C * (R * S)
        m0, n0 = corner(GN)
        first, last = part(GK, k_tiles)
        phase, columns, column = 0, pitch, n0
        if phases:
            phase = cuda.blockIdx.z
            columns = 4 * pitch
            column = n0 + phase * pitch
            pad_h -= phase >> 1
            pad_w -= phase & 1
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        product(acc, stage_a, stage_b, shared, x, w, (GM, C, H, W, P, Q, pad_h, pad_w), (GK, columns), m0, column, first, last)
        store(acc, y, m0, n0, GM, GN, cuda.blockIdx.y, (b, other, phase, Q, apart))

    return gather_product_kernel


def launches(call: Call, x: Any, b: Any, y: Any, GN: int, extents: tuple[int, ...], window: Window, other: Any = None) -> list[Launch]:
    """The product of im2col(x) and `call.packed`, written to y, through scratch if the tile is split.

    extents: (N, C, H, W, P, Q, pad_h, pad_w) of the gather, where N, C, H, W are those of x. other: what masks, or the index
    that pooling writes.
    """
    N, *rest = extents
    C, P, Q = rest[0], rest[3], rest[4]
    tile, GM, GK, phases = call.tile, N * P * Q, C * window.R * window.S, 4 if window.phases else 1
    whole_taps = C % tile.BK == 0
    split = tile.split > 1
    out = call.scratch.view(np.float32) if split else y
    with_bias = b is not None and not split
    kept = replace(window, after="windows" if window.after == "pool" else None) if split else window
    kernel = gather_product(unsplit(tile), kept, 4 if C % 4 == 0 else 1, whole_taps, GN % 4 == 0, with_bias, ("out", 0) in call.places)
    sizes = (GM, GN, padded(GN), *rest, tile.k_tiles(GK), call.channels("out", 0))
    args = (x, call.packed, b if with_bias else x, x if other is None else other, out, *(np.int32(size) for size in sizes))
    grid = (*tile.grid(GM, GN), phases) if window.phases else tile.grid(GM, GN)
    made = [Launch(kernel, grid, tile.threads, args, name=call.op)]
    if split and window.after == "pool":
        made.append(launch_sum_pooled(out, b, y, other, GM // 4, GN, tile.split))
    elif split:
        made.append(launch_sum_partials(out, b, y, phases * GM * GN, GN, tile.split, window.after, other))
    return made


def product_traffic(tile: Tile, GN: int, extents: tuple[int, ...], window: Window) -> list[Traffic]:
    """Bytes of `launches`: pixels once per column of tiles and tap, weights once per row of tiles."""
    N, C, H, W, P, Q, pad_h, pad_w = extents
    shifts, phases = ((0, 1), 4) if window.phases else ((0,), 1)
    down = [windows(P, window.R, H, window.stride, pad_h - shift, window.dilate) for shift in shifts]
    across = [windows(Q, window.S, W, window.stride, pad_w - shift, window.dilate) for shift in shifts]
    pixels, seen = sum(a for a, _ in down) * sum(a for a, _ in across), max(a for _, a in down) * max(a for _, a in across)
    GM, GK, columns, parts = N * P * Q, C * window.R * window.S, padded(GN), tile.split
    read = 4 * N * C * pixels * ceil_div(GN, tile.BN) + 4 * GK * clipped(columns, tile.BN, phases) * ceil_div(GM, tile.BM)
    distinct, outputs = 4 * N * C * seen + 4 * GK * columns * phases, phases * GM * GN
    if parts > 1:
        product = Traffic(read, 4 * parts * outputs, distinct)
        if window.after == "pool":
            return [product, sum_pooled_traffic(GM // 4, GN, parts)]
        return [product, sum_partials_traffic(outputs, parts, window.after == "mask")]
    mask = 4 * outputs if window.after == "mask" else 0
    written = GM // 4 * (4 * GN + ceil_div(GN, 4)) if window.after == "pool" else 4 * outputs
    return [Traffic(read + mask, written, distinct + mask)]


def padded(count: int) -> int:
    """Columns of a packed weight: rounded up to whole 16-byte loads."""
    return -(-count // 4) * 4


def shape_of(call: Call) -> ConvShape:
    """The convolution behind a call of fprop or dgrad, plain or fused."""
    K, C, R, S = call.in_shapes[1]
    N, _, H, W = (call.in_shapes if call.op.direction == "fprop" else call.out_shapes)[0]
    return ConvShape(N, C, H, W, K, R, S, call.attrs["stride"], call.attrs["pad"])


def bind_fprop(call: Call) -> list[Launch]:
    """x (N,C,H,W), w (K,C,R,S)[, b (K)] -> y (N,K,P,Q)."""
    c = shape_of(call)
    b = call.ins[2] if len(call.ins) == 3 else None
    return launches(call, call.ins[0], b, call.outs[0], c.K, fprop_extents(c), Window(c.R, c.S, c.stride))


def bind_dgrad(call: Call) -> list[Launch]:
    """dy (N,K,P,Q), w (K,C,R,S) -> dx (N,C,H,W)."""
    return launches(call, call.ins[0], None, call.outs[0], call.out_shapes[0][1], *dgrad_gather(call))


def fprop_extents(c: ConvShape) -> tuple[int, ...]:
    """What `launches` gathers from: x."""
    return c.N, c.C, c.H, c.W, c.P, c.Q, c.pad, c.pad


def dgrad_gather(call: Call) -> tuple[tuple[int, ...], Window]:
    """What `launches` gathers from, dy, and the window."""
    c = shape_of(call)
    if in_phases(call) and call.op == Op("conv", "dgrad"):
        down, across = by_parity(c.R, c.pad), by_parity(c.S, c.pad)
        return (c.N, c.K, c.P, c.Q, c.P, c.Q, down.first, across.first), Window(down.taps, across.taps, phases=True)
    return (c.N, c.K, c.P, c.Q, c.H, c.W, c.R - 1 - c.pad, c.S - 1 - c.pad), Window(c.R, c.S, 1, c.stride)


def traffic(call: Call, after: str | None = None) -> list[Traffic]:
    """Bytes of fprop or dgrad; `after` as in `Window`."""
    c = shape_of(call)
    if call.op.direction == "fprop":
        return product_traffic(call.tile, c.K, fprop_extents(c), Window(c.R, c.S, c.stride, after=after))
    extents, window = dgrad_gather(call)
    return product_traffic(call.tile, c.C, extents, replace(window, after=after))


def _packed_index(index: np.ndarray) -> np.ndarray:
    """Index map of a packed weight: `index` (R,S,rows,[phases,]columns) with its columns padded by -1, flat, int32."""
    spare = padded(index.shape[-1]) - index.shape[-1]
    return np.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, spare)], constant_values=-1).astype(np.int32).reshape(-1)


def pack_fprop(call: Call) -> np.ndarray:
    """w (K,C,R,S) as [R][S][C][K]."""
    w = call.in_shapes[1]
    return _packed_index(np.arange(numel(w)).reshape(w).transpose(2, 3, 1, 0))


def pack_dgrad(call: Call) -> np.ndarray:
    """w (K,C,R,S) as [R][S][K][C], taps in reverse order; of four phases [R'][S'][K][phase][C]."""
    w = call.in_shapes[1]
    index = np.arange(numel(w)).reshape(w)
    if in_phases(call) and call.op == Op("conv", "dgrad"):
        return _packed_index(parity_filters(index, call.attrs["pad"]).transpose(3, 4, 2, 0, 1))
    return _packed_index(index.transpose(2, 3, 0, 1)[::-1, ::-1])


def product(call: Call) -> Product:
    """The product of fprop or dgrad."""
    path = "fprop" if call.op.direction == "fprop" else "dgrad"
    c = shape_of(call)
    whole_tiles = (c.C if path == "fprop" else c.K) % 16 == 0
    if path == "dgrad" and call.op == Op("conv", "dgrad") and in_phases(call):
        _, window = dgrad_gather(call)
        return Product(c.N * c.P * c.Q, c.C, c.K * window.R * window.S, whole_tiles, copies=4)
    return Product(*c.gemm(path), whole_tiles)


NARROW = 0.38
"""Power of the copies that 16 bytes of a pixel take (`awkward.narrow`)."""


def awkward(call: Call) -> float:
    """How many times as long products take where the channels of images that are loaded are no whole 16 bytes."""
    images = call.in_shapes if call.op.direction == "wgrad" else call.in_shapes[:1]
    return narrow([shape[1] for shape in images], 4, NARROW)


def result_part(call: Call, side: str, at: int, alignment: int) -> bool:
    """`Impl.pitched`: what the product itself stores; partial outputs are added up in one piece."""
    return side == "out" and call.tile.split == 1 and image_part(call, side, at, alignment)


def scratch(call: Call) -> int:
    """Bytes of the partial outputs, if GK is split."""
    return partial_bytes(call.tile.split, numel(call.out_shapes[0]))


_WGRAD = Impl(
    im2col_wgrad.bind, im2col_wgrad.scratch, **choices(im2col_wgrad.product, im2col_wgrad.traffic, awkward=awkward, waits=im2col_wgrad.waits)
)
OPS = {
    Op("conv", "fprop"): Impl(bind_fprop, scratch, pack=pack_fprop, pitched=result_part, **choices(product, traffic, awkward=awkward)),
    Op("conv", "dgrad"): Impl(bind_dgrad, scratch, pack=pack_dgrad, pitched=result_part, **choices(product, traffic, awkward=awkward)),
    Op("conv", "wgrad"): _WGRAD,
}
"""The convolutions of row `im2col`: every shape, NHWC, float32."""
