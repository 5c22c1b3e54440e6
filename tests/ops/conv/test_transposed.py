"""Tests of the transposed convolution: by hand, as the adjoint of a convolution, its gradients, its bias, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
from nbcnn import Conv2d, ConvTranspose2d, Flatten, Linear
from nbcnn.nn.losses import MSE
from nbcnn.plan.bounds import parity_bound
from nbcnn.run.net import Net

SHAPE = (3, 4, 5)


def bare(**options):
    return ConvTranspose2d(2, (3, 2), stride=2, padding=1, **options)


def test_every_pixel_of_the_input_becomes_a_filter():
    net = Net([ConvTranspose2d(1, 2, stride=2, bias=True)], (1, 2, 2), mode="cpu")
    weight = np.array([[1, 2], [3, 4]], np.float32)
    net.params.load_dict({"convt1.weight": weight[None, None], "convt1.bias": np.float32([0.5])})
    x = np.array([[1, 0], [0, 2]], np.float32)
    np.testing.assert_array_equal(net.predict(x[None, None])[0, 0], np.kron(x, weight) + np.float32(0.5))


@pytest.mark.parametrize("output_padding", [0, 1])
def test_it_is_the_adjoint_of_a_convolution(output_padding):
    """⟨v, T x⟩ = ⟨C v, x⟩ for the convolution C of the same filters: sums of at most 18 products in float32 on both sides."""
    rng = np.random.default_rng(2)
    transposed = Net([bare(output_padding=output_padding, bias=False)], SHAPE, mode="cpu")
    convolution = Net([Conv2d(3, (3, 2), stride=2, padding=1, bias=False)], transposed.output_shape, mode="cpu")
    assert transposed.output_shape == (2, 7 + output_padding, 8 + output_padding)
    assert convolution.output_shape == SHAPE
    convolution.params.load_dict({"conv1.weight": transposed.params.as_dict()["convt1.weight"]})
    x, v = (rng.standard_normal((2, *shape)).astype(np.float32) for shape in (SHAPE, transposed.output_shape))
    made, back = (net.predict(values).astype(np.float64) for net, values in ((transposed, x), (convolution, v)))
    assert abs(np.vdot(v, made) - np.vdot(back, x)) <= 2 * parity_bound(18, "fp32") * np.linalg.norm(made) * np.linalg.norm(v)


def test_its_general_form_is_the_adjoint_of_a_general_convolution():
    rng, options = np.random.default_rng(5), {"dilation": (1, 2), "groups": 2, "bias": False}
    transposed = Net([ConvTranspose2d(4, (3, 2), stride=(2, 1), padding=(1, 0, 0, 1), output_padding=(1, 0), **options)], (6, 4, 5), mode="cpu")
    convolution = Net([Conv2d(6, (3, 2), stride=(2, 1), padding=(1, 0, 0, 1), **options)], transposed.output_shape, mode="cpu")
    assert transposed.output_shape == (4, 9, 6)
    assert convolution.output_shape == (6, 4, 5)
    convolution.params.load_dict({"conv1.weight": transposed.params.as_dict()["convt1.weight"]})
    x, v = (rng.standard_normal((2, *shape)).astype(np.float32) for shape in ((6, 4, 5), transposed.output_shape))
    made, back = (net.predict(values).astype(np.float64) for net, values in ((transposed, x), (convolution, v)))
    assert abs(np.vdot(v, made) - np.vdot(back, x)) <= 2 * parity_bound(18, "fp32") * np.linalg.norm(made) * np.linalg.norm(v)


def test_its_gradients_are_those_of_the_definition():
    """Of mean((T x + b − t)²): e = 2(T x + b − t)/n, db = Σ e, and dw[c,k] = Σ x[c]·e[k] where tap and pixel meet."""
    rng = np.random.default_rng(3)
    net = Net([bare(output_padding=1), MSE()], SHAPE, mode="cpu")
    x = rng.standard_normal((2, *SHAPE)).astype(np.float32)
    target = rng.standard_normal((2, *net.output_shape)).astype(np.float32)
    _, grads = net.gradients(x, target)
    weights = {name: values.astype(np.float64) for name, values in net.params.as_dict().items()}
    weight, whole = weights["convt1.weight"], np.zeros((2, 2, 10, 11))  # with the border of 1 that padding takes away
    for r in range(3):
        for s in range(2):
            whole[:, :, r : r + 7 : 2, s : s + 9 : 2] += np.einsum("nchw,ck->nkhw", x, weight[:, :, r, s])
    error = np.zeros_like(whole)
    inside = whole[:, :, 1:9, 1:10] + weights["convt1.bias"][:, None, None]
    error[:, :, 1:9, 1:10] = 2 * (inside - target) / target.size
    wanted = {"convt1.bias": error.sum((0, 2, 3)), "convt1.weight": np.empty_like(weight)}
    for r in range(3):
        for s in range(2):
            wanted["convt1.weight"][:, :, r, s] = np.einsum("nchw,nkhw->ck", x, error[:, :, r : r + 7 : 2, s : s + 9 : 2])
    for name, grad in wanted.items():
        # A sum of 18 products in the output, then one over the 144 pixels of two images.
        assert np.linalg.norm(grads[name] - grad) <= (parity_bound(18, "fp32") + parity_bound(144, "fp32")) * np.linalg.norm(grad), name


def test_it_learns_and_is_saved(tmp_path):
    x = np.random.default_rng(4).integers(0, 256, (16, 1, 8, 8)).astype(np.uint8)
    layers = [Conv2d(4, 2, stride=2), nbcnn.ReLU(), ConvTranspose2d(1, 2, stride=2)]
    model = nbcnn.Model(layers, "mse", mode="cpu")
    history = model.fit(x, epochs=20, batch_size=8, optimizer=nbcnn.Adam(lr=0.02), verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    again = nbcnn.load(model.save(tmp_path / "net.safetensors"), mode="cpu")
    np.testing.assert_array_equal(again.predict(x), model.predict(x))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: ConvTranspose2d(4, 2, output_padding=1), "output_padding below its stride, got 1 and 1"),
        (lambda: ConvTranspose2d(4, 2, stride=(2, 1), output_padding=(1, 1)), r"output_padding below its stride, got 1 and \(2, 1\)"),
        (lambda: ConvTranspose2d(4, 2, padding=(1, 2, 3)), r"one padding of at least 0, a pair, or \(top, bottom, left, right\)"),
        (lambda: ConvTranspose2d(4, 2, groups=3), "groups that divide its channels"),
        (lambda: ConvTranspose2d(4, 2, padding=-1), "a whole number of at least 0 as padding"),
        (lambda: ConvTranspose2d(0), "a whole number of at least 1 as out_channels"),
        (lambda: Net([ConvTranspose2d(4, 1, padding=3)], (1, 4, 4), mode="cpu"), "convt1: a padding of 3 leaves nothing of 4×4"),
        (lambda: Net([Flatten(), ConvTranspose2d(4)], (1, 4, 4), mode="cpu"), r"convt1 takes images"),
        (lambda: Net([ConvTranspose2d(4, in_channels=2), Flatten(), Linear(2)], (1, 4, 4), mode="cpu"), "convt1 takes 2 channels, got 1"),
    ],
)
def test_what_does_not_fit_is_refused(act, words):
    with pytest.raises((nbcnn.UsageError, nbcnn.ShapeError), match=words):
        act()
