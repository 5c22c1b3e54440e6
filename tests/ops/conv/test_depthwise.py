"""Tests of the depthwise kernels beyond the cases of gconv: strips, parts of a sum, what they refuse, registers, bytes counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import assert_lean, full

from nbcnn.check.gradcheck import relative_error
from nbcnn.check.one_op import Bound, Unsupported, run_op
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200, Target
from nbcnn.modes import MODES, named
from nbcnn.ops.conv import depthwise_stream_wgrad, grouped
from nbcnn.ops.conv.depthwise import Strip, lengths_of
from nbcnn.ops.conv.depthwise_stream import THREADS, Stream, stages_of, unroll_of
from nbcnn.ops.conv.depthwise_walk import backward, forward, pass_of
from nbcnn.ops.conv.depthwise_wgrad import OPS, Parts
from nbcnn.ops.kernel.call import Call, host
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.storage import decode, encode


def problem(op, n=2, c=4, size=(9, 5), window=(3, 3), stride=(1, 1), dilation=(1, 1), pad=(1, 1)):
    """Operands, output and attributes of a pass of a depthwise convolution."""
    rng = np.random.default_rng(3)
    out = [(h + 2 * p - (r - 1) * d - 1) // s + 1 for h, p, r, d, s in zip(size, pad, window, dilation, stride, strict=True)]
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, c, *size), (c, 1, *window), (n, c, *out)))
    ins, made = {"gconv_fprop": ((x, w), dy), "gconv_dgrad": ((dy, w), x), "gconv_wgrad": ((x, dy), w)}[str(op)]
    return ins, [(made.shape, "float32")], {"groups": c, "stride": stride, "dilation": dilation, "pad": pad}


def wanted(op, ins, outs, attrs):
    wide = [((shape), "float64") for shape, _ in outs]
    return run_op(host(getattr(grouped, str(op))), op, [each.astype(np.float64) for each in ins], wide, attrs=attrs, device=Host())


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("op", "tile", "shape"),
    [
        ("gconv_fprop", Strip(4, 3, 2), {}),
        ("gconv_fprop", Strip(2, 2, 1), {"stride": (2, 1), "dilation": (2, 2), "pad": (2, 0)}),
        ("gconv_dgrad", Strip(3, 2, 1), {"stride": (2, 2)}),
        ("gconv_wgrad", Parts(4, 2, 2, 1, 3), {"stride": (1, 2)}),
    ],
)
def test_strips_and_parts_are_put_together(device, layout, op, tile, shape):
    ins, outs, attrs = problem(op, **shape)
    (got,) = run_op(OPS[named(op)], op, ins, outs, attrs=attrs, device=device, layout=layout, tile=tile)
    # A weight gradient is a sum of 90 products at most, a pixel one of nine.
    assert relative_error(got, wanted(op, ins, outs, attrs)[0]) <= parity_bound(90, "fp32")


STREAMED = depthwise_stream_wgrad.OPS
IMAGES = {
    # Strips of three rows and one of one; some lines of the last block have no strip.
    "strips": {"n": 3, "size": (10, 5)},
    # Steps that read no row are left out, rows of one image are on their way while another's are multiplied.
    "whole images": {"n": 9, "c": 36, "size": (4, 5)},
    "two pixels": {"n": 20, "size": (2, 2)},
    "one image, stride": {"n": 1, "c": 12, "size": (9, 7), "stride": (2, 2)},
    "even, stride": {"n": 7, "c": 8, "size": (8, 8), "stride": (2, 2)},
    "phases": {"size": (9, 6), "window": (3, 2), "stride": (2, 1), "dilation": (3, 2), "pad": (2, 1)},
    # More sums than shared memory holds of all threads at once.
    "many taps": {"size": (6, 5), "window": (5, 5), "pad": (2, 2)},
    "no border": {"size": (5, 9), "pad": (0, 0)},
    # The first rows of a result read no row of the image, in any phase: they are the bias.
    "wide border": {"n": 9, "size": (4, 4), "pad": (3, 3)},
    "one tap, border": {"size": (4, 4), "window": (1, 1)},
    "dilation, border": {"size": (1, 5), "window": (3, 2), "stride": (3, 1), "dilation": (3, 1), "pad": (5, 1)},
}


@pytest.mark.parametrize("store", ["bfloat16", *full("float32")])
@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("op", STREAMED)
def test_strips_of_a_stream_are_put_together(device, op, shape, store):
    """Eight lines of threads, of which each takes two strips: short ones, or whole images."""
    ins, outs, attrs = problem(op, **IMAGES[shape])
    ins = tuple(decode(encode(each, "bfloat16"), "bfloat16") for each in ins)
    channels = attrs["groups"]
    if str(op) == "gconv_wgrad":
        outs = [*outs, ((channels,), "float32")]
    elif str(op) == "gconv_fprop":
        ins = (*ins, np.linspace(-1, 1, channels, dtype=np.float32))
    right = wanted(op, ins, outs, attrs)
    bound = Bound(STREAMED[named(op)], op, ins, outs, attrs=attrs, device=device, layout="NHWC", store=store)
    tried = {tile.length: tile for tile in STREAMED[named(op)].candidates(bound.call, device.target)}
    for length in {max(tried), min(3, *tried) if len(tried) > 1 else max(tried)}:
        g = pass_of(bound.call, tried[length].columns)
        items = g.source[0] * g.cells * g.phases * ceil_div(g.steps, length)
        tile = replace(tried[length], group=32, share=16, parts=ceil_div(items, 16))
        got = run_op(STREAMED[named(op)], op, ins, outs, attrs=attrs, device=device, layout="NHWC", store=store, tile=tile)
        for made, each in zip(got, right, strict=True):
            # Sums are float32; images are rounded to how they are stored.
            assert relative_error(made, each) <= (2**-8 if store == "bfloat16" and str(op) != "gconv_wgrad" else parity_bound(500, "fp32")), tile


@pytest.mark.parametrize("op", STREAMED)
def test_a_stream_fills_the_gpu(op):
    """Two blocks for most of 132 multiprocessors, in one wave, whatever image of MobileNet: small ones too."""
    for c, size, stride in ((32, 32, 1), (64, 32, 2), (128, 16, 1), (256, 8, 2), (512, 4, 1), (512, 4, 2), (1024, 2, 1)):
        x, dy, w = (512, c, size, size), (512, c, *[ceil_div(size, stride)] * 2), (c, 1, 3, 3)
        ins, out = {"gconv_fprop": ((x, w), dy), "gconv_dgrad": ((dy, w), x), "gconv_wgrad": ((x, dy), w)}[str(op)]
        attrs = {"groups": c, "stride": (stride, stride), "dilation": (1, 1), "pad": (1, 1)}
        call = Call(named(op), (), (), ins, (out,), attrs, "NHWC", in_dtypes=("bfloat16",) * 2, out_dtypes=("bfloat16",))
        assert STREAMED[named(op)].supports(call, H200) is None
        tile = STREAMED[named(op)].tile(call, H200)
        # A gradient of a stride has a column more than there are pairs, which does not divide as well.
        assert (180 if str(op) == "gconv_dgrad" and stride == 2 else 240) <= tile.parts * ceil_div(c // 4, tile.group) <= 264


def test_many_parts_are_added_in_one_trip(device):
    """66 parts, more than eight lines of threads have in flight; each of a line's first strip alone."""
    ins, outs, attrs = problem("gconv_wgrad", n=264, size=(2, 4))
    tile = Stream(2, 2, 3, 3, 32, 8, 66)
    (got,) = run_op(STREAMED[named("gconv_wgrad")], "gconv_wgrad", ins, outs, attrs=attrs, device=device, layout="NHWC", tile=tile)
    assert [grouped.sum_lines(parts) for parts in (1, 64, 65, 264)] == [8, 8, 32, 32]
    assert relative_error(got, wanted("gconv_wgrad", ins, outs, attrs)[0]) <= parity_bound(264 * 8, "fp32")


