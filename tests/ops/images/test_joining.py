"""Tests of concatenation and padding beyond their cases: more than two parts, labels, what the compiler makes of the kernels, bytes counted."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, full

from nbcnn.check.one_op import Bound, run_op
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.modes import named
from nbcnn.ops.images import concat, pad
from nbcnn.ops.kernel.call import host
from nbcnn.ops.kernel.traffic import total

SHAPES = ((2, 4, 3, 5), (2, 1, 3, 5), (2, 8, 3, 5))


def parts(seed=1):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in SHAPES)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_three_parts_are_joined_and_come_apart(device, layout):
    xs, whole = parts(), (2, 13, 3, 5)
    (y,) = run_op(concat.OPS[named("concat_fprop")], "concat_fprop", xs, [(whole, "float32")], device=device, layout=layout)
    np.testing.assert_array_equal(y, np.concatenate(xs, axis=1))
    back = run_op(concat.OPS[named("concat_dgrad")], "concat_dgrad", [y], [(shape, "float32") for shape in SHAPES], device=device, layout=layout)
    for x, dx in zip(xs, back, strict=True):
        np.testing.assert_array_equal(dx, x)


def test_labels_of_several_outputs_come_apart(device):
    labels = np.arange(12, dtype=np.int32).reshape(4, 3)
    for where, impl in ((device, concat.OPS[named("concat_dgrad")]), (Host(), host(concat.concat_dgrad))):
        columns = run_op(impl, "concat_dgrad", [labels], [((4, 1), "int32")] * 3, device=where)
        np.testing.assert_array_equal(np.concatenate(columns, axis=1), labels)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_border_has_its_value_and_a_crop_none(device, layout):
    x = np.ones((1, 4, 2, 3), np.float32)
    for top, left, made in ((1, 2, (4, 6)), (-1, -1, (1, 1))):
        out = [((1, 4, *made), "float32")]
        (y,) = run_op(
            pad.OPS[named("pad_fprop")], "pad_fprop", [x], out, attrs={"top": top, "left": left, "value": -7.0}, device=device, layout=layout
        )
        wanted = np.full((1, 4, *made), -7.0, np.float32)
        wanted[:, :, max(0, top) : max(0, top) + min(2, made[0]), max(0, left) : max(0, left) + min(3, made[1])] = 1
        np.testing.assert_array_equal(y, wanted)


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("store", ["bfloat16", *full("float32")])
def test_the_kernels_are_lean(store):
    """At most 32 registers, so that all 2,048 threads of a multiprocessor are there to keep loads in flight."""
    xs = parts()
    for op, impl, ins, outs, attrs in (
        ("concat_fprop", concat.OPS[named("concat_fprop")], (xs[0], xs[2]), [((2, 12, 3, 5), "float32")], {}),
        ("pad_fprop", pad.OPS[named("pad_fprop")], (xs[0],), [((2, 4, 5, 5), "float32")], {"top": 1, "left": 0, "value": 0.0}),
    ):
        bound = Bound(impl, op, ins, outs, attrs=attrs, device=Host(), layout="NHWC", store=store)
        assert_lean(bound.launches[0], "90a", registers=32)


def test_every_element_is_moved_once():
    """Joining n bytes moves 2·n; padding reads what it keeps, and writes all."""
    xs = parts()
    joined = Bound(concat.OPS[named("concat_fprop")], "concat_fprop", xs, [((2, 13, 3, 5), "float32")], device=Host())
    assert total(concat.traffic_fprop(joined.call)).logical == 2 * 4 * 2 * 13 * 15
    attrs = {"top": -1, "left": 2, "value": 0.0}
    padded = Bound(pad.OPS[named("pad_fprop")], "pad_fprop", [xs[0]], [((2, 4, 2, 8), "float32")], attrs=attrs, device=Host())
    (moved,) = pad.traffic_fprop(padded.call)
    assert (moved.read, moved.write) == (4 * 2 * 4 * 2 * 5, 4 * 2 * 4 * 2 * 8)
