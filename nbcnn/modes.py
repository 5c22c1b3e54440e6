"""MODES: the one table. A row is what a mode and precision run for each op; read it from top to bottom.

Ops and their signatures (logical shapes; inputs, then outputs, then attributes). References have the same order.

    conv_fprop        x (N,C,H,W), w (K,C,R,S)[, b (K)] -> y (N,K,P,Q)                        stride, pad
    conv_dgrad        dy (N,K,P,Q), w (K,C,R,S) -> dx (N,C,H,W)                               stride, pad
    conv_wgrad        x (N,C,H,W), dy (N,K,P,Q) -> dw (K,C,R,S)[, db (K)]                     stride, pad
    dwconv1d_fprop    x (N,C,L), w (C,T)[, d (C)] -> y (N,C,L)                                padding: causal or same
    dwconv1d_dgrad    dy (N,C,L), w (C,T)[, d (C)] -> dx (N,C,L)                              padding
    dwconv1d_wgrad    x (N,C,L), dy (N,C,L) -> dw (C,T)[, dd (C)]                             padding
    pwconv1d_fprop    x (N,C,L), w (K,C)[, b (K)] -> y (N,K,L)
    pwconv1d_dgrad    dy (N,K,L), w (K,C) -> dx (N,C,L)
    pwconv1d_wgrad    x (N,C,L), dy (N,K,L) -> dw (K,C)[, db (K)]
    s4kernel_fprop    log_dt (C), a_re, a_im, c_re, c_im (C,S) -> k (C,T)
    s4kernel_dgrad    dk (C,T), log_dt, a_re, a_im, c_re, c_im -> their five gradients
    relu_fprop        x -> y                              relu_dgrad        dy, y -> dx
    leaky_relu_fprop  x -> y   slope                      leaky_relu_dgrad  dy, y -> dx       slope
    sigmoid_fprop     x -> y                              sigmoid_dgrad     dy, y -> dx
    swish_fprop       x -> y                              swish_dgrad       dy, x -> dx
    gelu_fprop        x -> y                              gelu_dgrad        dy, x -> dx
    glu_fprop         x (N,2C,L) -> y (N,C,L)             glu_dgrad         dy, x -> dx
    last_fprop        x (N,C,L) -> y (N,C)                last_dgrad        dy -> dx
    add               a, b -> y
    gemm              a (M,K), b (N,K) -> c (M,N)                                             c = a·bᵀ
    evonorm_s0_fprop  x (N,C,H,W), gamma, beta, v (C) -> y, shift, std (N·groups)                groups, eps
    evonorm_s0_grads  dy, x, gamma, v, shift, std -> dx, dgamma, dbeta, dv                      groups
    evonorm_b0_fprop  x, gamma, beta, v, running -> y, shift, std (N·C), batch_shift, batch_std (C), running (in place)
                                                                                                eps, momentum
    evonorm_b0_infer  x, gamma, beta, v, running -> y                                           eps
    evonorm_b0_grads  dy, x, gamma, v, shift, std, batch_shift, batch_std -> dx, dgamma, dbeta, dv
                      the same with the statistics of all ranks (see evonorm/b0_ranks.py):
    evonorm_b0_statistics  x -> shift, std (N·C), parts (ranks·4·C)                              eps, ranks, rank, images
    evonorm_b0_together    x, gamma, beta, v, running, std, parts -> y, batch_shift, batch_std, running (in place)  eps, momentum, ranks
    evonorm_b0_sums        dy, x, gamma, v, std, batch_std -> own (N·C), batch (C), dgamma, dbeta, dv
    evonorm_b0_dgrad       dy, x, gamma, v, shift, std, batch_shift, batch_std, own, batch -> dx
    maxpool_fprop     x (N,C,H,W) -> y (N,C,P,Q), index (N,C,P,Q) uint8 or int32              size, stride
    maxpool_dgrad     dy, index -> dx (N,C,H,W)                                               size, stride
    avgpool_fprop     x -> y                              avgpool_dgrad     dy -> dx          size, stride
    upsample_fprop    x (N,C,H,W) -> y (N,C,fH,fW)        upsample_dgrad    dy -> dx          factor
    flatten_fprop     x (N,C,H,W) -> y (N,CHW)            flatten_dgrad     dy -> dx          (y in C,H,W order in every layout)
    convert           x (N,C,H,W) -> y (N,C,H,W)                                              source, target layouts
    mse_fprop         y, target -> loss () float64                                            mean over all elements
    mse_dgrad         y, target -> dy
    softmax_xent_fprop  logits (N,F), labels (N) int32 -> p (N,F), loss () float64            mean over N
    softmax_xent_dgrad  p, labels -> dlogits
    gather            images (M,C,H,W) uint8, order (E) int32, state (8) int64 -> x (N,C,H,W)  flip; x in [0,1]
    rmsle_fprop       y, target -> loss () float64                                            unit
    rmsle_dgrad       y, target, loss -> dy                                                   unit
    gather_windows    rows (R·F), targets (R), starts (M) int32, order (E) int32, state -> x (N,F,L), y (N)
    gather_labels     labels (M) int32, order (E) int32, state -> y (N) int32
    sgd               w, g, m, lr (steps), state[, norm ()] -> w, m, state      (in place)          momentum, weight_decay, clip_value,
                                                                                                clip_norm, decayed
    adam              w, g, m, v, lr (steps), state[, norm ()] -> w, m, v, state (in place)         beta1, beta2, eps, then as sgd
    grad_norm         g -> norm () float64
    pack_weights      params (P), map (n) int32 -> packed (n)
    advance           loss () float64, state, sums (4) float64 -> state, sums   (in place)          count

Fused ops (see conv/fused.py for what each replaces; images NHWC only):

    conv_relu_fprop       x, w, b -> y                                                        stride, pad
    conv_sigmoid_fprop, conv_swish_fprop  likewise
    conv_relu_pool_fprop  x, w, b -> y (N,K,P/2,Q/2), index (N,K/4,P/2,Q/2) uint8             stride, pad
    unpool                dy (N,K,P,Q), index -> dx (N,K,2P,2Q)
    conv_dgrad_relu       dy, w, x -> dx                                                      stride, pad
    conv_pool_wgrad       x, dy (N,K,P/2,Q/2), index -> dw, db                                stride, pad
    upconv_fprop          x (N,C,H,W), w (K,C,3,3), b -> y (N,K,2H,2W)                        upconv_relu_fprop likewise
    upconv_mse_fprop      x, w, b, target (N,K,2H,2W) -> loss () float64, dy (N,K,2H,2W)
    upconv_dgrad          dy (N,K,2H,2W), w -> dx (N,C,H,W)                                   upconv_dgrad_relu  dy, w, x -> dx
    upconv_wgrad          x, dy -> dw, db
    dwconv1d_bwd          dy (N,C,L), x (N,C,L), w (C,T)[, d (C)] -> dx, dw[, dd]             padding
    pwconv1d_glu_fprop    x (N,C,L), w (2K,C), b (2K)[, r (N,K,L)] -> y (N,K,L)[, z (N,2K,L)]   y = GLU of z (+ r); only in row im2col

    conv_evonorm_…        the convolution, then the EvoNorm op (see evonorm/conv.py)

GPU rows keep images in one layout throughout; `convert` stands only at the two doors of a net.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nbcnn.ops.activations import add, gelu, glu, leaky_relu, relu, sigmoid, swish
from nbcnn.ops.conv import mma, naive, reference, thin_mma, tiled, wgmma
from nbcnn.ops.conv.frame import composed
from nbcnn.ops.conv.frame.few_pixels import for_few_pixels
from nbcnn.ops.conv.simt import im2col, im2col_fused
from nbcnn.ops.conv.thin import fused as thin_fused
from nbcnn.ops.conv.thin import plain as thin
from nbcnn.ops.conv.winograd import engine as winograd
from nbcnn.ops.conv.winograd import nine_products
from nbcnn.ops.conv_norm import two_ops as conv_evonorm
from nbcnn.ops.conv_norm import wgmma as conv_wgmma
from nbcnn.ops.conv_norm import winograd as conv_winograd
from nbcnn.ops.images import avgpool, convert, flatten, gather, maxpool, unpool, upsample
from nbcnn.ops.kernel.call import Impl, host
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.ops.losses import mse, rmsle, softmax_xent
from nbcnn.ops.norms import b0, b0_ranks, s0
from nbcnn.ops.norms import reference as evonorm
from nbcnn.ops.products import gemm, gemm_wgmma
from nbcnn.ops.series import gather_windows, last, pwconv1d, pwconv1d_direct, pwconv1d_gated, s4kernel
from nbcnn.ops.series.dwconv1d import VARIANTS as DWCONV
from nbcnn.ops.series.dwconv1d import reference as dwconv1d
from nbcnn.ops.update import adam, advance, grad_norm, pack_weights, sgd
from nbcnn.plan.bounds import STORE

Ops = dict[str, Impl]


@dataclass(frozen=True)
class Row:
    """What one mode and precision run.

    place   "host" or "gpu".
    layout  how images are stored between the layers.
    parts   (name, ops) in the order in which a step looks for an implementation that supports it.
    own     the parts that count as the mode itself: a step that ends in another is reported. Empty: the mode's name.
    """

    mode: str
    precision: str
    place: str
    layout: str
    parts: tuple[tuple[str, Ops], ...]
    own: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", self.own or (self.mode,))

    @property
    def store(self) -> str:
        """How activations are stored (`nbcnn.plan.storage`)."""
        return STORE[self.precision]

    def chain(self, op: str) -> Iterator[tuple[str, Impl]]:
        """The implementations of `op` in this row, first choice first, with the name of the part they come from."""
        return ((name, ops[op]) for name, ops in self.parts if op in ops)

    @property
    def ops(self) -> list[str]:
        """The names of all ops in this row."""
        return sorted({op for _, ops in self.parts for op in ops})


CPU: Ops = (
    reference.HOST
    | pwconv1d.HOST
    | {
        "dwconv1d_fprop": host(dwconv1d.dwconv1d_fprop),
        "dwconv1d_dgrad": host(dwconv1d.dwconv1d_dgrad),
        "dwconv1d_wgrad": host(dwconv1d.dwconv1d_wgrad),
        "relu_fprop": host(relu.relu_fprop),
        "relu_dgrad": host(relu.relu_dgrad),
        "leaky_relu_fprop": host(leaky_relu.leaky_relu_fprop),
        "leaky_relu_dgrad": host(leaky_relu.leaky_relu_dgrad),
        "sigmoid_fprop": host(sigmoid.sigmoid_fprop),
        "sigmoid_dgrad": host(sigmoid.sigmoid_dgrad),
        "swish_fprop": host(swish.swish_fprop),
        "swish_dgrad": host(swish.swish_dgrad),
        "gelu_fprop": host(gelu.gelu_fprop),
        "gelu_dgrad": host(gelu.gelu_dgrad),
        "glu_fprop": host(glu.glu_fprop),
        "glu_dgrad": host(glu.glu_dgrad),
        "last_fprop": host(last.last_fprop),
        "last_dgrad": host(last.last_dgrad),
        "s4kernel_fprop": host(s4kernel.s4kernel_fprop),
        "s4kernel_dgrad": host(s4kernel.s4kernel_dgrad),
        "add": host(add.add),
        "gemm": host(gemm.gemm),
        "evonorm_s0_fprop": host(evonorm.evonorm_s0_fprop),
        "evonorm_s0_grads": host(evonorm.evonorm_s0_grads),
        "evonorm_b0_fprop": host(evonorm.evonorm_b0_fprop),
        "evonorm_b0_infer": host(evonorm.evonorm_b0_infer),
        "evonorm_b0_grads": host(evonorm.evonorm_b0_grads),
        "evonorm_b0_statistics": host(evonorm.evonorm_b0_statistics),
        "evonorm_b0_together": host(evonorm.evonorm_b0_together),
        "evonorm_b0_sums": host(evonorm.evonorm_b0_sums),
        "evonorm_b0_dgrad": host(evonorm.evonorm_b0_dgrad),
        "maxpool_fprop": host(maxpool.maxpool_fprop),
        "maxpool_dgrad": host(maxpool.maxpool_dgrad),
        "avgpool_fprop": host(avgpool.avgpool_fprop),
        "avgpool_dgrad": host(avgpool.avgpool_dgrad),
        "upsample_fprop": host(upsample.upsample_fprop),
        "upsample_dgrad": host(upsample.upsample_dgrad),
        "flatten_fprop": host(flatten.flatten_fprop),
        "flatten_dgrad": host(flatten.flatten_dgrad),
        "convert": host(convert.convert),
        "mse_fprop": host(mse.mse_fprop),
        "mse_dgrad": host(mse.mse_dgrad),
        "softmax_xent_fprop": host(softmax_xent.softmax_xent_fprop),
        "softmax_xent_dgrad": host(softmax_xent.softmax_xent_dgrad),
        "rmsle_fprop": host(rmsle.rmsle_fprop),
        "rmsle_dgrad": host(rmsle.rmsle_dgrad),
        "gather": host(gather.gather),
        "gather_windows": host(gather_windows.gather_windows),
        "gather_labels": host(gather.gather_labels),
        "sgd": host(sgd.sgd),
        "adam": host(adam.adam),
        "grad_norm": host(grad_norm.grad_norm),
        "pack_weights": host(pack_weights.pack_weights),
        "advance": host(advance.advance),
    }
)
"""NumPy: the reference of every kernel."""

COMMON: Ops = {
    "relu_fprop": Impl(relu.bind_fprop, traffic=streamed),
    "relu_dgrad": Impl(relu.bind_dgrad, traffic=streamed),
    "leaky_relu_fprop": Impl(leaky_relu.bind_fprop, traffic=streamed),
    "leaky_relu_dgrad": Impl(leaky_relu.bind_dgrad, traffic=streamed),
    "sigmoid_fprop": Impl(sigmoid.bind_fprop, traffic=streamed),
    "sigmoid_dgrad": Impl(sigmoid.bind_dgrad, traffic=streamed),
    "swish_fprop": Impl(swish.bind_fprop, traffic=streamed),
    "swish_dgrad": Impl(swish.bind_dgrad, traffic=streamed),
    "gelu_fprop": Impl(gelu.bind_fprop, traffic=streamed),
    "gelu_dgrad": Impl(gelu.bind_dgrad, traffic=streamed),
    "glu_fprop": Impl(glu.bind_fprop, traffic=streamed),
    "glu_dgrad": Impl(glu.bind_dgrad, traffic=streamed),
    "last_fprop": last.FPROP,
    "last_dgrad": last.DGRAD,
    "s4kernel_fprop": s4kernel.FPROP,
    "s4kernel_dgrad": s4kernel.DGRAD,
    "add": Impl(add.bind, traffic=streamed),
    "evonorm_s0_fprop": s0.FPROP,
    "evonorm_s0_grads": s0.GRADS,
    "evonorm_b0_fprop": b0.FPROP,
    "evonorm_b0_infer": b0.INFER,
    "evonorm_b0_grads": b0.GRADS,
    **b0_ranks.OPS,
    "maxpool_fprop": Impl(maxpool.bind_fprop, traffic=maxpool.traffic_fprop),
    "maxpool_dgrad": Impl(maxpool.bind_dgrad, traffic=maxpool.traffic_dgrad),
    "avgpool_fprop": Impl(avgpool.bind_fprop, traffic=avgpool.traffic_fprop),
    "avgpool_dgrad": Impl(avgpool.bind_dgrad, traffic=avgpool.traffic_dgrad),
    "upsample_fprop": Impl(upsample.bind_fprop, traffic=upsample.traffic_fprop),
    "upsample_dgrad": Impl(upsample.bind_dgrad, traffic=upsample.traffic_dgrad),
    "flatten_fprop": Impl(flatten.bind_fprop, traffic=flatten.traffic_fprop),
    "flatten_dgrad": Impl(flatten.bind_dgrad, traffic=flatten.traffic_dgrad),
    "convert": Impl(convert.bind, traffic=convert.traffic),
    "mse_fprop": mse.FPROP,
    "mse_dgrad": mse.DGRAD,
    "softmax_xent_fprop": softmax_xent.FPROP,
    "softmax_xent_dgrad": softmax_xent.DGRAD,
    "rmsle_fprop": rmsle.FPROP,
    "rmsle_dgrad": rmsle.DGRAD,
    "gather": gather.IMPL,
    "gather_windows": gather_windows.IMPL,
    "gather_labels": gather.LABELS,
    "sgd": sgd.IMPL,
    "adam": adam.IMPL,
    "grad_norm": grad_norm.IMPL,
    "pack_weights": pack_weights.IMPL,
    "advance": advance.IMPL,
}
"""Kernels that do not depend on how a mode convolves: memory-bound, one thread per element or per four."""

_IM2COL = (
    ("im2col", thin.OPS | thin_fused.FUSED | conv_evonorm.two_ops(thin.OPS["conv_fprop"])),
    ("im2col", winograd.OPS | winograd.FUSED | nine_products.FUSED | conv_winograd.OPS),
    ("im2col", conv_evonorm.two_ops(winograd.OPS["conv_fprop"])),
    ("im2col", pwconv1d_direct.OPS | pwconv1d_gated.OPS),
    (
        "im2col",
        im2col.OPS
        | im2col_fused.FUSED
        | COMMON
        | {"gemm": gemm.IMPL}
        | DWCONV["best"]
        | pwconv1d.turned(im2col.OPS)
        | conv_evonorm.two_ops(im2col.OPS["conv_fprop"]),
    ),
)
"""Few channels, then forms that multiply less where the batch is large enough to pay for their sums (with a norm in their last kernel, then
behind them), then every shape."""


_NAIVE = naive.OPS | COMMON | DWCONV["naive"] | pwconv1d.straight(naive.OPS) | {"gemm": gemm.SIMPLE}
_TILED = tiled.OPS | COMMON | DWCONV["shared"] | pwconv1d.straight(tiled.OPS) | {"gemm": gemm.IMPL}

MMA_FIRST: Mapping[str, tuple[str, ...]] = {"tf32": ("upconv_wgrad",)}
"""What the portable engine does faster than Hopper's own, beside few pixels: in tf32 wgmma must have both panels of a weight gradient
turned in shared memory."""


def _tensorcore(precision: str) -> Row:
    """The row of one precision: first and last layers, then Hopper's engine, then the portable one, which takes every shape."""
    general = mma.ops(precision)
    general |= {
        "conv_pool_wgrad": composed.pool_wgrad(general["conv_wgrad"], unpool.IMPL),
        "upconv_mse_fprop": composed.upconv_mse(general["upconv_fprop"], mse.FPROP, mse.DGRAD),
    }
    # In fp32 three channels are the CUDA cores' business: 27 products a pixel are too few to pay for splitting operands.
    thin_parts = [("im2col", thin.OPS | thin_fused.FUSED)] if precision == "fp32" else [("thin", part) for part in thin_mma.parts(precision)]
    first = for_few_pixels(general) | {op: general[op] for op in MMA_FIRST.get(precision, ())}
    common = COMMON | DWCONV["best"] | {"unpool": unpool.IMPL, "gemm": gemm.SIMPLE}
    hopper = wgmma.ops(precision)
    hopper |= pwconv1d.turned(hopper) | {"gemm": gemm.engine(hopper["conv_fprop"]) if precision == "fp32" else gemm_wgmma.implementation(precision)}
    general |= pwconv1d.turned(general) | {"gemm": gemm.engine(general["conv_fprop"])}
    norms = conv_wgmma.ops(precision) if precision in conv_wgmma.PRECISIONS else {}
    own = (*thin_parts, ("mma", first), ("wgmma", hopper), ("mma", general))
    two_ops = [(name, conv_evonorm.two_ops(ops["conv_fprop"])) for name, ops in own if "conv_fprop" in ops]
    parts = (*own, ("wgmma", norms), *two_ops, ("common", common))
    return Row("tensorcore", precision, "gpu", "NHWC", parts, own=("thin", "wgmma", "mma", "common"))


