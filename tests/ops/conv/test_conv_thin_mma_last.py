"""Tests of the backward kernels of a last layer: persistent blocks, tiles that repeat or end inside a warp, packing, and what compiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_conv_thin_mma import PRECISIONS, assert_repeats, bare, beyond_bounds, bound_without_data, small_enough

from nbcnn.check.static import compile_launch
from nbcnn.gpu.device import SIMULATOR
from nbcnn.gpu.target import H200
from nbcnn.modes import named
from nbcnn.ops.conv.fused import relu_cases, up_cases
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.thin_mma.last import ops
from nbcnn.ops.conv.thin_mma.last_columns import LastTile
from nbcnn.ops.conv.thin_mma.last_shape import pack_channels_by_columns, word_elements
from nbcnn.plan.shapes import ConvShape, numel

REAL = ConvShape(4, 256, 16, 16, 3, 3, 3, 1, 1)
# Odd images, channels that end inside a warp, several chunks per block, warps down the pixels, several blocks across the channels.
WALKS = (
    (up_cases, ConvShape(2, 72, 5, 7, 3, 3, 3, 1, 1), LastTile(1, 2, 32, 3, 1, 2)),
    (up_cases, ConvShape(1, 32, 9, 9, 3, 3, 3, 1, 1), LastTile(1, 2, 64, 3, 1, 1)),
    (up_cases, REAL, LastTile(4, 2, 64, 4, 2, 3)),
    (relu_cases, ConvShape(2, 24, 5, 6, 3, 3, 3, 1, 1), LastTile(1, 1, 32, 4, 1, 1)),
    (conv_cases, ConvShape(2, 40, 4, 5, 1, 5, 5, 1, 2), LastTile(1, 1, 32, 2, 1, 1)),
    (conv_cases, ConvShape(1, 80, 6, 5, 4, 1, 1, 1, 0), LastTile(2, 1, 32, 4, 1, 1)),
)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parity_of_tiles_that_walk(device, precision):
    cases = [(case, tile) for maker, shape, tile in WALKS if small_enough(shape) for case in maker(shape) if "fprop" not in str(case.op)]
    assert beyond_bounds(cases, ops(precision), precision, device) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weight_gradients_repeat_bit_for_bit(gpu, precision):
    case = next(case for case in up_cases(REAL) if str(case.op) == "upconv_wgrad")
    assert_repeats(case, ops(precision), precision, gpu)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packing_takes_every_weight_once(precision):
    shape = ConvShape(1, 72, 5, 7, 3, 3, 3, 1, 1)
    index = pack_channels_by_columns(bare("upconv_dgrad", shape, precision, up=True), word_elements(precision))
    assert sorted(index[index >= 0]) == list(range(numel(shape.w_shape)))


@pytest.mark.sampled
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("precision", "op"), [("bf16", "upconv_dgrad_relu"), ("bf16", "upconv_wgrad"), ("tf32", "upconv_dgrad_relu")])
def test_compile_two_blocks_fit_a_multiprocessor(precision, op):
    impl, call = ops(precision)[named(op)], bare(op, REAL, precision, up=True)
    call = replace(call, tile=replace(impl.tile(call, H200), blocks=264))
    launch = bound_without_data(impl, call)[0]
    report = compile_launch(launch, "80")
    assert report.frame_bytes == 0
    assert report.registers * launch.block * 2 <= 65536
    assert 2 * (launch.shared + 1024) <= 228 * 1024
