"""Change of layout between NCHW and NHWC: for every image, the transpose of its (C, H·W) matrix.

Logical shapes are (N,C,H,W) on both sides, so the reference is a copy; only the order in memory differs, and how elements are
stored: float32 where a network takes and returns tensors, what its row stores between the layers.

    convert           x (N,C,H,W) -> y (N,C,H,W)                                              source, target layouts
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.maps import copy, supports
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size, streamed
from nbcnn.ops.kernel.windows import THREADS, split
from nbcnn.plan.op import Op

TILE, PITCH = 32, 33
"""A tile is TILE × TILE; its rows lie PITCH apart in shared memory, so that a column too touches 32 different banks."""
TILE_ROWS = 4
"""Rows of a tile that a block of 32 × TILE_ROWS threads moves at a time: each thread has TILE / TILE_ROWS loads in flight."""
NARROW = 8


def convert(x: np.ndarray, y: np.ndarray, *, source: str, target: str) -> None:
    """y (N,C,H,W) = x (N,C,H,W): layouts are a matter of storage."""
    np.copyto(y, x)


@cache
def transpose_kernel(source: str, target: str) -> Any:
    """y[b,c,r] = x[b,r,c] for matrices of rows × cols.

    grid    batch·row_tiles·col_tiles (tiles of 32 × 32), block 32 × 4
    owns    block: one tile; thread: 8 elements of it
    shared  4·32·33 bytes
    moves   8·batch·rows·cols bytes, 128 bytes per warp on both sides
    source  M. Harris, "An Efficient Matrix Transpose in CUDA C/C++", NVIDIA developer blog, 2013
    """
    (load, _), (_, store) = scalar_io(source), scalar_io(target)

    @jit()
    def transpose_kernel(x, y, rows, cols, row_tiles, col_tiles):
        tile = cuda.shared.array((TILE, PITCH), f4)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        rest, col_tile = split(cuda.blockIdx.x, col_tiles)
        matrix, row_tile = split(rest, row_tiles)
        base = matrix * rows * cols
        row0, col0 = row_tile * TILE, col_tile * TILE
        # Load always, from a clamped index: a load under a branch would wait for the one before.
        col = min(col0 + tx, cols - 1)
        for k in range(0, TILE, TILE_ROWS):
            row = min(row0 + ty + k, rows - 1)
            tile[ty + k, tx] = load(x, base + row * cols + col)
        cuda.syncthreads()
        row = row0 + tx
        for k in range(0, TILE, TILE_ROWS):
            col = col0 + ty + k
            if (row < rows) & (col < cols):
                store(y, base + col * rows + row, tile[tx, ty + k])

    return transpose_kernel


@cache
def transpose_narrow_kernel(source: str, target: str) -> Any:
    """y[b,c,r] = x[b,r,c] where rows or cols is small: most of a tile would be empty, and the cache absorbs the strided side.

    grid    ceil(count / 256), block 256, count = batch·rows·cols
    owns    thread: one element of y
    moves   8·count bytes
    """
    (load, _), (_, store) = scalar_io(source), scalar_io(target)

    @jit()
    def transpose_narrow_kernel(x, y, count, rows, cols):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            rest, row = split(i, rows)
            matrix, col = split(rest, cols)
            store(y, i, load(x, (matrix * rows + row) * cols + col))

    return transpose_narrow_kernel


def transpose(call: Call, batch: int, rows: int, cols: int) -> list[Launch]:
    """One launch: the call's output (batch, cols, rows) = its input (batch, rows, cols) transposed."""
    arrays = call.ins[0], call.outs[0]
    if min(rows, cols) <= NARROW:
        count = batch * rows * cols
        sizes = (np.int32(n) for n in (count, rows, cols))
        return [Launch(transpose_narrow_kernel(*kinds(call)), blocks(count, THREADS), THREADS, (*arrays, *sizes))]
    row_tiles, col_tiles = blocks(rows, TILE), blocks(cols, TILE)
    scalars = (np.int32(n) for n in (rows, cols, row_tiles, col_tiles))
    return [Launch(transpose_kernel(*kinds(call)), batch * row_tiles * col_tiles, (TILE, TILE_ROWS), (*arrays, *scalars))]


def traffic_transpose(call: Call, batch: int, rows: int, cols: int) -> list[Traffic]:
    """Bytes of `transpose`: whole tiles are read, beyond the edge the last element again."""
    read = rows * cols if min(rows, cols) <= NARROW else blocks(rows, TILE) * blocks(cols, TILE) * TILE**2
    return [Traffic(element(call) * batch * read, outputs(call), size(call, "in", 0))]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    N, C, H, W = call.in_shapes[0]
    if call.attrs["source"] == call.attrs["target"]:
        return streamed(call)
    return traffic_transpose(call, N, *((C, H * W) if call.attrs["source"] == "NCHW" else (H * W, C)))


def bind(call: Call) -> list[Launch]:
    """One launch: a transpose, or a copy where both layouts are the same.

    Raises ValueError for a layout that is neither NCHW nor NHWC.
    """
    source, target = call.attrs["source"], call.attrs["target"]
    for layout in (source, target):
        if layout not in ("NCHW", "NHWC"):
            raise ValueError(f"convert: no layout {quoted(layout)}; one of NCHW, NHWC")
    N, C, H, W = call.in_shapes[0]
    if source == target:
        return copy(call)
    rows, cols = (C, H * W) if source == "NCHW" else (H * W, C)
    return transpose(call, N, rows, cols)


HOST, OPS = {Op("convert"): host(convert)}, {Op("convert"): Impl(bind, supports=supports, traffic=traffic)}
