"""Where the operands of an implicit GEMM come from: the index maps of a convolution as `Loader`s.

    gather_rows     A[m][k] = x[pixel m moved by the tap of k][channel of k]: the im2col matrix, never stored; k contiguous,
                    so a thread reads float4s along k and stores them transposed
    matrix          B[k][n]: any row-major matrix, n contiguous: packed weights, or dy seen as [pixel][K]
    whole_rows      A[m][k]: any row-major matrix, k contiguous, read by whole k-tiles
    gather_columns  B[k][n] = x[pixel k moved by the tap of n][channel of n]: the same im2col matrix with the pixels on GK; n
                    contiguous

Images are NHWC. A window position that lies in the padding reads as zero, by a predicated load.
"""

from __future__ import annotations

import functools
from typing import Any

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.ops.conv.frame.pooling import window_pixel
from nbcnn.ops.conv.simt.register_tile import Loader
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.ptx.vector import load1_if, load4, load4_if, shared_store1, shared_store4

_OUTSIDE = -(1 << 20)
"""An input row so far up that no tap brings it back into the image."""


def stash_rows(across: int, loads: int, pitch: int, width: int = 4, pixels: int = 1, apart: int = 0) -> Any:
    """The transposing copy of a thread's registers to shared memory: of each of `pixels` rows, `apart` apart, `loads` groups of `width` neighbours in
    k, `across` threads apart."""

    @jit(device=True)
    def stash(stage, shared, begin):
        tid = cuda.threadIdx.x
        corner = begin + tid % across * (width * pitch) + tid // across
        for i in range(pixels):
            for j in range(loads):
                for q in range(width):
                    at = i * apart + (j * width * across + q) * pitch
                    shared_store1(shared, corner + at, stage[(i * loads + j) * width + q])

    return stash


@functools.cache
def gather_rows(tile: Tile, side: int, R: int, S: int, stride: int, dilate: int, vector: int, whole_taps: bool, windows: bool = False) -> Loader:
    """Rows of the im2col matrix: A[(n,p,q)][(r,s,c)] = x[n, (p·stride - pad_h + r) / dilate, (q·stride - pad_w + s) / dilate, c].

    Where `dilate` does not divide, the element is zero: x is read as if dilate-1 zeros stood between its pixels, which is
    what the data gradient of a strided convolution needs. side: BM or BN. vector: 4 if C is a multiple of 4, else 1.
    whole_taps: C is a multiple of BK, so that a k-tile lies within one tap (r,s) and a thread can take several float4s of
    one pixel; otherwise a thread keeps to one k (or four) of a tile, and reads it for several pixels. windows: pixels are
    numbered by 2×2 windows (pooling.py), not line by line.
    extents: (rows, C, H, W, P, Q, pad_h, pad_w).
    """
    T, BK, PITCH, WIDTH = tile.threads, tile.BK, side + 4, 4 if whole_taps else vector
    if whole_taps:
        K_THREADS = T // side
        PIXELS, LOADS = 1, BK // (4 * K_THREADS) if K_THREADS else 0
    else:
        K_THREADS = BK // vector
        PIXELS, LOADS = side * K_THREADS // T, 1
    ROWS = T // K_THREADS if K_THREADS else 0
    pixels, ks = ROWS * PIXELS, K_THREADS * LOADS * WIDTH
    if pixels != side or ks != BK:
        raise ValueError(f"{tile}: {T} threads cannot share {side}×{BK} elements, {WIDTH} at a time")
    # state: r, s, c of the k-tile (of the thread's own k if a tile spans taps); then for each pixel its input row and column
    # at tap (0,0), and its offset
    STATE = 3 + 3 * PIXELS

    @jit(device=True)
    def start(state, extents, origin, first):
        rows, C, H, W, P, Q, pad_h, pad_w = extents
        tid = cuda.threadIdx.x
        shift = tid % K_THREADS * WIDTH
        k = first * BK
        if not whole_taps:
            k += shift
            shift = 0
        tap = quotient(k, C)
        state[0] = quotient(tap, S)
        state[1] = tap - state[0] * S
        state[2] = k - tap * C
        for i in range(PIXELS):
            m = origin + tid // K_THREADS + i * ROWS
            if windows:
                n, p, q = window_pixel(m, P, Q)
            else:
                line = quotient(m, Q)
                n = quotient(line, P)
                p, q = line - n * P, m - line * Q
            h = p * stride - pad_h
            w = q * stride - pad_w
            state[3 + 3 * i] = h if m < rows else _OUTSIDE
            state[4 + 3 * i] = w
            if dilate == 1:
                state[5 + 3 * i] = ((n * H + h) * W + w) * C + shift
            else:
                state[5 + 3 * i] = n * H * W * C + shift

    @jit(device=True)
    def fetch(stage, array, state, extents, inside):
        C, H, W = extents[1], extents[2], extents[3]
        r, s, c = state[0], state[1], state[2]
        for i in range(PIXELS):
            h = state[3 + 3 * i] + r
            w = state[4 + 3 * i] + s
            if dilate == 1:
                offset = state[5 + 3 * i] + ((r * W + s) * C + c)
                wanted = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            else:
                y = h // dilate
                x = w // dilate
                offset = state[5 + 3 * i] + (y * W + x) * C + c
                whole = (h == y * dilate) & (w == x * dilate)
                wanted = inside & whole & (y >= 0) & (y < H) & (x >= 0) & (x < W)
            if not whole_taps:
                wanted &= r < R
            for j in range(LOADS):
                at = (i * LOADS + j) * WIDTH
                if WIDTH == 4:
                    v = load4_if(array, offset + j * 4 * K_THREADS, wanted)
                    stage[at], stage[at + 1], stage[at + 2], stage[at + 3] = v[0], v[1], v[2], v[3]
                else:
                    stage[at] = load1_if(array, offset, wanted)
        # k += BK in the mixed radix (r, s, c)
        taps = 0 if whole_taps else quotient(BK, C)
        lines = 0 if whole_taps else quotient(taps, S)
        c = c + BK - taps * C
        s = s + taps - lines * S
        r += lines
        if c >= C:
            c -= C
            s += 1
        if s >= S:
            s -= S
            r += 1
        state[0], state[1], state[2] = r, s, c

    return Loader(start, fetch, stash_rows(K_THREADS, LOADS, PITCH, WIDTH, PIXELS, ROWS), PITCH, STATE, PIXELS * LOADS * WIDTH)


