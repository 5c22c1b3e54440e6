"""Tests of pooling, upsampling, flattening, layout changes: references against plain loops, transposes, kernels against references."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.check.one_op import run_op, to_layout
from nbcnn.modes import named
from nbcnn.ops.images import avgpool, convert, flatten, maxpool, upsample
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel, window_extent

LAYOUTS = ["NCHW", "NHWC"]
# (N,C,H,W): one of everything; odd; eight channels, and W a multiple of 8 over an odd H; W a multiple of 8 over an even H.
SHAPES = [(1, 1, 5, 7), (2, 5, 6, 3), (1, 8, 5, 8), (1, 3, 4, 16)]
# (size, stride): tiles of 1, 2, 3; overlap by one and by two; a gap.
WINDOWS = [(1, 1), (2, 2), (3, 3), (3, 2), (3, 1), (2, 3)]
FACTORS = [1, 2, 3]


def pooled(shape: tuple[int, ...], size: int, stride: int) -> tuple[int, int, int, int]:
    n, c, h, w = shape
    return n, c, window_extent(h, size, stride), window_extent(w, size, stride)


def scaled(shape: tuple[int, ...], factor: int) -> tuple[int, int, int, int]:
    n, c, h, w = shape
    return n, c, h * factor, w * factor


def images(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Few distinct values, so that windows hold ties."""
    return rng.integers(-3, 4, shape).astype(np.float32)


def maxpool_pair(x: np.ndarray, size: int, stride: int, dtype: str = "uint8") -> tuple[np.ndarray, np.ndarray]:
    shape = pooled(x.shape, size, stride)
    y, index = np.full(shape, np.nan, x.dtype), np.full(shape, 255, dtype)
    maxpool.maxpool_fprop(x, y, index, size=size, stride=stride)
    return y, index


def apply(reference, x: np.ndarray, shape: tuple[int, ...], **attrs) -> np.ndarray:
    out = np.full(shape, np.nan, x.dtype)
    reference(x, out, **attrs)
    return out


# References against loops


