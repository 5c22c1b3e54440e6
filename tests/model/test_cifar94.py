"""Tests of examples/cifar94.py: network, first weights, a training of a few images on the CPU; and of its twin, where PyTorch is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import nbcnn
from nbcnn.datasets.dataset import Dataset

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("cifar94", ROOT / "examples" / "cifar94.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pictures(count, rng):
    """Images whose pixels resemble their neighbours, as those of photographs do."""
    coarse = rng.integers(0, 256, (count, 3, 8, 8)).repeat(4, 2).repeat(4, 3)
    return np.clip(coarse + rng.integers(-20, 21, coarse.shape), 0, 255).astype(np.uint8)


def begun(example, images):
    """The model with its first weights, and the normalised images."""
    normalisation = nbcnn.Normalisation.of(images)
    options = {"mode": "cpu", "input_shape": (3, 32, 32), "normalisation": normalisation}
    model = nbcnn.Model(example.network(), nbcnn.SoftmaxCrossEntropy(label_smoothing=0.2), **options)
    normal = normalisation.done(images)
    example.first_weights(model, normal)
    return model, normal


def test_the_network_has_the_size_of_the_paper_s_and_begins_with_the_identity(example, rng):
    with begun(example, pictures(4, rng))[0] as model:
        assert model.net.params.count == 1_972_792
        weights = model.weights()
        np.testing.assert_array_equal(weights["conv4.weight"][:64, :, 1, 1], np.eye(64))
        assert np.count_nonzero(weights["conv4.weight"][:64]) == 64
        assert np.abs(weights["conv4.weight"][64:]).min() > 0
        assert not weights["conv1.bias"].any()
        assert np.abs(weights["linear1.weight"]).max() <= 256**-0.5 / 9


def test_whitened_patches_are_decorrelated_and_of_variance_1(example, rng):
    images = nbcnn.Normalisation((0.5,) * 3, (0.25,) * 3).done(pictures(20, rng))
    filters = example.whitening(images, eps=0.0)
    assert filters.shape == (24, 3, 2, 2)
    np.testing.assert_array_equal(filters[12:], -filters[:12])
    patches = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    # Float64 sums over 20·31² patches: the eigenvalues span three decades, and each is right to 12·eps of the largest.
    np.testing.assert_allclose(np.cov((patches @ filters[:12].reshape(12, 12).T).T), np.eye(12), atol=1e-10)


@pytest.mark.full
def test_a_training_of_a_few_images_changes_what_is_trained(example, rng):
    """Two steps on 8 images of two classes, apart by brightness: the loss falls; what is frozen is as it was."""
    images, labels = pictures(8, rng) // 2, np.arange(8, dtype=np.int32) % 2
    images[labels == 1] += 128
    before = begun(example, images)[0].weights()
    model, history = example.train(Dataset("cifar10", "made", images, labels, images, labels, tuple("abcdefghij")), 2, 0)
    with model:
        after = model.weights()
        losses = history.history["loss"]
        assert losses[1] < losses[0]
        frozen = {name for name, weight in before.items() if np.array_equal(after[name], weight)}
        assert frozen == {"conv1.weight", *(f"batchnorm{number}.weight" for number in range(1, 7))}
        assert set(model.evaluate(images, labels, views="flip,shift:1")) == {"loss", "accuracy"}


@pytest.mark.full
def test_the_twin_has_the_same_outputs_loss_and_gradients(example, rng):
    torch = pytest.importorskip("torch", reason="PyTorch is no dependency: the twin is checked where it is installed")
    from nbcnn.lab.peers import cifar94

    images, labels = pictures(4, rng), np.array([3, 1, 4, 1])
    model, normal = begun(example, images)
    x = torch.from_numpy(normal.astype(np.float32))
    twin = cifar94.network(x)
    whitening = twin[0].weight.detach().numpy()
    with model:
        weights = model.weights()
        # The same directions; an eigenvector's sign is free, and those of the negatives follow.
        products = np.einsum("kcrs,kcrs->k", whitening, weights["conv1.weight"])
        np.testing.assert_allclose(np.abs(products), (weights["conv1.weight"] ** 2).sum((1, 2, 3)), rtol=1e-3)
        ours = {f"conv{number}": layer for number, layer in enumerate([m for m in twin if isinstance(m, torch.nn.Conv2d)], 1)}
        ours |= {f"batchnorm{number}": layer for number, layer in enumerate([m for m in twin if isinstance(m, torch.nn.BatchNorm2d)], 1)}
        linear = next(m for m in twin if isinstance(m, torch.nn.Linear))
        with torch.no_grad():
            for name, layer in ours.items():
                for inner, tensor in layer.named_parameters():
                    tensor.copy_(torch.from_numpy(weights[f"{name}.{inner}"]))
            linear.weight.copy_(torch.from_numpy(weights["linear1.weight"] * 9))
        loss, grads = model.net.gradients(normal.astype(np.float32), labels)
        wanted = torch.nn.functional.cross_entropy(twin(x), torch.from_numpy(labels), label_smoothing=cifar94.SMOOTHING)
        wanted.backward()
        # Both compute in float32; sums of up to 2,304 products, through seven convolutions and norms whose statistics are of 4 images.
        assert loss == pytest.approx(float(wanted), rel=1e-5)
        pairs = [(f"{name}.{inner}", tensor.grad) for name, layer in ours.items() for inner, tensor in layer.named_parameters()]
        for name, gradient in [*pairs, ("linear1.weight", linear.weight.grad * 9)]:
            if gradient is not None:
                assert np.linalg.norm(grads[name] - gradient.numpy()) <= 1e-3 * np.linalg.norm(gradient.numpy()), name
        assert cifar94.RATE == example.RATE
        assert cifar94.DECAY == example.DECAY
