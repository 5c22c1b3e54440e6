"""Tests of fusion: which layers become one, that nothing changes in what is computed, and that the large tensors are gone."""

from __future__ import annotations

import numpy as np
import pytest
from gradients import assert_same_gradients

from nbcnn.modes import MODES
from nbcnn.nn.activations import ELU, GELU, HardSwish, ReLU, ReLU6, Sigmoid, Swish, Tanh
from nbcnn.nn.corruption import KSparse
from nbcnn.nn.graphs import Graph, Input, wired
from nbcnn.nn.joins import Concat
from nbcnn.nn.layers import Conv2d, Flatten, Linear, Residual, parameters, sized
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.models import autoencoder
from nbcnn.nn.resampling import AvgPool2d, MaxPool2d, Upsample2d
from nbcnn.plan.graph import Buf, ShapeError, Tape, drop_dead, trace_nodes
from nbcnn.plan.merging import merge
from nbcnn.plan.op import Map, Op
from nbcnn.run.net import Net

ALL_OPS = set(MODES["cudacore", "fp32"].ops)


def ops_of(layers, shape, training, ops=ALL_OPS):
    """The ops of the forward pass that a row with `ops` runs."""
    tape = Tape(training)
    _, backward = trace_nodes(tape, wired(layers), [Buf("x", shape, home="io")])
    if training:
        backward([Buf("dy", tape.steps[-1].outs[0].shape, home="io")])
    return [str(step.op) for step in merge(tape.steps, ops) if step.op.direction in ("fprop", "")]


def test_the_autoencoder_becomes_five_steps(fusing_cpu):
    net = Net(autoencoder(), (3, 32, 32), mode="cpu")
    assert [(step.scope, str(step.op)) for step in net.record_gradients(2).steps[:5]] == [
        ("conv1", "conv_relu_pool_fprop"),
        ("conv2", "conv_relu_pool_fprop"),
        ("conv3", "conv_relu_fprop"),
        ("conv4", "upconv_relu_fprop"),
        ("conv5", "upconv_mse_fprop"),
    ]
    assert str(net.record_predict(2).steps[-1].op) == "upconv_fprop"


@pytest.mark.parametrize("activation", [ReLU, Sigmoid, Swish, Tanh, ELU, HardSwish, GELU, ReLU6])
def test_a_linear_layer_and_a_convolution_take_their_activation(activation):
    """In training only those whose gradients read what they make: what the convolution made has another reader elsewhere."""
    name = activation.kind
    for layers, shape in (
        ([Linear(3, in_features=4), activation()], (2, 4)),
        ([Conv2d(3, 3, in_channels=4), activation()], (2, 4, 5, 5)),
    ):
        assert ops_of(layers, shape, training=False) == [f"conv_{name}_fprop"]
        kept = [f"conv_{name}_fprop"] if activation.reads == "y" else ["conv_fprop", f"{name}_fprop"]
        assert ops_of(layers, shape, training=True) == kept
        assert ops_of(layers, shape, training=False, ops=ALL_OPS - {Op("conv", "fprop", after=(Map(name),))}) == ["conv_fprop", f"{name}_fprop"]
    assert ops_of([Linear(3, bias=False, in_features=4), activation()], (2, 4), training=False) == ["conv_fprop", f"{name}_fprop"]


def test_a_folded_upsampling_takes_a_relu():
    layers = [Upsample2d(2), Conv2d(4, 3, padding=1, in_channels=3), ReLU()]
    assert ops_of(layers, (2, 3, 5, 5), training=True) == ["upconv_relu_fprop"]


def test_the_gradient_of_a_sparse_code_is_masked_by_the_convolution_behind_it(fusing_cpu):
    """Whatever the convolution before the code does with its ReLU, pooling among it."""
    layers = [Conv2d(4, 3, padding=1), ReLU(), MaxPool2d(2), KSparse(2), Conv2d(3, 3, padding=1), MSE()]
    ops = [str(step.op) for step in Net(layers, (3, 8, 8), mode="cpu").record_gradients(2).steps]
    assert "conv_dgrad_relu" in ops
    assert not {"ksparse_dgrad", "relu_dgrad"} & {*ops}


def test_without_the_ops_nothing_is_fused():
    layers = [Conv2d(4, 3, in_channels=3), ReLU(), MaxPool2d(2)]
    plain = ["conv_fprop", "relu_fprop", "maxpool_fprop"]
    assert ops_of(layers, (2, 3, 8, 8), training=True) == ["conv_relu_pool_fprop", "unpool"]
    assert ops_of(layers, (2, 3, 8, 8), training=True, ops=()) == plain
    assert ops_of(layers, (2, 3, 8, 8), training=True, ops=ALL_OPS - {Op("unpool"), Op("conv", "fprop", after=(Map("relu"),))}) == plain


