"""This module defines the networks that come with nbcnn, as lists of layers or as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.activations import GELU, ReLU, ReLU6
from nbcnn.nn.corruption import training_only, without
from nbcnn.nn.graphs import Graph, Input, Value
from nbcnn.nn.joins import Concat
from nbcnn.nn.layers import Conv2d, ConvTranspose2d, Flatten, Linear, Residual
from nbcnn.nn.losses import MSE, RMSLE, ForecastMSE, SoftmaxCrossEntropy
from nbcnn.nn.norms import BatchNorm2d, EvoNormB0, EvoNormS0
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d, Upsample2d
from nbcnn.nn.series_layers import GLU, LastStep, PointwiseConv1d, StateSpaceConv1d
from nbcnn.nn.whitening import Root, WhitenPatches
from nbcnn.plan.graph import named


def autoencoder(channels: int = 3, *, wide: int = 256, code: int = 128) -> list[Any]:
    """The convolutional autoencoder: channels→wide→code | code→wide→channels, 3×3 convolutions, 2×2 pooling/upsampling.

    Shapes: (N, channels, H, W) → (N, channels, H, W), float32; the code is (N, code, H/4, W/4), so H and W are multiples of 4. `wide` and `code`
    are numbers of filters. With the defaults: 751,875 parameters; images 3×32×32 become a code of 128×8×8 = 8,192 features. Raises UsageError for
    numbers below 1.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model(nbcnn.autoencoder(), mode="cpu", input_shape=(3, 32, 32))
        <Model [Conv2d, ..., MSE], 3×32×32, 751,875 parameters, cpu fp32>
    """
    return [
        Conv2d(wide, 3, padding=1),
        ReLU(),
        MaxPool2d(2),
        Conv2d(code, 3, padding=1),
        ReLU(),
        MaxPool2d(2),
        Conv2d(code, 3, padding=1),
        ReLU(),
        Upsample2d(2),
        Conv2d(wide, 3, padding=1),
        ReLU(),
        Upsample2d(2),
        Conv2d(channels, 3, padding=1),
        MSE(),
    ]


def mnist_cnn(classes: int = 10, *, norm: str = "s0") -> list[Any]:
    """A small classifier: two 3×3 convolutions (32 and 64 filters), each normalised by EvoNorm and pooled 2×2, then 128 units.

    Shapes: (N, C, H, W) → logits (N, classes), float32. `norm`: "s0" (groups of two channels) or "b0". With the defaults, on images 1×28×28, 421,930
    parameters, 288 of them EvoNorm's. Raises UsageError for a number of classes below 1.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model(nbcnn.mnist_cnn(), mode="cpu", input_shape=(1, 28, 28))
        <Model [Conv2d, ..., SoftmaxCrossEntropy], 1×28×28, 421,930 parameters, cpu fp32>
    """

    def evonorm(filters: int) -> EvoNormS0 | EvoNormB0:
        return EvoNormS0(groups=filters // 2) if norm == "s0" else EvoNormB0()

    return [
        Conv2d(32, 3, padding=1),
        evonorm(32),
        MaxPool2d(2),
        Conv2d(64, 3, padding=1),
        evonorm(64),
        MaxPool2d(2),
        Flatten(),
        Linear(128),
        ReLU(),
        Linear(classes),
        SoftmaxCrossEntropy(),
    ]


def s4convd(
    channels: int = 4,
    *,
    wide: int = 128,
    blocks: int = 4,
    taps: int = 48,
    states: int = 32,
    kernel_init: str = "s4d-lin",
    loss: str = "log-mse",
    unit: float = 1.0,
) -> list[Any]:
    """S4ConvD: channels→wide | blocks of (state space convolution, GELU, 1×1 convolution, GLU) with residuals | last hour→1.

    Shapes: (N, channels, L) → (N, 1), float32; L in hours. `taps` and `states` are those of `StateSpaceConv1d`, `kernel_init` its init.
    With the defaults, on series 4×48: 199,425 parameters. loss: "log-mse", for outputs and targets that are logarithms, or
    "rmsle", for readings predicted in multiples of `unit`. After github.com/MilanShao/S4ConvD (arXiv:2502.21035), without its
    dropout of 0.01. Raises ValueError for another loss or kernel_init.

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net(nbcnn.s4convd(), (4, 48), mode="cpu").params.count
        199425
    """
    if loss not in LOSSES:
        raise ValueError(f"no loss {quoted(loss)}; one of {', '.join(LOSSES)}")
    block = (StateSpaceConv1d(taps, states=states, init=kernel_init), GELU(), PointwiseConv1d(2 * wide), GLU())
    ends = [LastStep(), Linear(1), RMSLE(unit) if loss == "rmsle" else ForecastMSE()]
    return [PointwiseConv1d(wide, in_channels=channels), *(Residual(*block) for _ in range(blocks)), *ends]


def patches(height: int = 32, width: int = 32, *, atoms: int = 1792, size: int = 6, cells: int = 3) -> list[Any]:
    """An encoder of one dictionary: whitened patches, their products with `atoms` atoms above a threshold, means over cells × cells parts of it.

    Shapes: (N, C, height, width) → (N, atoms, cells, cells), float32; patches have size × size pixels. It has no loss: `fit_encoder` of
    `nbcnn.dictionary.fit`, and `nbcnn train --model patches`, fit it to images without labels. Raises UsageError for images that are too
    small. Source: A. Coates, H. Lee, A. Y. Ng, AISTATS 2011.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model(nbcnn.patches(), mode="cpu", input_shape=(3, 32, 32)).net.output_shape
        (1792, 3, 3)
    """
    least = min(height, width) - size + 1
    if least < cells:
        raise UsageError(f"images of {height}×{width} are too small for {cells}×{cells} parts of patches of {size}×{size}")
    return [WhitenPatches(size), Conv2d(atoms, 1), ReLU(), _parts(least, cells)]


def _parts(extent: int, cells: int) -> AvgPool2d:
    """Means over cells × cells windows, as disjoint as can be, that cover the whole of `extent` positions."""
    stride = extent // cells
    return AvgPool2d(extent - (cells - 1) * stride, stride)


def patches2(height: int = 32, width: int = 32, *, atoms: tuple[int, int] = (1024, 1792), projected: int = 96) -> list[Any]:
    """An encoder of two dictionaries: the first one's products, as a fine grid of means, are the image that the second one has patches of.

    Shapes: (N, C, height, width) → (N, atoms[1], 3, 3), float32, of images of 32×32. `projected` is the number of principal components of the first
    dictionary's means. It has no loss: `nbcnn.dictionary.fit.fit_encoder` fits it. Raises UsageError for images that are too small. Source:
    A. Coates, A. Y. Ng, "Selecting receptive fields in deep networks", NIPS 2011.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model(nbcnn.patches2(atoms=(8, 16), projected=4), mode="cpu", input_shape=(3, 32, 32)).net.output_shape
        (16, 3, 3)
    """
    fine = (min(height, width) - 8) // 2 - 1  # positions of a patch of 3×3 means of 3×3 products of patches of 6×6 pixels
    if fine < 3:
        raise UsageError(f"images of {height}×{width} are too small for two layers of patches: they need 16×16 pixels")
    first = [WhitenPatches(6), Conv2d(atoms[0], 1), ReLU(), AvgPool2d(3, 2), Root()]
    second = [Conv2d(projected, 1), WhitenPatches(3, norm=1e-6), Conv2d(atoms[1], 1), ReLU(), _parts(fine, 3)]
    return [*first, *second]


def _normalised(x: Value, filters: int, size: int = 3, stride: int = 1, groups: int = 1) -> Value:
    """A convolution that keeps height and width where its stride is 1, and a BatchNorm2d, whose bias stands in for the convolution's."""
    return BatchNorm2d()(Conv2d(filters, size, stride=stride, padding=size // 2, bias=False, groups=groups)(x))


def resnet18(channels: int = 3, height: int = 32, width: int = 32, *, classes: int = 10, filters: int = 64) -> Graph:
    """ResNet-18 for small images: a first convolution of 3×3 and stride 1 without pooling, then four stages of two residual blocks.

    Shapes: (N, channels, height, width) → logits (N, classes), float32; the stages have filters, 2·, 4· and 8·filters channels, the last three halve
    height and width, and the mean of every channel, 8·filters features, goes into the classifier. A block is
    relu(shortcut(x) + bn(conv(relu(bn(conv(x)))))); where it halves the image its shortcut is a 1×1 convolution of stride 2 with its BatchNorm2d
    (option B). With the defaults: 11,173,962 parameters, 0.56·10⁹ multiplications per image. Raises UsageError for numbers below 1.

    Source: K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, with the first layer that is usual on
    CIFAR-10 (github.com/kuangliu/pytorch-cifar), where that of ImageNet would leave 8×8 pixels.

    Example:
        >>> import nbcnn
        >>> nbcnn.resnet18(classes=100, filters=8).shapes()[-1]
        (100,)
    """

    def block(x: Value, wide: int, stride: int) -> Value:
        y = ReLU()(_normalised(x, wide, stride=stride))
        y = _normalised(y, wide)
        return ReLU()(y + (x if stride == 1 and x.shape[0] == wide else _normalised(x, wide, size=1, stride=stride)))

    x = Input((channels, height, width))
    y = ReLU()(_normalised(x, filters))
    for stage in range(4):
        y = block(y, filters << stage, stride=2 if stage else 1)
        y = block(y, filters << stage, stride=1)
    return Graph.of(x, Linear(classes)(GlobalAvgPool2d()(y)), SoftmaxCrossEntropy())


MOBILE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
"""Channels behind each block of `mobilenet`, and the stride of its depthwise convolution (table 1 of the paper)."""


def mobilenet(channels: int = 3, height: int = 32, width: int = 32, *, classes: int = 10, multiplier: float = 1.0) -> Graph:
    """MobileNet for small images: a convolution of 3×3 and stride 1, then thirteen blocks of a depthwise and a pointwise convolution.

    Shapes: (N, channels, height, width) → logits (N, classes), float32. A block is relu6(bn(pointwise(relu6(bn(depthwise 3×3(x)))))); four of them
    halve height and width, so images of 32×32 end as 2×2 pixels, and the mean of every channel goes into the classifier. `multiplier` scales the
    numbers of channels, 32 behind the first convolution to 1,024, and rounds them to at least 1. With the defaults: 3,217,226 parameters, 0.05·10⁹
    multiplications per image, a twelfth of `resnet18`'s. Raises UsageError for numbers below 1 and for a multiplier that is not positive.

    Source: A. G. Howard et al., "MobileNets", arXiv:1704.04861, whose first layer has stride 2; ReLU6 as in its published code.

    Example:
        >>> import nbcnn
        >>> nbcnn.mobilenet(multiplier=0.25).shapes()[-1]
        (10,)
    """
    if not 0 < multiplier < 1024:
        raise UsageError(f"mobilenet needs a multiplier above 0, such as 0.25, 0.5 or 1, got {quoted(multiplier)}")

    def scaled(wide: int) -> int:
        return max(1, round(wide * multiplier))

    x = Input((channels, height, width))
    y = ReLU6()(_normalised(x, scaled(32)))
    for wide, stride in MOBILE:
        y = ReLU6()(_normalised(y, y.shape[0], stride=stride, groups=y.shape[0]))
        y = ReLU6()(_normalised(y, scaled(wide), size=1))
    return Graph.of(x, Linear(classes)(GlobalAvgPool2d()(y)), SoftmaxCrossEntropy())


def unet(channels: int = 3, height: int = 32, width: int = 32, *, classes: int | None = None, filters: int = 64, depth: int = 4) -> Graph:
    """U-Net: of every pixel its class, or of a noisy image the clean one.

    Shapes: (N, channels, height, width), multiples of 2^depth → with `classes` logits of every pixel (N, classes, height, width), loss cross-entropy;
    without them images (N, channels, height, width), loss MSE: what the network makes is then added to its input, so it learns the noise (arXiv:
    1608.03981). float32. A stage is two convolutions of 3×3, each with BatchNorm2d and ReLU. The way down has depth + 1 of them, with filters,
    2·filters, … channels, and halves by 2×2 pooling; the way up doubles by a transposed convolution, and each of its stages also reads what the stage
    of its size on the way down made (Concat). A 1×1 convolution ends it. With the defaults: 31,037,763 parameters, 0.85·10⁹ multiplications for an
    image of 32×32. Raises UsageError for numbers below 1 and for images of another height or width.

    Source: O. Ronneberger, P. Fischer, T. Brox, "U-Net", arXiv:1505.04597, with padding, so that no border is lost, and BatchNorm2d.

    Example:
        >>> import nbcnn
        >>> nbcnn.unet(classes=11, filters=8, depth=2).shapes()[-1]
        (11, 32, 32)
    """
    step = 1 << depth
    if depth < 1 or height % step or width % step:
        raise _not_halved("unet", f"{depth} times", step, height, width)

    def stage(x: Value, wide: int) -> Value:
        return ReLU()(_normalised(ReLU()(_normalised(x, wide)), wide))

    x = Input((channels, height, width))
    y, passed = stage(x, filters), []
    for level in range(1, depth + 1):
        passed.append(y)
        y = stage(MaxPool2d(2)(y), filters << level)
    for level in reversed(range(depth)):
        y = stage(Concat()([passed[level], ConvTranspose2d(filters << level, 2, stride=2)(y)]), filters << level)
    if classes is None:
        return Graph.of(x, x + Conv2d(channels, 1)(y), MSE())
    return Graph.of(x, Conv2d(classes, 1)(y), SoftmaxCrossEntropy())


LOSSES = ("log-mse", "rmsle")
"""The losses that `s4convd` can be trained with."""


def _autoencoder(name: str, channels: int, height: int, width: int, **filters: int) -> list[Any]:
    """An autoencoder for images of this size. Raises UsageError where it would make images of another."""
    if height % 4 or width % 4:
        raise _not_halved(name, "twice", 4, height, width)
    return autoencoder(channels, **filters)


def _not_halved(name: str, times: str, step: int, height: int, width: int) -> UsageError:
    return UsageError(f"{name} halves images {times}, so height and width must be multiples of {step}, got {height}×{width}: --size scales them")


MODELS: Mapping[str, Callable[..., Any]] = {
    "autoencoder": lambda channels, height, width, classes=10: _autoencoder("autoencoder", channels, height, width),
    "small-autoencoder": lambda channels, height, width, classes=10: _autoencoder("small-autoencoder", channels, height, width, wide=32, code=4),
    "mnist-cnn": lambda channels, height, width, classes=10: mnist_cnn(classes),
    "mnist-cnn-b0": lambda channels, height, width, classes=10: mnist_cnn(classes, norm="b0"),
    "patches": lambda channels, height, width, classes=10: patches(height, width),
    "patches2": lambda channels, height, width, classes=10: patches2(height, width),
    "resnet18": resnet18,
    "mobilenet": mobilenet,
    "unet": unet,
}
"""Networks of images by the name that `--model` takes: from channels, height and width of the images, and the number of classes, to the layers.
`unet` classifies pixels where it is given a number of classes; `s4convd` takes series.

small-autoencoder is what a CPU trains by default: 4,251 parameters and 74 times fewer products than the autoencoder, and a code of 4×8×8 = 256
features of an image of 32×32. A code so narrow is what training has to earn: four filters drawn at random lose more of what tells the images apart
than four that were trained to restore the image (docs/log/training.md).
"""


CODES: Mapping[str, str] = {"autoencoder": "pool2", "small-autoencoder": "pool2", "mnist-cnn": "pool2", "mnist-cnn-b0": "pool2"} | {
    "patches": "avgpool1",
    "patches2": "avgpool2",
    "resnet18": "globalpool1",
    "mobilenet": "globalpool1",
    "unet": "relu10",
}
"""By the same name, the layer whose output is the model's code."""


def code(model: str) -> str:
    """The layer whose output is the code of a model of `MODELS`. Raises UsageError if that is not known."""
    if model not in CODES:
        raise UsageError(f"which layer of model {quoted(model)} makes a code is not known; it is for {', '.join(CODES)}")
    return CODES[model]


def encoder(layers: Sequence[Any], code: str) -> Any:
    """The part of a network that makes its code: of a list everything up to and including the layer `code`, by its name (conv1, pool2, …), of a
    graph what that layer's output depends on; of both without what is there for training alone.

    Raises UsageError if no layer has that name; the loss is none.
    """
    if isinstance(layers, Graph):
        return layers.cut(code).without(training_only)
    body = [name for name, layer in named(layers) if not hasattr(layer, "needs_labels")]
    if code not in body:
        raise UsageError(f"no layer {quoted(code)} whose output could be the code; the layers are {', '.join(body)}")
    return without(list(layers[: body.index(code) + 1]))
