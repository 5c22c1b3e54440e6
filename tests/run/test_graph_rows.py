"""Tests of graphs on every row: gradients as on the NumPy path, fused and not; training lands together and repeats bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from test_net import ROWS, net_or_skip

from nbcnn.datasets import shapes
from nbcnn.gpu import device
from nbcnn.nn.activations import ReLU, Sigmoid
from nbcnn.nn.graphs import Graph, Input
from nbcnn.nn.joins import Concat, Losses, Pad, Reshape
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.optim import SGD
from nbcnn.nn.resampling import MaxPool2d
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.storage import UNIT_ROUNDOFF
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

SHAPE = (3, 8, 12)


def residual(filters=8, classes=5, shape=SHAPE):
    """A residual network: a shared convolution, a projection shortcut of stride 2, channels joined, a product, a border."""
    x = Input(shape)
    shared = Conv2d(filters, 3, padding=1)
    a = ReLU()(Conv2d(filters, 3, padding=1)(x))
    b = ReLU()(shared(ReLU()(shared(a))) + a)
    c = ReLU()(Conv2d(2 * filters, 3, stride=2, padding=1)(b) + Conv2d(2 * filters, 1, stride=2)(b))
    d = Concat()([MaxPool2d(2)(b), c * Sigmoid()(c)])
    e = Reshape((3 * filters, 6, 4))(Pad((0, 0, -1, 1))(Conv2d(3 * filters, 1)(d))) if shape == SHAPE else d
    return Graph.of(x, Linear(classes)(Flatten()(e)), SoftmaxCrossEntropy())


def limit_of(precision, layers=10, switches=5):
    """As `test_net.depth_bound`: every layer on the longest way may err by the parity bound of its at most 220 terms, and every ReLU or maximum
    passes a part u of the gradients the other way, √u in norm. What is added of several readers or calls errs no more than its parts.
    """
    of_switches = 0.0 if precision == "fp32" else switches * UNIT_ROUNDOFF[STORE[precision]] ** 0.5
    return layers * parity_bound(220, precision) + of_switches


@ROWS
@pytest.mark.parametrize("fusing", [True, False], ids=["fused", "plain"])
def test_gradients_of_a_graph_agree_with_the_numpy_path(row, fusing):
    rng = np.random.default_rng(3)
    x, labels = rng.standard_normal((4, *SHAPE)).astype(np.float32), np.array([3, 0, 1, 4], np.int32)
    net = net_or_skip(residual(), SHAPE, row, fusing=fusing)
    loss, grads = net.gradients(x, labels)
    expected_loss, expected = Net(residual(), SHAPE, mode="cpu").gradients(x, labels)
    limit = limit_of(row[1])
    assert loss == pytest.approx(expected_loss, rel=limit)
    for name, grad in expected.items():
        assert np.linalg.norm(grads[name] - grad) <= limit * np.linalg.norm(grad), name


@ROWS
def test_training_of_a_graph_lands_together_and_repeats(row):
    images, labels = shapes.generate(16, 5, size=8)
    states, steps = [], 2
    for of in (("cpu", "fp32"), row, row):
        net = net_or_skip(residual(4, 5, (3, 8, 8)), (3, 8, 8), of)
        session = TrainingSession(
            net, images, labels=labels % 5, optimizer=SGD(momentum=0.9), learning_rates=np.full(steps, 0.05, np.float32), batch=8, seed=3
        )
        before = session.state()
        for _ in range(steps):
            session.step()
        states.append(session.state())
        session.close()
    for name, tensor in states[1].items():
        assert tensor.tobytes() == states[2][name].tobytes(), name
        if name.startswith("param."):
            update = np.linalg.norm(states[0][name] - before[name])
            assert np.linalg.norm(tensor - states[0][name]) <= steps * limit_of(row[1]) * update, name


def joined():
    """Two inputs, an image and a vector, and two outputs, of which one is an image."""
    image, vector = Input((3, 4, 4)), Input((2,))
    y = Conv2d(2, 1)(image)
    return Graph.of([image, vector], [Linear(3)(Concat()([Flatten()(y), vector])), y * y], Losses((MSE(), MSE())))


@ROWS
def test_several_inputs_and_outputs_agree_with_the_numpy_path(row):
    """Small enough for the simulator, in the first row of a GPU; the layouts of the others make other orders of the packed vectors."""
    rng = np.random.default_rng(4)
    x, targets = rng.standard_normal((2, 50)).astype(np.float32), rng.standard_normal((2, 35)).astype(np.float32)
    net = net_or_skip(joined(), (50,), row, simulated=row[0] == "naive")
    reference = Net(joined(), (50,), mode="cpu")
    (loss, grads), (expected_loss, expected) = net.gradients(x, targets), reference.gradients(x, targets)
    limit = limit_of(row[1], layers=4, switches=0)
    assert loss == pytest.approx(expected_loss, rel=limit)
    for name, grad in expected.items():
        assert np.linalg.norm(grads[name] - grad) <= limit * np.linalg.norm(grad), name
    if not device.SIMULATOR:
        got, wanted = net.predict(x), reference.predict(x)
        assert got.shape == (2, 35)
        assert np.linalg.norm(got - wanted) <= limit * np.linalg.norm(wanted)


@ROWS
def test_training_with_several_inputs_and_outputs_lands_together(row):
    """Targets are taken apart unrounded, whatever the row stores; a step of four layers, two of them behind a sum of gradients."""
    rng = np.random.default_rng(6)
    x, targets = rng.integers(0, 256, (6, 50)).astype(np.uint8), rng.standard_normal((6, 35)).astype(np.float32)
    states = []
    for of in (("cpu", "fp32"), row):
        net = net_or_skip(joined(), (50,), of)
        session = TrainingSession(net, x, targets=targets, optimizer=SGD(), learning_rates=np.full(1, 0.05, np.float32), batch=6, seed=2)
        before = session.state()
        session.step()
        states.append(session.state())
        session.close()
    for name, tensor in states[0].items():
        if name.startswith("param."):
            update = np.linalg.norm(tensor - before[name])
            assert np.linalg.norm(states[1][name] - tensor) <= limit_of(row[1], layers=4, switches=0) * update, name
