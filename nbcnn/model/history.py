"""This module keeps the history of a training, the metrics of its epochs, as a dict, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbcnn.train.events import Result
from nbcnn.train.runlog import Row

NAMES = {"train_loss": "loss", "test_loss": "val_loss", "test_accuracy": "val_accuracy", "test_iou": "val_iou"}
"""Names of metrics that Keras's histories call otherwise."""


class History:
    """The epochs of one `fit`.

    rows         one dict an epoch: epoch, step, learning_rate, loss, seconds, images_per_second, and val_loss and val_accuracy where there
                 was validation data; of pixels also val_iou, the mean intersection over union of their classes.
    interrupted  Ctrl-C ended it; the rows are those before.
    stopped      why a callback ended it early, else empty.
    best_epoch   the number of the epoch with the least val_loss (or loss), None without a finished one.

    Losses are means over examples, `seconds` is the training alone. `result` is what the trainer told (`nbcnn.Result`). `plot` raises ValueError
    without a finished epoch.

    Example:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Linear(2)], "cross_entropy", mode="cpu")
        >>> history = model.fit(np.zeros((4, 3), np.uint8), [0, 1, 0, 1], epochs=2, verbose=0)
        >>> len(history), sorted(history.history)
        (2, ['epoch', 'images_per_second', 'learning_rate', 'loss', 'seconds', 'step'])
    """

    def __init__(self, rows: Sequence[Row], result: Result) -> None:
        hidden = ("time", "test_seconds")
        self.rows = [{NAMES.get(name, name): value for name, value in row.items() if name not in hidden} for row in rows]
        self.interrupted, self.stopped, self.best_epoch = result.interrupted, result.stopped, result.best_epoch
        self._rows = list(rows)

    @property
    def history(self) -> dict[str, list[Any]]:
        """The values of every epoch by name, as Keras has it."""
        return {name: [row[name] for row in self.rows if name in row] for name in (self.rows[0] if self.rows else {})}

    def table(self) -> str:
        """The epochs as text, one line each."""
        names = [name for name in self.history if name != "step"]
        lines = [list(names), *([_shown(row.get(name)) for name in names] for row in self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(names))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)

    def plot(self, path: Path | str, title: str = "training") -> Path:
        """Draw the losses by epoch into the PNG file `path`. Raises ValueError without a finished epoch."""
        if not self._rows:
            raise ValueError("no epoch is finished, so there is nothing to draw")
        from nbcnn.train import plots

        plots.curves(Path(path), self._rows, title)
        return Path(path)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        ended = "interrupted" if self.interrupted else f"stopped: {self.stopped}" if self.stopped else "complete"
        last = (
            ", ".join(f"{name} {_shown(self.rows[-1][name])}" for name in NAMES.values() if name in self.rows[-1]) if self.rows else "none finished"
        )
        return f"<History: {len(self.rows)} epoch{'' if len(self.rows) == 1 else 's'}, {ended}; {last}>"

    def _repr_html_(self) -> str:
        names = [name for name in self.history if name != "step"]
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join("<tr>" + "".join(f"<td>{_shown(row.get(name))}</td>" for name in names) + "</tr>" for row in self.rows)
        return f"<table><tr>{head}</tr>{body}</table>"


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
