"""Tests of what an S4ConvD block is made of besides its depthwise convolution: references against definitions, kernels against references."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch
from counted import counted

from nbcnn.check import gradcheck
from nbcnn.check.cases import mean_cases
from nbcnn.check.one_op import Bound, Unsupported, run_op
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200
from nbcnn.modes import COMMON, MODES, named
from nbcnn.ops.activations import gelu
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.losses import pairs
from nbcnn.ops.series import gather_windows, pwconv1d, s4kernel
from nbcnn.plan.op import Op

OURS = ("pwconv1d", "s4kernel", "gelu", "glu", "last", "rmsle", "gather_windows")
CASES = [case for case in mean_cases() if str(case.op).startswith(OURS)]
SMALL = ("1×1×1 to 1", "2×3×5 to 7", "2×3×5 to 7 bias")


def wide_range(dtype):
    """Both signs from where Φ is ½ to where the dtype has nothing left of it, and far beyond."""
    near = np.linspace(-45, 45, 3601 if not gpu_device.SIMULATOR else 361)
    return np.concatenate([near, [1e3, -1e3, 1e10, -1e10, 1e30, -1e30, 1e38, -1e38]]).astype(dtype)


def gelu_of(run, x, request):
    """y and dy/dx of x by the reference in x's dtype, or by the kernels."""
    one = np.ones_like(x)
    if run == "kernel":
        device, out = request.getfixturevalue("device"), [(x.shape, "float32")]
        fprop = run_op(COMMON[named("gelu_fprop")], "gelu_fprop", [x], out, device=device)
        return *fprop, *run_op(COMMON[named("gelu_dgrad")], "gelu_dgrad", [one, x], out, device=device)
    y, dx = np.empty_like(x), np.empty_like(x)
    gelu.GELU.fprop(x, y)
    gelu.GELU.dgrad(one, x, dx)
    return y, dx


@pytest.mark.parametrize("run", ["float32", "float64", pytest.param("kernel", marks=pytest.mark.gpu)])
def test_gelu_and_its_derivative_over_a_wide_range(run, request):
    """The far left must not stop at a smallest Φ, which a large input would make a large output of."""
    dtype = np.dtype("float32" if run == "kernel" else run)
    x = wide_range(dtype)
    exact = x.astype(np.float64)
    phi = np.array([math.erfc(-each * math.sqrt(0.5)) / 2 for each in exact])
    slope = exact * np.exp(-np.minimum(exact**2, 1e6) / 2) / math.sqrt(2 * math.pi)
    y, dx = gelu_of(run, x, request)
    # An error of x/√2 or of its square counts x² times in Φ and in φ: the rounding of either, of the sum with P, and of the squares that P is
    # interpolated from. What is less than the smallest normal number has fewer digits.
    eps, bounded = np.finfo(dtype).eps, np.minimum(exact**2, 45**2)
    relative, absolute = (2.5 * bounded + 8) * eps, 45 * np.finfo(dtype).tiny
    assert np.all(np.abs(y - exact * phi) <= relative * np.abs(exact * phi) + absolute)
    assert np.all(np.abs(dx - (phi + slope)) <= relative * (phi + np.abs(slope)) + absolute)
    np.testing.assert_array_equal(y[exact < -40], 0)
    np.testing.assert_array_equal(dx[exact < -40], 0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("run", ["float32", "float64", pytest.param("kernel", marks=pytest.mark.gpu)])
def test_gelu_of_what_is_not_finite(run, request):
    x = np.array([-np.inf, np.inf, np.nan, 0, -1], "float32" if run == "kernel" else run)
    y, dx = gelu_of(run, x, request)
    np.testing.assert_array_equal(np.isnan(y), [True, False, True, False, False])
    np.testing.assert_array_equal(np.isnan(dx), [True, True, True, False, False])
    assert (y[1], y[3]) == (np.inf, 0)
    assert abs(dx[3] - 0.5) <= 2 * np.finfo(x.dtype).eps


def test_the_kernel_is_the_sum_of_its_states(rng):
    params = [rng.standard_normal(shape).astype(np.float32) for shape in ((2,), (2, 3), (2, 3), (2, 3), (2, 3))]
    k = np.empty((2, 9))
    s4kernel.s4kernel_fprop(*params, k)
    for c in range(2):
        for t in range(9):
            total = 0.0
            for s in range(3):
                log_dt, a_re, a_im, c_re, c_im = (complex(p[c] if p.ndim == 1 else p[c, s]) for p in params)
                dt, a = math.exp(log_dt.real), -math.exp(a_re.real) + 1j * a_im
                discrete = np.exp(a * dt)
                total += 2 * ((c_re + 1j * c_im) * (discrete - 1) / a * discrete**t).real
            assert k[c, t] == pytest.approx(total, rel=1e-12)


def test_a_slow_state_keeps_its_digits():
    """Beside |z| = 1e-3 the series and the difference agree."""
    for size in (0.999e-3, 1.001e-3):
        params = [np.log([size / math.hypot(0.5, 3)]), np.log([[0.5]]), np.array([[3.0]]), np.array([[1.0]]), np.array([[-2.0]])]
        _, a, _, z, beta = s4kernel._states(*params)
        exact = (z + z**2 / 2 + z**3 / 6 + z**4 / 24 + z**5 / 120) / a
        assert abs(beta[0, 0] / exact[0, 0] - 1) < 1e-9


def test_rmsle_of_a_perfect_prediction_has_no_gradient():
    y = np.array([[1.0], [2.0]], np.float32)
    case = [y, 2 * y]
    row = MODES["cpu", "fp32"]
    (loss,) = run_op(next(row.chain(named("rmsle_fprop")))[1], "rmsle_fprop", case, [((), "float64")], device=Host(), attrs={"unit": 2.0})
    (dy,) = run_op(next(row.chain(named("rmsle_dgrad")))[1], "rmsle_dgrad", [*case, loss], [(y.shape, "float32")], device=Host(), attrs={"unit": 2.0})
    assert loss == 0
    np.testing.assert_array_equal(dy, np.zeros_like(y))


def test_a_prediction_that_is_nan_makes_the_loss_nan(device):
    y, target = np.array([[1.0], [np.nan]], np.float32), np.ones((2, 1), np.float32)
    (loss,) = run_op(pairs.OPS[named("rmsle_fprop")], "rmsle_fprop", [y, target], [((), "float64")], device=device, attrs={"unit": 1.0})
    assert np.isnan(loss)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.label}")
