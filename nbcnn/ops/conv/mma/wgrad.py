"""Weight gradients on mma.sync, for every shape: conv_wgrad, and upconv_wgrad with the upsampling folded away; bias gradients on the way.

Both are one correlation of a shifted operand with a stationary one (`wgrad_kernel`), cut along the pixels, and an ordered sum of the parts.

    conv_wgrad    shifted x, stationary dy: dw[k][c][r,s] = Σ dy[n,k,p,q] · x[n,c, stride·p + r − pad, stride·q + s − pad]
    upconv_wgrad  shifted dy, stationary x: dG[u,v] = Σ dy[2i + u − 1, 2j + v − 1] · x[i, j], 16 products of small images instead of nine of
                  doubled ones (36 in the same measure); dW = Sᵀ dG S while the parts are added.

tf32 multiplies operands as they lie, rounded by whoever wrote them. fp32 splits each into two tf32, and makes three products of them.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from nbcnn.ops.conv.frame.wgrad import correlation, is_up, operands
from nbcnn.ops.conv.frame.wgrad_sum import MOST_TAPS, launch_sum, sum_traffic
from nbcnn.ops.conv.mma import wgrad_tile
from nbcnn.ops.conv.mma.wgrad_kernel import pixel_product
from nbcnn.ops.conv.mma.wgrad_load import MOST_ROWS, width_of
from nbcnn.ops.conv.mma.wgrad_tile import KINDS, Kind, PixelTile, padded_channels
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, windows
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import numel

_INNER_TAPS = 4


def refusal(call: Call, kind: Kind) -> str | None:
    """None if the kernel serves the call, else the reason in words."""
    if call.layout != "NHWC":
        return "the mma.sync kernels read images stored NHWC"
    if set(call.in_dtypes) != {STORE[kind.name]}:
        return f"operands are not stored as {STORE[kind.name]}"
    g = correlation(call)
    if max(g.R, g.S) > MOST_ROWS or g.R * g.S > MOST_TAPS:
        return f"a filter of {g.R}×{g.S} taps is larger than {MOST_ROWS}×{MOST_ROWS}"
    if max(*map(numel, call.in_shapes), g.K * wgrad_tile.columns(g, kind)) >= 2**31:
        return "a tensor has 2^31 elements or more; element offsets are 32-bit"
    return None


def bias_planes(call: Call, kind: Kind) -> tuple[int, int]:
    """(parts, channels) of the partial bias gradients; no parts where no bias gradient is wanted."""
    g, tile = correlation(call), call.tile
    if len(call.out_shapes) == 1:
        return 0, 0
    if is_up(call):
        return tile.parts(g) * tile.row_tiles(g) * _INNER_TAPS, g.C
    return tile.parts(g) * tile.column_tiles(g, kind), g.K


def scratch(call: Call, kind: Kind) -> int:
    """Bytes of the parts of the weight gradient, and of those of the bias gradient behind them."""
    g = correlation(call)
    parts, count = bias_planes(call, kind)
    return 4 * (call.tile.parts(g) * g.K * wgrad_tile.columns(g, kind) + parts * count)


def bind(call: Call, kind: Kind) -> list[Launch]:
    """x (N,C,H,W), dy -> dw (K,C,R,S)[, db (K)]."""
    g, tile, up = correlation(call), call.tile, is_up(call)
    parts_b, count_b = bias_planes(call, kind)
    partials = call.scratch.view(np.float32)
    partials_b = partials[tile.parts(g) * g.K * wgrad_tile.columns(g, kind) :] if parts_b else partials
    rows, columns = tile.row_tiles(g), tile.column_tiles(g, kind)
    dn, rest = divmod(tile.BK, g.P * g.Q)
    sizes = (g.K, g.C, g.H, g.W, g.P, g.Q, g.R, g.S, g.stride, g.top, g.left, g.GM, tile.steps(g), columns, rows, dn, *divmod(rest, g.Q))
    widths = width_of(g.K, kind.element), width_of(g.C, kind.element)
    kernel = pixel_product(wgrad_tile.unsplit(tile), kind.name, *widths, "" if not parts_b else "shifted" if up else "stationary")
    args = (*operands(call), partials, partials_b, *map(np.int32, sizes))
    db = call.outs[1] if parts_b else None
    bias = partials_b, db, count_b, parts_b
    return [
        Launch(kernel, (rows * columns, tile.parts(g)), tile.threads, args, shared=tile.shared_bytes(kind), name=call.op),
        launch_sum(partials, call.outs[0], g.K, g.C, g.R * g.S, tile.parts(g), up, *bias, pitch=padded_channels(g, kind)),
    ]


def traffic(call: Call, kind: Kind) -> list[Traffic]:
    """Bytes of `bind`: the stationary operand once a column of tiles, the shifted one once a row of tiles and tap."""
    g, tile = correlation(call), call.tile
    down, rows = windows(g.P, g.R, g.H, g.stride, g.top)
    across, columns = windows(g.Q, g.S, g.W, g.stride, g.left)
    stationary, shifted = kind.element * g.GM * g.K, kind.element * g.N * g.C
    parts_b, count_b = bias_planes(call, kind)
    read = stationary * tile.column_tiles(g, kind) + shifted * down * across * tile.row_tiles(g)
    partials = 4 * tile.parts(g) * g.K * wgrad_tile.columns(g, kind)
    # The sum reads whole quads of channels.
    pitch = 4 * ceil_div(g.C, 4)
    total = sum_traffic(call, 4 * tile.parts(g) * g.K * g.R * g.S * pitch + 4 * parts_b * count_b)
    return [Traffic(read, partials + 4 * parts_b * count_b, stationary + shifted * rows * columns), total]


def tile(call: Call, multiprocessors: int, kind: Kind) -> PixelTile:
    """The tile for this shape and number of multiprocessors."""
    return wgrad_tile.choose(correlation(call), kind, multiprocessors)


def candidates(call: Call, multiprocessors: int, kind: Kind) -> list[PixelTile]:
    """The tiles that an autotuner should try."""
    return list(wgrad_tile.candidates(correlation(call), kind, multiprocessors))


def implementation(kind: Kind) -> Impl:
    """Weight gradients in one precision."""
    return Impl(
        partial(bind, kind=kind),
        partial(scratch, kind=kind),
        partial(refusal, kind=kind),
        partial(tile, kind=kind),
        needs=(8, 0),
        candidates=partial(candidates, kind=kind),
        traffic=partial(traffic, kind=kind),
    )


IMPLS = {name: implementation(kind) for name, kind in KINDS.items()}


def ops(precision: str) -> dict[str, Impl]:
    """What this module implements in `precision`, by op."""
    return {"conv_wgrad": IMPLS[precision], "upconv_wgrad": IMPLS[precision]}
