"""Bytes that the launches of thin/wgrad.py ask memory for (nbcnn/ops/kernel/traffic.py)."""

from __future__ import annotations

from nbcnn.ops.conv.thin.wgrad import ThinGradient, WgradTile, gradient
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, outputs, windows


def partial_traffic(g: ThinGradient, tile: WgradTile) -> Traffic:
    """Bytes of the first launch.

    The TX threads that share channels each load them; a block has half an iteration of pixels on their way that it does not use, and last
    channels stand in for those beyond them.
    """
    across = ceil_div(g.C, tile.TM * tile.TY)
    pixels = ceil_div(g.pixels, tile.CHUNK) * tile.CHUNK + tile.split * tile.SLICES * tile.DEPTH
    # Of a pooled gradient: four pixels have one value and, with three other channels, one byte of index.
    wide, value = (4, 4 + 1 / 4) if g.pooled else (1, 4)
    channels = across * tile.TM * tile.TY * tile.TX
    down, rows = windows(g.H, g.R, g.P, g.stride, g.top)
    right, columns = windows(g.W, g.S, g.Q, g.stride, g.left)
    thin, sums = 4 * g.N * g.T * down * right * across, 4 * g.N * g.P * g.Q * g.T if g.sums else 0
    read = int(pixels * channels / wide * value) + thin + sums
    distinct = int(g.pixels * g.C / wide * value) + 4 * g.N * g.T * max(rows * columns, g.P * g.Q if g.sums else 0)
    return Traffic(read, 4 * tile.split * tile.SLICES * (g.columns * g.C + (g.T if g.sums else 0)), distinct)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `thin_wgrad.bind`."""
    g, tile = gradient(call), call.tile
    return [partial_traffic(g, tile), total_traffic(call, g.R * g.S * g.T * g.C, g.T * g.C * 9, tile.split * tile.SLICES, g.folded)]


def total_traffic(call: Call, sums: int, filters: int, rows: int, folded: bool) -> Traffic:
    """Bytes of `total_kernel`: `rows` partial sums of each of `sums` products and of the bias; `folded`, a filter's tap adds up four of them."""
    written = outputs(call)
    bias = 4 * rows * (written // 4 - (filters if folded else sums))
    return Traffic(4 * rows * (4 * filters if folded else sums) + bias, written, 4 * rows * sums + bias)
