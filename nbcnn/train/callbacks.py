"""This module defines the callbacks that show a training run: progress on stderr, pictures in the run folder."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TextIO

import numpy as np

from nbcnn.files import extras
from nbcnn.nn.layer import whole_number
from nbcnn.nn.optim import check_number
from nbcnn.run import timeline
from nbcnn.train.events import Callback, Epoch, Reading, Result
from nbcnn.train.pixels import counts_of, mean_iou
from nbcnn.train.trainer import Trainer, loss_of

LINE_SECONDS = 10.0
"""Shortest time between two progress lines without a terminal and without `--log-every`."""

SWITCH_SECONDS = 1e-4
"""Python's switch interval while Matplotlib is imported beside a training."""
REDRAW_SECONDS = 30.0
"""The pictures are drawn after an epoch if they were last drawn this long ago, and at the end."""


class Progress(Callback):
    """A line per epoch, and at the end where the time of a training step went; in between a bar on a terminal, progress lines elsewhere.

    stream         where to print; None is stderr.
    every_reading  print each reading of the loss (the user chose the pace), not only one in ten seconds.
    noun           what rates count, per second.
    every_time     say where the time went after every epoch, not only once at the end.
    Raises OSError where the stream cannot be written to. `Model.fit` adds one by itself unless verbose=0.

    Example:
        >>> import io, numpy as np, nbcnn
        >>> shown = nbcnn.Progress(io.StringIO())
        >>> model = nbcnn.Model([nbcnn.Linear(2)], "cross_entropy", mode="cpu")
        >>> history = model.fit(np.zeros((4, 3), np.uint8), [0, 1, 0, 1], epochs=2, callbacks=[shown], verbose=0)
        >>> shown.stream.getvalue().split("  ")[0]
        'epoch 1/2'
    """

    def __init__(self, stream: TextIO | None = None, *, every_reading: bool = False, noun: str = "images", every_time: bool = False) -> None:
        self.stream, self.noun = stream or sys.stderr, noun
        self.every_reading, self.every_time = every_reading, every_time
        self._time: dict[str, Any] | None = None
        self.terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._bar: Any = None
        self._printed = time.perf_counter()

    def reading(self, trainer: Trainer, reading: Reading) -> None:
        if self.terminal:
            self._advance_bar(reading)
        elif self.every_reading or time.perf_counter() - self._printed >= LINE_SECONDS:
            self._printed = time.perf_counter()
            self._print(
                f"epoch {reading.epoch}/{reading.epochs}  step {reading.step:,}/{reading.steps:,}  loss {reading.last_loss:.5f}  "
                f"mean {reading.loss:.5f}  {rate(reading.images_per_second)} {self.noun}/s  {duration(reading.remaining_seconds)} left"
            )

    def epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        self.close()
        self._printed = time.perf_counter()
        scores = "".join(f"{name.replace('_', ' ')} {value:.2%}  " for name, value in epoch.scores.items())
        tested = "" if epoch.test_loss is None else f"test loss {epoch.test_loss:.5f}  "
        self._print(
            f"epoch {epoch.epoch}/{trainer.epochs}  train loss {epoch.train_loss:.5f}  {tested}{scores}"
            f"{duration(epoch.seconds)}{f' + {duration(epoch.test_seconds)} test' if tested else ''}  {rate(epoch.images_per_second)} {self.noun}/s"
        )
        self._time = epoch.time
        if self.every_time:
            self._print_time()

    def end(self, trainer: Trainer, result: Result) -> None:
        self.close()
        self._print_time()

    def _print_time(self) -> None:
        """Say where the last epoch's time went, unless that is not known or said already."""
        if self._time is not None:
            self._print(f"  where the time went: {timeline.line(self._time)}")
        self._time = None

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def _advance_bar(self, reading: Reading) -> None:
        if self._bar is None:
            from tqdm import tqdm

            layout = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {postfix}"
            colour = None if os.environ.get("NO_COLOR") else "green"
            name = f"epoch {reading.epoch}/{reading.epochs}"
            self._bar = tqdm(
                total=reading.steps,
                initial=reading.step,
                desc=name,
                bar_format=layout,
                leave=False,
                file=self.stream,
                colour=colour,
                dynamic_ncols=True,
            )
        self._bar.set_postfix_str(
            f"loss {reading.loss:.5f}, {rate(reading.images_per_second)} {self.noun}/s, {duration(reading.remaining_seconds)} left", refresh=False
        )
        self._bar.n = reading.step
        self._bar.refresh()


