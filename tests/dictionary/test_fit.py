"""Tests of what is fitted to images: whitening and its inverse, first weights by k-means, encoders that are dictionaries."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
from nbcnn import AvgPool2d, Conv2d, KSparse, Linear, MaxPool2d, Noise, ReLU, Upsample2d, Whiten, WhitenPatches
from nbcnn.dictionary import fit, statistics
from nbcnn.dictionary.samples import HostSamples
from nbcnn.files.errors import UsageError
from nbcnn.nn import whitening
from nbcnn.run.net import Net


def smooth(rng, count=300, channels=3, size=12):
    """Images whose neighbours and channels are correlated, uint8."""
    x = rng.standard_normal((count, channels, size + 4, size + 4))
    x += x.mean(1, keepdims=True)
    for axis in (2, 3):
        x = sum(np.roll(x, shift, axis) for shift in range(3))
    x = x[:, :, 2:-2, 2:-2] / 12 + 0.5
    return (255 * x.clip(0, 1)).astype(np.uint8)


def encoder(net, count):
    """The first `count` layers of `net`, with its weights."""
    made, weights = Net(net.layers[:count], net.input_shape, mode="cpu"), net.params.as_dict()
    made.params.load_dict({name: weights[name] for name in made.params.names})
    return made


def test_windows_are_those_of_the_images(rng):
    maps = np.arange(2 * 3 * 5 * 6).reshape(2, 3, 5, 6)
    for window in statistics.drawn(maps, (2, 3), 20, rng):
        # In an image that counts upwards a window is known by its first value.
        n, c, h, w = np.unravel_index(window[0], maps.shape)
        assert c == 0
        np.testing.assert_array_equal(window, maps[n, :, h : h + 2, w : w + 3].reshape(-1))
    blocks = [maps[:1], maps[1:]]
    assert statistics.drawn_of_all(blocks, 2, (1, 1), 7, rng).shape == (7, 3)


def test_zca_whitens_and_components_are_in_order(rng):
    samples = (rng.standard_normal((4000, 6)) @ rng.standard_normal((6, 6))).astype(np.float32)
    samples -= samples.mean(0)
    matrix = HostSamples(samples).covariance()
    whitened = samples @ statistics.zca(matrix, 0.0)
    np.testing.assert_allclose(whitened.T @ whitened / len(samples), np.eye(6), atol=1e-3)
    first = samples @ statistics.components(matrix, 2, 0.0)
    np.testing.assert_allclose(first.T @ first / len(samples), np.eye(2), atol=1e-3)


def test_whitening_decorrelates_and_is_undone_in_colours(rng):
    x = smooth(rng)
    net = Net([Whiten(size=5, eps=0.01)], x.shape[1:], mode="cpu")
    assert fit.fit(net, x)
    assert net.params.read("whiten1.fitted") == [300]
    y = net.predict(x)
    assert abs(float(y.std()) - 1) < 0.15  # at the borders, which are reflected, it is more
    inner = y[:, :, 3:-3, 3:-3]
    before, after = (np.corrcoef(a[:, 0, :, 1:].ravel(), a[:, 0, :, :-1].ravel())[0, 1] for a in (x[:, :, 3:-3, 3:-3], inner))
    assert before > 0.6 > 0.15 > abs(after)
    across = [np.corrcoef(a[:, 0].ravel(), a[:, 1].ravel())[0, 1] for a in (x, inner)]
    assert across[0] > 0.2 > 0.1 > abs(across[1])
    back = whitening.undone(y[:4], x[:4] / 255, net.layers[0], net.params.read("whiten1.mean"), net.params.read("whiten1.filters"))
    np.testing.assert_allclose(back, x[:4] / 255, atol=1e-5)
    assert not fit.fit(net, x), "it is fitted already"
    with pytest.raises(UsageError, match="must be the first layer"):
        fit.fit(Net([ReLU(), Whiten()], x.shape[1:], mode="cpu"), x)


def test_first_weights_by_k_means_leave_half_of_the_units_active(rng):
    x = smooth(rng, 200)
    layers = [Whiten(3), Noise(0.5), Conv2d(12, 3, padding=1), ReLU(), MaxPool2d(2), Conv2d(6, 3, padding=1), ReLU(), KSparse(2)]
    net = Net([*layers, Upsample2d(2), Conv2d(3, 3, padding=1), nbcnn.MSE()], x.shape[1:], mode="cpu")
    decoder = net.params.read("conv3.weight")
    fit.fit(net, x)
    assert fit.start(net, x) == ["conv1", "conv2"]
    np.testing.assert_array_equal(net.params.read("conv3.weight"), decoder)
    for layer in (4, 7):
        h = encoder(net, layer).predict(x)
        # Biases make it half of the patches that were drawn, inside of the images.
        assert ((h[:, :, 1:-1, 1:-1] > 0).mean((0, 2, 3)) > 0.4).all()
        assert ((h[:, :, 1:-1, 1:-1] > 0).mean((0, 2, 3)) < 0.6).all()
    with pytest.raises(UsageError, match="this one has none"):
        fit.start(Net([Linear(3), nbcnn.MSE()], (3,), mode="cpu"), x)


def test_a_dictionary_makes_codes_of_whitened_patches(rng):
    x = smooth(rng, 100, size=10)
    net = Net([WhitenPatches(3), Conv2d(10, 1), ReLU(), AvgPool2d(4)], x.shape[1:], mode="cpu")
    fit.fit_encoder(net, x, seed=1)
    z = encoder(net, 1).predict(x).transpose(0, 2, 3, 1).reshape(-1, 27)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-5)
    matrix = z.T @ z / len(z)
    # Whitened but for eps, and the one direction that a patch's mean was taken out of: equal power in the other 26.
    powers = np.linalg.eigvalsh(matrix)[1:]
    assert powers.max() < 12 * powers.mean()
    atoms = net.params.read("conv1.weight").reshape(10, 27)
    np.testing.assert_allclose(np.linalg.norm(atoms, axis=1), 1, rtol=1e-5)
    r = z @ atoms.T
    np.testing.assert_allclose(-net.params.read("conv1.bias"), 0.25 * r.std(), rtol=0.1)
    assert net.predict(x).shape == (100, 10, 2, 2)
    with pytest.raises(UsageError, match="conv1 is no 1×1 convolution"):
        fit.fit_encoder(Net([Conv2d(2, 3)], x.shape[1:], mode="cpu"), x)


def test_two_dictionaries_are_fitted_one_on_the_other(rng):
    x = smooth(rng, 40, size=16)
    net = Net(nbcnn.patches2(16, 16, atoms=(8, 10), projected=4), x.shape[1:], mode="cpu")
    fit.fit_encoder(net, x)
    h = encoder(net, 6).predict(x).transpose(0, 2, 3, 1).reshape(-1, 4)
    np.testing.assert_allclose(h.T @ h / len(h), np.eye(4), atol=0.35)  # of 0.05 times the mean eigenvalue more, and of a sample
    active = (encoder(net, 9).predict(x) > 0).mean((0, 2, 3))
    assert ((active > 0.03) & (active < 0.3)).all()
    assert net.output_shape == (10, 3, 3)


def test_a_gpu_fits_what_a_cpu_fits(gpu, rng):
    x = smooth(rng, 60, size=6)
    layers = [WhitenPatches(2), Conv2d(6, 1), ReLU()]
    here, there = Net(layers, x.shape[1:], mode="cpu"), Net(layers, x.shape[1:], mode="tiled", device=gpu)
    for net in (here, there):
        fit.fit_encoder(net, x, seed=1)
    wanted, got = here.params.as_dict(), there.params.as_dict()
    # Sums over n patches in float32 on both sides differ by up to ε·√n of the largest eigenvalue, 12 times the mean one at most; (λ + 0.1·mean)^(−½)
    # makes up to 12 / 0.1 / 2 times as much of it. Atoms are normalised sums of what that made, of which no sample changes sides.
    tolerance = 2 * 60 * 2**-23 * np.sqrt(6000)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=name)


def test_a_gpu_fits_one_dictionary_on_the_other(gpu, rng):
    x = smooth(rng, 200, size=16)
    net = Net(nbcnn.patches2(16, 16, atoms=(40, 50), projected=12), x.shape[1:], mode="tiled")
    fit.fit_encoder(net, x)
    h = encoder(net, 6).predict(x).transpose(0, 2, 3, 1).reshape(-1, 12)
    np.testing.assert_allclose(h.T @ h / len(h), np.eye(12), atol=0.35)  # as on a CPU, above
    z = encoder(net, 7).predict(x).transpose(0, 2, 3, 1).reshape(-1, 108)
    np.testing.assert_allclose(np.linalg.norm(net.params.read("conv3.weight")[:, :, 0, 0], axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-5)
    active = (encoder(net, 9).predict(x) > 0).mean((0, 2, 3))
    assert ((active > 0.05) & (active < 0.2)).all()
