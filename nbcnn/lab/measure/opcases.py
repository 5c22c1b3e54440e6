"""This module makes one op at a shape of the user's: a small case to verify it on, and its operands at full size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.ops.activations import add
from nbcnn.ops.activations import table as activations
from nbcnn.ops.conv.fused import pooled_cases, relu_cases, up_cases
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv_norm.two_ops import conv_norm_cases
from nbcnn.ops.images import avgpool, flatten, gather, maxpool, upsample
from nbcnn.ops.kernel.call import is_filter
from nbcnn.ops.kernel.case import Case
from nbcnn.ops.losses import pairs, xent
from nbcnn.ops.norms.reference import norm_cases
from nbcnn.ops.products import gemm
from nbcnn.ops.series.dwconv1d.reference import series_backward_cases, series_cases
from nbcnn.ops.series.pwconv1d import pointwise_cases
from nbcnn.ops.update import grad_norm, optimizers
from nbcnn.plan.op import Loss, Map, Mask, Norm, Op, Pool, Unpool
from nbcnn.plan.shapes import ConvShape, numel

LAYERS = {
    "conv1": ConvShape(1, 3, 32, 32, 256, 3, 3, 1, 1),
    "conv2": ConvShape(1, 256, 16, 16, 128, 3, 3, 1, 1),
    "conv3": ConvShape(1, 128, 8, 8, 128, 3, 3, 1, 1),
    "conv4": ConvShape(1, 128, 16, 16, 256, 3, 3, 1, 1),
    "conv5": ConvShape(1, 256, 32, 32, 3, 3, 3, 1, 1),
}
"""The autoencoder's convolutions (on the doubled image, where an upsampling stands before)."""
CONVS = (
    *(Op("conv", path) for path in ("fprop", "dgrad", "wgrad")),
    *(Op("conv", "fprop", after=after) for after in ((Map("relu"),), (Map("relu"), Pool()))),
    Op("conv", "dgrad", after=(Mask("relu"),)),
    Op("conv", "wgrad", before=(Unpool(),)),
    Op("unpool"),
)
UPCONVS = (
    *(Op("upconv", "fprop", after=after) for after in ((), (Map("relu"),), (Loss("mse"),))),
    *(Op("upconv", "dgrad", after=after) for after in ((), (Mask("relu"),))),
    Op("upconv", "wgrad"),
)
ACTIVATIONS = (*activations.OPS, Op("add"))
RESAMPLING = tuple(Op(name, path) for name in ("maxpool", "avgpool", "upsample", "flatten") for path in ("fprop", "dgrad"))
LOSSES = (Op("mse", "fprop"), Op("mse", "dgrad"))
ROWS = (Op("softmax_xent", "fprop"), Op("softmax_xent", "dgrad"))
SERIES = tuple(Op("dwconv1d", path) for path in ("fprop", "dgrad", "wgrad", "bwd"))
POINTWISE = tuple(Op("pwconv1d", path) for path in ("fprop", "dgrad", "wgrad"))
UPDATES = (Op("sgd"), Op("adam"), Op("grad_norm"))
NORMS = (Op("evonorm_s0", "fprop"), Op("evonorm_s0", "grads"), Op("evonorm_b0", "fprop"), Op("evonorm_b0", "infer"), Op("evonorm_b0", "grads"))
CONV_NORMS = tuple(Op("conv", path, after=(Norm(kind),)) for kind in ("evonorm_s0", "evonorm_b0") for path in ("fprop", "infer"))
STATISTICS = {
    **dict.fromkeys(((Op("evonorm_s0", "fprop"), "out"), (Op("evonorm_b0", "fprop"), "out")), (1, 2)),
    **dict.fromkeys(((Op("conv", "fprop", after=(Norm("evonorm_s0"),)), "out"), (Op("conv", "fprop", after=(Norm("evonorm_b0"),)), "out")), (2, 3)),
    **dict.fromkeys(((Op("evonorm_s0", "grads"), "in"), (Op("evonorm_b0", "grads"), "in")), (4, 5)),
}
"""Operands with one number for every channel or group of every image."""
OPS = (*CONVS, *UPCONVS, *ACTIVATIONS, *RESAMPLING, *LOSSES, *ROWS, *NORMS, *CONV_NORMS, *SERIES, *POINTWISE, Op("gemm"), Op("gather"), *UPDATES)

