"""Feature processing on the GPU: steps between the encoder's maps and the kernel of a classifier, in place.

A sample is a row of `pitch` floats, of which the first F = C·P are its features: C channels of P positions each, channel by channel. `places`
says where each sample is; room between the classes and behind the features is left alone. `classify/processing.py` has the steps.

    blur               every map with [1 2 1]/4 along both axes, replicated borders
    signed_root        sign(x)·√|x|
    centred            rows, places, mean -> x − mean in an array of its own, without gaps
    channel_products   centred -> Σ over samples and positions of x·xᵀ, (C, C), in parts, float64
    whiten             centred, Z (C, C) -> rows = Z·x at every position
    unit_rows          rows, places, mean -> (x − mean) / |x − mean|

`whiten` multiplies what `centred` kept of a few hundred samples at a time, so that its products may overwrite the rows they are made of.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.kernel.call import Launch, blocks
from nbcnn.ops.kernel.loops import ceil_div, quotient
from nbcnn.ops.kernel.square_tile import PITCH, SHARED, SIDE, STEP, THREADS, add_products, add_products_twice
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere

f8: Any = types.float64
BLUR_VALUES = 1024
"""Values of a block of `blur`, where a map has no more."""
MOST_POSITIONS = 12_288
"""Positions of a map that fit into the 48 KiB of shared memory of a block."""
BLOCKS = 512
"""Blocks that `channel_products` aims at: about four for each multiprocessor of an H200."""
SMALLEST = 1e-12
"""The length that stands for 0."""
_LOADS = SIDE * STEP // THREADS


def blur(rows: np.ndarray, places: np.ndarray, *, shape: tuple[int, int, int]) -> None:
    """rows[places]: every one of C maps of height × width, `shape`, becomes its blurred one."""
    count = math.prod(shape)
    for first in range(0, len(places), 256):
        which = places[first : first + 256]
        maps = np.pad(rows[which, :count].reshape(-1, *shape), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
        tall = maps[:, :, :-2] + 2 * maps[:, :, 1:-1] + maps[:, :, 2:]
        rows[which, :count] = ((tall[..., :-2] + 2 * tall[..., 1:-1] + tall[..., 2:]) / 16).reshape(len(which), count)


def signed_root(rows: np.ndarray, places: np.ndarray, *, width: int) -> None:
    """rows[places] = sign(x)·√|x| of the first `width` values."""
    for place in places:
        x = rows[place, :width]
        x[...] = np.copysign(np.sqrt(np.abs(x)), x)


def centred(rows: np.ndarray, places: np.ndarray, mean: np.ndarray, packed: np.ndarray) -> None:
    """packed (n, F) = rows[places] − mean (F,), float32."""
    packed[...] = rows[places, : len(mean)] - mean


def channel_products(packed: np.ndarray, sums: np.ndarray) -> None:
    """sums (C, C) float64 += Σ over samples and positions of x·xᵀ; packed (n, C, P)."""
    for sample in packed.astype(np.float64):
        sums += sample @ sample.T


def whiten(packed: np.ndarray, Z: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
    """rows[places] = Z·x at every position; packed (n, C, P), Z (C, C) symmetric, float32."""
    n, channels, positions = packed.shape
    rows[places, : channels * positions] = np.matmul(Z, packed).reshape(n, -1)


def unit_rows(rows: np.ndarray, places: np.ndarray, mean: np.ndarray) -> None:
    """rows[places] = (x − mean) / |x − mean|; a length of 0 stays 0."""
    for first in range(0, len(places), 256):
        which = places[first : first + 256]
        away = rows[which, : len(mean)] - mean
        length = np.sqrt(np.einsum("nf,nf->n", away, away, dtype=np.float64))
        rows[which, : len(mean)] = away * (1 / np.maximum(length, SMALLEST)).astype(np.float32)[:, None]


@functools.cache
def blur_kernel_for(height: int, width: int) -> Any:
    """`blur_kernel` for maps of this size."""
    POSITIONS, DOWN, ACROSS = height * width, height, width
    MAPS = max(1, BLUR_VALUES // POSITIONS)
    VALUES = MAPS * POSITIONS

    @jit()
    def blur_kernel(rows, places, channels, pitch):
        """x = Σ w·x over a neighbourhood of 3×3 in place, w = [1 2 1]ᵀ[1 2 1]/16; outside a map its nearest value counts.

        grid    (samples, ⌈C / maps⌉), block 256.
        owns    per block as many maps of a sample as have 1,024 values, at least one; a thread every 256th value.
        shared  4 bytes per value; moves 8 bytes a value; source: the binomial filter of order two.
        """
        values = cuda.shared.array(VALUES, f4)
        first = cuda.blockIdx.y * MAPS
        from_ = i8(places[cuda.blockIdx.x]) * pitch + first * POSITIONS
        count = min(MAPS, channels - first) * POSITIONS
        for at in range(cuda.threadIdx.x, count, THREADS):
            values[at] = rows[from_ + at]
        cuda.syncthreads()
        for at in range(cuda.threadIdx.x, count, THREADS):
            line = quotient(at, ACROSS)
            column, row = at - line * ACROSS, line - quotient(line, DOWN) * DOWN
            up, down = at - (ACROSS if row > 0 else 0), at + (ACROSS if row < DOWN - 1 else 0)
            left, right = 1 if column > 0 else 0, 1 if column < ACROSS - 1 else 0
            sides = values[up - left] + values[up + right] + values[down - left] + values[down + right]
            cross = values[up] + values[down] + values[at - left] + values[at + right]
            rows[from_ + at] = 0.0625 * sides + 0.125 * cross + 0.25 * values[at]

    return blur_kernel


@jit()
def signed_root_kernel(rows, places, width, pitch):
    """x = sign(x)·√|x| in place. grid: samples, block 256; owns: one block per row; shared none; moves 8·width bytes per row; source: the
    definition."""
    from_ = i8(places[cuda.blockIdx.x]) * pitch
    for c in range(cuda.threadIdx.x, width, THREADS):
        value = rows[from_ + c]
        root = math.sqrt(abs(value))
        rows[from_ + c] = root if value >= 0.0 else -root


@jit()
def centred_kernel(rows, places, mean, packed, width, pitch):
    """packed[r] = rows[places[r]] − mean. grid: samples, block 256; owns: one block per row; shared none; moves 8·width bytes per row."""
    r = cuda.blockIdx.x
    from_ = i8(places[r]) * pitch
    for c in range(cuda.threadIdx.x, width, THREADS):
        packed[i8(r) * width + c] = rows[from_ + c] - mean[c]


@functools.cache
def channel_products_kernel_for(positions: int) -> Any:
    """`channel_products_kernel` for maps of so many positions."""
    POSITIONS = positions

    @jit(device=True)
    def stash(shared, packed, first, channels, k0, last):
        """64 channels of 32 terms, transposed; zeros outside. A term is a position of a sample."""
        for j in range(_LOADS):
            at = cuda.threadIdx.x + j * THREADS
            channel, k = first + (at >> 5), k0 + (at & 31)
            value = 0.0
            if (channel < channels) & (k < last):
                sample = quotient(k, POSITIONS)
                value = packed[(i8(sample) * channels + channel) * POSITIONS + (k - sample * POSITIONS)]
            shared[(at & 31) * PITCH + (at >> 5)] = value

    @jit(launch_bounds=(THREADS, 2))
    def channel_products_kernel(packed, sums, channels, terms, share):
        """sums[part][m][n] += Σ_k x[m][k]·x[n][k], for tiles on and above the diagonal.

        gemm    GM, GN = C, C; GK = samples·P, in parts of `share` terms.
        grid    (⌈C/64⌉, ⌈C/64⌉, parts), of which blocks below the diagonal do nothing; block 256.
        owns    per block 64×64 sums of a part, per thread every 16th row and column: 4×4.
        shared  2·32·65·4 bytes; moves 4·128 bytes per term and block.
        source  the definition; 32 products are added in float32 and these sums in float64, as in `products/parts.py` (`kernel/square_tile.py`).
        """
        m0, n0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
        shared_m = cuda.shared.array(SHARED, f4)
        shared_n = cuda.shared.array(SHARED, f4)
        acc = cuda.local.array(16, f4)
        total = cuda.local.array(16, f8)
        if n0 >= m0:
            column, row = cuda.threadIdx.x & 15, cuda.threadIdx.x >> 4
            for j in range(16):
                total[j] = f8(0)
            begin = cuda.blockIdx.z * share
            last = min(begin + share, terms)
            for k0 in range(begin, last, STEP):
                stash(shared_m, packed, m0, channels, k0, last)
                stash(shared_n, packed, n0, channels, k0, last)
                cuda.syncthreads()
                add_products_twice(total, acc, shared_m, shared_n, row, column)
                cuda.syncthreads()
            for i in range(4):
                for j in range(4):
                    m, n = m0 + row + 16 * i, n0 + column + 16 * j
                    if m < channels and n < channels:
                        sums[(i8(cuda.blockIdx.z) * channels + m) * channels + n] += total[4 * i + j]

    return channel_products_kernel


@functools.cache
def whiten_kernel_for(positions: int) -> Any:
    """`whiten_kernel` for maps of so many positions."""
    POSITIONS = positions

    @jit(launch_bounds=(THREADS, 2))
    def whiten_kernel(packed, Z, rows, places, channels, terms, pitch):
        """rows[place][n][p] = Σ_k Z[k][n]·x[k][p] for every sample and position.

        gemm    GM = samples·P, GN, GK = C, C.
        grid    (⌈samples·P/64⌉, ⌈C/64⌉); block 256.
        owns    per block 64 positions × 64 channels, per thread every 16th of both: 4×4.
        shared  2·32·65·4 bytes; moves per block 4·C·128 + 4·64·64 bytes.
        source  the definition.
        """
        shared_x = cuda.shared.array(SHARED, f4)
        shared_z = cuda.shared.array(SHARED, f4)
        acc = cuda.local.array(16, f4)
        tid = cuda.threadIdx.x
        column, row = tid & 15, tid >> 4
        q0, n0 = cuda.blockIdx.x * SIDE, cuda.blockIdx.y * SIDE
        for j in range(16):
            acc[j] = 0.0
        for k0 in range(0, channels, STEP):
            for j in range(_LOADS):
                at = tid + j * THREADS
                k, side = k0 + (at >> 6), at & 63
                x, z = 0.0, 0.0
                if k < channels:
                    if q0 + side < terms:
                        sample = quotient(q0 + side, POSITIONS)
                        x = packed[(i8(sample) * channels + k) * POSITIONS + (q0 + side - sample * POSITIONS)]
                    if n0 + side < channels:
                        z = Z[k * channels + n0 + side]
                shared_x[(at >> 6) * PITCH + side] = x
                shared_z[(at >> 6) * PITCH + side] = z
            cuda.syncthreads()
            add_products(acc, shared_z, shared_x, row, column)
            cuda.syncthreads()
        for j in range(4):
            q = q0 + column + 16 * j
            if q < terms:
                sample = quotient(q, POSITIONS)
                to = i8(places[sample]) * pitch + (q - sample * POSITIONS)
                for i in range(4):
                    n = n0 + row + 16 * i
                    if n < channels:
                        rows[to + n * POSITIONS] = acc[4 * i + j]

    return whiten_kernel


@jit()
def unit_rows_kernel(rows, places, mean, count, width, pitch):
    """x = (x − mean) / |x − mean| in place, the length added in float64.

    grid ⌈samples/8⌉, block 256; owns: one warp per row; shared none; moves 12·width bytes per row, of which 4 come out of a cache; source: the
    definition.
    """
    lane, r = cuda.threadIdx.x & 31, cuda.blockIdx.x * (THREADS // WARP) + (cuda.threadIdx.x >> 5)
    if r < count:
        first = i8(places[r]) * pitch
        total = f8(0)
        for c in range(lane, width, WARP):
            away = f8(rows[first + c] - mean[c])
            total += away * away
        factor = f4(f8(1) / max(math.sqrt(warp_sum_everywhere(total)), f8(SMALLEST)))
        for c in range(lane, width, WARP):
            rows[first + c] = (rows[first + c] - mean[c]) * factor


def launch_blur(rows: Any, places: Any, count: int, shape: tuple[int, int, int], pitch: int) -> Launch:
    """Launch of `blur_kernel` for `count` samples of maps (C, H, W). Raises UsageError for maps that do not fit into shared memory."""
    channels, height, width = shape
    if height * width > MOST_POSITIONS:
        raise UsageError(f"maps of {height} × {width}: blur takes at most {MOST_POSITIONS:,} on a GPU; --device cpu, or no blur")
    maps = max(1, BLUR_VALUES // (height * width))
    args = (rows, places, np.int32(channels), np.int32(pitch))
    return Launch(blur_kernel_for(height, width), (count, ceil_div(channels, maps)), THREADS, args)


def launch_signed_root(rows: Any, places: Any, count: int, width: int, pitch: int) -> Launch:
    """Launch of `signed_root_kernel`."""
    return Launch(signed_root_kernel, count, THREADS, (rows, places, np.int32(width), np.int32(pitch)))


def launch_centred(rows: Any, places: Any, mean: Any, packed: Any, count: int, width: int, pitch: int) -> Launch:
    """Launch of `centred_kernel`; mean float32 (width,), packed float32 of count·width values."""
    return Launch(centred_kernel, count, THREADS, (rows, places, mean, packed, np.int32(width), np.int32(pitch)))


def parts_of(channels: int) -> int:
    """Parts in which `channel_products` adds: enough that all multiprocessors have work."""
    across = ceil_div(channels, SIDE)
    return ceil_div(BLOCKS, across * (across + 1) // 2)


def launch_channel_products(packed: Any, sums: Any, count: int, channels: int, positions: int) -> Launch:
    """Launch of `channel_products_kernel` for `count` samples; sums float64 (parts_of(channels), channels, channels), added to."""
    across, parts, terms = ceil_div(channels, SIDE), parts_of(channels), count * positions
    share = STEP * ceil_div(ceil_div(terms, parts), STEP)
    scalars = (np.int32(channels), np.int32(terms), np.int32(share))
    return Launch(channel_products_kernel_for(positions), (across, across, parts), THREADS, (packed, sums, *scalars))


def launch_whiten(packed: Any, Z: Any, rows: Any, places: Any, count: int, channels: int, positions: int, pitch: int) -> Launch:
    """Launch of `whiten_kernel` for `count` samples; Z float32 (channels, channels)."""
    terms = count * positions
    grid = (ceil_div(terms, SIDE), ceil_div(channels, SIDE))
    args = (packed, Z, rows, places, np.int32(channels), np.int32(terms), np.int32(pitch))
    return Launch(whiten_kernel_for(positions), grid, THREADS, args)


def launch_unit_rows(rows: Any, places: Any, mean: Any, count: int, width: int, pitch: int) -> Launch:
    """Launch of `unit_rows_kernel`; mean float32 (width,)."""
    return Launch(unit_rows_kernel, blocks(count, THREADS // WARP), THREADS, (rows, places, mean, np.int32(count), np.int32(width), np.int32(pitch)))