def columns_of_a_tile(tile: Tile, side: int, vector: int) -> tuple[int, int, int]:
    """(threads side by side, k rows at a time, passes) that cover a BK×side tile with loads of `vector` floats."""
    across = side // vector
    rows = tile.threads // across
    passes = tile.BK // rows if rows else 0
    if across * rows != tile.threads or rows * passes != tile.BK:
        raise ValueError(f"{tile}: {tile.threads} threads cannot share {tile.BK}×{side} elements, {vector} at a time")
    return across, rows, passes


def stash_columns(across: int, rows: int, passes: int, pitch: int, vector: int) -> Any:
    """The straight copy of a thread's registers to shared memory: k and n as they were in global memory."""

    @jit(device=True)
    def stash(stage, shared, begin):
        tid = cuda.threadIdx.x
        corner = begin + tid // across * pitch + tid % across * vector
        for i in range(passes):
            if vector == 4:
                shared_store4(shared, corner + i * rows * pitch, stage[4 * i], stage[4 * i + 1], stage[4 * i + 2], stage[4 * i + 3])
            else:
                shared_store1(shared, corner + i * rows * pitch, stage[i])

    return stash


@functools.cache
def matrix(tile: Tile, side: int, vector: int, whole_tiles: bool) -> Loader:
    """A row-major matrix [rows][columns] with GK down its rows.

    vector: floats per load, 4 or 1; it divides columns. whole_tiles: BK divides rows. extents: (rows, columns).
    """
    ACROSS, ROWS, PASSES = columns_of_a_tile(tile, side, vector)
    BK = tile.BK
    # state: the thread's first row (or beyond the last, if its column is outside), and its offset

    @jit(device=True)
    def start(state, extents, origin, first):
        tid = cuda.threadIdx.x
        n = origin + tid % ACROSS * vector
        k = first * BK + tid // ACROSS
        state[0] = k if n < extents[1] else extents[0]
        state[1] = k * extents[1] + n

    @jit(device=True)
    def fetch(stage, array, state, extents, inside):
        for i in range(PASSES):
            wanted = inside & (state[0] + (0 if whole_tiles else i * ROWS) < extents[0])
            offset = state[1] + i * ROWS * extents[1]
            if vector == 4:
                v = load4_if(array, offset, wanted)
                stage[4 * i], stage[4 * i + 1], stage[4 * i + 2], stage[4 * i + 3] = v[0], v[1], v[2], v[3]
            else:
                stage[i] = load1_if(array, offset, wanted)
        if not whole_tiles:
            state[0] = state[0] + BK
        state[1] = state[1] + BK * extents[1]

    return Loader(start, fetch, stash_columns(ACROSS, ROWS, PASSES, side, vector), side, 2, PASSES * vector)


