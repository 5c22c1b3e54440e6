"""The fused convolutions on CUDA cores (fp32, NHWC): the kernels of im2col.py and im2col_wgrad.py with another end (FUSED, rows `im2col` and
`cudacore`), or with other filters or another window (FOLDED, row `cudacore`). What each op is: fused.py; why an upsampling can be folded: folded.py.

    conv_relu_fprop                      fprop, ReLU before the store; likewise any other activation, conv_NAME_fprop
    conv_relu_pool_fprop                 fprop, pixels numbered by windows; ReLU, maximum and index before the store
    conv_dgrad_relu                      dgrad, zero where x is not positive
    upconv_fprop, upconv_relu_fprop      four products with 2×2 filters, one a phase; 16 multiplications where the plain form has 36
    upconv_dgrad, upconv_dgrad_relu      one product with a 3×3 window of stride 2 over box sums of dy (box.py); 9 instead of 36
    upconv_wgrad                         wgrad with these box sums in the place of x, and x in that of dy; 9 instead of 36
    upconv_mse_fprop, conv_pool_wgrad    put together from these and other ops (composed.py)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.activations.table import epilogue_function
from nbcnn.ops.conv.frame import composed
from nbcnn.ops.conv.frame.folded import TERMS, phase_filters
from nbcnn.ops.conv.simt import im2col, im2col_wgrad
from nbcnn.ops.conv.simt.box import box_traffic, extents, launch_boxes
from nbcnn.ops.conv.simt.im2col import Window, launches, padded, product_traffic, shape_of
from nbcnn.ops.conv.simt.split_fused import exchanged_traffic, launch_sum_flipped
from nbcnn.ops.conv.simt.tiles import Product, choices
from nbcnn.ops.images import unpool
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.refusals import not_nhwc
from nbcnn.ops.kernel.tiles import partial_bytes
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.losses import pairs
from nbcnn.plan.arena import ALIGNMENT, align
from nbcnn.plan.op import Loss, Map, Mask, Op, Pool, Unpool
from nbcnn.plan.shapes import ConvShape, numel


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    return not_nhwc(call, "the fused convolutions read")


def bind_fprop(call: Call) -> list[Launch]:
    """x, w, b -> y (conv_relu_fprop and other activations) or y, index (conv_relu_pool_fprop)."""
    c = shape_of(call)
    x, _, b = call.ins
    pooled = len(call.outs) == 2
    window = Window(c.R, c.S, c.stride, after="pool" if pooled else epilogue_function(call))
    gather = (c.N, c.C, c.H, c.W, c.P, c.Q, c.pad, c.pad)
    return launches(call, x, b, call.outs[0], c.K, gather, window, call.outs[1] if pooled else None)


def bind_dgrad_relu(call: Call) -> list[Launch]:
    """dy, w, x -> dx, zero where x is not positive."""
    c = shape_of(call)
    dy, _, x = call.ins
    gather = (c.N, c.K, c.P, c.Q, c.H, c.W, c.R - 1 - c.pad, c.S - 1 - c.pad)
    return launches(call, dy, None, call.outs[0], c.C, gather, Window(c.R, c.S, 1, c.stride, after="mask"), x)


def bind_up_fprop(call: Call) -> list[Launch]:
    """x (N,C,H,W), w, b -> y (N,K,2H,2W): phase (r,s) reads x from row i-1+r and column j-1+s on."""
    N, C, H, W = call.in_shapes[0]
    x, _, b = call.ins
    window = Window(2, 2, after=epilogue_function(call), phases=True)
    return launches(call, x, b, call.outs[0], call.in_shapes[1][0], (N, C, H, W, H, W, 1, 1), window)


def _boxes(call: Call, dy: int) -> tuple[Launch, Any, Any]:
    """The launch of the box sums of input `dy`, the sums at the start of scratch, and the scratch behind them."""
    shape, nbytes = call.in_shapes[dy], _box_bytes(call, dy)
    sums = call.scratch[:nbytes].view(np.float32)
    return launch_boxes(call.ins[dy], sums, shape), sums, call.scratch[nbytes:]


def _box_bytes(call: Call, dy: int) -> int:
    return align(4 * numel(extents(call.in_shapes[dy])), ALIGNMENT)


def bind_up_dgrad(call: Call) -> list[Launch]:
    """dy (N,K,2H,2W), w[, x] -> dx (N,C,H,W)."""
    N, C, H, W = call.out_shapes[0]
    masked = len(call.ins) == 3
    box, sums, rest = _boxes(call, 0)
    _, K, high, wide = extents(call.in_shapes[0])
    window, mask = Window(3, 3, 2, after="mask" if masked else None), call.ins[2] if masked else None
    return [box, *launches(replace(call, scratch=rest), sums, None, call.outs[0], C, (N, K, high, wide, H, W, 0, 0), window, mask)]


def exchanged(call: Call) -> ConvShape:
    """The convolution whose weight gradient an upconv_wgrad makes: it reads the box sums of dy and gives x."""
    C, (N, K, high, wide) = call.in_shapes[0][1], extents(call.in_shapes[1])
    return ConvShape(N, K, high, wide, C, 3, 3, 2, 0)


def bind_up_wgrad(call: Call) -> list[Launch]:
    """x (N,C,H,W), dy (N,K,2H,2W) -> dw (K,C,3,3), db (K)."""
    (x, _), (dw, db) = call.ins, call.outs
    box, sums, rest = _boxes(call, 1)
    product, partials, partials_b = im2col_wgrad.launch_product(replace(call, scratch=rest), exchanged(call), sums, x, "B")
    K, C = call.out_shapes[0][:2]
    return [box, product, *launch_sum_flipped(partials, partials_b, dw, db, K, C, call.tile.split)]


def pack_up_fprop(call: Call) -> np.ndarray:
    """Sums of w (K,C,3,3) as [d][e][C][phase][K], K padded by -1 to whole float4s."""
    w = call.in_shapes[1]
    index = phase_filters(np.arange(numel(w), dtype=np.int32).reshape(w)).transpose(0, 4, 5, 3, 1, 2)
    spare = padded(w[0]) - w[0]
    return np.pad(index, [(0, 0)] * 5 + [(0, spare)], constant_values=-1).reshape(TERMS, -1)


def product_up_fprop(call: Call) -> Product:
    """`im2col.product` of four phases with GK = 4·C."""
    (N, C, H, W), K = call.in_shapes[0], call.in_shapes[1][0]
    return Product(N * H * W, K, 4 * C, C % 16 == 0, copies=4)


def product_up_dgrad(call: Call) -> Product:
    """`im2col.product` over the box sums, with GK = 9·K."""
    K, (N, C, H, W) = call.in_shapes[0][1], call.out_shapes[0]
    return Product(N * H * W, C, 9 * K, K % 16 == 0)


def product_up_wgrad(call: Call) -> Product:
    """`im2col_wgrad.product` with the two images exchanged."""
    c = exchanged(call)
    return Product(*c.gemm("wgrad"), c.C % 4 == 0 and c.K % 4 == 0, always_sums=True)


def scratch(call: Call) -> int:
    """Bytes of the partial outputs, if GK is split: four times as many rows as y has, if those are pooled."""
    rows = 4 if call.op == Op("conv", "fprop", after=(Map("relu"), Pool())) else 1
    return partial_bytes(call.tile.split, rows * numel(call.out_shapes[0]))


def scratch_up_dgrad(call: Call) -> int:
    """Bytes of the box sums, and of the partial outputs."""
    return _box_bytes(call, 0) + scratch(call)


def scratch_up_wgrad(call: Call) -> int:
    """Bytes of the box sums, of the partial gradients, and of the partial sums of their columns."""
    GM, GN, _ = exchanged(call).gemm("wgrad")
    return _box_bytes(call, 1) + 4 * call.tile.split * (GM + 1) * GN


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`."""
    return im2col.traffic(call, "pool" if len(call.out_shapes) == 2 else None)


