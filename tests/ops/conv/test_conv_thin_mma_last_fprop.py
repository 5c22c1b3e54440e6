"""Tests of the forward kernel of a last layer: blocks with a part of an image, with several, or persistent; tiles, packing, and what compiles."""

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
from nbcnn.ops.conv.thin_mma.last_fprop import PIXELS, FpropTile, fprop_tile, halo, ring_pixels
from nbcnn.ops.conv.thin_mma.last_shape import last_layer, pack_columns_by_channels, word_elements
from nbcnn.plan.shapes import ConvShape, numel

REAL_UP, REAL = ConvShape(4, 256, 16, 16, 3, 3, 3, 1, 1), ConvShape(4, 256, 32, 32, 3, 3, 3, 1, 1)
# One pixel, odd images, blocks that cut images, that hold several, that walk several chunks, windows of 1, 3 and 5.
WALKS = (
    (up_cases, ConvShape(1, 16, 1, 1, 1, 3, 3, 1, 1), FpropTile(64, 2, 1)),
    (up_cases, ConvShape(5, 8, 7, 9, 3, 3, 3, 1, 1), FpropTile(126, 3, 1)),
    (up_cases, ConvShape(2, 72, 19, 18, 2, 3, 3, 1, 1), FpropTile(342, 2, 1)),
    (up_cases, ConvShape(2, 8, 3, 41, 3, 3, 3, 1, 1), FpropTile(70, 4, 1)),
    (up_cases, ConvShape(9, 256, 16, 16, 3, 3, 3, 1, 1), FpropTile(1024, 2, 2)),
    (relu_cases, ConvShape(2, 24, 13, 17, 1, 3, 3, 1, 1), FpropTile(442, 4, 1)),
    (conv_cases, ConvShape(2, 24, 13, 17, 3, 3, 3, 1, 1), FpropTile(100, 2, 1)),
    (conv_cases, ConvShape(2, 40, 9, 11, 1, 5, 5, 1, 2), FpropTile(45, 3, 1)),
    (conv_cases, ConvShape(2, 40, 23, 19, 1, 5, 5, 1, 2), FpropTile(874, 3, 1)),
    (conv_cases, ConvShape(1, 72, 6, 5, 4, 1, 1, 1, 0), FpropTile(64, 4, 1)),
    (conv_cases, REAL, FpropTile(2048, 2, 2)),
)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parity_of_tiles_that_walk(device, precision):
    cases = [(case, tile) for maker, shape, tile in WALKS if small_enough(shape) for case in maker(shape) if "fprop" in str(case.op)]
    assert beyond_bounds(cases, ops(precision), precision, device) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_and_gradient_repeat_bit_for_bit(gpu, precision):
    case = next(case for case in up_cases(REAL_UP) if str(case.op) == "upconv_mse_fprop")
    assert_repeats(case, ops(precision), precision, gpu)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packing_takes_every_weight_once(precision):
    shape = ConvShape(1, 72, 5, 7, 3, 3, 3, 1, 1)
    index = pack_columns_by_channels(bare("upconv_fprop", shape, precision, up=True), word_elements(precision))
    assert sorted(index[index >= 0]) == list(range(numel(shape.w_shape)))


@pytest.mark.parametrize("W", [1, 5, 16, 32, 41])
def test_the_ring_holds_a_chunk_and_both_halos(W):
    layer = last_layer(bare("conv_fprop", ConvShape(1, 8, 9, W, 1, 5, 5, 1, 2), "bf16"))
    assert ring_pixels(layer) >= PIXELS + 2 * halo(layer)
    assert ring_pixels(layer) % 16 == 8


def test_a_block_takes_whole_images_while_there_are_enough():
    many = last_layer(bare("upconv_fprop", replace(REAL_UP, N=1024), "bf16", up=True))
    assert fprop_tile(many, "bf16", H200).pixels == 4 * 16 * 16
    assert fprop_tile(replace(many, N=1), "bf16", H200).pixels == 64


def test_what_shared_memory_cannot_hold_is_refused_in_words():
    call = bare("conv_fprop", ConvShape(1, 8, 3, 2048, 3, 3, 3, 1, 1), "bf16")
    assert "rows of 2048 pixels" in ops("bf16")[named("conv_fprop")].supports(call, H200)


@pytest.mark.sampled
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize(("precision", "op"), [("bf16", "upconv_mse_fprop"), ("tf32", "conv_fprop")])
def test_compile_two_blocks_fit_a_multiprocessor(precision, op, arch):
    up = str(op).startswith("upconv")
    impl, call = ops(precision)[named(op)], bare(op, REAL_UP if up else REAL, precision, up=up)
    call = replace(call, tile=impl.tile(call, H200))
    launch = bound_without_data(impl, call)[0]
    report = compile_launch(launch, arch)
    assert call.tile.resident == 2
    assert report.frame_bytes == 0
    assert report.registers * launch.block * 2 <= 65536
    assert 2 * (launch.shared + report.shared_bytes + 1024) <= 228 * 1024
