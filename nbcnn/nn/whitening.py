"""This module defines layers whose values are fitted to training images before any training (`nbcnn.dictionary`): whitening of images and of patches.

In training they come first: `prepares` says that no gradient goes through a layer, and that an autoencoder gives back what the layer makes of the
input, not the input itself. `Root` is element-wise, for features of very different size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.nn.activations import Elementwise
from nbcnn.nn.graphs import Layer
from nbcnn.nn.layer import Built, Param, constant, counts, images, known, unsized
from nbcnn.nn.optim import FROZEN, Factor
from nbcnn.plan.graph import Buf, Named, ShapeError, Tape, named
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, numel

LARGEST = 1e30
"""What is added to variances must leave room in float32 for sums over a patch."""


def _central(size: int) -> Any:
    """First filters (C, C, size, size): every channel is itself."""

    def first(random: Any, shape: tuple[int, ...]) -> np.ndarray:
        made = np.zeros(shape)
        made[range(shape[0]), range(shape[0]), size // 2, size // 2] = 1
        return made

    return first


def _prepares(tape: Tape, x: Buf, y: Buf, scope: str) -> Built:
    """What `build` returns of a layer in front, which makes `y` of the input `x` and is not trained."""
    before = [name for name in tape.asked if not name.startswith(f"{scope}.")]
    if not before:
        tape.prepared = y

    def backward(dy: Buf) -> Buf:
        if before:
            raise ShapeError(
                f"{scope} is not trained and passes no gradient on, which {before[0]} before it would need: it must stand in front of it"
            )
        # Nobody reads the gradient of an input; without a step that writes it, it does not exist.
        return tape.temp(f"{scope}.dx", x.shape)

    return y, backward


@dataclass(frozen=True)
class Whiten(Layer):
    """Images of normalised contrast, without the mean image, decorrelated by a convolution that is fitted to training images (ZCA).

    Shapes: (N, C, H, W) → (N, C, H, W), float32, with standard deviation 1 once fitted. It must be the first layer; an autoencoder's target is then
    the whitened image. State: mean (C, H, W), filters (C, C, size, size), fitted (1,): the number of images it was fitted to, 0 before. Training fits
    it, unless it is fitted already (`nbcnn.dictionary.fit`); until then the contrast is normalised and nothing else.

    size       side of the filters in pixels, odd. eps  times the mean eigenvalue is added to the eigenvalues of the patches' covariance: 0.01; 0.1
               is milder. contrast  is added to an image's variance, in squares of the input's unit.
    Raises UsageError for numbers out of their range, and, when the network is built, ShapeError for images that the filter cannot be reflected in.
    Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009; formulas: `nbcnn.ops.images.whiten`.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Whiten()], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 3, 8, 8)
    """

    size: int = 5
    _: KW_ONLY
    eps: float = 0.01
    contrast: float = 1e-3
    image: tuple[int, ...] | None = unsized()
    kind: ClassVar[str] = "whiten"
    prepares: ClassVar[bool] = True
    size_of_input: ClassVar[str] = "image"

    def __post_init__(self) -> None:
        counts(self, "size")
        if not self.size % 2:
            raise UsageError(f"Whiten needs an odd size, got {self.size}")
        if not 0 < self.eps < LARGEST or not 0 < self.contrast < LARGEST:
            raise UsageError(f"Whiten needs eps and contrast above 0 and below {LARGEST:g}, got {self.eps} and {self.contrast}")

    def params(self) -> dict[str, Param]:
        return {}

    def state(self) -> dict[str, Param]:
        if self.image is None:
            raise UsageError("Whiten does not know its image yet: build the network for a shape first")
        filters = (self.image[0], self.image[0], self.size, self.size)
        zero = constant(0.0)
        return {
            "mean": Param(self.image, 1, first=zero),
            "filters": Param(filters, 1, first=_central(self.size)),
            "fitted": Param((1,), 1, first=zero),
        }

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape = images(x, scope)
        if shape[1:] != self.image:
            raise ShapeError(f"{scope} takes images {self.image}, got {x.shape}")
        if min(shape[2:]) <= self.size // 2:
            raise ShapeError(
                f"{scope}: an image of {shape[2]}×{shape[3]} cannot be reflected by the {self.size // 2} pixels that a filter reaches out"
            )
        flat = [tape.state(scope, name, self.state()[name].shape) for name in ("mean", "filters")]
        y = tape.temp(f"{scope}.y", x.shape)
        ins = [x, *(buf.reshaped((numel(buf.shape),)) for buf in flat)]
        tape.emit(Op("whiten"), ins, [y], scope, size=self.size, contrast=float(self.contrast))
        return _prepares(tape, x, y, scope)


@dataclass(frozen=True)
class WhitenPatches(Layer):
    """Every patch of size × size pixels as a vector: of normalised contrast, whitened, of length 1.

    Shapes: (N, C, H, W) → (N, D, H − size + 1, W − size + 1), float32, with D = C·size² values of a patch. What follows as a 1×1 convolution
    compares them with atoms. Parameters, fitted and not trained (`nbcnn.dictionary`): weight (D, C, size, size) and bias (D,); formulas:
    `nbcnn.ops.images.patches`.

    size      side of a patch in pixels. norm  is added to the variance of a patch, in squares of the input's unit (of bytes as fractions of 255).
    eps       times the mean eigenvalue is added to the eigenvalues of the patches' covariance.
    channels  C, None: the input's.
    Raises UsageError for numbers out of their range, and, when the network is built, ShapeError for images smaller than a patch, and in training.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.WhitenPatches(6)], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 108, 3, 3)
    """

    size: int = 6
    _: KW_ONLY
    norm: float = 10 / 255**2
    eps: float = 0.1
    channels: int | None = unsized()
    kind: ClassVar[str] = "patches"
    prepares: ClassVar[bool] = True
    size_of_input: ClassVar[str] = "channels"

    def __post_init__(self) -> None:
        counts(self, "size", "channels")
        if self.size == 1 and self.channels == 1:
            raise UsageError("WhitenPatches needs more than one value in a patch: a larger size")
        if not 0 < self.eps < LARGEST or not 0 < self.norm < LARGEST:
            raise UsageError(f"WhitenPatches needs eps and norm above 0 and below {LARGEST:g}, got {self.eps} and {self.norm}")

    @property
    def values(self) -> int:
        """D, the values of a patch."""
        return known(self) * self.size**2

    def params(self) -> dict[str, Param]:
        return {
            "weight": Param((self.values, known(self), self.size, self.size), self.values),
            "bias": Param((self.values,), self.values, bias=True),
        }

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, h, w = images(x, scope)
        if c != self.channels:
            raise ShapeError(f"{scope} takes {self.channels} channels, got {c} (its input is {x.shape})")
        try:
            shape = ConvShape(n, c, h, w, self.values, self.size, self.size, 1, 0)
        except ValueError as error:
            raise ShapeError(f"{scope}: {error} (its input is {x.shape})") from None
        params = self.params()
        weight, bias = (tape.param(scope, name, params[name].shape) for name in ("weight", "bias"))
        u, y = tape.temp(f"{scope}.u", shape.y_shape), tape.temp(f"{scope}.y", shape.y_shape)
        tape.emit(Op("conv", "fprop"), [x, weight], [u], scope, stride=1, pad=0)
        tape.emit(Op("unit_patches"), [x, u, bias], [y], scope, size=self.size, norm=float(self.norm))
        return _prepares(tape, x, y, scope)


@dataclass(frozen=True)
class Root(Elementwise):
    """x / √(|x| + eps), element by element: sign(x)·√|x| with a slope that stays below 1/√eps.

    Shapes: any shape, float32, stays as it is. Raises UsageError unless `eps` is positive and finite.

    Example:
        >>> import nbcnn
        >>> nbcnn.Root()
        Root(eps=0.0001)
    """

    eps: float = 1e-4
    kind: ClassVar[str] = "root"

    def __post_init__(self) -> None:
        if not 0 < self.eps < math.inf:
            raise UsageError(f"Root needs a positive, finite eps, got {self.eps}")

    def attrs(self) -> dict[str, Any]:
        return {"offset": self.eps}


def prepared(layers: Sequence[Named]) -> tuple[list[Named], list[Named]]:
    """(the layers in front that prepare the input, the others): an autoencoder gives back what the first ones make of its input."""
    first = next((at for at, (_, layer) in enumerate(layers) if not getattr(layer, "prepares", False)), len(layers))
    return list(layers[:first]), list(layers[first:])


def fixed(layers: Sequence[Any]) -> dict[str, Factor]:
    """The factors of the parameters of layers that prepare the input, which no training updates, by the parameters' names."""
    return {f"{name}.{inner}": FROZEN for name, layer in named(layers) if getattr(layer, "prepares", False) for inner in layer.params()}


