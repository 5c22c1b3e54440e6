"""The ops that the correlation kernel serves, bound: tensor maps, arguments, grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.ops.conv.frame.correlation import Correlation, correlation, pack, refusal
from nbcnn.ops.conv.wgmma import patch
from nbcnn.ops.conv.wgmma.engine_traffic import traffic
from nbcnn.ops.conv.wgmma.kernel import correlate
from nbcnn.ops.conv.wgmma.patch import PatchTile
from nbcnn.ops.conv.wgmma.patch_kernel import correlate_patches
from nbcnn.ops.conv.wgmma.split import PLANES, launch_split
from nbcnn.ops.conv.wgmma.tile import KINDS, Kind, Tile, candidates, choose, shared_bytes, tiles_of
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.shapes import numel

IMAGE_OPS = (
    "conv_fprop",
    "conv_relu_fprop",
    "conv_relu_pool_fprop",
    "conv_dgrad",
    "conv_dgrad_relu",
    "upconv_fprop",
    "upconv_relu_fprop",
    "upconv_dgrad",
    "upconv_dgrad_relu",
)
_PACKED = {"bf16": "bfloat16", "tf32": "tfloat32", "fp32": "float32"}
_SPLIT_ALIGNMENT = 256


def implementations(precision: str) -> dict[str, Impl]:
    """The passes over images in one precision, by op."""
    kind = KINDS[precision]

    def pooled(call: Call) -> bool:
        return "pool" in call.op

    def supports(call: Call) -> str | None:
        reason = refusal(call, kind.channels)
        if reason:
            return reason
        g = correlation(call)
        if pooled(call) and not candidates(g, kind, True):
            return f"no tile is whole pairs of rows of {g.Q} pixels"
        return None

    def tile(call: Call, multiprocessors: int) -> Tile | PatchTile:
        g = correlation(call)
        return patch.choose(g, kind, multiprocessors) or choose(g, kind, pooled(call), multiprocessors)

    def tiles(call: Call, multiprocessors: int) -> Sequence[Tile | PatchTile]:
        g = correlation(call)
        return [*candidates(g, kind, pooled(call)), *patch.candidates(g, kind, multiprocessors)]

    def scratch(call: Call) -> int:
        return sum(_planes_bytes(correlation(call))) if kind.planes > 1 else 0

    def bind(call: Call) -> list[Launch]:
        return _bind(call, kind)

    def bytes_of(call: Call) -> list[Traffic]:
        return traffic(call, kind)

    impl = Impl(bind, scratch, supports, tile, pack, _PACKED[precision], (9, 0), tiles, bytes_of, exactly=True)
    return dict.fromkeys(IMAGE_OPS, impl)


def _planes_bytes(g: Correlation) -> tuple[int, int]:
    """Bytes of the planes of the source and of the filters, the first rounded up so that the second is aligned."""
    source = 2 * PLANES * g.N * g.H * g.W * g.C
    return -(-source // _SPLIT_ALIGNMENT) * _SPLIT_ALIGNMENT, 2 * PLANES * g.phases * g.K * g.GK


@dataclass(frozen=True)
class _Epilogue:
    """What a call wants done with its sums: bias (`biased` elements, K or none), the least result, and how they are written."""

    finish: str
    b: Any
    biased: np.int32
    floor: np.float32
    x: Any
    index: Any


def _epilogue(call: Call, g: Correlation) -> _Epilogue:
    y = call.outs[0]
    masked, biased = call.op.endswith("dgrad_relu"), "fprop" in call.op and len(call.ins) > 2
    finish = "mask" if masked else "pool" if "pool" in call.op else "interleave" if g.phases > 1 else "rows"
    return _Epilogue(
        finish,
        call.ins[2] if biased else constant(np.zeros(1, np.float32)),
        np.int32(g.K if biased else 0),
        np.float32(0 if "relu_" in call.op else -np.inf),
        call.ins[2] if masked else y,
        call.outs[1] if len(call.outs) > 1 else y,
    )


def _bind(call: Call, kind: Kind) -> list[Launch]:
    g = correlation(call)
    if isinstance(call.tile, PatchTile):
        return [_bind_patches(call, g, kind)]
    if kind.planes > 1:
        source, filters, first = _split(call, g)
        return [*first, _bind_columns(call, g, kind, source, filters)]
    return [_bind_columns(call, g, kind, call.ins[0], call.packed)]


def _bind_columns(call: Call, g: Correlation, kind: Kind, source: Any, filters: Any) -> Launch:
    """The kernel that takes any correlation: TMA's im2col makes the columns."""
    tile, e, y = call.tile, _epilogue(call, g), call.outs[0]
    rows = g.phases * g.K
    lower, upper = g.corners
    maps = tensor_maps.upload(
        tensor_maps.encode_im2col(source, (kind.planes * g.N, g.H, g.W, g.C), lower, upper, g.stride, kind.channels, tile.BM),
        tensor_maps.encode_tiled(filters, (g.GK, kind.planes * rows), (kind.channels, tile.BN)),
    )
    down, across = tiles_of(g, tile)
    scalars = (g.N, g.C, g.P, g.Q, g.K, rows, g.R, g.S, g.stride, g.top, g.left, across, g.GK // kind.channels)
    args = (maps, e.b, e.biased, e.floor, e.x, y, e.index, *(np.int32(v) for v in scalars))
    kernel = correlate(tile, kind.name, e.finish)
    return Launch(kernel, down * across, tile.threads, args, shared_bytes(tile, kind), keep=(maps, source, filters))


def _bind_patches(call: Call, g: Correlation, kind: Kind) -> Launch:
    """The kernel that keeps patches of the source in shared memory."""
    tile, e, y, w = call.tile, _epilogue(call, g), call.outs[0], patch.window(g)
    PH, PW = patch.patch_extent(tile, w)
    step, square = g.stride, (ROW_BYTES // kind.result, patch.SQUARE, patch.SQUARE, 1)

    def source(u: int, v: int) -> np.ndarray:
        """The map of the source's lines and columns that meet the taps u, u + stride, … × v, v + stride, …"""
        first = ((u - g.top) % step * g.W + (v - g.left) % step) * g.C
        shape, strides = (g.C, g.W // step, g.H // step, g.N), (step * g.C, step * g.W * g.C, g.H * g.W * g.C)
        return tensor_maps.encode_tiled(call.ins[0], shape, (kind.channels, PW, PH, tile.TN), first=first, strides=strides)

    def output(array: Any, r: int, s: int, apart: int) -> np.ndarray:
        """The map of every `apart`-th pixel of images from (r, s) on, in squares."""
        line = apart * g.Q * g.K
        strides = (apart * g.K, apart * line, apart * g.P * line)
        return tensor_maps.encode_tiled(array, (g.K, g.Q, g.P, g.N), square, first=r * line + s * g.K, strides=strides)

    outputs = [output(y, r, s, 2) for r in (0, 1) for s in (0, 1)] if e.finish == "interleave" else [output(y, 0, 0, 1), output(e.x, 0, 0, 1)]
    maps = tensor_maps.upload(
        *(source(u, v) for u in range(step) for v in range(step)),
        tensor_maps.encode_tiled(call.packed, (g.GK, g.phases * g.K), (kind.channels, tile.BN)),
        *([] if e.finish == "pool" else outputs),
    )
    down, across = patch.tiles_of(g, tile)
    scalars = (g.N, g.C, g.P, g.Q, g.K, g.top, g.left, across, down * across)
    args = (maps, e.b, e.biased, e.floor, y, e.index, *(np.int32(v) for v in scalars))
    kernel = correlate_patches(tile, kind.name, w, e.finish)
    return Launch(kernel, tile.resident, tile.threads, args, patch.shared_bytes(tile, kind, w), keep=(maps, call.ins[0], call.packed, e.x))


def _split(call: Call, g: Correlation) -> tuple[Any, Any, list[Launch]]:
    """Source and filters as planes of bfloat16 in scratch, and the launches that make them."""
    source_bytes, filter_bytes = _planes_bytes(g)
    source = call.scratch[:source_bytes].view(np.uint16)
    filters = call.scratch[source_bytes : source_bytes + filter_bytes].view(np.uint16)
    return (
        source,
        filters,
        [launch_split(call.ins[0], source, numel(call.in_shapes[0])), launch_split(call.packed, filters, g.phases * g.K * g.GK)],
    )