def _import_plots() -> None:
    """Import what draws the pictures: 0.4 s that the end of the training then does not take."""
    before = sys.getswitchinterval()
    # A thread that wants Python's lock gets it after this time: 5 ms, were nothing said, in which the GPU would take 25 training steps.
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        from nbcnn.train import plots  # noqa: F401
    finally:
        sys.setswitchinterval(before)


class EarlyStopping(Callback):
    """Ends a training whose loss no longer falls, and gives the network the weights of its best epoch.

    patience      epochs without a lower loss after which the training ends; at least 1. The loss is the test loss, or without a test set the
                  training loss.
    min_delta     by how much the loss must be lower to count; at least 0.
    restore_best  put the weights of the best epoch into the network at the end, also where it was not stopped; `nbcnn.load` and the commands then
                  take these of a run folder, too. checkpoint-best.safetensors has them either way.
    Raises UsageError for numbers out of range.

    Example, with a learning rate at which nothing falls any more:
        >>> import numpy as np, nbcnn
        >>> x, y = np.zeros((4, 3), np.uint8), [0, 1, 0, 1]
        >>> model = nbcnn.Model([nbcnn.Linear(2, bias=False)], "cross_entropy", mode="cpu")
        >>> model.fit(x, y, epochs=50, callbacks=[nbcnn.EarlyStopping(3)], verbose=0).stopped
        'the loss has not fallen for 3 epochs'
    """

    def __init__(self, patience: int = 3, *, min_delta: float = 0.0, restore_best: bool = True) -> None:
        check_number("EarlyStopping", "min_delta", min_delta)
        self.patience = whole_number("EarlyStopping", "patience", patience)
        self.min_delta, self.restore_best = float(min_delta), restore_best
        self._seen: tuple[Trainer | None, int, float, int] = (None, 0, math.inf, 0)

    def begin(self, trainer: Trainer) -> None:
        # A run that ended early, or was killed before its last epoch was told of, has ended when it is resumed, too.
        self._ask(trainer)

    def epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        self._ask(trainer)

    def _ask(self, trainer: Trainer) -> None:
        """End the training if the loss of the epochs so far has not fallen for too long."""
        known, count, best, since = self._seen
        if known is not trainer:
            count, best, since = 0, math.inf, 0
        for row in trainer.rows[count:]:  # at first all: a resumed run has those of before
            loss = loss_of(row)
            best, since = (loss, 0) if loss < best - self.min_delta else (best, since + 1)
        self._seen = trainer, len(trainer.rows), best, since
        if since >= self.patience and trainer.epochs_done < trainer.epochs:
            trainer.stop(f"the loss has not fallen for {since} epoch{'s' if since > 1 else ''}")

    def end(self, trainer: Trainer, result: Result) -> None:
        if self.restore_best and result.best_epoch not in (None, result.epochs) and not result.interrupted:
            trainer.take_best()


