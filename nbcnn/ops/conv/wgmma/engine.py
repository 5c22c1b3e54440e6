"""The ops that the correlation kernel serves, bound: tensor maps, arguments, grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.gpu.target import Target
from nbcnn.ops.activations.functions import RELU
from nbcnn.ops.activations.table import epilogue_of
from nbcnn.ops.conv.frame.correlation import IMAGE_OPS, SQUARE, Correlation, correlation, image_part, pack, refusal, whole
from nbcnn.ops.conv.frame.cost import BESIDE, PART, PLANES, PLANES_US, RATES, cycles, lines_of
from nbcnn.ops.conv.frame.epilogue import WITH_MOMENTS, WITH_SECOND, WITH_SUMS, Epilogue, epilogue, kind_of
from nbcnn.ops.conv.wgmma import patch
from nbcnn.ops.conv.wgmma.kernel import correlate
from nbcnn.ops.conv.wgmma.patch import PatchTile
from nbcnn.ops.conv.wgmma.patch_kernel import correlate_patches
from nbcnn.ops.conv.wgmma.split import in_planes, launch_split, own_bytes, planes_bytes, planes_of, split_bytes, split_traffic, traffic_of_planes
from nbcnn.ops.conv.wgmma.tile import KINDS, Kind, Tile, candidates, shared_bytes, steps_of_tap, tiles_of, work
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.kernel.traffic import Traffic, clipped, outputs, size, windows
from nbcnn.plan.op import Op

_PACKED = {"bf16": "bfloat16", "tf32": "tfloat32", "fp32": "float32"}
SOURCE = (0,)
"""The position of the operand that in fp32 is split into planes."""
BY_PATCHES = (WITH_SUMS, WITH_SECOND)
"""Gradients whose epilogue the patch kernel alone has."""


def implementations(precision: str) -> dict[Op, Impl]:
    """The passes over images in one precision, by op; and the convolution with moments and the gradient with sums, which are none of the table's."""
    kind = KINDS[precision]

    def supports(call: Call, target: Target) -> str | None:
        if reason := refusal(call):
            return reason
        if call.op in BY_PATCHES:
            if not _patch_tiles(call, kind, target):
                return (
                    "a second gradient, and the sums of a norm, are in the epilogue of the patch kernel alone, whose images are squares of 8×8 pixels"
                )
        elif not candidates(correlation(call), kind, kind_of(call)):
            return f"no tile is whole pairs of rows of {correlation(call).Q} pixels"
        return None

    def estimate(call: Call, target: Target) -> float:
        *planes, _ = traffic(call, kind)
        return _microseconds(call, kind, target) + sum(PLANES_US + each.logical / PLANES for each in planes)

    def tile(call: Call, target: Target) -> Tile | PatchTile:
        return min(tiles(call, target), key=lambda tile: _cycles(call, kind, tile, target))

    def tiles(call: Call, target: Target) -> Sequence[Tile | PatchTile]:
        columns = [] if call.op in BY_PATCHES else candidates(correlation(call), kind, kind_of(call))
        return [*columns, *_patch_tiles(call, kind, target)]

    def scratch(call: Call) -> int:
        return own_bytes(call, SOURCE) + planes_bytes(_filters_packed(call, kind)) if kind.planes > 1 else 0

    def pack_filters(call: Call) -> np.ndarray:
        return pack(call, of_tap=kind.channels)

    def bind(call: Call) -> list[Launch]:
        return _bind(call, kind)

    def bytes_of(call: Call) -> list[Traffic]:
        return traffic(call, kind)

    def splits(call: Call) -> dict[int, int]:
        # An op around one of these has other operands: it says itself which of them are the same.
        return split_bytes(call, SOURCE) if kind.planes > 1 and (call.op in (*IMAGE_OPS, WITH_MOMENTS) or epilogue_of(call.op)) else {}

    def pitched(call: Call, side: str, at: int, alignment: int) -> bool:
        # What is split into planes is read in one piece.
        return image_part(call, side, at, alignment) and (kind.planes == 1 or side == "out" or at not in SOURCE)

    named: dict[str, Any] = {"exactly": True, "engine": "wgmma", "estimate": estimate, "pitched": pitched}
    impl = Impl(bind, scratch, supports, tile, pack_filters, _PACKED[precision], (9, 0), tiles, bytes_of, splits, **named)
    return dict.fromkeys((*IMAGE_OPS, WITH_MOMENTS, *(BY_PATCHES if kind.planes == 1 else ())), impl)


