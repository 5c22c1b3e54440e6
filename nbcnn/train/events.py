"""This module defines the events that a trainer reports (a reading of the loss, an epoch, the end) and the callback that receives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nbcnn.train.runlog import Row

if TYPE_CHECKING:
    from nbcnn.train.trainer import Trainer


@dataclass(frozen=True)
class Reading:
    """A reading of the loss between two training steps, about once a second.

    epoch, epochs      number of the present epoch, from 1, and of all.
    step, steps        training steps done in this epoch, and of a whole one.
    loss, last_loss    mean over the images of the epoch so far, and of the last step.
    images_per_second  rate since the epoch began. remaining_seconds  until the end of the last epoch.
    All are Python's numbers. Raises nothing.

    Example, a callback that keeps the losses:
        >>> import nbcnn
        >>> class Losses(nbcnn.Callback):
        ...     def __init__(self):
        ...         self.seen = []
        ...     def reading(self, trainer, reading):
        ...         self.seen.append(reading.last_loss)
        >>> losses = Losses()
        >>> losses.reading(None, nbcnn.Reading(1, 5, 10, 100, loss=2.1, last_loss=1.9, images_per_second=1e4, remaining_seconds=3.0))
        >>> losses.seen
        [1.9]
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    last_loss: float
    images_per_second: float
    remaining_seconds: float


@dataclass(frozen=True)
class Epoch:
    """One row of the metrics.

    epoch, step            number of the epoch, from 1, and of the training steps so far.
    learning_rate          of its last step.
    train_loss, test_loss  means over the images; without a test set `test_loss` is None, and the row has none.
    seconds                of the training alone. test_seconds  of the evaluation.
    images_per_second      of the training alone.
    time                   where the time of one of its training steps went (`timeline.watch`); None if that step was taken before a resume.
    scores                 further numbers about the weights, by name.
    Raises nothing.

    Example:
        >>> import nbcnn
        >>> epoch = nbcnn.Epoch(1, 100, 0.1, train_loss=0.9, test_loss=0.8, seconds=2.0, test_seconds=0.1, images_per_second=5e3)
        >>> epoch.loss, epoch.row()["test_loss"]
        (0.8, 0.8)
    """

    epoch: int
    step: int
    learning_rate: float
    train_loss: float
    test_loss: float | None
    seconds: float
    test_seconds: float
    images_per_second: float
    time: dict[str, Any] | None = None
    scores: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> Row:
        """The row of the metrics: these numbers, then the scores."""
        row = asdict(self)
        if self.test_loss is None:
            del row["test_loss"]
        return row | row.pop("scores")

    @property
    def loss(self) -> float:
        """What the best epoch has the least of: the test loss, or without a test set the training loss."""
        return self.train_loss if self.test_loss is None else self.test_loss


@dataclass(frozen=True)
class Result:
    """How a run ended.

    interrupted, signal                a signal ended it, and its number; else False and None.
    epochs, step                       finished epochs, and training steps.
    train_loss, test_loss, best_loss   means over the images, None before the first finished epoch; best_epoch  the epoch of the least.
    seconds, images_per_second         of the training alone.
    stopped                            why a callback ended it before its last epoch (`Trainer.stop`), in words; empty if none did.
    Raises nothing.

    Example:
        >>> import nbcnn
        >>> nbcnn.Result(True, 2, 3, 300, 0.9, 0.8, 0.8, 3, seconds=6.0, images_per_second=5e3).exit_code
        130
    """

    interrupted: bool
    signal: int | None
    epochs: int
    step: int
    train_loss: float | None
    test_loss: float | None
    best_loss: float | None
    best_epoch: int | None
    seconds: float
    images_per_second: float
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal's number."""
        return 128 + (self.signal or 0) if self.interrupted else 0


class Callback:
    """The receiver of a trainer's events; override the methods of the events that are of interest.

    What a method raises ends the training with CallbackError, and what is trained is saved. `trainer.stop(reason)` ends it after the epoch.

    Example:
        >>> import numpy as np, nbcnn
        >>> class Print(nbcnn.Callback):
        ...     def epoch(self, trainer, epoch):
        ...         print(f"epoch {epoch.epoch} of {trainer.epochs}")
        >>> model = nbcnn.Model([nbcnn.Linear(2)], "cross_entropy", mode="cpu")
        >>> history = model.fit(np.zeros((4, 3), np.uint8), [0, 1, 0, 1], epochs=2, callbacks=[Print()], verbose=0)
        epoch 1 of 2
        epoch 2 of 2
    """

    def begin(self, trainer: Trainer) -> None:
        """The training is about to begin, or to go on; `trainer.rows` has the epochs before."""

    def reading(self, trainer: Trainer, reading: Reading) -> None:
        """The loss was read between two training steps."""

    def epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """An epoch is trained, evaluated and saved."""

    def end(self, trainer: Trainer, result: Result) -> None:
        """The last epoch is done, or a signal came and the state is saved."""

    def close(self) -> None:
        """Always called last, also when training raises."""