class Pictures(Callback):
    """The callback that draws a run's pictures and scores its weights; this base class draws nothing.

    files    the names of what it writes into the run folder.
    command  the command of nbcnn that can use the finished run; empty if there is none.
    outcome  further results of the ended run, for --json.
    draws    whether Matplotlib is installed; where it is not, no picture is drawn, and `written` says so.
    behind   called with a function that draws and its arguments; it may draw beside what comes after the training. None: drawn at once.
    """

    files: ClassVar[str]
    command: ClassVar[str] = ""
    behind: Callable[..., None] | None = None

    def __init__(self) -> None:
        self.outcome: dict[str, Any] = {}
        self.draws = extras.installed("matplotlib")
        self._importing: threading.Thread | None = None

    @property
    def written(self) -> str:
        """The names of `files` that are written, and why no pictures are where there are none."""
        if self.draws:
            return self.files
        others = [name for name in self.files.split(", ") if not name.endswith(".png")]
        return ", ".join([*others, f"no pictures ({extras.missing('matplotlib')})"])

    def reading(self, trainer: Trainer, reading: Reading) -> None:
        if self.draws and self._importing is None:
            # No daemon: Python 3.13 that ends while another thread imports an extension module ends in a segmentation fault.
            self._importing = threading.Thread(target=_import_plots, name="importing Matplotlib")
            self._importing.start()

    def draw(self, function: Callable[..., None], *args: Any) -> None:
        """Draw one picture."""
        if self.behind is None:
            function(*args)
        else:
            self.behind(function, *args)

    def scores(self) -> dict[str, float]:
        """The numbers that `Trainer` adds to the metrics after every epoch, by name; none here."""
        return {}

    def lines(self) -> list[str]:
        """The lines that tell `outcome` in words."""
        return []


class Curves(Pictures):
    """curves.png of a run; `title` stands on it and should name the data set."""

    files = "curves.png"

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self._drawn = time.perf_counter()

    def epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        if self.draws and epoch.epoch < trainer.epochs and time.perf_counter() - self._drawn >= REDRAW_SECONDS:
            self._draw(trainer)

    def end(self, trainer: Trainer, result: Result) -> None:
        if self.draws and trainer.rows and not result.interrupted:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        from nbcnn.train import plots

        self.draw(plots.curves, trainer.run.curves, list(trainer.rows), self.title)
        self._drawn = time.perf_counter()


class Plots(Curves):
    """curves.png and reconstructions.png of a run.

    title   stands on both; it should name the data set.
    images  a few uint8 test images (n, C, H, W) to reconstruct.
    """

    files, command = "curves.png, reconstructions.png", "extract"

    def __init__(self, title: str, images: np.ndarray) -> None:
        super().__init__(title)
        self.images = images

    def _draw(self, trainer: Trainer) -> None:
        from nbcnn.train import plots

        super()._draw(trainer)
        self.draw(plots.reconstructions, trainer.run.reconstructions, self.images, trainer.session.reconstruct(self.images), self.title)


def _counted(net: Any, labels: np.ndarray) -> np.ndarray:
    """Which of `labels` the loss of `net` does not ignore."""
    return np.ones(labels.shape, bool) if net.ignored is None else labels != net.ignored


class ClassesOfPixels(Curves):
    """How well the pixels of the test images are classified after every epoch; curves.png, segmentation.png. What the loss ignores does not count.

    net: the net that is trained. images, labels: of the test set, the labels (M, H, W). classes: their names, for the picture; None numbers them.
    """

    files = "curves.png, segmentation.png"

    def __init__(self, title: str, net: Any, images: np.ndarray, labels: np.ndarray, classes: Sequence[str] | None = None) -> None:
        super().__init__(title)
        self.net, self.images, self.labels, self.classes = net, images, labels, classes

    def scores(self) -> dict[str, float]:
        """test_accuracy, the share of the pixels whose largest logit is their label's; test_iou, `nbcnn.train.pixels.mean_iou`."""
        classes, at, counted = self.net.output_shape[0], 0, _counted(self.net, self.labels)
        counts = np.zeros((classes, classes), np.int64)
        for logits in self.net.predict_batches(self.images):
            part = slice(at, at + len(logits))
            counts += counts_of(self.labels[part], logits.argmax(1), classes, counted[part])
            at += len(logits)
        return {"test_accuracy": float(counts.trace() / max(int(counts.sum()), 1)), "test_iou": mean_iou(counts)}

    def _draw(self, trainer: Trainer) -> None:
        from nbcnn.train import plots

        super()._draw(trainer)
        few, names = self.images[:8], self.classes or [str(number) for number in range(self.net.output_shape[0])]
        found = self.net.predict(few, len(few)).argmax(1)
        title = f"{self.title}\ntest accuracy {trainer.scored['test_accuracy']:.2%}, mean intersection over union {trainer.scored['test_iou']:.2%}"
        self.draw(plots.segmentation, trainer.run.segmentation, few, self.labels[:8], found, names, title)


