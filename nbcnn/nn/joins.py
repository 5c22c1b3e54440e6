"""This module defines the layers that join or rearrange values of a graph: Add, Mul, Concat; Pad, Reshape; and the losses of
several outputs, by their names.

A layer that joins has `joins` and takes a list of values: `build(tape, xs, scope)` returns y and a backward that gives one gradient for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.nn.arguments import finite
from nbcnn.nn.convolve import padded_images
from nbcnn.nn.graphs import reshape, unpack
from nbcnn.nn.layer import Built, NoParams, images
from nbcnn.nn.losses import L1, MSE, BCEWithLogits, Huber, PairLoss, SoftmaxCrossEntropy
from nbcnn.plan.graph import Buf, ShapeError, Tape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

Joined = tuple[Buf, Callable[[Buf], list[Buf]]]


def alike(xs: Sequence[Buf], scope: str) -> None:
    """Raise ShapeError unless there are two or more values, of one shape."""
    if len(xs) < 2 or len({x.shape for x in xs}) > 1:
        raise ShapeError(f"{scope} takes two or more values of one shape, got {', '.join(str(x.shape) for x in xs)}")


@dataclass(frozen=True)
class Add(NoParams):
    """The sum of two or more values, added from the left; `a + b` means it (shortcuts: He et al., arXiv:1512.03385).

    Shapes: any shape, float32, the same for all values; the sum has it too. Raises ShapeError if they differ.

    Example:
        >>> import nbcnn
        >>> a, b = nbcnn.Input((3, 8, 8)), nbcnn.Input((3, 8, 8))
        >>> nbcnn.Add()([a, b]).shape
        (3, 8, 8)
    """

    kind: ClassVar[str] = "add"
    joins: ClassVar[bool] = True

    def build(self, tape: Tape, xs: Sequence[Buf], scope: str) -> Joined:
        alike(xs, scope)
        y = xs[0]
        for x in xs[1:]:
            total = tape.temp(f"{scope}.y", x.shape)
            tape.emit(Op("add"), [y, x], [total], scope)
            y = total
        return y, lambda dy: [dy] * len(xs)


@dataclass(frozen=True)
class Mul(NoParams):
    """The product of two values, element by element; `a * b` means it. One of them may be a factor for each channel of the other.

    Shapes: any shape, float32, the same for both, and for the product. Or images (N, C, H, W) and a factor (N, C, 1, 1) or (N, C), in either
    order, likewise series (N, C, L) with (N, C, 1) or (N, C): the product has the images' shape (squeeze and excitation: Hu et al.,
    arXiv:1709.01507). Raises ShapeError if they do not fit, or for another number of values.

    Example:
        >>> import nbcnn
        >>> x = nbcnn.Input((3, 8, 8))
        >>> (x * nbcnn.Sigmoid()(x)).shape
        (3, 8, 8)
        >>> (x * nbcnn.Sigmoid()(nbcnn.GlobalAvgPool2d()(x))).shape
        (3, 8, 8)
    """

    kind: ClassVar[str] = "mul"
    joins: ClassVar[bool] = True

    def build(self, tape: Tape, xs: Sequence[Buf], scope: str) -> Joined:
        if len(xs) != 2:
            raise ShapeError(f"{scope} takes two values, got {len(xs)}" + (": multiply one after the other" if len(xs) > 2 else ""))
        for at in (0, 1):
            if _is_factor(xs[1 - at], xs[at]):
                return _scaled(tape, xs, at, scope)
        if xs[0].shape != xs[1].shape:
            given = f"{xs[0].shape} and {xs[1].shape}"
            raise ShapeError(f"{scope} takes two values of one shape, or one (N, C, …) and a factor (N, C) for it, got {given}")
        a, b = xs
        y = tape.temp(f"{scope}.y", a.shape)
        tape.emit(Op("mul"), [a, b], [y], scope)

        def backward(dy: Buf) -> list[Buf]:
            da, db = tape.temp(f"{scope}.da", a.shape), tape.temp(f"{scope}.db", b.shape)
            tape.emit(Op("mul"), [dy, b], [da], scope)
            tape.emit(Op("mul"), [dy, a], [db], scope)
            return [da, db]

        return y, backward


def _is_factor(f: Buf, x: Buf) -> bool:
    """Whether f has one element for each channel of x, which has more."""
    rest = (1,) * (len(x.shape) - 2)
    return len(x.shape) > 2 and f.shape != x.shape and f.shape in (x.shape[:2], x.shape[:2] + rest)


def _scaled(tape: Tape, xs: Sequence[Buf], at: int, scope: str) -> Joined:
    """Record the product of the images or series xs[at] and a factor for each of their channels, the other value."""
    x, given = xs[at], xs[1 - at]
    f = given.reshaped(x.shape[:2])
    y = tape.temp(f"{scope}.y", x.shape)
    tape.emit(Op("scale"), [x, f], [y], scope)

    def backward(dy: Buf) -> list[Buf]:
        dx, df = tape.temp(f"{scope}.dx", x.shape), tape.temp(f"{scope}.df", f.shape)
        tape.emit(Op("scale"), [dy, f], [dx], scope)
        tape.emit(Op("scale", "wgrad"), [x, dy], [df], scope)
        made = [dx, df.reshaped(given.shape)]
        return made if at == 0 else made[::-1]

    return y, backward


@dataclass(frozen=True)
class Concat(NoParams):
    """Values one behind the other along their channels, as torch.cat(…, dim=1) (U-Net: Ronneberger et al., arXiv:1505.04597).

    Shapes: (N, C₁, …), (N, C₂, …), … → (N, C₁ + C₂ + …, …), float32: images, series or vectors that differ in their channels alone. Raises ShapeError
    otherwise, or for fewer than two values.

    Example:
        >>> import nbcnn
        >>> a, b = nbcnn.Input((3, 8, 8)), nbcnn.Input((5, 8, 8))
        >>> nbcnn.Concat()([a, b]).shape
        (8, 8, 8)
    """

    kind: ClassVar[str] = "concat"
    joins: ClassVar[bool] = True

    def build(self, tape: Tape, xs: Sequence[Buf], scope: str) -> Joined:
        rest = {(x.shape[0], *x.shape[2:]) for x in xs}
        if len(xs) < 2 or len(rest) > 1:
            raise ShapeError(f"{scope} takes two or more values that differ in their channels alone, got {', '.join(str(x.shape) for x in xs)}")
        n, *plane = rest.pop()
        y = tape.temp(f"{scope}.y", (n, sum(x.shape[1] for x in xs), *plane))
        tape.emit(Op("concat", "fprop"), xs, [y], scope)

        def backward(dy: Buf) -> list[Buf]:
            dxs = [tape.temp(f"{scope}.dx{at}", x.shape) for at, x in enumerate(xs, 1)]
            tape.emit(Op("concat", "dgrad"), [dy], dxs, scope)
            return dxs

        return y, backward


@dataclass(frozen=True)
class Detach(NoParams):
    """x itself, through which no gradient passes (as torch.Tensor.detach): what leads to it is trained by its other ways to the loss alone.

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example, a gate that trains nothing before it:
        >>> import nbcnn
        >>> x = nbcnn.Input((3, 8, 8))
        >>> (x * nbcnn.Sigmoid()(nbcnn.Detach()(x))).shape
        (3, 8, 8)
    """

    kind: ClassVar[str] = "detach"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("scale", "dgrad"), [dy, x], [dx], scope, factor=0.0, shift=0.0)
            return dx

        return x, backward


@dataclass(frozen=True)
class Pad(NoParams):
    """Images with a constant around them; a negative padding crops.

    Shapes: (N, C, H, W) → (N, C, H + top + bottom, W + left + right), float32. `padding`, in pixels, is one number for all sides, or (top, bottom,
    left, right); `value` is what stands outside. Raises UsageError for what are no whole numbers or no finite value, and, when the network is
    built, ShapeError where nothing of the image would stay.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Pad((1, 0, 2, 0))], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 3, 9, 10)
    """

    padding: int | tuple[int, int, int, int] = 1
    value: float = 0.0
    kind: ClassVar[str] = "pad"

    def __post_init__(self) -> None:
        if isinstance(self.padding, list):
            object.__setattr__(self, "padding", tuple(self.padding))
        sides = self.sides()
        if len(sides) != 4 or not all(isinstance(n, int) and not isinstance(n, bool) for n in sides):
            raise UsageError(f"Pad needs one whole number as padding, or (top, bottom, left, right), got {quoted(self.padding)}")
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not finite(self.value):
            raise UsageError(f"Pad needs a finite value, got {quoted(self.value)}")

    def sides(self) -> tuple[int, ...]:
        """(top, bottom, left, right)."""
        return tuple(self.padding) if isinstance(self.padding, tuple) else (self.padding,) * 4

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        _, _, h, w = images(x, scope)
        top, bottom, left, right = self.sides()
        if min(h + min(top, 0) + min(bottom, 0), w + min(left, 0) + min(right, 0)) < 1:
            raise ShapeError(f"{scope} would crop all of its image: {x.shape} padded by {self.sides()}")
        return padded_images(tape, x, self.sides(), scope, self.value)


@dataclass(frozen=True)
class Reshape(NoParams):
    """The elements of each example in another shape; their order is C, H, W whatever layout the mode stores.

    Shapes: (N, …) → (N, *shape), float32; `shape` is (F,) or (C, H, W), of as many elements. Raises UsageError for what is no shape, and, when the
    network is built, ShapeError for another number of elements.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Reshape((2, 4, 8))], mode="cpu").build((64,)).predict(np.zeros((5, 64), np.uint8)).shape
        (5, 2, 4, 8)
    """

    shape: tuple[int, ...]
    kind: ClassVar[str] = "reshape"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape) if isinstance(self.shape, Sequence) else (self.shape,))
        if len(self.shape) not in (1, 3):
            raise UsageError(f"Reshape makes (F,) or (C, H, W) of an example, got {self.shape}")
        for size in self.shape:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"Reshape needs whole numbers of at least 1, got {self.shape}")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, made = x.shape[0], (x.shape[0], *self.shape)
        if numel(made) != numel(x.shape):
            raise ShapeError(f"{scope} makes {self.shape} of {x.shape[1:]}, which has {numel(x.shape) // n} elements and not {numel(made) // n}")
        return reshape(tape, x, made, f"{scope}.y", scope), lambda dy: reshape(tape, dy, x.shape, f"{scope}.dx", scope)


@dataclass(frozen=True)
class Losses(NoParams):
    """The sum of losses, one for each output of a graph: `loss=["mse", "mse"]` means it.

    Shapes: outputs of any shape, float32 → a float64 scalar. `parts` are the losses in the order of the outputs, all of classes or all of values: the
    targets of an example are one array; and each a mean over the examples, so without `weight` and `ignore_index`. Targets are packed as outputs are
    (`graphs.pack`); classes are (N, outputs, 1), int32. Raises UsageError for other `parts`, and ShapeError for another number of outputs, when the
    network is built.

    Example:
        >>> import nbcnn
        >>> nbcnn.Losses((nbcnn.MSE(), nbcnn.MSE())).needs_labels
        False
    """

    parts: tuple[Any, ...]
    kind: ClassVar[str] = "losses"

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if len(self.parts) < 2 or not all(hasattr(each, "needs_labels") for each in self.parts):
            raise UsageError(f"Losses takes two or more losses, got {quoted(self.parts)}")
        if len({(each.needs_labels, getattr(each, "label_dtype", "int32")) for each in self.parts}) > 1:
            raise UsageError("the losses of several outputs must be all of classes or all of values: an example has one array of targets")
        if any(getattr(each, "of_batch", False) for each in self.parts):
            raise UsageError("the losses of several outputs are means over all examples of a batch: RMSLE, the root of one, is for one output")
        if any(getattr(each, name, None) is not None for each in self.parts for name in ("weight", "ignore_index")):
            raise UsageError("the losses of several outputs are means over all examples of a batch: weight and ignore_index are for one output")

    @property
    def needs_labels(self) -> bool:
        """Whether the targets are classes."""
        return bool(self.parts[0].needs_labels)

    def build(self, tape: Tape, ys: Sequence[Buf], target: Buf, scope: str) -> tuple[Buf, list[Buf]]:
        if not isinstance(ys, list) or len(ys) != len(self.parts):
            raise ShapeError(f"{scope} has {len(self.parts)} losses, and the network has {len(ys) if isinstance(ys, list) else 1} outputs")
        shapes = [y.shape[1:] for y in ys]
        if self.needs_labels:
            if any(len(shape) != 1 for shape in shapes):
                raise ShapeError(f"{scope}: of several outputs each must be one vector of logits per example, got {shapes}")
            n, k = ys[0].shape[0], len(ys)
            columns = [tape.temp(f"{scope}.labels{at}", (n, 1), "int32") for at in range(1, k + 1)]
            tape.emit(Op("concat", "dgrad"), [target.reshaped((n, k))], columns, scope)
            targets = [column.reshaped((n,)) for column in columns]
        else:
            targets = unpack(tape, target, shapes, f"{scope}.targets")
        made = [part.build(tape, y, t, f"{scope}.{at}") for at, (part, y, t) in enumerate(zip(self.parts, ys, targets, strict=True), 1)]
        value = tape.temp(f"{scope}.loss", (), "float64")
        tape.emit(Op("sum_losses"), [each for each, _ in made], [value], scope)
        return value, [dy for _, dy in made]


LOSSES: dict[str, Callable[[], Any]] = {"cross_entropy": SoftmaxCrossEntropy, "mse": MSE, "bce": BCEWithLogits, "l1": L1, "huber": Huber}
"""Losses by their names, which `Model` and `Graph.of` take."""
ALIASES = {
    **dict.fromkeys(("categorical_crossentropy", "sparse_categorical_crossentropy", "CrossEntropyLoss"), "cross_entropy"),
    **dict.fromkeys(("binary_crossentropy", "BCEWithLogitsLoss", "BCELoss", "binary_cross_entropy_with_logits", "binary_cross_entropy"), "bce"),
    **dict.fromkeys(("mean_squared_error", "MeanSquaredError", "MSELoss", "mse_loss"), "mse"),
    **dict.fromkeys(("mae", "mean_absolute_error", "MeanAbsoluteError", "L1Loss", "l1_loss"), "l1"),
    **dict.fromkeys(("huber_loss", "HuberLoss", "SmoothL1Loss", "smooth_l1_loss"), "huber"),
}
"""What Keras and PyTorch call these losses, with their defaults. Of a network that ends in a Softmax or a Sigmoid the loss takes what comes before,
so names that want probabilities mean the same as those that want logits."""


def losses_of(loss: Any, outputs: int = 1) -> Any:
    """The loss layer of a network with so many outputs: of a layer, its class, its name, or a list of them.

    Raises UsageError for another name, for what is no loss, and for another number of them.
    """
    if outputs == 1 or isinstance(loss, Losses):
        return _loss(loss)
    parts = list(loss) if isinstance(loss, list | tuple) else [loss] * outputs
    if len(parts) != outputs:
        raise UsageError(f"the graph has {outputs} outputs, and there are {len(parts)} losses")
    return Losses(tuple(map(_loss, parts)))


def _loss(loss: Any) -> Any:
    if isinstance(loss, str):
        name = loss if loss in LOSSES else ALIASES.get(loss, loss)
        if name not in LOSSES:
            raise UsageError(f"no loss {quoted(loss)}; there are {', '.join(LOSSES)}{nearest(loss, (*LOSSES, *ALIASES))}")
        return LOSSES[name]()
    if isinstance(loss, type) and issubclass(loss, PairLoss):
        return loss()
    if isinstance(loss, type) or not hasattr(loss, "needs_labels"):
        raise UsageError(f"loss must be one of {', '.join(LOSSES)}, or a loss layer (nbcnn.loss makes one of your own), got {quoted(loss)}")
    return loss
