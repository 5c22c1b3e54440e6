"""Tests of layers that are named after PyTorch's: what they compute inside a network, how they are described, what older descriptions mean."""

from __future__ import annotations

import json

import numpy as np
import pytest

import nbcnn
from nbcnn.nn import description
from nbcnn.plan.graph import ShapeError
from nbcnn.run.net import Net

SHAPE = (4, 6, 5)
LAYERS = {
    "tanh": [nbcnn.Tanh()],
    "elu": [nbcnn.ELU(0.5)],
    "relu6": [nbcnn.ReLU6()],
    "hard_swish": [nbcnn.HardSwish()],
    "gelu": [nbcnn.GELU()],
    "gelu tanh": [nbcnn.GELU(approximate="tanh")],
    "prelu": [nbcnn.PReLU()],
    "prelu of channels": [nbcnn.PReLU(4, init=0.1)],
    "padded maxima": [nbcnn.MaxPool2d(3, 2, padding=1)],
    "maxima over the edge": [nbcnn.MaxPool2d((2, 3), ceil_mode=True)],
    "padded means": [nbcnn.AvgPool2d((3, 2), (2, 1), padding=(1, 0), count_include_pad=False)],
    "global means": [nbcnn.GlobalAvgPool2d()],
    "bilinear": [nbcnn.Resize(mode="bilinear")],
    "repeated": [nbcnn.Resize((1, 3))],
    "doubled": [nbcnn.Resize(2)],
    "elementary functions": [
        nbcnn.Abs(),
        nbcnn.Scale(0.5, 1.0),
        nbcnn.Power(-0.5),
        nbcnn.Softplus(),
        nbcnn.Clip(0.5, 2.0),
        nbcnn.Threshold(0.4, 0.1),
    ],
    "log of softmax": [nbcnn.LogSoftmax()],
    "maps": [
        nbcnn.LinearMap(2, 6, indices=((0, 5), (), (3, 3, 1)), weights=((0.5, -2.0), (), (1.0, 1.0, 0.25))),
        nbcnn.LinearMap(1, 4, indices=((2,), (0,))),
    ],
    "permuted": [nbcnn.Permute((2, 0, 1)), nbcnn.Permute((3, 0, 2, 1), (5, 2, 2, 6)), nbcnn.Reshape((4, 5, 6))],
    "transposed in general": [
        nbcnn.ConvTranspose2d(4, (2, 3), stride=(2, 1), padding=(1, 0, 0, 2), output_padding=(1, 0), dilation=(1, 2), groups=2)
    ],
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_through_a_layer_are_slopes(name, rng):
    """Of the loss in the weights of the convolution before it, by central differences in float32."""
    layers = [nbcnn.Conv2d(4, 3, padding=1), *LAYERS[name]]
    flat = [] if name == "global means" else [nbcnn.Flatten()]
    net = Net([*layers, *flat, nbcnn.Linear(3), nbcnn.SoftmaxCrossEntropy(label_smoothing=0.1)], SHAPE, mode="cpu", seed=5)
    x, labels = rng.standard_normal((3, *SHAPE)).astype(np.float32), np.array([0, 2, 1])
    weights = net.params.as_dict()
    _, grads = net.gradients(x, labels)
    h = 2.0**-10
    for each in [part for part in weights if part.startswith(("conv1.weight", "prelu1"))]:
        along = rng.choice([-1.0, 1.0], weights[each].shape).astype(np.float32)
        along /= np.linalg.norm(along)
        ends = []
        for sign in (1, -1):
            net.params.load_dict(weights | {each: weights[each] + np.float32(sign * h) * along})
            ends.append(net.gradients(x, labels)[0])
        net.params.load_dict(weights)
        # The loss is near 1 and made in float32: 1e-7 / h = 1e-4. Of 360 outputs of the convolution, which move by about h·5, one in a hundred
        # crosses a kink or another maximum, and then counts with another slope.
        assert np.vdot(grads[each], along) == pytest.approx((ends[0] - ends[1]) / (2 * h), abs=2e-3 * max(1.0, float(np.linalg.norm(grads[each]))))


@pytest.mark.parametrize("name", LAYERS)
def test_a_described_layer_is_made_again(name):
    data = json.loads(json.dumps(description.as_data(LAYERS[name])))
    assert description.from_data(data) == LAYERS[name]


def test_losses_are_described():
    losses = [nbcnn.Huber(0.5), nbcnn.L1(), nbcnn.BCEWithLogits(), nbcnn.SoftmaxCrossEntropy(weight=(1, 2), ignore_index=-1, label_smoothing=0.1)]
    assert description.from_data(json.loads(json.dumps(description.as_data(losses)))) == losses


def test_descriptions_of_earlier_versions_stay_what_they_are():
    """Files and digests of networks name no field that their layers did not have."""
    assert description.as_data([nbcnn.MaxPool2d(2), nbcnn.AvgPool2d(3, 2), nbcnn.GELU(), nbcnn.SoftmaxCrossEntropy()]) == [
        {"layer": "MaxPool2d", "kernel_size": 2, "stride": None},
        {"layer": "AvgPool2d", "kernel_size": 3, "stride": 2},
        {"layer": "GELU"},
        {"layer": "SoftmaxCrossEntropy"},
    ]


@pytest.mark.parametrize("layer", [nbcnn.MaxPool2d((2, 2), (2, 2)), nbcnn.MaxPool2d(2, ceil_mode=True), nbcnn.AvgPool2d(2, padding=(0, 0))])
def test_square_windows_inside_keep_their_kernels(layer):
    net = Net([layer], (4, 8, 6), mode="cpu")
    assert [str(step.op) for step in net.record_predict(2).steps] == [
        "gather",
        "maxpool_fprop" if isinstance(layer, nbcnn.MaxPool2d) else "avgpool_fprop",
    ]


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ShapeError, match="a window of 9 does not fit"):
        Net([nbcnn.MaxPool2d(9)], SHAPE, mode="cpu")
    with pytest.raises(ShapeError, match="3 slopes"):
        Net([nbcnn.PReLU(3)], SHAPE, mode="cpu")
    with pytest.raises(ShapeError, match="weights of 2 classes"):
        Net([nbcnn.Flatten(), nbcnn.Linear(3), nbcnn.SoftmaxCrossEntropy(weight=(1, 2))], SHAPE, mode="cpu").gradients(
            np.zeros((1, *SHAPE), np.float32), np.array([0])
        )
