"""Winograd's convolution in one kernel, and with EvoNorm behind it: parity, repetition, refusals, shared memory, bytes, registers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from nbcnn.check import gradcheck
from nbcnn.check.cases import Case
from nbcnn.check.norm_cases import conv_norm_cases
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch, ptx_of_launch
from nbcnn.gpu import device
from nbcnn.gpu.device import Host
from nbcnn.ops.conv.onchip import conv as onchip
from nbcnn.ops.conv.onchip.conv import OnchipTile, form_of, main_traffic
from nbcnn.ops.conv.onchip.fill import lane_start, loading, transforming
from nbcnn.ops.conv.onchip.finish import PLAIN, making, pixel_floats, quad_of
from nbcnn.ops.conv.onchip.form import AT_POINTS, CHANNELS, FILTER_STAGE, FILTERS, FINISHERS, SLOTS, STRIPS, across_of
from nbcnn.ops.conv.onchip.form import ROW as ROW_OF_TILES
from nbcnn.ops.conv.onchip.multiply import COLUMNS, FACTORS, lane_place, products, storing
from nbcnn.ops.evonorm import conv_onchip
from nbcnn.ops.evonorm.conv_onchip_end import not_negative, spare_of
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.shapes import ConvShape

G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
"""Of F(2×2, 3×3): filters to points (winograd.py)."""
SHAPES = (
    (3, 64, 28, 28),
    (150, 64, 28, 28),
    (20, 96, 8, 12),
    (5, 32, 14, 14),
    (2, 32, 56, 56),
    (7, 32, 6, 20),
    (3, 64, 4, 40),
)
"""N, C, H, W: fewer rounds than multiprocessors, and many a block; strips of seven, six and five tiles; rounds that are not full."""
NORMS = (
    (ConvShape(16, 64, 28, 28, 64, 3, 3, 1, 1), 32),
    (ConvShape(150, 32, 14, 14, 64, 3, 3, 1, 1), 8),
    (ConvShape(3, 32, 14, 14, 64, 3, 3, 1, 1), 32),
    (ConvShape(5, 32, 8, 20, 64, 3, 3, 1, 1), 1),
    (ConvShape(140, 32, 4, 12, 64, 3, 3, 1, 1), 64),
    (ConvShape(140, 32, 8, 12, 64, 3, 3, 1, 1), 16),
    (ConvShape(5, 32, 56, 56, 64, 3, 3, 1, 1), 8),
)
"""Images in seven rounds, in two, in one, and in twenty-eight; batches of which some images wait for blocks' next rounds."""
OTHER_TILES = (OnchipTile(7), OnchipTile(20))
"""For the first of these: an image's rounds are all that is multiplied at a time; one image of three waits for blocks' next rounds."""


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
    for tile in (None, OnchipTile(5)):
        assert twice(bound_of(impl, case, gpu, tile), gpu, case) <= gradcheck.bound(case)


