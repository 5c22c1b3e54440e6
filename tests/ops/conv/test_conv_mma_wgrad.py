"""Tests of weight gradients on mma.sync: against the float64 reference on a GPU; without one, what the compiler makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import assert_lean, full
from covering import Cover

from nbcnn.check import gradcheck
from nbcnn.check.one_op import run_op
from nbcnn.gpu.language import SIMULATOR
from nbcnn.gpu.target import Target
from nbcnn.modes import Row
from nbcnn.ops.conv.fused import MEAN_UP, up_cases
from nbcnn.ops.conv.mma import wgrad, wgrad_tile
from nbcnn.ops.conv.mma.wgrad_load import bits_inside
from nbcnn.ops.conv.mma.wgrad_product import COLUMNS, ROWS, lane_offset, row_of
from nbcnn.ops.conv.mma.wgrad_tile import KINDS, TILES, PixelTile
from nbcnn.ops.conv.reference import MEAN_CONVS, conv_cases
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape
from nbcnn.plan.storage import numpy_dtype

PRECISIONS = ["bf16", "tf32", "fp32", "fp16"]
SHAPES = (
    *MEAN_CONVS,
    ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1),
    ConvShape(4, 128, 8, 8, 128, 3, 3, 1, 1),
    ConvShape(3, 64, 15, 14, 72, 3, 3, 2, 1),
    ConvShape(2, 3, 32, 32, 64, 3, 3, 1, 1),
    ConvShape(2, 16, 12, 10, 30, 5, 2, 1, 0),
)
UP_SHAPES = (*MEAN_UP, ConvShape(4, 128, 8, 8, 256, 3, 3, 1, 1), ConvShape(1, 70, 5, 4, 133, 3, 3, 1, 1), ConvShape(2, 64, 8, 8, 3, 3, 3, 1, 1))


def cases() -> list[Case]:
    """Weight gradients of every shape, with a bias and without."""
    made = [case for shape in SHAPES for case in conv_cases(shape)] + [case for shape in UP_SHAPES for case in up_cases(shape)]
    return [case for case in made if str(case.op).endswith("wgrad")]


def row_for(precision: str) -> Row:
    return Row("tensorcore", precision, "gpu", "NHWC", (("mma", wgrad.ops(precision)),))


def bare(case: Case, precision: str, tile: PixelTile | None = None) -> Call:
    shapes, store = (tuple(a.shape for a in case.ins), tuple(o[0] for o in case.outs)), STORE[precision]
    return Call(case.op, (), (), *shapes, case.attrs, "NHWC", tile, in_dtypes=(store, store), out_dtypes=("float32",) * len(case.outs))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parity(gpu, precision):
    row, wrong, cover = row_for(precision), [], Cover()
    for case in cases():
        impl = row.fallbacks[0][1][case.op]
        if cover.takes_case(row, impl, case, gpu):
            error, limit = gradcheck.parity(row, impl, case, gpu), gradcheck.bound(case, precision)
            if not error <= limit:
                wrong.append((case.op, case.label, error, limit))
    assert not wrong


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tile_is_right(gpu, precision):
    row, cover = row_for(precision), Cover()
    for case in (
        next(c for c in conv_cases(ConvShape(2, 72, 9, 9, 200, 3, 3, 1, 1)) if str(c.op) == "conv_wgrad"),
        next(c for c in up_cases(ConvShape(1, 72, 4, 4, 136, 3, 3, 1, 1)) if str(c.op) == "upconv_wgrad"),
    ):
        for tile in TILES[precision]:
            impl, split = row.fallbacks[0][1][case.op], replace(tile, split=2)
            if cover.takes_case(row, impl, case, gpu, split):
                assert gradcheck.parity(row, impl, case, gpu, split) <= gradcheck.bound(case, precision), tile


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp16"])
def test_the_ring_may_end_at_any_slot(device, precision, steps):
    """Sums of the bias lie where the ring was, of which the last copies may still be on their way; the last step is ragged."""
    tile = min(TILES[precision], key=lambda tile: (tile.BM * tile.BN, tile.stages))
    row, case = (
        row_for(precision),
        next(conv for conv in conv_cases(ConvShape(1, 8, 1, steps * tile.BK - 1, 8, 1, 1)) if str(conv.op) == "conv_wgrad"),
    )
    assert len(case.outs) == 2
    assert gradcheck.parity(row, row.fallbacks[0][1][case.op], case, device, replace(tile, split=1)) <= gradcheck.bound(case, precision)


def test_inner_taps_of_a_doubled_image_share_out_the_bias(device):
    """Of 72 filters and 16 taps of 8 channels: tiles of several taps, a last row of tiles that is ragged."""
    tile, row = min(TILES["bf16"], key=lambda tile: (tile.BM * tile.BN, tile.stages)), row_for("bf16")
    case = next(case for case in up_cases(ConvShape(1, 72, 2, 2, 8, 3, 3, 1, 1)) if str(case.op) == "upconv_wgrad" and len(case.outs) == 2)
    assert gradcheck.parity(row, row.fallbacks[0][1][case.op], case, device, replace(tile, split=1)) <= gradcheck.bound(case, "bf16")


def test_repeats_bit_for_bit(gpu):
    case = next(case for case in conv_cases(ConvShape(4, 128, 8, 8, 128, 3, 3, 1, 1)) if str(case.op) == "conv_wgrad")
    options = {"attrs": case.attrs, "device": gpu, "layout": "NHWC", "store": "tfloat32"}
    one, other = (run_op(wgrad.IMPLS["tf32"], case.op, case.ins, case.outs, **options) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_lanes_that_read_together_find_different_banks(kind, columns):
    pitch = columns * kind.element + kind.pad
    for side, width in (("A", 8), ("B", 4)) if kind.element == 4 else (("A", 16), ("B", 16)):
        offsets = [int(lane_offset(kind, pitch, side).py_func(np.int32(lane))) for lane in range(32)]
        together = 128 // width
        for first in range(0, 32, together):
            banks = {(offset + byte) // 4 % 32 for offset in offsets[first : first + together] for byte in range(0, width, 4)}
            assert len(banks) == 32


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_rows_of_a_fragment_are_all_its_channels(precision):
    row = row_of(KINDS[precision]).py_func
    assert sorted(int(row(np.int32(h), np.int32(g))) for h in range(2) for g in range(COLUMNS)) == list(range(ROWS))


def test_bits_inside_the_image():
    for first in range(-20, 20):
        for size in (1, 2, 7, 30):
            for count in (1, 3, 15):
                expected = sum(1 << i for i in range(count) if 0 <= first + i < size)
                assert int(bits_inside.py_func(np.int32(first), np.int32(count), np.int32(size))) == expected


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("multiprocessors", [16, 132])
def test_parts_cover_the_pixels(precision, multiprocessors):
    for case in cases():
        g, kind = wgrad.correlation(bare(case, precision)), KINDS[precision]
        for tile in wgrad_tile.candidates(g, kind, Target((9, 0), multiprocessors)):
            assert tile.shared_bytes(kind) <= 227 * 1024
            assert tile.parts(g) * tile.steps(g) * tile.BK >= g.GM > (tile.parts(g) - 1) * tile.steps(g) * tile.BK


def launches(case: Case, precision: str, tile: PixelTile) -> list:
    """The launches of a case without a GPU: arrays are stand-ins."""
    call, dtype = bare(case, precision, tile), numpy_dtype(STORE[precision])
    impl = wgrad.ops(precision)[case.op]
    arrays = {"ins": (np.zeros(1, dtype),) * 2, "outs": (np.zeros(1, np.float32),) * len(case.outs)}
    return list(impl.bind(replace(call, scratch=np.zeros(impl.scratch(call), np.uint8), **arrays)))


@pytest.mark.full
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("precision", "shape", "up", "tile"),
    [
        ("bf16", ConvShape(1, 64, 4, 4, 64, 3, 3, 1, 1), False, TILES["bf16"][0]),
        ("tf32", ConvShape(1, 64, 4, 4, 64, 3, 3, 1, 1), True, TILES["tf32"][1]),
        ("fp32", ConvShape(1, 64, 4, 4, 64, 3, 3, 1, 1), False, TILES["fp32"][0]),
        *full(("bf16", ConvShape(1, 5, 4, 4, 3, 3, 3, 1, 1), True, TILES["bf16"][3])),
    ],
)
def test_compiles_without_spills(precision, shape, up, tile):
    case = next(case for case in (up_cases if up else conv_cases)(shape) if str(case.op).endswith("wgrad"))
    assert_lean(launches(case, precision, tile)[0], "80", 255)


@pytest.mark.parametrize("channels", [8, 6, 3])
def test_fp16_copies_through_registers_whatever_the_channels(device, channels):
    """16 bytes at a time, 4 and 2; several steps of pixels, padding, and both operands that a bias is summed of."""
    cases = [*conv_cases(ConvShape(1, channels, 6, 7, channels, 3, 3, 1, 1)), *up_cases(ConvShape(1, channels, 3, 4, channels, 3, 3, 1, 1))]
    row = row_for("fp16")
    for case in (case for case in cases if str(case.op).endswith("wgrad")):
        assert gradcheck.parity(row, row.fallbacks[0][1][case.op], case, device) <= gradcheck.bound(case, "fp16"), (case.op, case.label)


@pytest.mark.sampled
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("tile", TILES["fp16"], ids=lambda tile: f"{tile.BM}x{tile.BN}")
@pytest.mark.parametrize("channels", [64, 6, 3])
def test_fp16_compiles_for_7_5_without_spills(tile, channels):
    assert tile.shared_bytes(KINDS["fp16"]) <= 64 * 1024
    case = next(case for case in conv_cases(ConvShape(1, channels, 4, 4, channels, 3, 3, 1, 1)) if str(case.op).endswith("wgrad"))
    assert_lean(launches(case, "fp16", tile)[0], "75", 255)
