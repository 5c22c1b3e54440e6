"""Convolution by tiles in shared memory: what a block reads from global memory once, all its threads use. Images are NCHW.

fprop and dgrad. A block owns 8×8 pixels of one image and up to 16 target channels. It walks over the source channels 8
at a time: stages their pixels, with the halo that the window needs, and their weights in shared memory; then a thread
adds to 2 pixels × 4 channels in registers, so that 6 shared loads feed 8 multiply-adds.

wgrad. A block owns all taps of one input channel and up to 4 filters. Its threads share out the pixels, each with
all taps in registers; a tree in shared memory adds the threads up. The bias gradient is a sum by warp shuffles.
No result is split over blocks, so nothing depends on their order and a run repeats bit for bit.
Source of the tree: Harris, "Optimizing parallel reduction in CUDA", 2007.
"""

from __future__ import annotations

import functools
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.naive import int32s, shape_of
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size, windows
from nbcnn.ops.ptx.shuffle import WARP, warp_sum
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, numel

MAX_STRIDE, MAX_WINDOW = 2, 7
"""Up to here the halo and the weights of eight channels fit 48 KiB of shared memory."""

SIDE = 8
"""Rows and columns of the pixel tile. One warp covers it, with two pixels per thread, HALF rows apart."""
HALF = SIDE // 2
TN = 4
"""Target channels that a thread accumulates."""
MAX_WARPS = 4
"""Warps of a block: they own the same pixels, each its own TN target channels."""
BK = 8
"""Source channels staged at a time."""

TREE_THREADS = 128
TREE_LEVELS = TREE_THREADS.bit_length() - 1
BIAS_THREADS = 256


def halo_side(path: str, window: int, stride: int) -> int:
    """Rows (or columns) of the source that SIDE rows of the target meet through `window` taps."""
    if path == "fprop":
        return (SIDE - 1) * stride + window
    # The rows p with p·stride = h + pad − r: of SIDE + window − 1 values of h − r each stride-th, the first anywhere.
    return (SIDE + window - 2) // stride + (1 if stride == 1 else 2)


def halo_pitch(side: int) -> int:
    """Elements from one staged row to the next, such that at stride 1 a warp's four rows of eight fall into 32 banks."""
    return next(pitch for pitch in range(side, side + 16) if pitch % 16 == 8)


