"""Detach: its values are its input's, and no gradient passes through it."""

from __future__ import annotations

import numpy as np

import nbcnn
from nbcnn.run.net import Net


def test_no_gradient_passes_and_the_other_way_keeps_its_own():
    x = nbcnn.Input((3, 5, 4))
    a, b = nbcnn.Conv2d(2, 3), nbcnn.Conv2d(2, 3)
    gated = nbcnn.Mul()([a(x), nbcnn.Detach()(b(x))])
    straight = nbcnn.Add()([gated, b(x)])
    images = np.random.default_rng(1).normal(size=(2, 3, 5, 4)).astype(np.float32)
    target = np.zeros((2, 2, 3, 2), np.float32)
    nets = [Net(nbcnn.Graph.of(x, y, nbcnn.MSE()), (3, 5, 4), mode="cpu") for y in (gated, straight)]
    found = [net.gradients(images, target) for net in nets]
    assert not found[0][1]["conv2.weight"].any()
    assert found[0][1]["conv1.weight"].all()
    # Of (a·b' + b)² the gradient by b is that of the second b alone.
    assert found[1][1]["conv2.bias"].all()
    weights = Net(nbcnn.Graph.of(x, straight), (3, 5, 4), mode="cpu")
    y = weights.predict(images).astype(np.float64)
    np.testing.assert_allclose(found[1][1]["conv2.bias"], (2 * y / y.size).sum((0, 2, 3)), rtol=1e-5, atol=0)


def test_a_detached_network_predicts_what_it_did_and_is_saved(tmp_path):
    layers = [nbcnn.Conv2d(4, 3), nbcnn.Detach(), nbcnn.Flatten(), nbcnn.Linear(3)]
    model = nbcnn.Model(layers, "cross_entropy", mode="cpu").build((1, 6, 6))
    images = np.random.default_rng(1).integers(0, 256, (4, 1, 6, 6), dtype=np.uint8)
    plain = nbcnn.Model([layers[0], *layers[2:]], mode="cpu").build((1, 6, 6))
    plain.set_weights(model.weights())
    np.testing.assert_array_equal(model.predict(images), plain.predict(images))
    before = model.weights()
    model.fit(images, np.arange(4) % 3, verbose=0)
    assert {name for name, array in model.weights().items() if (array != before[name]).any()} == {"linear1.weight", "linear1.bias"}
    again = nbcnn.load(model.save(tmp_path / "net.safetensors"), mode="cpu")
    np.testing.assert_array_equal(again.predict(images), model.predict(images))
