"""This module is the table of modes, MODES. A row says what a mode and precision run for each op; read it from top to bottom.

An op (`nbcnn.plan.op`) has one signature, which stands in the docstring of its module with logical shapes: inputs, outputs, attributes. Its module
exports what belongs to it:

    HOST         op -> its NumPy reference: the row `cpu`
    OPS          op -> its kernels, if every GPU row has the same
    REFERENCES   fused op -> its reference, the composition of the ops that it replaces; only GPU rows have fused ops
    GRADIENTS    backward op -> which forward op it is the derivative of
    cases()      its test cases; real_cases(): larger ones

and stands in MODULES. An op whose kernels differ from row to row stands in the fallbacks of the rows. GPU rows keep images in one layout
throughout; `convert` stands only at the two doors of a net.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.ops.activations import add, glu, prelu, softmax
from nbcnn.ops.activations import table as activations
from nbcnn.ops.conv import bias, depthwise_stream_wgrad, depthwise_wgrad, fused, grouped, mma, naive, reference, thin_mma, tiled, wgmma
from nbcnn.ops.conv.frame import composed, expanded
from nbcnn.ops.conv.simt import few_rows, im2col, im2col_fused, pointwise
from nbcnn.ops.conv.thin import fused as thin_fused
from nbcnn.ops.conv.thin import plain as thin
from nbcnn.ops.conv.winograd import engine as winograd
from nbcnn.ops.conv.winograd import nine_products
from nbcnn.ops.conv_norm import gradient_sums, statistics
from nbcnn.ops.conv_norm import two_ops as conv_evonorm
from nbcnn.ops.conv_norm import wgmma as conv_wgmma
from nbcnn.ops.images import (
    avgpool,
    axis_map,
    concat,
    convert,
    corrupt,
    flatten,
    gather,
    global_mean,
    ksparse,
    maxpool,
    pad,
    patches,
    permute,
    pool,
    resize,
    scale,
    unpool,
    upsample,
    whiten,
)
from nbcnn.ops.kernel.row import Ops, Row
from nbcnn.ops.losses import pairs, sum_losses, xent
from nbcnn.ops.norms import b0, b0_ranks, batch, batch_cluster, dropout, fold, group, layer, s0
from nbcnn.ops.norms import reference as evonorm
from nbcnn.ops.products import gemm, gemm_wgmma
from nbcnn.ops.series import gather_windows, last, pwconv1d, pwconv1d_direct, pwconv1d_gated, s4kernel
from nbcnn.ops.series.dwconv1d import VARIANTS as DWCONV
from nbcnn.ops.series.dwconv1d import reference as dwconv1d
from nbcnn.ops.update import accumulate, advance, ema, grad_norm, loss_scale, optimizers, pack_weights
from nbcnn.plan import names
from nbcnn.plan.op import Loss, Op, Unpool

MODULES: tuple[ModuleType, ...] = (
    *(reference, fused, conv_evonorm, statistics, gradient_sums),
    *(dwconv1d, pwconv1d, s4kernel, glu, last, gather_windows),
    *(activations, add, evonorm, s0, b0, b0_ranks),
    *(batch, fold, group, layer, dropout, softmax),
    *(maxpool, avgpool, upsample, flatten, convert, gather),
    *(whiten, patches, corrupt, ksparse),
    *(scale, concat, pad, sum_losses, grouped, bias),
    *(xent, gemm),
    *(pairs, prelu, pool, global_mean, resize, axis_map, permute),
    *(optimizers, grad_norm, pack_weights, advance, accumulate, ema, loss_scale),
)
"""The modules of all ops: convolutions; series; element-wise and norms; images; what graphs join; losses and products; the update of the weights."""


def exported(name: str) -> dict[Op, Any]:
    """What the modules export as `name`, in one dict. Raises ValueError if two export the same op."""
    merged: dict[Op, Any] = {}
    for module in MODULES:
        own = getattr(module, name, {})
        if twice := merged.keys() & own.keys():
            raise ValueError(f"{name} of {module.__name__}: another module has {', '.join(sorted(map(str, twice)))}")
        merged |= own
    return merged


CPU: Ops = exported("HOST")
"""NumPy: the reference of every kernel."""
COMMON: Ops = exported("OPS")
"""Kernels that do not depend on how a mode convolves: memory-bound, one thread per element or per four."""
REFERENCES = exported("REFERENCES")
"""References of the fused ops. The `cpu` row does not have them: NumPy gains nothing from fusing."""

_DEPTHWISE = depthwise_wgrad.OPS
"""Depthwise convolutions, before those that take any groups; mode `naive` does without."""
_STREAMED = (("common", depthwise_stream_wgrad.OPS), ("common", _DEPTHWISE))

_EPILOGUES = statistics.of_engine(im2col.OPS) | im2col_fused.FUSED
_IM2COL = (
    ("im2col", _DEPTHWISE),
    ("im2col", _EPILOGUES | expanded.grouped(im2col.OPS) | conv_evonorm.two_ops(im2col.OPS[Op("conv", "fprop")]) | pwconv1d.transposed(im2col.OPS)),
    ("im2col", COMMON | {Op("gemm"): gemm.IMPL} | DWCONV["best"]),
)
"""Every convolution in all passes as an implicit GEMM with epilogues, the zeros of groups written out; one channel per group is no product."""

_PRODUCTS = (
    ("cudacore", statistics.of_engine(winograd.OPS) | winograd.FUSED | nine_products.FUSED),
    ("cudacore", pointwise.OPS),
    ("cudacore", _EPILOGUES | im2col_fused.FOLDED),
)
"""Convolutions on CUDA cores in float32: forms that multiply less, 1×1 filters, every shape. By their cost `tensorcore fp32` takes them, too."""

_CUDACORE = (
    ("cudacore", statistics.of_engine(thin.OPS) | thin_fused.FUSED | conv_evonorm.two_ops(thin.OPS[Op("conv", "fprop")])),
    ("cudacore", conv_evonorm.two_ops(winograd.OPS[Op("conv", "fprop")])),
    ("cudacore", depthwise_stream_wgrad.OPS),
    ("cudacore", pwconv1d_direct.OPS | pwconv1d_gated.OPS | _DEPTHWISE),
    ("cudacore", few_rows.OPS),
    *_PRODUCTS,
    ("cudacore", expanded.grouped(im2col.OPS)),
    (
        "cudacore",
        COMMON | {Op("gemm"): gemm.IMPL} | DWCONV["best"] | pwconv1d.transposed(im2col.OPS) | conv_evonorm.two_ops(im2col.OPS[Op("conv", "fprop")]),
    ),
)
"""Few channels, norms in or behind a convolution's last kernel, depthwise convolutions, few rows; then products, of which the cheapest is taken."""

