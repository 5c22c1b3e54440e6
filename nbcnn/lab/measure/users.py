"""This module names the users of kernels, `USERS`: networks that are trained, layers at shapes of their own, and the products of the classifiers.

They are the ready models, what `train.py` does with them on demand, a small network for each public layer, loss and update that no ready model has,
and what is launched without a network. `nbcnn.lab.measure.launched` plans them all. Forcing an engine (`--engine`) leaves choices out and adds
none, so it is no user of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

from nbcnn.nn import activations, corruption, joins, norms, resampling, series_layers, whitening
from nbcnn.nn import layers as plain_layers
from nbcnn.nn.activations import GELU, Elementwise, HardSwish, PReLU, ReLU, ReLU6, Sigmoid, Swish
from nbcnn.nn.graphs import Graph, Input
from nbcnn.nn.joins import Concat, Losses
from nbcnn.nn.layer import sized
from nbcnn.nn.layers import Conv2d, ConvTranspose2d, Flatten, Linear, Residual
from nbcnn.nn.losses import L1, MSE, BCEWithLogits, ForecastMSE, Huber, SoftmaxCrossEntropy
from nbcnn.nn.maps import LinearMap, Permute
from nbcnn.nn.models import MODELS, s4convd
from nbcnn.nn.norms import BatchNorm2d, EvoNormB0, EvoNormS0, GroupNorm
from nbcnn.nn.optim import SGD, Adam, AdamW
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d, Resize, Upsample2d
from nbcnn.nn.series_layers import DepthwiseConv1d, LastStep, PointwiseConv1d
from nbcnn.ops.series.dwconv1d import VARIANTS as DWCONV
from nbcnn.plan.graph import Buf, Tape, named, trace
from nbcnn.plan.names import FITTED

BATCHES = (256, 1, 4096)
MOMENTUM = SGD()
COLOUR, DIGITS, HOURS, SMALL, LARGE = (3, 32, 32), (1, 28, 28), (4, 48), (3, 16, 16), (3, 256, 256)


@dataclass(frozen=True)
class User:
    """A network and how it is run.

    name, why  what the page calls it, and why it stands here.
    layers     makes the network, which ends in a loss; None where products of matrices are launched beside networks.
    shape      of an input: (C, H, W), or (F, L) for series.
    batches    images or series of a step.
    ranks      processes that train together and share the statistics of a batch.
    gathered   False: the caller hands in floats of its own, as to `Net.gradients`, instead of a resident data set.
    trained    False: it is only applied.
    dwconv     the variant of depthwise convolution that is asked for.
    ema        the decay of an average of the weights, 0 without one. parts: of a step's batch, whose gradients are added up.
    """

    name: str
    why: str
    layers: Callable[[], Sequence[Any]] | None = None
    shape: tuple[int, ...] = COLOUR
    batches: tuple[int, ...] = BATCHES[:1]
    optimizer: Any = MOMENTUM
    ranks: int = 1
    gathered: bool = True
    trained: bool = True
    dwconv: str = "auto"
    ema: float = 0.0
    parts: int = 1


def _model(name: str) -> User:
    shape = DIGITS if "mnist" in name else COLOUR
    return User(name, "ready-made", lambda: MODELS[name](*shape), shape, BATCHES, Adam() if "mnist" in name else MOMENTUM)


_LARGE = [name for name in MODELS if name not in ("small-autoencoder", "resnet18", "mobilenet", "unet") and name not in FITTED]

READY = (*map(_model, _LARGE), User("s4convd", "ready-made", s4convd, HOURS, BATCHES, Adam(clip_norm=0.5)))
"""The ready models with the update of their recipe, but for the small autoencoder, whose layers are the large one's, and the three graphs, whose
layers stand below at sizes that are planned in a second."""


def _classifier(*body: Any) -> Callable[[], list[Any]]:
    """`body` with a linear layer behind it, for ten classes of SMALL images."""

    def made() -> list[Any]:
        y, _ = trace(Tape(training=True), named(sized(body, SMALL)), Buf("x", (1, *SMALL)))
        flat = [Flatten()] if len(y.shape) == 4 else []
        return [*body, *flat, Linear(10), SoftmaxCrossEntropy()]

    return made


def _behind_conv(*layers: Any) -> Callable[[], list[Any]]:
    return _classifier(Conv2d(16, 3, padding=1), *layers)


def _between_convs(layer: Any) -> Callable[[], list[Any]]:
    return lambda: [Conv2d(16, 3, padding=1), layer, Conv2d(3, 3, padding=1), MSE()]


def _forecast(*body: Any) -> Callable[[], list[Any]]:
    return lambda: [*body, LastStep(), Linear(1), ForecastMSE()]


def _graph() -> Graph:
    """Two inputs, a shared layer, a sum with its ReLU, a product, a concatenation, a factor for each of its channels, and two outputs."""
    a, b = Input((3, 16, 16)), Input((3, 16, 16))
    conv = Conv2d(16, 3, padding=1)
    p, q = conv(a), conv(b)
    r = Concat()([ReLU()(p + q), p * Sigmoid()(q)])
    r = r * Sigmoid()(GlobalAvgPool2d()(r))
    first, second = (Linear(10)(Flatten()(MaxPool2d(2)(Conv2d(16, 3, padding=1)(r)))) for _ in range(2))
    return Graph.of([a, b], [first, second], Losses((SoftmaxCrossEntropy(), SoftmaxCrossEntropy())))


def _upwards() -> Graph:
    """A value beside what was halved and doubled again, as a U-Net joins them."""
    x = Input(SMALL)
    y = Conv2d(16, 3, padding=1)(x)
    joined = Concat()([y, ConvTranspose2d(8, 2, stride=2)(MaxPool2d(2)(y))])
    return Graph.of([x], [Linear(10)(Flatten()(joined))], SoftmaxCrossEntropy())


def _kinds(layers: Sequence[Any]) -> Iterator[type]:
    """The classes of layers, and of those inside them."""
    for layer in layers:
        yield type(layer)
        yield from _kinds(getattr(layer, "body", ()))


def _others() -> list[User]:
    """A network for every public layer that no ready model has and that wants no sizes: activations, pooling."""
    ready = {kind for user in READY if user.layers for kind in _kinds(user.layers())}
    return [
        User(name, "layer", _behind_conv(layer()), SMALL)
        for module in (plain_layers, norms, series_layers, activations, resampling, whitening, corruption, joins)
        for name, layer in vars(module).items()
        if isinstance(layer, type) and layer.__module__ == module.__name__ and hasattr(layer, "build") and not hasattr(layer, "needs_labels")
        if hasattr(layer, "kind")  # what several layers inherit from has none
        if not name.startswith("_") and layer not in ready and not hasattr(layer, "prepares") and not getattr(layer, "joins", False)
        if all(p.default is not Parameter.empty for p in signature(layer).parameters.values())
    ]


def _trained_for(loss: Any, optimizer: Any = MOMENTUM, ema: float = 0.0) -> User:
    """A small network trained for `loss`; a loss of classes is that of a classifier, another one compares images."""
    body = [Conv2d(16, 3, padding=1), *([Flatten(), Linear(10)] if loss.needs_labels else [Conv2d(3, 3, padding=1)]), loss]
    return User(type(loss).__name__, "loss", lambda: body, SMALL, optimizer=optimizer, ema=ema)


LOSSES_AND_UPDATES = (
    _trained_for(L1()),
    _trained_for(Huber(), SGD(momentum=0.9, nesterov=True)),
    _trained_for(BCEWithLogits(), AdamW(clip_norm=1.0), ema=0.999),
    replace(_trained_for(SoftmaxCrossEntropy(label_smoothing=0.1)), name="SoftmaxCrossEntropy (smoothed)", parts=3),
)
"""Networks for the losses, optimizers and averages of weights that no ready model has; `parts`: gradients are added up."""


def _features() -> list[Any]:
    layers = MODELS["autoencoder"](*COLOUR)
    return [whitening.Whiten(), corruption.Noise(), corruption.MaskSquares(), *layers[:6], corruption.KSparse(), *layers[6:]]


def _dictionary(name: str) -> list[Any]:
    return [*MODELS[name](*COLOUR), Flatten(), Linear(10), SoftmaxCrossEntropy()]


def _between_norms() -> list[Any]:
    """Norms of many pixels, with what may stand behind them, each before a convolution, which makes the sums of their gradients; one of stride 2."""
    norms = [[BatchNorm2d(), *behind, Conv2d(64, 3, padding=1)] for behind in ([], [ReLU()], [ReLU6()], [HardSwish()])]
    block = [Residual(Conv2d(64, 3, padding=1), BatchNorm2d()), ReLU(), Conv2d(64, 3, stride=2, padding=1)]
    return [Conv2d(64, 3, padding=1), *(layer for each in norms for layer in each), *block, Flatten(), Linear(10), SoftmaxCrossEntropy()]


def _activations() -> list[Any]:
    """Every activation."""
    layers = [kind() for kind in vars(activations).values() if isinstance(kind, type) and issubclass(kind, Elementwise) and kind is not Elementwise]
    return [*layers, GELU(approximate="tanh"), whitening.Root()]


def _normed() -> list[Any]:
    """Every activation behind a norm behind a convolution."""
    made = [part for layer in _activations() for part in (Conv2d(16, 3, padding=1), BatchNorm2d(), layer)]
    return [*made, Flatten(), Linear(10), SoftmaxCrossEntropy()]


def _doubled() -> list[Any]:
    """Every activation behind a convolution of a doubled image."""
    made = [part for layer in _activations() for part in (Upsample2d(2), Conv2d(16, 3, padding=1), layer, MaxPool2d(2))]
    return [Conv2d(16, 3, padding=1), *made, Flatten(), Linear(10), SoftmaxCrossEntropy()]


_GROUPED = (Conv2d(16, 3, padding=1, groups=2), Conv2d(16, 3, padding=1, stride=(1, 2), groups=2))
USERS = (
    *READY,
    User("s4convd (rmsle)", "ready-made, trained for its other loss", lambda: s4convd(loss="rmsle"), HOURS),
    *(User(f"s4convd --dwconv {name}", "teaching", s4convd, HOURS, dwconv=name) for name in DWCONV if name != "best"),
    User("mnist-cnn-b0 --sync-stats", "several ranks, each with a part of the batch", lambda: MODELS["mnist-cnn-b0"](*DIGITS), DIGITS, ranks=2),
    User("Net.gradients", "a network on the caller's own floats", lambda: MODELS["autoencoder"](*COLOUR), gathered=False),
    *_others(),
    *LOSSES_AND_UPDATES,
    User("PReLU (channels)", "layer, a slope for every channel", _behind_conv(PReLU(16)), SMALL),
    User("GELU (tanh)", "layer", _behind_conv(GELU(approximate="tanh")), SMALL),
    User("MaxPool2d, AvgPool2d (padded)", "layers", _behind_conv(MaxPool2d(3, 2, padding=1), AvgPool2d((2, 3), (2, 1))), SMALL),
    User("Resize (bilinear, per axis)", "layers", _behind_conv(Resize(mode="bilinear"), Resize((1, 2))), SMALL),
    *(
        User(f"Linear + {type(layer).__name__}", "layers that become one op", _classifier(Flatten(), Linear(64), layer), SMALL)
        for layer in (Sigmoid(), Swish(), GELU())
    ),
    User("Upsample2d + Conv2d", "layers that become one op", _behind_conv(Upsample2d(2), Conv2d(16, 3, padding=1)), SMALL),
    User("Upsample2d + Conv2d + activations", "layers that become one op", _doubled, SMALL),
    User("MaxPool2d + AvgPool2d", "layers, windows that overlap", _behind_conv(MaxPool2d(3, 2), AvgPool2d(3, 2)), SMALL),
    User("Conv2d + BatchNorm2d + activations", "layers that become one op", _normed, SMALL),
    User(
        "BatchNorm2d (few pixels)",
        "layer, images that clusters of blocks hold",
        _classifier(Conv2d(128, 3, padding=1), MaxPool2d(4), BatchNorm2d(), ReLU()),
        SMALL,
    ),
    User("BatchNorm2d between Conv2d", "layers, norms whose gradients the convolutions behind them begin", _between_norms, COLOUR, (1024,)),
    User(
        "Residual + ReLU",
        "layers that become one op, a BatchNorm2d at the end of the residual's body",
        _behind_conv(Residual(Conv2d(16, 3, padding=1), BatchNorm2d()), ReLU()),
        SMALL,
    ),
    User(
        "Residual between ReLUs",
        "layers whose gradients are added and masked in one pass",
        _behind_conv(ReLU(), Residual(Conv2d(16, 3, padding=1)), ReLU()),
        SMALL,
    ),
    User(
        "Residual between ReLUs (64 channels)",
        "layers whose gradients the convolution adds and masks",
        lambda: [Conv2d(64, 3, padding=1), ReLU(), Residual(Conv2d(64, 3, padding=1)), ReLU(), Flatten(), Linear(10), SoftmaxCrossEntropy()],
    ),
    User("Concat behind ConvTranspose2d", "layers of which one copy adds a bias", _upwards, SMALL),
    User("BatchNorm2d --sync-stats", "several ranks, each with a part of the batch", _behind_conv(BatchNorm2d()), SMALL, ranks=2),
    User("GroupNorm", "layer", _behind_conv(GroupNorm(4)), SMALL),
    User("EvoNormS0 (large)", "layer, images that no block holds", _between_convs(EvoNormS0(groups=8)), LARGE),
    User("EvoNormB0 (large)", "layer, images that no block holds", _between_convs(EvoNormB0()), LARGE),
    User(
        "DepthwiseConv1d (long)",
        "layer, series of a thousand hours",
        _forecast(PointwiseConv1d(64), DepthwiseConv1d(33)),
        (4, 1024),
    ),
    User("autoencoder --recipe features", "ready-made, on whitened images, spoiled in every way", _features),
    *(User(name, "ready-made, fitted by k-means", partial(_dictionary, name), trained=False) for name in FITTED),
    User("Conv2d (depthwise)", "layer, one channel per group", _behind_conv(Conv2d(16, 3, padding=1, groups=16)), SMALL),
    User("Conv2d (depthwise, batch 4,096)", "layer, images that are streamed", _behind_conv(Conv2d(16, 3, padding=1, groups=16)), SMALL, (4096,)),
    User("Conv2d (groups)", "layer, several channels per group, and groups with strides that differ", _behind_conv(*_GROUPED), SMALL),
    User("ConvTranspose2d", "layer, doubles height and width", _behind_conv(ConvTranspose2d(8, 2, stride=2)), SMALL),
    User(
        "ConvTranspose2d (groups)",
        "layer, with groups and a stride for each axis",
        _behind_conv(ConvTranspose2d(8, 3, stride=(2, 1), groups=4)),
        SMALL,
    ),
    User(
        "LinearMap, Permute",
        "layers, which imported networks have",
        _behind_conv(LinearMap(3, 16, indices=((0, 1), (2,))), Permute((1, 0, 2))),
        SMALL,
    ),
    User("Graph", "layers that join values; several inputs and outputs", _graph, (2 * 3 * 16 * 16,)),
    User("gemm", "products of matrices, an op of every row; of kernel matrices only cudacore's so far"),
    User("classify", "support vector machines, kernel ridge"),
    User("k-means", "dictionaries and first weights"),
    User("ladder --cuda-cores", "teaching: one convolution and one sum in eight short kernels of float32; nothing trains by them"),
    User("ladder --hopper", "teaching: one convolution in six kernels on the tensors of tensorcore bf16; nothing trains by them"),
)
