"""Forward pass of a last layer on tensor cores in one launch, behind an upsampling or not, with bias, ReLU or the loss.

    T[(r,s,k)][m] = Σ_c w[k,c,r,s] · x[m][c]                    (m a wide pixel; made once, whatever number of outputs it reaches)
    plain    y[p,q,k] = b[k] + Σ_{r,s} T[(r,s,k)][p+r−R/2, q+s−R/2]
    folded   y[p,q,k] = b[k] + Σ_{r,s} T[(r,s,k)][(p+r−1)//2, (q+s−1)//2]     (behind an upsampling, R = 3: nine products, not 36)

T never leaves the multiprocessor. A block walks over neighbouring pixels, which may be several images: it makes T of a chunk of
them, keeps it in a ring of shared memory, and collects the outputs whose last tap the chunk brought. Only a block that begins or ends
inside an image makes pixels of its neighbours again. x streams ahead into slots that a thread reads back itself, so no barrier guards it.

Columns (r,s,k) stand in the rows of the product, pixels in its columns: a lane's 16 bytes of x are its operands as they come from memory.
GK may be walked in any order, so the filters are packed in the order in which those bytes arrive (last_shape.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.activations.table import applied, epilogue_function
from nbcnn.ops.conv.thin.up import REACH
from nbcnn.ops.conv.thin_mma.last_shape import LastLayer, last_layer, pack_columns_by_channels, refusal, word_elements
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.loops import split_pixel, unrolled, within
from nbcnn.ops.kernel.reduce import THREADS, add_partials, block_sum, f8
from nbcnn.ops.kernel.stored import scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cp_async import cp_async_16, cp_async_commit, cp_async_wait
from nbcnn.ops.ptx.cvt import bits_float, float_bits
from nbcnn.ops.ptx.mma import mma_bf16, mma_tf32
from nbcnn.ops.ptx.shared import load_any_words_1, load_words_4, store_words_2, store_words_4
from nbcnn.ops.ptx.words import load_4_words
from nbcnn.plan.bounds import STORE
from nbcnn.plan.op import Loss
from nbcnn.plan.shapes import numel

u8 = types.uint64
GROUPS = 4
"""Groups of eight pixels of a warp."""
OF_WARP = 8 * GROUPS
PIXELS = OF_WARP * THREADS // 32
"""Pixels of a chunk."""
STEP_WORDS = 512
"""Words of filters for 16·E channels: two products of two tiles of 16 columns, four words per lane."""
SLOT = 16 * THREADS
STAGE = GROUPS * SLOT
LEAST_PIXELS = 64
"""Pixels below which a block is not split: around them it makes the halo again."""
RESERVED = 1024
"""Bytes of a multiprocessor's shared memory that the driver takes for every block."""


@dataclass(frozen=True)
class FpropTile:
    """`pixels` of a block; `stages` steps of x are in flight, `resident` blocks are to fit on a multiprocessor."""

    pixels: int
    stages: int
    resident: int