_NAIVE = naive.OPS | COMMON | DWCONV["naive"] | pwconv1d.straight(naive.OPS) | {Op("gemm"): gemm.SIMPLE}
_TILED = tiled.OPS | COMMON | DWCONV["shared"] | pwconv1d.straight(tiled.OPS) | {Op("gemm"): gemm.IMPL}


def _tensorcore(precision: str) -> Row:
    """The row of one precision: first and last layers, Hopper's engine, the portable one, which takes every shape; each step takes the cheapest."""
    general = statistics.of_engine(mma.ops(precision))
    general |= {
        Op("conv", "wgrad", before=(Unpool(),)): composed.pool_wgrad(general[Op("conv", "wgrad")], unpool.IMPL),
        Op("upconv", "fprop", after=(Loss("mse"),)): composed.upconv_mse(
            general[Op("upconv", "fprop")], pairs.OPS[Op("mse", "fprop")], pairs.OPS[Op("mse", "dgrad")]
        ),
    }
    common = COMMON | DWCONV["best"] | {Op("unpool"): unpool.IMPL, Op("gemm"): gemm.SIMPLE}
    general |= pwconv1d.transposed(general) | {Op("gemm"): gemm.engine(general[Op("conv", "fprop")])}
    thin_parts, hopper, norms = _for_later_gpus(precision) if precision != "fp16" else ([], [], [])
    engines = (*hopper, ("mma", general), *(_PRODUCTS if precision == "fp32" else ()))
    two_ops = [(name, conv_evonorm.two_ops(ops[Op("conv", "fprop")])) for name, ops in (*thin_parts, *engines) if Op("conv", "fprop") in ops]
    groups = [(name, expanded.grouped(ops)) for name, ops in (*hopper, ("mma", general))]
    behind = (*norms, *two_ops, *_STREAMED, *groups, ("common", batch_cluster.OPS), ("common", common))
    parts = (*thin_parts, ("common", few_rows.OPS), *engines, *behind)
    return Row("tensorcore", precision, "gpu", "NHWC", parts, ("thin", "wgmma", "mma", "common", "cudacore"), by_cost=True)