def traffic_dgrad_relu(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad_relu`."""
    return im2col.traffic(call, "mask")


def traffic_up_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_up_fprop`."""
    N, C, H, W = call.in_shapes[0]
    window = Window(2, 2, after=epilogue_function(call), phases=True)
    return product_traffic(call.tile, call.in_shapes[1][0], (N, C, H, W, H, W, 1, 1), window)


def traffic_up_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_up_dgrad`."""
    N, C, H, W = call.out_shapes[0]
    _, K, high, wide = extents(call.in_shapes[0])
    window = Window(3, 3, 2, after="mask" if len(call.in_shapes) == 3 else None)
    return [box_traffic(call.in_shapes[0]), *product_traffic(call.tile, C, (N, K, high, wide, H, W, 0, 0), window)]


def traffic_up_wgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_up_wgrad`."""
    K, C = call.out_shapes[0][:2]
    product = im2col_wgrad.product_traffic(call.tile, exchanged(call), "B")
    return [box_traffic(call.in_shapes[1]), product, *exchanged_traffic(9, K, C, call.tile.split)]


def waits(call: Call) -> int:
    """Loads that follow one another where parts are added: a thread that pools has those of one part in flight."""
    return call.tile.split if len(call.out_shapes) == 2 else 1


_FPROP = Impl(
    bind_fprop,
    scratch,
    supports,
    pack=im2col.pack_fprop,
    pitched=im2col.result_part,
    **choices(im2col.product, traffic_fprop, awkward=im2col.awkward, waits=waits),
)
_UP = Impl(bind_up_fprop, scratch, supports, pack=pack_up_fprop, **choices(product_up_fprop, traffic_up_fprop))
_UP_DGRAD = Impl(bind_up_dgrad, scratch_up_dgrad, supports, pack=im2col.pack_dgrad, **choices(product_up_dgrad, traffic_up_dgrad, before=1))

FUSED = {
    Op("conv", "fprop", after=(Map("relu"),)): _FPROP,
    Op("conv", "fprop", after=(Map("relu"), Pool())): _FPROP,
    Op("conv", "dgrad", after=(Mask("relu"),)): Impl(
        bind_dgrad_relu,
        scratch,
        supports,
        pack=im2col.pack_dgrad,
        pitched=im2col.result_part,
        **choices(im2col.product, traffic_dgrad_relu, awkward=im2col.awkward),
    ),
    Op("conv", "wgrad", before=(Unpool(),)): composed.pool_wgrad(im2col.OPS[Op("conv", "wgrad")], unpool.IMPL),
    Op("unpool"): unpool.IMPL,
}
"""Convolutions with an epilogue (rows `im2col` and `cudacore`): every shape, NHWC, float32."""
FOLDED = {
    Op("upconv", "fprop"): _UP,
    Op("upconv", "fprop", after=(Map("relu"),)): _UP,
    Op("upconv", "fprop", after=(Loss("mse"),)): composed.upconv_mse(_UP, pairs.OPS[Op("mse", "fprop")], pairs.OPS[Op("mse", "dgrad")]),
    Op("upconv", "dgrad"): _UP_DGRAD,
    Op("upconv", "dgrad", after=(Mask("relu"),)): _UP_DGRAD,
    Op("upconv", "wgrad"): Impl(bind_up_wgrad, scratch_up_wgrad, supports, **choices(product_up_wgrad, traffic_up_wgrad, before=1)),
}
"""Convolutions behind an upsampling that is folded into their filters (row `cudacore`): other products than the definition's, and fewer."""