def _patch_tiles(call: Call, kind: Kind, target: Target) -> list[PatchTile]:
    """The patch tiles that serve a call.

    Swapped products read a mask of four bytes word by word, which made a residual network's gradient of 64 channels take 87.5 instead of 79.1 µs.
    """
    g, wanted = correlation(call), kind_of(call)
    found = patch.candidates(g, kind, target, wanted)
    if wanted == "sums":
        # Chunks are equal, so the last tile must have as many images as the others.
        found = [tile for tile in found if tile.chunk(g)]
    return [tile for tile in found if not tile.swapped] if wanted in ("mask", "sums") and kind.result > 2 else found


def _cycles(call: Call, kind: Kind, tile: Tile | PatchTile, target: Target) -> float:
    """Estimated time of a call with a tile."""
    g, wanted = correlation(call), kind_of(call)
    if isinstance(tile, PatchTile):
        return cycles(patch.work(g, kind, tile, wanted), RATES["patches", kind.name], target)
    return cycles(work(g, kind, tile, wanted), RATES["columns", kind.name], target)


def _microseconds(call: Call, kind: Kind, target: Target) -> float:
    """Estimated time of the launch of the product beside other engines."""
    g, wanted, tile = correlation(call), kind_of(call), call.tile
    if isinstance(tile, PatchTile):
        kernel, asked, (down, across) = "patches", patch.work(g, kind, tile, wanted), patch.tiles_of(g, tile)
    else:
        kernel, asked, (down, across) = "columns", work(g, kind, tile, wanted), tiles_of(g, tile)
    # Tiles of a column of channels read the same filters, as many of them as run at a time.
    at_once = min(asked.tiles, target.multiprocessors * asked.together)
    keeps = isinstance(tile, PatchTile) and tile.keeps
    asked = replace(asked, readers=0.0 if keeps else min(down, max(1.0, at_once / across)), padded=whole(g.C, kind.channels) / g.C)
    if isinstance(tile, Tile):
        asked = replace(asked, lines=kind.planes * (tile.BM * lines_of(g.C * kind.element, PART) + tile.BN))
    launch, rates = BESIDE[kernel, kind.name]
    return launch + cycles(asked, rates, target) / CYCLES_A_MICROSECOND


def _row(g: Correlation, kind: Kind) -> int:
    """Elements of a row of packed filters: those of each tap in whole steps, since TMA reads zeros behind the last channel of a pixel."""
    return g.taps * whole(g.C, kind.channels)


def _filters_packed(call: Call, kind: Kind) -> int:
    """Elements of the packed filters."""
    g = correlation(call)
    return g.phases * g.K * _row(g, kind)


def _operands(g: Correlation, e: Epilogue) -> tuple[Any, np.int32, np.float32]:
    """(bias, its elements: K or none, the least result) as kernels take them. A ReLU is a floor of 0: no kernel is compiled for it."""
    b = constant(np.zeros(1, np.float32)) if e.b is None else e.b
    return b, np.int32(0 if e.b is None else g.K), np.float32(0 if e.kind == "pool" or e.after is RELU.function else -np.inf)


def _activation(e: Epilogue) -> Any:
    """The activation that is no floor, a device function; None if there is none."""
    return None if e.after is RELU.function else e.after


def _stored(g: Correlation, e: Epilogue) -> str:
    """The epilogue as kernels take it: of four phases rows are interleaved, where x is positive or everywhere."""
    return {"rows": "interleave", "mask": "interleave mask"}.get(e.kind, e.kind) if g.phases > 1 else e.kind


def _bind(call: Call, kind: Kind) -> list[Launch]:
    g = correlation(call)
    if isinstance(call.tile, PatchTile):
        return [_bind_patches(call, g, kind)]
    if kind.planes > 1:
        source, filters, first = _split(call, kind)
        return [*first, _bind_columns(call, g, kind, source, filters, g.C)]
    return [_bind_columns(call, g, kind, call.ins[0], call.packed, int(call.channels("in", 0)))]