MODES: Mapping[tuple[str, str], Row] = {
    (row.mode, row.precision): row
    for row in (
        Row("cpu", "fp32", "host", "NCHW", (("cpu", CPU),)),
        Row("naive", "fp32", "gpu", "NCHW", (("naive", _NAIVE),)),
        Row("tiled", "fp32", "gpu", "NCHW", (("tiled", _TILED), ("naive", naive.OPS | DWCONV["naive"]))),
        Row("im2col", "fp32", "gpu", "NHWC", _IM2COL),
        *(_tensorcore(precision) for precision in ("bf16", "tf32", "fp32")),
    )
}

DEFAULT_PRECISION = {"cpu": "fp32", "naive": "fp32", "tiled": "fp32", "im2col": "fp32", "tensorcore": "bf16"}

ENGINES = {"wgmma": (9, 0), "mma": (8, 0)}
"""Tensor-core engines that `--engine` can force, with the compute capability that each needs."""


def only_engine(row: Row, engine: str) -> Row:
    """`row` with its own engines but `engine` left out; what `engine` does not support runs elsewhere, and is reported."""
    if engine == "wgmma":
        at = [part for part, _ in row.parts].index("wgmma")
        parts = (*(part for part in row.parts[:at] if part[0] != "mma"), *row.parts[at:])
        return replace(row, parts=parts, own=tuple(part for part in row.own if part != "mma"))
    return replace(row, parts=tuple(part for part in row.parts if part[0] != "wgmma"))


def with_dwconv(row: Row, variant: str) -> Row:
    """`row` with the depthwise convolutions of `variant` first; what it does not support runs as in `row`, and is reported.

    The fused backward belongs to "best": under another variant the row does without, so that its own kernels run.
    """
    kept = [(part, {op: impl for op, impl in ops.items() if op != "dwconv1d_bwd"}) for part, ops in row.parts]
    return replace(row, parts=((variant, DWCONV[variant]), *kept), own=(*row.own, variant))
