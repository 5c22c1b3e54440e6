"""Convolutions with their EvoNorm on Hopper's tensor cores, bound: shapes, tiles, tensor maps, grid (kernel: wgmma_kernel.py).

The ops are those of two_ops.py; a tile says how the warpgroups share the images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame import correlation
from nbcnn.ops.conv.wgmma.tile import KINDS
from nbcnn.ops.conv_norm.two_ops import B0, S0, by_epilogue, group_of
from nbcnn.ops.conv_norm.wgmma_form import FILTERS, GROUPS, MOMENTS, THREADS, Form
from nbcnn.ops.conv_norm.wgmma_kernel import conv_norm_kernel
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.ops.norms import traffic
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, numel

_SHARED_OF_BLOCK = 227 * 1024 - 4 * GROUPS * (MOMENTS + 1) * FILTERS
_PARTS = (1, 2, 4)
_MOST_COLUMNS, _MOST_BUFFERS = 128, 2
# Columns: more sums than these leave no registers for anything else.
PRECISIONS = ("bf16", "tf32")
_PACKED = {"bf16": "bfloat16", "tf32": "tfloat32"}


@dataclass(frozen=True)
class ImageTile:
    """A warpgroup makes `lines` lines of an image at a time, with `buffers` sources in flight; `parts` of them share an image; `blocks` run."""

    lines: int
    buffers: int
    parts: int
    blocks: int


def shape_of(call: Call) -> ConvShape:
    """The convolution inside the call."""
    (N, C, H, W), (K, _, R, S) = call.in_shapes[:2]
    return ConvShape(N, C, H, W, K, R, S, call.attrs["stride"], call.attrs["pad"])


def form_of(call: Call, precision: str, tile: ImageTile, epilogue: str) -> Form:
    """What a call freezes into its kernel. Results are kept wherever they have room beside the tile's sources."""
    c = shape_of(call)
    form = Form(epilogue, precision, group_of(call), c.R, c.S, c.Q, c.C // KINDS[precision].channels, tile.lines, tile.buffers, tile.parts)
    keeping = replace(form, kept=share_of(c, tile.lines, tile.parts) // tile.lines)
    return keeping if epilogue != "planes" and form.stage_bytes and keeping.shared_bytes <= _SHARED_OF_BLOCK else form


def share_of(c: ConvShape, lines: int, parts: int) -> int:
    """Lines of a part of an image: whole tiles; the last part may have fewer."""
    return ceil_div(ceil_div(c.P, lines), parts) * lines


def supports(call: Call, target: Target, precision: str) -> str | None:
    """None, or the reason in words."""
    c, channels = shape_of(call), KINDS[precision].channels
    if reason := not_nhwc(call, "the fused convolutions read"):
        return reason
    if c.C % channels or c.K % FILTERS or FILTERS % group_of(call):
        return f"{c.C} to {c.K} channels: a block takes multiples of {channels}, and has {FILTERS} filters, which must be whole groups"
    if c.stride != 1 or c.pad >= min(c.R, c.S):
        return f"a window of {c.R}×{c.S}, stride {c.stride}, padding {c.pad}: the kernel moves by one pixel, and pads less than the filter"
    if c.Q % 2 or c.S % 2 == 0 or c.Q < 8 or c.Q + c.S - 1 > _MOST_COLUMNS:
        return f"lines of {c.Q} pixels and filters of {c.S}: a thread takes pairs of pixels, 8 to {_MOST_COLUMNS} with the border"
    if not candidates(call, precision, target):
        return "all taps of 64 filters and the lines that they see do not fit into shared memory"
    return too_large(c.x_shape, c.y_shape)


def candidates(call: Call, precision: str, target: Target) -> list[ImageTile]:
    """Tiles that fit into shared memory, those of whole parts; as few parts as give every warpgroup work come first."""
    c, made = shape_of(call), []
    slabs = c.K // FILTERS
    workers = max(target.multiprocessors // slabs, 1) * GROUPS
    for parts in _PARTS:
        if parts > 1 and c.N * parts > workers:
            continue
        for lines in range(min(c.P, _MOST_COLUMNS // (c.Q + c.S - 1)), 0, -1):
            if (parts - 1) * share_of(c, lines, parts) >= c.P:
                continue
            for buffers in range(_MOST_BUFFERS, 0, -1):
                tile = ImageTile(lines, buffers, parts, slabs * min(ceil_div(c.N * parts, GROUPS), workers // GROUPS))
                if form_of(call, precision, tile, "s0").shared_bytes <= _SHARED_OF_BLOCK:
                    made.append(tile)
    return sorted(made, key=lambda tile: -tile.parts)  # the others' order stays


def choose(call: Call, precision: str, target: Target) -> ImageTile:
    """The most parts; of those the tile that multiplies for the shortest time, borders and lines beyond the image included."""
    c, made = shape_of(call), candidates(call, precision, target)

    def time(tile: ImageTile) -> float:
        # For each product shared memory delivers 64 rows of filters and the columns, at twice the rate at which columns are multiplied.
        columns = form_of(call, precision, tile, "s0").columns
        return share_of(c, tile.lines, tile.parts) // tile.lines * max(columns, 32 + columns / 2)

    return min((tile for tile in made if tile.parts == made[0].parts), key=lambda tile: (time(tile), -tile.buffers))


def launch(
    call: Call, precision: str, epilogue: str, z: Any = None, y: Any = None, running: Any = None, shift: Any = None, std: Any = None
) -> Launch:
    """The launch with this `epilogue`; arrays that it does not touch may be left out.

    Without z, the convolution's own output is kept in y until y is known.
    """
    c, tile, kind = shape_of(call), call.tile, KINDS[precision]
    form, raw = form_of(call, precision, tile, epilogue), y if z is None else z
    x, _, b, gamma, beta, v, *_ = call.ins
    source = tensor_maps.encode_tiled(x, (c.C, c.W, c.H, c.N), (kind.channels, form.PW, form.lines + c.R - 1, 1))
    filters = tensor_maps.encode_tiled(call.packed, (c.R * c.S * c.C, c.K), (kind.channels, FILTERS))
    maps = [source, filters]
    if kind.result == 2:
        maps.append(tensor_maps.encode_tiled(raw, (c.K, c.Q, c.P, c.N), (FILTERS, c.Q, form.lines, 1)))
    uploaded, slabs = tensor_maps.upload(*maps), c.K // FILTERS
    messages = constant(np.zeros(4 * c.N * c.K * tile.parts if tile.parts > 1 else 1, np.int32))
    arrays = (b if array is None else array for array in (running, raw, raw if y is None else y, shift, std))  # None is never looked at
    sizes = (c.N, c.C, c.K, c.P, c.pad, slabs, share_of(c, tile.lines, tile.parts))
    args = (uploaded, b, gamma, beta, v, *arrays, messages, *map(np.int32, sizes), np.float32(call.attrs["eps"]))
    keep = (uploaded, x, call.packed, raw)
    return Launch(conv_norm_kernel(form), tile.blocks, THREADS, args, form.shared_bytes, name=call.op, keep=keep, together=tile.parts > 1)


def _pack(call: Call) -> np.ndarray:
    """w (K,C,R,S) as [K][R][S][C]."""
    return correlation.pack(replace(call, op=Op("conv", "fprop")))


def bytes_of(call: Call, precision: str) -> list[Traffic]:
    """x with the lines that tiles share, filters once per block; the convolution's output out, and back to be normalised; y."""
    c: ConvShape = shape_of(call)
    tile, kind = call.tile, KINDS[precision]
    x, w, image = size(call, "in", 0), kind.element * numel(call.in_shapes[1]), size(call, "out", 0)
    seen = kind.element * c.N * c.W * c.C * _lines(c, tile) * (c.K // FILTERS)
    planes = traffic.STATISTICS * c.N * c.K // group_of(call)
    messages = traffic.MESSAGE * c.N * c.K * tile.parts if tile.parts > 1 else 0
    read, distinct = seen + w * tile.blocks * FILTERS // c.K + messages * tile.parts, x + w + messages
    if call.op == B0:
        return [Traffic(read, image + planes + messages, distinct), *traffic.b0_behind_planes(call, image=1)]
    kept = planes if call.op == S0 else 0
    if form_of(call, precision, tile, "s0").kept:
        return [Traffic(read, image * (2 if kept else 1) + kept + messages, distinct)]
    return [Traffic(read + image, 2 * image + kept + messages, distinct + image)]


def _lines(c: ConvShape, tile: ImageTile) -> int:
    """Lines of an image that its tiles read, those outside it left out."""
    share, read = share_of(c, tile.lines, tile.parts), 0
    for part in range(tile.parts):
        for line in range(part * share, min(c.P, (part + 1) * share), tile.lines):
            read += min(c.H, line - c.pad + tile.lines + c.R - 1) - max(0, line - c.pad)
    return read


def ops(precision: str) -> dict[Op, Impl]:
    """The fused ops in "bf16" or "tf32"."""
    bound = by_epilogue(lambda call, epilogue, **arrays: [launch(call, precision, epilogue, **arrays)])
    return {
        name: Impl(
            bind,
            supports=lambda call, target: supports(call, target, precision),
            tile=lambda call, target: choose(call, precision, target),
            pack=_pack,
            packed=_PACKED[precision],
            needs=(9, 0),
            candidates=lambda call, target: candidates(call, precision, target),
            traffic=lambda call: bytes_of(call, precision),
            exactly=True,
            engine="wgmma with norm",
        )
        for name, bind in bound.items()
    }