@pytest.mark.parametrize(("size", "stride"), WINDOWS)
def test_pooling_references_against_loops(size, stride, rng):
    x = images(rng, (2, 2, 7, 6)).astype(np.float64)
    y, index = maxpool_pair(x, size, stride)
    mean = apply(avgpool.avgpool_fprop, x, y.shape, size=size, stride=stride)
    dy = rng.standard_normal(y.shape)
    dx, spread = np.zeros_like(x), np.zeros_like(x)
    for n, c, p, q in np.ndindex(y.shape):
        window = (n, c, slice(p * stride, p * stride + size), slice(q * stride, q * stride + size))
        first = int(np.argmax(x[window]))  # the first of equals, row by row
        assert (y[n, c, p, q], index[n, c, p, q]) == (x[window].max(), first)
        assert mean[n, c, p, q] == pytest.approx(x[window].mean(), abs=1e-14)
        dx[n, c, p * stride + first // size, q * stride + first % size] += dy[n, c, p, q]
        spread[window] += dy[n, c, p, q] / size**2
    got = np.full_like(x, np.nan)
    maxpool.maxpool_dgrad(dy, index, got, size=size, stride=stride)
    np.testing.assert_allclose(got, dx, atol=1e-13)
    np.testing.assert_allclose(apply(avgpool.avgpool_dgrad, dy, x.shape, size=size, stride=stride), spread, atol=1e-13)


@pytest.mark.parametrize("factor", FACTORS)
def test_upsample_reference_against_kron(factor, rng):
    x = rng.standard_normal((2, 3, 4, 5))
    y = apply(upsample.upsample_fprop, x, scaled(x.shape, factor), factor=factor)
    assert (y == np.kron(x, np.ones((factor, factor)))).all()


def test_maxpool_takes_the_first_of_equals_and_the_first_nan():
    x = np.array([[1, 1, 5, np.nan], [1, 1, np.nan, 9]], np.float64).reshape(1, 1, 2, 4)
    y, index = maxpool_pair(x, 2, 2)
    np.testing.assert_array_equal(y.ravel(), [1, np.nan])
    assert index.ravel().tolist() == [0, 1]


def test_maxpool_of_minus_infinity():
    y, index = maxpool_pair(np.full((1, 1, 2, 2), -np.inf), 2, 2)
    assert y.item() == -np.inf
    assert index.item() == 0


# Linear maps: <v, J u> = <Jᵀ v, u>


@pytest.mark.parametrize(("size", "stride"), WINDOWS)
def test_pooling_gradients_are_transposes(size, stride, rng):
    x, u = (rng.standard_normal((2, 3, 7, 8)) for _ in range(2))
    y, index = maxpool_pair(x, size, stride)
    v = rng.standard_normal(y.shape)
    # With the winners held fixed max pooling is linear: nudge x by too little to change them.
    nudge = 1e-7
    moved, same = maxpool_pair(x + nudge * u, size, stride)
    assert (same == index).all()
    dx = np.full_like(x, np.nan)
    maxpool.maxpool_dgrad(v, index, dx, size=size, stride=stride)
    # (y + nudge · Ju) - y loses eps · |y| / nudge = 1e-8 to rounding.
    assert np.vdot(v, (moved - y) / nudge) == pytest.approx(np.vdot(dx, u), abs=1e-7 * np.linalg.norm(v))
    mean = apply(avgpool.avgpool_fprop, u, y.shape, size=size, stride=stride)
    assert np.vdot(v, mean) == pytest.approx(np.vdot(apply(avgpool.avgpool_dgrad, v, u.shape, size=size, stride=stride), u), rel=1e-12)


@pytest.mark.parametrize("factor", FACTORS)
def test_upsample_gradient_is_the_transpose(factor, rng):
    u = rng.standard_normal((2, 3, 4, 5))
    v = rng.standard_normal(scaled(u.shape, factor))
    y = apply(upsample.upsample_fprop, u, v.shape, factor=factor)
    assert np.vdot(v, y) == pytest.approx(np.vdot(apply(upsample.upsample_dgrad, v, u.shape, factor=factor), u), rel=1e-12)


def test_flatten_and_convert_references(rng):
    x = rng.standard_normal((2, 3, 4, 5))
    flat = apply(flatten.flatten_fprop, x, (2, 60))
    assert (flat == x.reshape(2, 60)).all()
    assert (apply(flatten.flatten_dgrad, flat, x.shape) == x).all()
    assert (apply(convert.convert, x, x.shape, source="NCHW", target="NHWC") == x).all()


# Kernels against references, in both layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("size", "stride"), WINDOWS)
def test_maxpool_kernels(size, stride, shape, layout, device, rng):
    x, attrs = images(rng, shape), {"size": size, "stride": stride}
    wanted_y, wanted_index = maxpool_pair(x, size, stride)
    outs = [(wanted_y.shape, "float32"), (wanted_y.shape, "uint8")]
    y, index = run_op(Impl(maxpool.bind_fprop), "maxpool_fprop", [x], outs, device=device, attrs=attrs, layout=layout)
    assert (y == wanted_y).all()
    assert (index == wanted_index).all()
    dy = rng.standard_normal(y.shape).astype(np.float32)
    (dx,) = run_op(Impl(maxpool.bind_dgrad), "maxpool_dgrad", [dy, index], [(shape, "float32")], device=device, attrs=attrs, layout=layout)
    wanted = np.empty_like(x)
    maxpool.maxpool_dgrad(dy, index, wanted, size=size, stride=stride)
    # The same sums in the same order: no tolerance.
    assert (dx == wanted).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "size"), [((1, 4, 3, 8), 2), ((1, 4, 17, 18), 17)])
def test_maxpool_kernels_with_an_int32_index(shape, size, layout, device, rng):
    x, attrs = rng.standard_normal(shape).astype(np.float32), {"size": size, "stride": size}
    wanted_y, wanted_index = maxpool_pair(x, size, size, "int32")
    outs = [(wanted_y.shape, "float32"), (wanted_y.shape, "int32")]
    y, index = run_op(Impl(maxpool.bind_fprop), "maxpool_fprop", [x], outs, device=device, attrs=attrs, layout=layout)
    assert (y == wanted_y).all()
    assert (index == wanted_index).all()
    (dx,) = run_op(Impl(maxpool.bind_dgrad), "maxpool_dgrad", [y, index], [(x.shape, "float32")], device=device, attrs=attrs, layout=layout)
    wanted = np.empty_like(x)
    maxpool.maxpool_dgrad(y, index, wanted, **attrs)
    assert (dx == wanted).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 2, 8), (1, 4, 2, 8)])
def test_maxpool_kernels_keep_nan_and_minus_infinity(shape, layout, device):
    x = np.empty(shape, np.float32)
    x[:, :, 0], x[:, :, 1] = [1, 1, 5, np.nan, -np.inf, -np.inf, -np.inf, 2], [1, 1, np.nan, 9, -np.inf, -np.inf, np.nan, np.inf]
    outs = [((*shape[:2], 1, 4), "float32"), ((*shape[:2], 1, 4), "uint8")]
    y, index = run_op(Impl(maxpool.bind_fprop), "maxpool_fprop", [x], outs, device=device, attrs={"size": 2, "stride": 2}, layout=layout)
    np.testing.assert_array_equal(y[0, -1, 0], [1, np.nan, -np.inf, np.nan])
    assert index[0, -1, 0].tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("size", "stride"), WINDOWS)
