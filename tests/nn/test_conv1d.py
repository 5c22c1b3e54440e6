"""Tests of Conv1d: by hand, as a convolution of images one pixel high, its gradients, its description, every mode, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import nbcnn
from nbcnn import Conv1d, Conv2d
from nbcnn.gpu import device as gpu_device
from nbcnn.modes import MODES
from nbcnn.nn import description
from nbcnn.nn.losses import MSE
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.storage import decode, encode
from nbcnn.run.net import Net

SERIES = (4, 11)
LAYERS = {
    "plain": (Conv1d(6, 3), Conv2d(6, (1, 3))),
    "strided": (Conv1d(6, 4, stride=2, padding=1), Conv2d(6, (1, 4), stride=(1, 2), padding=(0, 1))),
    "dilated": (Conv1d(6, 3, padding=(4, 0), dilation=2), Conv2d(6, (1, 3), padding=(0, 0, 4, 0), dilation=(1, 2))),
    "groups": (Conv1d(6, 3, padding=1, groups=2, bias=False), Conv2d(6, (1, 3), padding=(0, 1), groups=2, bias=False)),
    "depthwise": (Conv1d(4, 5, stride=2, padding=2, groups=4), Conv2d(4, (1, 5), stride=(1, 2), padding=(0, 2), groups=4)),
    "long": (Conv1d(2, 17, padding=8), Conv2d(2, (1, 17), padding=(0, 8))),
}
CHOICES = [key for key, row in MODES.items() if row.device == "gpu"]
if gpu_device.SIMULATOR:
    CHOICES = [("naive", "fp32"), ("cudacore", "fp32")]


def test_it_is_a_cross_correlation():
    net = Net([Conv1d(1, 3, padding=1)], (1, 4), mode="cpu")
    net.params.load_dict({"conv1d1.weight": np.float32([[[1, 2, 3]]]), "conv1d1.bias": np.float32([0.5])})
    y = net.predict(np.float32([[[1, 10, 100, 1000]]]))
    np.testing.assert_array_equal(y, np.float32([[[32.5, 321.5, 3210.5, 2100.5]]]))


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_a_convolution_of_images_one_pixel_high(name, rng):
    series, images = LAYERS[name]
    one, other = Net([series, MSE()], SERIES, mode="cpu", seed=1), Net([images, MSE()], (4, 1, 11), mode="cpu", seed=1)
    assert other.output_shape == (one.output_shape[0], 1, one.output_shape[1])
    x, target = (rng.standard_normal((3, *shape)).astype(np.float32) for shape in (SERIES, one.output_shape))
    shapes = {key: array.shape for key, array in other.params.as_dict().items()}
    renamed = {key.replace("conv1d1", "conv1"): array for key, array in one.params.as_dict().items()}
    other.params.load_dict({key: array.reshape(shapes[key]) for key, array in renamed.items()})
    (loss, grads), (wanted_loss, wanted) = one.gradients(x, target), other.gradients(x[:, :, None], target[:, :, None])
    # No sum has more than 4·17 products or 3·11 pixels; both sides round.
    limit = 2 * parity_bound(68, "fp32")
    assert loss == pytest.approx(wanted_loss, rel=limit)
    for key, grad in grads.items():
        right = wanted[key.replace("conv1d1", "conv1")].reshape(grad.shape)
        assert np.linalg.norm(grad - right) <= limit * np.linalg.norm(right), key


@pytest.mark.parametrize(("mode", "precision"), CHOICES)
def test_every_mode_lands_where_numpy_does(mode, precision, device, rng):
    if mode == "tensorcore" and device.capability < (8, 0):
        pytest.skip("tensorcore needs compute capability 8.0")
    layers = [Conv1d(8, 3, padding=1), Conv1d(8, 3, padding=2, dilation=2, groups=8), Conv1d(4, 3, dilation=2, groups=2), MSE()]
    x = rng.standard_normal((2, *SERIES)).astype(np.float32)
    x = decode(encode(x, STORE[precision]), STORE[precision])
    target = np.ones((2, 4, 7), np.float32)
    wanted_loss, wanted = Net(layers, SERIES, seed=3, mode="cpu").gradients(x, target)
    loss, got = Net(layers, SERIES, seed=3, mode=mode, precision=precision).gradients(x, target)
    # Three layers forward and back; no sum is longer than 24 products.
    limit = 12 * parity_bound(24, precision)
    assert loss == pytest.approx(wanted_loss, rel=limit)
    for name, gradient in wanted.items():
        assert np.linalg.norm(got[name] - gradient) <= limit * np.linalg.norm(gradient), name


@pytest.mark.parametrize("name", LAYERS)
def test_a_described_layer_is_made_again(name):
    (read,) = description.from_data(json.loads(json.dumps(description.as_data([LAYERS[name][0]]))))
    assert read == LAYERS[name][0]
    assert Conv1d(4, padding=(2, 2)) == Conv1d(4, padding=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"groups": 3}, "groups that divide its channels"),
        ({"kernel_size": (3, 3)}, "Conv1d takes one kernel_size"),
        ({"padding": -1}, "a whole number of at least 0 as padding"),
        ({"padding": (1, 2, 3)}, "takes one padding or a pair"),
        ({"stride": 0}, "a whole number of at least 1 as stride"),
    ],
)
def test_what_does_not_fit_is_refused(given, words):
    with pytest.raises(nbcnn.UsageError, match=words):
        Conv1d(4, **({"kernel_size": 3} | given))


def test_a_window_must_fit_a_series():
    with pytest.raises(nbcnn.ShapeError, match="takes series"):
        Net([Conv1d(4, 3)], (3, 6, 6), mode="cpu")
    with pytest.raises(nbcnn.ShapeError, match="a window of 9 does not fit"):
        Net([Conv1d(4, 5, dilation=2)], (3, 8), mode="cpu")