Parts = list[tuple[str, Ops]]


def _for_later_gpus(precision: str) -> tuple[Parts, Parts, Parts]:
    """First and last layers, Hopper's engine, and its norms, in a precision that compute capability 7.5 does not have."""
    # In fp32 three channels are the CUDA cores' business: 27 products per pixel are too few to pay for splitting operands.
    few = [("cudacore", thin.OPS | thin_fused.FUSED)] if precision == "fp32" else [("thin", part) for part in thin_mma.parts(precision)]
    thin_parts = [(name, statistics.of_engine(part) if Op("conv", "fprop") in part else part) for name, part in few]
    hopper = gradient_sums.of_engine(statistics.of_engine(wgmma.ops(precision)))
    hopper |= pwconv1d.transposed(hopper) | {
        Op("gemm"): gemm.engine(hopper[Op("conv", "fprop")]) if precision == "fp32" else gemm_wgmma.implementation(precision)
    }
    norms = conv_wgmma.ops(precision) if precision in conv_wgmma.PRECISIONS else {}
    return thin_parts, [("wgmma", hopper)], [("wgmma", norms)]


MODES: Mapping[tuple[str, str], Row] = {
    (row.mode, row.precision): replace(row, fallbacks=tuple((part, activations.with_activations(ops)) for part, ops in row.fallbacks))
    for row in (
        Row("cpu", "fp32", "host", "NCHW", (("cpu", CPU),)),
        Row("naive", "fp32", "gpu", "NCHW", (("naive", _NAIVE),)),
        Row("tiled", "fp32", "gpu", "NCHW", (("tiled", _DEPTHWISE), ("tiled", _TILED), ("naive", naive.OPS | DWCONV["naive"]))),
        Row("im2col", "fp32", "gpu", "NHWC", _IM2COL),
        Row("cudacore", "fp32", "gpu", "NHWC", _CUDACORE, by_cost=True),
        *(_tensorcore(precision) for precision in names.MODES["tensorcore"]),
    )
}

if list(MODES) != [(mode, precision) for mode, precisions in names.MODES.items() for precision in precisions]:
    raise ValueError(f"nbcnn/plan/names.py and this table have other rows: {names.MODES} and {list(MODES)}")


def named(name: str | Op) -> Op:
    """The op that prints as `name`, among those of the table: what a command line, a file or a test calls it. Raises UsageError for another name."""
    if isinstance(name, Op):
        return name
    known = {str(op): op for op in (*(op for row in MODES.values() for op in row.ops), *REFERENCES)}
    if name not in known:
        raise UsageError(f"no op {quoted(name)}{nearest(name, list(known))}")
    return known[name]


DEFAULT_PRECISION = {mode: precisions[0] for mode, precisions in names.MODES.items()}

ENGINES = names.ENGINES


def only_engine(row: Row, engine: str) -> Row:
    """`row` with its own engines but `engine` left out; what `engine` does not support runs elsewhere, and is reported.

    Raises UsageError if the row has no such engine.
    """
    if engine not in dict(row.fallbacks):
        raise UsageError(f"--engine {engine} has no {row.precision}; --engine mma has it")
    # An engine that is asked for by name is not left for kernels on CUDA cores because those are cheaper.
    own = next(at for at, (part, _) in enumerate(row.fallbacks) if part in ENGINES)
    row = replace(row, fallbacks=tuple(part for at, part in enumerate(row.fallbacks) if part[0] != "cudacore" or at < own))
    if engine == "wgmma":
        at = [part for part, _ in row.fallbacks].index("wgmma")
        fallbacks = (*(part for part in row.fallbacks[:at] if part[0] != "mma"), *row.fallbacks[at:])
        return replace(row, fallbacks=fallbacks, own=tuple(part for part in row.own if part != "mma"))
    return replace(row, fallbacks=tuple(part for part in row.fallbacks if part[0] != "wgmma"))


def with_dwconv(row: Row, variant: str) -> Row:
    """`row` with the depthwise convolutions of `variant` first; what it does not support runs as in `row`, and is reported.

    The fused backward belongs to "best": under another variant the row does without, so that its own kernels run.
    """
    kept = [(part, {op: impl for op, impl in ops.items() if op != Op("dwconv1d", "bwd")}) for part, ops in row.fallbacks]
    return replace(row, fallbacks=((variant, DWCONV[variant]), *kept), own=(*row.own, variant), asked=variant)