@pytest.mark.parametrize(("shape", "groups"), NORMS, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_with_a_norm(shape, groups, gpu):
    for case in conv_norm_cases([(shape, groups)]):
        impl = conv_onchip.OPS[case.op]
        others = OTHER_TILES if shape is NORMS[0][0] else ()
        for tile in (None, *others):
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


def test_channels_whose_factor_is_zero(gpu):
    """γ = 0 makes y = β exactly; a negative one is a negative factor."""
    case = next(conv_norm_cases([(ConvShape(3, 32, 14, 14, 64, 3, 3, 1, 1), 32)]))
    x, w, b, gamma, *others = case.ins
    zero = np.arange(64) % 3 == 0
    case = replace(case, ins=(x, w, b, np.where(zero, 0, -np.abs(gamma)).astype(np.float32), *others))
    bound = bound_of(conv_onchip.OPS[case.op], case, gpu)
    assert twice(bound, gpu, case) <= gradcheck.bound(case)
    np.testing.assert_array_equal(bound.results()[0][:, zero], np.broadcast_to(others[0][zero][:, None, None], (3, zero.sum(), 14, 14)))


def test_what_diverges_shows_in_its_group_and_no_other(gpu):
    """NaN in all of a channel: in y of the channels that share its statistics, and of no other."""
    for case in conv_norm_cases([(ConvShape(3, 32, 28, 28, 64, 3, 3, 1, 1), 32)]):
        x, w, b, *others = case.ins
        bound = bound_of(
            conv_onchip.OPS[case.op], replace(case, ins=(x, w, np.where(np.arange(64) == 7, np.nan, b).astype(np.float32), *others)), gpu
        )
        bound.run()
        nan = np.isnan(bound.results()[0])
        np.testing.assert_array_equal(nan.all((0, 2, 3)), [c in ((6, 7) if "s0" in case.op else (7,)) for c in range(64)])
        np.testing.assert_array_equal(nan.any((0, 2, 3)), nan.all((0, 2, 3)))


def test_a_pixel_that_diverges_shows_in_its_image(gpu):
    for case in conv_norm_cases([(ConvShape(3, 32, 28, 28, 64, 3, 3, 1, 1), 32)]):
        x, *others = case.ins
        x = x.copy()
        x[1, 0, 5, 5] = np.nan
        bound = bound_of(conv_onchip.OPS[case.op], replace(case, ins=(x, *others)), gpu)
        bound.run()
        assert np.isnan(bound.results()[0]).all((1, 2, 3)).tolist() == ([True] * 3 if "b0_fprop" in case.op else [False, True, False]), case.op


def test_statistics_of_a_batch_far_from_zero(gpu):
    """As of groups: b of 2000, filters of zeros for half of the channels; blocks of five and six rounds, a channel from twenty of them."""
    case = next(case for case in conv_norm_cases([NORMS[0]]) if case.op == "conv_evonorm_b0_fprop")
    x, w, b, *channels = case.ins
    ins = (x, np.where(np.arange(64) < 32, w.T, 0).T.copy(), b + np.float32(2000), *channels)
    bound = bound_of(conv_onchip.OPS[case.op], replace(case, ins=ins), gpu, OnchipTile(20))
    assert len(bound.launches) == 2
    bound.run()
    _, z, _, _, shift, std, _ = bound.results()
    channels = z.transpose(1, 0, 2, 3).reshape(64, -1).astype(np.float64)
    eps = np.finfo(np.float32).eps
    sums, means, away = channels.shape[1] * eps, 4 * eps * np.abs(channels).max(axis=1), channels - channels[:, :1]
    variance = channels.var(axis=1) + case.attrs["eps"]
    assert np.all(np.abs(std.astype(np.float64) ** 2 - variance) <= 4 * sums * variance + means**2)
    assert np.all(np.abs(away.mean(axis=1) - shift) <= means + sums * np.abs(away).max(axis=1))
    np.testing.assert_allclose(std[32:], np.sqrt(np.float32(case.attrs["eps"])), rtol=2 * eps)  # the special function unit's 2 ulp


def bare(op="conv_evonorm_s0_fprop", n=64, c=64, size=28, k=64, groups=32, layout="NHWC", pad=1, height=None):
    ins, outs = ((n, c, height or size, size), (k, c, 3, 3), *((k,),) * 4), ((n, k, height or size, size),) * 2
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
        ({"size": 16, "n": 256}, "16×16 is not whole tiles"),
        ({"size": 20, "n": 256, "groups": 64}, None),
        ({"size": 56}, None),
        ({"size": 56, "height": 112, "groups": 64}, "images of 112×56 and their statistics take"),
        ({"size": 56, "height": 268, "groups": 8}, "an image has 134 rounds, which wait for each other, and the GPU 132"),
        ({"groups": 3}, "do not divide"),
    ],
)
def test_what_it_serves(change, reason):
    found = conv_onchip.supports(bare(**change))
    assert found is None if reason is None else reason in found


def test_every_multiprocessor_has_a_block():
    plain = [onchip.tile(replace(bare(n=n), op="conv_fprop", in_shapes=bare(n=n).in_shapes[:3]), 132) for n in (16, 64, 1024)]
    assert plain == [conv_onchip.tile(bare(n=n), 132) for n in (16, 64, 1024)] == [OnchipTile(112), OnchipTile(132), OnchipTile(132)]