@functools.cache
def image_kernel(path: str, R: int, S: int, stride: int, warps: int, with_bias: bool) -> Any:
    """The kernel of fprop (source x, target y) or dgrad (source dy, target dx).

    At stride 1 dgrad is fprop with the filters flipped, by 180 degrees, which is how both stage them. At stride 2 it
    reads a source with a zero between every two pixels, and skips the taps that fall on those.
    """
    IS_FPROP = path == "fprop"
    DENSE = IS_FPROP or stride == 1
    STEP, SPREAD = (stride, 1) if DENSE else (1, stride)
    ROWS, COLUMNS = halo_side(path, R, stride), halo_side(path, S, stride)
    AREA, PITCH = ROWS * COLUMNS, halo_pitch(COLUMNS)
    PLANE, TAPS, THREADS, BN = ROWS * PITCH, R * S, warps * WARP, warps * TN
    # The stores that stage neighbouring weights are a pitch apart: four spare elements spread them over eight banks.
    WEIGHT_PITCH = BN + 4
    PIXELS, WEIGHTS, SUMS = BK * PLANE, BK * TAPS * WEIGHT_PITCH, 2 * TN
    LOWER = HALF * STEP // SPREAD * PITCH

    @jit(device=True)
    def stage_pixels(staged, source, image, channel, depth, HS, WS, row0, column0):
        """The halo of `depth` channels from `channel` on, with zeros outside the image."""
        for e in range(cuda.threadIdx.x, depth * AREA, THREADS):
            c = quotient(e, AREA)
            r = quotient(e - c * AREA, COLUMNS)
            s = e - c * AREA - r * COLUMNS
            row, column = row0 + r, column0 + s
            at = image + (((channel + c) * HS + row) * WS + column)
            value = 0.0
            if (row >= 0) & (row < HS) & (column >= 0) & (column < WS):
                value = source[at]
            staged[c * PLANE + r * PITCH + s] = value

    @jit(device=True)
    def stage_weights(staged, w, channel, depth, target, CS, CT):
        """[c][tap][j]: weights from source channel channel + c to target channel target + j, zeros beyond the last."""
        for e in range(cuda.threadIdx.x, BK * BN * TAPS, THREADS):
            # Numbered as they lie in (K,C,R,S), so that neighbouring threads read neighbours.
            pair = quotient(e, TAPS)
            tap = e - pair * TAPS
            major = quotient(pair, BK if IS_FPROP else BN)
            minor = pair - major * (BK if IS_FPROP else BN)
            c, j = (minor, major) if IS_FPROP else (major, minor)
            at = (target + j) * CS + channel + c if IS_FPROP else (channel + c) * CT + target + j
            value = 0.0
            if c < depth and target + j < CT:
                value = w[at * TAPS + tap]
            flipped = tap if IS_FPROP else TAPS - 1 - tap
            staged[(c * TAPS + flipped) * WEIGHT_PITCH + j] = value

    @jit(device=True)
    def add_tap(acc, pixels, weights, pixel, weight):
        """acc += weights × pixels: 2 + 4 shared loads, 8 multiply-adds."""
        upper, lower = pixels[pixel], pixels[pixel + i8(LOWER)]
        for j in range(TN):
            value = weights[weight + i8(j)]
            acc[j] += value * upper
            acc[TN + j] += value * lower

    @jit(device=True)
    def add_channel(acc, pixels, weights, pixel, weight, u, v):
        """acc += all taps of one source channel. (u, v): the thread's upper pixel in the halo, zeros between counted."""
        for r in range(R):
            for s in range(S):
                at = i8(weight + i8((r * S + s) * WEIGHT_PITCH))
                if DENSE:
                    add_tap(acc, pixels, weights, i8(pixel + i8(r * PITCH + s)), at)
                elif (u + r | v + s) & 1 == 0:
                    add_tap(acc, pixels, weights, i8(pixel + i8(u + r >> 1) * PITCH + i8(v + s >> 1)), at)

    @jit()
    def conv_image_tiled_kernel(source, w, b, target, CS, HS, WS, CT, HT, WT, top, left):
        """y = conv(x, w) [+ b], or dx from dy: target = Σ over source channels and taps (formulas: reference.py).

        CS, HS, WS are the source's channels, height, width; CT, HT, WT the target's; top, left the zeros before them.
        grid N · ⌈HT/8⌉ · ⌈WT/8⌉ · ⌈CT/BN⌉, block 32·warps with BN = 4·warps target channels; a warp owns 4 target
        channels of 8×8 pixels, per thread 2 pixels of each. shared 8·(rows·pitch of the halo + taps·(BN+4)) floats;
        moves, a block: CS·(halo + taps·BN) floats in and its part of the target out. source: see above.
        """
        pixels = cuda.shared.array(PIXELS, f4)
        weights = cuda.shared.array(WEIGHTS, f4)
        acc = cuda.local.array(SUMS, f4)
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        ty, tx = lane >> 3, lane & 7

        # Blocks of one pixel tile are neighbours: they read the same pixels.
        groups = (CT + (BN - 1)) // BN
        tiles_h, tiles_w = (HT + (SIDE - 1)) // SIDE, (WT + (SIDE - 1)) // SIDE
        tile = cuda.blockIdx.x // groups
        first_target = (cuda.blockIdx.x - tile * groups) * BN
        n = tile // (tiles_h * tiles_w)
        tile -= n * tiles_h * tiles_w
        tile_row = tile // tiles_w
        h0, w0 = tile_row * SIDE, (tile - tile_row * tiles_w) * SIDE
        # A shift, because it rounds towards minus infinity where the halo starts outside the image.
        row0, column0 = h0 * STEP - top >> SPREAD - 1, w0 * STEP - left >> SPREAD - 1
        # The halo starts at a source pixel: one zero too early if the tile starts between two of them.
        u, v = h0 * STEP - top - row0 * SPREAD + ty * STEP, w0 * STEP - left - column0 * SPREAD + tx * STEP
        corner = i8(u * PITCH + v) if DENSE else i8(0)

        mine = first_target + warp * TN
        for j in range(TN):
            start = 0.0
            if with_bias and mine + j < CT:
                start = b[mine + j]
            acc[j] = start
            acc[TN + j] = start

        image = i8(n) * (CS * HS * WS)
        for channel in range(0, CS, BK):
            depth = min(BK, CS - channel)
            stage_pixels(pixels, source, image, channel, depth, HS, WS, row0, column0)
            stage_weights(weights, w, channel, depth, first_target, CS, CT)
            cuda.syncthreads()
            for c in range(depth):
                add_channel(acc, pixels, weights, i8(corner + i8(c * PLANE)), i8(c * (TAPS * WEIGHT_PITCH) + warp * TN), u, v)
            # Nobody may stage the next channels while a thread still reads these.
            cuda.syncthreads()

        for j in range(TN):
            for half in range(2):
                row, column = h0 + ty + half * HALF, w0 + tx
                if mine + j < CT and row < HT and column < WT:
                    at = i8(n) * (CT * HT * WT) + ((mine + j) * HT + row) * WT + column
                    target[at] = acc[half * TN + j]

    return conv_image_tiled_kernel