def test_kernels_are_within_their_bounds(case, device):
    if gpu_device.SIMULATOR and "conv" in str(case.op) and case.label not in SMALL:
        pytest.skip("a thread of the simulator is a Python thread")
    keys = [("naive", "fp32"), ("cudacore", "fp32")] if gpu_device.SIMULATOR else [key for key, row in MODES.items() if row.device == "gpu"]
    for key in keys:
        if case.op not in MODES[key].ops:
            continue  # a fused op that only some rows have
        ran = []
        for part, impl in gradcheck.runnable(MODES[key], case.op, device):
            try:
                error = gradcheck.parity(MODES[key], impl, case, device)
            except Unsupported:  # an engine for whole tiles; the row has another for every shape
                continue
            assert error <= gradcheck.bound(case, key[1]), (key, part)
            ran.append(part)
        assert ran, key


@pytest.mark.parametrize("mode", ["naive", "im2col", "cudacore"])
def test_every_backward_fits_its_forward(mode, device):
    if gpu_device.SIMULATOR and mode == "cudacore":
        pytest.skip("its own kernels, the best depthwise ones, are compared with the reference in test_dwconv1d.py; the others are naive's")
    cases = [c for c in CASES if not (gpu_device.SIMULATOR and "conv" in str(c.op) and c.label not in SMALL)]
    findings = [f for f in gradcheck.check_row(MODES[mode, "fp32"], device, cases) if f.check.startswith("dot")]
    assert len(findings) >= 15
    assert [str(f) for f in findings if not f.ok] == []


def test_large_angles_keep_their_digits(device, rng):
    """S4D-Lin's fastest state turns 470 radians in 48 hours; the bound is that of a few roundings all the same."""
    states = 8 if gpu_device.SIMULATOR else 32
    params = [np.array([np.log(0.1)]), np.full((1, states), np.log(0.5)), np.pi * np.arange(32 - states, 32.0)[None]]
    params = [p.astype(np.float32) for p in (*params, *rng.standard_normal((2, 1, states)))]
    want, dk = np.empty((1, 48)), rng.standard_normal((1, 48)).astype(np.float32)
    s4kernel.s4kernel_fprop(*params, want)
    (k,) = run_op(s4kernel.OPS[named("s4kernel_fprop")], "s4kernel_fprop", params, [((1, 48), "float32")], device=device)
    assert gradcheck.relative_error(k, want) <= 2**-23
    wants = [np.empty(p.shape) for p in params]
    s4kernel.s4kernel_dgrad(dk, *params, *wants)
    got = run_op(s4kernel.OPS[named("s4kernel_dgrad")], "s4kernel_dgrad", [dk, *params], [(p.shape, "float32") for p in params], device=device)
    assert max(map(gradcheck.relative_error, got, wants)) <= 2**-23