def _bind_columns(call: Call, g: Correlation, kind: Kind, source: Any, filters: Any, apart: int) -> Launch:
    """The kernel that takes any correlation: TMA's im2col makes the columns of a source whose pixels lie `apart` elements from each other."""
    tile, y, e = call.tile, call.outs[0], epilogue(call)
    b, biased, floor = _operands(g, e)
    rows = g.phases * g.K
    lower, upper = g.corners
    maps = tensor_maps.upload(
        tensor_maps.encode_im2col(source, (kind.planes * g.N, g.H, g.W, g.C), apart, lower, upper, g.stride, kind.channels, tile.BM),
        tensor_maps.encode_tiled(filters, (_row(g, kind), kind.planes * rows), (kind.channels, tile.BN)),
    )
    down, across = tiles_of(g, tile)
    channels, steps = whole(g.C, kind.channels), _row(g, kind) // kind.channels
    pixels = (call.channels("out", 0), call.channels("in", 2) if e.kind == "mask" else 0)
    scalars = (g.N, channels, g.P, g.Q, g.K, rows, g.R, g.S, g.stride, g.top, g.left, across, steps, *pixels)
    args = (maps, b, biased, floor, y if e.x is None else e.x, y, y if e.second is None else e.second, *(np.int32(v) for v in scalars))
    kernel = correlate(tile, kind.name, _stored(g, e), g.spans, steps_of_tap(g.C, kind), _activation(e))
    return Launch(kernel, down * across, tile.threads, args, shared_bytes(tile, kind), keep=(maps, source, filters))