def halo(layer: LastLayer) -> int:
    """Pixels before and behind a pixel, in the order of memory, that its outputs may need."""
    return (1 if layer.F == 2 else layer.R // 2) * (layer.W + 1)


def ring_pixels(layer: LastLayer) -> int:
    """Pixels of T that are kept: a chunk and twice the halo, at least; ≡ 8 (mod 16), so that rows of a product lie in different banks."""
    return -(-(PIXELS + 2 * halo(layer) - 8) // 16) * 16 + 8


def shared_bytes(layer: LastLayer, precision: str, stages: int) -> int:
    """Filters, slots of x, ring of T."""
    return 4 * STEP_WORDS * _steps(layer, precision) + stages * STAGE + 4 * layer.columns * ring_pixels(layer)


def _steps(layer: LastLayer, precision: str) -> int:
    return -(-layer.C // (16 * word_elements(precision)))


def too_large(call: Call, target: Target, precision: str) -> str | None:
    """What `refusal` says, or that shared memory cannot hold the tile."""
    said = refusal(call, precision)
    if said is None and shared_bytes(last_layer(call), precision, 2) > target.shared_of_block:
        layer, limit = last_layer(call), target.shared_of_block // 1024
        return f"filters of {layer.C} channels and rows of {layer.W} pixels need more than {limit} KiB of shared memory"
    return said


def fprop_tile(layer: LastLayer, precision: str, target: Target) -> FpropTile:
    """Two blocks per multiprocessor if they fit; whole images for a block while there are enough of them."""
    whole = target.shared_of_block
    half = (whole + RESERVED) // 2 - RESERVED
    fitting = [(stages, 2) for stages in (4, 3, 2) if shared_bytes(layer, precision, stages) <= half]
    alone = [(stages, 1) for stages in (4, 3, 2) if shared_bytes(layer, precision, stages) <= whole]
    stages, resident = (fitting + alone)[0]
    wanted, image = resident * target.multiprocessors, layer.H * layer.W
    pixels = image * -(-layer.N // wanted) if wanted <= layer.N else max(LEAST_PIXELS, -(-layer.pixels // wanted))
    return FpropTile(pixels, stages, resident)


def _make_part(R: int, K: int, F: int, down: tuple[int, int, tuple[int, ...]], across: tuple[int, int, tuple[int, ...]]) -> Any:
    """Device function (out, sums, spot, i, j, H, W, ring): one tap of one pixel, added to all of the F×F outputs that it reaches."""
    (r, dh, rows), (s, dw, columns) = down, across
    TAP, FIRST, MORE_H, MORE_W = (r * R + s) * K, F * rows[0] + columns[0], len(rows) == 2, len(columns) == 2

    @jit(device=True)
    def part(out, sums, spot, i, j, H, W, ring):
        # As unsigned numbers, negative coordinates lie beyond any extent.
        inside = within(i + dh, H) & within(j + dw, W)
        at = spot + dh * W + dw
        at = at + ring if at < 0 else at
        at = at - ring if at >= ring else at
        value = bits_float(load_any_words_1(sums + (TAP * ring + at) * 4))
        # A place outside the image may hold anything, NaN too.
        value = value if inside else 0.0
        out[FIRST] += value
        if MORE_W:
            out[FIRST + 1] += value
        if MORE_H:
            out[FIRST + F] += value
        if MORE_H and MORE_W:
            out[FIRST + F + 1] += value

    return part


@functools.cache
def fprop_kernel(E: int, R: int, K: int, F: int, biased: bool, after: Any, kind: str, STAGES: int, resident: int) -> Any:
    """The kernel for E elements per word, K filters of R×R behind an upsampling by F, and a tile.

    after: None, the device function of an activation, or "mse"; kind: how y and target are stored.
    """
    BYTES, CHANNELS, LOADED, SUMS, GN, OUTPUTS = 4 // E, 4 * E, 4 * GROUPS, 8 * GROUPS, R * R * K, F * F
    AHEAD, RING, BACK = STAGES - 1, STAGES * STAGE, 1 if F == 2 else R // 2
    (ACTIVATES, activate), MSE = applied(after), after == "mse"
    mma, wait, wait_all = mma_bf16 if E == 2 else mma_tf32, cp_async_wait(STAGES - 2), cp_async_wait(0)
    load, store = scalar_io(kind)
    reach = REACH if F == 2 else tuple((r, r - R // 2, (0,)) for r in range(R))
    collect = unrolled([_make_part(R, K, F, down, across) for down in reach for across in reach])

    @jit(device=True)
    def fetch(to, x, m, last, C, channel):
        for j in range(GROUPS):
            pixel = m + 8 * j
            wanted = 16 if (pixel < last) & (channel < C) else 0
            cp_async_16(to + j * SLOT, x + u8(i8(pixel * C + channel) * BYTES), wanted)
        cp_async_commit()

    @jit(launch_bounds=(THREADS, resident))
    def last_fprop_kernel(x, packed, bias, target, y, total, M, C, H, W, steps, pixels, ring, scale):
        """y = bias + taps of T, then the ReLU, or y = scale·(y − target) and total[block] = Σ (y − target)².

        gemm   R·R·K ≤ 32 columns × M pixels × C
        grid   ⌈M/pixels⌉, block 256
        owns   block: all outputs of `pixels` neighbouring wide pixels, 256 to a chunk; warp: 32 columns × 32 pixels of it
        shared 2,048·steps bytes of filters in fragment order, `stages` steps of 64 bytes per thread, 4·R·R·K·ring bytes of T
        moves  x once (and a halo of ⌊R/2⌋·(W+1) pixels where a block cuts an image), y once, the target once; needs cc 8.0
        """
        shared = cuda.shared.array(0, types.uint32)
        base = byte_address_shared(shared)
        source = byte_address_global(x)
        acc = cuda.local.array(SUMS, f4)
        words = cuda.local.array(LOADED, u4)
        out = cuda.local.array(OUTPUTS, f4)
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        g, t = lane >> 2, lane & 3
        image, around = H * W, BACK * (W + 1)
        m0 = cuda.blockIdx.x * pixels
        m1 = min(M, m0 + pixels)
        # No tap crosses from one image into another.
        first = max(m0 - around, m0 - m0 % image)
        last = min(m1 + around, (m1 - 1) // image * image + image)
        slots = base + steps * (4 * STEP_WORDS) + tid * 16
        parts = base + steps * (4 * STEP_WORDS) + RING
        read, write = slots, slots + AHEAD * STAGE
        channel0 = t * CHANNELS
        # Where the next step to fetch begins for this thread.
        ahead, channel, left = first + warp * OF_WARP + g, channel0, steps
        for s in range(AHEAD):
            fetch(slots + s * STAGE, source, ahead, last, C, channel)
            channel, left = channel + 4 * CHANNELS, left - 1
            if left == 0:
                ahead, channel, left = ahead + PIXELS, channel0, steps
        i = tid
        while i < steps * (STEP_WORDS // 4):
            w = load_4_words(packed, i8(i) * 16, 1)
            store_words_4(base + i * 16, w[0], w[1], w[2], w[3])
            i += THREADS
        cuda.syncthreads()
        squares = f8(0)
        # Pixels from `done` on are not collected yet; the warp's first pixel of the chunk at `begin` has place `place` in the ring.
        begin, done, place = first, m0, warp * OF_WARP
        while begin < last:
            for j in range(SUMS):
                acc[j] = 0.0
            filters, step = base + lane * 16, 0
            while step < steps:
                wait()
                for j in range(GROUPS):
                    v = load_words_4(read + j * SLOT)
                    words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3] = v[0], v[1], v[2], v[3]
                # The slots that are filled now were read a step ago.
                fetch(write, source, ahead, last, C, channel)
                for s in range(2):
                    for tile in range(2):
                        a = load_words_4(filters + 512 * (2 * s + tile))
                        for j in range(GROUPS):
                            at = 4 * (2 * j + tile)
                            acc[at], acc[at + 1], acc[at + 2], acc[at + 3] = mma(
                                a[0], a[1], a[2], a[3], words[4 * j + 2 * s], words[4 * j + 2 * s + 1], acc[at], acc[at + 1], acc[at + 2], acc[at + 3]
                            )
                read, write = read + STAGE, write + STAGE
                read = slots if read == slots + RING else read
                write = slots if write == slots + RING else write
                channel, left = channel + 4 * CHANNELS, left - 1
                if left == 0:
                    ahead, channel, left = ahead + PIXELS, channel0, steps
                filters, step = filters + 4 * STEP_WORDS, step + 1
            # What is overwritten now has been collected by everyone.
            cuda.syncthreads()
            for j in range(GROUPS):
                # Groups of eight never straddle the ring's end: it is a multiple of eight.
                spot = place + 8 * j
                spot = spot - ring if spot >= ring else spot
                for tile in range(2):
                    for half in range(2):
                        column, e = 16 * tile + 8 * half + g, 4 * (2 * j + tile) + 2 * half
                        if column < GN:
                            at = parts + (column * ring + spot + 2 * t) * 4
                            store_words_2(at, float_bits(acc[e]), float_bits(acc[e + 1]))
            begin += PIXELS
            place += PIXELS
            place = place - ring if place >= ring else place
            cuda.syncthreads()
            upto = min(m1, begin - around) if begin < last else m1
            # Neighbours own neighbouring filters, then pixels, as y lies in memory.
            e = done * K + tid
            while e < upto * K:
                m = e // K
                k = e - m * K
                n, h, w_ = split_pixel(m, H, W)
                for o in range(OUTPUTS):
                    out[o] = 0.0
                spot = (m - first) % ring
                collect(out, parts + k * ring * 4, spot, h, w_, H, W, ring)
                b = bias[k] if biased else 0.0
                for r in range(F):
                    row = ((n * H + h) * F + r) * (W * F) + F * w_
                    for s in range(F):
                        at = (row + s) * K + k
                        value = out[F * r + s] + b
                        if ACTIVATES:
                            value = activate(value)
                        if MSE:
                            value -= load(target, at)
                            squares += f8(value) * f8(value)
                            value *= scale
                        store(y, at, value)
                e += THREADS
            done = max(done, upto)
        wait_all()
        if MSE:
            # The filters' place: nobody reads them after the last chunk's barriers.
            terms = cuda.shared.array(0, types.float64)
            whole = block_sum(terms, squares)
            if tid == 0:
                total[cuda.blockIdx.x] = whole

    return last_fprop_kernel


def _blocks(call: Call) -> int:
    return blocks(last_layer(call).pixels, call.tile.pixels)


def scratch(call: Call) -> int:
    """Bytes of the partial losses."""
    return 8 * _blocks(call) if call.op.has(Loss) else 0


def bind(call: Call, precision: str) -> list[Launch]:
    """x (N,C,H,W), w (K,C,R,R)[, b (K)][, target] -> [loss (),] y (N,K,F·H,F·W)."""
    layer, tile, mse = last_layer(call), call.tile, call.op.has(Loss)
    after = "mse" if mse else epilogue_function(call)
    y, count, biased, grid = call.outs[-1], numel(call.out_shapes[-1]), len(call.ins) > 2, _blocks(call)
    kernel = fprop_kernel(word_elements(precision), layer.R, layer.K, layer.F, biased, after, STORE[precision], tile.stages, tile.resident)
    total = call.scratch[: scratch(call)].view(np.float64) if mse else y
    sizes = map(np.int32, (layer.pixels, layer.C, layer.H, layer.W, _steps(layer, precision), tile.pixels, ring_pixels(layer)))
    args = (call.ins[0], call.packed, call.ins[2] if biased else y, call.ins[3] if mse else y, y, total, *sizes, np.float32(2 / count))
    made = Launch(kernel, grid, THREADS, args, shared_bytes(layer, precision, tile.stages))
    return [made, add_partials(total, grid, 1 / count, call.outs[0])] if mse else [made]


def traffic(call: Call, precision: str) -> list[Traffic]:
    """Bytes of `bind`: every block takes all filters, and its pixels with the halo that lies in the images of its ends."""
    layer, grid = last_layer(call), _blocks(call)
    begin = np.arange(grid, dtype=np.int64) * call.tile.pixels
    end = np.minimum(begin + call.tile.pixels, layer.pixels)
    image, around = layer.H * layer.W, halo(layer)
    first = np.maximum(begin - around, begin // image * image)
    last = np.minimum(end + around, -(-end // image) * image)
    x, filters = size(call, "in", 0), 4 * STEP_WORDS * _steps(layer, precision)
    target, partials = (size(call, "in", 3), 8 * grid) if call.op.has(Loss) else (0, 0)
    read = int((last - first).sum()) * (x // layer.pixels) + filters * grid + target
    made = Traffic(read, size(call, "out", len(call.out_shapes) - 1) + partials, x + filters + target)
    return [made, once(partials, 8)] if partials else [made]


def implementation(precision: str) -> Impl:
    """conv_fprop or upconv_fprop of a last layer, plain, with the ReLU or with the loss, in bf16 or tf32."""

    def tile(call: Call, target: Target) -> FpropTile:
        return fprop_tile(last_layer(call), precision, target)

    return Impl(
        bind=lambda call: bind(call, precision),
        scratch=scratch,
        supports=lambda call, target: too_large(call, target, precision),
        tile=tile,
        pack=lambda call: pack_columns_by_channels(call, word_elements(precision)),
        packed=STORE[precision],
        needs=(8, 0),
        traffic=lambda call: traffic(call, precision),
        engine="thin mma",
    )
