"""The fused convolutions on CUDA cores (row `im2col`, fp32, NHWC): the kernels of im2col.py and im2col_wgrad.py with another
end, other filters, or another window. What each op is: fused.py; why an upsampling can be folded away: folded.py.

    conv_relu_fprop                      fprop, ReLU before the store
    conv_relu_pool_fprop                 fprop, pixels numbered by windows; ReLU, maximum and index before the store
    conv_dgrad_relu                      dgrad, zero where x is not positive
    upconv_fprop, upconv_relu_fprop      four products with 2×2 filters, one a phase; 16 multiplications where the plain form has 36
    upconv_dgrad, upconv_dgrad_relu      one product with a 4×4 window of stride 2 over dy; 16 instead of 36
    upconv_wgrad                         wgrad with x and dy exchanged and that 4×4 window, then sums of its taps; 16 instead of 36
    upconv_mse_fprop, conv_pool_wgrad    put together from these and other ops (composed.py)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.ops import mse, unpool
from nbcnn.ops.call import Call, Impl, Launch
from nbcnn.ops.conv import composed, im2col, im2col_wgrad
from nbcnn.ops.conv.folded import TERMS, gradient_filters, phase_filters
from nbcnn.ops.conv.im2col import Window, launches, padded, shape_of
from nbcnn.ops.conv.splitk_fused import launch_sum_folded
from nbcnn.ops.conv.tiles import Tile, choose
from nbcnn.shapes import ConvShape, numel


def supports(call: Call) -> str | None:
    """None, or the reason in words."""
    return None if call.layout == "NHWC" else "the fused convolutions read images stored NHWC"


def bind_fprop(call: Call) -> list[Launch]:
    """x, w, b -> y (conv_relu_fprop) or y, index (conv_relu_pool_fprop)."""
    c = shape_of(call)
    x, _, b = call.ins
    pooled = len(call.outs) == 2
    window = Window(c.R, c.S, c.stride, after="pool" if pooled else "relu")
    extents = (c.N, c.C, c.H, c.W, c.P, c.Q, c.pad, c.pad)
    return launches(call, x, b, call.outs[0], c.K, extents, window, call.outs[1] if pooled else None)


def bind_dgrad_relu(call: Call) -> list[Launch]:
    """dy, w, x -> dx, zero where x is not positive."""
    c = shape_of(call)
    dy, _, x = call.ins
    extents = (c.N, c.K, c.P, c.Q, c.H, c.W, c.R - 1 - c.pad, c.S - 1 - c.pad)
    return launches(call, dy, None, call.outs[0], c.C, extents, Window(c.R, c.S, 1, c.stride, after="mask"), x)


def bind_up_fprop(call: Call) -> list[Launch]:
    """x (N,C,H,W), w, b -> y (N,K,2H,2W): phase (r,s) reads x from row i-1+r and column j-1+s on."""
    N, C, H, W = call.in_shapes[0]
    x, _, b = call.ins
    window = Window(2, 2, after="relu" if call.op == "upconv_relu_fprop" else "", phases=True)
    return launches(call, x, b, call.outs[0], call.in_shapes[1][0], (N, C, H, W, H, W, 1, 1), window)


def bind_up_dgrad(call: Call) -> list[Launch]:
    """dy (N,K,2H,2W), w[, x] -> dx (N,C,H,W)."""
    (N, K, H2, W2), (_, C, H, W) = call.in_shapes[0], call.out_shapes[0]
    masked = len(call.ins) == 3
    window = Window(4, 4, 2, after="mask" if masked else "")
    return launches(call, call.ins[0], None, call.outs[0], C, (N, K, H2, W2, H, W, 1, 1), window, call.ins[2] if masked else None)


def exchanged(call: Call) -> ConvShape:
    """The convolution whose weight gradient is dG of an upconv_wgrad: it reads dy and gives x, window 4×4, stride 2."""
    (N, C, _, _), (_, K, H2, W2) = call.in_shapes
    return ConvShape(N, K, H2, W2, C, 4, 4, 2, 1)


def bind_up_wgrad(call: Call) -> list[Launch]:
    """x (N,C,H,W), dy (N,K,2H,2W) -> dw (K,C,3,3), db (K)."""
    (x, dy), (dw, db) = call.ins, call.outs
    product, partials, partials_b = im2col_wgrad.launch_product(call, exchanged(call), dy, x, "B")
    K, C = call.out_shapes[0][:2]
    return [product, launch_sum_folded(partials, partials_b, dw, db, K, C, call.tile.split)]


def _columns(index: np.ndarray) -> np.ndarray:
    """Index map (terms, …, columns) with the columns padded by -1 to whole float4s, flat but for the terms."""
    spare = padded(index.shape[-1]) - index.shape[-1]
    return np.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, spare)], constant_values=-1).reshape(TERMS, -1)


def _positions(call: Call) -> np.ndarray:
    return np.arange(numel(call.in_shapes[1]), dtype=np.int32).reshape(call.in_shapes[1])


def pack_up_fprop(call: Call) -> np.ndarray:
    """Sums of w (K,C,3,3) as [d][e][C][phase][K]."""
    return _columns(phase_filters(_positions(call)).transpose(0, 4, 5, 3, 1, 2))


def pack_up_dgrad(call: Call) -> np.ndarray:
    """Sums of w (K,C,3,3) as [u][v][K][C]."""
    return _columns(gradient_filters(_positions(call)).transpose(0, 3, 4, 1, 2))


def tile_up_fprop(call: Call, multiprocessors: int) -> Tile:
    (N, C, H, W), K = call.in_shapes[0], call.in_shapes[1][0]
    return choose(4 * N * H * W, K, 4 * C, multiprocessors, C % 16 == 0, False)


def tile_up_dgrad(call: Call, multiprocessors: int) -> Tile:
    K, (N, C, H, W) = call.in_shapes[0][1], call.out_shapes[0]
    return choose(N * H * W, C, 16 * K, multiprocessors, K % 16 == 0, False)


def tile_up_wgrad(call: Call, multiprocessors: int) -> Tile:
    c = exchanged(call)
    return choose(*c.gemm("wgrad"), multiprocessors, c.C % 4 == 0 and c.K % 4 == 0, True)


def scratch(call: Call) -> int:
    """Bytes of the partial outputs, if GK is split: four times as many rows as y has, if those are pooled."""
    rows = 4 if call.op == "conv_relu_pool_fprop" else 1
    return 4 * call.tile.split * rows * numel(call.out_shapes[0]) if call.tile.split > 1 else 0


def scratch_up_wgrad(call: Call) -> int:
    """Bytes of the partial dG, and of the partial sums of its columns behind them."""
    GM, GN, _ = exchanged(call).gemm("wgrad")
    return 4 * call.tile.split * (GM + 1) * GN


def _impl(bind: Any, tile: Any, pack: Any) -> Impl:
    return Impl(bind, scratch, supports, tile, pack)


_UP = _impl(bind_up_fprop, tile_up_fprop, pack_up_fprop)
_UP_DGRAD = _impl(bind_up_dgrad, tile_up_dgrad, pack_up_dgrad)

FUSED = {
    "conv_relu_fprop": _impl(bind_fprop, im2col.tile, im2col.pack_fprop),
    "conv_relu_pool_fprop": _impl(bind_fprop, im2col.tile, im2col.pack_fprop),
    "conv_dgrad_relu": _impl(bind_dgrad_relu, im2col.tile, im2col.pack_dgrad),
    "conv_pool_wgrad": composed.pool_wgrad(im2col.OPS["conv_wgrad"], unpool.IMPL),
    "unpool": unpool.IMPL,
    "upconv_fprop": _UP,
    "upconv_relu_fprop": _UP,
    "upconv_mse_fprop": composed.upconv_mse(_UP, mse.FPROP, mse.DGRAD),
    "upconv_dgrad": _UP_DGRAD,
    "upconv_dgrad_relu": _UP_DGRAD,
    "upconv_wgrad": Impl(bind_up_wgrad, scratch_up_wgrad, supports, tile_up_wgrad),
}
"""The fused convolutions of row `im2col`: every shape, NHWC, float32."""
