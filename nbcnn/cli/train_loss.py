"""This module gives the network of train.py the loss that its flags name (--loss, --label-smoothing, --class-weights, --ignore-index, …)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted

OF_SERIES = ("log-mse", "rmsle")
"""What s4convd is trained for; the first also means, for a network of images, the loss that it has."""
OF_IMAGES = ("cross-entropy", "mse", "l1", "huber", "bce")
OF_CLASSES = ("label_smoothing", "class_weights", "ignore_index")
"""Flags of the cross-entropy."""


def check(chosen: Mapping[str, Any], model: str) -> None:
    """Raise UsageError for flags of the loss that do not go with `model` or with each other."""
    loss, series = chosen.get("loss"), model == "s4convd"
    if loss and (loss in OF_SERIES) != series:
        has = ", ".join(OF_SERIES if series else OF_IMAGES)
        raise UsageError(f"--loss {loss} {'is for images' if series else 'belongs to --model s4convd'}, this is {model}: it takes {has}")
    if "huber_delta" in chosen and loss != "huber":
        raise UsageError("--huber-delta belongs to --loss huber")
    alien = [name for name in OF_CLASSES if name in chosen and (series or loss not in (None, "cross-entropy"))]
    if alien:
        raise UsageError(f"--{alien[0].replace('_', '-')} belongs to networks that classify, whose loss is cross-entropy")


def weights(text: str) -> tuple[float, ...]:
    """The numbers of --class-weights. Raises ValueError for a word that is none, and for one below 0 or not finite."""
    made = tuple(map(numerals.real, text.split(",")))
    if not all(0 <= each < float("inf") for each in made):
        raise ValueError(f"{quoted(text)}: weights are finite numbers of at least 0")
    return made


def with_loss(layers: Sequence[Any], flags: SimpleNamespace) -> Any:
    """`layers`, a list or a graph, with the loss of the flags; as they are without such flags.

    Raises UsageError for a loss that does not go with the network.
    """
    from nbcnn.nn.graphs import Graph
    from nbcnn.nn.losses import L1, MSE, BCEWithLogits, Huber, SoftmaxCrossEntropy

    *body, own = layers
    if flags.loss not in OF_SERIES:
        classes = flags.loss == "cross-entropy"
        if bool(own.needs_labels) != classes:
            what = "classifies: its loss is cross-entropy" if own.needs_labels else "compares images: its losses are mse, l1, huber and bce"
            raise UsageError(f"--loss {flags.loss} does not go with --model {flags.model}, which {what}")
        pairs = {"mse": MSE(), "l1": L1(), "huber": Huber(1.0 if flags.huber_delta is None else flags.huber_delta), "bce": BCEWithLogits()}
        own = own if classes else pairs[flags.loss]
    options = {
        "weight": weights(flags.class_weights) if flags.class_weights else None,
        "ignore_index": flags.ignore_index,
        "label_smoothing": flags.label_smoothing or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if given and not isinstance(own, SoftmaxCrossEntropy):
        name = next(
            flag for flag, value in zip(("class-weights", "ignore-index", "label-smoothing"), options.values(), strict=True) if value is not None
        )
        raise UsageError(f"--{name} belongs to networks that classify: the loss of {flags.model} is {type(own).__name__}")
    own = replace(own, **given) if given else own
    return layers.with_loss(own) if isinstance(layers, Graph) else [*body, own]
