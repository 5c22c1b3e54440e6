"""Tests of Winograd's convolution and the nine products of an upsampling against the float64 reference, plain and fused; what compiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200
from nbcnn.modes import Row, named
from nbcnn.ops.conv.fused import pooled_cases, relu_cases, up_cases
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.winograd import nine_products
from nbcnn.ops.conv.winograd.engine import FUSED, OPS, WinogradTile, supports
from nbcnn.plan.shapes import ConvShape

ROW = Row("cudacore", "fp32", "gpu", "NHWC", ())
# A call that is refused is bound here, too, to be asked why.
IMPLS = {op: replace(impl, supports=lambda call, target: None) for op, impl in (OPS | FUSED | nine_products.FUSED).items()}
TINY = WinogradTile(2, 16, 32, 4, 4)
"""One warp a block, two images at a time."""


def cases_of(shape: ConvShape):
    cases = (*conv_cases(shape), *pooled_cases(shape), *relu_cases(shape), *up_cases(shape))
    return [case for case in cases if case.op in IMPLS]


SMALL = cases_of(ConvShape(3, 16, 8, 8, 16, 3, 3, 1, 1)) if not gpu_device.SIMULATOR else cases_of(ConvShape(1, 16, 8, 8, 16, 3, 3, 1, 1))
REAL = [case for shape in (ConvShape(8, 256, 16, 16, 128, 3, 3, 1, 1), ConvShape(8, 128, 8, 8, 48, 3, 3, 1, 1)) for case in cases_of(shape)]


def check(case, device, tile=None):
    # Transforms add to the rounding errors of the products: 4.4e-7 of the output's norm where the direct form has 2.2e-7
    # (256 channels, measured in float64); the bound for the sum, 4·eps·√(9·C), has room for both.
    error = gradcheck.parity(ROW, IMPLS[case.op], case, device, tile)
    assert error <= gradcheck.bound(case), (case.op, case.label, error)


def test_every_op_has_a_case():
    assert {case.op for case in SMALL} == set(IMPLS)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.op} {case.label}")
def test_small_shapes(case, device):
    # Once with more partial gradients than one kernel adds by itself.
    check(case, device, replace(TINY, split=5) if str(case.op) == "conv_wgrad" and len(case.outs) == 2 else TINY)


@pytest.mark.parametrize("case", REAL, ids=lambda case: f"{case.op} {case.label}")
def test_real_shapes(case, gpu):
    check(case, gpu)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (ConvShape(64, 16, 16, 16, 16, 5, 5, 1, 1), "5×5"),
        (ConvShape(64, 16, 16, 15, 16, 3, 3, 1, 1), "whole 2×2 tiles"),
        (ConvShape(64, 3, 16, 16, 16, 3, 3, 1, 1), "multiples of 16"),
    ],
)
def test_refusals_name_the_reason(shape, reason):
    case = next(conv_cases(shape))
    call = Bound(IMPLS[named("conv_fprop")], case.op, case.ins, case.outs, device=Host(), attrs=case.attrs, layout="NHWC", tile=TINY).call
    assert reason in supports(call, H200)


@pytest.mark.full
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("op", ["conv_wgrad", "upconv_relu_fprop", "conv_relu_pool_fprop"])
def test_kernels_compile_without_spills(op):
    case = next(case for case in REAL if case.op == named(op))
    bound = Bound(IMPLS[named(op)], op, case.ins, case.outs, device=Host(), attrs=case.attrs, layout="NHWC")
    kernels = {launch.kernel: launch for launch in bound.launches}
    for launch in kernels.values():
        report = compile_launch(launch, "90a")
        assert (report.frame_bytes, report.registers <= 128) == (0, True), launch.name
