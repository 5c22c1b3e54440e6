"""Depthwise convolution of series: the reference against plain loops, gradients against the forward, kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch
from counted import counted

from nbcnn import cuda, gradcheck
from nbcnn.ops import MODES
from nbcnn.ops.call import Call
from nbcnn.ops.cases import MEAN_SERIES, series_cases
from nbcnn.ops.dwconv1d import coalesced, naive, reference, shared, warp
from nbcnn.ops.dwconv1d.series import of_gradient, of_images
from nbcnn.ops.run import Bound
from nbcnn.shapes import numel

VARIANTS = {"naive": naive.OPS, "coalesced": coalesced.OPS, "shared": shared.OPS, "warp": warp.OPS}
PASSES = ("dwconv1d_fprop", "dwconv1d_dgrad", "dwconv1d_wgrad")
PADDINGS = ["causal", "same"]
SHAPES = [*MEAN_SERIES, (2, 1, 48, 48), (1, 1, 150, 7)]


def by_loops(x, w, d, padding):
    """y, and the matrix of its derivative by x, element by element."""
    _, c, length = x.shape
    taps = w.shape[1]
    y, jacobian = np.zeros_like(x), np.zeros((c, length, length))
    for at, t, j in np.ndindex(c, length, taps):
        s = t - j if padding == "causal" else t + j - taps // 2
        if 0 <= s < length:
            y[:, at, t] += w[at, j] * x[:, at, s]
            jacobian[at, t, s] += w[at, j]
    y += d[:, None] * x
    jacobian += d[:, None, None] * np.eye(length)
    return y, jacobian


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", MEAN_SERIES)
def test_reference_against_loops(shape, padding, rng):
    n, c, length, taps = shape
    x, w, d, dy = (rng.standard_normal(size) for size in ((n, c, length), (c, taps), (c,), (n, c, length)))
    wanted, jacobian = by_loops(x, w, d, padding)
    y, plain, dx, dw, dd = np.full_like(x, np.nan), np.full_like(x, np.nan), np.full_like(x, np.nan), np.full_like(w, np.nan), np.full_like(d, np.nan)
    reference.dwconv1d_fprop(x, w, d, y, padding=padding)
    reference.dwconv1d_fprop(x, w, plain, padding=padding)
    np.testing.assert_allclose(y, wanted, atol=1e-12)
    np.testing.assert_allclose(plain + d[:, None] * x, wanted, atol=1e-12)
    reference.dwconv1d_dgrad(dy, w, d, dx, padding=padding)
    np.testing.assert_allclose(dx, np.einsum("nct,cts->ncs", dy, jacobian), atol=1e-12)
    reference.dwconv1d_wgrad(x, dy, dw, dd, padding=padding)
    # y is linear in w and in d: a change of one of them by one changes <dy, y> by its gradient.
    for c_at, j in np.ndindex(w.shape):
        one = np.zeros_like(w)
        one[c_at, j] = 1
        moved, _ = by_loops(x, one, np.zeros(c), padding)
        assert dw[c_at, j] == pytest.approx(np.vdot(dy, moved), abs=1e-12)
    np.testing.assert_allclose(dd, (dy * x).sum((0, 2)), atol=1e-12)


def test_reference_refuses_an_unknown_padding():
    x = np.ones((1, 1, 4))
    with pytest.raises(ValueError, match="valid"):
        reference.dwconv1d_fprop(x, np.ones((1, 2)), x.copy(), padding="valid")


@pytest.mark.parametrize("case", [case for shape in MEAN_SERIES for case in series_cases(*shape) if "wgrad" not in case.op], ids=str)
def test_the_correlation_form_is_the_same_sum(case):
    source, w, *_ = (array.astype(np.float64) for array in case.ins[:2])
    g = of_images(Call(case.op, (), (), tuple(a.shape for a in case.ins), (case.outs[0][0],), case.attrs))
    padded = np.pad(source, ((0, 0), (0, 0), (g.left, g.T - 1 - g.left)))
    filters = w[:, ::-1] if g.flipped else w
    made = sum(filters[:, i, None] * padded[:, :, i : i + g.L] for i in range(g.T))
    if g.skip:
        made = made + case.ins[2][:, None].astype(np.float64) * source
    np.testing.assert_allclose(made, gradcheck.reference(case)[0], atol=1e-12)


def chosen(shape):
    """The cases of a shape; in the simulator, where a thread is a Python thread, those with a skip, which differ from the others in one tap."""
    return [case for case in series_cases(*shape) if not cuda.SIMULATOR or "skip" in case.label]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_are_within_their_bounds(variant, shape, place):
    for case in chosen(shape):
        impl = VARIANTS[variant][case.op]
        assert gradcheck.parity(MODES["naive", "fp32"], impl, case, place) <= gradcheck.bound(case), case.label


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", MEAN_SERIES)
def test_products_are_counted_one_by_one(shape, padding):
    n, c, length, taps = shape
    counted = np.zeros((1, 1, length))
    reference.dwconv1d_fprop(np.ones((1, 1, length)), np.ones((1, taps)), counted, padding=padding)
    series, filters = (n, c, length), (c, taps)
    for op in PASSES:
        ins, outs = ((series, series), (filters,)) if "wgrad" in op else ((series, filters), (series,))
        g = (of_gradient if "wgrad" in op else of_images)(Call(op, (), (), ins, outs, {"padding": padding}))
        assert g.products() == counted.sum(), op


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(3, 2, 5, 9), (2, 1, 24, 3)])
def test_counts_are_those_of_the_kernels(variant, shape, place, monkeypatch):
    if not cuda.SIMULATOR:
        pytest.skip("a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
    for case in chosen(shape):
        impl = VARIANTS[variant][case.op]
        bound = Bound(impl, case.op, case.ins, case.outs, place=place, attrs=case.attrs)
        wanted = impl.traffic(bound.call)
        assert len(wanted) == len(bound.launches)
        for launch, count in zip(bound.launches, wanted, strict=True):
            with monkeypatch.context() as patch:
                assert counted(launch, patch) == count, (launch.name, case.label)


def stand_in(op, variant, shape, padding, skip, kind="float32"):
    """The launches of `variant` for arrays that only have a size."""
    n, c, length, taps = shape
    series, filters, one = ((n, c, length), kind), ((c, taps), "float32"), ((c,), "float32")
    ins, outs = ([series, filters, *[one] * skip], [series]) if "wgrad" not in op else ([series, series], [filters, *[one] * skip])
    arrays = [tuple(np.zeros(numel(s), "uint16" if k == "bfloat16" else k) for s, k in side) for side in (ins, outs)]
    shapes, dtypes = [tuple(s for s, _ in side) for side in (ins, outs)], [tuple(k for _, k in side) for side in (ins, outs)]
    impl = VARIANTS[variant][op]
    call = Call(op, (), (), *shapes, {"padding": padding}, in_dtypes=dtypes[0], out_dtypes=dtypes[1])
    call = Call(**(vars(call) | {"tile": impl.tile(call, 132)}))
    nbytes = impl.scratch(call)
    return impl.bind(Call(**(vars(call) | {"ins": arrays[0], "outs": arrays[1], "scratch": np.zeros(nbytes, np.uint8) if nbytes else None})))


@on_every_arch
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", PASSES)
def test_kernels_compile_without_spills(variant, op, arch):
    for padding, skip in (("causal", True), ("same", False)):
        for launch in stand_in(op, variant, (512, 128, 48, 48), padding, skip):
            assert_lean(launch, arch)
