"""This module defines the networks of `bench nets`: common kinds of convolutional networks, for most of which no kernel was tuned.

Each is a graph or a list of layers with its loss, the shape of its images and the batch at which it is timed. What data it wants follows from its
loss (`examples`), so a network of the user's own runs in the same way. `python -m nbcnn.lab.measure.nets` prints what their training steps are made
of on an H200 (`counts`), without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.check.static import signature_of
from nbcnn.lab.measure.plans import Absent
from nbcnn.lab.measure.roofline import traffic_of
from nbcnn.modes import MODES
from nbcnn.nn.activations import ReLU, Swish
from nbcnn.nn.graphs import Graph, Input
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.nn.models import autoencoder, mobilenet, resnet18, unet
from nbcnn.nn.optim import SGD
from nbcnn.nn.resampling import GlobalAvgPool2d, MaxPool2d
from nbcnn.ops.kernel.traffic import total
from nbcnn.plan.flops import step_bytes
from nbcnn.run.net import Net
from nbcnn.run.planning import Training
from nbcnn.run.program import Program
from nbcnn.run.resident import resident
from nbcnn.run.rows import Choice

Shape = tuple[int, int, int]
PRECISIONS = ("bf16", "tf32", "fp32")


@dataclass(frozen=True)
class Network:
    """A network that is timed: `layers()` makes its layers, loss included, for images of `shape`; `batch` images make a training step."""

    name: str
    what: str
    layers: Callable[[], Any]
    shape: Shape
    batch: int


def vgg() -> list[Any]:
    """Eight 3×3 convolutions of 64 to 512 filters and two linear layers (configuration A of K. Simonyan, A. Zisserman, arXiv:1409.1556)."""
    layers: list[Any] = []
    for filters in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        layers += [Conv2d(filters, 3, padding=1), ReLU()] if filters else [MaxPool2d(2)]
    return [*layers, Flatten(), Linear(512), ReLU(), Linear(10), SoftmaxCrossEntropy()]


def resnet() -> Graph:
    """Three stages of two residual blocks without norms, 64–128–256 filters (K. He and others, arXiv:1512.03385, shortcuts of option B)."""
    x = Input((3, 32, 32))
    y = ReLU()(Conv2d(64, 3, padding=1)(x))
    for filters in (64, 128, 256):
        for _ in range(2):
            stride = 1 if y.shape[0] == filters else 2
            inner = ReLU()(Conv2d(filters, 3, stride=stride, padding=1)(y))
            shortcut = y if stride == 1 else Conv2d(filters, 1, stride=stride)(y)
            y = ReLU()(Conv2d(filters, 3, padding=1)(inner) + shortcut)
    return Graph.of(x, Linear(10)(GlobalAvgPool2d()(y)), SoftmaxCrossEntropy())


def odd() -> list[Any]:
    """5×5 windows, strides of 2, 96 and 160 channels on 28×28 pixels: sizes that no tile of a power of two divides."""
    sizes = ((96, 1), (96, 2), (160, 1), (160, 2))
    body = [layer for filters, stride in sizes for layer in (Conv2d(filters, 5, stride=stride, padding=2), ReLU())]
    return [*body, Flatten(), Linear(10), SoftmaxCrossEntropy()]


NETWORKS = {
    made.name: made
    for made in (
        Network("vgg", "eight 3×3 layers, 64 to 512 filters, two linear layers", vgg, (3, 32, 32), 256),
        Network("resnet", "six residual blocks without norms, 64 to 256 filters", resnet, (3, 32, 32), 256),
        Network("resnet18", "ResNet-18 with a 3×3 stem", resnet18, (3, 32, 32), 512),
        Network("unet", "U-Net, 64 base channels, which makes a noisy image clean", lambda: unet(3, 128, 128), (3, 128, 128), 16),
        Network("mobilenet", "thirteen blocks of a depthwise 3×3 and a pointwise convolution", mobilenet, (3, 32, 32), 512),
        Network("odd", "5×5 windows, strides of 2, 96 and 160 filters", odd, (3, 28, 28), 256),
        Network("autoencoder", "the autoencoder, for which kernels were tuned", autoencoder, (3, 32, 32), 1024),
    )
}
"""The networks of `bench nets` by name."""


def mlp() -> list[Any]:
    """Two linear layers of 256 with Swish: what a small network spends is launches."""
    return [Flatten(), Linear(256), Swish(), Linear(256), Swish()]


SMALL = {"mlp": Network("mlp", "two linear layers of 256 with Swish", mlp, (1, 16, 16), 256)}
"""Networks of `bench predict` alone: they have no loss."""


def examples(net: Net, count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray | None]:
    """`count` images of noise, uint8 (count, C, H, W), and what the loss compares outputs with: classes, values, or None (the images)."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, *net.input_shape), np.uint8)
    if net.takes_classes:
        return images, random.integers(0, net.classes, (count, *net.plane)).astype(np.int32)
    return images, random.random((count, *net.output_shape), np.float32) if net.needs_values else None


# -- their plans, without a GPU


def training(network: Network, precision: str, device: Any, recompute: bool = False) -> Training:
    """The training of a network in mode tensorcore on `device`, planned but not allocated; `recompute` as in `Training`."""
    net = Net(network.layers(), network.shape, choice=Choice(MODES["tensorcore", precision], "as asked"), device=device)
    images, targets = examples(net, network.batch)
    return Training(net, {"train": resident(images, targets, classes=net.takes_classes)}, SGD(), network.batch, steps=1, recompute=recompute)


def planned(network: Network, precision: str) -> Program:
    """The training step of a network in mode tensorcore, as an H200 runs it, bound to host memory: its launches cannot run, but say what would."""
    work = training(network, precision, Absent())
    return work.allocate(work.plans()).programs["train", network.batch]


def counts(program: Program) -> dict[str, int]:
    """What a training step is made of: steps of the plan, launches, different kernels, bytes of the arena, and bytes that the launches move.

    Those are of every launch each different byte once (`Traffic.least`), so that a result which the next launch reads counts twice: the caches may
    hold it or not. Of a step whose launches nobody has worked out its operands count.
    """
    moved = 0
    for item, _ in program.bound:
        launches = traffic_of(program.plan, item)
        moved += step_bytes(item.step) if launches is None else total(launches).least
    kernels = {(id(launch.kernel), signature_of(launch)) for launch in program.launches}
    sizes = {"steps": len(program.bound), "launches": len(program.launches), "kernels": len(kernels)}
    return sizes | {"arena_bytes": program.plan.arena_bytes, "moved_bytes": moved}


def main() -> None:
    """Print the counts of every network and precision, which tests/lab/plans_of_nets.json keeps."""
    made = {name: {precision: counts(planned(network, precision)) for precision in PRECISIONS} for name, network in NETWORKS.items()}
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
