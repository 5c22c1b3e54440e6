"""Inputs on which the fused convolutions are compared with their references: mean shapes and the autoencoder's layers.

Pooled cases hold small integers, which every precision multiplies and adds exactly: then ties are real ties, and the index
must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nbcnn.check.cases import MEAN_SERIES, REAL_SERIES, Case, series_backward_cases
from nbcnn.plan.shapes import ConvShape, numel

MEAN_FUSED = (
    ConvShape(1, 3, 6, 10, 4, 3, 3, 1, 1),
    ConvShape(2, 5, 8, 6, 7, 3, 3, 1, 1),
    ConvShape(1, 16, 4, 4, 20, 3, 3, 1, 1),
    ConvShape(2, 24, 8, 8, 16, 3, 3, 1, 1),
)
REAL_POOLED = (ConvShape(4, 3, 32, 32, 256, 3, 3, 1, 1), ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1))
MEAN_UP = (ConvShape(1, 1, 3, 5, 2, 3, 3, 1, 1), ConvShape(2, 7, 4, 3, 3, 3, 3, 1, 1), ConvShape(1, 20, 4, 4, 12, 3, 3, 1, 1))
REAL_UP = (ConvShape(4, 128, 8, 8, 256, 3, 3, 1, 1), ConvShape(4, 256, 16, 16, 3, 3, 3, 1, 1))


MEAN_GATED, REAL_GATED = ((2, 3, 8, 5),), ((9, 128, 48, 128), (5, 37, 20, 67))


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _whole(seed: int, spread: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-spread, spread + 1, shape).astype(np.float32)


def _few(seed: int, *shape: int) -> np.ndarray:
    """−1, 0 or 1, mostly 0, so that a long sum stays below 256 and is exact in bfloat16."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-1, 2, shape) * (rng.random(shape) < 0.1)).astype(np.float32)


def label(shape: ConvShape) -> str:
    return f"{shape.C}→{shape.K} {shape.H}×{shape.W} s{shape.stride} p{shape.pad} n{shape.N}"