@pytest.mark.parametrize(("width", "across"), [(28, 7), (56, 7), (14, 7), (24, 6), (20, 5), (32, 0), (16, 0), (8, 0), (58, 0), (96, 0)])
def test_strips_of_tiles_make_whole_lines(width, across):
    assert across_of(width) == across
    if across:
        form = form_of(ConvShape(1, 32, 8, width, 64, 3, 3, 1, 1))
        assert STRIPS % form.strips_of_line == 0
        assert form.rounds == -(-8 * width // (4 * form.tiles))


def test_every_form_fits_into_shared_memory():
    for size in (28, 56, 14, 20, 24):
        c = ConvShape(1, 32, size, size, 64, 3, 3, 1, 1)
        assert replace(form_of(c), spare=spare_of(form_of(c), 1)).shared_bytes <= 227 * 1024


def test_blocks_that_would_wait_for_ever_are_refused():
    case = next(conv_norm_cases([(ConvShape(3, 64, 28, 28, 64, 3, 3, 1, 1), 32)]))
    bound = bound_of(conv_onchip.OPS[case.op], case, Host(), OnchipTile(7))
    with pytest.raises(ValueError, match="6 blocks for the 7 rounds"):
        conv_onchip.OPS[case.op].bind(replace(bound.call, tile=OnchipTile(6)))
    plain = bound_of(onchip.OPS["conv_fprop"], conv_case(3, 64, 28, 28), Host(), OnchipTile(21))
    for impl, call in ((conv_onchip.OPS[case.op], bound.call), (onchip.OPS["conv_fprop"], plain.call)):
        with pytest.raises(ValueError, match="22 blocks for 21 rounds"):
            impl.bind(replace(call, tile=OnchipTile(22)))


@pytest.mark.parametrize("size", [(28, 28), (14, 14), (8, 56), (2, 10)])
def test_bytes_by_hand(size):
    c = ConvShape(3, 32, *size, 64, 3, 3, 1, 1)
    form = form_of(c)
    seen = 0
    for strip in range(form.strips):
        down, across = divmod(strip, form.strips_of_line)
        lines = sum(0 <= 2 * down + a < c.H for a in range(-1, 3))
        seen += lines * sum(0 <= 2 * form.across * across + j < c.W for j in range(-1, 2 * form.across + 1))
    points = 4 * 16 * 32 * 64
    found = main_traffic(c, form)
    assert found.read == 3 * (4 * 32 * seen + -(-form.strips // STRIPS) * points)
    assert found.write == 4 * 3 * 64 * c.H * c.W
    assert found.distinct == 4 * 3 * 32 * c.H * c.W + points


def training(op, n):
    """A call of the study's shape."""
    attrs = {"stride": 1, "pad": 1, "eps": 1e-3} | ({"groups": 32} if "s0" in op else {})
    return replace(bare("conv_evonorm_" + op, n=n), tile=OnchipTile(132), attrs=attrs)


def test_bytes_of_a_norm():
    """y beside z in training, statistics of groups that are kept, packets of which every round of an image reads all."""
    image = 4 * 64 * 28 * 28
    for op, n, both, sets, kept, readers in (
        ("s0_fprop", 64, 1, 32, 8, 7),
        ("s0_infer", 64, 0, 32, 0, 7),
        ("b0_fprop", 256, 0, 64, 8, 1),
        ("b0_infer", 64, 0, 64, 0, 7),
    ):
        c, packets = ConvShape(n, 64, 28, 28, 64, 3, 3, 1, 1), 16 * n * 7
        call, plain = training(op, n), main_traffic(c, form_of(c))
        _, found, *behind = conv_onchip.OPS[call.op].traffic(call)
        assert found.read - plain.read == packets * sets * readers
        assert found.write - plain.write == n * (both * image + kept * sets) + packets * sets
        assert found.distinct - plain.distinct == packets * sets
        assert bool(behind) == (op == "b0_fprop")


def test_bytes_of_b0_in_one_kernel():
    """448 rounds by 132 blocks: z of 316 comes back; 64 packets of every block and of first values to their channel, 64 deviations to every block."""
    c, call = ConvShape(64, 64, 28, 28, 64, 3, 3, 1, 1), training("b0_fprop", 64)
    plain, planes, of_batch = main_traffic(c, form_of(c)), 16 * 64 * 7 * 64, 16 * 64 * (132 + 1 + 1)
    (_, found) = conv_onchip.OPS[call.op].traffic(call)
    assert found.read - plain.read == 7 * planes + 316 * 4 * 64 * 4 * 28 + 16 * 64 * (132 + 1 + 132)
    assert found.write - plain.write == 4 * 64 * 64 * 28 * 28 + 8 * 64 * 64 + 12 * 64 + planes + of_batch
    assert found.distinct - plain.distinct == planes + of_batch + 316 * 4 * 64 * 4 * 28


@pytest.mark.parametrize(("n", "size", "blocks", "whole"), [(64, 28, 132, True), (16, 28, 7, False), (256, 28, 132, False), (64, 10, 100, False)])
def test_b0_in_training_is_one_kernel_where_a_block_has_few_full_rounds(n, size, blocks, whole):
    shape = ConvShape(n, 64, size, size if size > 10 else 12, 64, 3, 3, 1, 1)
    case = next(case for case in conv_norm_cases([(shape, 32)]) if case.op == "conv_evonorm_b0_fprop")
    found = bound_of(conv_onchip.OPS[case.op], case, Host(), OnchipTile(blocks)).launches
    assert (len(found) == 2) == whole
    assert all(launch.shared <= 227 * 1024 for launch in found)


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
def test_sums_stay_in_registers():
    """Of 512 threads each has 128 registers at first; those that multiply take 160, and no product is spilled."""
    bound = bound_of(onchip.OPS["conv_fprop"], conv_case(16, 64, 28, 28), Host())
    report = compile_launch(bound.launches[1])
    assert (report.frame_bytes, report.registers) == (0, 128)


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
def test_a_stage_is_given_back_when_it_has_been_read():
    """The arrival that lets TMA overwrite filters waits for loads of them: without a fence some were late (seen when processes share a GPU)."""
    text = ptx_of_launch(bound_of(onchip.OPS["conv_fprop"], conv_case(16, 64, 28, 28), Host()).launches[1])
    instructions = re.findall(r"ld\.shared\.v4|fence\.proxy\.async|bar\.warp\.sync|@p mbarrier\.arrive|mbarrier\.try_wait", text)
    given_back = instructions.index("fence.proxy.async")
    assert instructions[given_back - 1 : given_back + 4] == [
        "ld.shared.v4", "fence.proxy.async", "bar.warp.sync", "@p mbarrier.arrive", "mbarrier.try_wait",
    ]  # fmt: skip


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("op", "blocks", "spilled"),
    [("s0_fprop", 112, 0), ("b0_fprop", 112, 16), ("b0_fprop", 7, 16), ("b0_infer", 112, 16)],
    ids=["S0 in training", "B0 in training", "B0's planes", "B0 in inference"],
)
def test_a_norm_behind_it_compiles(op, blocks, spilled):
    """Beside 56 numbers of pixels B0's ends want up to four more than a finisher's 104 registers."""
    op = "conv_evonorm_" + op
    case = next(case for case in conv_norm_cases([NORMS[0]]) if case.op == op)
    report = compile_launch(bound_of(conv_onchip.OPS[op], case, Host(), OnchipTile(blocks)).launches[1])
    assert report.frame_bytes <= spilled
    assert report.registers == 128


@pytest.mark.skipif(not device.SIMULATOR, reason="one thread calls a device function in Python")
def test_a_variance_is_not_negative_and_nan_stays():
    @device.jit()
    def play(numbers):
        for i in range(len(numbers)):
            numbers[i] = not_negative(numbers[i])

    numbers = np.array([np.nan, -1e-9, 0, 2.5, np.inf], np.float32)
    play[1, 1](numbers)
    np.testing.assert_array_equal(numbers, np.array([np.nan, 0, 0, 2.5, np.inf], np.float32))


@pytest.mark.skipif(not device.SIMULATOR, reason="one thread plays all of a block's, in Python")
@pytest.mark.parametrize("size", [(8, 28), (6, 12), (6, 20)])
def test_where_everything_lies(size):
    """A block's work without its warps and barriers: points, products and pixels of every round, each thread's in turn."""
    c = ConvShape(2, 16, *size, 64, 3, 3, 1, 1)
    form, case = form_of(c), conv_case(2, 16, *size)
    load, transform, make = loading(form), transforming(form), making(form, PLAIN)
    (first, others, last), store, CHUNKS, ROUNDS = products(form), storing(form), c.C // CHANNELS, form.rounds

    @device.jit()
    def play(x, u, b, z, memory):
        for n in range(2):
            for round in range(ROUNDS):
                sums = [[np.zeros(2 * form.across * COLUMNS, np.float32) for lane in range(32)] for warp in range(8)]
                for chunk in range(CHUNKS):
                    memory[:FILTER_STAGE] = u[chunk * FILTER_STAGE : (chunk + 1) * FILTER_STAGE]
                    for lane in range(32):
                        d = np.zeros(4 * (2 * form.across + 2), np.float32)
                        load(d, x, n, round, chunk, lane)
                        transform(memory, AT_POINTS + lane_start(lane), d)
                    for warp in range(8):
                        for lane in range(32):
                            strip, filter = lane_place(lane)
                            where = memory, AT_POINTS + warp * 2 * ROW_OF_TILES + strip * SLOTS, warp * 2 * FILTERS + filter
                            factors = np.zeros(FACTORS, np.float32)
                            for part in (first, others, last):  # the last one also loads what nobody multiplies
                                part(sums[warp][lane], factors, *where)
                for warp in range(8):
                    for lane in range(32):
                        store(memory, sums[warp][lane], warp, *lane_place(lane))
                for tid in range(FINISHERS):
                    quad, made = quad_of(tid), np.full(pixel_floats(form), np.nan, np.float32)
                    make(memory, made, [0], b[quad : quad + 4], z, n, round, tid, 1)

    x, w, b = case.ins
    u = np.einsum("ar,kcrs,bs->cabk", G, w.astype(np.float64), G).reshape(-1).astype(np.float32)
    z = np.full(2 * c.H * c.W * 64, np.nan, np.float32)
    play[1, 1](x.transpose(0, 2, 3, 1).reshape(-1).copy(), u, b, z, np.zeros(form.at_spare, np.float32))
    (want,) = gradcheck.reference(case)
    assert gradcheck.relative_error(z.reshape(2, c.H, c.W, 64).transpose(0, 3, 1, 2), want) <= gradcheck.bound(case)
