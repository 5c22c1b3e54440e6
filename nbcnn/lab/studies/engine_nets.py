"""This module defines networks for `study engines` beside those of `bench nets`: shapes that users have and for which no kernel was tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbcnn.lab.measure.nets import NETWORKS, Network
from nbcnn.nn.activations import GELU, ReLU, ReLU6, Sigmoid, Tanh
from nbcnn.nn.graphs import Graph, Input
from nbcnn.nn.joins import Concat
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.norms import BatchNorm2d, GroupNorm
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d

SMALL_BATCH = 33
"""A batch that no power of two divides, too small to fill a GPU in every layer."""


def _conv(x: Any, filters: int, size: int = 1, stride: int = 1, groups: int = 1) -> Any:
    """A convolution without a bias that keeps height and width where its stride is 1."""
    return Conv2d(filters, size, stride=stride, padding=size // 2, groups=groups, bias=False)(x)


def inverted() -> Graph:
    """Inverted residual blocks with ReLU6, 16 to 320 channels (M. Sandler and others, MobileNetV2, arXiv:1801.04381, one block per stage)."""
    x = Input((3, 32, 32))
    y = ReLU6()(BatchNorm2d()(_conv(x, 32, 3)))
    for wide, stride, blocks in ((16, 1, 1), (24, 1, 2), (32, 2, 2), (64, 2, 2), (96, 1, 2), (160, 2, 2), (320, 1, 1)):
        for number in range(blocks):
            step = stride if number == 0 else 1
            inner = ReLU6()(BatchNorm2d()(_conv(y, 6 * y.shape[0])))
            inner = ReLU6()(BatchNorm2d()(_conv(inner, inner.shape[0], 3, step, inner.shape[0])))
            inner = BatchNorm2d()(_conv(inner, wide))
            y = inner + y if step == 1 and y.shape[0] == wide else inner
    return Graph.of(x, Linear(10)(GlobalAvgPool2d()(ReLU6()(BatchNorm2d()(_conv(y, 1280))))), SoftmaxCrossEntropy())


def dense() -> Graph:
    """Three blocks of four layers that grow by 24 channels (G. Huang and others, DenseNet, arXiv:1608.06993, with bottlenecks)."""
    x = Input((3, 32, 32))
    y = _conv(x, 48, 3)
    for block in range(3):
        for _ in range(4):
            inner = _conv(ReLU()(BatchNorm2d()(y)), 96)
            y = Concat()([y, _conv(ReLU()(BatchNorm2d()(inner)), 24, 3)])
        if block < 2:
            y = AvgPool2d(2)(_conv(ReLU()(BatchNorm2d()(y)), y.shape[0] // 2))
    return Graph.of(x, Linear(10)(GlobalAvgPool2d()(ReLU()(BatchNorm2d()(y)))), SoftmaxCrossEntropy())


def lenet() -> list[Any]:
    """Two 5×5 convolutions of 6 and 16 filters and three linear layers (Y. LeCun and others, Gradient-based learning, 1998)."""
    body = [Conv2d(6, 5, padding=2), Tanh(), AvgPool2d(2), Conv2d(16, 5), Tanh(), AvgPool2d(2)]
    return [*body, Flatten(), Linear(120), Tanh(), Linear(84), Tanh(), Linear(10), SoftmaxCrossEntropy()]


def grouped() -> Graph:
    """Three stages of two bottlenecks whose 3×3 convolutions have 32 groups (S. Xie and others, ResNeXt, arXiv:1611.05431)."""
    x = Input((3, 32, 32))
    y = ReLU()(BatchNorm2d()(_conv(x, 64, 3)))
    for wide in (128, 256, 512):
        for number in range(2):
            stride = 2 if number == 0 and wide > 128 else 1
            inner = ReLU()(BatchNorm2d()(_conv(y, wide)))
            inner = BatchNorm2d()(_conv(ReLU()(BatchNorm2d()(_conv(inner, wide, 3, stride, 32))), 2 * wide))
            y = ReLU()(inner + (y if number else BatchNorm2d()(_conv(y, 2 * wide, 1, stride))))
    return Graph.of(x, Linear(10)(GlobalAvgPool2d()(y)), SoftmaxCrossEntropy())


def wide(activation: Callable[[], Any]) -> list[Any]:
    """Two linear layers of 4,096 with an activation, and one that makes 1,024 values."""
    return [Flatten(), Linear(4096), activation(), Linear(4096), activation(), Linear(1024), MSE()]


def halving() -> list[Any]:
    """3×3 convolutions of 24, 40, 72 and 136 filters and poolings: channels that tiles pad."""
    body = [layer for filters in (24, 40, 72, 136) for layer in (Conv2d(filters, 3, padding=1), ReLU(), MaxPool2d(2))]
    return [*body, Flatten(), Linear(100), ReLU(), Linear(10), SoftmaxCrossEntropy()]


def large_windows() -> Graph:
    """Two stages of a block with a 7×7 depthwise convolution, one of a 5×5 of stride 2 between (Z. Liu and others, ConvNeXt, arXiv:2201.03545)."""
    x = Input((3, 64, 64))
    y = GroupNorm(1)(Conv2d(96, 4, stride=4)(x))
    for channels in (96, 192):
        if channels > 96:
            y = _conv(_conv(y, 96, 5, 2, 96), channels)
        inner = GELU()(Conv2d(4 * channels, 1)(GroupNorm(1)(_conv(y, channels, 7, 1, channels))))
        y = y + Conv2d(channels, 1)(inner)
    return Graph.of(x, Linear(10)(GlobalAvgPool2d()(y)), SoftmaxCrossEntropy())


def few_groups() -> list[Any]:
    """3×3 convolutions of 64 and 128 filters in 2, 4, 8 and 16 groups, and dilated ones: how many products with zeros pay is decided here."""
    body = [Conv2d(64, 3, padding=1), ReLU()]
    for filters, groups, dilation in ((64, 2, 1), (64, 4, 1), (64, 1, 2), (128, 8, 1), (128, 16, 1), (128, 2, 2)):
        body += [Conv2d(filters, 3, padding=dilation, groups=groups, dilation=dilation), ReLU()]
    return [*body, GlobalAvgPool2d(), Linear(10), SoftmaxCrossEntropy()]


def narrowing() -> list[Any]:
    """Linear layers of 4,096, 1,024 and 256 values."""
    return [Flatten(), *(layer for values in (4096, 1024, 256) for layer in (Linear(values), ReLU())), Linear(10), SoftmaxCrossEntropy()]


STUDIED = {
    made.name: made
    for made in (
        Network("inverted", "MobileNetV2's blocks", inverted, (3, 32, 32), 256),
        Network("dense", "DenseNet's blocks, growth 24", dense, (3, 32, 32), 256),
        Network("lenet", "LeNet", lenet, (1, 28, 28), 256),
        Network("grouped", "ResNeXt's blocks, 32 groups", grouped, (3, 32, 32), 256),
        Network("wide-relu", "linear layers of 4,096, ReLU", lambda: wide(ReLU), (1, 32, 32), 1024),
        Network("wide-sigmoid", "linear layers of 4,096, Sigmoid", lambda: wide(Sigmoid), (1, 32, 32), 1024),
        Network("halving", "24 to 136 filters", halving, (3, 32, 32), 128),
        Network("large-windows", "ConvNeXt's blocks, 7×7 depthwise", large_windows, (3, 64, 64), 128),
        Network("few-groups", "2 to 16 groups, dilation", few_groups, (3, 16, 16), 256),
        *(Network(f"rows-{rows}", f"linear layers of {rows} rows", narrowing, (1, 32, 32), rows) for rows in (1, 4, 8, 16)),
    )
}
"""Networks of the study alone, by name."""
ALL = NETWORKS | STUDIED