class Classification(Plots):
    """The accuracy on `data`'s test images after every epoch; curves.png, confusion.png and mistakes.png.

    title  stands on all; it should name the data set. net: the net that is trained. data: a set with labels.
    """

    files, command = "curves.png, confusion.png, mistakes.png", ""

    def __init__(self, title: str, net: Any, data: Any) -> None:
        super().__init__(title, data.test_images)
        self.net, self.labels, self.classes = net, data.test_labels, data.classes
        self.logits = np.empty((0, 0), np.float32)

    def scores(self) -> dict[str, float]:
        """The share of the test images whose largest logit is their label's."""
        self.logits = self.net.predict(self.images)
        counted = _counted(self.net, self.labels)
        return {"test_accuracy": float((self.logits.argmax(1) == self.labels)[counted].mean()) if counted.any() else 0.0}

    def _draw(self, trainer: Trainer) -> None:
        from nbcnn.train import plots

        run, title = trainer.run, f"{self.title}\ntest accuracy {trainer.scored['test_accuracy']:.2%}"
        if not self.logits.size:  # resumed after its last epoch
            self.scores()
        self.draw(plots.curves, run.curves, list(trainer.rows), self.title)
        counted = _counted(self.net, self.labels)
        images, labels, logits = (
            (self.images, self.labels, self.logits) if counted.all() else (each[counted] for each in (self.images, self.labels, self.logits))
        )
        counts = np.zeros((len(self.classes),) * 2, np.int64)
        np.add.at(counts, (labels, logits.argmax(1)), 1)
        self.draw(plots.confusion, run.confusion, counts, self.classes, title)
        self.draw(plots.mistakes, run.mistakes, images, labels, logits, self.classes, title)
        self._drawn = time.perf_counter()


class Forecasts(Pictures):
    """curves.png, forecast.png and forecast.json of a run on series: the last weights beside naive forecasts, on the test months.

    title    stands on both pictures. data  a `nbcnn.datasets.series.SeriesDataset`.
    outcome  RMSLE by name once the run has ended, the network's under "network".
    """

    files = "curves.png, forecast.png, forecast.json"

    def __init__(self, title: str, data: Any) -> None:
        super().__init__()
        self.title, self.data = title, data

    def end(self, trainer: Trainer, result: Result) -> None:
        if not trainer.rows or result.interrupted:
            return
        from nbcnn.files import atomic
        from nbcnn.train import forecast

        data, run = self.data, trainer.run
        batch = min(trainer.session.batch, len(data.starts["test"]))
        windows = data.windows("test")
        made = [trainer.session.net.predict(windows.series(slice(at, at + batch)), batch) for at in range(0, len(windows), batch)]
        logs, truth = data.logs(np.concatenate([part.reshape(-1) for part in made]), windows), data.truth("test")
        self.outcome = {"rmsle": {"network": forecast.rmsle(logs, truth), **forecast.baselines(data)}}
        atomic.replace_bytes(run.path / "forecast.json", (json.dumps(self.outcome | {"windows": len(truth)}, indent=2) + "\n").encode())
        if not self.draws:
            return
        from nbcnn.train import plots

        plots.curves(run.curves, trainer.rows, self.title)
        rows = forecast.stretch(data, "test")
        hours = trainer.session.net.predict(rows.series(), batch)
        plots.forecast(run.path / "forecast.png", np.expm1(data.logs(hours, rows)), data.meters[rows.starts + rows.length], self.title)

    def lines(self) -> list[str]:
        return [f"RMSLE in the test months: {', '.join(f'{name} {score:.4f}' for name, score in self.outcome['rmsle'].items())}"]


def duration(seconds: float) -> str:
    """Seconds in words: 0.42 s, 12.3 s, 4 min 05 s, 2 h 07 min."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def rate(per_second: float) -> str:
    """Images per second in three digits or more: 2.61, 61.4, 1,109."""
    if per_second < 10:
        return f"{per_second:.2f}"
    return f"{per_second:.1f}" if per_second < 100 else f"{per_second:,.0f}"
