"""A folded upsampling's fprop with nine products (fp32, NHWC), where four phases have 16 and the plain form 36.

Along one axis, the output pixels 2i and 2i+1 of the doubled image see x[i-1], x[i], x[i+1] through the taps w0, w1, w2 as

    y[2i] = w0·(x[i-1] - x[i]) + (w0+w1+w2)·x[i]        y[2i+1] = (w0+w1+w2)·x[i] + w2·(x[i+1] - x[i])

three products for two outputs; in two dimensions nine for four. So, with the 3×3 neighbourhood D of a pixel of x,

    E = P w Pᵀ,  P = [1 0 0; 1 1 1; 0 0 1]      A = the differences and the middle of D, both ways      y = Q [Σ_c E ⊙ A] Qᵀ,  Q = [1 1 0; 0 1 1]

has the form of Winograd's convolution (winograd.py), with the same kernels. Differences beside the border count what lies
outside as zero.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.activations.table import epilogue_function
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.conv.simt.tiles import Product, product_cycles
from nbcnn.ops.conv.winograd.engine import BYTES, Scratch, WinogradTile, launch_filters, launch_images, launch_input
from nbcnn.ops.conv.winograd.product import launch_rows, rows_traffic
from nbcnn.ops.conv.winograd.transform import filters_traffic, images_traffic, input_traffic
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND, estimate
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.op import Map, Op

VALUES = 9


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    C, K = call.in_shapes[0][1], call.in_shapes[1][0]
    if reason := not_nhwc(call, "nine products are made of"):
        return reason
    if C % 16 or K % 16:
        return f"{C} to {K} channels: nine products need multiples of 16"
    return too_large(call.out_shapes[0])


def tile(call: Call, target: Target) -> WinogradTile:
    """The tile: as many images at a time as `BYTES` hold the transformed values of; large blocks."""
    (N, C, H, W), K = call.in_shapes[0], call.in_shapes[1][0]
    images = max(1, min(N, BYTES // (4 * VALUES * H * W * max(C, K))))
    return WinogradTile(images, 128, 128, 8, 8) if K > 64 else WinogradTile(images, 64, 64, 8, 4)


def _sizes(call: Call) -> tuple[int, int, int]:
    """Floats of the transformed filters, and of the images that are worked on at a time: read and made."""
    (N, C, H, W), K = call.in_shapes[0], call.in_shapes[1][0]
    chunk = VALUES * min(N, call.tile.images) * H * W
    return VALUES * C * K, chunk * C, chunk * K


def scratch(call: Call) -> int:
    """Bytes of the transformed values."""
    return 4 * sum(_sizes(call))


def bind(call: Call) -> list[Launch]:
    """x (N,C,H,W), w (K,C,3,3), b (K) -> y (N,K,2H,2W)."""
    (N, C, H, W), K, tile = call.in_shapes[0], call.in_shapes[1][0], call.tile
    after, room = epilogue_function(call), Scratch(call)
    u, v, m = (room.take(size) for size in _sizes(call))
    made = [launch_filters("doubled", call.packed, u, C, K)]
    for first in range(0, N * H * W, tile.images * H * W):
        tiles = min(tile.images * H * W, N * H * W - first)
        made += [
            launch_input("doubled", call.ins[0], v, first, tiles, H, W, C),
            launch_rows(v, u, m, VALUES, tiles, K, C, tile.product),
            launch_images("doubled", m, call.ins[2], after, None, call.outs[0], first, tiles, 2 * H, 2 * W, K),
        ]
    return made


def pack(call: Call) -> np.ndarray:
    """w (K,C,3,3) as [3×3][C][K]."""
    return im2col.pack_fprop(call)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    (N, C, H, W), K, tile = call.in_shapes[0], call.in_shapes[1][0], call.tile
    made = [filters_traffic("doubled", C, K)]
    for first in range(0, N * H * W, tile.images * H * W):
        tiles = min(tile.images * H * W, N * H * W - first)
        made += [
            input_traffic("doubled", tiles, H, W, C),
            rows_traffic(VALUES, tiles, K, C, tile.product),
            images_traffic("doubled", tiles, K, None),
        ]
    return made


def products(call: Call, target: Target) -> float:
    """Microseconds of the products of all values: nine matrices for the images that are worked on at a time."""
    (N, C, H, W), K = call.in_shapes[0], call.in_shapes[1][0]
    source, result = (K, C) if call.op.direction == "dgrad" else (C, K)
    sizes = (H * W * min(call.tile.images, N - first) for first in range(0, N, call.tile.images))
    return sum(product_cycles(call.tile.product, Product(rows, result, source, copies=VALUES), target) for rows in sizes) / CYCLES_A_MICROSECOND


_IMPL = Impl(bind, scratch, supports, tile, pack, traffic=traffic, engine="nine products", estimate=estimate("nine products", products, traffic))

FUSED = {Op("upconv", "fprop"): _IMPL, Op("upconv", "fprop", after=(Map("relu"),)): _IMPL}
"""For large batches and channels in sixteens; im2col_fused.py serves the rest."""