@pytest.mark.parametrize(
    "op", ["s4kernel_fprop", "s4kernel_dgrad", "glu_fprop", "glu_dgrad", "last_fprop", "last_dgrad", "rmsle_fprop", "gelu_dgrad"]
)
def test_counts_are_those_of_the_kernels(op, device, monkeypatch):
    if not gpu_device.SIMULATOR:
        pytest.skip("a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
    impl = next(impl for _, impl in MODES["naive", "fp32"].chain(named(op)))
    case = [case for case in CASES if case.op == named(op)][1]
    bound = Bound(impl, op, case.ins, case.outs, device=device, attrs=case.attrs)
    for launch, count in zip(bound.launches, impl.traffic(bound.call), strict=True):
        with monkeypatch.context() as patch:
            assert counted(launch, patch) == count, launch.name


def test_a_window_counts_its_rows_and_its_target():
    shapes = ((600,), (200,), (50,), (50,), (8,)), ((7, 3, 48), (7,))
    (moved,) = gather_windows.OPS[named("gather_windows")].traffic(Call(Op("gather_windows"), (), (), *shapes))
    assert (moved.read, moved.write) == (4 * (7 * 3 * 48 + 7), 4 * (7 * 3 * 48 + 7))


@pytest.mark.parametrize(("path", "shapes"), [("fprop", (((5, 8, 16), (12, 8)), ((5, 12, 16),))), ("wgrad", (((5, 8, 16), (5, 12, 16)), ((12, 8),)))])
def test_a_transposed_convolution_counts_its_transposes(path, shapes):
    call, op = Call(named(f"pwconv1d_{path}"), (), (), *shapes), f"conv_{path}"
    impl, engine = pwconv1d.transposed(im2col.OPS)[call.op], im2col.OPS[named(op)]
    call = replace(call, tile=impl.tile(call, H200))
    made, bare = impl.traffic(call), engine.traffic(pwconv1d.as_convolution(call, "NHWC"))
    assert len(made) == len(bare) + 2
    series = [size for shape in (*shapes[0], *shapes[1]) if len(shape) == 3 for size in [4 * 5 * shape[1] * 16]]
    assert [one.write for one in (*made[: len(made) - len(bare) - (path == "fprop")], *made[len(made) - (path == "fprop") :])] == series
    assert sum(one.logical for one in made) >= sum(one.logical for one in bare) + 2 * sum(series)


def test_scratch_of_a_transposed_convolution_holds_both_series_aligned():
    call = Call(Op("pwconv1d", "fprop"), (), (), ((2, 3, 5), (7, 3)), ((2, 7, 5),))
    impl = pwconv1d.transposed(im2col.OPS)[named("pwconv1d_fprop")]
    places = pwconv1d._places(call)
    assert [(side, operand, first) for side, operand, first, _ in places] == [("in", 0, 0), ("out", 0, 256), ("", 0, 768)]
    call = replace(call, tile=impl.tile(call, H200))
    assert impl.scratch(call) == 768 + im2col.OPS[named("conv_fprop")].scratch(pwconv1d.as_convolution(call, "NHWC"))


def _launches(op, impl, kind="float32"):
    """The launches of the first case of `op`, bound to empty NumPy arrays."""
    case = next(c for c in CASES if c.op == named(op))
    shapes = [tuple(a.shape for a in case.ins), tuple(shape for shape, _ in case.outs)]
    ins = tuple(np.empty(a.size, a.dtype) for a in case.ins)
    outs = tuple(np.empty(max(1, math.prod(shape)), dtype) for shape, dtype in case.outs)
    bare = Call(named(op), ins, outs, *shapes, case.attrs, scratch=None)
    scratch = np.empty(impl.scratch(bare), np.uint8) if impl.scratch(bare) else None
    return impl.bind(Call(named(op), ins, outs, *shapes, case.attrs, scratch=scratch))


LEAN = [f"{name}_{path}" for name in ("glu", "last", "rmsle") for path in ("fprop", "dgrad")] + ["gather_windows"]


@on_every_arch
@pytest.mark.parametrize("op", LEAN)
def test_kernels_are_lean(op, arch):
    for launch in _launches(op, COMMON[named(op)]):
        assert_lean(launch, arch)


@pytest.mark.sampled
@on_every_arch
@pytest.mark.parametrize(
    ("op", "impl"), [("s4kernel_fprop", s4kernel.OPS[named("s4kernel_fprop")]), ("s4kernel_dgrad", s4kernel.OPS[named("s4kernel_dgrad")])]
)
def test_the_state_space_kernels_compile(op, impl, arch):
    for launch in _launches(op, impl):
        report = compile_launch(launch, arch)
        # Sines of angles beyond 1e5, which no state reaches, are reduced in a frame of 40 bytes by CUDA's library.
        assert report.frame_bytes <= 48
        assert report.registers <= 128
