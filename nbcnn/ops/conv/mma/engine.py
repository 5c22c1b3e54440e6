"""The ops that the gather kernel serves, bound: arguments, grid, scratch for the parts of a split product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.correlation import IMAGE_OPS, Correlation, correlation, image_part, pack
from nbcnn.ops.conv.frame.epilogue import WITH_MOMENTS, Epilogue, epilogue, kind_of
from nbcnn.ops.conv.mma.kernel import gather_product
from nbcnn.ops.conv.mma.rows import LARGEST_FILTER
from nbcnn.ops.conv.mma.sums import THREADS, sum_pixels, sum_windows
from nbcnn.ops.conv.mma.tile import KINDS, ROW_BYTES, Kind, Tile, choose, microseconds, width, worth_measuring
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.ops.kernel.tiles import partial_bytes, unsplit
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size, windows
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

EPILOGUE = 4.4e6
"""Bytes a microsecond that an epilogue moves besides results, and the products do not hide: what masks a result, and the sum of which moments are.

Fitted to 23 convolutions with moments in bf16 on an H100. It gives gradients with a mask in tf32 with an rms error of 8 %, 10 % without it.
"""


def refusal(call: Call, target: Target) -> str | None:
    """None if the engine runs the call, else the reason in words."""
    if reason := not_nhwc(call, "mma reads"):
        return reason
    g = correlation(call)
    if max(g.R, g.S) > LARGEST_FILTER:
        return f"a filter of {g.R}×{g.S} is larger than {LARGEST_FILTER}×{LARGEST_FILTER}"
    return too_large(call.in_shapes[0], call.out_shapes[0])


def implementations(precision: str) -> dict[Op, Impl]:
    """The passes over images in one precision, by op; and the convolution with moments, which is none of the table's."""
    kind = KINDS[precision]

    def bind(call: Call) -> list[Launch]:
        return _bind(call, kind)

    def scratch(call: Call) -> int:
        g = correlation(call)
        return partial_bytes(call.tile.split, g.phases * g.GM * g.K)

    def tile(call: Call, target: Target) -> Tile:
        return choose(correlation(call), kind.name, target)

    def tiles(call: Call, target: Target) -> Sequence[Tile]:
        return worth_measuring(correlation(call), kind, target)

    def pack_filters(call: Call) -> np.ndarray:
        return pack(call, kind.channels)

    def bytes_of(call: Call) -> list[Traffic]:
        return traffic(call, kind)

    def estimate(call: Call, target: Target) -> float:
        product, *_ = bytes_of(call)
        after = size(call, "in", 2) if call.op.mask else 4 * numel(call.out_shapes[0]) if kind_of(call) == "moments" else 0
        return microseconds(call.tile, correlation(call), kind, product.distinct + outputs(call), target) + after / EPILOGUE

    impl = Impl(
        bind, scratch, refusal, tile, pack_filters, kind.store, kind.needs, tiles, bytes_of, engine="mma", estimate=estimate, pitched=image_part
    )
    return dict.fromkeys((*IMAGE_OPS, WITH_MOMENTS), impl)


def _bind(call: Call, kind: Kind) -> list[Launch]:
    g, tile = correlation(call), call.tile
    y, k_tiles = call.outs[0], g.k_tiles(kind.channels)
    e = epilogue(call)
    pixels = (int(call.channels("out", 0)), int(call.channels("in", 2)) if e.kind == "mask" else 0)
    pooled, split = e.kind == "pool", tile.split > 1
    # A kernel has one signature: arguments that it does not read get an array of the right type.
    out = call.scratch.view(np.float32) if split else y
    copied = width(g, kind)
    kernel = gather_product(
        unsplit(tile),
        kind.name,
        copied,
        g.C % kind.channels == 0,
        g.dilate,
        "partial" if split else e.kind,
        e.b is not None and not split,
        None if split else e.after,
        pooled,
        g.K % 4 == 0,
    )
    across = -(-g.K // tile.BN)
    up = 1 if g.phases == 4 else 0
    scalars = (g.GM, g.K, g.C, g.H, g.W, g.P, g.Q, g.R, g.S, g.stride, g.top, g.left, up)
    walk = (k_tiles * ROW_BYTES, across, tile.part(k_tiles), k_tiles, call.channels("in", 0), *pixels)
    arrays = (call.ins[0], call.packed, _given(e.b, out), _given(e.x, y), out, _given(e.second, out))
    args = (*arrays, *(np.int32(v) for v in (*scalars, *walk)))
    grid = (tile.tiles(g), tile.split)
    made = [Launch(kernel, grid, tile.threads, args, tile.shared_bytes, name=call.op)]
    if split:
        made.append(_sum(g, kind, tile.split, out, y, e, pixels))
    return made


def _given(array: Any, stand_in: Any) -> Any:
    return stand_in if array is None else array


def _sum(g: Correlation, kind: Kind, planes: int, partials: Any, y: Any, e: Epilogue, pixels: tuple[int, int]) -> Launch:
    """The launch that adds the parts; pixels: how far those of y lie from each other, and those of the mask."""
    quads, whole = g.phases * g.GM * ceil_div(g.K, 4), g.K % 4 == 0
    if e.kind == "pool":
        args = (partials, _given(e.b, partials), y, e.second, *(np.int32(v) for v in (g.GM, g.K, planes)))
        return Launch(sum_windows(kind.name, e.b is not None, whole), blocks(quads // 4, THREADS), THREADS, args)
    scalars = (g.GM, g.K, g.P, g.Q, 1 if g.phases == 4 else 0, planes, *pixels)
    args = (partials, _given(e.b, partials), _given(e.x, y), y, *(np.int32(v) for v in scalars))
    return Launch(sum_pixels(kind.name, e.b is not None, e.after, e.kind == "mask", whole), blocks(quads, THREADS), THREADS, args)


def traffic(call: Call, kind: Kind) -> list[Traffic]:
    """Bytes of the launches: the source once per tap and column of tiles, filters once per row of tiles, both mostly out of L2."""
    g, tile = correlation(call), call.tile
    shifts = (0, 1) if g.phases == 4 else (0,)
    down = [windows(g.P, g.R, g.H, g.stride, g.top - shift, g.dilate) for shift in shifts]
    across = [windows(g.Q, g.S, g.W, g.stride, g.left - shift, g.dilate) for shift in shifts]
    pixels, seen = sum(a for a, _ in down) * sum(a for a, _ in across), max(a for _, a in down) * max(a for _, a in across)
    filters = g.phases * g.K * g.k_tiles(kind.channels) * ROW_BYTES
    read = kind.element * g.N * g.C * pixels * ceil_div(g.K, tile.BN) + filters * ceil_div(g.GM, tile.BM)
    distinct = kind.element * g.N * g.C * seen + filters
    mask = size(call, "in", 2) if call.op.mask else 0
    if tile.split == 1:
        return [Traffic(read + mask, outputs(call), distinct + mask)]
    partials = 4 * tile.split * g.phases * g.GM * g.K
    return [Traffic(read, partials, distinct), once(partials + mask, outputs(call))]
