"""Max pooling: y[p,q] = the largest element of a size × size window, index[p,q] = which tap it was (row by row).

Ties go to the first tap; a NaN wins over everything, the first NaN over later ones. Windows lie fully inside; the rows and
columns left over get gradient zero. dgrad is a gather: an element sums dy over the windows whose index names it, in the
order of the taps, so overlapping windows need no atomics and repeat bit for bit. Layouts, lanes, rows: see windows.py.

    maxpool_fprop     x (N,C,H,W) -> y (N,C,P,Q), index (N,C,P,Q) uint8 or int32              size, stride
    maxpool_dgrad     dy, index[, more (N,C,H,W), which is added] -> dx (N,C,H,W)             size, stride
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, jit
from nbcnn.ops.images.window_sum import spread_reads, sum_reads
from nbcnn.ops.kernel.call import Call, Impl, Launch, host, parts
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size
from nbcnn.ops.kernel.windows import WINDOWS, in_rows, lane_io, lanes_of, launch, offset_of, planes, pooled_shapes, position, reach_of, split, taps
from nbcnn.plan.op import Op

LOWEST = np.float32(-np.inf)


def maxpool_fprop(x: np.ndarray, y: np.ndarray, index: np.ndarray, *, size: int, stride: int) -> None:
    """y, index (N,C,P,Q) = largest element and its tap in each window of x (N,C,H,W); index is uint8 or int32."""
    *others, last = taps(x, size, stride, y.shape[2:])
    np.copyto(y, last)
    for seen in others:
        np.maximum(y, seen, out=y)
    # The index is the number of taps in front of the first that is the maximum (or a NaN, which y then is too).
    index.fill(0)
    searching, dense = np.ones(y.shape, bool), np.empty_like(y)
    for seen in others:
        np.copyto(dense, seen)
        searching &= (dense != y) & (dense == dense)
        index += searching


def maxpool_dgrad(dy: np.ndarray, index: np.ndarray, *operands: np.ndarray, size: int, stride: int) -> None:
    """dx (N,C,H,W) = the sum of dy (N,C,P,Q) over the windows whose `index` names the element; operands: [more, which is added,] dx."""
    *more, dx = operands
    dx.fill(0)
    for tap, seen in enumerate(taps(dx, size, stride, dy.shape[2:])):
        seen += dy * (index == tap)
    for each in more:
        dx += each


@cache
def index_io(lanes: int) -> tuple[Any, Any]:
    """Device functions load(index, i, into) and store(index, i, taps): group i of indices, from and to a local int32 array.

    Four lanes are the four bytes of one uint32, the first lane lowest: one access instead of four.
    """
    if lanes == 4:

        @jit(device=True)
        def load(index, i, into):
            word = index[i]
            for lane in range(4):
                into[lane] = (word >> 8 * lane) & 255

        @jit(device=True)
        def store(index, i, values):
            index[i] = values[0] | values[1] << 8 | values[2] << 16 | values[3] << 24
    else:

        @jit(device=True)
        def load(index, i, into):
            into[0] = index[i]

        @jit(device=True)
        def store(index, i, values):
            index[i] = values[0]

    return load, store


@jit(device=True)
def larger_of(value, tap, best, winner):
    """(best, winner) after `value` at `tap`, by the rule of `maxpool_fprop`."""
    wins = (not (value <= best)) & (best == best)
    return (value if wins else best), (tap if wins else winner)


@cache
def fprop_kernel(kind: str, lanes: int, size: int, stride: int) -> Any:
    """y[o,p,q,c], index[o,p,q,c] = max, argmax over r,s < size of x[o, p·stride + r, q·stride + s, c], c in groups of `lanes`.

    In NHWC x is a part of `x_groups` groups, or all of them.

    grid    ceil(count / 256), block 256, count = outer·P·Q·groups
    owns    thread: one group of one window
    moves   4·(windows' part of x) + (4 + index bytes)·y bytes; overlapping windows hit the cache
    """
    load, store = lane_io(lanes, kind)
    _, store_index = index_io(lanes)

    @jit()
    def maxpool_fprop_kernel(x, y, index, count, H, W, P, Q, groups, x_groups):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, p, q, group = position(i, P, Q, groups)
        first = offset_of(o, p * stride, q * stride, group, H, W, x_groups)
        value, best, winner = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4), cuda.local.array(lanes, i4)
        for lane in range(lanes):
            best[lane], winner[lane] = LOWEST, 0
        for r in range(size):
            for s in range(size):
                load(x, first + (r * W + s) * x_groups, value)
                for lane in range(lanes):
                    best[lane], winner[lane] = larger_of(value[lane], r * size + s, best[lane], winner[lane])
        store(y, i, best)
        store_index(index, i, winner)

    return maxpool_fprop_kernel


@cache
def dgrad_kernel(kind: str, lanes: int, size: int, stride: int, plus: bool = False) -> Any:
    """dx[o,h,w,c] = Σ dy[o,p,q,c] over the windows (p,q) that contain (h,w) and whose index names it; any overlap or gap; `plus`: plus more[o,h,w,c],
    in NHWC a part of `more_groups` groups, or all of them.

    grid    ceil(count / 256), block 256, count = outer·H·W·groups
    owns    thread: one group of one element of dx
    moves   4·dx + (4 + index bytes)·dy bytes; rereads of dy and index hit the cache
    """
    load, store = lane_io(lanes, kind)
    load_index, _ = index_io(lanes)
    reach = reach_of(size, stride)

    @jit()
    def maxpool_dgrad_kernel(dy, index, more, dx, count, H, W, P, Q, groups, more_groups):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, h, w, group = position(i, H, W, groups)
        p0, r0 = split(h, stride)
        q0, s0 = split(w, stride)
        total, part, winner = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4), cuda.local.array(lanes, i4)
        for lane in range(lanes):
            total[lane] = 0.0
        for j in range(reach):
            for k in range(reach):
                p, q, r, s = p0 - j, q0 - k, r0 + j * stride, s0 + k * stride
                inside = (r < size) & (s < size) & (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                # Load always, from a clamped index: a load under a branch would wait for the one before.
                near_p, near_q = min(max(p, 0), P - 1), min(max(q, 0), Q - 1)
                window = offset_of(o, near_p, near_q, group, P, Q, groups)
                load(dy, window, part)
                load_index(index, window, winner)
                for lane in range(lanes):
                    total[lane] += part[lane] if inside & (winner[lane] == r * size + s) else 0.0
        if plus:
            load(more, offset_of(o, h, w, group, H, W, more_groups), part)
            for lane in range(lanes):
                total[lane] += part[lane]
        store(dx, i, total)

    return maxpool_dgrad_kernel


@cache
def dgrad_tile_kernel(kind: str, lanes: int, size: int, plus: bool = False) -> Any:
    """`dgrad_kernel` for stride = size: windows tile the image, so each dy and index is read once.

    Tiles cut off at the right and bottom edge have no window; they get zeros. In NHWC `more` is a part of `more_groups` groups, or all of them.

    grid    ceil(count / 256), block 256, count = outer·ceil(H/size)·ceil(W/size)·groups
    owns    thread: one group of the size × size elements of one tile
    moves   4·dx + (4 + index bytes)·dy bytes, and with `more` 4·dx again
    """
    load, store = lane_io(lanes, kind)
    load_index, _ = index_io(lanes)
    load4, _ = vector_io(kind)
    ELEMENTS = size * size * lanes if plus else 1

    @jit(device=True)
    def load_at(array, i, into, at):
        into[at], into[at + 1], into[at + 2], into[at + 3] = load4(array, 4 * i)

    @jit()
    def maxpool_dgrad_tile_kernel(dy, index, more, dx, count, H, W, P, Q, groups, tiles_h, tiles_w, more_groups):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, p, q, group = position(i, tiles_h, tiles_w, groups)
        part, chosen, winner = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4), cuda.local.array(lanes, i4)
        extra = cuda.local.array(ELEMENTS, f4)
        window = offset_of(o, min(p, P - 1), min(q, Q - 1), group, P, Q, groups)
        load(dy, window, part)
        load_index(index, window, winner)
        inside = (p < P) & (q < Q)
        if plus:
            # All of the tile at once, so that its loads are in flight together; of a tile that is cut off, its own elements again.
            for r in range(size):
                for s in range(size):
                    h, w = min(p * size + r, H - 1), min(q * size + s, W - 1)
                    load_at(more, offset_of(o, h, w, group, H, W, more_groups), extra, (r * size + s) * lanes)
        for r in range(size):
            for s in range(size):
                h, w = p * size + r, q * size + s
                for lane in range(lanes):
                    chosen[lane] = part[lane] if inside & (winner[lane] == r * size + s) else 0.0
                    if plus:
                        chosen[lane] += extra[(r * size + s) * lanes + lane]
                if (h < H) & (w < W):
                    store(dx, offset_of(o, h, w, group, H, W, groups), chosen)

    return maxpool_dgrad_tile_kernel


@jit(device=True)
def _largest(a, b, c, d):
    """(largest, its tap) of the 2 × 2 window a b / c d."""
    best, winner = larger_of(b, 1, a, 0)
    best, winner = larger_of(c, 2, best, winner)
    return larger_of(d, 3, best, winner)


@cache
def fprop_rows_kernel(kind: str) -> Any:
    """y, index = max, argmax over 2 × 2 windows of stride 2, NCHW, W a multiple of 8; index is uint32, four taps per word.

    grid    ceil(count / 256), block 256, count = outer·P·W/8
    owns    thread: 4 windows of a row
    moves   4·x + 5·y bytes
    """
    load4, store4 = vector_io(kind)

    @jit()
    def maxpool_fprop_rows_kernel(x, y, index, count, H, W, P, quads):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        rest, quad = split(i, quads)
        o, p = split(rest, P)
        top = (o * H + 2 * p) * W + 8 * quad
        a0, a1, a2, a3 = load4(x, top)
        a4, a5, a6, a7 = load4(x, top + 4)
        b0, b1, b2, b3 = load4(x, top + W)
        b4, b5, b6, b7 = load4(x, top + W + 4)
        y0, k0 = _largest(a0, a1, b0, b1)
        y1, k1 = _largest(a2, a3, b2, b3)
        y2, k2 = _largest(a4, a5, b4, b5)
        y3, k3 = _largest(a6, a7, b6, b7)
        store4(y, 4 * i, y0, y1, y2, y3)
        index[i] = k0 | k1 << 8 | k2 << 16 | k3 << 24

    return maxpool_fprop_rows_kernel


@cache
def dgrad_rows_kernel(kind: str, plus: bool = False) -> Any:
    """dx = dy where the index of its 2 × 2 window names the element, else 0; NCHW, W a multiple of 8; index is uint16, two taps. `plus`: plus more.

    grid    ceil(count / 256), block 256, count = outer·ceil(H/2)·W/4
    owns    thread: 2 × 4 elements of dx, so that the stores of a warp have no holes (a last odd row gets zeros)
    moves   4·dx + 5·dy bytes
    """
    (load, _), (load4, store4) = scalar_io(kind), vector_io(kind)

    @jit()
    def maxpool_dgrad_rows_kernel(dy, index, more, dx, count, H, W, P, pairs, tiles_h):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        rest, pair = split(i, pairs)
        o, p = split(rest, tiles_h)
        window = (o * P + min(p, P - 1)) * pairs + pair
        left, right = load(dy, 2 * window), load(dy, 2 * window + 1)
        word = index[window]
        # 4 is no tap of a 2 × 2 window: nothing is chosen in a row without windows.
        tap_left, tap_right = (word & 255, word >> 8) if p < P else (4, 4)
        for r in range(2):
            h = 2 * p + r
            if h < H:
                a, b = left if tap_left == 2 * r else 0.0, left if tap_left == 2 * r + 1 else 0.0
                c, d = right if tap_right == 2 * r else 0.0, right if tap_right == 2 * r + 1 else 0.0
                at = (o * H + h) * W + 4 * pair
                if plus:
                    e, f, g, k = load4(more, at)
                    a, b, c, d = a + e, b + f, c + g, d + k
                store4(dx, at, a, b, c, d)

    return maxpool_dgrad_rows_kernel


def _groups(call: Call, at: int, lanes: int) -> int:
    """The groups that lie in memory where those of an input do."""
    return int(call.channels("in", at)) // lanes if call.layout == "NHWC" else 1


def bind_fprop(call: Call) -> list[Launch]:
    """One launch: rows, or lanes by the layout. Four lanes need a uint8 index; an int32 index is handled one lane per thread."""
    (x,), (y, index) = call.ins, call.outs
    (H, W), (P, Q), size, stride = call.in_shapes[0][2:], call.out_shapes[0][2:], call.attrs["size"], call.attrs["stride"]
    outer, inner = planes(call.in_shapes[0], call.layout)
    kind, _ = kinds(call)
    packs = index.dtype == np.uint8
    if packs and in_rows(call.layout, size, stride, W):
        return launch(fprop_rows_kernel(kind), outer * P * W // 8, (x, y, index.view(np.uint32)), H, W, P, W // 8)
    lanes = lanes_of(inner) if packs else 1
    groups = inner // lanes
    arrays = (x, y, index.view(np.uint32) if lanes == 4 else index)
    return launch(fprop_kernel(kind, lanes, size, stride), outer * P * Q * groups, arrays, H, W, P, Q, groups, _groups(call, 0, lanes))


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch: rows, tiles, or the gather."""
    (dy, index, *others), (dx,) = call.ins, call.outs
    more, plus = (others or [dx])[0], bool(others)  # a kernel that does not read `more` takes dx in its place
    (P, Q), (H, W), size, stride = call.in_shapes[0][2:], call.out_shapes[0][2:], call.attrs["size"], call.attrs["stride"]
    outer, inner = planes(call.out_shapes[0], call.layout)
    kind, _ = kinds(call)
    packs = index.dtype == np.uint8
    tiles_h, tiles_w = -(-H // size), -(-W // size)
    if packs and in_rows(call.layout, size, stride, W):
        return launch(dgrad_rows_kernel(kind, plus), outer * tiles_h * W // 4, (dy, index.view(np.uint16), more, dx), H, W, P, W // 4, tiles_h)
    lanes = lanes_of(inner) if packs else 1
    groups = inner // lanes
    more_groups = _groups(call, 2, lanes) if plus else groups
    if lanes == 4 and size == stride:
        arrays = (dy, index.view(np.uint32), more, dx)
        return launch(
            dgrad_tile_kernel(kind, lanes, size, plus), outer * tiles_h * tiles_w * groups, arrays, H, W, P, Q, groups, tiles_h, tiles_w, more_groups
        )
    arrays = (dy, index.view(np.uint32) if lanes == 4 else index, more, dx)
    return launch(dgrad_kernel(kind, lanes, size, stride, plus), outer * H * W * groups, arrays, H, W, P, Q, groups, more_groups)


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`."""
    read, distinct = sum_reads(call.in_shapes[0], call.out_shapes[0], call.attrs["size"], call.attrs["stride"])
    return [Traffic(element(call) * read, outputs(call), element(call) * distinct)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every value of dy comes with its index."""
    uint8 = call.in_dtypes[1] == "uint8" if call.in_dtypes else True
    layout = call.layout if uint8 else "one by one"
    windows = spread_reads(call.out_shapes[0], layout, call.attrs["size"], call.attrs["stride"])
    each = element(call) + element(call, at=1)
    more = size(call, "in", 2) if len(call.in_shapes) > 2 else 0
    return [Traffic(windows * each + more, outputs(call), min(windows * each, size(call, "in", 0) + size(call, "in", 1)) + more)]


HOST = {Op("maxpool", "fprop"): host(maxpool_fprop), Op("maxpool", "dgrad"): host(maxpool_dgrad)}
OPS = {
    Op("maxpool", "fprop"): Impl(bind_fprop, traffic=traffic_fprop, pitched=parts(ins=(0,), layouts=("NHWC",))),
    Op("maxpool", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad, pitched=parts(ins=(2,), layouts=("NHWC",))),
}
GRADIENTS = {Op("maxpool", "dgrad"): Gradient(Op("maxpool", "fprop"), lambda ins, outs, v: (v, outs[1]))}


def cases(images: Shapes = IMAGES, windows: Shapes = WINDOWS) -> Iterator[Case]:
    """Both passes, in windows (size, stride) that fit."""
    for label, shape, pooled, attrs in pooled_shapes(images, windows):
        size = attrs["size"]
        index = np.random.default_rng(9).integers(0, size * size, pooled).astype(np.uint8)
        yield Case(Op("maxpool", "fprop"), label, (normal(7, *shape),), ((pooled, "float32"), (pooled, "uint8")), attrs)
        for more in ((), (normal(9, *shape),)):
            yield Case(Op("maxpool", "dgrad"), label, (normal(8, *pooled), index, *more), ((shape, "float32"),), attrs, size * size)