@pytest.mark.parametrize(
    ("layers", "ops"),
    [
        ([Conv2d(4, 3, bias=False, in_channels=3), ReLU(), MaxPool2d(2)], ["conv_fprop", "relu_fprop", "maxpool_fprop"]),
        ([Conv2d(4, 3, in_channels=3), ReLU(), MaxPool2d(2)], ["conv_relu_fprop", "maxpool_fprop"]),  # an odd image
        ([Upsample2d(3), Conv2d(4, 3, padding=1, in_channels=3)], ["upsample_fprop", "conv_fprop"]),
        ([Upsample2d(2), Conv2d(4, 5, padding=2, in_channels=3)], ["upsample_fprop", "conv_fprop"]),
        ([Upsample2d(2), Conv2d(4, 3, in_channels=3)], ["upsample_fprop", "conv_fprop"]),
        ([Conv2d(4, 3, in_channels=3), AvgPool2d(2)], ["conv_fprop", "avgpool_fprop"]),
    ],
)
def test_what_does_not_fit_a_rule_stays_as_it_is(layers, ops):
    shape = (2, 3, 7, 7) if ops[-1] == "maxpool_fprop" and ops[0] == "conv_relu_fprop" else (2, 3, 8, 8)
    assert ops_of(layers, shape, training=True) == ops


def test_a_doubled_image_with_another_reader_is_stored(fusing_cpu):
    x = Input((3, 4, 4))
    doubled = Upsample2d(2)(x)
    for other, ops in ((doubled, {"upsample_fprop", "conv_fprop"}), (Upsample2d(2)(x), {"upsample_fprop", "upconv_fprop"})):
        graph = Graph.of(x, Conv2d(2, 1)(Concat()([Conv2d(2, 3, padding=1)(doubled), other])), MSE())
        made = {str(step.op) for step in Net(graph, (3, 4, 4), mode="cpu").record_gradients(2).steps}
        assert made & {"upsample_fprop", "upconv_fprop"} == ops & {"upsample_fprop", "upconv_fprop"}


def test_of_two_doubled_images_with_one_filter_each_has_its_own_gradient(fusing_cpu, rng):
    """The gradients of a sum are one value, and so are the filters: the calls tell the steps apart."""
    x = Input((3, 4, 6))
    conv = Conv2d(2, 3, padding=1)
    graph = Graph.of(x, conv(Upsample2d(2)(Conv2d(3, 1)(x))) + conv(Upsample2d(2)(Conv2d(3, 3, padding=1)(x))), MSE())
    plain, fused = (Net(graph, (3, 4, 6), mode="cpu", fusing=fusing) for fusing in (False, True))
    assert [str(step.op) for step in fused.record_gradients(2).steps].count("upconv_dgrad") == 2
    x, target = rng.standard_normal((2, 3, 4, 6)).astype(np.float32), rng.standard_normal((2, 2, 8, 12)).astype(np.float32)
    # The same float32 sums of at most 27 terms in another order, in 3 layers.
    assert_same_gradients(plain, fused, x, target, limit=8 * 3 * 2.0**-23 * 27)


def test_other_pooling_windows_fuse_without_the_pool():
    assert ops_of([Conv2d(4, 3, in_channels=3), ReLU(), MaxPool2d(3, 2)], (2, 3, 9, 9), training=True) == ["conv_relu_fprop", "maxpool_fprop"]


def deep():
    """Every fused layer, a ReLU whose output two layers read, an odd image that cannot be pooled inside, plain layers between."""
    return [
        Conv2d(6, 3, padding=1, in_channels=3),
        ReLU(),
        MaxPool2d(2),
        Residual(Conv2d(6, 3, padding=1, in_channels=6), ReLU()),
        Conv2d(5, 3, padding=1, in_channels=6),
        ReLU(),
        Upsample2d(2),
        Conv2d(4, 3, padding=1, in_channels=5),
        ReLU(),
        Upsample2d(2),
        Conv2d(8, 3, padding=1, in_channels=4),
        Conv2d(4, 2, in_channels=8),
        ReLU(),
        MaxPool2d(2),
        Flatten(),
        Linear(5, in_features=4 * 7 * 11),
        ReLU(),
        SoftmaxCrossEntropy(),
    ]


def dense():
    """Linear layers with each activation."""
    made = [
        Flatten(),
        Linear(7, in_features=288),
        Sigmoid(),
        Linear(6, in_features=7),
        Swish(),
        Linear(5, in_features=6),
        ReLU(),
        Linear(5, in_features=5),
    ]
    return [*made, SoftmaxCrossEntropy()]


