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
    """A reading of the loss between two training steps. Losses are means over images; `loss` is the mean over the epoch so far."""

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
    """One row of the metrics. `seconds` is the training alone, `test_seconds` the evaluation.

    `time` says where the time of one of its training steps went (`timeline.watch`); None if that step was taken before a resume.
    `scores` are further numbers about the weights, by name. Without a test set `test_loss` is None, and the row has none.
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
    """How a run ended. `epochs` counts finished ones; losses are None before the first; `seconds` is training alone.

    `stopped` says in words why a callback ended it before its last epoch (`Trainer.stop`), empty if none did.
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
    """The receiver of a trainer's events; override the methods of the events that are of interest."""

    def reading(self, trainer: Trainer, reading: Reading) -> None:
        """The loss was read between two training steps."""

    def epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """An epoch is trained, evaluated and saved."""

    def end(self, trainer: Trainer, result: Result) -> None:
        """The last epoch is done, or a signal came and the state is saved."""

    def close(self) -> None:
        """Always called last, also when training raises."""
