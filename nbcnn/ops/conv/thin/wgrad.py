"""Weight and bias gradients of a convolution with one thin side (at most 4 channels).

Call the image tensor of the side with many channels `wide` and the other one `thin`. Both layers that matter, a first
one (x is thin) and a last one (dy is thin), need the same product over all wide pixels (n,h,w),

    G[(r,s,t)][c] = Σ_{n,h,w} thin[n, h+r-top, w+s-left, t] · wide[n,h,w,c]

with 27 columns (r,s,t) for 3×3 and three channels. It is dw itself where x is thin; where dy is thin a wide pixel meets
the output pixel that lies the other way, so taps count backwards: dw[t,c,r,s] = G[(R-1-r,S-1-s,t)][c].

The bias gradient of a thin x is Σ wide: one more column, of ones. That of a thin dy is Σ thin, summed beside it.
Every slice of a block leaves its partial sums in scratch; a second kernel adds them up in one fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, i8, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.thin.shape import THIN
from nbcnn.ops.conv.thin.taps import fetch_taps
from nbcnn.ops.conv.thin.wide import plain
from nbcnn.ops.conv.thin.wide import pooled as wide_of_pooled
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND, STREAM
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div, keep_order, power_of_two, split_pixel, step_pixel, unrolled
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.kernel.traffic import Traffic, outputs, windows
from nbcnn.ops.ptx.vector import load1_if, shared_load4, store4
from nbcnn.plan.op import Op, Unpool

LANES, IN_FLIGHT = 16, 4
"""Threads that at most share the partial sums of one output in the second kernel, and loads that each keeps in flight."""


@dataclass(frozen=True)
class WgradTile:
    """A thread owns TM wide channels × TN columns; TY threads across the channels, TX across the columns.

    SLICES such groups in a block take turns with the pixels, CHUNK pixels per step; a thread multiplies DEPTH
    of them while the next DEPTH are on their way into its registers.
    `split` blocks share the pixels; `resident` blocks are to fit on a multiprocessor.
    """

    TM: int
    TN: int
    TX: int
    TY: int
    SLICES: int
    CHUNK: int
    DEPTH: int
    split: int
    resident: int

    def __post_init__(self) -> None:
        if self.CHUNK % (2 * self.SLICES * self.DEPTH) or self.threads % self.CHUNK or self.threads & (self.threads - 1):
            raise ValueError(f"{self}: a chunk must be whole iterations of 2·SLICES·DEPTH pixels, and the threads a power of two that shares it")

    @property
    def threads(self) -> int:
        return self.SLICES * self.TX * self.TY


@dataclass(frozen=True)
class ThinGradient:
    """Extents of one call: wide images (N,C,H,W), thin images (N,T,P,Q), window R×S; which side is thin, with bias or not."""

    N: int
    C: int
    H: int
    W: int
    T: int
    P: int
    Q: int
    R: int
    S: int
    top: int
    left: int
    thin_x: bool
    bias: bool
    stride: int = 1
    pooled: bool = False

    @property
    def folded(self) -> bool:
        """True if G has the 4×4 window of a folded upsampling, of which the 3×3 filter's gradient is made of sums."""
        return self.stride == 2

    @property
    def columns(self) -> int:
        """Columns of the product: R·S·T, and one of ones if it is to give the bias gradient."""
        return self.R * self.S * self.T + (self.thin_x and self.bias)

    @property
    def sums(self) -> bool:
        """True if the bias gradient is the sum of the thin images."""
        return self.bias and not self.thin_x

    @property
    def row(self) -> int:
        """Floats of one slice's partial sums, a multiple of four."""
        return self.columns * self.C + (THIN if self.sums else 0)

    @property
    def pixels(self) -> int:
        return self.N * self.H * self.W


