"""Tests of the PyTorch twin of a network of ours: its loss and gradients are ours. They need PyTorch, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
from nbcnn.files.errors import UsageError
from nbcnn.lab.measure.nets import examples
from nbcnn.lab.peers import nets as peers
from nbcnn.nn.graphs import Graph, Input
from nbcnn.nn.layers import Residual
from nbcnn.run.net import Net

pytest.importorskip("torch", reason="the twin is a module of PyTorch, which is not installed")


def joined():
    """Several branches, a layer that is called twice, and everything that joins or rearranges."""
    x = Input((3, 8, 8))
    conv = nbcnn.Conv2d(6, 3, padding=(0, 1, 1, 1))
    y = nbcnn.Tanh()(conv(x))
    shared = nbcnn.Conv2d(6, 1)
    y = shared(y) + shared(nbcnn.Sigmoid()(y)) * y
    y = nbcnn.Concat()([y, nbcnn.ELU()(y)])
    y = nbcnn.Reshape((12 * 7 * 8,))(nbcnn.Pad(1, 0.5)(nbcnn.Pad(-1)(y)))
    return Graph.of(x, nbcnn.Linear(4)(y), nbcnn.SoftmaxCrossEntropy(label_smoothing=0.1, ignore_index=2))


CASES = {
    "joined": joined,
    "norms": lambda: [
        *(
            nbcnn.Conv2d(8, 3, stride=2, padding=1, bias=False),
            nbcnn.BatchNorm2d(),
            nbcnn.GELU(approximate="tanh"),
            nbcnn.GroupNorm(4),
            nbcnn.LayerNorm(),
        ),
        *(nbcnn.InstanceNorm2d(affine=True), nbcnn.PReLU(), nbcnn.GlobalAvgPool2d(), nbcnn.Linear(2), nbcnn.Huber(0.3)),
    ],
    "grouped": lambda: [
        *(nbcnn.Conv2d(6, (3, 1), stride=(1, 2), padding=(2, 0), dilation=2, groups=3), nbcnn.LeakyReLU(), nbcnn.MaxPool2d(3, 2, 1)),
        *(nbcnn.AvgPool2d((1, 3), 1, (0, 1), count_include_pad=False), nbcnn.Swish(), nbcnn.HardSwish(), nbcnn.ConvTranspose2d(3, 3, 2, 1, 1)),
        *(nbcnn.Resize(mode="bilinear"), nbcnn.Resize((1, 2)), nbcnn.L1()),
    ],
    "residual": lambda: [Residual(nbcnn.Conv2d(3, 3, padding=1), nbcnn.BatchNorm2d()), nbcnn.ReLU6(), nbcnn.Upsample2d(2), nbcnn.BCEWithLogits()],
}


@pytest.mark.parametrize("name", CASES)
def test_the_twin_has_our_loss_and_gradients(name):
    net = Net(CASES[name](), (3, 8, 8), mode="cpu")
    images, targets = examples(net, 5)
    loss, ours = net.gradients(images.astype(np.float32) / 255, targets)
    value, its = peers.gradients(peers.Problem(net.layers, net.params.as_dict(), images, targets), "fp64", "cpu")
    assert loss == pytest.approx(value, rel=1e-5)
    assert ours.keys() == its.keys()
    for parameter, gradient in ours.items():
        # Ours sums in float32 behind at most a dozen layers, of which a norm may divide by a small deviation.
        assert np.linalg.norm(gradient - its[parameter]) <= 1e-4 * max(np.linalg.norm(its[parameter]), 1e-3), parameter


def test_a_network_without_a_twin_is_refused_with_every_reason():
    from nbcnn.lab.peers.twin import Twin

    with pytest.raises(UsageError, match="EvoNormS0, Dropout is not known"):
        Twin(Net([nbcnn.Conv2d(4, 3), nbcnn.EvoNormS0(2), nbcnn.Dropout(), nbcnn.EvoNormS0(2), nbcnn.MSE()], (3, 8, 8), mode="cpu").layers)