def doubled():
    """Convolutions of doubled images with activations whose gradients read the output, with a parameter and without, and the input."""
    return [
        *(Upsample2d(2), Conv2d(4, 3, padding=1, in_channels=3), ELU(0.5)),
        *(Conv2d(3, 3, stride=2, padding=1, in_channels=4), Upsample2d(2), Conv2d(5, 3, padding=1, in_channels=3), Sigmoid()),
        *(Conv2d(2, 3, stride=4, in_channels=5), Upsample2d(2), Conv2d(3, 3, padding=1, in_channels=2), Swish()),
        *(Flatten(), Linear(5, in_features=3 * 8 * 12), SoftmaxCrossEntropy()),
    ]


def residual():
    """A ReLU behind a Residual that ends in one: the masked gradient of the first says nothing about the second."""
    return [
        Residual(ReLU(), Conv2d(3, 3, padding=1, in_channels=3), ReLU()),
        ReLU(),
        Conv2d(4, 3, padding=1, in_channels=3),
        ReLU(),
        Conv2d(3, 3, padding=1, in_channels=4),
        MSE(),
    ]


@pytest.mark.parametrize(
    "layers",
    [sized(autoencoder(3, wide=8, code=4), (3, 8, 8)), deep(), residual(), dense(), doubled()],
    ids=["autoencoder", "deep", "residual", "dense", "doubled"],
)
def test_fused_and_plain_nets_have_the_same_gradients(fusing_cpu, layers):
    rng = np.random.default_rng(1)
    shape = (3, 8, 12)
    x, labels = rng.standard_normal((2, *shape)).astype(np.float32), np.array([1, 4], np.int32)
    plain, fused = (Net(layers, shape, mode="cpu", fusing=fusing) for fusing in (False, True))
    (loss, grads), (fused_loss, fused_grads) = plain.gradients(x, labels), fused.gradients(x, labels)
    # The same float32 sums in another order: each of at most 8 layers within 4·eps·√(144 terms).
    limit = 8 * 4 * 2.0**-23 * 12
    assert fused_loss == pytest.approx(loss, rel=limit)
    assert fused_grads.keys() == grads.keys() == parameters(layers).keys()
    for name, grad in grads.items():
        assert np.linalg.norm(fused_grads[name] - grad) <= limit * np.linalg.norm(grad), name


def test_fused_and_plain_nets_predict_the_same(fusing_cpu):
    images = np.random.default_rng(2).integers(0, 256, (3, 3, 8, 8)).astype(np.uint8)
    plain, fused = (Net(autoencoder(3, wide=8, code=4), (3, 8, 8), mode="cpu", fusing=fusing).predict(images) for fusing in (False, True))
    np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=1e-6)


def test_an_activation_is_no_step_of_its_own_in_inference(fusing_cpu):
    images = np.random.default_rng(3).integers(0, 256, (3, 3, 8, 12)).astype(np.uint8)
    plain, fused = (Net(dense(), (3, 8, 12), mode="cpu", fusing=fusing) for fusing in (False, True))
    np.testing.assert_allclose(fused.predict(images), plain.predict(images), rtol=1e-5, atol=1e-6)
    assert {"conv_relu_fprop", "conv_sigmoid_fprop", "conv_swish_fprop"} <= {str(step.op) for step in fused.record_predict(3).steps}
    assert not {"sigmoid_fprop", "swish_fprop", "relu_fprop"} & {str(step.op) for step in fused.record_predict(3).steps}


def test_a_convolution_of_a_doubled_image_takes_any_activation(fusing_cpu):
    net = Net(doubled(), (3, 8, 12), mode="cpu", fusing=True)
    images = np.random.default_rng(3).integers(0, 256, (3, 3, 8, 12)).astype(np.uint8)
    plain = Net(doubled(), (3, 8, 12), mode="cpu", fusing=False)
    np.testing.assert_allclose(net.predict(images), plain.predict(images), rtol=1e-5, atol=1e-6)
    made = {"upconv_elu_fprop", "upconv_sigmoid_fprop", "upconv_swish_fprop"}
    steps = [str(step.op) for step in net.record_predict(3).steps]
    assert made <= set(steps)
    assert not {"elu_fprop", "sigmoid_fprop", "swish_fprop", "upconv_fprop", "upsample_fprop"} & set(steps)
    steps = [str(step.op) for step in net.record_gradients(3).steps]
    assert set(steps) & {*made, "upconv_fprop", "swish_fprop", "upsample_fprop"} == {*made, "upconv_fprop", "swish_fprop"} - {"upconv_swish_fprop"}