@functools.cache
def gather_columns(tile: Tile, side: int, R: int, S: int, stride: int, vector: int, whole_tiles: bool, lines: int) -> Loader:
    """Columns of the im2col matrix: B[(n,p,q)][(r,s,c)] = x[n, p·stride - pad + r, q·stride - pad + s, c], with the pixels on GK.

    A thread keeps its tap and channel (r,s,c) throughout. Pixels move on by BK per tile, counted in the mixed radix (n, p, q),
    so that the loop needs no division. lines: what `lines_of_a_tile` says; if not 0, all threads count the tile's first pixel
    (in uniform registers) and find theirs at a fixed distance, else each thread counts its own. vector: 4 if C is a multiple
    of 4, else 1. whole_tiles: BK divides the number of pixels. extents: (pixels, C, H, W, P, Q, pad).
    """
    ACROSS, ROWS, PASSES = columns_of_a_tile(tile, side, vector)
    BK, COUNTED = tile.BK, 1 if lines else PASSES
    # Lines and columns that a tile moves on by, and that a thread's next load is away from its last.
    TILE_P, TILE_Q = (0, BK) if lines == 1 else (lines, 0)
    NEXT_P, NEXT_Q = (0, ROWS) if lines == 1 else (ROWS * lines // BK, 0)
    # state: the thread's first pixel (beyond the last, if its column is outside); row, column and offset of its distance from
    # a counted pixel; (dn, dp, dq) = BK if it takes a division; then row and column (times stride) and offset of each counted pixel
    AWAY, STEP, PIXEL = 1, 4, 4 if lines else 7

    @jit(device=True)
    def start(state, extents, origin, first):
        pixels, C, H, W, P, Q, pad = extents
        tid = cuda.threadIdx.x
        column = origin + tid % ACROSS * vector
        tap = quotient(column, C)
        r = quotient(tap, S)
        row = tid // ACROSS
        begin = first * BK
        state[0] = begin + row if tap < R * S else pixels
        if lines:
            p = quotient(row, Q)
            q = row - p * Q
        else:
            p = q = 0
            begin += row
            dl = quotient(BK, Q)
            dn = quotient(dl, P)
            state[STEP] = dn
            state[STEP + 1] = (dl - dn * P) * stride
            state[STEP + 2] = (BK - dl * Q) * stride
        h = p * stride + r - pad
        w = q * stride + tap - r * S - pad
        state[AWAY] = h
        state[AWAY + 1] = w
        state[AWAY + 2] = (h * W + w) * C + column - tap * C
        for i in range(COUNTED):
            m = begin + i * ROWS
            line = quotient(m, Q)
            n = quotient(line, P)
            h = (line - n * P) * stride
            w = (m - line * Q) * stride
            state[PIXEL + 3 * i] = h
            state[PIXEL + 3 * i + 1] = w
            state[PIXEL + 3 * i + 2] = ((n * H + h) * W + w) * C

    @jit(device=True)
    def fetch(stage, array, state, extents, inside):
        pixels, C, H, W = extents[0], extents[1], extents[2], extents[3]
        PH = extents[4] * stride
        QW = extents[5] * stride
        for i in range(PASSES):
            at = PIXEL + 3 * (i % COUNTED)
            dh = i * NEXT_P * stride if lines else 0
            dw = i * NEXT_Q * stride if lines else 0
            h = state[at] + state[AWAY] + dh
            w = state[at + 1] + state[AWAY + 1] + dw
            offset = state[at + 2] + state[AWAY + 2] + (dh * W + dw) * C
            exists = state[0] + (0 if whole_tiles else i * ROWS) < pixels
            wanted = inside & exists & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            if vector == 4:
                v = load4_if(array, offset, wanted)
                stage[4 * i], stage[4 * i + 1], stage[4 * i + 2], stage[4 * i + 3] = v[0], v[1], v[2], v[3]
            else:
                stage[i] = load1_if(array, offset, wanted)
        if not whole_tiles:
            state[0] = state[0] + BK
        dn = 0 if lines else state[STEP]
        dp = TILE_P * stride if lines else state[STEP + 1]
        dq = TILE_Q * stride if lines else state[STEP + 2]
        for i in range(COUNTED):
            h = state[PIXEL + 3 * i] + dp
            w = state[PIXEL + 3 * i + 1] + dq
            offset = state[PIXEL + 3 * i + 2] + ((dn * H + dp) * W + dq) * C
            if w >= QW:
                w -= QW
                h += stride
                offset += (stride * W - QW) * C
            if h >= PH:
                h -= PH
                offset += (H - PH) * W * C
            state[PIXEL + 3 * i], state[PIXEL + 3 * i + 1], state[PIXEL + 3 * i + 2] = h, w, offset

    stash = stash_columns(ACROSS, ROWS, PASSES, side, vector)
    return Loader(start, fetch, stash, side, PIXEL + 3 * COUNTED, PASSES * vector)


def lines_of_a_tile(tile: Tile, side: int, vector: int, P: int, Q: int) -> int:
    """1 if every BK pixels lie in one line of an image, n if they are n whole lines of one image, 0 if neither holds.

    In the second case a thread's loads must also lie whole lines apart, so that their distance is the same for all threads.
    """
    if Q % tile.BK == 0:
        return 1
    _, rows, _ = columns_of_a_tile(tile, side, vector)
    return tile.BK // Q if rows % Q == 0 and P % (tile.BK // Q) == 0 else 0


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
