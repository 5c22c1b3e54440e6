"""This module is the epilogue of the mma engine: from the fragments that warps hold to rows in shared memory, where the k-tiles were, and to y.

A warp's fragment has two neighbouring columns of eight rows; memory wants whole rows. So the sums are laid out as rows of float32, and each thread
then takes four channels of one row (or of the four rows of a pooling window) at a time: bias, activation, mask or pooling, then rounding to the
stored format. The sum of partials (sums.py) does the same with what it has added up. `vector`: the number of channels is a multiple of four, so that
four are one access.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, types
from nbcnn.ops.activations.table import applied
from nbcnn.ops.conv.frame.moments import Columns, add_row, finish
from nbcnn.ops.conv.mma.tile import Kind, Tile
from nbcnn.ops.kernel.stored import PAIRS, scalar_io, vector_io, vector_load_if
from nbcnn.ops.ptx.cvt import bits_float, float_bits, tf32
from nbcnn.ops.ptx.shared import load_words_1, load_words_4, store_words_2
from nbcnn.ops.ptx.vector import load1_if, store4
from nbcnn.plan.storage import HALVES

_BATCH = 4
"""Rows whose masks a thread has in flight."""


@jit(device=True)
def block_barrier():
    """Wait for all threads of the block."""
    cuda.syncthreads()


@cache
def load_bias(bias: bool) -> Any:
    """Device function (shift, b, n, K): b[n … n+3] into shift[0 … 3]; zeros beyond K, or where there is no bias."""

    @jit(device=True)
    def run(shift, b, n, K):
        for q in range(4):
            shift[q] = load1_if(b, n + q, n + q < K) if bias else 0.0

    return run


@cache
def load_mask(store: str, vector: bool) -> Any:
    """Device function (masks, first, x, target, n, K, apart): x of pixel `target` and channels n … into masks[first …]; zeros outside."""
    load4 = vector_load_if(store)
    load1 = scalar_io(store)[0]

    @jit(device=True)
    def run(masks, first, x, target, n, K, apart):
        at = target * apart + n
        inside = (target >= 0) & (n < K)
        if vector:
            masks[first], masks[first + 1], masks[first + 2], masks[first + 3] = load4(x, at, inside)
        else:
            for q in range(4):
                masks[first + q] = load1(x, at + q) if inside & (n + q < K) else 0.0

    return run


@cache
def _put(store: str, vector: bool) -> Any:
    """Device function (values, y, target, n, K, apart): values[0 … 3] to pixel `target`, channels n … of y, where there are such."""
    store4, store1 = vector_io(store)[1], scalar_io(store)[1]

    @jit(device=True)
    def run(values, y, target, n, K, apart):
        at = i8(target) * apart + n
        if vector:
            store4(y, at, values[0], values[1], values[2], values[3])
        else:
            for q in range(4):
                if n + q < K:
                    store1(y, at + i8(q), values[q])

    return run


@cache
def pixel_epilogue(store: str, after: Any, mask: bool, vector: bool) -> Any:
    """Device function (values, shift, masks, first, y, target, n, K, apart): four sums of a pixel with bias, activation or mask to y.

    after: the activation, a device function, or None. masks[first …] as loaded.
    """
    put, (ACTIVATES, activate) = _put(store, vector), applied(after)

    @jit(device=True)
    def run(values, shift, masks, first, y, target, n, K, apart):
        for q in range(4):
            v = values[q] + shift[q]
            if ACTIVATES:
                v = activate(v)
            if mask:
                v = v if masks[first + q] > 0.0 else 0.0
            values[q] = v
        put(values, y, target, n, K, apart)

    return run


@cache
def window_epilogue(store: str, vector: bool) -> Any:
    """Device function (patch, shift, y, index, window, n, K): the sums of four pixels of a window, four channels each, to y and index.

    The largest after bias and ReLU, and its place; a window without a positive element gives its first place, a NaN stays.
    """
    put = _put(store, vector)

    @jit(device=True)
    def run(patch, shift, y, index, window, n, K):
        best = cuda.local.array(4, f4)
        places = 0
        for q in range(4):
            largest, place = 0.0, 0
            for t in range(4):
                v = patch[4 * t + q] + shift[q]
                v = 0.0 if v <= 0.0 else v
                if t == 0:
                    largest = v
                else:
                    wins = (not (v <= largest)) & (largest == largest)
                    largest = v if wins else largest
                    place = t if wins else place
            best[q] = largest
            places |= place << 2 * q if n + q < K else 0
        put(best, y, window, n, K, K)
        index[i8(window) * (K + 3 >> 2) + (n >> 2)] = types.uint8(places)

    return run


@cache
def put_fragments(tile: Tile) -> Any:
    """Device function (acc, stage): the sums as rows of float32 at shared address `stage`."""
    WM, ROWS, COLS, PITCH = tile.WM, tile.BM // tile.WM, tile.BN // tile.WN, 4 * tile.pitch
    MI, NI = ROWS // 16, COLS // 8

    @jit(device=True)
    def run(acc, stage):
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        row = warp % WM * ROWS + (lane >> 2)
        column = warp // WM * COLS + (lane & 3) * 2
        at = stage + (row * PITCH + column * 4)
        for i in range(MI):
            for j in range(NI):
                o = (i * NI + j) * 4
                to = at + (16 * PITCH * i + 32 * j)
                store_words_2(to, float_bits(acc[o]), float_bits(acc[o + 1]))
                store_words_2(to + 8 * PITCH, float_bits(acc[o + 2]), float_bits(acc[o + 3]))

    return run


@jit(device=True)
def _take(values, first, address):
    """values[first … first+3] = four floats at a shared address."""
    a, b, c, d = load_words_4(address)
    values[first], values[first + 1] = bits_float(a), bits_float(b)
    values[first + 2], values[first + 3] = bits_float(c), bits_float(d)


@cache
def store_partial(tile: Tile, vector: bool) -> Any:
    """Device function (stage, partials, plane, m0, n0, GM, K): the rows at `stage` to plane `plane`, GM×K, of the partial results."""
    QUADS, PITCH, BM = tile.BN // 4, 4 * tile.pitch, tile.BM
    STEP = tile.threads // QUADS
    PASSES = BM // STEP

    @jit(device=True)
    def run(stage, partials, plane, m0, n0, GM, K):
        tid = cuda.threadIdx.x
        row = tid // QUADS
        quad = tid - row * QUADS
        n = n0 + quad * 4
        values = cuda.local.array(4, f4)
        at = (i8(plane) * GM + (m0 + row)) * K + n
        for i in range(PASSES):
            if (m0 + row + i * STEP < GM) & (n < K):
                _take(values, 0, stage + ((row + i * STEP) * PITCH + quad * 16))
                if vector:
                    store4(partials, at + i8(i * STEP) * K, values[0], values[1], values[2], values[3])
                else:
                    for q in range(4):
                        if n + q < K:
                            partials[at + i8(i * STEP) * K + i8(q)] = values[q]

    return run


@cache
def store_rows(tile: Tile, kind: Kind, bias: bool, after: Any, mask: bool, vector: bool) -> Any:
    """Device function (stage, table, b, x, y, n0, K, apart, x_apart): the rows at `stage` to the pixels of y that the table of rows says.

    Pixels of y lie `apart` elements from each other, those of x `x_apart`.
    """
    QUADS, PITCH, BM = tile.BN // 4, 4 * tile.pitch, tile.BM
    STEP = tile.threads // QUADS
    BATCH = min(_BATCH, BM // STEP)
    BATCHES, WORDS = BM // STEP // BATCH, 4 * BATCH
    put = pixel_epilogue(kind.store, after, mask, vector)
    get_bias, get_mask = load_bias(bias), load_mask(kind.store, vector)

    @jit(device=True)
    def run(stage, table, b, x, y, n0, K, apart, x_apart):
        tid = cuda.threadIdx.x
        row = tid // QUADS
        quad = tid - row * QUADS
        n = n0 + quad * 4
        shift = cuda.local.array(4, f4)
        values = cuda.local.array(4, f4)
        masks = cuda.local.array(WORDS, f4)
        targets = cuda.local.array(BATCH, i4)
        get_bias(shift, b, n, K)
        for batch in range(BATCHES):
            first = row + batch * BATCH * STEP
            # All loads of a batch before its stores: else each would wait for memory by itself.
            for i in range(BATCH):
                targets[i] = i4(load_words_1(table + 8 * BM + (first + i * STEP) * 4))
                if mask:
                    get_mask(masks, 4 * i, x, targets[i], n, K, x_apart)
            for i in range(BATCH):
                if (targets[i] >= 0) & (n < K):
                    _take(values, 0, stage + ((first + i * STEP) * PITCH + quad * 16))
                    put(values, shift, masks, 4 * i, y, targets[i], n, K, apart)

    return run


@cache
def row_moments(tile: Tile, kind: Kind, bias: bool) -> Any:
    """Device function (stage, b, partials, m0, n0, GM, K, chunk, chunks): the moments of the rows at `stage` as they are stored, as one chunk.

    The shared memory behind the rows is overwritten.
    """
    columns = Columns(tile.BN, 4, tile.threads)
    BM, PITCH, ACROSS, STEP = tile.BM, 4 * tile.pitch, columns.across, columns.step
    if BM * PITCH + columns.nbytes > tile.ring_bytes:
        raise ValueError(f"{tile}: no shared memory is left for the sums of its columns")
    ROWS = BM // STEP
    get_bias, as_stored, add, end = load_bias(bias), _rounded(kind.store), add_row(4), finish(columns, block_barrier)

    @jit(device=True)
    def run(stage, b, partials, m0, n0, GM, K, chunk, chunks):
        tid = cuda.threadIdx.x
        row = tid // ACROSS
        quad = tid & ACROSS - 1
        shift = cuda.local.array(4, f4)
        leads = cuda.local.array(4, f4)
        values = cuda.local.array(4, f4)
        sums = cuda.local.array(8, f4)
        get_bias(shift, b, n0 + quad * 4, K)
        _take(leads, 0, stage + quad * 16)
        as_stored(leads, shift)
        for k in range(8):
            sums[k] = 0.0
        for i in range(ROWS):
            if m0 + row + i * STEP < GM:
                _take(values, 0, stage + ((row + i * STEP) * PITCH + quad * 16))
                as_stored(values, shift)
                add(sums, leads, values)
        end(stage + BM * PITCH, leads, sums, partials, tid, n0, K, chunk, chunks, min(BM, GM - m0))

    return run


@cache
def _rounded(store: str) -> Any:
    """Device function (values, shift): four sums with their bias, as a store rounds them."""
    HALF, (lower, upper, pack) = store in HALVES, PAIRS.get(store, PAIRS["bfloat16"])[:3]

    @jit(device=True)
    def run(values, shift):
        for q in range(4):
            values[q] += shift[q]
        if HALF:
            low, high = pack(values[0], values[1]), pack(values[2], values[3])
            values[0], values[1], values[2], values[3] = lower(low), upper(low), lower(high), upper(high)
        elif store == "tfloat32":
            for q in range(4):
                values[q] = tf32(values[q])

    return run


@cache
def store_pooled(tile: Tile, kind: Kind, bias: bool, vector: bool) -> Any:
    """Device function (stage, b, y, index, m0, n0, GM, K): four rows at `stage` at a time, pooled, to a pixel of y and index."""
    QUADS, PITCH = tile.BN // 4, 4 * tile.pitch
    STEP = tile.threads // QUADS
    WINDOWS = tile.BM // 4
    PASSES = -(-WINDOWS // STEP)
    put, get_bias = window_epilogue(kind.store, vector), load_bias(bias)

    @jit(device=True)
    def run(stage, b, y, index, m0, n0, GM, K):
        tid = cuda.threadIdx.x
        first = tid // QUADS
        quad = tid - first * QUADS
        n = n0 + quad * 4
        shift = cuda.local.array(4, f4)
        patch = cuda.local.array(16, f4)
        get_bias(shift, b, n, K)
        for i in range(PASSES):
            window = first + i * STEP
            m = m0 + window * 4
            if (window < WINDOWS) & (m < GM) & (n < K):
                at = stage + (window * (4 * PITCH) + quad * 16)
                for t in range(4):
                    _take(patch, 4 * t, at + t * PITCH)
                put(patch, shift, y, index, m >> 2, n, K)

    return run
