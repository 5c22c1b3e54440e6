"""Winograd's convolution in one kernel, and with EvoNorm behind it: parity, repetition, refusals, shared memory, bytes, registers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nbcnn import cuda, gradcheck, ops
from nbcnn.cuda import Host
from nbcnn.ops.call import Call
from nbcnn.ops.cases import Case
from nbcnn.ops.conv.onchip import conv as onchip
from nbcnn.ops.conv.onchip.conv import OnchipTile, form_of, main_traffic
from nbcnn.ops.conv.onchip.form import GROUPS, THREADS, TURNS, across_of
from nbcnn.ops.evonorm import conv_onchip
from nbcnn.ops.norm_cases import conv_norm_cases
from nbcnn.ops.run import Bound
from nbcnn.ops.static import compile_launch
from nbcnn.shapes import ConvShape

ROW = ops.MODES["im2col", "fp32"]
SHAPES = (
    (3, 64, 28, 28),
    (150, 64, 28, 28),
    (40, 32, 16, 16),
    (20, 96, 8, 8),
    (5, 32, 14, 14),
    (2, 32, 56, 56),
    (7, 32, 6, 20),
    (9, 64, 10, 4),
)
"""N, C, H, W: fewer rounds than multiprocessors, and many a block; groups of eight, seven, five, four and two tiles; rounds that are not full."""
NORMS = (
    (ConvShape(16, 64, 28, 28, 64, 3, 3, 1, 1), 32),
    (ConvShape(150, 32, 14, 14, 64, 3, 3, 1, 1), 8),
    (ConvShape(5, 32, 8, 8, 64, 3, 3, 1, 1), 1),
    (ConvShape(140, 32, 4, 12, 64, 3, 3, 1, 1), 64),
)


def conv_case(n, c, h, w):
    rng = np.random.default_rng(c + h)
    x, w_ = rng.standard_normal((n, c, h, w)), rng.standard_normal((64, c, 3, 3)) / np.sqrt(9 * c)
    ins = tuple(array.astype(np.float32) for array in (x, w_, rng.standard_normal(64)))
    return Case("conv_fprop", f"{c}→64 {h}×{w} n{n}", ins, (((n, 64, h, w), "float32"),), {"stride": 1, "pad": 1}, 9 * c)


def bound_of(impl, case, place, tile=None):
    """However small the batch and few the channels."""
    return Bound(
        replace(impl, supports=lambda call: None),
        case.op,
        case.ins,
        case.outs,
        place=place,
        attrs=case.attrs,
        layout="NHWC",
        tile=tile,
        multiprocessors=132,
    )


def twice(bound, place, case):
    """The error of a run; another one must give the same bits (but for a running variance, which goes on)."""
    bound.poison()
    bound.run()
    place.synchronize()
    first = bound.results()
    bound.poison()
    bound.run()
    place.synchronize()
    for one, other, out in zip(first, bound.results(), case.outs, strict=True):
        assert isinstance(out, int) or np.array_equal(one, other)
    return max(gradcheck.relative_error(got, want) for got, want in zip(first, gradcheck.reference(case), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_plain_convolution(shape, gpu):
    case = conv_case(*shape)
    impl = onchip.OPS["conv_fprop"]
    whole = OnchipTile(1, min(shape[0], 132))
    for tile in (None, whole):
        assert twice(bound_of(impl, case, gpu, tile), gpu, case) <= gradcheck.bound(case)


@pytest.mark.parametrize(("shape", "groups"), NORMS, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_with_a_norm(shape, groups, gpu):
    for case in conv_norm_cases([(shape, groups)]):
        impl = conv_onchip.OPS[case.op]
        for tile in impl.candidates(bound_of(impl, case, Host()).call, 132):
            assert twice(bound_of(impl, case, gpu, tile), gpu, case) <= gradcheck.bound(case), (case.op, tile)


def test_statistics_far_from_zero(gpu):
    """b of 2000 leaves z few digits; of what it has left the statistics keep all. Filters of zeros: a plane of one value."""
    case = next(conv_norm_cases([(ConvShape(3, 32, 14, 14, 64, 3, 3, 1, 1), 64)]))
    x, w, b, *channels = case.ins
    ins = (x, np.where(np.arange(64) < 32, w.T, 0).T.copy(), b + np.float32(2000), *channels)
    impl = conv_onchip.OPS[case.op]
    bound = bound_of(impl, replace(case, ins=ins), gpu)
    bound.run()
    _, z, shift, std = bound.results()
    planes = z.reshape(3 * 64, -1).astype(np.float64)
    # Distances from a pixel are exact or rounded once, and so is each of their sums; means of parts are rounded as z is.
    eps = np.finfo(np.float32).eps
    sums, means, away = planes.shape[1] * eps, 4 * eps * np.abs(planes).max(axis=1), planes - planes[:, :1]
    variance = planes.var(axis=1) + case.attrs["eps"]
    assert np.all(np.abs(std.astype(np.float64) ** 2 - variance) <= 4 * sums * variance + means**2)
    assert np.all(np.abs(away.mean(axis=1) - shift) <= means + sums * np.abs(away).max(axis=1))
    np.testing.assert_array_equal(planes.reshape(3, 64, -1)[:, 32:].var(axis=2), 0)


def bare(op="conv_evonorm_s0_fprop", n=64, c=64, size=28, k=64, groups=32, layout="NHWC", pad=1):
    ins, outs = ((n, c, size, size), (k, c, 3, 3), *((k,),) * 4), ((n, k, size, size),) * 2
    kinds = {"in_dtypes": ("float32",) * len(ins), "out_dtypes": ("float32",) * len(outs)}
    return Call(op, (), (), ins, outs, {"stride": 1, "pad": pad, "groups": groups, "eps": 1e-5}, layout, **kinds)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"size": 58}, "58×58 is not whole tiles"),
        ({"size": 15}, "whole tiles of 2×2"),
        ({"n": 8}, "1568 output tiles"),
        ({"k": 128}, "64 to 128 channels"),
        ({"c": 48}, "48 to 64 channels"),
        ({"c": 32}, "32 to 64 channels"),
        ({"layout": "NCHW"}, "NHWC"),
        ({"size": 16, "n": 256, "groups": 64}, "bytes of shared memory"),
        ({"size": 16, "n": 256, "groups": 32}, None),
        ({"groups": 3}, "do not divide"),
    ],
)
def test_what_it_serves(change, reason):
    found = conv_onchip.supports(bare(**change))
    assert found is None if reason is None else reason in found


def test_rounds_are_shared_evenly():
    plain = [onchip.tile(replace(bare(n=n), op="conv_fprop", in_shapes=bare(n=n).in_shapes[:3]), 132) for n in (16, 64, 1024)]
    assert plain == [OnchipTile(7, 112), OnchipTile(7, 132), OnchipTile(7, 132)]
    chosen = [conv_onchip.candidates(bare(n=n), 132)[0] for n in (16, 32, 64, 100, 256)]
    assert chosen == [OnchipTile(7, 112), OnchipTile(4, 128), OnchipTile(2, 128), OnchipTile(1, 100), OnchipTile(1, 132)]


@pytest.mark.parametrize(("width", "across"), [(28, 7), (32, 8), (56, 7), (16, 8), (64, 8), (20, 5), (8, 4), (4, 2), (58, 0), (96, 0)])
def test_groups_of_tiles_make_whole_lines(width, across):
    assert across_of(width) == across
    if across:
        form = form_of(ConvShape(1, 32, 8, width, 64, 3, 3, 1, 1), 1)
        assert form.lines * form.W == 4 * form.tiles
        assert form.rounds == -(-8 * width // (4 * form.tiles))


def test_every_form_fits_into_shared_memory():
    for width in (28, 56, 14, 8):
        assert form_of(ConvShape(1, 32, 8, width, 64, 3, 3, 1, 1), 1, 14 * 64).shared_bytes <= 227 * 1024
    assert form_of(ConvShape(1, 32, 8, 32, 64, 3, 3, 1, 1), 1).shared_bytes <= 227 * 1024


@pytest.mark.parametrize("size", [(28, 28), (14, 14), (8, 64), (2, 4)])
def test_bytes_by_hand(size):
    c = ConvShape(3, 32, *size, 64, 3, 3, 1, 1)
    form = form_of(c, 1)
    seen = 0
    for group in range(form.groups):
        down, across = divmod(group, form.groups_of_line)
        lines = sum(0 <= 2 * down + a < c.H for a in range(-1, 3))
        seen += lines * sum(0 <= 2 * form.across * across + j < c.W for j in range(-1, 2 * form.across + 1))
    points = 4 * 16 * 32 * 64
    found = main_traffic(c, form)
    assert found.read == 3 * (4 * 32 * seen + -(-form.groups // GROUPS) * points) + 4 * 64
    assert found.write == 4 * 3 * 64 * c.H * c.W
    assert found.distinct == 4 * 3 * 32 * c.H * c.W + points + 4 * 64


def test_bytes_of_a_norm():
    image = 4 * 64 * 28 * 28
    for op, again, kept in (("conv_evonorm_s0_fprop", 1, 8 * 32), ("conv_evonorm_s0_infer", 1, 0)):
        call = replace(bare(op, n=100), tile=OnchipTile(1, 100))
        plain = main_traffic(ConvShape(100, 64, 28, 28, 64, 3, 3, 1, 1), form_of(ConvShape(100, 64, 28, 28, 64, 3, 3, 1, 1), 1))
        _, found = conv_onchip.OPS[op].traffic(call)
        assert (found.read - plain.read, found.write - plain.write) == (100 * again * image, 100 * (again * image + kept))


@pytest.mark.skipif(cuda.SIMULATOR, reason="the simulator compiles nothing")
def test_sums_stay_in_registers():
    """Of 512 threads each has 128 registers at first; those that multiply take 160, and no product is spilled."""
    impl = onchip.OPS["conv_fprop"]
    bound = bound_of(impl, conv_case(16, 64, 28, 28), Host())
    report = compile_launch(bound.launches[1])
    assert (report.frame_bytes, report.registers, THREADS, TURNS) == (0, 128, 512, 4)


@pytest.mark.skipif(cuda.SIMULATOR, reason="the simulator compiles nothing")
def test_a_norm_behind_it_compiles():
    case = next(conv_norm_cases([(ConvShape(16, 64, 28, 28, 64, 3, 3, 1, 1), 32)]))
    report = compile_launch(bound_of(conv_onchip.OPS[case.op], case, Host()).launches[1])
    assert (report.frame_bytes, report.registers) == (0, 128)