def undone(outputs: np.ndarray, seen: np.ndarray, layer: Whiten, mean: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """Whitened images (n, C, H, W), such as a reconstruction, as values of pixels, float32, to be looked at in colours.

    `seen` (n, C, H, W) are the images that were whitened: the mean and the contrast of each come from there, because whitening takes them out.
    `mean` (C, H, W) and `filters` are the layer's state. Exact but for rounding: an image that is reflected at its borders, repeated, is even, and so
    is what filters that are their own mirror images make of it; so it is divided by their transfer function, a C×C matrix for each frequency.
    """
    n, channels, height, width = outputs.shape
    centre = layer.size // 2
    extent = (max(2 * height - 2, 1), max(2 * width - 2, 1))
    taps = np.zeros((channels, channels, *extent))
    for r in range(layer.size):
        for s in range(layer.size):
            taps[:, :, (centre - r) % extent[0], (centre - s) % extent[1]] += filters[:, :, r, s]
    transfer = np.fft.rfft2(taps).transpose(2, 3, 0, 1)
    even = np.pad(outputs.astype(np.float64), ((0, 0), (0, 0), (0, extent[0] - height), (0, extent[1] - width)), mode="reflect")
    solved = np.linalg.solve(transfer, np.fft.rfft2(even).transpose(2, 3, 1, 0)).transpose(3, 2, 0, 1)
    g = np.fft.irfft2(solved, s=extent)[:, :, :height, :width] + mean
    flat = seen.reshape(n, -1).astype(np.float64)
    middle, spread = flat.mean(1), np.sqrt(flat.var(1) + layer.contrast)
    return np.asarray(g * spread[:, None, None, None] + middle[:, None, None, None], np.float32)