def _bind_patches(call: Call, g: Correlation, kind: Kind) -> Launch:
    """The kernel that keeps patches of the source in shared memory."""
    tile, y, w, e = call.tile, call.outs[0], patch.window(g), epilogue(call)
    b, biased, floor = _operands(g, e)
    # The inputs that come to the stage: x or the mask; with sums the y that masks; the second gradient. None: y, for what there is not.
    stored, norm = _stored(g, e), [b] * 4
    staged: list[int | None] = [2] if e.kind in ("mask", "sums") else []
    if e.kind == "sums":
        norm, masked, added = list(call.ins[3:7]), call.attrs["masked"], call.attrs["added"]
        staged += [7 if masked else None, 7 + masked if added else None]
        stored = f"{'interleave ' * (g.phases > 1)}{'add ' * added}{'mask ' * masked}sums"
    elif call.op == WITH_SECOND:
        staged, stored = [2, None, 3], f"{'interleave ' * (g.phases > 1)}add mask"
    PH, PW = patch.patch_extent(tile, w)
    step, square, from_pixel = g.stride, (ROW_BYTES // kind.result, SQUARE, SQUARE, 1), int(call.channels("in", 0))

    def source(u: int, v: int) -> np.ndarray:
        """The map of the source's lines and columns that meet the taps u, u + stride, … × v, v + stride, …"""
        first = ((u - g.top) % step * g.W + (v - g.left) % step) * from_pixel
        shape, strides = (g.C, g.W // step, g.H // step, g.N), tuple(each * from_pixel for each in (step, step * g.W, g.H * g.W))
        return tensor_maps.encode_tiled(call.ins[0], shape, (kind.channels, PW, PH, tile.TN), first=first, strides=strides)

    def output(at: int | None, r: int, s: int, apart: int) -> np.ndarray:
        """The map of every `apart`-th pixel of images from (r, s) on, in squares: those of y (None) or of input `at`."""
        array, pixel = (y, int(call.channels("out", 0))) if at is None else (call.ins[at], int(call.channels("in", at)))
        line = apart * g.Q * pixel
        strides = (apart * pixel, apart * line, apart * g.P * line)
        return tensor_maps.encode_tiled(array, (g.K, g.Q, g.P, g.N), square, first=r * line + s * pixel, strides=strides)

    apart = 1 if g.phases == 1 else 2
    outputs = [] if stored == "pool" else [output(at, r, s, apart) for at in (None, *staged) for r in range(apart) for s in range(apart)]
    maps = tensor_maps.upload(
        *(source(u, v) for u in range(step) for v in range(step)),
        tensor_maps.encode_tiled(call.packed, (_row(g, kind), g.phases * g.K), (kind.channels, tile.BN)),
        *outputs,
    )
    down, across = patch.tiles_of(g, tile)
    scalars = (g.N, whole(g.C, kind.channels), g.P, g.Q, g.K, g.top, g.left, across, down * across)
    args = (maps, b, biased, floor, y, y if e.second is None else e.second, *norm, *(np.int32(v) for v in scalars))
    kernel = correlate_patches(tile, kind.name, w, stored, call.attrs.get("activation", ""), _activation(e))
    shared = patch.shared_bytes(tile, kind, w) + patch.sums_bytes(tile, kind, e.kind)
    return Launch(kernel, tile.resident, patch.threads_of(tile, e.kind), args, shared, keep=(maps, call.ins, call.packed))


def _split(call: Call, kind: Kind) -> tuple[Any, Any, list[Launch]]:
    """Source and filters as planes of bfloat16 in scratch, and the launches that make them."""
    (source,), first, rest = in_planes(call, SOURCE)
    count = _filters_packed(call, kind)
    filters, _ = planes_of(rest, count)
    return source, filters, [*first, launch_split(call.packed, filters, count)]


def traffic(call: Call, kind: Kind) -> list[Traffic]:
    """Bytes of every launch of a pass over images."""
    g = correlation(call)
    mask = sum(size(call, "in", at) for at in range(2, len(call.in_shapes))) if kind_of(call) in ("mask", "sums") else 0
    first = []
    if kind.planes > 1:
        first = [*traffic_of_planes(call, SOURCE), split_traffic(_filters_packed(call, kind))]
    pixels, down = _patches(g, call.tile) if isinstance(call.tile, PatchTile) else _columns(g, call.tile)
    source = kind.planes * kind.element * g.N * g.C
    tap = kind.element * whole(g.C, kind.channels)
    read = source * pixels * ceil_div(g.K, call.tile.BN) + tap * _filters(g, call.tile.BN, kind.planes) * down + mask
    taps = g.phases * g.taps if g.spans is None else g.spans.total
    distinct = source * g.H * g.W + tap * kind.planes * taps * g.K + mask
    return [*first, Traffic(read, outputs(call), distinct)]


def _filters(g: Correlation, columns: int, planes: int) -> int:
    """Taps of filters that the tiles of `columns` channels of one row of tiles read: those of all planes and phases, row by row."""
    parts = planes * g.phases
    if g.spans is None:
        return clipped(g.K, columns, parts) * g.taps
    # What the tiles of the last parts read is what they add to those of the others.
    return sum((clipped(g.K, columns, part + 1) - clipped(g.K, columns, part)) * g.spans.taps(-1 - part & 3) for part in range(parts))


def _shifts(g: Correlation) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """(shift, first tap, behind the last) of lines and of columns of every phase that has taps; phases are all pairs of them."""
    if g.spans is None:
        shifts = range(1 if g.phases == 1 else 2)
        return [(shift, 0, g.R) for shift in shifts], [(shift, 0, g.S) for shift in shifts]
    of = [[(shift, first, end) for shift, (first, end) in enumerate(axis) if first < end] for axis in (g.spans.rows, g.spans.columns)]
    return of[0], of[1]


def _columns(g: Correlation, tile: Tile) -> tuple[int, int]:
    """Pixels of an image that TMA's im2col brings to the tiles of one column of channels, in all phases, and rows of tiles."""
    of_rows, of_columns = _shifts(g)
    down = sum(windows(g.P, end - first, g.H, g.stride, g.top - shift - first)[0] for shift, first, end in of_rows)
    across = sum(windows(g.Q, end - first, g.W, g.stride, g.left - shift - first)[0] for shift, first, end in of_columns)
    return down * across, tiles_of(g, tile)[0]


def _patches(g: Correlation, tile: PatchTile) -> tuple[int, int]:
    """The same of patches: every pixel of a patch once, however many taps see it; one patch for each parity of lines and columns."""
    PH, PW = patch.patch_extent(tile, patch.window(g))
    of_rows, of_columns = _shifts(g)

    def along(count: int, extent: int, size: int, step: int, before: int, shifts: Sequence[tuple[int, int, int]]) -> int:
        firsts = (shift + (parity - before) // g.stride for shift, _, _ in shifts for parity in range(g.stride))
        return sum(windows(count // step, extent, size // g.stride, step, -first)[0] for first in firsts)

    pixels = along(g.P, PH, g.H, tile.TH, g.top, of_rows) * along(g.Q, PW, g.W, tile.TW, g.left, of_columns)
    return pixels, patch.tiles_of(g, tile)[0]
