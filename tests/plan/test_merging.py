"""Tests of the rules that merge steps of a recorded plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import nbcnn
from nbcnn import modes
from nbcnn.nn.activations import ReLU
from nbcnn.nn.graphs import Graph
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.ops.kernel.call import host
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.merging import merge
from nbcnn.run.net import Net

OPS = ("add_relu_dgrad", "conv_dgrad_relu")
SHAPE = (3, 6, 6)


def test_a_sum_of_two_gradients_is_made_by_the_one_step_that_reads_it():
    a, b, c, total, other = (Buf(name, (2, 3)) for name in ("a", "b", "c", "total", "other"))
    rest = tuple(Buf(f"operand{at}", (2, 3)) for at in range(5))
    first, reads = Step("add", (a, b), (total,)), Step("batchnorm_add_relu_grads", (total, *rest), (other,))
    merged = merge([first, reads])
    assert [(step.op, step.ins) for step in merged] == [("batchnorm_add_relu_grads", (a, *rest, b))]
    assert merge(merged) == merged, "there is no third"
    for kept in (
        [first, reads, Step("relu_dgrad", (total, a), (c,))],
        [first, Step("batchnorm_relu_grads", (total, *rest), (other,))],
        [Step("add", (a, b), (Buf("total", (2, 3), home="io"),)), reads],
    ):
        assert merge(kept) == kept


def bufs(names):
    return [Buf(name, (2, 3, 4, 4)) for name in names.split()]


def test_two_gradients_of_a_relu_are_added_and_masked_in_one_pass():
    dy, w, y, a, b, total, dz = bufs("dy w y a b total dz")
    attrs = {"stride": 2, "pad": 1}
    steps = [Step("conv_dgrad_relu", (dy, w, y), (b,), attrs), Step("add", (a, b), (total,)), Step("relu_dgrad", (total, y), (dz,))]
    first, second = merge(steps, OPS)
    assert (first.op, first.ins, first.outs, first.attrs) == ("conv_dgrad", (dy, w), (b,), attrs), "the pass behind it masks by the same values"
    assert (second.op, second.ins, second.outs) == ("add_relu_dgrad", (a, b, y), (dz,))
    assert merge(steps) == steps
    assert [step.op for step in merge([*steps, Step("f", (b,), (a,))], OPS)] == ["conv_dgrad_relu", "add_relu_dgrad", "f"]
    for other in (Step("f", (total,), (a,)), Step("relu_dgrad", (total, a), (b,))):
        assert merge([*steps, other], OPS) == [*steps, other], "the sum is read twice"


@pytest.mark.parametrize("second", [True, False])
def test_max_pooling_adds_the_other_gradient_of_its_input(second):
    dy, index, a, b, total = bufs("dy index a b total")
    steps = [Step("maxpool_dgrad", (dy, index), (b,), {"size": 2, "stride": 2}), Step("add", (a, b) if second else (b, a), (total,))]
    (merged,) = merge(steps, ("maxpool_dgrad",))
    assert (merged.op, merged.ins, merged.outs, merged.attrs) == ("maxpool_dgrad", (dy, index, a), (total,), {"size": 2, "stride": 2})
    assert merge(steps) == steps
    again = [*steps, Step("f", (b,), (a,))]
    assert merge(again, ("maxpool_dgrad",)) == again, "somebody else reads the pooling's own part"


def test_a_bias_is_added_where_the_sum_is_copied():
    x, b, a, y, z = bufs("x b a y z")
    steps = [Step("bias_fprop", (x, b), (y,)), Step("concat_fprop", (a, y), (z,))]
    assert [(step.op, step.ins, step.outs) for step in merge(steps, ("concat_bias_fprop",))] == [("concat_bias_fprop", (a, x, b), (z,))]
    for kept in (
        [steps[0], Step("concat_fprop", (y, a), (z,))],
        [steps[0], Step("concat_fprop", (a, a, y), (z,))],
        [*steps, Step("f", (y,), (x,))],
    ):
        assert merge(kept, ("concat_bias_fprop",)) == kept
    assert merge(steps) == steps


def test_a_convolution_masks_what_it_alone_gives_to_a_relu():
    dy, w, y, dx, dz = bufs("dy w y dx dz")

    def steps(stride):
        return [Step("conv_dgrad", (dy, w), (dx,), {"stride": stride, "pad": 1}), Step("relu_dgrad", (dx, y), (dz,))]

    (merged,) = merge(steps(1), OPS)
    assert (merged.op, merged.ins, merged.outs, merged.attrs) == ("conv_dgrad_relu", (dy, w, y), (dz,), {"stride": 1, "pad": 1})
    strided, again = steps(2), [*steps(1), Step("f", (dx,), (w,))]
    assert merge(strided, OPS) == strided, "of stride 2 the plain form runs in four phases"
    assert merge(again, OPS) == again
    assert merge(steps(1), ()) != [merged]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_residual_network_without_norms_has_the_gradients_of_the_plain_one(monkeypatch, rng, stride):
    row = modes.MODES["cpu", "fp32"]
    parts = (("cpu", row.fallbacks[0][1] | {name: host(function) for name, function in modes.REFERENCES.items()}),)
    monkeypatch.setitem(modes.MODES, ("cpu", "fp32"), replace(row, fallbacks=parts))
    x = nbcnn.Input(SHAPE)
    stem = ReLU()(Conv2d(4, 3, padding=1)(x))
    y = Conv2d(4, 3, padding=1)(ReLU()(Conv2d(4, 3, stride=stride, padding=1)(stem)))
    y = ReLU()(y + (stem if stride == 1 else Conv2d(4, 1, stride=2)(stem)))
    graph = Graph.of(x, Conv2d(2, 1)(y), MSE())
    fused, plain = (Net(graph, SHAPE, mode="cpu", seed=3, fusing=fusing) for fusing in (True, False))
    images, target = rng.standard_normal((5, *SHAPE)).astype(np.float32), rng.standard_normal((5, 2, 6 // stride, 6 // stride)).astype(np.float32)
    (loss, grads), (plain_loss, plain_grads) = (net.gradients(images, target) for net in (fused, plain))
    # Seven layers, forward and back, each of sums over at most 5·36 pixels.
    bound = 2 * 7 * parity_bound(5 * 36, "fp32")
    assert loss == pytest.approx(plain_loss, rel=bound)
    for name, gradient in grads.items():
        assert np.linalg.norm(gradient - plain_grads[name]) <= bound * max(np.linalg.norm(plain_grads[name]), 1e-2), name
    ops = [step.op for step in fused.record_gradients(5).steps]
    assert ops.count("add_relu_dgrad") == 1
    assert not {"add", "relu_dgrad"} & set(ops)
