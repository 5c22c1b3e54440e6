"""Tests of the BLAS form of the convolution against its plain definition, and against itself transposed, in float64."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from nbcnn.modes import named
from nbcnn.ops.conv import reference
from nbcnn.ops.conv.reference import HOST, conv_dgrad, conv_fprop, conv_wgrad, direct_dgrad, direct_fprop, direct_wgrad
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape

MEAN_SHAPES = [
    ConvShape(N=1, C=1, H=1, W=1, K=1, R=1, S=1),
    ConvShape(N=1, C=3, H=7, W=5, K=4, R=3, S=3, pad=1),
    ConvShape(N=2, C=4, H=7, W=5, K=3, R=3, S=3, pad=1),
    ConvShape(N=3, C=5, H=6, W=9, K=2, R=5, S=5, pad=2),
    ConvShape(N=2, C=1, H=8, W=6, K=3, R=3, S=2, pad=1),
    ConvShape(N=2, C=6, H=8, W=5, K=1, R=2, S=3, pad=0),
    ConvShape(N=2, C=4, H=9, W=7, K=2, R=3, S=3, stride=2, pad=1),
    ConvShape(N=1, C=2, H=10, W=11, K=5, R=3, S=3, stride=3, pad=0),
    ConvShape(N=2, C=3, H=5, W=4, K=2, R=1, S=1, stride=2, pad=0),
    ConvShape(N=2, C=2, H=3, W=4, K=3, R=1, S=1, pad=2),
    ConvShape(N=2, C=3, H=4, W=3, K=2, R=2, S=2, pad=3),
    ConvShape(N=1, C=2, H=4, W=6, K=2, R=3, S=3, stride=2, pad=3),
    ConvShape(N=1, C=2, H=2, W=3, K=2, R=5, S=5, pad=3),
]
# Both sums have the same GK terms in another order: each is off by less than eps·√GK on random data.
EPS = np.finfo(np.float64).eps


@pytest.fixture(params=MEAN_SHAPES, ids=str)
def shape(request):
    return request.param


@pytest.fixture(params=[1, 1 << 24], ids=["one image at a time", "all images at once"])
def workspace(request, monkeypatch):
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", request.param)


def operands(shape, rng):
    x, w, dy = (rng.standard_normal(s) for s in (shape.x_shape, shape.w_shape, shape.y_shape))
    return x, w, rng.standard_normal(shape.K), dy, {"stride": shape.stride, "pad": shape.pad}


def distance(got, expected):
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny)


def bound(shape, path):
    return 4 * EPS * np.sqrt(shape.gemm(path)[2])


@pytest.mark.usefixtures("workspace")
class TestAgainstTheDefinition:
    def test_fprop(self, shape, rng):
        x, w, b, dy, attrs = operands(shape, rng)
        y = np.full_like(dy, np.nan)
        conv_fprop(x, w, b, y, **attrs)
        assert distance(y, direct_fprop(x, w, b, **attrs)) <= bound(shape, "fprop")

    def test_fprop_without_bias_equals_a_zero_bias(self, shape, rng):
        x, w, b, dy, attrs = operands(shape, rng)
        y, y0 = np.full_like(dy, np.nan), np.full_like(dy, np.nan)
        conv_fprop(x, w, y, **attrs)
        conv_fprop(x, w, 0 * b, y0, **attrs)
        np.testing.assert_array_equal(y, y0)

    def test_dgrad(self, shape, rng):
        x, w, _, dy, attrs = operands(shape, rng)
        dx = np.full_like(x, np.nan)
        conv_dgrad(dy, w, dx, **attrs)
        assert distance(dx, direct_dgrad(dy, w, x.shape, **attrs)) <= bound(shape, "dgrad")

    def test_wgrad(self, shape, rng):
        x, w, b, dy, attrs = operands(shape, rng)
        dw, db, dw_alone = np.full_like(w, np.nan), np.full_like(b, np.nan), np.full_like(w, np.nan)
        conv_wgrad(x, dy, dw, db, **attrs)
        conv_wgrad(x, dy, dw_alone, **attrs)
        expected_dw, expected_db = direct_wgrad(x, dy, w.shape, **attrs)
        assert distance(dw, expected_dw) <= bound(shape, "wgrad")
        assert distance(db, expected_db) <= bound(shape, "wgrad")
        np.testing.assert_array_equal(dw, dw_alone)


def test_gradients_are_the_transpose_of_the_forward_pass(shape, rng):
    """y is linear in x, in w and in b, so ⟨v, y(u)⟩ = ⟨gradient of v, u⟩ exactly, up to rounding."""
    x, w, b, v, attrs = operands(shape, rng)
    y, dx, dw, db = (np.empty_like(a) for a in (v, x, w, b))
    conv_dgrad(v, w, dx, **attrs)
    conv_wgrad(x, v, dw, db, **attrs)
    # Rounding is relative to the sum of magnitudes: a dot product may cancel.
    slack = 4 * EPS * np.sqrt(shape.gemm("fprop")[2]) * np.linalg.norm(v)
    conv_fprop(x, w, y, **attrs)
    assert abs(np.vdot(v, y) - np.vdot(dx, x)) <= slack * np.linalg.norm(w) * np.linalg.norm(x)
    assert abs(np.vdot(v, y) - np.vdot(dw, w)) <= slack * np.linalg.norm(w) * np.linalg.norm(x)
    conv_fprop(np.zeros_like(x), w, b, y, **attrs)
    assert abs(np.vdot(v, y) - np.vdot(db, b)) <= slack * np.sqrt(y.size) * np.linalg.norm(b)


@pytest.mark.parametrize(("C", "K"), [(4, 8), (8, 4)])
def test_memory_does_not_grow_with_the_batch(C, K, monkeypatch, rng):
    """The columns of the whole batch would take eleven times the workspace."""
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 1 << 17)
    x, w, b, dy, attrs = operands(ConvShape(N=80, C=C, H=8, W=8, K=K, R=3, S=3, pad=1), rng)
    y, dx, dw, db = (np.empty_like(a) for a in (dy, x, w, b))
    tracemalloc.start()
    conv_fprop(x, w, b, y, **attrs)
    conv_dgrad(dy, w, dx, **attrs)
    conv_wgrad(x, dy, dw, db, **attrs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Columns, and for the weight gradient a chunk of dy with its channels in front.
    assert peak <= 2 * reference.WORKSPACE_BYTES


@pytest.mark.parametrize("size", [1, 3, 4, 8])
@pytest.mark.parametrize(("R", "C", "K"), [(1, 64, 10), (1, 10, 64), (3, 8, 33), (3, 33, 8)])
def test_an_image_has_the_same_output_in_any_batch(size, R, C, K, rng):
    shape = ConvShape(N=40, C=C, H=size, W=size, K=K, R=R, S=R, pad=R // 2)
    x, w, b, dy, attrs = operands(shape, rng)
    x, w, b, y = (each.astype(np.float32) for each in (x, w, b, dy))
    conv_fprop(x, w, b, y, **attrs)
    for first, count in ((0, 1), (1, 2), (3, 5), (7, 33)):
        part = np.empty_like(y[:count])
        conv_fprop(x[first : first + count], w, b, part, **attrs)
        np.testing.assert_array_equal(part, y[first : first + count])


def test_host_row_runs_on_flat_arrays(rng):
    shape = ConvShape(N=2, C=3, H=5, W=4, K=2, R=3, S=3, pad=1)
    x, w, b, dy, attrs = operands(shape, rng)
    y = np.full(dy.size, np.nan)
    shapes = (x.shape, w.shape, b.shape)
    call = Call(Op("conv", "fprop"), (x.reshape(-1), w.reshape(-1), b), (y,), shapes, (dy.shape,), attrs)
    for step in HOST[named("conv_fprop")].bind(call):
        step.run()
    expected = np.empty_like(dy)
    conv_fprop(x, w, b, expected, **attrs)
    np.testing.assert_array_equal(y.reshape(dy.shape), expected)


@pytest.mark.parametrize("size", [1, 4, 8, 9], ids=lambda size: f"{size}x{size} outputs")
@pytest.mark.parametrize(("R", "C", "K"), [(1, 4, 6), (1, 6, 4), (3, 4, 6), (3, 6, 4)])
@pytest.mark.parametrize("stride", [1, 2])
def test_small_outputs_in_chunks_that_do_not_divide_the_batch(size, R, C, K, stride, monkeypatch, rng):
    """Gradients of small outputs are one product per chunk, of single pixels per product of rows; the last chunk of five images is shorter."""
    shape = ConvShape(N=5, C=C, H=size * stride, W=size * stride, K=K, R=R, S=R, stride=stride, pad=R // 2)
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 2 * 8 * max(C, K) * R * R * size * size)
    x, w, b, dy, attrs = operands(shape, rng)
    y, dx, dw, db = (np.full_like(a, np.nan) for a in (dy, x, w, b))
    conv_fprop(x, w, b, y, **attrs)
    conv_dgrad(dy, w, dx, **attrs)
    conv_wgrad(x, dy, dw, db, **attrs)
    assert distance(y, direct_fprop(x, w, b, **attrs)) <= bound(shape, "fprop")
    assert distance(dx, direct_dgrad(dy, w, x.shape, **attrs)) <= bound(shape, "dgrad")
    expected_dw, expected_db = direct_wgrad(x, dy, w.shape, **attrs)
    assert distance(dw, expected_dw) <= bound(shape, "wgrad")
    assert distance(db, expected_db) <= bound(shape, "wgrad")