PARITY_IMAGES, NORM_IMAGES = 4, 8
"""Images that an op is verified on: the reference in float64 takes long at full size. A block of a norm has up to eight."""
GROUPS = 32
"""Groups of channels of an EvoNorm-S0, where there are as many channels."""
PARITY_ROWS = 256
"""Rows of both matrices that a product is verified on."""
DEFAULTS = {
    "product": (4096, 4096, 4096),
    "conv": (256, 256, 16, 16, 128),
    "images": (256, 256, 16, 16),
    "rows": (4096, 10),
    "series": (512, 128, 48, 48),
    "pointwise": (512, 128, 48, 256),
    "update": (751_875,),
}
FORMS = {
    "product": "M,K,N",
    "conv": "N,C,H,W,K[,R,S[,stride,pad]] or conv1 … conv5[@N]",
    "images": "N,C,H,W or COUNT",
    "rows": "N,F",
    "series": "N,C,L,T",
    "pointwise": "N,C,L,K",
    "update": "COUNT",
}


@dataclass(frozen=True)
class Problem:
    """An op at a shape. `small` is what it is verified on; operands with images have `batch` of them when it is timed (None: as in small).

    product: M, K, N of a matrix product, which is verified on few rows of both matrices.
    """

    op: Op
    small: Case
    batch: int | None
    product: tuple[int, int, int] | None = None

    def with_images(self, images: int) -> Problem:
        """The same, verified on `images`."""
        assert self.batch is not None
        return replace(self, small=resized(self.op, self.small, images))

    def operands(self) -> tuple[list[np.ndarray], list[Any]]:
        """Inputs at full size, fresh random floats (of a norm: the few images again and again); and the outputs."""
        if self.product is not None:
            m, k, n = self.product
            return [_random((m, k), 0), _random((n, k), 1)], [((m, n), "float32")]
        if self.batch is None:
            return list(self.small.ins), list(self.small.outs)
        if self.op in NORMS + CONV_NORMS:
            many = resized(self.op, self.small, self.batch)  # statistics must be those of the images
            return list(many.ins), list(many.outs)
        return grown(self.small, self.batch)


def timed(name: str | Op) -> Op:
    """The op of this name. Raises UsageError for an op that cannot run by itself."""
    names = {str(op): op for op in OPS}
    if str(name) not in names:
        raise UsageError(f"no op {quoted(str(name))} that runs by itself{nearest(str(name), list(names)) or '; there are ' + ', '.join(names)}")
    return names[str(name)]


def kind_of(name: str | Op) -> str:
    """Which of `FORMS` the shape of an op has. Raises UsageError for an op that cannot run by itself."""
    op = timed(name)
    kinds = {
        "product": (Op("gemm"),),
        "conv": CONVS + UPCONVS + CONV_NORMS,
        "rows": ROWS,
        "series": SERIES,
        "pointwise": POINTWISE,
        "update": UPDATES,
    }
    return next((kind for kind, ops in kinds.items() if op in ops), "images")


def problem(name: str | Op, shape: str | None = None) -> Problem:
    """The op of this name at `shape` ("256,128,16,16,256", "conv4@1024"), or at a default one. Raises UsageError for what is no shape of it."""
    op, kind = timed(name), kind_of(name)
    numbers = _numbers(shape, kind) if shape else DEFAULTS[kind]
    if kind == "conv":
        n, c, h, w, k, r, s, stride, pad = (*numbers, *(3, 3, 1, 1)[len(numbers) - 5 :])
        try:
            full = ConvShape(n, c, h, w, k, r, s, stride, pad)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return _conv(op, full)
    if kind == "images":
        n, c, h, w = numbers
        if op == Op("gather"):
            return Problem(op, _first(gather.cases((n, c, h, w)), op), None)
        if op in NORMS:
            return Problem(op, _first(norm_cases((((min(n, NORM_IMAGES), c, h, w), groups_of(c), "normal"),)), op), n)
        if op.kind == "flatten":
            return Problem(op, _first(flatten.cases(((n, c, h, w),)), op), None)
        few = ((min(n, PARITY_IMAGES), c, h, w),)
        windowed = chain(maxpool.cases(few, ((2, 2),)), avgpool.cases(few, ((2, 2),)), upsample.cases(few, (2,)))
        return Problem(op, _first(chain(activations.cases(few), add.cases(few), windowed, pairs.cases(few)), op), n)
    if kind == "product":
        m, k, n = numbers
        return Problem(op, _first(gemm.cases(((min(m, PARITY_ROWS), k, min(n, PARITY_ROWS)),)), op), None, (m, k, n))
    if kind in ("series", "pointwise"):
        n, c, length, last = numbers
        return series_problem(op, (n, c, length, last))
    if kind == "rows":
        return Problem(op, _first(xent.cases((numbers,)), op), None)
    return Problem(op, _first(chain(optimizers.cases(numbers[0]), grad_norm.cases(numbers[0])), op), None)


