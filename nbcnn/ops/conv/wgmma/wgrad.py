"""Weight gradients on wgmma and TMA: conv_wgrad, and upconv_wgrad with the upsampling folded away; bias gradients on the way.

Both are one correlation of a shifted operand with a stationary one (`wgrad_kernel`), cut along the pixels, and an ordered sum
of the parts (`wgrad_sum`).

    conv_wgrad    shifted x, stationary dy: dw[k][c][r,s] = Σ dy[n,k,p,q] · x[n,c, stride·p + r − pad, stride·q + s − pad]
    upconv_wgrad  shifted dy, stationary x: dG[u,v] = Σ dy[2i + u − 1, 2j + v − 1] · x[i, j], 16 products of small images instead of nine of
                  doubled ones (36 in the same measure); dW = Sᵀ dG S while the parts are added.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from nbcnn.ops.conv.frame.wgrad import correlation, is_up, operands
from nbcnn.ops.conv.frame.wgrad_sum import MOST_TAPS, launch_sum, sum_traffic
from nbcnn.ops.conv.wgmma import wgrad_tile
from nbcnn.ops.conv.wgmma.wgrad_kernel import pixel_product
from nbcnn.ops.conv.wgmma.wgrad_tile import PixelTile
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.tensor_maps import encode_im2col, encode_tiled, upload
from nbcnn.ops.kernel.traffic import Traffic, windows
from nbcnn.plan.shapes import numel


def bias_planes(call: Call) -> tuple[int, int]:
    """(parts, channels) of the partial bias gradients; no parts where no bias gradient is wanted."""
    g = correlation(call)
    if len(call.outs or call.out_shapes) == 1:
        return 0, 0
    parts = call.tile.parts(g)
    return (parts * g.R * g.S, g.C) if is_up(call) else (parts * call.tile.column_tiles(g), g.K)


def refusal(call: Call, *, precision: str) -> str | None:
    """None if the kernel serves the call, else the reason in words."""
    if call.layout != "NHWC":
        return "wgmma reads images stored NHWC"
    g, step = correlation(call), 8 if precision == "bf16" else 4
    if g.C % step or g.K % step:
        return f"{g.C} and {g.K} channels are not both multiples of {step}, the 16 bytes that TMA addresses"
    if min(*g.corners[0], *g.corners[1]) < -128 or max(*g.corners[1], g.R, g.S) > 127 or g.stride > 8:
        return "the window exceeds what TMA addresses"
    if g.R * g.S > MOST_TAPS:
        return f"a filter of more than {MOST_TAPS} taps"
    if max(*map(numel, call.in_shapes), numel(call.out_shapes[0]) * wgrad_tile.MOST_SPLIT) >= 2**31:
        return "a tensor has 2^31 elements or more; element offsets are 32-bit"
    return None


def bind(call: Call) -> list[Launch]:
    """x (N,C,H,W), dy -> dw (K,C,R,S)[, db (K)]."""
    g, tile = correlation(call), call.tile
    stationary, shifted = operands(call)
    taps, up = g.R * g.S, is_up(call)
    parts_b, count_b = bias_planes(call)
    partials = call.scratch.view(np.float32)
    partials_b = partials[tile.parts(g) * g.K * taps * g.C :] if parts_b else partials
    maps = upload(
        encode_tiled(stationary, (g.K, g.GM), (tile.panel, tile.BK)),
        encode_im2col(shifted, (g.N, g.H, g.W, g.C), *g.corners, g.stride, tile.panel, tile.BK),
    )
    columns = tile.column_tiles(g)
    sizes = (g.K, g.C, g.P, g.Q, g.R, g.S, g.stride, g.top, g.left, tile.pixel_steps(g), tile.steps(g), columns)
    kernel = pixel_product(wgrad_tile.unsplit(tile), "" if not parts_b else "shifted" if up else "stationary")
    args = (maps, partials, partials_b, *map(np.int32, sizes))
    db = call.outs[1] if parts_b else None
    return [
        Launch(kernel, (tile.row_tiles(g) * columns, tile.parts(g)), tile.threads(db is not None), args, shared=tile.shared_bytes, name=call.op),
        launch_sum(partials, call.outs[0], g.K, g.C, taps, tile.parts(g), up, partials_b, db, count_b, parts_b),
    ]


def scratch(call: Call) -> int:
    """Bytes of the parts of the weight gradient, and of those of the bias gradient behind them."""
    g = correlation(call)
    parts, count = bias_planes(call)
    return 4 * (call.tile.parts(g) * g.K * g.R * g.S * g.C + parts * count)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: the stationary operand once a column of tiles, the shifted one once a row of tiles and tap.

    Panels beyond the last one of a last column of tiles bring that one again.
    """
    g, tile = correlation(call), call.tile
    down, rows = windows(g.P, g.R, g.H, g.stride, g.top)
    across, columns = windows(g.Q, g.S, g.W, g.stride, g.left)
    panels = g.R * g.S * ceil_div(g.C, tile.panel)
    again = tile.column_tiles(g) * (tile.BN // tile.panel) - panels
    last = windows(g.P, 1, g.H, g.stride, g.top - g.R + 1)[0] * windows(g.Q, 1, g.W, g.stride, g.left - g.S + 1)[0]
    shifted = down * across * g.C + again * last * (g.C - (ceil_div(g.C, tile.panel) - 1) * tile.panel)
    stationary = tile.element * g.GM * g.K
    parts_b, count_b = bias_planes(call)
    partials = 4 * (tile.parts(g) * g.K * g.R * g.S * g.C + parts_b * count_b)
    read = stationary * tile.column_tiles(g) + tile.element * g.N * shifted * tile.row_tiles(g)
    product = Traffic(read, partials, stationary + tile.element * g.N * g.C * rows * columns)
    return [product, sum_traffic(call, partials)]


def tile(call: Call, multiprocessors: int, *, precision: str) -> PixelTile:
    """The tile for this shape and number of multiprocessors."""
    return wgrad_tile.choose(correlation(call), precision, multiprocessors)


def candidates(call: Call, multiprocessors: int, *, precision: str) -> list[PixelTile]:
    """The tiles that an autotuner should try."""
    return list(wgrad_tile.candidates(correlation(call), precision, multiprocessors))


def ops(precision: str) -> dict[str, Impl]:
    """What this module implements in `precision`, by op."""
    impl = Impl(
        bind,
        scratch=scratch,
        supports=partial(refusal, precision=precision),
        tile=partial(tile, precision=precision),
        candidates=partial(candidates, precision=precision),
        needs=(9, 0),
        exactly=True,
        traffic=traffic,
    )
    return {"conv_wgrad": impl, "upconv_wgrad": impl}
