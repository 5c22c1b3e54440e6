"""CIFAR-10 to 94 % in ten epochs, after the ideas and hyper-parameters of K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU",
arXiv:2404.00498.

    python examples/cifar94.py --data-dir data --seeds 5         on a GPU, in bfloat16
    python examples/cifar94.py --limit 500 --epochs 1            a few images of it, on any machine

Eight layers learn so fast because nothing has to be found out twice: the first convolution whitens patches of 2×2 pixels and is not trained, the
others start as the identity as far as their channels reach, biases of the norms move 64 times as fast as weights, an image is mirrored in every other
epoch instead of by chance, and predictions are means over six views. The same network and recipe in PyTorch: nbcnn/lab/peers/cifar94.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import nbcnn
from nbcnn import GELU, SGD, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, Normalisation, Piecewise
from nbcnn.datasets import Dataset, load

BATCH = 1000
MOMENTUM = 0.85
RATE = 11.5 / (1024 * (1 + 1 / (1 - MOMENTUM))) * BATCH  # of the mean over a batch; the paper's 11.5 are of the sum over 1,024 images
DECAY = 0.0153 / 11.5
SMALLER = 1 / 9
"""The logits are a ninth of a linear layer's."""


def network() -> list:
    """Whitening, three blocks of two convolutions, a classifier: (3, 32, 32) → 10 logits, 1,972,792 parameters."""
    return [Conv2d(24, 2), GELU(), *block(64), *block(256), *block(256), MaxPool2d(3), Flatten(), Linear(10, bias=False)]


def block(filters: int) -> list:
    """Two convolutions with their norms, whose statistics follow the batch quickly; the first one halves the image."""
    first, second = ([Conv2d(filters, 3, padding=1, bias=False), BatchNorm2d(momentum=0.4), GELU()] for _ in range(2))
    return [first[0], MaxPool2d(2), *first[1:], *second]


def whitening(images: np.ndarray, eps: float = 5e-4) -> np.ndarray:
    """Filters (24, 3, 2, 2) whose outputs on patches of `images` (M, 3, H, W), floats, are decorrelated and of variance 1, and their negatives."""
    patches = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    variances, directions = np.linalg.eigh(np.cov(patches.T))
    filters = (directions / np.sqrt(variances + eps)).T.reshape(12, 3, 2, 2)
    return np.concatenate([filters, -filters])


def first_weights(model: nbcnn.Model, images: np.ndarray) -> None:
    """Whitening filters, convolutions that begin with the identity, a classifier that makes small logits."""
    weights = model.weights()
    for name, weight in weights.items():
        if name.startswith("conv") and weight.shape[2:] == (3, 3):
            channels = min(weight.shape[:2])
            weight[:channels] = 0
            weight[range(channels), range(channels), 1, 1] = 1
    weights["conv1.weight"], weights["conv1.bias"][:] = whitening(images), 0
    weights["linear1.weight"] *= SMALLER
    model.set_weights(weights)


def train(data: Dataset, epochs: int, seed: int, callbacks: Sequence = ()) -> tuple:
    """The trained model, and its history."""
    images = data.train_images
    normalisation = Normalisation.of(images)
    options = {"input_shape": images.shape[1:], "normalisation": normalisation, "seed": seed}
    try:
        model = nbcnn.Model(network(), nbcnn.SoftmaxCrossEntropy(label_smoothing=0.2), mode="tensorcore", precision="bf16", **options)
    except nbcnn.GpuUnavailable:
        model = nbcnn.Model(network(), nbcnn.SoftmaxCrossEntropy(label_smoothing=0.2), mode="cpu", **options)
    first_weights(model, normalisation.done(images[:5000]))
    model.freeze("conv1.weight")
    model.freeze("batchnorm*.weight")
    model.set_factors("batchnorm*.bias", lr=64)
    # Logits of weights w·SMALLER learn as SMALLER times the logits of w do if the rate is smaller by its square, and the decay stays what it was.
    model.set_factors("linear1.weight", lr=SMALLER**2, weight_decay=SMALLER**-2)
    rates = Piecewise(RATE, points=((0, 0.2), (0.23 * epochs, 1), (epochs, 0.07)))
    history = model.fit(
        images,
        data.train_labels,
        epochs=epochs,
        batch_size=min(BATCH, len(images)),
        optimizer=SGD(rates, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY),
        augment="flip:alternate,crop:2:reflect",
        callbacks=callbacks,
        verbose=0,
    )
    return model, history


def main() -> None:
    """Train with every seed, and print accuracies and seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data", help="where CIFAR-10 is (data/README.md)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1, help="how many trainings")
    parser.add_argument("--limit", type=int, default=None, help="take so many images of each set")
    args = parser.parse_args()
    data = load("cifar10", data_dir=args.data_dir, limit=args.limit)
    for seed in range(args.seeds):
        model, history = train(data, args.epochs, seed)
        with model:
            accuracy = model.evaluate(data.test_images, data.test_labels, batch_size=1000, views="flip,shift:1")["accuracy"]
        print(f"seed {seed}: test accuracy {accuracy:.2%} after {sum(row['seconds'] for row in history.rows):.2f} s of training")


if __name__ == "__main__":
    main()