def conv_problem(name: str | Op, shape: ConvShape) -> Problem:
    """A convolution op, plain or fused, that computes the direct convolution `shape`: an upconv's input is half its size."""
    op = timed(name)
    return _conv(op, replace(shape, H=shape.H // 2, W=shape.W // 2) if op.kind == "upconv" else shape)


def series_problem(name: str | Op, shape: tuple[int, int, int, int], padding: str = "causal") -> Problem:
    """A depthwise convolution of series (N, C, L, T) without a skip, or a pointwise one (N, C, L, K) without a bias."""
    op, (n, *rest) = timed(name), shape
    small = (min(n, PARITY_IMAGES), *rest)
    cases = chain(series_cases(*small), series_backward_cases(*small)) if op in SERIES else pointwise_cases(*small)
    plain = (case for case in cases if case.attrs.get("padding", padding) == padding and not case.label.endswith(("skip", "bias")))
    return Problem(op, _first(plain, op), n)


def _conv(op: Op, shape: ConvShape) -> Problem:
    few = replace(shape, N=min(shape.N, PARITY_IMAGES))
    if op in CONV_NORMS:
        return Problem(op, _first(conv_norm_cases(((few, groups_of(few.K)),)), op), shape.N)
    made = up_cases(few) if op.kind == "upconv" else chain(conv_cases(few), relu_cases(few), pooled_cases(few))
    return Problem(op, _first(made, op), shape.N)


def _first(cases: Iterator[Case], op: Op) -> Case:
    return next(case for case in cases if case.op == op)


def groups_of(channels: int) -> int:
    """Groups of an EvoNorm-S0 of so many channels: 32, or one for each channel where 32 does not divide them."""
    return GROUPS if channels % GROUPS == 0 else channels


def _numbers(shape: str, kind: str) -> tuple[int, ...]:
    name, _, batch = shape.partition("@")
    try:
        if kind == "conv" and name in LAYERS:
            layer = LAYERS[name]
            return (*numerals.sizes(batch or "256"), layer.C, layer.H, layer.W, layer.K)
        found = tuple(map(numerals.whole, shape.replace("x", ",").replace("×", ",").split(",")))
    except ValueError:
        found = ()
    if kind == "images" and len(found) == 1:
        found = (1, 1, 1, *found)
    counts = {"conv": (5, 7, 9), "images": (4,), "rows": (2,), "series": (4,), "pointwise": (4,), "update": (1,), "product": (3,)}
    if len(found) not in counts[kind] or min(found) < 0 or 0 in found[:5]:
        raise UsageError(f"{quoted(shape)} is no shape here; it is {FORMS[kind]}")
    return found


def resized(op: Op, small: Case, images: int) -> Case:
    """`small` with `images` images, its operands repeated: integers stay in their range."""

    few = len(small.ins[0])

    def shape_of(side: str, position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        if position in STATISTICS.get((op, side), ()):
            return (shape[0] // few * images,)
        return _shape(op, side, position, shape, images)

    def repeat(position: int, array: np.ndarray) -> np.ndarray:
        return np.resize(array, shape_of("in", position, array.shape))

    outs = [out if isinstance(out, int) else (shape_of("out", i, out[0]), out[1]) for i, out in enumerate(small.outs)]
    ins = tuple(repeat(i, array) for i, array in enumerate(small.ins))
    return replace(small, ins=ins, outs=tuple(outs))


def grown(small: Case, batch: int) -> tuple[list[np.ndarray], list[Any]]:
    """Operands and outputs of `small` with `batch` images; floats are fresh random numbers, integers those of `small` again and again."""
    many = resized(small.op, small, batch)
    ins = [_random(array.shape, i) if array.dtype == np.float32 and array.ndim else array for i, array in enumerate(many.ins)]
    return ins, [out for out in many.outs if not isinstance(out, int)]


def _shape(op: Op, side: str, position: int, shape: tuple[int, ...], images: int) -> tuple[int, ...]:
    return (images, *shape[1:]) if len(shape) >= 3 and not is_filter(op, side, position) else shape


def _random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Normal values, 4 million fresh ones repeated where more are needed (never zeros: they run faster)."""
    fresh = np.random.default_rng(seed).standard_normal(min(numel(shape), 1 << 22), np.float32)
    return np.resize(fresh, shape)
