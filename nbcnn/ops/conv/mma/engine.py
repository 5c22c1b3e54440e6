"""The ops that the gather kernel serves, bound: arguments, grid, scratch for the parts of a split product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.ops.activations.table import EPILOGUES, epilogue_of
from nbcnn.ops.conv.mma.gather import Gather, gather_of, pack, refusal
from nbcnn.ops.conv.mma.kernel import gather_product
from nbcnn.ops.conv.mma.sums import THREADS, sum_pixels, sum_windows
from nbcnn.ops.conv.mma.tile import KINDS, ROW_BYTES, Kind, Tile, choose, unsplit, width, worth_measuring
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size, windows

IMAGE_OPS = (
    "conv_fprop",
    *(f"conv_{name}_fprop" for name in EPILOGUES),
    "conv_relu_pool_fprop",
    "conv_dgrad",
    "conv_dgrad_relu",
    "upconv_fprop",
    "upconv_relu_fprop",
    "upconv_dgrad",
    "upconv_dgrad_relu",
)


def implementations(precision: str) -> dict[str, Impl]:
    """The passes over images in one precision, by op."""
    kind = KINDS[precision]

    def bind(call: Call) -> list[Launch]:
        return _bind(call, kind)

    def scratch(call: Call) -> int:
        g = gather_of(call)
        return 4 * call.tile.split * g.phases * g.GM * g.K if call.tile.split > 1 else 0

    def tile(call: Call, multiprocessors: int) -> Tile:
        return choose(gather_of(call), kind.name, multiprocessors)

    def tiles(call: Call, multiprocessors: int) -> Sequence[Tile]:
        return worth_measuring(gather_of(call), kind, multiprocessors)

    def pack_filters(call: Call) -> np.ndarray:
        return pack(call, kind.channels)

    def bytes_of(call: Call) -> list[Traffic]:
        return traffic(call, kind)

    impl = Impl(bind, scratch, refusal, tile, pack_filters, kind.store, (8, 0), tiles, bytes_of)
    return dict.fromkeys(IMAGE_OPS, impl)


def _bind(call: Call, kind: Kind) -> list[Launch]:
    g, tile = gather_of(call), call.tile
    y, k_tiles = call.outs[0], g.k_tiles(kind.channels)
    masked, biased, pooled = call.op.endswith("dgrad_relu"), "fprop" in call.op and len(call.ins) > 2, "pool" in call.op
    after = "" if masked or pooled else epilogue_of(call.op)
    # A kernel has one signature: arguments that it does not read get an array of the right type.
    b = call.ins[2] if biased else None
    x = call.ins[2] if masked else y
    index = call.outs[1] if pooled else None
    split = tile.split > 1
    out = call.scratch.view(np.float32) if split else y
    finish = "partial" if split else "mask" if masked else "pool" if pooled else "pixels"
    copied = width(g, kind)
    kernel = gather_product(
        unsplit(tile),
        kind.name,
        copied,
        g.C % kind.channels == 0,
        g.dilate,
        finish,
        biased and not split,
        "" if split else after,
        pooled,
        g.K % 4 == 0,
    )
    across = -(-g.K // tile.BN)
    up = 1 if g.phases == 4 else 0
    scalars = (g.GM, g.K, g.C, g.H, g.W, g.P, g.Q, g.R, g.S, g.stride, g.top, g.left, up)
    walk = (k_tiles * ROW_BYTES, across, tile.part(k_tiles), k_tiles)
    arrays = (call.ins[0], call.packed, _given(b, out), x, out, _given(index, out))
    args = (*arrays, *(np.int32(v) for v in (*scalars, *walk)))
    grid = (tile.tiles(g), tile.split)
    made = [Launch(kernel, grid, tile.threads, args, tile.shared_bytes, name=call.op)]
    if split:
        made.append(_sum(g, kind, tile.split, out, b, x, y, index, after, masked))
    return made


def _given(array: Any, stand_in: Any) -> Any:
    return stand_in if array is None else array


def _sum(g: Gather, kind: Kind, planes: int, partials: Any, b: Any, x: Any, y: Any, index: Any, after: str, masked: bool) -> Launch:
    """The launch that adds the parts."""
    quads = g.phases * g.GM * g.K // 4
    if index is not None:
        args = (partials, _given(b, partials), y, index, *(np.int32(v) for v in (g.GM, g.K, planes)))
        return Launch(sum_windows(kind.name, b is not None), blocks(quads // 4, THREADS), THREADS, args)
    scalars = (g.GM, g.K, g.P, g.Q, 1 if g.phases == 4 else 0, planes)
    args = (partials, _given(b, partials), x, y, *(np.int32(v) for v in scalars))
    return Launch(sum_pixels(kind.name, b is not None, after, masked), blocks(quads, THREADS), THREADS, args)


def traffic(call: Call, kind: Kind) -> list[Traffic]:
    """Bytes of the launches: the source once a tap and column of tiles, filters once a row of tiles, both mostly out of L2."""
    g, tile = gather_of(call), call.tile
    shifts = (0, 1) if g.phases == 4 else (0,)
    down = [windows(g.P, g.R, g.H, g.stride, g.top - shift, g.dilate) for shift in shifts]
    across = [windows(g.Q, g.S, g.W, g.stride, g.left - shift, g.dilate) for shift in shifts]
    pixels, seen = sum(a for a, _ in down) * sum(a for a, _ in across), max(a for _, a in down) * max(a for _, a in across)
    filters = g.phases * g.K * g.k_tiles(kind.channels) * ROW_BYTES
    read = kind.element * g.N * g.C * pixels * ceil_div(g.K, tile.BN) + filters * ceil_div(g.GM, tile.BM)
    distinct = kind.element * g.N * g.C * seen + filters
    mask = size(call, "in", 2) if call.op.endswith("dgrad_relu") else 0
    if tile.split == 1:
        return [Traffic(read + mask, outputs(call), distinct + mask)]
    partials = 4 * tile.split * g.phases * g.GM * g.K
    return [Traffic(read, partials, distinct), once(partials + mask, outputs(call))]
