"""Inputs on which every implementation of every op is compared with the float64 reference: mean shapes and real ones.

Mean on purpose: one image, one channel, odd heights and widths, filters that are no multiple of a tile, stride 2, windows
that overlap or leave gaps. Real: the autoencoder's layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbcnn.check.one_op import Out
from nbcnn.plan.shapes import ConvShape, numel, window_extent

MEAN_CONVS = (
    ConvShape(1, 1, 5, 7, 1, 3, 3, 1, 1),
    ConvShape(2, 3, 7, 5, 5, 3, 3, 1, 1),
    ConvShape(1, 5, 6, 9, 7, 3, 3, 2, 1),
    ConvShape(2, 4, 8, 8, 6, 5, 3, 1, 2),
    ConvShape(1, 3, 9, 9, 20, 3, 3, 1, 1),
    ConvShape(1, 20, 5, 6, 3, 3, 3, 1, 1),
    ConvShape(2, 8, 7, 7, 12, 1, 1, 1, 0),
    ConvShape(1, 2, 11, 10, 3, 4, 4, 3, 0),
    ConvShape(3, 9, 1, 1, 5, 1, 1, 1, 0),
    ConvShape(1, 16, 4, 4, 16, 3, 3, 1, 3),
    ConvShape(1, 2, 9, 9, 2, 8, 8, 1, 0),
)
REAL_CONVS = (
    ConvShape(4, 3, 32, 32, 256, 3, 3, 1, 1),
    ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1),
    ConvShape(4, 128, 8, 8, 128, 3, 3, 1, 1),
    ConvShape(4, 128, 16, 16, 256, 3, 3, 1, 1),
    ConvShape(4, 256, 32, 32, 3, 3, 3, 1, 1),
)
_IMAGES = ((1, 1, 5, 7), (2, 3, 4, 6), (1, 5, 7, 3), (2, 8, 6, 6))
_WINDOWS = ((2, 2), (3, 2), (2, 3), (3, 1))
_FACTORS = (1, 2, 3)
_LOGITS = ((1, 2), (5, 10), (37, 33))
_PRODUCTS = ((5, 7, 3), (33, 64, 40), (20, 36, 9))

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One call of one op.

    ins    NumPy operands: float32 and integers.
    outs   what it writes: (shape, dtype), or the position of an operand updated in place.
    terms  the longest sum behind one result: rounding grows with its square root.
    """

    op: str
    label: str
    ins: tuple[np.ndarray, ...]
    outs: tuple[Out, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    terms: int = 1


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def conv_cases(shape: ConvShape) -> Iterator[Case]:
    """The three passes of one convolution, fprop and wgrad with and without a bias."""
    x, w, b, dy = _normal(1, *shape.x_shape), _normal(2, *shape.w_shape), _normal(3, shape.K), _normal(4, *shape.y_shape)
    attrs = {"stride": shape.stride, "pad": shape.pad}
    label = f"{shape.C}→{shape.K} {shape.H}×{shape.W} {shape.R}×{shape.S} s{shape.stride} p{shape.pad} n{shape.N}"
    y, dw, db = (shape.y_shape, "float32"), (shape.w_shape, "float32"), ((shape.K,), "float32")
    terms = {path: shape.gemm(path)[2] for path in ("fprop", "dgrad", "wgrad")}
    yield Case("conv_fprop", label, (x, w, b), (y,), attrs, terms["fprop"])
    yield Case("conv_fprop", label + " no bias", (x, w), (y,), attrs, terms["fprop"])
    yield Case("conv_dgrad", label, (dy, w), ((shape.x_shape, "float32"),), attrs, terms["dgrad"])
    yield Case("conv_wgrad", label, (x, dy), (dw, db), attrs, terms["wgrad"])
    yield Case("conv_wgrad", label + " no bias", (x, dy), (dw,), attrs, terms["wgrad"])


MEAN_SERIES = (
    # N, C, L, T: one of everything; a single tap; taps as long as the series, and longer; odd; a length no multiple of four.
    (1, 1, 1, 1),
    (1, 1, 7, 1),
    (3, 2, 8, 8),
    (2, 3, 5, 9),
    (5, 2, 13, 3),
    (1, 4, 24, 5),
)
REAL_SERIES = ((37, 8, 48, 48), (33, 4, 300, 48), (2, 8, 1024, 64), (3, 5, 100, 7))


def series_cases(n: int, c: int, length: int, taps: int) -> Iterator[Case]:
    """The three passes of a depthwise convolution of series, both paddings, with and without a skip."""
    x, w, d, dy = _normal(31, n, c, length), _normal(32, c, taps), _normal(33, c), _normal(34, n, c, length)
    y, dw, dd = ((n, c, length), "float32"), ((c, taps), "float32"), ((c,), "float32")
    for padding in ("causal", "same"):
        attrs, label = {"padding": padding}, f"{n}×{c}×{length} {taps} taps {padding}"
        yield Case("dwconv1d_fprop", label, (x, w), (y,), attrs, taps)
        yield Case("dwconv1d_fprop", label + " skip", (x, w, d), (y,), attrs, taps + 1)
        yield Case("dwconv1d_dgrad", label, (dy, w), (y,), attrs, taps)
        yield Case("dwconv1d_dgrad", label + " skip", (dy, w, d), (y,), attrs, taps + 1)
        yield Case("dwconv1d_wgrad", label, (x, dy), (dw,), attrs, n * length)
        yield Case("dwconv1d_wgrad", label + " skip", (x, dy), (dw, dd), attrs, n * length)


MEAN_POINTWISE = ((1, 1, 1, 1), (2, 3, 5, 7), (3, 4, 9, 13), (2, 20, 7, 6))
REAL_POINTWISE = ((9, 128, 48, 256), (5, 4, 48, 128))


def pointwise_cases(n: int, c: int, length: int, k: int) -> Iterator[Case]:
    """The three passes of a pointwise convolution of series c → k, with and without a bias."""
    x, w, b, dy = _normal(35, n, c, length), _normal(36, k, c), _normal(37, k), _normal(38, n, k, length)
    y, dw, db = ((n, k, length), "float32"), ((k, c), "float32"), ((k,), "float32")
    label = f"{n}×{c}×{length} to {k}"
    yield Case("pwconv1d_fprop", label, (x, w), (y,), {}, c)
    yield Case("pwconv1d_fprop", label + " bias", (x, w, b), (y,), {}, c + 1)
    yield Case("pwconv1d_dgrad", label, (dy, w), (((n, c, length), "float32"),), {}, k)
    yield Case("pwconv1d_wgrad", label, (x, dy), (dw,), {}, n * length)
    yield Case("pwconv1d_wgrad", label + " bias", (x, dy), (dw, db), {}, n * length)


def state_space_cases() -> Iterator[Case]:
    """Filters of one state and tap, of odd sizes, of more states and taps than a block has threads, and of slow states (|z| < 1e-3)."""
    for c, states, taps, slow in ((1, 1, 1, 0.0), (2, 3, 7, 0.0), (2, 70, 65, 0.0), (2, 4, 5, -5.0)):
        log_dt = (-3 + 0.5 * _normal(39, c) + slow).astype(np.float32)
        a_re, a_im = 0.5 * _normal(40, c, states) + np.float32(slow / 2), 2 * _normal(41, c, states) * np.float32(np.exp(slow / 2))
        params = (log_dt, a_re, a_im, _normal(42, c, states), _normal(43, c, states))
        label = f"{c} channels, {states} states, {taps} taps" + (", slow" if slow else "")
        yield Case("s4kernel_fprop", label, params, (((c, taps), "float32"),))
        grads = tuple((p.shape, "float32") for p in params)
        yield Case("s4kernel_dgrad", label, (_normal(44, c, taps), *params), grads)


def series_layer_cases() -> Iterator[Case]:
    """What stands between the convolutions of series."""
    for n, c, length in ((1, 1, 1), (2, 3, 5), (3, 4, 130)):
        label, one, two = f"{n}×{c}×{length}", ((n, c, length), "float32"), ((n, 2 * c, length), "float32")
        x, dy = _normal(45, n, 2 * c, length), _normal(46, n, c, length)
        yield Case("glu_fprop", label, (x,), (one,), {}, 4)
        yield Case("glu_dgrad", label, (dy, x), (two,), {}, 4)
        yield Case("last_fprop", label, (dy,), (((n, c), "float32"),))
        yield Case("last_dgrad", label, (dy[:, :, 0].copy(),), (one,))


def series_backward_cases(n: int, c: int, length: int, taps: int) -> Iterator[Case]:
    """Both gradients of a depthwise convolution of series in one op."""
    x, w, d, dy = _normal(31, n, c, length), _normal(32, c, taps), _normal(33, c), _normal(34, n, c, length)
    dx, dw, dd = ((n, c, length), "float32"), ((c, taps), "float32"), ((c,), "float32")
    for padding in ("causal", "same"):
        attrs, label, terms = {"padding": padding}, f"{n}×{c}×{length} {taps} taps {padding}", max(n * length, taps + 1)
        yield Case("dwconv1d_bwd", label, (dy, x, w), (dx, dw), attrs, terms)
        yield Case("dwconv1d_bwd", label + " skip", (dy, x, w, d), (dx, dw, dd), attrs, terms)


def activation_cases(images: Shapes = _IMAGES) -> Iterator[Case]:
    for shape in images:
        x, dy = _normal(5, *shape), _normal(6, *shape)
        label, out = "×".join(map(str, shape)), ((shape, "float32"),)
        for op, attrs, saved in (
            ("relu", {}, np.maximum(x, 0)),
            ("leaky_relu", {"slope": 0.1}, np.where(x > 0, x, np.float32(0.1) * x)),
            ("sigmoid", {}, (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)),
            ("swish", {}, x),
            ("gelu", {}, x),
        ):
            yield Case(f"{op}_fprop", label, (x,), out, attrs, 4)
            yield Case(f"{op}_dgrad", label, (dy, saved), out, attrs, 4)
        yield Case("add", label, (x, dy), out)


def resampling_cases(images: Shapes = _IMAGES, windows: Shapes = _WINDOWS, factors: Sequence[int] = _FACTORS) -> Iterator[Case]:
    for shape in images:
        n, c, h, w = shape
        x, label = _normal(7, *shape), "×".join(map(str, shape))
        for size, stride in windows:
            if size > min(h, w):
                continue
            pooled = (n, c, window_extent(h, size, stride), window_extent(w, size, stride))
            attrs, dy = {"size": size, "stride": stride}, _normal(8, *pooled)
            index = np.random.default_rng(9).integers(0, size * size, pooled).astype(np.uint8)
            tag = f"{label} {size}/{stride}"
            yield Case("maxpool_fprop", tag, (x,), ((pooled, "float32"), (pooled, "uint8")), attrs)
            yield Case("maxpool_dgrad", tag, (dy, index), ((shape, "float32"),), attrs, size * size)
            yield Case("avgpool_fprop", tag, (x,), ((pooled, "float32"),), attrs, size * size)
            yield Case("avgpool_dgrad", tag, (dy,), ((shape, "float32"),), attrs, size * size)
        for factor in factors:
            large = (n, c, h * factor, w * factor)
            tag = f"{label} ×{factor}"
            yield Case("upsample_fprop", tag, (x,), ((large, "float32"),), {"factor": factor})
            yield Case("upsample_dgrad", tag, (_normal(10, *large),), ((shape, "float32"),), {"factor": factor}, factor**2)
        flat = (n, numel(shape[1:]))
        yield Case("flatten_fprop", label, (x,), ((flat, "float32"),))
        yield Case("flatten_dgrad", label, (_normal(11, *flat),), ((shape, "float32"),))


def loss_cases(images: Shapes = _IMAGES, logits_of: Shapes = _LOGITS) -> Iterator[Case]:
    for shape in images:
        y, target, label = _normal(12, *shape), _normal(13, *shape), "×".join(map(str, shape))
        yield Case("mse_fprop", label, (y, target), (((), "float64"),), {}, numel(shape))
        yield Case("mse_dgrad", label, (y, target), ((shape, "float32"),))
    for n in (1, 7, 600):
        y, target = _normal(47, n, 1) + np.float32(0.8), np.abs(9 * _normal(48, n, 1))
        p, t = (np.log1p(np.maximum(v.astype(np.float64), 0) + 1e-6) for v in (3 * y, target))
        loss = np.array(np.sqrt(np.square(p - t).mean()))
        yield Case("rmsle_fprop", f"{n}", (y, target), (((), "float64"),), {"unit": 3.0}, n)
        yield Case("rmsle_dgrad", f"{n}", (y, target, loss), (((n, 1), "float32"),), {"unit": 3.0}, 16)
    for n, f in logits_of:
        logits, labels = 3 * _normal(14, n, f), np.random.default_rng(15).integers(0, f, n).astype(np.int32)
        p = np.exp(logits.astype(np.float64))
        p = (p / p.sum(1, keepdims=True)).astype(np.float32)
        yield Case("softmax_xent_fprop", f"{n}×{f}", (logits, labels), (((n, f), "float32"), ((), "float64")), {}, f)
        yield Case("softmax_xent_dgrad", f"{n}×{f}", (p, labels), (((n, f), "float32"),))


def training_cases(count: int = 1003, image: tuple[int, ...] = (3, 3, 5, 4)) -> Iterator[Case]:
    """Input, update and bookkeeping: what a training step runs besides its layers. `count` weights, a batch of shape `image`."""
    state = np.array([3, 1, 2, 99, 0, 0, 0, 0], np.int64)
    images = np.random.default_rng(16).integers(0, 256, (image[0] + 3, *image[1:])).astype(np.uint8)
    order, labels = np.random.default_rng(23).permutation(image[0] + 3).astype(np.int32), np.arange(6, dtype=np.int32) * 7
    for flip in (False, True):
        yield Case("gather", f"flip {flip}", (images, order, state), ((image, "float32"),), {"flip": flip})
    order = np.array([4, 0, 5, 1, 3, 2], np.int32)
    yield Case("gather_labels", "3 of 6", (labels, order, state), (((3,), "int32"),))
    rows, targets, starts = _normal(23, 40 * 3), _normal(24, 40), np.array([30, 0, 7, 21, 12, 3], np.int32)
    wanted = (((3, 3, 9), "float32"), ((3,), "float32"))
    yield Case("gather_windows", "3 of 6", (rows, targets, starts, order, state), wanted)
    rates = np.linspace(0.1, 0.01, 8).astype(np.float32)
    w, g, m, v = _normal(17, count), _normal(18, count), _normal(19, count), _normal(20, count) ** 2
    norm = np.array(np.linalg.norm(g.astype(np.float64)))
    plain = {"weight_decay": 0.0, "clip_value": 0.0, "clip_norm": 0.0, "decayed": 512}
    clipped = {"weight_decay": 0.01, "clip_value": 0.5, "clip_norm": 2.0, "decayed": 512}
    sgd, adam = {"momentum": 0.9}, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    yield Case("sgd", "momentum", (w, g, m, rates, state), (0, 2, 4), sgd | plain, 4)
    yield Case("sgd", "clipped, decayed", (w, g, m, rates, state, norm), (0, 2, 4), sgd | clipped, 4)
    yield Case("adam", "plain", (w, g, m, v, rates, state), (0, 2, 3, 5), adam | plain, 4)
    yield Case("adam", "clipped, decayed", (w, g, m, v, rates, state, norm), (0, 2, 3, 5), adam | clipped, 4)
    yield Case("grad_norm", f"{count}", (g,), (((), "float64"),), {}, count)
    index = np.random.default_rng(21).integers(-1, count, 777).astype(np.int32)
    yield Case("pack_weights", f"777 of {count}", (w, index), (((777,), "float32"),))
    for terms in (1, 4, 6):
        sums = np.random.default_rng(22).integers(-1, count, (terms, 260)).astype(np.int32)
        yield Case("pack_weights", f"{terms} terms", (w, sums), (((260,), "float32"),), {}, terms)
    yield Case("advance", "64 images", (np.array(0.5), state, np.arange(4.0)), (1, 2), {"count": 64})


def gemm_cases(sizes: Shapes = _PRODUCTS) -> Iterator[Case]:
    """Products of matrices, sizes M, K, N."""
    for m, k, n in sizes:
        yield Case("gemm", f"{m}×{k}×{n}", (_normal(24, m, k), _normal(25, n, k)), (((m, n), "float32"),), {}, k)


def mean_cases() -> Iterator[Case]:
    """Every op on shapes small enough for the simulator."""
    for shape in MEAN_CONVS:
        yield from conv_cases(shape)
    for series in MEAN_SERIES:
        yield from series_cases(*series)
    for pointwise in MEAN_POINTWISE:
        yield from pointwise_cases(*pointwise)
    yield from state_space_cases()
    yield from series_layer_cases()
    yield from activation_cases()
    yield from resampling_cases()
    yield from loss_cases()
    yield from gemm_cases()
    yield from training_cases()


def real_cases() -> Iterator[Case]:
    """The autoencoder's convolutions, batch 4, and depthwise ones of the lengths that are measured."""
    for shape in REAL_CONVS:
        yield from conv_cases(shape)
    for series in REAL_SERIES:
        yield from series_cases(*series)
    for pointwise in REAL_POINTWISE:
        yield from pointwise_cases(*pointwise)
