"""Tests of the fused convolutions of row `im2col` against their references: small shapes anywhere, the autoencoder's on a GPU; what compiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from covering import Cover, in_turn, together

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.modes import Row, named
from nbcnn.ops.activations.table import with_activations
from nbcnn.ops.conv import fused
from nbcnn.ops.conv.fused import linear_cases, pooled_cases, relu_cases, up_cases
from nbcnn.ops.conv.simt import im2col_fused
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.plan.shapes import ConvShape

FUSED = with_activations(im2col_fused.FUSED | im2col_fused.FOLDED)
ROW = Row("im2col", "fp32", "gpu", "NHWC", ())
TINY = Tile(16, 32, 8, 4, 4)
"""One warp a block: what the simulator can run in a second."""
# Whole taps and k-tiles that span them, channels in fours and not; stride 2.
TINY_CASES = [
    case
    for cases in (
        pooled_cases(ConvShape(1, 8, 4, 2, 8, 3, 3, 1, 1)),
        pooled_cases(ConvShape(1, 3, 2, 4, 7, 3, 3, 1, 1)),
        relu_cases(ConvShape(1, 8, 3, 4, 8, 3, 3, 1, 1)),
        relu_cases(ConvShape(1, 5, 5, 3, 6, 3, 3, 2, 1)),
        up_cases(ConvShape(1, 8, 2, 3, 8, 3, 3, 1, 1)),
        up_cases(ConvShape(2, 3, 3, 2, 5, 3, 3, 1, 1)),
        linear_cases(3, 12, 6),
    )
    for case in cases
    if str(case.op) != "unpool"
]


def check(case, device, tile=None, cover=None):
    if cover is not None and not cover.takes_case(ROW, FUSED[case.op], case, device, tile):
        return
    error = gradcheck.parity(ROW, FUSED[case.op], case, device, tile)
    assert error <= gradcheck.bound(case), (case.op, case.label, error)


@pytest.mark.parametrize("cases", together(TINY_CASES, lambda case: case.op.direction, lambda case: f"{case.op} {case.label}"))
def test_small_shapes(cases, device):
    cover = Cover()
    for case in cases:
        check(case, device, TINY, cover)


@pytest.mark.parametrize("op", sorted({case.op for case in TINY_CASES}))
def test_split_sums_end_the_same_way(op, device):
    for case in [case for case in TINY_CASES if case.op == op][:: 1 if not gpu_device.SIMULATOR else 2]:
        # More partial gradients than one kernel adds by itself.
        check(case, device, replace(TINY, split=5 if "wgrad" in str(op) else 2))


@pytest.mark.parametrize("shape", [ConvShape(1, 24, 2, 2, 24, 3, 3, 1, 1), ConvShape(1, 8, 2, 2, 40, 3, 3, 1, 1)], ids=["one block", "two blocks"])
def test_one_row_of_tiles_adds_up_the_bias_of_a_doubled_image(device, shape):
    """The sum of the parts has a block for 32 filters."""
    case = next(case for case in up_cases(shape) if str(case.op) == "upconv_wgrad" and len(case.outs) == 2)
    check(case, device, TINY)


def test_every_fused_op_is_served():
    # Hopper's patch kernel alone adds a second gradient.
    assert {case.op for case in fused.cases() if not str(case.op).startswith("dwconv1d")} - {named("conv_dgrad_add_relu")} == set(FUSED)


@pytest.mark.parametrize("part", range(4))
def test_chosen_tiles(part, gpu):
    """Neighbours among the sorted ops, which differ in what comes behind the product."""
    ops, cover, ran = sorted(op for op in FUSED if in_turn(("im2col", "fp32"), op)), Cover(), set()
    ops = ops[len(ops) * part // 4 : len(ops) * (part + 1) // 4]
    for case in (case for case in (*fused.cases(), *fused.real_cases()) if case.op in ops):
        if cover.takes_case(ROW, FUSED[case.op], case, gpu) or case.op not in ran:
            check(case, gpu)
            ran.add(case.op)
    assert ran == set(ops)


@pytest.mark.full
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("op", ["conv_relu_pool_fprop", "upconv_relu_fprop", "upconv_dgrad_relu", "upconv_wgrad"])
def test_large_tiles_keep_to_their_registers_when_compiled(op):
    shape = ConvShape(1, 128, 8, 8, 256, 3, 3, 1, 1)
    case = next(c for c in (*pooled_cases(shape), *up_cases(shape)) if c.op == named(op))
    tile = Tile(128, 128, 16, 8, 8)
    bound = Bound(FUSED[named(op)], op, case.ins, case.outs, device=Host(), attrs=case.attrs, layout="NHWC", tile=tile)
    for launch in bound.launches:
        report = compile_launch(launch, "90a")
        assert report.frame_bytes == 0, launch.name
        assert report.registers <= 128


def test_the_folded_filters_hold_every_tap_once_a_phase():
    case = next(c for c in TINY_CASES if str(c.op) == "upconv_fprop")
    call = Bound(FUSED[named("upconv_fprop")], case.op, case.ins, case.outs, device=Host(), layout="NHWC", tile=TINY).call
    index = FUSED[named("upconv_fprop")].pack(call)
    counts = np.bincount(index[index >= 0], minlength=case.ins[1].size)
    assert (counts == 4).all()