def pooled_cases(shape: ConvShape) -> Iterator[Case]:
    """conv+ReLU+pool and what follows it backwards."""
    attrs = {"stride": shape.stride, "pad": shape.pad}
    n, k, p, q = shape.y_shape
    small, packed = (n, k, p // 2, q // 2), (n, -(-k // 4), p // 2, q // 2)
    x, w, b = _whole(1, 2, *shape.x_shape), _few(2, *shape.w_shape), _whole(3, 2, k)
    dy, index = _normal(4, *small), np.random.default_rng(5).integers(0, 256, packed).astype(np.uint8)
    if k % 4:
        index[:, -1] &= (1 << 2 * (k % 4)) - 1
    dw, db = (shape.w_shape, "float32"), ((k,), "float32")
    yield Case("conv_relu_pool_fprop", label(shape), (x, w, b), ((small, "float32"), (packed, "uint8")), attrs, shape.gemm("fprop")[2])
    yield Case("unpool", label(shape), (dy, index), ((shape.y_shape, "float32"),))
    yield Case("conv_pool_wgrad", label(shape), (_normal(6, *shape.x_shape), dy, index), (dw, db), attrs, shape.gemm("wgrad")[2])


def relu_cases(shape: ConvShape) -> Iterator[Case]:
    """conv+ReLU, and the dgrad of a layer whose input came out of a ReLU."""
    attrs = {"stride": shape.stride, "pad": shape.pad}
    x, w, b, dy = _normal(7, *shape.x_shape), _normal(8, *shape.w_shape), _normal(9, shape.K), _normal(10, *shape.y_shape)
    yield Case("conv_relu_fprop", label(shape), (x, w, b), ((shape.y_shape, "float32"),), attrs, shape.gemm("fprop")[2])
    yield Case("conv_dgrad_relu", label(shape), (dy, w, np.maximum(x, 0)), ((shape.x_shape, "float32"),), attrs, shape.gemm("dgrad")[2])


def linear_cases(n: int, c: int, k: int) -> Iterator[Case]:
    """A linear layer with its Sigmoid or Swish, as a 1×1 convolution of 1×1 images."""
    shape, attrs = ConvShape(n, c, 1, 1, k, 1, 1, 1, 0), {"stride": 1, "pad": 0}
    ins = (_normal(16, *shape.x_shape), _normal(17, *shape.w_shape), _normal(18, k))
    for op in ("conv_sigmoid_fprop", "conv_swish_fprop"):
        yield Case(op, label(shape), ins, ((shape.y_shape, "float32"),), attrs, c)


def up_cases(shape: ConvShape) -> Iterator[Case]:
    """Upsampling folded into a 3×3 convolution; `shape` has the image before the upsampling."""
    n, c, h, w_ = shape.x_shape
    large = (n, shape.K, 2 * h, 2 * w_)
    x, w, b = np.maximum(_normal(11, *shape.x_shape), 0), _normal(12, *shape.w_shape), _normal(13, shape.K)
    dy, target = _normal(14, *large), _normal(15, *large)
    terms = {"fprop": 9 * c, "dgrad": 16 * shape.K, "wgrad": 4 * n * h * w_}
    y, dx = ((large, "float32"),), ((shape.x_shape, "float32"),)
    yield Case("upconv_fprop", label(shape), (x, w, b), y, {}, terms["fprop"])
    yield Case("upconv_relu_fprop", label(shape), (x, w, b), y, {}, terms["fprop"])
    yield Case("upconv_mse_fprop", label(shape), (x, w, b, target), (((), "float64"), *y), {}, max(terms["fprop"], numel(large)))
    yield Case("upconv_dgrad", label(shape), (dy, w), dx, {}, terms["dgrad"])
    yield Case("upconv_dgrad_relu", label(shape), (dy, w, x), dx, {}, terms["dgrad"])
    yield Case("upconv_wgrad", label(shape), (x, dy), ((shape.w_shape, "float32"), ((shape.K,), "float32")), {}, terms["wgrad"])


def gated_cases(shapes: Sequence[tuple[int, int, int, int]] = MEAN_GATED) -> Iterator[Case]:
    """Pointwise convolutions (N, C, L, channels) with GLU behind them: in training and inference, with and without what is added."""
    for n, c, length, channels in shapes:
        x, w, b, r = _normal(16, n, c, length), _normal(17, 2 * channels, c), _normal(18, 2 * channels), _normal(19, n, channels, length)
        y, z = ((n, channels, length), "float32"), ((n, 2 * channels, length), "float32")
        for plus in ((), (r,)):
            for kept in ((), (z,)):
                label = f"{n}×{c}×{length} to {channels}" + " added" * bool(plus) + " kept" * bool(kept)
                yield Case("pwconv1d_glu_fprop", label, (x, w, b, *plus), (y, *kept), {}, c + 1)


def fused_mean_cases() -> Iterator[Case]:
    """Every fused op on small shapes."""
    for shape in MEAN_FUSED:
        yield from pooled_cases(shape)
        yield from relu_cases(shape)
    yield from relu_cases(ConvShape(1, 5, 7, 9, 6, 3, 3, 2, 1))
    for vectors in ((3, 5, 6), (2, 40, 12)):
        yield from linear_cases(*vectors)
    for shape in MEAN_UP:
        yield from up_cases(shape)
    for series in MEAN_SERIES:
        yield from series_backward_cases(*series)


def fused_real_cases() -> Iterator[Case]:
    """The autoencoder's fused layers, batch 4."""
    for shape in REAL_POOLED:
        yield from pooled_cases(shape)
        yield from relu_cases(shape)
    for shape in REAL_UP:
        yield from up_cases(shape)
    for series in REAL_SERIES:
        yield from series_backward_cases(*series)