def test_no_step_of_the_fused_autoencoder_touches_a_tensor_of_full_width(fusing_cpu):
    net = Net(autoencoder(), (3, 32, 32), mode="cpu")
    tape = Tape(training=True)
    x = tape.temp("x", (2, 3, 32, 32))
    _, dy, backward = net.record_loss(tape, x, x)
    backward(dy)
    steps = merge(drop_dead(tape.steps), net.fusing_ops)
    ops_of_plan = [str(step.op) for step in steps]
    assert not {"relu_fprop", "relu_dgrad", "maxpool_fprop", "maxpool_dgrad", "upsample_fprop", "upsample_dgrad", "mse_fprop"} & set(ops_of_plan)
    assert max(np.prod(buf.shape[1:]) for step in steps for buf in (*step.ins, *step.outs) if buf.home == "arena") == 256 * 16 * 16
    assert ops_of_plan.count("unpool") == 1  # conv2's; conv1's wgrad reads the pooled gradient


def test_an_evaluation_records_no_gradient(fusing_cpu):
    net = Net(autoencoder(), (3, 32, 32), mode="cpu")
    tape = Tape(training=False)
    x = tape.temp("x", (2, 3, 32, 32))
    value, _, _ = net.record_loss(tape, x, x)
    assert [str(step.op) for step in merge(drop_dead(tape.steps, [value]), net.fusing_ops) if "grad" in str(step.op)] == []


def test_a_loss_that_does_not_fit_says_so(fusing_cpu):
    net = Net([Conv2d(3, 1, in_channels=3), Upsample2d(2), Conv2d(3, 3, padding=1, in_channels=3), MSE()], (3, 8, 8), mode="cpu")
    tape = Tape(training=True)
    with pytest.raises(ShapeError, match=r"the network makes \(1, 3, 16, 16\), the target is \(1, 3, 8, 8\)"):
        net.record_loss(tape, tape.temp("x", (1, 3, 8, 8)), None)


@pytest.mark.parametrize(
    "layers",
    [
        [Conv2d(8, 3, padding=1, in_channels=4), ReLU(), MaxPool2d(2)],
        [Upsample2d(2), Conv2d(8, 3, padding=1, in_channels=4)],
        [Upsample2d(2), Conv2d(3, 3, padding=1, in_channels=4), MSE()],
    ],
)
def test_a_fused_convolution_refuses_other_channels_as_a_plain_one_does(fusing_cpu, layers):
    with pytest.raises(ShapeError, match="conv1 takes 4 channels, got 3"):
        Net(layers, (3, 8, 8), mode="cpu").record_gradients(1)


def two_readers():
    """A value that came out of a ReLU with readers that mask its gradient (a convolution with a ReLU) and such that do not; sums with a ReLU."""
    x = Input((3, 8, 12))
    a = ReLU()(Conv2d(4, 3, padding=1)(x))
    b = ReLU()(Conv2d(4, 3, padding=1)(a)) + a
    c = ReLU()(b + Conv2d(4, 3, padding=1)(a))
    shared = Conv2d(4, 3, padding=1)
    d = ReLU()(shared(ReLU()(shared(c))) + c)
    e = Concat()([MaxPool2d(2)(ReLU()(Conv2d(5, 3, padding=1)(d))), MaxPool2d(2)(c)])
    return Graph.of(x, Linear(5)(Flatten()(e)), SoftmaxCrossEntropy())


def test_fused_and_plain_graphs_have_the_same_gradients(fusing_cpu):
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((2, 3, 8, 12)).astype(np.float32), np.array([1, 4], np.int32)
    plain, fused = (Net(two_readers(), (3, 8, 12), mode="cpu", fusing=fusing) for fusing in (False, True))
    assert_same_gradients(plain, fused, x, labels, limit=8 * 4 * 2.0**-23 * 12)


def test_of_a_graph_only_what_nobody_else_reads_is_fused(fusing_cpu):
    net = Net(two_readers(), (3, 8, 12), mode="cpu")
    assert [(step.scope, str(step.op)) for step in net.record_gradients(2).steps[:13]] == [
        ("conv1", "conv_relu_fprop"),
        ("conv2", "conv_relu_fprop"),
        ("add1", "add"),  # what reads it is a sum, no ReLU
        ("conv3", "conv_fprop"),
        ("add2", "add_relu"),
        ("conv4", "conv_relu_fprop"),
        ("conv4@2", "conv_fprop"),
        ("add3", "add_relu"),
        ("conv5", "conv_relu_pool_fprop"),
        ("pool2", "maxpool_fprop"),
        ("concat1", "concat_fprop"),
        ("flatten1", "flatten_fprop"),
        ("linear1", "conv_fprop"),
    ]
    x = Input((3, 8, 8))
    y = Conv2d(3, 3, padding=1)(x)
    kept = [str(step.op) for step in Net(Graph.of(x, [y, ReLU()(y)]), (3, 8, 8), mode="cpu").record_predict(2).steps]
    assert {"conv_fprop", "relu_fprop"} <= {*kept}, "the output of the convolution is one of the network"