def gradient(call: Call) -> ThinGradient:
    """The product that a conv_wgrad, conv_pool_wgrad or upconv_wgrad call needs; wide images are those before a pooling."""
    (N, C, H, W), (_, K, P, Q) = call.in_shapes[:2]
    R, S = call.out_shapes[0][2:]
    if call.op == Op("upconv", "wgrad"):
        return ThinGradient(N, C, H, W, K, P, Q, 4, 4, 1, 1, False, True, 2)
    pad, bias = call.attrs["pad"], len(call.out_shapes) > 1
    if call.op == Op("conv", "wgrad", before=(Unpool(),)):
        return ThinGradient(N, K, 2 * P, 2 * Q, C, H, W, R, S, pad, pad, True, bias, pooled=True)
    if C <= K:
        return ThinGradient(N, K, P, Q, C, H, W, R, S, pad, pad, True, bias)
    return ThinGradient(N, C, H, W, K, P, Q, R, S, R - 1 - pad, S - 1 - pad, False, bias)


@functools.cache
def partial_kernel(R: int, S: int, T: int, stride: int, pooled: bool, ones: bool, sums: bool, tile: WgradTile) -> Any:
    """The product over a share of the pixels. T: thin channels; ones: one more column, of ones; sums: also sum the thin side."""
    TM, TN, TX, TY, SLICES, CHUNK, DEPTH = tile.TM, tile.TN, tile.TX, tile.TY, tile.SLICES, tile.CHUNK, tile.DEPTH
    TAPS, GN, THREADS, VM, VN, BM = R * S, R * S * T, tile.threads, TM // 4, -(-TN // 4), TM * TY
    COLUMNS, GROUP, PITCH, STEP, WIDTH = GN + ones, 4 * VN, 4 * VN * TX, 4 * TY, 4 * VN
    side = wide_of_pooled(TM, STEP, SLICES, DEPTH) if pooled else plain(TM, STEP, SLICES, DEPTH)
    load_wide, STAGED, PLACES, FIRST = side.load, side.floats, side.ints, side.first
    # Pixels numbered by windows are walked by windows; the place of a thread's pixel in its window never changes.
    UNIT, SCALE = (4, 2) if pooled else (1, 1)
    ITERATION, ROUNDS, BUFFER = 2 * DEPTH * SLICES, CHUNK // (2 * SLICES * DEPTH), CHUNK * PITCH
    MEMORY, HALF_BLOCK = max(2 * BUFFER, THREADS * T), THREADS // 2
    # Threads that share the columns of one pixel, each with every SHARE-th tap.
    SHARE = THREADS // CHUNK
    LOADS = -(-TAPS // SHARE)
    STAGED_T = LOADS * T

    @jit(device=True)
    def column(j):
        return j // TN * GROUP + j % TN

    fetch = fetch_taps(R, S, T, stride, SHARE)

    @jit(device=True)
    def stash(stage, shared, at, share, inside):
        for i in range(LOADS):
            tap = share + i * SHARE
            if tap < TAPS:
                for t in range(T):
                    shared[at + column(tap * T + t)] = stage[i * T + t]
        if ones and share == 0:
            shared[at + column(GN)] = 1.0 if inside else 0.0

    def make_pixel(d):
        take, ROW = side.take[d], side.distance[d] * PITCH

        @jit(device=True)
        def pixel(acc, stage, places, shared, where):
            b, wide, index, c, C, m, last = where
            if d % DEPTH == 0:
                # The other half's pixels travel while this half's are multiplied.
                load_wide(stage, places, 1 - d // DEPTH, wide, index, c, C, m + (d + DEPTH) * SLICES, last)
                keep_order()
            rA = cuda.local.array(TM, f4)
            rB = cuda.local.array(WIDTH, f4)
            take(rA, stage, places)
            for v in range(VN):
                rB[4 * v], rB[4 * v + 1], rB[4 * v + 2], rB[4 * v + 3] = shared_load4(shared, b + (ROW + 4 * v))
            for i in range(TM):
                for j in range(TN):
                    acc[i, j] += rA[i] * rB[j]

        return pixel

    iteration = unrolled([make_pixel(d) for d in range(2 * DEPTH)])

    @jit(device=True)
    def sum_thin(thin, partial, shared, pixels, row, base):
        t = cuda.threadIdx.x
        per_block = (pixels + cuda.gridDim.x - 1) // cuda.gridDim.x
        m = cuda.blockIdx.x * per_block + t
        end = min(pixels, cuda.blockIdx.x * per_block + per_block)
        total = cuda.local.array(T, f4)
        for k in range(T):
            total[k] = 0.0
        while m < end:
            for k in range(T):
                total[k] += thin[i8(m) * T + k]
            m += THREADS
        for k in range(T):
            shared[t * T + k] = total[k]
        cuda.syncthreads()
        width = HALF_BLOCK
        while width > 0:
            if t < width:
                for k in range(T):
                    shared[t * T + k] += shared[(t + width) * T + k]
            cuda.syncthreads()
            width >>= 1
        if t < SLICES * T:
            partial[base + i8(t // T) * row + t % T] = shared[t] if t < T else 0.0
        cuda.syncthreads()

    @jit(launch_bounds=(THREADS, tile.resident))
    def thin_partial_kernel(wide, index, thin, partial, M, C, H, W, P, Q, top, left, per_split, row, thin_pixels):
        """partial[split, slice][j][c] = Σ_m wide[m,c] · columns[m][j], m over the slice's pixels; columns = im2col(thin) (, 1).

        gemm   C channels × R·S·T (+1) columns × NHW pixels
        grid   (split, ⌈C/BM⌉), block SLICES·TX·TY; block owns BM channels × all columns of its pixels, thread TM×TN
        shared 8·CHUNK·TX·TN bytes (TN rounded up to 4)
        moves  4·M·(C + T) bytes (M·C + 4·M·T, and M·C/16 of the index, if pooled), and 4·split·SLICES·row of partial sums
        M counts pixels before a pooling, H and W are those of `wide` as it is stored
        """
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array((TM, TN), f4)
        stage = cuda.local.array(STAGED, f4)
        places = cuda.local.array(PLACES, i4)
        stage_t = cuda.local.array(STAGED_T, f4)
        t = cuda.threadIdx.x
        ty, tx, slice = t % TY, t // TY % TX, t // (TX * TY)
        c = cuda.blockIdx.y * BM + ty * 4
        pixel, share = t % CHUNK, t // CHUNK
        m0 = cuda.blockIdx.x * per_split
        end = min(M, m0 + per_split)
        base = i8(cuda.blockIdx.x * SLICES) * row
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = 0.0

        load_wide(stage, places, 0, wide, index, c, C, m0 + slice * FIRST, M - 1)
        down, across = pixel >> 1 & 1 if pooled else 0, pixel & 1 if pooled else 0
        n, h, w = split_pixel((m0 + pixel) // UNIT, H, W)
        dn, dh, dw = split_pixel(CHUNK // UNIT, H, W)
        inside = m0 + pixel < end
        fetch(stage_t, thin, inside, n, h * SCALE + down, w * SCALE + across, share, P, Q, top, left)
        if sums and cuda.blockIdx.y == 0:
            sum_thin(thin, partial, shared, thin_pixels, row, base + i8(COLUMNS) * C)
        # Padding columns are multiplied too, so they must hold numbers.
        e = t
        while e < 2 * BUFFER:
            shared[e] = 0.0
            e += THREADS
        cuda.syncthreads()
        stash(stage_t, shared, pixel * PITCH, share, inside)
        cuda.syncthreads()
        half = 0
        while m0 < end:
            n, h, w = step_pixel(n, h, w, dn, dh, dw, H, W)
            inside = m0 + CHUNK + pixel < end
            fetch(stage_t, thin, inside, n, h * SCALE + down, w * SCALE + across, share, P, Q, top, left)
            b = half + slice * (FIRST * PITCH) + tx * GROUP
            m = m0 + slice * FIRST
            for _ in range(ROUNDS):
                iteration(acc, stage, places, shared, (b, wide, index, c, C, m, M - 1))
                b, m = b + ITERATION * PITCH, m + ITERATION
            half = BUFFER - half
            stash(stage_t, shared, half + pixel * PITCH, share, inside)
            cuda.syncthreads()
            m0 += CHUNK

        base += i8(slice) * row
        for j in range(TN):
            if tx * TN + j < COLUMNS:
                for v in range(VM):
                    if c + v * STEP < C:
                        k = 4 * v
                        at = base + i8(tx * TN + j) * C + (c + v * STEP)
                        store4(partial, at, acc[k, j], acc[k + 1, j], acc[k + 2, j], acc[k + 3, j])

    return thin_partial_kernel


@functools.cache
def total_kernel(R: int, S: int, T: int, thin_x: bool, folded: bool, lanes: int) -> Any:
    """The kernel that adds up the partial sums and puts them where dw and db want them; folded: four to a tap of a 3×3 filter."""
    TAPS, THREADS, SOURCES = 9 if folded else R * S, 32 * lanes, 4 if folded else 1
    GN, PARTIAL_GN, LOADS = TAPS * T, R * S * T, SOURCES * IN_FLIGHT

    @jit()
    def thin_total_kernel(partial, dw, db, C, row, rows, used):
        """dw[k,c,r,s] and db[k] = Σ over the slices of partial, each output in one fixed order.

        grid   ⌈outputs/32⌉; block 32 outputs × `lanes` threads, each adds every lanes-th slice
        moves  4·slices·row bytes (9/4 of that if folded)
        """
        shared = cuda.shared.array(THREADS, f4)
        t = cuda.threadIdx.x
        e = cuda.blockIdx.x * 32 + (t & 31)
        values = cuda.local.array(LOADS, f4)
        total = 0.0
        j = e // C
        source, beside, sources = e, 0, SOURCES
        if folded:
            beside = T * C
            tap = j // T
            corner = (2 - tap // 3) * S + 2 - tap % 3
            source = e + (corner - tap) * beside
            if j >= GN:
                source, sources = e + (PARTIAL_GN - GN) * C, 1
        if e < used:
            i = t >> 5
            while i < rows:
                # Loads that do not wait for each other's sum.
                for u in range(IN_FLIGHT):
                    for v in range(SOURCES):
                        # Beside a tap of G, the next column, row, and both.
                        at = i8(i + u * lanes) * row + (source + (v // 2 * S + v % 2) * beside)
                        values[u * SOURCES + v] = load1_if(partial, at, (i + u * lanes < rows) & (v < sources))
                for u in range(LOADS):
                    total += values[u]
                i += lanes * IN_FLIGHT
        shared[t] = total
        cuda.syncthreads()
        if t < 32 and e < used:
            for lane in range(1, lanes):
                total += shared[t + lane * 32]
            c = e - j * C
            if j < GN:
                tap, k = j // T, j % T
                if thin_x:
                    dw[(c * T + k) * TAPS + tap] = total
                elif folded:
                    dw[(k * C + c) * TAPS + tap] = total
                else:
                    dw[(k * C + c) * TAPS + (TAPS - 1 - tap)] = total
            else:
                db[e - GN * C] = total

    return thin_total_kernel


def scratch(call: Call) -> int:
    return 4 * call.tile.split * call.tile.SLICES * gradient(call).row


def tile(call: Call, target: Target) -> WgradTile:
    """All multiprocessors busy, and no more partial sums than that needs."""
    g = gradient(call)
    if g.pixels >= 128 * target.multiprocessors:
        TX = power_of_two(-(-g.columns // 28))
        TY = min(64, 128 // TX, power_of_two(-(-g.C // 4)))
        SLICES, CHUNK = 128 // (TX * TY), 64 // TX
        DEPTH = min(4, CHUNK // (2 * SLICES))
        if g.pooled and DEPTH < 4:
            return _small(g, target)
        tiles = -(-g.C // (4 * TY))
        return WgradTile(4, -(-g.columns // TX), TX, TY, SLICES, CHUNK, DEPTH, max(1, 2 * target.multiprocessors // tiles), 2)
    return _small(g, target)


def _small(g: ThinGradient, target: Target) -> WgradTile:
    """Few pixels, or few wide channels behind a pooling."""
    TX = min(8, power_of_two(-(-g.columns // 7)))
    return WgradTile(4, -(-g.columns // TX), TX, 16, 2, 16, 4, max(1, min(target.multiprocessors // 2, g.pixels // 16)), 2 if TX <= 4 else 1)


ROUND_CYCLES, MULTIPLY = 106, 1.6
"""Cycles of a pixel of a slice besides its products, and of a product where four warps share a scheduler's turn: 128 images of 3 to 24 channels take
79 µs, 33 take 21.5, 1,024 of 3 to 256 channels 410 (H100)."""


def estimate(call: Call, target: Target) -> float:
    """Microseconds of a slice that walks over its pixels, and of the two launches."""
    g, tile = gradient(call), call.tile
    pixels, blocks_in_all = ceil_div(g.pixels, tile.split * tile.SLICES), tile.split * ceil_div(g.C, tile.TM * tile.TY)
    warps = ceil_div(min(blocks_in_all, tile.resident * target.multiprocessors), target.multiprocessors) * tile.threads / 128
    waves = max(1, ceil_div(blocks_in_all, tile.resident * target.multiprocessors))
    products = tile.TM * tile.TN
    cycles = waves * pixels * max(ROUND_CYCLES + products, MULTIPLY * warps * products)
    return 2 * STREAM.launch - 1 + cycles / CYCLES_A_MICROSECOND


def bind(call: Call) -> list[Launch]:
    g, tile = gradient(call), call.tile
    wide, thin = (call.ins[1], call.ins[0]) if g.thin_x else call.ins[:2]
    partial, dw = call.scratch.view(np.float32), call.outs[0]
    steps = -(-g.pixels // tile.CHUNK)
    per_split = -(-steps // tile.split) * tile.CHUNK
    # The split is the grid's business: one kernel serves them all.
    product = partial_kernel(g.R, g.S, g.T, g.stride, g.pooled, g.thin_x and g.bias, g.sums, unsplit(tile))
    unit = 2 if g.pooled else 1
    values = (g.pixels, g.C, g.H // unit, g.W // unit, g.P, g.Q, g.top, g.left, per_split, g.row, g.N * g.P * g.Q)
    used = (9 * g.T if g.folded else g.columns) * g.C + (g.T if g.sums else 0)
    rows = tile.split * tile.SLICES
    sizes = [np.int32(v) for v in (g.C, g.row, rows, used)]
    lanes = min(LANES, power_of_two(-(-rows // IN_FLIGHT)))
    total = total_kernel(g.R, g.S, g.T, g.thin_x, g.folded, lanes)
    grid = (tile.split, -(-g.C // (tile.TM * tile.TY)))
    return [
        Launch(product, grid, tile.threads, (wide, call.ins[2] if g.pooled else wide, thin, partial, *(np.int32(v) for v in values))),
        Launch(total, blocks(used, 32), 32 * lanes, (partial, dw, call.outs[1] if g.bias else dw, *sizes)),
    ]


def partial_traffic(g: ThinGradient, tile: WgradTile) -> Traffic:
    """Bytes of the first launch.

    The TX threads that share channels each load them; a block has half an iteration of pixels on their way that it does not use, and last
    channels stand in for those beyond them.
    """
    across = ceil_div(g.C, tile.TM * tile.TY)
    pixels = ceil_div(g.pixels, tile.CHUNK) * tile.CHUNK + tile.split * tile.SLICES * tile.DEPTH
    # Of a pooled gradient: four pixels have one value and, with three other channels, one byte of index.
    wide, value = (4, 4 + 1 / 4) if g.pooled else (1, 4)
    channels = across * tile.TM * tile.TY * tile.TX
    down, rows = windows(g.H, g.R, g.P, g.stride, g.top)
    right, columns = windows(g.W, g.S, g.Q, g.stride, g.left)
    thin, sums = 4 * g.N * g.T * down * right * across, 4 * g.N * g.P * g.Q * g.T if g.sums else 0
    read = int(pixels * channels / wide * value) + thin + sums
    distinct = int(g.pixels * g.C / wide * value) + 4 * g.N * g.T * max(rows * columns, g.P * g.Q if g.sums else 0)
    return Traffic(read, 4 * tile.split * tile.SLICES * (g.columns * g.C + (g.T if g.sums else 0)), distinct)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    g, tile = gradient(call), call.tile
    return [partial_traffic(g, tile), total_traffic(call, g.R * g.S * g.T * g.C, g.T * g.C * 9, tile.split * tile.SLICES, g.folded)]


def total_traffic(call: Call, sums: int, filters: int, rows: int, folded: bool) -> Traffic:
    """Bytes of `total_kernel`: `rows` partial sums of each of `sums` products and of the bias; `folded`, a filter's tap adds up four of them."""
    written = outputs(call)
    bias = 4 * rows * (written // 4 - (filters if folded else sums))
    return Traffic(4 * rows * (4 * filters if folded else sums) + bias, written, 4 * rows * sums + bias)
