"""The ops that the correlation kernel serves, bound: tensor maps, arguments, grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.ops.call import Call, Impl, Launch
from nbcnn.ops.conv.wgmma import tensor_maps
from nbcnn.ops.conv.wgmma.correlation import Correlation, correlation, pack, refusal
from nbcnn.ops.conv.wgmma.kernel import correlate
from nbcnn.ops.conv.wgmma.split import PLANES, launch_split
from nbcnn.ops.conv.wgmma.tile import KINDS, Kind, Tile, candidates, choose, shared_bytes, tiles_of
from nbcnn.shapes import numel

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

    def tile(call: Call, multiprocessors: int) -> Tile:
        return choose(correlation(call), kind, pooled(call), multiprocessors)

    def tiles(call: Call, multiprocessors: int) -> Sequence[Tile]:
        return candidates(correlation(call), kind, pooled(call))

    def scratch(call: Call) -> int:
        return sum(_planes_bytes(correlation(call))) if kind.planes > 1 else 0

    def bind(call: Call) -> list[Launch]:
        return _bind(call, kind)

    impl = Impl(bind, scratch, supports, tile, pack, _PACKED[precision], (9, 0), tiles)
    return dict.fromkeys(IMAGE_OPS, impl)


def _planes_bytes(g: Correlation) -> tuple[int, int]:
    """Bytes of the planes of the source and of the filters, the first rounded up so that the second is aligned."""
    source = 2 * PLANES * g.N * g.H * g.W * g.C
    return -(-source // _SPLIT_ALIGNMENT) * _SPLIT_ALIGNMENT, 2 * PLANES * g.phases * g.K * g.GK


def _bind(call: Call, kind: Kind) -> list[Launch]:
    g, tile = correlation(call), call.tile
    source, filters, first = call.ins[0], call.packed, []
    if kind.planes > 1:
        source, filters, first = _split(call, g)
    rows = g.phases * g.K
    lower, upper = g.corners
    maps = tensor_maps.upload(
        tensor_maps.encode_im2col(source, (kind.planes * g.N, g.H, g.W, g.C), lower, upper, g.stride, kind.channels, tile.BM),
        tensor_maps.encode_tiled(filters, (g.GK, kind.planes * rows), (kind.channels, tile.BN)),
    )
    y = call.outs[0]
    masked, biased = call.op.endswith("dgrad_relu"), "fprop" in call.op and len(call.ins) > 2
    b = call.ins[2] if biased else y
    x = call.ins[2] if masked else y
    index = call.outs[1] if len(call.outs) > 1 else y
    finish = "mask" if masked else "pool" if "pool" in call.op else "interleave" if g.phases > 1 else "rows"
    kernel = correlate(tile, kind.name, finish, biased, "relu" in call.op and not masked)
    down, across = tiles_of(g, tile)
    scalars = (g.N, g.C, g.P, g.Q, g.K, rows, g.R, g.S, g.stride, g.top, g.left, across, g.GK // kind.channels)
    args = (maps, b, x, y, index, *(np.int32(v) for v in scalars))
    return [*first, Launch(kernel, down * across, tile.threads, args, shared_bytes(tile, kind), keep=(maps, source, filters))]


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
