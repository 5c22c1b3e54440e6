"""Tests of pooling over any windows, of global means and of resizing: references against plain loops, kernels against references."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbcnn.check.one_op import run_op
from nbcnn.gpu.device import Host
from nbcnn.modes import named
from nbcnn.ops.images import global_mean, pool, resize
from nbcnn.ops.kernel.call import host
from nbcnn.plan.shapes import pooled_extent

LAYOUTS = ["NCHW", "NHWC"]


@pytest.mark.parametrize(
    ("size", "window", "stride", "pad", "ceil", "count"),
    [(7, 3, 2, 1, False, 4), (8, 3, 2, 1, False, 4), (8, 3, 2, 1, True, 5), (7, 3, 2, 0, True, 3), (5, 2, 2, 0, True, 3), (5, 2, 3, 1, True, 2)],
)
def test_extents(size, window, stride, pad, ceil, count):
    assert pooled_extent(size, window, stride, pad, ceil) == count
    # From PyTorch's documentation: a window begins inside the elements or the padding before them.
    starts = [at * stride - pad for at in range(100)]
    fits = [s for s in starts if (s < size if ceil else s + window <= size + pad)]
    last = math.ceil((size + 2 * pad - window) / stride) + 1
    assert count == min(len(fits), last)


def windows_of(shape, size, stride, pad, ceil):
    return tuple(pooled_extent(shape[2 + at], size[at], stride[at], pad[at], ceil) for at in (0, 1))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("size", "stride", "pad", "ceil"), pool.WINDOWS)
def test_references_against_loops(rng, size, stride, pad, ceil, padded):
    x = rng.integers(-3, 4, (2, 2, 7, 6)).astype(np.float64)
    P, Q = windows_of(x.shape, size, stride, pad, ceil)
    y, index, mean = np.empty((2, 2, P, Q)), np.empty((2, 2, P, Q), np.uint8), np.empty((2, 2, P, Q))
    pool.window_max_fprop(x, y, index, size=size, stride=stride, pad=pad)
    pool.window_mean_fprop(x, mean, size=size, stride=stride, pad=pad, padded=padded)
    dy, dx, spread = rng.standard_normal(y.shape), np.zeros_like(x), np.zeros_like(x)
    for n, c, p, q in np.ndindex(y.shape):
        taps, padding = {}, 0
        for r in range(size[0]):
            for s in range(size[1]):
                h, w = p * stride[0] - pad[0] + r, q * stride[1] - pad[1] + s
                if 0 <= h < 7 and 0 <= w < 6:
                    taps[r * size[1] + s] = (h, w)
                elif -pad[0] <= h < 7 + pad[0] and -pad[1] <= w < 6 + pad[1]:
                    padding += 1
        best = max(taps, key=lambda tap: (x[(n, c, *taps[tap])], -tap))
        assert (y[n, c, p, q], index[n, c, p, q]) == (x[(n, c, *taps[best])], best)
        count = len(taps) + (padding if padded else 0)
        assert mean[n, c, p, q] == pytest.approx(sum(x[(n, c, *at)] for at in taps.values()) / count, abs=1e-14)
        dx[(n, c, *taps[best])] += dy[n, c, p, q]
        for at in taps.values():
            spread[(n, c, *at)] += dy[n, c, p, q] / count
    got = np.full_like(x, np.nan)
    pool.window_max_dgrad(dy, index, got, size=size, stride=stride, pad=pad)
    np.testing.assert_allclose(got, dx, atol=1e-13)
    pool.window_mean_dgrad(dy, got, size=size, stride=stride, pad=pad, padded=padded)
    np.testing.assert_allclose(got, spread, atol=1e-13)


def test_padding_is_never_the_maximum():
    x, y, index = np.full((1, 1, 3, 3), -np.inf), np.empty((1, 1, 2, 2)), np.empty((1, 1, 2, 2), np.uint8)
    pool.window_max_fprop(x, y, index, size=(3, 3), stride=(2, 2), pad=(1, 1))
    assert (y == -np.inf).all()
    assert index[0, 0].tolist() == [[4, 3], [1, 0]]  # the first tap of each window that is inside
    x[0, 0, 1, 1] = np.nan
    pool.window_max_fprop(x, y, index, size=(3, 3), stride=(2, 2), pad=(1, 1))
    assert np.isnan(y).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (1, 4, 6, 5)])
@pytest.mark.parametrize(("size", "stride", "pad", "ceil"), pool.WINDOWS)
def test_maxima_of_kernels(device, rng, shape, layout, size, stride, pad, ceil):
    x, attrs = rng.integers(-3, 4, shape).astype(np.float32), {"size": size, "stride": stride, "pad": pad}
    pooled = (*shape[:2], *windows_of(shape, size, stride, pad, ceil))
    outs = [(pooled, "float32"), (pooled, "uint8")]
    got = run_op(pool.OPS[named("window_max_fprop")], "window_max_fprop", [x], outs, device=device, attrs=attrs, layout=layout)
    want = run_op(host(pool.window_max_fprop), "window_max_fprop", [x], outs, device=Host(), attrs=attrs)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_global_means(rng):
    x, y, dx = rng.standard_normal((2, 3, 4, 5)), np.empty((2, 3)), np.empty((2, 3, 4, 5))
    global_mean.global_mean_fprop(x, y)
    np.testing.assert_allclose(y, x.reshape(2, 3, 20).mean(2), rtol=1e-12)
    v = rng.standard_normal((2, 3))
    global_mean.global_mean_dgrad(v, dx)
    assert np.vdot(v, y) == pytest.approx(np.vdot(dx, x), rel=1e-12)


def test_bilinear_against_the_formula(rng):
    x, y = rng.standard_normal((1, 1, 3, 4)), np.empty((1, 1, 6, 8))
    resize.bilinear_fprop(x, y)
    for h, w in np.ndindex(6, 8):
        # The centre of pixel h of the doubled image lies at (h + ½)/2 − ½ of the image, clamped at its edges.
        at, beside = (np.clip((h + 0.5) / 2 - 0.5, 0, 2), np.clip((w + 0.5) / 2 - 0.5, 0, 3))
        p, q = min(int(at), 1), min(int(beside), 2)
        a, b = at - p, beside - q
        corners = x[0, 0, p : p + 2, q : q + 2]
        assert y[0, 0, h, w] == pytest.approx(np.array([1 - a, a]) @ corners @ np.array([1 - b, b]), abs=1e-14)


@pytest.mark.parametrize("op", ["bilinear", "repeat"])
def test_gradients_of_resizing_are_transposes(rng, op):
    attrs, large = ({}, (2, 3, 8, 10)) if op == "bilinear" else ({"factors": (2, 3)}, (2, 3, 8, 15))
    u, v, y, dx = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal(large), np.empty(large), np.empty((2, 3, 4, 5))
    getattr(resize, f"{op}_fprop")(u, y, **attrs)
    getattr(resize, f"{op}_dgrad")(v, dx, **attrs)
    assert np.vdot(v, y) == pytest.approx(np.vdot(dx, u), rel=1e-12)


def test_repeating_is_krons(rng):
    x, y = rng.standard_normal((2, 3, 4, 5)), np.empty((2, 3, 8, 15))
    resize.repeat_fprop(x, y, factors=(2, 3))
    assert (y == np.kron(x, np.ones((2, 3)))).all()
