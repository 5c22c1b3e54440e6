"""Tests of the depthwise kernels beyond the cases of gconv: strips, parts of a sum, what they refuse, registers, bytes counted."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, full

from nbcnn.check.gradcheck import relative_error
from nbcnn.check.one_op import Bound, Unsupported, run_op
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.modes import MODES
from nbcnn.ops.conv import depthwise_stream, grouped
from nbcnn.ops.conv.depthwise import Strip, lengths_of
from nbcnn.ops.conv.depthwise_stream import Stream, walk_of
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
    ins, made = {"gconv_fprop": ((x, w), dy), "gconv_dgrad": ((dy, w), x), "gconv_wgrad": ((x, dy), w)}[op]
    return ins, [(made.shape, "float32")], {"groups": c, "stride": stride, "dilation": dilation, "pad": pad}


def wanted(op, ins, outs, attrs):
    wide = [((shape), "float64") for shape, _ in outs]
    return run_op(host(getattr(grouped, op)), op, [each.astype(np.float64) for each in ins], wide, attrs=attrs, device=Host())


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
    (got,) = run_op(OPS[op], op, ins, outs, attrs=attrs, device=device, layout=layout, tile=tile)
    # A weight gradient is a sum of 90 products at most, a pixel one of nine.
    assert relative_error(got, wanted(op, ins, outs, attrs)[0]) <= parity_bound(90, "fp32")


def streamed(size=(9, 5), length=3, columns=2, walk=5, stages=6, group=32, share=16, parts=2, **shape):
    """What a streamed weight gradient of a tile makes, and what it should make; eight lines of threads, of which each takes two strips."""
    ins, outs, attrs = problem("gconv_wgrad", size=size, **shape)
    ins, outs = tuple(decode(encode(each, "bfloat16"), "bfloat16") for each in ins), [*outs, ((ins[0].shape[1],), "float32")]
    tile = Stream(length, columns, walk, stages, group, share, parts)
    return ins, outs, attrs, tile


@pytest.mark.parametrize("store", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        # Strips of three rows, the last of one: 2·3·4 of them, 16 in the first block.
        {"size": (10, 5)},
        # Whole images, whose last step is left out: 6·3 strips in two blocks, some lines of the second have none.
        {"n": 6, "size": (4, 5), "length": 4, "walk": 5},
        {"n": 9, "size": (2, 2), "length": 2, "walk": 3, "parts": 1, "c": 36},
        # One image, with a stride: one column a thread, two rows a step.
        {"n": 1, "c": 12, "size": (9, 7), "stride": (2, 2), "columns": 1, "stages": 4, "length": 5, "walk": 6, "parts": 1},
        # Phases, and columns that lie apart.
        {
            "n": 2,
            "c": 8,
            "size": (9, 6),
            "window": (3, 2),
            "stride": (2, 1),
            "dilation": (3, 2),
            "pad": (2, 1),
            "columns": 1,
            "length": 1,
            "walk": 2,
            "parts": 5,
        },
        # More sums than shared memory holds of all threads at once.
        {"n": 2, "size": (6, 5), "window": (5, 5), "pad": (2, 2), "columns": 1, "stages": 5, "length": 6, "walk": 8, "parts": 1},
    ],
)
def test_strips_of_a_stream_are_put_together(device, store, shape):
    ins, outs, attrs, tile = streamed(**shape)
    bound = Bound(depthwise_stream.OPS["gconv_wgrad"], "gconv_wgrad", ins, outs, attrs=attrs, device=device, layout="NHWC", store=store, tile=tile)
    g = pass_of(bound.call, tile.columns)
    items = g.source[0] * g.cells * g.phases * ceil_div(g.steps, tile.length)
    # Every strip has its part, every part a strip, and no step is left out that a strip needs.
    assert (ceil_div(items, tile.share), walk_of(g, tile.length)) == (tile.parts, tile.walk)
    got = run_op(depthwise_stream.OPS["gconv_wgrad"], "gconv_wgrad", ins, outs, attrs=attrs, device=device, layout="NHWC", store=store, tile=tile)
    for made, right in zip(got, wanted("gconv_wgrad", ins, outs, attrs), strict=True):
        assert relative_error(made, right) <= parity_bound(200, "fp32")


def test_a_stream_fills_the_gpu():
    """Every image of MobileNet gives each of two blocks of 132 multiprocessors a part, in one wave: small images too."""
    for c, size, stride in ((32, 32, 1), (64, 32, 2), (128, 16, 1), (256, 8, 2), (512, 4, 1), (512, 4, 2), (1024, 2, 1)):
        out = (size - 1) // stride + 1
        shapes = ((512, c, size, size), (512, c, out, out)), ((c, 1, 3, 3),)
        attrs = {"groups": c, "stride": (stride, stride), "dilation": (1, 1), "pad": (1, 1)}
        call = Call("gconv_wgrad", (), (), *shapes, attrs, "NHWC", in_dtypes=("bfloat16",) * 2, out_dtypes=("float32",))
        tile = depthwise_stream.tile(call, 132)
        assert 240 <= tile.parts * ceil_div(c // 4, tile.group) <= 264
        assert tile.length == out


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
        bound = Bound(OPS["gconv_fprop"], "gconv_fprop", ins, outs, attrs=attrs, device=Host(), layout="NHWC", store="bfloat16")
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
            Bound(OPS["gconv_fprop"], "gconv_fprop", ins, made, attrs=given, device=Host(), layout="NHWC")


def test_every_gpu_mode_but_naive_has_them_first():
    for key, row in MODES.items():
        # Rows of NHWC images stream their weight gradients where the GPU can.
        wanted = OPS | depthwise_stream.OPS if row.layout == "NHWC" else OPS
        firsts = {op: next(row.chain(op))[1] for op in OPS}
        assert (firsts == wanted) == (row.device == "gpu" and key[0] != "naive"), key
        if wanted is not OPS:
            assert [impl for _, impl in row.chain("gconv_wgrad")][1] is OPS["gconv_wgrad"]


@pytest.mark.parametrize("op", OPS)
def test_every_byte_of_the_images_is_counted(op):
    ins, outs, attrs = problem(op, c=8, size=(8, 8), stride=(2, 2))
    bound = Bound(OPS[op], op, ins, outs, attrs=attrs, device=Host(), layout="NHWC", store="bfloat16")
    counted = OPS[op].traffic(bound.call)
    assert len(counted) == len(bound.launches)
    images = 2 * sum(array.size for array in ins if array.shape[1] == 8)
    # With stride 2 and a border of 1 every pixel is met; the weights are 72 floats.
    assert images <= counted[0].distinct <= images + 4 * 72
    assert counted[0].read >= counted[0].distinct


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("store", "layout"), [("bfloat16", "NHWC"), *full(("float32", "NHWC"), ("tfloat32", "NHWC"), ("float32", "NCHW"))])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("stride", [1, 2])
def test_the_kernels_are_lean(store, layout, op, stride):
    """Four blocks of 128 threads, or two of 256, on a multiprocessor, for whom depthwise.RESIDENT counts."""
    ins, outs, attrs = problem(op, n=64, c=32, size=(16, 16), stride=(stride, stride))
    bound = Bound(OPS[op], op, ins, outs, attrs=attrs, device=Host(), layout=layout, store=store)
    assert_lean(bound.launches[0], "90a", 128)