def filters_per_block(R: int, S: int) -> int:
    """Filters whose taps one thread of the weight gradient keeps in registers: at most 64 sums."""
    return max(1, min(4, 64 // (R * S)))


@functools.cache
def wgrad_kernel(R: int, S: int) -> Any:
    """The kernel of dw for R×S filters."""
    TAPS, BM, T, PITCH = R * S, filters_per_block(R, S), TREE_THREADS, TREE_THREADS + 1
    SUMS = BM * TAPS
    SHARED = SUMS * PITCH

    @jit(device=True)
    def add_pixel(acc, gradient, x, window, row0, column0, H, W):
        """acc[j][tap] += gradient[j] · x at the tap, of one output pixel in one image."""
        for r in range(R):
            for s in range(S):
                row, column = row0 + r, column0 + s
                value = 0.0
                if 0 <= row < H and column >= 0 and column < W:
                    value = x[window + i8(r * W) + i8(s)]
                for j in range(BM):
                    acc[j * TAPS + r * S + s] += gradient[j] * value

    @jit()
    def conv_wgrad_tiled_kernel(x, dy, dw, N, C, H, W, K, P, Q, stride, pad):
        """dw[k,c,r,s] = Σ_{n,p,q} dy[n,k,p,q] · x[n,c,p·stride+r−pad,q·stride+s−pad].

        grid ⌈K/BM⌉·C, block 128; a block owns dw[k:k+BM, c], per thread the same pixels of every image (or, of images
        below 128 pixels, one pixel of every few images). shared 129·BM·R·S floats; moves, a block: the channel of x
        R·S times through the L1 cache and BM channels of dy once. source: see above.
        """
        tree = cuda.shared.array(SHARED, f4)
        acc = cuda.local.array(SUMS, f4)
        gradient = cuda.local.array(BM, f4)
        tid = cuda.threadIdx.x
        group = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - group * C
        for i in range(SUMS):
            acc[i] = 0.0

        PQ = P * Q
        team = min(PQ, T)
        teams = T // team
        first_image = tid // team
        if first_image < teams:
            for pixel in range(tid - first_image * team, PQ, team):
                p = pixel // Q
                row0, column0 = p * stride - pad, (pixel - p * Q) * stride - pad
                for n in range(first_image, N, teams):
                    for j in range(BM):
                        # Beyond the last filter: its gradient again, whose sum nobody stores.
                        k = min(group * BM + j, K - 1)
                        gradient[j] = dy[i8(n * K + k) * PQ + pixel]
                    add_pixel(acc, gradient, x, i8(i8(n * C + c) * (H * W) + (row0 * W + column0)), row0, column0, H, W)

        # One spare element per row: the last levels, a row apart, then read different banks.
        for i in range(SUMS):
            tree[i * PITCH + tid] = acc[i]
        cuda.syncthreads()
        for level in range(1, TREE_LEVELS + 1):
            shift = TREE_LEVELS - level
            half = 1 << shift
            for e in range(tid, SUMS << shift, T):
                at = (e >> shift) * PITCH + (e & half - 1)
                tree[at] += tree[at + half]
            cuda.syncthreads()

        for e in range(tid, SUMS, T):
            j = e // TAPS
            k = group * BM + j
            if k < K:
                dw[(k * C + c) * TAPS + e - j * TAPS] = tree[e * PITCH]

    return conv_wgrad_tiled_kernel


@functools.cache
def bgrad_kernel() -> Any:
    """The kernel of db."""
    WARPS, T = BIAS_THREADS // WARP, BIAS_THREADS

    @jit()
    def conv_bgrad_tiled_kernel(dy, db, N, K, PQ):
        """db[k] = Σ_{n,p,q} dy[n,k,p,q].

        grid K, block 256; a block owns one filter: its threads add every 256th term, then each warp by shuffles, then
        the first warp the warps. shared 32 bytes; moves dy once. needs N·P·Q < 2^31. source: the definition.
        """
        totals = cuda.shared.array(WARPS, f4)
        tid, k = cuda.threadIdx.x, cuda.blockIdx.x
        total = 0.0
        for i in range(tid, N * PQ, T):
            n = i // PQ
            total += dy[i8(n * K + k) * PQ + (i - n * PQ)]
        total = warp_sum(total)
        if tid & 31 == 0:
            totals[tid >> 5] = total
        cuda.syncthreads()
        total = 0.0
        if tid < WARPS:
            total = totals[tid]
        total = warp_sum(total)
        if tid == 0:
            db[k] = total

    return conv_bgrad_tiled_kernel


def warps_for(channels: int) -> int:
    """Warps of a block of fprop or dgrad with `channels` target channels: none is idle but for the last block's."""
    return min(MAX_WARPS, blocks(channels, TN))


def traffic_image(call: Call) -> list[Traffic]:
    """Bytes of fprop or dgrad: of every tile of pixels, for each group of target channels, its halo inside the image; and all weights."""
    s, path = shape_of(call), call.op.direction
    (N, CS, HS, WS), target = (s.x_shape, s.y_shape) if path == "fprop" else (s.y_shape, s.x_shape)
    height, width = target[2:]
    tiles = blocks(height, SIDE), blocks(width, SIDE)
    groups = _grid(*target)[0] // (N * tiles[0] * tiles[1])

    def halos(count: int, window: int, extent: int) -> tuple[int, int]:
        side = halo_side(path, window, s.stride)
        if path == "fprop":
            return windows(count, side, extent, SIDE * s.stride, s.pad)
        # Rounded towards minus infinity, as the kernel's shift does.
        before = window - 1 - s.pad
        return windows(count, side, extent, SIDE // s.stride, -(-before // s.stride))

    rows, columns, weights = halos(tiles[0], s.R, HS), halos(tiles[1], s.S, WS), numel(s.w_shape)
    read = N * groups * CS * rows[0] * columns[0] + N * tiles[0] * tiles[1] * weights
    return [Traffic(4 * read, outputs(call), 4 * (N * CS * rows[1] * columns[1] + weights))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_wgrad`: every channel of x at all taps and all of dy, for each group of filters and channel; then dy once for db."""
    s = shape_of(call)
    filters = filters_per_block(s.R, s.S)
    rows, columns = (windows(p, r, h, s.stride, s.pad) for p, r, h in ((s.P, s.R, s.H), (s.Q, s.S, s.W)))
    read = blocks(s.K, filters) * s.C * s.N * (filters * s.P * s.Q + rows[0] * columns[0])
    dw = Traffic(4 * read, size(call, "out", 0), 4 * (s.N * s.C * rows[1] * columns[1] + numel(s.y_shape)))
    return [dw, *(once(size(call, "in", 1), size(call, "out", 1)) for _ in call.out_shapes[1:])]


def _grid(N: int, targets: int, height: int, width: int) -> tuple[int, int]:
    """Blocks of fprop or dgrad with that many target channels and pixels, and the target channels of each."""
    BN = warps_for(targets) * TN
    return N * blocks(height, SIDE) * blocks(width, SIDE) * blocks(targets, BN), BN


def supports(call: Call, target: Target) -> str | None:
    """None, or why the tiles cannot serve this convolution."""
    shape = shape_of(call)
    if shape.stride > MAX_STRIDE:
        return f"tiled kernels have strides up to {MAX_STRIDE}, not {shape.stride}"
    if max(shape.R, shape.S) > MAX_WINDOW:
        return f"tiled kernels have windows up to {MAX_WINDOW}×{MAX_WINDOW}, not {shape.R}×{shape.S}"
    return None


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    s, (y,) = shape_of(call), call.outs
    x, w, *bias = call.ins
    # Without bias the kernel has a `b` that it never reads.
    return [_image_launch("fprop", s, (x, w, *(bias or [w]), y), s.x_shape, s.y_shape, bool(bias))]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    s, (dy, w), (dx,) = shape_of(call), call.ins, call.outs
    return [_image_launch("dgrad", s, (dy, w, w, dx), s.y_shape, s.x_shape, False)]


def _image_launch(path: str, s: ConvShape, arrays: tuple[Any, ...], source: tuple[int, ...], target: tuple[int, ...], with_bias: bool) -> Launch:
    count, BN = _grid(*target)
    kernel = image_kernel(path, s.R, s.S, s.stride, BN // TN, with_bias)
    top, left = (s.pad, s.pad) if path == "fprop" else (s.R - 1 - s.pad, s.S - 1 - s.pad)
    extents = int32s(*source[1:], *target[1:], top, left)
    return Launch(kernel, count, BN // TN * WARP, (*arrays, *extents), name=f"conv_{path}_tiled_kernel")


def bind_wgrad(call: Call) -> list[Launch]:
    """One launch for dw, and one for db if it is wanted."""
    s, (x, dy), (dw, *db) = shape_of(call), call.ins, call.outs
    extents = int32s(s.N, s.C, s.H, s.W, s.K, s.P, s.Q, s.stride, s.pad)
    grid = blocks(s.K, filters_per_block(s.R, s.S)) * s.C
    launches = [Launch(wgrad_kernel(s.R, s.S), grid, TREE_THREADS, (x, dy, dw, *extents))]
    for target in db:
        launches.append(Launch(bgrad_kernel(), s.K, BIAS_THREADS, (dy, target, *int32s(s.N, s.K, s.P * s.Q))))
    return launches


OPS = {
    Op("conv", "fprop"): Impl(bind_fprop, supports=supports, traffic=traffic_image),
    Op("conv", "dgrad"): Impl(bind_dgrad, supports=supports, traffic=traffic_image),
    Op("conv", "wgrad"): Impl(bind_wgrad, supports=supports, traffic=traffic_wgrad),
}
