"""This module defines layers that change values in training only: Dropout, and those that make an autoencoder's task harder.

The target stays the clean input. What is drawn at random follows from the seed, the epoch, the image's number and the layer's name, so it is the same
on any number of ranks and after a resume (`nbcnn.ops.images.corrupt`). `nbcnn.nn.models.encoder`, which every extraction of features uses, leaves
these layers out: `training_only` marks them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.nn.layer import Built, NoParams, counts, images
from nbcnn.plan.graph import Buf, Named, Tape
from nbcnn.plan.op import Op


class _TrainingOnly(NoParams):
    training_only: ClassVar[bool] = True


def _stream(scope: str) -> int:
    """A layer's own stream of random numbers, from its name; above the few that the augmentation of images draws from."""
    return zlib.crc32(scope.encode()) | 1 << 31


@dataclass(frozen=True)
class Noise(_TrainingOnly):
    """x + sigma·e in training, e standard normal; x itself in evaluation and prediction (denoising autoencoder: Vincent et al., JMLR 2010).

    Shapes: any shape, float32, stays as it is. `sigma` is in units of the layer's input: 0.5 suits whitened images, whose deviation is 1. On floats
    of the caller's own (`Net.gradients`), which have no number in a data set, nothing is drawn. Raises UsageError unless `sigma` is at least 0 and
    finite.

    Example, a denoising autoencoder:
        >>> import nbcnn
        >>> nbcnn.Model([nbcnn.Noise(0.1), nbcnn.Conv2d(3, 3, padding=1)], "mse", mode="cpu").build((3, 8, 8)).layers[0]
        Noise(sigma=0.1)
    """

    sigma: float = 0.5
    kind: ClassVar[str] = "noise"

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise UsageError(f"Noise needs a finite sigma of at least 0, got {self.sigma}")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if not tape.training or tape.examples is None or not self.sigma:
            return x, lambda dy: dy
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit(Op("noise"), [x, *tape.examples], [y], scope, sigma=float(self.sigma), stream=_stream(scope))
        return y, lambda dy: dy


@dataclass(frozen=True)
class MaskSquares(_TrainingOnly):
    """In training 0 in a random `share` of the squares of size × size pixels, elsewhere x / (1 − share); x itself in evaluation and prediction.

    Shapes: images (N, C, H, W), float32, stay as they are. All channels of a square are masked together; squares start at the corner (0, 0) and are
    cut at the far borders. On floats of the caller's own (`Net.gradients`) nothing is drawn. Raises UsageError unless 0 ≤ share < 1 and `size` is at
    least 1, and ShapeError for what is no image, when the network is built. Source: masked autoencoders, arXiv:2111.06377.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model([nbcnn.MaskSquares(0.5, 4), nbcnn.Conv2d(3, 3, padding=1)], "mse", mode="cpu").build((3, 8, 8)).layers[0]
        MaskSquares(share=0.5, size=4)
    """

    share: float = 0.5
    size: int = 4
    kind: ClassVar[str] = "mask"

    def __post_init__(self) -> None:
        counts(self, "size")
        if not 0 <= self.share < 1:
            raise UsageError(f"MaskSquares needs a share of at least 0 and less than 1, got {self.share}")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        images(x, scope)
        if not tape.training or tape.examples is None or not self.share:
            return x, lambda dy: dy
        examples, attrs = tape.examples, {"share": float(self.share), "size": self.size, "stream": _stream(scope)}
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit(Op("mask_squares"), [x, *examples], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("mask_squares"), [dy, *examples], [dx], scope, **attrs)
            return dx

        return y, backward


@dataclass(frozen=True)
class KSparse(_TrainingOnly):
    """The `k` largest channels of every pixel pass, and their gradients; the others are 0 (k-sparse autoencoder: Makhzani and Frey, arXiv:1312.5663).

    Shapes: images (N, C, H, W), float32, stay as they are. It acts in training and, because the decoder knows nothing but sparse codes, also where
    the whole network is evaluated or reconstructs; features are the code before it. Of equal values all pass or none. Raises UsageError unless `k` is
    a whole number of at least 1, and ShapeError for what is no image, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.KSparse(1)], mode="cpu").build((2, 1, 1)).predict(np.array([[[[51]], [[255]]]], np.uint8)).reshape(-1)
        array([0., 1.], dtype=float32)
    """

    k: int = 16
    kind: ClassVar[str] = "ksparse"

    def __post_init__(self) -> None:
        counts(self, "k")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        images(x, scope)
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit(Op("ksparse", "fprop"), [x], [y], scope, k=self.k)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("ksparse", "dgrad"), [dy, y], [dx], scope, k=self.k)
            return dx

        return y, backward


def training_only(layer: Any) -> bool:
    """Whether a layer is there for training alone."""
    return bool(getattr(layer, "training_only", False))


def without(layers: list[Any]) -> list[Any]:
    """`layers` without those that are there for training alone. The names of the others stay, because a name counts layers of its own kind."""
    return [layer for layer in layers if not training_only(layer)]


@dataclass(frozen=True)
class Dropout(NoParams):
    """In training every element becomes 0 with probability p, else x/(1 − p); in evaluation and prediction x itself (Srivastava et al., 2014).

    Shapes: any shape (N, …), float32, stays as it is. The random numbers belong to the layer, the example and the epoch, so the mask is the same in
    every mode, for every batch size, on any number of ranks and after a resume; it is computed again in the backward pass and never stored. A
    network that is given arrays of the caller's own, as by `gradcheck`, knows no examples and epochs: it leaves the layer out. Raises UsageError
    unless 0 ≤ p < 1.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Dropout(0.5)], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8))
        array([[0., 1.]], dtype=float32)
    """

    p: float = 0.5
    kind: ClassVar[str] = "dropout"

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise UsageError(f"Dropout needs a probability p with 0 ≤ p < 1, got {self.p}")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if not tape.training or tape.examples is None or not self.p:
            return x, lambda dy: dy
        attrs = {"p": self.p, "stream": _stream(scope)}
        examples = tape.examples
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit(Op("dropout", "fprop"), [x, *examples], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("dropout", "dgrad"), [dy, *examples], [dx], scope, **attrs)
            return dx

        return y, backward


def draws(layer: Any) -> bool:
    """Whether a layer draws random numbers by the example's place in a data set, which arrays of the caller's own do not have."""
    return isinstance(layer, Dropout | Noise | MaskSquares)


def inside(layers: Sequence[Named]) -> list[Named]:
    """Named layers, with those inside of a Residual."""
    made: list[Named] = []
    for name, layer in layers:
        made.append((name, layer))
        if hasattr(layer, "named_body"):
            made += inside(layer.named_body(name))
    return made
