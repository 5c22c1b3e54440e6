"""Tests of the PyTorch twin of a network of ours: its loss and gradients are ours, and of ResNet-18 those of a module written by hand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import torch  # noqa: E402
from networks import ResNet18  # noqa: E402

import nbcnn  # noqa: E402
from nbcnn.cli.recipes import RECIPES  # noqa: E402
from nbcnn.datasets import Dataset  # noqa: E402
from nbcnn.files.errors import UsageError  # noqa: E402
from nbcnn.lab.measure.nets import examples  # noqa: E402
from nbcnn.lab.peers import nets as peers  # noqa: E402
from nbcnn.lab.peers import resnet as peer  # noqa: E402
from nbcnn.lab.peers.twin import loss_of, twin  # noqa: E402
from nbcnn.lab.studies import fusion_sweep, resnet  # noqa: E402
from nbcnn.nn.graphs import Graph, Input  # noqa: E402
from nbcnn.nn.layers import Residual  # noqa: E402
from nbcnn.nn.models import resnet18  # noqa: E402
from nbcnn.run.net import Net  # noqa: E402


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
        *(nbcnn.Conv2d(6, (3, 1), stride=(1, 2), padding=(2, 0), dilation=2, groups=3), nbcnn.LeakyReLU(), nbcnn.MaxPool2d(3, 2, padding=1)),
        *(
            nbcnn.AvgPool2d((1, 3), 1, padding=(0, 1), count_include_pad=False),
            nbcnn.Swish(),
            nbcnn.HardSwish(),
            nbcnn.ConvTranspose2d(3, 3, stride=2, padding=1, output_padding=1),
        ),
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
    def layers(*parts):
        return Net([nbcnn.Conv2d(4, 3), *parts, nbcnn.MSE()], (3, 8, 8), mode="cpu").layers

    with pytest.raises(UsageError, match=r"(?s)ksparse1: KSparse.*ksparse2: KSparse"):
        twin(layers(nbcnn.KSparse(2), nbcnn.KSparse(1)))
    with pytest.raises(UsageError, match="other random numbers in noise1, dropout1"):
        twin(layers(nbcnn.Noise(0.1), nbcnn.Dropout()))
    with pytest.raises(UsageError, match="the loss RMSLE is not known"):
        loss_of([nbcnn.Linear(2), nbcnn.RMSLE()])


def test_the_twin_of_resnet18_is_the_module_written_by_hand():
    """In float64 both sum in orders of their own: 2⁻⁵² each, over 18 convolutions and norms."""
    layers = resnet18(classes=3, filters=2).sized((3, 32, 32))
    made, hand = twin(layers).double(), ResNet18(width=2, classes=3, pooled=False).double()
    pairs = list(zip(made.parameters(), hand.parameters(), strict=True))
    with torch.no_grad():
        for ours, its in pairs:
            assert ours.shape == its.shape
            ours.copy_(its)
    x, labels = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.tensor([2, 0])
    loss, wanted = loss_of(layers)(made(x), labels), torch.nn.functional.cross_entropy(hand(x), labels)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    loss.backward()
    wanted.backward()
    for ours, its in pairs:
        assert (ours.grad - its.grad).norm() <= 1e-9 * its.grad.norm()


def test_the_peer_of_study_resnet_trains():
    """Twenty images in batches of 8: the last of an epoch has 4, and a step of its own."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (20, 3, 16, 16), np.uint8), np.arange(20, dtype=np.int32) % 2
    data = Dataset("noise", "noise", images, labels, images, labels, ("a", "b"))
    recipe = resnet.recipe_of(RECIPES["resnet"] | {"batch": 8}, 20, 2)
    assert len(recipe.rates) == 6
    row = peer.train(data, recipe, form="eager", device="cpu", filters=2)
    assert row["accuracy"] * 20 == pytest.approx(round(row["accuracy"] * 20))
    assert (row["epochs"], row["form"]) == (2, "PyTorch eager")
    assert row["seconds"] > 0 < row["ready_seconds"]


@pytest.mark.parametrize("name", fusion_sweep.NETS)
def test_the_sweeps_networks_compute_in_pytorch_what_ours_do(name):
    made, shape = fusion_sweep.NETS[name]
    net = Net(made(), shape, mode="cpu", init="he")
    images = np.random.default_rng(0).integers(0, 256, (5, *shape)).astype(np.uint8)
    want = net.predict(images)
    found = fusion_sweep.module(net, "cpu")(torch.from_numpy(images)).numpy()
    # Sums of up to 3,136 products in fp32 in another order, through four layers.
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())
