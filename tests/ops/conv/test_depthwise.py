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
from nbcnn.ops.conv import grouped
from nbcnn.ops.conv.depthwise import Strip, lengths_of
from nbcnn.ops.conv.depthwise_walk import backward, forward
from nbcnn.ops.conv.depthwise_wgrad import OPS, Parts
from nbcnn.ops.kernel.call import host
from nbcnn.plan.bounds import parity_bound


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
        firsts = {op: next(row.chain(op))[1] for op in OPS}
        assert (firsts == OPS) == (row.device == "gpu" and key[0] != "naive"), key


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
