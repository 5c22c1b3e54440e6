"""This module defines the losses. A loss is the last layer of a list, and its `build(tape, y, target, scope)` returns (value, dy).

Values are means over a batch: over all elements for those that compare targets of the output's shape (values, images, or without them the network's
input), over what the labels count for cross-entropy; RMSLE says what it is over.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.files.masked import refuse_masked
from nbcnn.files.quote import quoted
from nbcnn.nn.layer import NoParams, later
from nbcnn.plan.graph import Buf, ShapeError, Tape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


@dataclass(frozen=True)
class PairLoss(NoParams):
    """A loss that compares outputs and targets of one shape, element by element, by the ops of its kind; its fields are their
    attributes."""

    kind: ClassVar[str]
    needs_labels: ClassVar[bool] = False

    def attrs(self) -> dict[str, Any]:
        """The attributes of both ops."""
        return asdict(self)

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The loss of every element, float64, for `Model.evaluate`."""
        raise NotImplementedError

    def same(self, targets: np.ndarray, outputs: int) -> np.ndarray:
        """One output for all examples that loses little, float64 of the shape of a target: the mean of the targets."""
        return targets.mean(0, dtype=np.float64)

    def measure(self, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        """The sum over examples of their losses, in float64, and how many examples it is of."""
        return float(self.terms(outputs, targets).reshape(len(outputs), -1).mean(1).sum()), len(outputs)

    def build(self, tape: Tape, y: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        if y.shape != target.shape:
            raise ShapeError(f"{scope}: the network makes {y.shape}, the target is {target.shape}")
        value, dy = tape.temp(f"{scope}.loss", (), "float64"), tape.temp(f"{scope}.dy", y.shape)
        tape.emit(Op(self.kind, "fprop"), [y, target], [value], scope, **self.attrs())
        tape.emit(Op(self.kind, "dgrad"), [y, target], [dy], scope, **self.attrs())
        return value, dy


@dataclass(frozen=True)
class MSE(PairLoss):
    """mean((y − target)²) over all elements of the batch; without targets of its own, the target is the network's input (an autoencoder).

    `loss="mse"` means it. Shapes: y and target of any shape, the same for both, float32 → a float64 scalar. Raises ShapeError if they differ, when
    the network is built.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model([nbcnn.Conv2d(3, 3, padding=1), nbcnn.MSE()], mode="cpu").build((3, 8, 8)).loss
        MSE()
    """

    kind: ClassVar[str] = "mse"

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return (outputs - targets) ** 2


@dataclass(frozen=True)
class SoftmaxCrossEntropy(NoParams):
    """−log softmax(y)[label], mean over the batch, or over all pixels of the batch, in nats. `loss="cross_entropy"` means it.

    Shapes: y (N, F), float32, and labels (N,), int32 in 0..F−1 → a float64 scalar; of pixels y (N, F, H, W) and labels (N, H, W). The arguments are
    those of torch.nn.CrossEntropyLoss:

    weight           F numbers, at least 0: the mean counts an example of class c weight[c] times. None counts all once.
    ignore_index     a label, of any class or of none, whose examples or pixels count nothing and get no gradient; None ignores none. Where nothing of
                     a batch counts, its loss is 0 (PyTorch has NaN), and so is its gradient.
    label_smoothing  at least 0 and less than 1: that part of every label is spread over all classes alike (arXiv:1512.00567, section 7).

    With `weight` or `ignore_index` the mean is over what counts, of a batch of all ranks and of a whole epoch. Raises UsageError for numbers out of
    range, and, when the network is built, ShapeError for logits of another number of axes or weights of another number of classes.

    Example, of which the third label counts nothing:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Linear(2)], nbcnn.SoftmaxCrossEntropy(ignore_index=-1, label_smoothing=0.1), mode="cpu")
        >>> history = model.fit(np.zeros((3, 4), np.uint8), [0, 1, -1], verbose=0)
        >>> model.loss.label_smoothing
        0.1
    """

    weight: tuple[float, ...] | None = later(None)
    ignore_index: int | None = later(None)
    label_smoothing: float = later(0.0)
    kind: ClassVar[str] = "xent"
    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weight is not None:
            refuse_masked(self.weight, "the weights of SoftmaxCrossEntropy")
            object.__setattr__(self, "weight", tuple(float(each) for each in self.weight))
            if not self.weight or not all(0 <= each < math.inf for each in self.weight) or not any(self.weight):
                raise UsageError(f"SoftmaxCrossEntropy needs finite weights of at least 0, not all of them 0, got {self.weight}")
        if self.ignore_index is not None and (isinstance(self.ignore_index, bool) or not -(2**31) < int(self.ignore_index) < 2**31):
            raise UsageError(f"SoftmaxCrossEntropy needs a 32-bit whole number as ignore_index, got {quoted(self.ignore_index)}")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"SoftmaxCrossEntropy needs a label_smoothing of at least 0 and less than 1, got {quoted(self.label_smoothing)}")

    def counted(self, labels: np.ndarray) -> np.ndarray:
        """Which of `labels` are not ignored, bool of their shape."""
        return np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index

    def same(self, targets: np.ndarray, outputs: int) -> np.ndarray:
        """The logits that lose least as the only answer to all examples, or pixels, float64 (outputs, 1, …): the shares of the classes."""
        weights = np.ones(outputs) if self.weight is None else np.array(self.weight)
        number = np.bincount(targets[self.counted(targets)].astype(np.int64), minlength=outputs)
        lost = (1 - self.label_smoothing) * weights * number + self.label_smoothing / outputs * weights * number.sum()
        return np.log(np.maximum(lost, 1e-30) / max(lost.sum(), 1e-30)).reshape(outputs, *(1,) * (targets.ndim - 1))

    def measure(self, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        """The sum of what examples, or pixels, lose, in float64, and what they count together."""
        classes, labels, counted = outputs.shape[1], targets.astype(np.int64), self.counted(targets)
        weights = np.ones(classes) if self.weight is None else np.array(self.weight)
        highest = outputs.max(1, keepdims=True)
        z = highest + np.log(np.exp(outputs - highest).sum(1, keepdims=True)) - outputs
        own = np.where(counted, labels, 0)
        lost = (1 - self.label_smoothing) * weights[own] * np.take_along_axis(z, own[:, None], 1)[:, 0]
        if self.label_smoothing:
            lost = lost + self.label_smoothing / classes * np.tensordot(weights, z, (0, 1))
        return float(lost[counted].sum()), float(weights[own][counted].sum())

    def build(self, tape: Tape, y: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        if len(y.shape) not in (2, 4) or target.shape != (y.shape[0], *y.shape[2:]):
            raise ShapeError(
                f"{scope} takes logits (N, F) and labels (N,), or of pixels (N, F, H, W) and (N, H, W), got {y.shape} and {target.shape}"
            )
        p = tape.temp(f"{scope}.p", y.shape)
        value = tape.temp(f"{scope}.loss", (), "float64")
        dy = tape.temp(f"{scope}.dy", y.shape)
        if self.weight is None and self.ignore_index is None and not self.label_smoothing:
            tape.emit(Op("softmax_xent", "fprop"), [y, target], [p, value], scope)
            tape.emit(Op("softmax_xent", "dgrad"), [p, target], [dy], scope)
            return value, dy
        self._build_weighted(tape, y, target, p, value, dy, scope)
        return value, dy

    def _build_weighted(self, tape: Tape, y: Buf, target: Buf, p: Buf, value: Buf, dy: Buf, scope: str) -> None:
        """Record the loss whose mean is over what its labels count (`nbcnn.ops.losses.xent`)."""
        each = self.weight or (1.0,) * y.shape[1]
        if len(each) != y.shape[1]:
            raise ShapeError(f"{scope} has weights of {len(each)} classes, the network makes {y.shape[1]} (its input is {y.shape})")
        weights = tape.const(f"{scope}.weight", (*each, math.fsum(each)))
        total, count = tape.temp(f"{scope}.total", (1,)), tape.temp(f"{scope}.count", (), "float64")
        ignore = {"ignore": -(2**31) if self.ignore_index is None else int(self.ignore_index)}
        attrs = {"smoothing": self.label_smoothing, "share": tape.part, **ignore}
        tape.emit(Op("xent_total"), [target, weights], [total], scope, **ignore)
        if tape.together:
            # A rank that has no image of a last batch computes one for nothing.
            tape.emit(Op("all_reduce"), [total], [total], scope, weight=float(tape.part > 0))
        divisor = tape.const(f"{scope}.rows", (numel(target.shape),)) if tape.in_parts else total
        tape.emit(Op("weighted_xent", "fprop"), [y, target, weights, divisor], [p, value, count], scope, **attrs)
        tape.emit(Op("weighted_xent", "dgrad"), [p, target, weights, divisor], [dy], scope, **attrs)
        tape.count, tape.total = count, total


@dataclass(frozen=True)
class L1(PairLoss):
    """mean(|y − target|) over all elements of the batch. `loss="l1"` means it.

    Shapes: y and target of any shape, the same for both, float32 → a float64 scalar. Raises ShapeError if they differ, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Linear(1)], "l1", mode="cpu")
        >>> history = model.fit(np.zeros((4, 3), np.uint8), [1, 2, 3, 4], epochs=2, verbose=0)
        >>> model.loss
        L1()
    """

    kind: ClassVar[str] = "l1"

    def same(self, targets: np.ndarray, outputs: int) -> np.ndarray:
        """The median of the targets."""
        return np.median(targets.astype(np.float64), axis=0)

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.abs(outputs - targets)


@dataclass(frozen=True)
class Huber(PairLoss):
    """The mean of d²/2 where |d| ≤ delta and delta·(|d| − delta/2) elsewhere, d = y − target (as torch.nn.HuberLoss). `loss="huber"` means it.

    Shapes: y and target of any shape, the same for both, float32 → a float64 scalar. Raises UsageError unless `delta` is positive and finite, and
    ShapeError if the shapes differ, when the network is built. Source: P. J. Huber, "Robust estimation of a location parameter", 1964.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model([nbcnn.Linear(1)], nbcnn.Huber(delta=0.5), mode="cpu").build((3,)).loss
        Huber(delta=0.5)
    """

    delta: float = 1.0
    kind: ClassVar[str] = "huber"

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise UsageError(f"Huber needs a positive, finite delta, got {self.delta}")

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        d = np.abs(outputs - targets)
        return np.where(d <= self.delta, d * d / 2, self.delta * (d - self.delta / 2))


@dataclass(frozen=True)
class BCEWithLogits(PairLoss):
    """The mean of the binary cross-entropy of sigmoid(y) with targets in 0..1, in nats (as torch.nn.BCEWithLogitsLoss). `loss="bce"` means it.

    Every output is a probability of its own: for several labels per example, or pixels in 0..1. The output is a logit, whose sigmoid is the
    probability; of a network that ends in a Sigmoid the loss takes what comes before it, and `predict` gives probabilities.

    Shapes: y and target of any shape, the same for both, float32 → a float64 scalar. Raises ShapeError if they differ, when the network is built.

    Example, two labels per example:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Linear(2)], "bce", mode="cpu")
        >>> history = model.fit(np.zeros((4, 3), np.uint8), [[0, 1], [1, 1], [0, 0], [1, 0]], verbose=0)
        >>> len(history)
        1
    """

    kind: ClassVar[str] = "bce"

    def same(self, targets: np.ndarray, outputs: int) -> np.ndarray:
        """The logit of the mean of the targets."""
        mean = targets.mean(0, dtype=np.float64).clip(1e-12, 1 - 1e-12)
        return np.log(mean / (1 - mean))

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.maximum(outputs, 0) - outputs * targets + np.log1p(np.exp(-np.abs(outputs)))


@dataclass(frozen=True)
class _Forecast(NoParams):
    """A loss of one prediction an example, (N, 1), against one float32 target, (N)."""

    needs_labels: ClassVar[bool] = True
    label_dtype: ClassVar[str] = "float32"

    def _target(self, y: Buf, target: Buf, scope: str) -> Buf:
        if y.shape[1:] != (1,) or target.shape != y.shape[:1]:
            raise ShapeError(f"{scope} takes predictions (N, 1) and targets (N,), got {y.shape} and {target.shape}")
        return target.reshaped(y.shape)


@dataclass(frozen=True)
class ForecastMSE(_Forecast):
    """mean((y − target)²) over the batch, in the square of the targets' unit.

    Shapes: y (N, 1) and targets (N,), float32 → a float64 scalar. Raises ShapeError for other predictions, when the network is built.

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net([nbcnn.LastStep(), nbcnn.Linear(1), nbcnn.ForecastMSE()], (4, 48), mode="cpu").output_shape
        (1,)
    """

    kind: ClassVar[str] = "mse"

    def build(self, tape: Tape, y: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        target = self._target(y, target, scope)
        value, dy = tape.temp(f"{scope}.loss", (), "float64"), tape.temp(f"{scope}.dy", y.shape)
        tape.emit(Op("mse", "fprop"), [y, target], [value], scope)
        tape.emit(Op("mse", "dgrad"), [y, target], [dy], scope)
        return value, dy


@dataclass(frozen=True)
class RMSLE(_Forecast):
    """Root mean squared logarithmic error of unit·y against the target, over the batch (ops/losses/pairs.py); no gradient where unit·y ≤ 0.

    Shapes: y (N, 1), in multiples of `unit`, and targets (N,), in readings; both float32 → a float64 scalar. Raises UsageError unless
    `unit` is positive and finite, and ShapeError for other predictions, when the network is built.

    `of_batch`: the loss is the root of a mean over examples, so the losses of ranks do not add up to it. Those of parts of a batch that is
    accumulated are put together before the root is taken (`nbcnn.ops.update.accumulate`).

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net([nbcnn.LastStep(), nbcnn.Linear(1), nbcnn.RMSLE(unit=100.0)], (4, 48), mode="cpu").output_shape
        (1,)
    """

    unit: float = 1.0
    of_batch: ClassVar[bool] = True
    kind: ClassVar[str] = "rmsle"

    def __post_init__(self) -> None:
        if not 0 < self.unit < math.inf:
            raise UsageError(f"RMSLE needs a positive, finite unit, got {self.unit}")

    def build(self, tape: Tape, y: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        target = self._target(y, target, scope)
        value, dy = tape.temp(f"{scope}.loss", (), "float64"), tape.temp(f"{scope}.dy", y.shape)
        tape.emit(Op("rmsle", "fprop"), [y, target], [value], scope, unit=self.unit)
        tape.emit(Op("rmsle", "dgrad"), [y, target, value], [dy], scope, unit=self.unit)
        return value, dy
