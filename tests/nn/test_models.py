"""Tests of the ready-made graphs: their published sizes, what they compute, and what they refuse; tests/train/test_graph_recipes.py trains them."""

from __future__ import annotations

import math

import numpy as np
import pytest

import nbcnn
from nbcnn.files.errors import UsageError
from nbcnn.nn.activations import ReLU6
from nbcnn.nn.layers import Conv2d, parameters, sized
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.models import CODES, MODELS, encoder


def count(graph):
    return sum(math.prod(param.shape) for param in parameters(sized(graph, graph.input_shape)).values())


@pytest.mark.parametrize(
    ("graph", "published"),
    [
        (nbcnn.resnet18(), 11_173_962),  # github.com/kuangliu/pytorch-cifar, ResNet18
        (nbcnn.mobilenet(), 3_217_226),  # the same, MobileNet
        (nbcnn.unet(classes=1), 31_037_633),  # github.com/milesial/Pytorch-UNet, three channels, one class, transposed convolutions
        (nbcnn.unet(), 31_037_763),  # two more filters of the last convolution
    ],
    ids=["resnet18", "mobilenet", "unet of one class", "unet"],
)
def test_a_model_has_as_many_parameters_as_its_source(graph, published):
    assert count(graph) == published


def shapes_of(graph, kind):
    """The shapes that the layers of a kind make, in order, each once in a row."""
    made = [shape for _, layer, shape, _ in graph.lines() if isinstance(layer, kind)]
    return [shape for at, shape in enumerate(made) if at == 0 or shape != made[at - 1]]


def test_shapes_inside():
    assert shapes_of(nbcnn.resnet18(filters=2), Conv2d) == [(2, 32, 32), (4, 16, 16), (8, 8, 8), (16, 4, 4)]
    assert shapes_of(nbcnn.mobilenet(multiplier=1 / 16), ReLU6)[0] == (2, 32, 32)
    assert shapes_of(nbcnn.mobilenet(multiplier=1 / 16), ReLU6)[-1] == (64, 2, 2)
    graph = nbcnn.unet(1, 16, 32, classes=5, filters=2, depth=3)
    assert shapes_of(graph, nbcnn.MaxPool2d) == [(2, 8, 16), (4, 4, 8), (8, 2, 4)]
    assert shapes_of(graph, nbcnn.Concat) == [(16, 4, 8), (8, 8, 16), (4, 16, 32)]
    assert graph.shapes()[graph.outputs[0]] == (5, 16, 32)


def test_losses_are_those_of_the_task():
    assert isinstance(nbcnn.unet(filters=2, depth=1).loss, MSE)
    assert all(isinstance(made.loss, SoftmaxCrossEntropy) for made in (nbcnn.unet(classes=3, filters=2, depth=1), nbcnn.resnet18(filters=2)))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet", "unet"])
def test_the_code_is_the_widest_and_smallest_value(name):
    options = {"multiplier": 1 / 16} if name == "mobilenet" else {"filters": 2}
    made = {"resnet18": nbcnn.resnet18, "mobilenet": nbcnn.mobilenet, "unet": nbcnn.unet}[name](**options)
    assert CODES.keys() == MODELS.keys()
    assert encoder(made, CODES[name]).shapes()[-1] == {"resnet18": (16,), "mobilenet": (64,), "unet": (32, 2, 2)}[name]


def test_a_denoiser_adds_what_it_makes_to_its_input():
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 4)).astype(np.uint8)
    with nbcnn.Model(nbcnn.unet(3, 4, 4, filters=2, depth=1), mode="cpu") as model:
        weights = model.net.params.as_dict()
        (last,) = {name for name in weights if name.endswith("weight") and weights[name].shape == (3, 2, 1, 1)}
        zeros = {name: np.zeros_like(weights[name]) for name in (last, last.replace("weight", "bias"))}
        model.net.params.load_dict(weights | zeros)
        np.testing.assert_array_equal(model.predict(x), (x * np.float32(1 / 255)).astype(np.float32))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nbcnn.unet(3, 36, 32), "multiples of 16, got 36×32"),
        (lambda: MODELS["autoencoder"](3, 30, 32), "^autoencoder halves images twice, so height and width must be multiples of 4, got 30×32"),
        (lambda: MODELS["small-autoencoder"](3, 32, 31), "^small-autoencoder halves .* got 32×31: --size scales them$"),
        (lambda: nbcnn.unet(depth=0), "multiples of 1"),
        (lambda: nbcnn.mobilenet(multiplier=0), "multiplier above 0"),
        (lambda: nbcnn.resnet18(classes=0), "Linear"),
        (lambda: nbcnn.resnet18(filters=0), "Conv2d"),
    ],
)
def test_what_no_model_can_be_made_of(make, said):
    with pytest.raises(UsageError, match=said):
        make()
