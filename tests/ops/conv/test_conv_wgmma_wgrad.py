"""Tests of weight gradients on wgmma: against the float64 reference on a GPU; without one, what the compiler makes of them and how parts are
added."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from covering import Cover

from nbcnn.check import gradcheck
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device
from nbcnn.gpu.target import H200
from nbcnn.modes import Row, named
from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.conv.frame.wgrad import correlation as wgrad_correlation
from nbcnn.ops.conv.fused import up_cases
from nbcnn.ops.conv.mma import wgrad as mma_wgrad
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.wgmma import wgrad, wgrad_square
from nbcnn.ops.conv.wgmma.wgrad_tile import PixelTile, candidates
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape
from nbcnn.plan.storage import numpy_dtype

SHAPES = {
    "conv2": ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1),
    "conv3": ConvShape(4, 128, 8, 8, 128, 3, 3, 1, 1),
    "conv4 unfolded": ConvShape(2, 128, 16, 16, 256, 3, 3, 1, 1),
    "stride 2": ConvShape(3, 64, 15, 14, 64, 3, 3, 2, 1),
    "few channels, odd image": ConvShape(1, 8, 7, 5, 24, 3, 3, 1, 1),
    "ragged channels": ConvShape(2, 72, 9, 9, 200, 3, 3, 1, 1),
    "tall filter, no padding": ConvShape(2, 16, 12, 10, 32, 5, 2, 1, 0),
    "one tap": ConvShape(2, 128, 7, 7, 64, 1, 1, 1, 0),
    "strided tap": ConvShape(2, 64, 9, 9, 128, 1, 1, 2, 0),
    "linear": ConvShape(70, 136, 1, 1, 16, 1, 1, 1, 0),
    "squares": ConvShape(3, 64, 16, 16, 64, 3, 3, 1, 1),
    "squares, ragged channels": ConvShape(2, 72, 8, 24, 200, 3, 3, 1, 1),
    "squares, two lines of taps": ConvShape(2, 128, 7, 8, 64, 2, 3, 1, 1),
    "squares of eight images": ConvShape(19, 64, 4, 4, 128, 3, 3, 1, 1),
    "squares of eight images, ragged": ConvShape(11, 72, 5, 7, 200, 2, 3, 1, 1),
    "squares of sixteen images": ConvShape(37, 64, 2, 2, 64, 3, 3, 1, 1),
    "squares of sixteen images, ragged": ConvShape(5, 136, 14, 10, 72, 3, 2, 1, 0),
}
UP_SHAPES = {
    "conv4": ConvShape(4, 128, 8, 8, 256, 3, 3, 1, 1),
    "few channels, odd image": ConvShape(2, 8, 3, 5, 24, 3, 3, 1, 1),
    "ragged channels": ConvShape(1, 72, 4, 4, 136, 3, 3, 1, 1),
}


def cases() -> list[Case]:
    """Weight gradients of every shape, with a bias and without."""
    made = [case for shape in SHAPES.values() for case in conv_cases(shape)]
    return [case for case in [*made, *(case for shape in UP_SHAPES.values() for case in up_cases(shape))] if str(case.op).endswith("wgrad")]


def row_of(precision: str) -> Row:
    return Row("tensorcore", precision, "gpu", "NHWC", (("wgmma", wgrad.ops(precision)),))


def bare(case: Case, store: str, tile: PixelTile | None = None) -> Call:
    shapes = tuple(a.shape for a in case.ins), tuple(o[0] for o in case.outs)
    return Call(case.op, (), (), *shapes, case.attrs, "NHWC", tile, in_dtypes=(store, store), out_dtypes=("float32",) * len(case.outs))


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_parity(gpu, precision):
    row = row_of(precision)
    wrong = []
    for case in cases():
        error = gradcheck.parity(row, row.fallbacks[0][1][case.op], case, gpu)
        if not error <= gradcheck.bound(case, precision):
            wrong.append((case.op, case.label, error))
    assert not wrong, wrong


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_every_candidate_is_right(gpu, precision):
    row, cover = row_of(precision), Cover()
    others = [(shape, conv_cases) for name, shape in SHAPES.items() if name.startswith("squares") or shape.R * shape.S == 1]
    for shape, make in ((SHAPES["ragged channels"], conv_cases), (UP_SHAPES["ragged channels"], up_cases), *others):
        case = next(case for case in make(shape) if str(case.op).endswith("wgrad"))
        impl = row.fallbacks[0][1][case.op]
        for tile in dict.fromkeys(replace(tile, split=min(tile.split, 3)) for tile in impl.candidates(bare(case, row.store), H200)):
            if cover.takes_case(row, impl, case, gpu, tile):
                assert gradcheck.parity(row, impl, case, gpu, tile) <= gradcheck.bound(case, precision), tile


def test_repeats_bit_for_bit(gpu):
    from nbcnn.check.one_op import run_op

    case = next(case for case in conv_cases(SHAPES["conv3"]) if str(case.op) == "conv_wgrad")
    options = {"attrs": case.attrs, "device": gpu, "layout": "NHWC", "store": "bfloat16"}
    one, other = (run_op(wgrad.ops("bf16")[case.op], case.op, case.ins, case.outs, **options) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


WIDE = ConvShape(1024, 4096, 1, 1, 4096, 1, 1, 1, 0)
"""A linear layer whose weight gradient has so many elements that the partials of 132 parts would be beyond 32-bit offsets."""


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("shape", [WIDE, replace(WIDE, C=16384, K=8192), ConvShape(256, 2048, 4, 4, 2048, 3, 3, 1, 1)], ids=str)
def test_a_large_filter_runs_here_with_as_many_parts_as_offsets_reach(shape, precision):
    ins, outs = (shape.x_shape, shape.y_shape), (shape.w_shape, (shape.K,))
    attrs = {"stride": shape.stride, "pad": shape.pad}
    call = Call(named("conv_wgrad"), (), (), ins, outs, attrs, "NHWC", in_dtypes=(STORE[precision],) * 2, out_dtypes=("float32",) * 2)
    for impl in (wgrad.ops(precision)[named("conv_wgrad")], mma_wgrad.IMPLS[precision]):
        assert impl.supports(call, H200) is None
        tiles = impl.candidates(call, H200)
        assert tiles
        assert all(tile.split * shape.K * shape.R * shape.S * shape.C < 2**31 for tile in tiles)


def test_a_filter_that_offsets_do_not_reach_is_refused():
    call = Call(named("conv_wgrad"), (), (), ((8, 65536, 1, 1), (8, 32768, 1, 1)), ((32768, 65536, 1, 1),), {"stride": 1, "pad": 0}, "NHWC")
    assert "a tensor of 2,147,483,648 elements is more than" in wgrad.ops("bf16")[named("conv_wgrad")].supports(call, H200)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_parity_of_a_large_filter(gpu, precision):
    (case,) = [case for case in conv_cases(replace(WIDE, N=64)) if str(case.op) == "conv_wgrad" and "no bias" not in case.label]
    row = row_of(precision)
    assert gradcheck.parity(row, row.fallbacks[0][1][case.op], case, gpu) <= gradcheck.bound(case, precision)


def test_every_part_has_steps_and_all_pixels_are_covered():
    """A block without a step would wait for ever."""
    for shape in (*SHAPES.values(), *UP_SHAPES.values()):
        for precision in ("bf16", "tf32", "fp32"):
            g = Correlation(shape.N, shape.H, shape.W, shape.C, shape.P, shape.Q, shape.K, shape.R, shape.S, shape.stride, shape.pad, shape.pad)
            squares = wgrad_square.candidates(g, H200) if precision == "bf16" else ()
            for tile in (*candidates(g, precision, H200), *squares):
                steps, parts = tile.steps(g), tile.parts(g)
                assert parts * (steps - 1) < tile.pixel_steps(g) <= parts * steps
                assert tile.cluster > 1 or (parts - 1) * steps < tile.pixel_steps(g)
                assert parts > 0
                assert parts % tile.cluster == 0
                assert tile.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("squares")])
def test_lines_of_a_patch_are_what_the_taps_of_a_square_see(name):
    """What TMA and the descriptors of wgmma address, in NumPy: eights of rows, 64s one pixel apart; all squares add up to the gradient."""
    shape = SHAPES[name]
    (case,) = [case for case in conv_cases(shape) if str(case.op) == "conv_wgrad" and "no bias" in case.label]
    g = wgrad_correlation(bare(case, "bfloat16"))
    tile = next(wgrad_square.candidates(g, H200))
    assert ("images" in name) == (tile.images > 1)
    x, dy = (a.astype(np.float64).transpose(0, 2, 3, 1) for a in case.ins)
    # What lies outside is zero, before the first pixel, behind the last and behind the last image.
    around, beyond = np.zeros((g.N + 16, g.H + 24, g.W + 24, g.C)), np.zeros((g.N + 16, g.P + 8, g.Q + 8, g.K))
    around[: g.N, 8 : 8 + g.H, 8 : 8 + g.W], beyond[: g.N, : g.P, : g.Q] = x, dy
    found, squares = np.zeros((g.K, g.R, g.S, g.C)), 0
    for image in range(0, g.N, tile.images):
        for h, w in product(range(0, g.P, tile.lines), range(0, g.Q, tile.columns)):
            some = slice(image, image + tile.images)
            square = beyond[some, h : h + tile.lines, w : w + tile.columns].transpose(1, 2, 0, 3).reshape(64, g.K)
            top, left = 8 + h - g.top, 8 + w - g.left
            patch = around[some, top : top + tile.PH, left : left + tile.PW].transpose(1, 2, 0, 3).reshape(-1, g.C)
            assert tile.patch_bytes == len(patch) * 128
            for r, s in np.ndindex(g.R, g.S):
                rows = [(r * tile.line_bytes + s * tile.pixel_bytes + eight) // 128 + k for eight in tile.eights for k in range(8)]
                found[:, r, s] += square.T @ patch[rows]
            squares += 1
    assert gradcheck.relative_error(found.transpose(0, 3, 1, 2), gradcheck.reference(case)[0]) < 1e-12
    assert squares == tile.pixel_steps(g)
    # wgmma sums over two eights at a time, which a descriptor has at one distance.
    apart = {other - one for one, other in zip(tile.eights[::2], tile.eights[1::2], strict=True)}
    assert len(apart) == 1
    inside = sum(
        max(0, min(g.H, h - g.top + tile.PH) - max(0, h - g.top)) * max(0, min(g.W, w - g.left + tile.PW) - max(0, w - g.left))
        for h, w in product(range(0, g.P, tile.lines), range(0, g.Q, tile.columns))
    )
    assert tile.patch_pixels(g) == inside


@pytest.mark.parametrize(
    ("shape", "images"),
    [
        (ConvShape(512, 512, 4, 4, 512, 3, 3, 1, 1), 8),
        (ConvShape(256, 512, 2, 2, 512, 3, 3, 1, 1), 16),
        (ConvShape(512, 64, 14, 14, 64, 3, 3, 1, 1), 16),
        (ConvShape(512, 64, 12, 12, 64, 3, 3, 1, 1), 8),
        (ConvShape(16, 64, 24, 8, 64, 3, 3, 1, 1), 1),
        (ConvShape(3, 64, 4, 4, 64, 3, 3, 1, 1), 8),
    ],
)
def test_squares_take_as_many_images_as_make_the_fewest_squares(shape, images):
    g = Correlation(shape.N, shape.H, shape.W, shape.C, shape.P, shape.Q, shape.K, shape.R, shape.S, shape.stride, shape.pad, shape.pad)
    assert {tile.images for tile in wgrad_square.candidates(g, H200)} == {images}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_taps_share_out_the_rows_of_a_doubled_image(size):
    """Tap u of pixel i sees row 2i + u − 1. Taken at odd i by even taps where the size is even, else at even i: every row once."""
    taken = [2 * i + u - 1 for u in range(4) for i in range(size) if i % 2 == (u % 2 == 0 and size % 2 == 0)]
    assert sorted(row for row in taken if 0 <= row < 2 * size) == list(range(2 * size))


@pytest.mark.full
@pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("precision", "op", "element"),
    [("bf16", "conv_wgrad", 2), ("bf16", "upconv_wgrad", 2), ("tf32", "upconv_wgrad", 4), ("fp32", "conv_wgrad", 2), ("fp32", "conv_wgrad", 4)],
)
def test_compiles_without_spills(precision, op, element):
    """The real layers at batch 1024: 384 threads leave 168 registers per thread, and the sums must stay in them.

    Of operands of this size in shared memory: fp32 comes as planes of bfloat16, or is transposed as tf32.
    """
    shape = (4, 128, 16, 16, 256) if op == "upconv_wgrad" else (4, 256, 16, 16, 128)
    n, c, h, w, k = shape
    up = 2 if op == "upconv_wgrad" else 1
    impl, store = wgrad.ops(precision)[named(op)], STORE[precision]
    attrs = {} if up == 2 else {"stride": 1, "pad": 1}
    shapes = ((n, c, h, w), (n, k, up * h, up * w)), ((k, c, 3, 3), (k,))
    dtypes = {"in_dtypes": (store, store), "out_dtypes": ("float32", "float32")}
    large = Call(named(op), (), (), ((1024, c, h, w), (1024, k, up * h, up * w)), shapes[1], attrs, "NHWC", **dtypes)
    tile = next(tile for tile in (impl.tile(large, H200), *impl.candidates(large, H200)) if tile.element == element)
    arrays = tuple(np.zeros(8, numpy_dtype(store)) for _ in range(2)), tuple(np.zeros(8, np.float32) for _ in range(2))
    scratch = np.zeros(impl.scratch(replace(large, in_shapes=shapes[0], tile=tile)), np.uint8)
    launches = impl.bind(Call(named(op), *arrays, *shapes, attrs, "NHWC", tile, None, scratch, **dtypes))
    assert all(compile_launch(launch).frame_bytes == 0 for launch in launches)
