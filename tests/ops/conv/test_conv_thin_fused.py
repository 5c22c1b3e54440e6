"""Tests of the fused thin convolutions against their references: small shapes anywhere, the autoencoder's on a GPU; what compiles."""

from __future__ import annotations

import pytest

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound, Unsupported
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import Target
from nbcnn.modes import Row, named
from nbcnn.ops.conv.fused import REAL_POOLED, REAL_UP, pooled_cases, relu_cases, up_cases
from nbcnn.ops.conv.thin.fused import FUSED
from nbcnn.ops.conv.thin.gather import GatherTile
from nbcnn.ops.conv.thin.scatter import ScatterTile
from nbcnn.ops.conv.thin.wgrad import WgradTile
from nbcnn.plan.shapes import ConvShape

ROW = Row("cudacore", "fp32", "gpu", "NHWC", ())


def cases_of(first: ConvShape, last: ConvShape):
    """Fused cases of a first layer (thin C) and of a last one (thin K)."""
    cases = [*pooled_cases(first), *relu_cases(first), *relu_cases(last), *up_cases(last)]
    return [case for case in cases if str(case.op) != "unpool" and not refused(case)]


def bare(case):
    return Bound(FUSED[case.op], case.op, case.ins, case.outs, device=Host(), attrs=case.attrs, layout="NHWC")


def refused(case) -> bool:
    try:
        bare(case)
    except Unsupported:
        return True
    return False


SMALL = cases_of(ConvShape(1, 3, 4, 6, 16, 3, 3, 1, 1), ConvShape(2, 16, 3, 2, 3, 3, 3, 1, 1))
LARGER = cases_of(ConvShape(2, 2, 10, 8, 36, 3, 3, 1, 1), ConvShape(1, 36, 5, 9, 1, 3, 3, 1, 1))
REAL = cases_of(REAL_POOLED[0], REAL_UP[1])


def tile_of(case):
    """A one-warp tile for the columns of a case."""
    kind = type(bare(case).call.tile)
    if kind is GatherTile:
        return GatherTile(16, 32, 4, 4, 1, 1)
    if kind is ScatterTile:
        return ScatterTile(4, 14, 2, 16, 8, 1, 1)
    return WgradTile(4, 28, 2, 4, 4, 32, 4, 2, 1)


def check(case, device, tile=None):
    error = gradcheck.parity(ROW, FUSED[case.op], case, device, tile)
    assert error <= gradcheck.bound(case), (case.op, case.label, error)


def test_the_small_cases_cover_every_op():
    assert {case.op for case in SMALL} == set(FUSED)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.op} {case.label}")
def test_small_shapes(case, device):
    check(case, device, tile_of(case))


@pytest.mark.parametrize("split", [4])
def test_split_products_are_collected_in_order(split, device):
    for case in SMALL:
        if str(case.op) == "upconv_mse_fprop":
            check(case, device, ScatterTile(4, 14, 2, 16, 8, 1, split))


@pytest.mark.parametrize("case", [*LARGER, *REAL], ids=lambda case: f"{case.op} {case.label}")
def test_chosen_tiles(case, gpu):
    check(case, gpu)


@pytest.mark.parametrize("op", ["conv_relu_pool_fprop", "conv_pool_wgrad", "upconv_mse_fprop"])
def test_a_wide_pair_of_sides_is_refused(op):
    shape = ConvShape(1, 16, 4, 4, 16, 3, 3, 1, 1)
    case = next(c for c in (*pooled_cases(shape), *up_cases(shape)) if c.op == named(op))
    assert refused(case)


@pytest.mark.full  # .ci/run compiles these kernels in test_conv_thin.py, without what is fused
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("op", ["conv_relu_pool_fprop", "conv_pool_wgrad", "upconv_wgrad", "upconv_mse_fprop", "upconv_dgrad_relu"])
def test_kernels_of_a_large_batch_compile_without_spills(op):
    case = next(case for case in REAL if case.op == named(op))
    # The tile of a large batch, on the operands of a small one.
    tile = FUSED[named(op)].tile(bare(case).call, Target((9, 0), 1))
    bound = Bound(FUSED[named(op)], op, case.ins, case.outs, device=Host(), attrs=case.attrs, layout="NHWC", tile=tile)
    for launch in bound.launches[:2]:
        report = compile_launch(launch, "90a")
        assert report.frame_bytes == 0, launch.name
