"""A residual network for small images, as a graph: K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning", arXiv:1512.03385, without norms.

    python -m nbcnn train --model examples/resnet.py:resnet --dataset cifar10 --augment flip,crop:4
    python examples/resnet.py                     a small one on 640 of scikit-learn's digits: seconds without a GPU

A block is relu(x + conv(relu(conv(x)))). Where it halves the image and doubles the filters, the shortcut is a 1×1 convolution of stride 2 (option B
of the paper).
"""

from __future__ import annotations

from collections.abc import Sequence

import nbcnn
from nbcnn import AvgPool2d, Conv2d, Flatten, Graph, Input, Linear, ReLU, SoftmaxCrossEntropy


def block(x, filters: int, stride: int = 1):
    """relu(shortcut(x) + conv(relu(conv(x)))); the shortcut is x where its shape stays."""
    y = ReLU()(Conv2d(filters, 3, stride=stride, padding=1)(x))
    y = Conv2d(filters, 3, padding=1)(y)
    shortcut = x if stride == 1 and x.shape[0] == filters else Conv2d(filters, 1, stride=stride)(x)
    return ReLU()(y + shortcut)


def resnet(channels: int = 3, height: int = 32, width: int = 32, blocks: Sequence[int] = (2, 2, 2), filters: int = 64, classes: int = 10) -> Graph:
    """The graph: a convolution, stages of `blocks` blocks, each of half the size and twice the filters, the mean of each channel, a classifier."""
    x = Input((channels, height, width))
    y = ReLU()(Conv2d(filters, 3, padding=1)(x))
    for stage, count in enumerate(blocks):
        for number in range(count):
            y = block(y, filters << stage, stride=2 if stage and not number else 1)
    _, high, wide = y.shape
    pooled = AvgPool2d(high)(y) if high == wide else y
    return Graph.of(x, Linear(classes)(Flatten()(pooled)), SoftmaxCrossEntropy())


def main() -> None:
    """Train a small one on digits and print its test accuracy."""
    from nbcnn.datasets.digits import load

    data = load()
    model = nbcnn.Model(resnet(blocks=(1, 1), filters=8))
    optimizer = nbcnn.SGD(lr=nbcnn.Cosine(0.05), momentum=0.9)
    model.fit(data.train_images[:640], data.train_labels[:640], epochs=6, batch_size=32, optimizer=optimizer)
    print(f"test accuracy {model.evaluate(data.test_images, data.test_labels)['accuracy']:.2%}")


if __name__ == "__main__":
    main()
