"""A network's outputs compared with targets: the mean loss, in float64, and the accuracy; probabilities of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nbcnn.datasets.arrays import seen
from nbcnn.files.errors import UsageError
from nbcnn.model.views import PLAIN, Views
from nbcnn.nn.ends import logits_of
from nbcnn.nn.joins import Losses
from nbcnn.run.net import Net
from nbcnn.train.pixels import counts_of, mean_iou

SOME = 1 << 20
"""Values of targets, at most, that a loss is held against."""


def evaluated(
    net: Net,
    images: np.ndarray,
    targets: np.ndarray | None,
    batch: int,
    own_target: Callable[[np.ndarray], np.ndarray],
    views: Views = PLAIN,
) -> dict[str, float]:
    """{"loss": …}, for classes with "accuracy", of pixels also "iou" (`nbcnn.train.pixels`): of several outputs the sum of their losses, and the mean
    of their accuracies.

    `targets` as the network's loss takes them, or None where `own_target` makes them of the images. `views`
    are averaged. Of ignored labels neither counts. Raises
    UsageError for a loss without `measure`, and for several outputs without a target and a loss each.
    """
    loss, shapes = net.layers[-1], net.output_shapes
    several = len(shapes) > 1
    parts = loss.parts if isinstance(loss, Losses) else (loss,)
    if several and (targets is None or len(parts) != len(shapes)):
        raise UsageError("evaluate needs y, and for each of several outputs a loss")
    for part in parts:
        if not hasattr(part, "measure"):
            raise UsageError(f"the loss {type(part).__name__} has no method measure(outputs, targets), which evaluate needs")
    totals, right, counted = np.zeros((len(parts), 2)), 0, 0
    pixels = np.zeros((net.classes, net.classes), np.int64) if net.takes_classes and net.plane and not several else None
    for start in range(0, len(images), batch):
        examples = images[start : start + batch]
        made = split(views.predict(net, examples, batch).astype(np.float64), shapes)
        known = own_target(examples) if targets is None else targets[start : start + batch]
        for at, (part, output, target) in enumerate(zip(parts, made if several else [made], _wanted(net, known), strict=True)):
            output = logits_of(part, output) if net.ended[at] else output
            totals[at] += part.measure(output, target)
            if net.takes_classes:
                counts = target != net.ignored if net.ignored is not None else np.ones(target.shape, bool)
                predicted = output.argmax(1)
                right, counted = right + int((predicted == target)[counts].sum()), counted + int(counts.sum())
                if pixels is not None:
                    pixels += counts_of(target, predicted, net.classes, counts)
    sums, weights = totals.T
    found = {"loss": float(np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0).sum())}
    found |= {"accuracy": right / max(counted, 1)} if net.takes_classes else {}
    return found if pixels is None else found | {"iou": mean_iou(pixels)}


def of_one_answer(net: Net, targets: np.ndarray) -> float | None:
    """The loss of giving all examples the same answer, their mean or the shares of their classes; None for a loss without `same`.

    `targets` as `evaluated` compares them with outputs: more than a few million values take long.
    """
    loss = net.layers[-1]
    parts = loss.parts if isinstance(loss, Losses) else (loss,)
    if len(parts) != len(net.output_shapes) or not all(hasattr(part, "same") for part in parts):
        return None
    whole = 0.0
    for part, target, shape in zip(parts, _wanted(net, targets), net.output_shapes, strict=True):
        lost, weight = part.measure(np.broadcast_to(part.same(target, shape[0]), (len(target), *shape)), target)
        whole += lost / weight if weight else 0.0
    return whole


def no_better(
    net: Net, rows: Sequence[Mapping[str, Any]], targets: Any, prepare: Callable[[np.ndarray], np.ndarray] | None, advice: tuple[str, str]
) -> str:
    """What to say of a network whose training loss after two epochs or more is no less than that of giving all examples the same answer; else "".

    rows     of the training's epochs, with their "train_loss".
    targets  what the examples are to become; unless they are an array of the host, nothing is said.
    prepare  makes targets of them, float32, where they are the examples themselves.
    advice   how the learning rate is most often wrong ("large" or "small"), and what else to try.
    """
    if len(rows) < 2 or not isinstance(targets, np.ndarray):
        return ""
    some = targets[:: -(-targets.size // SOME)]  # all of them, if they are not too many
    same, loss = of_one_answer(net, some if prepare is None else prepare(some)), rows[-1]["train_loss"]
    if same is None or not loss >= same > 0:
        return ""
    scale = ", or the targets are: standardise them" if not net.takes_classes and abs(seen(some)).max() > 1 else ""
    return (
        f"after {len(rows)} epochs the training loss is {loss:.3g}, no less than the {same:.3g} of giving all examples the same answer. If more "
        f"epochs do not help, the learning rate is most often too {advice[0]} ({advice[1]}){scale}"
    )


def _wanted(net: Net, known: np.ndarray) -> list[np.ndarray]:
    """The targets of each output, of targets as the network's loss takes them: classes, or values in float64."""
    several = len(net.output_shapes) > 1
    if net.takes_classes:
        return [known[:, at, 0] for at in range(len(net.output_shapes))] if several else [known]
    return list(split(known.astype(np.float64), net.output_shapes)) if several else [seen(known)]


def probabilities(net: Net, outputs: np.ndarray) -> np.ndarray:
    """The probabilities of the classes, float32, of the outputs of a network with one output: its own if it ends in a softmax."""
    return outputs.astype(np.float32) if net.ended[0] else softmax(outputs)


def softmax(logits: np.ndarray) -> np.ndarray:
    """The probabilities of logits (N, F, …), float32; computed in float64, so that they sum to 1 within float32's rounding."""
    exponents = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return (exponents / exponents.sum(1, keepdims=True)).astype(np.float32)


def split(made: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> Any:
    """One output as it is; the vectors (N, F) of several as a tuple of arrays."""
    if len(shapes) == 1:
        return made
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return tuple(part.reshape(len(made), *shape) for part, shape in zip(np.split(made, ends, axis=1), shapes, strict=True))