def test_a_stream_has_room():
    """Steps of a block in shared memory: a whole number of periods where those fit, more where it is alone, fewer where they are large."""
    found = [
        stages_of(*of)
        for of in ((8192, 3, 2), (12288, 3, 2), (14336, 2, 2), (24576, 2, 2), (28672, 2, 2), (12288, 5, 1), (2048, 2, 2), (69632, 1, 2))
    ]
    assert found == [6, 6, 4, 3, 3, 10, 10, 1]
    assert [unroll_of(*of) for of in ((6, 3), (3, 2), (4, 2))] == [3, 1, 2]


def test_steps_that_read_no_row_are_left_out():
    """Three rows of four, with a border of one: 4 + 2 steps, of which one reads above the image, and one below it."""
    for op, length, steps in (("gconv_fprop", 4, 5), ("gconv_fprop", 2, 4), ("gconv_wgrad", 4, 5), ("gconv_wgrad", 2, 4)):
        ins, outs, attrs = problem(op, size=(4, 4))
        tiles = STREAMED[named(op)].candidates(
            Bound(STREAMED[named(op)], op, ins, outs, attrs=attrs, device=Host(), layout="NHWC").call, Target((9, 0), 1)
        )
        assert {tile.walk for tile in tiles if tile.length == length} == {steps}


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("op", STREAMED)
def test_every_row_has_a_step(op, shape):
    """A walk makes one row per step, whatever it leaves out; a weight gradient takes in as many rows of dy. Each line of a block takes as many
    strips."""
    ins, outs, attrs = problem(op, **IMAGES[shape])
    tiles = STREAMED[named(op)].candidates(Bound(STREAMED[named(op)], op, ins, outs, attrs=attrs, device=Host(), layout="NHWC").call, H200)
    assert all(tile.walk >= tile.length for tile in tiles)
    assert all(tile.share % (THREADS // tile.group) == 0 for tile in tiles)


def test_what_does_not_stream_is_refused():
    for shape, layout, words in (
        ({"c": 6}, "NHWC", "6 channels in NHWC do not lie in fours"),
        ({}, "NCHW", "4 channels in NCHW do not lie in fours"),
        ({"window": (6, 5)}, "NHWC", "30 taps are more than 25"),
        ({"window": (4, 4), "stride": (4, 4)}, "NHWC", "steps of 69632 bytes do not stream: shared memory holds one"),
    ):
        ins, outs, attrs = problem("gconv_wgrad", **shape)
        with pytest.raises(Unsupported, match=words):
            Bound(STREAMED[named("gconv_wgrad")], "gconv_wgrad", ins, outs, attrs=attrs, device=Host(), layout=layout)


def test_a_walk_meets_every_tap_once():
    """Every tap reads a row and column of a step, and belongs to sums that are open, no two of them to the same of both."""
    for walk in (forward(3, 3, 1), forward(5, 2, 2, 2, 3), forward(2, 1, 3), backward(3, 3, (2, 2), (1, 1)), backward(2, 3, (2, 1), (2, 1))):
        rows = [walk.turn + r * walk.sign for r in range(walk.R)]
        places = {(walk.reads - 1 - e % walk.over, e // walk.over) for e in rows}
        parts = [divmod(s * walk.spread, walk.even) for s in range(walk.S)]
        columns = {(read + j * walk.jump, column + j) for read, column in parts for j in range(walk.columns)}
        assert len(places) == walk.R
        assert len(columns) == walk.S * walk.columns
        assert all(0 <= read < walk.reads and 0 <= slot < walk.slots for read, slot in places)
        assert all(0 <= read < walk.across and 0 <= column < walk.wide for read, column in columns)


def test_strips_are_cut_only_to_fill_the_gpu():
    for n, length in ((512, 16), (1, 2)):
        ins, outs, attrs = problem("gconv_fprop", n=n, c=128, size=(16, 16))
        bound = Bound(OPS[named("gconv_fprop")], "gconv_fprop", ins, outs, attrs=attrs, device=Host(), layout="NHWC", store="bfloat16")
        assert bound.call.tile.length == length
    assert lengths_of(10) == [10, 5, 4, 3, 2, 1]


def test_what_is_not_depthwise_is_refused():
    (x, _), outs, attrs = problem("gconv_fprop")
    for ins, made, given, words in (
        ((x, np.zeros((8, 1, 3, 3), np.float32)), [((2, 8, 9, 5), "float32")], attrs, "4 → 8 channels in 4 groups are not depthwise"),
        ((x, np.zeros((4, 2, 3, 3), np.float32)), outs, attrs | {"groups": 2}, "4 → 4 channels in 2 groups are not depthwise"),
        ((x, np.zeros((4, 1, 25, 5), np.float32)), outs, attrs | {"pad": (12, 2)}, "125 taps are more than 121"),
    ):
        with pytest.raises(Unsupported, match=words):
            Bound(OPS[named("gconv_fprop")], "gconv_fprop", ins, made, attrs=given, device=Host(), layout="NHWC")


def test_the_modes_but_naive_have_them_first():
    for key, row in MODES.items():
        # Rows of NHWC images stream where the GPU can, and what does not stream walks.
        chains = {op: [impl for _, impl in row.chain(op)] for op in OPS}
        first = [STREAMED, OPS] if row.layout == "NHWC" else [OPS]
        found = all(chains[op][: len(first)] == [ops[op] for ops in first] for op in OPS)
        assert found == (key[0] in ("tiled", "cudacore", "tensorcore")), key


@pytest.mark.parametrize("ops", [OPS, STREAMED], ids=["walk", "stream"])
@pytest.mark.parametrize("op", OPS)
def test_every_byte_of_the_images_is_counted(op, ops):
    ins, outs, attrs = problem(op, c=8, size=(8, 8), stride=(2, 2))
    bound = Bound(ops[named(op)], op, ins, outs, attrs=attrs, device=Host(), layout="NHWC", store="bfloat16")
    counted = ops[named(op)].traffic(bound.call)
    assert len(counted) == len(bound.launches)
    images = 2 * sum(array.size for array in ins if array.shape[1] == 8)
    # With stride 2 and a border of 1 every pixel is met; the weights are 72 floats.
    assert images <= counted[0].distinct <= images + 4 * 72
    assert counted[0].read >= counted[0].distinct


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("store", "layout"), [("bfloat16", "NHWC"), *full(("float32", "NHWC"), ("tfloat32", "NHWC"), ("float32", "NCHW"))])
@pytest.mark.parametrize("ops", [OPS, STREAMED], ids=["walk", "stream"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("stride", [1, 2])
def test_the_kernels_are_lean(store, layout, op, stride, ops):
    """Four blocks of 128 threads, or two of 256, on a multiprocessor, for whom depthwise.RESIDENT counts."""
    ins, outs, attrs = problem(op, n=64, c=32, size=(16, 16), stride=(stride, stride))
    if ops is STREAMED and layout == "NCHW":
        pytest.skip("only NHWC streams")
    bound = Bound(ops[named(op)], op, ins, outs, attrs=attrs, device=Host(), layout=layout, store=store)
    assert_lean(bound.launches[0], "90a", 128)