def test_avgpool_kernels(size, stride, shape, layout, device, rng):
    x, attrs, small = rng.standard_normal(shape).astype(np.float32), {"size": size, "stride": stride}, pooled(shape, size, stride)
    (y,) = run_op(Impl(avgpool.bind_fprop), "avgpool_fprop", [x], [(small, "float32")], device=device, attrs=attrs, layout=layout)
    # The same sums in the same order, then one product: no tolerance.
    assert (y == apply(avgpool.avgpool_fprop, x, small, **attrs)).all()
    (dx,) = run_op(Impl(avgpool.bind_dgrad), "avgpool_dgrad", [y], [(shape, "float32")], device=device, attrs=attrs, layout=layout)
    assert (dx == apply(avgpool.avgpool_dgrad, y, shape, **attrs)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 3, 5), (2, 3, 2, 4), (1, 4, 3, 8)])
@pytest.mark.parametrize("factor", FACTORS)
def test_upsample_kernels(factor, shape, layout, device, rng):
    x, large = rng.standard_normal(shape).astype(np.float32), scaled(shape, factor)
    attrs = {"factor": factor}
    (y,) = run_op(Impl(upsample.bind_fprop), "upsample_fprop", [x], [(large, "float32")], device=device, attrs=attrs, layout=layout)
    assert (y == apply(upsample.upsample_fprop, x, large, factor=factor)).all()
    dy = rng.standard_normal(large).astype(np.float32)
    (dx,) = run_op(Impl(upsample.bind_dgrad), "upsample_dgrad", [dy], [(shape, "float32")], device=device, attrs=attrs, layout=layout)
    # The same sums in the same order: no tolerance.
    assert (dx == apply(upsample.upsample_dgrad, dy, shape, factor=factor)).all()


# One channel, one pixel, narrow on either side, a tile and a bit on both sides.
MATRICES = [(2, 1, 3, 3), (2, 5, 1, 1), (2, 3, 5, 7), (1, 40, 2, 3), (2, 9, 3, 5), (1, 33, 5, 7)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", MATRICES)
def test_flatten_kernels(shape, layout, device, rng):
    x, flat = rng.standard_normal(shape).astype(np.float32), (shape[0], numel(shape[1:]))
    (y,) = run_op(Impl(flatten.bind_fprop), "flatten_fprop", [x], [(flat, "float32")], device=device, layout=layout)
    assert (y == x.reshape(flat)).all()
    (dx,) = run_op(Impl(flatten.bind_dgrad), "flatten_dgrad", [y], [(shape, "float32")], device=device, layout=layout)
    assert (dx == x).all()


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("shape", MATRICES)
def test_convert_kernels(shape, source, target, device, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    # `run_op` hands convert's input over as it is, so store it in the source layout here.
    stored = to_layout(x, source).reshape(shape)
    attrs = {"source": source, "target": target}
    (y,) = run_op(Impl(convert.bind), "convert", [stored], [(shape, "float32")], device=device, attrs=attrs, layout=target)
    assert (y == x).all()


def test_convert_refuses_an_unknown_layout():
    x = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="CHWN"):
        convert.bind(Call(Op("convert"), (x,), (x,), ((1, 2, 2, 2),), ((1, 2, 2, 2),), {"source": "NCHW", "target": "CHWN"}))


# Compilation without a GPU


def stand_in(bind, op, ins, outs, layout, **attrs) -> list[Launch]:
    arrays = [tuple(np.zeros(numel(shape), dtype) for shape, dtype in side) for side in (ins, outs)]
    shapes = [tuple(shape for shape, _ in side) for side in (ins, outs)]
    return bind(Call(named(op), *arrays, *shapes, attrs, layout))


def launches() -> list[Launch]:
    """Every kernel of these files; those with frozen windows for tiles and for an overlap."""
    made = []
    for layout, (size, stride) in product(LAYOUTS, [(2, 2), (3, 2)]):
        attrs = {"size": size, "stride": stride}
        small = pooled((1, 8, 8, 8), size, stride)
        x, y, index = ((1, 8, 8, 8), "float32"), (small, "float32"), (small, "uint8")
        made += stand_in(maxpool.bind_fprop, "maxpool_fprop", [x], [y, index], layout, **attrs)
        made += stand_in(maxpool.bind_dgrad, "maxpool_dgrad", [y, index], [x], layout, **attrs)
        made += stand_in(avgpool.bind_fprop, "avgpool_fprop", [x], [y], layout, **attrs)
        made += stand_in(avgpool.bind_dgrad, "avgpool_dgrad", [y], [x], layout, **attrs)
    for channels in (3, 64):
        x, y = ((1, channels, 4, 4), "float32"), ((1, channels * 16), "float32")
        made += stand_in(flatten.bind_fprop, "flatten_fprop", [x], [y], "NHWC")
    return made


@pytest.mark.sampled
@on_every_arch
@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch.name)
def test_kernels_compile_without_spills(launch, arch):
    assert_lean(launch, arch)
