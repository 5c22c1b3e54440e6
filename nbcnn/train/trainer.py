"""This module is the training loop around a session: epochs, readings of the loss, checkpoints, interrupts, divergence.

A session (`nbcnn.run.session.TrainingSession`) owns every array and every launch; the trainer owns the order of things and what is kept on disk.
At an epoch's end the state is copied out *before* the evaluation, so that an evaluation can be abandoned at any time. In the simulator, where a
training step may take hours, a step can be abandoned likewise.

Of several ranks each runs this same loop, and rank 0 alone keeps files. They meet whenever the loss is read: there the time is rank 0's,
so that all choose the same next reading, and a signal that any of them got ends the training of all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.files import document
from nbcnn.files.atomic import DiskFull
from nbcnn.files.errors import UsageError, Whole
from nbcnn.files.quote import brief, words
from nbcnn.gpu import faults
from nbcnn.gpu.language import SIMULATOR
from nbcnn.nn.params import under
from nbcnn.ranks.team import ALONE, Team
from nbcnn.train import checkpoint, former
from nbcnn.train.checkpoint import BEST, CheckpointError, Tensors
from nbcnn.train.events import Callback, Epoch, Reading, Result
from nbcnn.train.interrupt import Interrupted, Interrupts
from nbcnn.train.runlog import InMemory, Row, RunFolder, line_of

READING_SECONDS = 1.0
"""Time between two readings of the loss when `log_every` is 0."""


class Diverged(Exception):
    """The loss or a weight is NaN or Inf; the message says where it began and which checkpoint is the last good one.

    After `Model.fit` raised it the model has the last finite weights. On the command line the exit code is 6.

    Example:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Linear(4), nbcnn.Linear(3)], "mse", mode="cpu")
        >>> x = np.ones((4, 3), np.float32)
        >>> try:
        ...     model.fit(x, epochs=60, optimizer=nbcnn.SGD(1e6), verbose=0)
        ... except nbcnn.Diverged:
        ...     print(all(np.isfinite(weights).all() for weights in model.net.params.as_dict().values()))
        True
    """

    exit_code = 6


class CallbackError(Whole, Exception):
    """A callback raised; the message says which, what, and what is saved.

    `exit_code` is that of what it raised, else 1; 5 for MemoryError.

    Example:
        >>> import numpy as np, nbcnn
        >>> class Broken(nbcnn.Callback):
        ...     def epoch(self, trainer, epoch):
        ...         raise ValueError("no such column")
        >>> model = nbcnn.Model([nbcnn.Linear(2)], "cross_entropy", mode="cpu")
        >>> try:
        ...     model.fit(np.zeros((4, 3), np.uint8), [0, 1, 0, 1], callbacks=[Broken()], verbose=0)
        ... except nbcnn.CallbackError as error:
        ...     print(error.exit_code, "no such column" in str(error))
        1 True
    """

    def __init__(self, message: str, error: Exception) -> None:
        super().__init__(message)
        self.exit_code = getattr(error, "exit_code", 5 if isinstance(error, MemoryError) else 1)


class Trainer:
    """Trains `session` (a `nbcnn.run.session.TrainingSession`) and keeps metrics and checkpoints in the folder `run`.

    learning_rates  the table that the session was made with; its length is that of the run, a whole number of epochs.
    log_every       training steps between two readings of the loss; 0: about one second.
    save_every      training steps between two checkpoints within an epoch; 0: only at its end.
    identity        strings that say which run this is: they go into every checkpoint, and `resume` refuses other values.
    notes           further strings for every checkpoint.
    scores          asked after every epoch for further numbers about the weights, by name, for the metrics.
    team            the ranks that train together (`nbcnn.ranks.team`), the session's.
    first_epoch     the number that the first epoch's order of images is drawn from, for a training that goes on from an earlier one's weights.

    A session without test images is trained without evaluation; its best epoch is then that of the least training loss.

    Raises ValueError if the table does not end with an epoch.
    """

    def __init__(
        self,
        session: Any,
        run: RunFolder | Path | str,
        *,
        learning_rates: np.ndarray,
        log_every: int = 0,
        save_every: int = 0,
        identity: Mapping[str, str] | None = None,
        notes: Mapping[str, str] | None = None,
        callbacks: Sequence[Callback] = (),
        scores: Callable[[], Mapping[str, float]] | None = None,
        team: Team = ALONE,
        first_epoch: int = 0,
    ) -> None:
        self.first_epoch, self._tested = first_epoch, session.has_tests
        self.session, self.learning_rates, self.team = session, learning_rates, team
        self.epochs, odd = divmod(len(learning_rates), session.steps_per_epoch)
        if odd:
            raise ValueError(f"{len(learning_rates)} learning rates are no whole number of epochs of {session.steps_per_epoch} training steps")
        self.log_every, self.save_every = log_every, save_every
        self.run = run if isinstance(run, RunFolder) else RunFolder(run)
        if team.leads:
            self.run.prepare()
        self.callbacks = tuple(callbacks) if team.leads else ()
        self._scores, self._scored = scores if team.leads else None, dict[str, float]()
        self.notes = dict(notes or {})
        self.identity = {**(identity or {}), "epochs": str(self.epochs), "steps_per_epoch": str(session.steps_per_epoch)}
        document.readable(json.dumps(self.notes | self.identity), "what the checkpoints say of this run")
        self.step = 0
        self.rows: list[Row] = []
        # What would take longer with every epoch if it were made of all rows: their digest and their least loss.
        self._digest, self._least = hashlib.sha256(), math.inf
        self._epoch_seconds = 0.0
        self._test_seconds = 0.0
        self._time: Callable[[], dict[str, Any]] | None = None
        self._saved: Path | None = None
        self._unbound: Path | None = None
        self._behind: Tensors | None = None
        self._kept: tuple[int, float, Tensors] = (0, 0.0, {})
        self._interval = log_every or 1
        self._mark = (0.0, 0)
        self._stop: int | None = None
        self._stopped = ""
        self._took_best = False

    def stop(self, why: str) -> None:
        """For callbacks: end the training after the present epoch, which is not an interruption; `why` is told in the result."""
        self._stopped = self._stopped or why

    def go_back(self) -> None:
        """Give the session the state of the last reading of the loss at which it was finite."""
        self.step, _, tensors = self._kept
        if tensors:
            self.session.load_state(tensors)

    def take_best(self) -> None:
        """Give the network the weights of the best epoch; in a run folder, readers take these from now on.

        Raises CheckpointError if the run's folder has lost them.
        """
        if not self.team.leads:
            return
        self._took_best = True
        self.run.note_best()
        kept = self.run.kept[BEST] if isinstance(self.run, InMemory) else checkpoint.read(self.run.best).tensors
        self.session.net.params.load_dict(under("param.", kept))

    @property
    def epochs_done(self) -> int:
        """Epochs that are trained, evaluated and saved."""
        return len(self.rows)

    @property
    def scored(self) -> dict[str, float]:
        """The scores of the last epoch, or of the best one if the network has its weights; empty before the first and without any."""
        own = {each.name for each in fields(Epoch)}
        rows = [min(self.rows, key=loss_of)] if self._took_best else self.rows
        return {name: value for name, value in (rows[-1] if rows else {}).items() if name not in own}

    def resume(self, path: Path, *, new_epochs: bool = False) -> list[str]:
        """Continue from a checkpoint: state, position and metrics as they were when it was saved. Returns what should be told, mostly nothing.

        The run's number of epochs must be the checkpoint's, unless `new_epochs`. With these, and after resuming from another checkpoint, the
        folder has this position and this number of epochs as soon as `fit` goes on, and stays as it is where a callback ends the training before.
        Raises CheckpointError or RunError if it cannot be read, belongs to another run, or does not fit the session or the metrics beside it,
        UsageError if the run is to have fewer epochs than are trained, `lock.Held` if another process writes in the folder.
        """
        with self.run.held() if self.team.leads else nullcontext():
            return self._resume(path, new_epochs)

    def _resume(self, path: Path, new_epochs: bool) -> list[str]:
        saved = checkpoint.read(path)
        metadata, told = saved.metadata, former.remark(saved.metadata)
        try:
            done, self._epoch_seconds = int(metadata["epochs_done"]), float(metadata["epoch_seconds"])
            self.step = int(metadata["step"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{path} was not written by a training run of nbcnn: {brief(error)} in its metadata") from None
        if not saved.checked:
            raise CheckpointError(f"{path} was not written by a training run of nbcnn: it has no checksum")
        for name, value in self.identity.items():
            free = new_epochs and name == "epochs"
            if not free and metadata.get(name, value) != value:
                raise CheckpointError(f"{path} belongs to another run: its {name} is {brief(metadata[name])}, this run's is {brief(value)}")
        unknown = sorted(self.identity.keys() - metadata.keys())
        self._unbound = path if saved.checked != "all" else None
        if saved.checked != "all" or unknown:
            less = f"whether {', '.join(unknown)} are this run's" if unknown else "whether its names were changed"
            told.append(f"{path} is of an earlier version of nbcnn: it does not say {less}, so that is not checked")
        if new_epochs and self.step > len(self.learning_rates):
            raise UsageError(f"{path} is after {self.step:,} training steps; {self.epochs} epochs would have {len(self.learning_rates):,}")
        try:
            self.session.load_state(saved.tensors)
        except ValueError as error:
            raise CheckpointError(f"{path} does not fit this network: {error}") from error
        taken = self.session.status().step
        if taken != self.step or not 0 <= self.step - done * self.session.steps_per_epoch <= self.session.steps_per_epoch:
            raise CheckpointError(f"{path} contradicts itself: step {self.step} after {done} epochs in its metadata, {taken} steps in its state")
        rows, mended = self.run.recall(done, metadata.get("metrics"), metadata.get("row"))
        told += [mended] if mended else []
        self.rows, self._digest, self._least = [], hashlib.sha256(), math.inf
        for row in rows:
            self._add(row)
        self._behind = saved.tensors if path != self.run.last or metadata.get("epochs") != self.identity["epochs"] else None
        if self.team.leads and path == self.run.last:
            self.run.rewrite(rows)
        self._saved = path
        self._keep()
        return told

    def fit(self) -> Result:
        """Train to the end, or until SIGINT or SIGTERM (then `interrupted` is True and the state is saved).

        Signals are handled only in the main thread, and as before after return. Raises Diverged, and OSError if a
        checkpoint cannot be written; the last good checkpoint stands. Raises CallbackError if a callback does; the state is saved then, but of
        several ranks only as of the last checkpoint. Raises FileExistsError, before training, if the folder holds the metrics of a run that this
        one does not continue, `lock.Held` if another process writes in it, `faults.GpuFault` if the GPU fails.
        """
        with self.run.held() if self.team.leads else nullcontext():
            return self._fit()

    def _check_disk(self) -> None:
        """Raise DiskFull now if the disk has no room for this run's checkpoints: both, and the new one beside the old while it is written."""
        if isinstance(self.run, InMemory) or not self.team.leads:
            return
        each = sum(tensor.nbytes for tensor in self._kept[2].values())
        there = sum(path.exists() for path in (self.run.last, self.run.best))
        needed, free = each * (3 - there), shutil.disk_usage(self.run.path).free
        if free < needed:
            raise DiskFull(f"{self.run.path} needs {needed:,} bytes for checkpoints of {each:,} each, {free:,} are free; nothing is trained yet")

    def _fit(self) -> Result:
        if self.team.leads and self._behind is None and len(self.run.rows()) != self.epochs_done:
            raise FileExistsError(errno.EEXIST, "holds the metrics of another run", str(self.run.path))
        # The trainer itself looks for NaN and Inf, on every device alike, so NumPy's warnings are not needed.
        with Interrupts() as interrupts, np.errstate(over="ignore", invalid="ignore"):
            try:
                self._tell("begin", self)
                self._share_stop()
                if not self._stopped:
                    self._catch_up()
                while self.epochs_done < self.epochs and not self._stopped:
                    if not self._train_epoch(interrupts) or not self._finish_epoch(interrupts):
                        break
                self.session.take_average()
                result = self._result()
                self._tell("end", self, result)
            except BaseException as error:
                with suppress(CallbackError):  # what ended the training counts
                    self._tell("close")
                if fault := faults.explained(error):
                    raise faults.GpuFault(f"{fault}; {self._left()}", fault.exit_code) from error
                raise
            self._tell("close")
            return result

    def _catch_up(self) -> None:
        """Have the folder stand where the resumed checkpoint does, with this run's number of epochs."""
        if self._behind is None:
            return
        self._save(self._behind, self.run.last)
        self._behind = None
        if self.team.leads:
            self.run.rewrite(self.rows)
            self.run.record_epochs(self.epochs)

    def _train_epoch(self, interrupts: Interrupts) -> bool:
        """The training steps that the current epoch still needs; False if a signal came (the state is saved)."""
        steps = self.session.steps_per_epoch
        start = self.epochs_done * steps
        if self.step == start:
            self.session.begin_epoch(self.first_epoch + self.epochs_done)
            self._epoch_seconds = 0.0
            self._keep()
            if self._saved is None:
                self._check_disk()
        self._start_clock()
        while self.step < start + steps:
            # A rank must not be interrupted in a collective: the others would wait for it.
            try:
                with interrupts.at_once() if SIMULATOR and self.team.size == 1 else nullcontext():
                    self._take_step(watched=self.step == start + steps // 2)
            except Interrupted:
                self.step, _, tensors = self._kept
                self._stop = interrupts.signal
                self._save(tensors, self.run.last)
                return False
            self.step += 1
            save = bool(self.save_every) and self.step % self.save_every == 0 and self.step < start + steps
            if save or self._stopping(interrupts) or self.step - self._mark[1] >= self._interval:
                self._read()
                self._agree_to_stop(interrupts)
            if save or self._stop:
                self._save(self._snapshot(), self.run.last)
                self._start_clock()
            if self._stop:
                return False
        return True

    def _stopping(self, interrupts: Interrupts) -> int | None:
        """The signal that ends the training, if any: a single process obeys it at once, several ranks at their next reading."""
        if self.team.size == 1:
            self._stop = interrupts.signal
        return self._stop

    def _agree_to_stop(self, interrupts: Interrupts) -> None:
        """Stop if any rank got a signal."""
        self._stop = -int(self.team.all_min(-(interrupts.signal or 0))) or None

    def _take_step(self, watched: bool) -> None:
        """One training step, the watched one launch by launch: the same kernels."""
        if watched:
            self._time = self.session.step_watched()
        else:
            self.session.step()

    def _finish_epoch(self, interrupts: Interrupts) -> bool:
        """Evaluate, log and save; False if a signal came and epochs are left (the state is saved)."""
        status = self._read()
        time_spent, self._time = self._time and self._time(), None
        snapshot = self._snapshot()
        started = time.perf_counter()
        test_loss = self._evaluate(interrupts) if self._tested else None
        self._agree_to_stop(interrupts)
        if test_loss is None and self._tested:
            self._save(snapshot, self.run.last)
            return False
        if test_loss is not None and not math.isfinite(test_loss):
            raise self._diverged()
        self._test_seconds = time.perf_counter() - started
        epoch = Epoch(
            self.epochs_done + 1,
            self.step,
            float(self.learning_rates[self.step - 1]),
            float(status.loss_mean),
            test_loss,
            self._epoch_seconds,
            self._test_seconds,
            self.session.count / max(self._epoch_seconds, 1e-9),
            time_spent,
            self._scored,
        )
        best = epoch.loss < self._least
        self._add(epoch.row())
        if self.team.leads:
            self.run.append(self.rows)
        if best:
            self._save(snapshot, self.run.best)
        self._save(snapshot, self.run.last)
        self._tell("epoch", self, epoch)
        self._share_stop()
        return not self._stopping(interrupts)

    def _share_stop(self) -> None:
        """Have all ranks know that a callback ended the training: the callbacks are rank 0's."""
        if self.team.size > 1:
            self._stopped = self.team.broadcast(self._stopped.encode()).decode()

    def _evaluate(self, interrupts: Interrupts) -> float | None:
        """The mean loss over the test images, and on rank 0 the scores; None if a signal came meanwhile, to any rank."""
        part: np.ndarray | None = None
        with self.session.averaged(), suppress(Interrupted), interrupts.at_once():
            found = self.session.evaluate_share()
            self._scored = dict(self._scores()) if self._scores else {}
            part = found
        # Outside of that context, because a rank must not be interrupted in a collective: the others would wait for it.
        if not self.team.all_min(part is not None) or part is None:
            return None
        loss, count = self.team.sum(part)
        return float(loss / count) if count else 0.0

    def _now(self) -> float:
        """Rank 0's clock, in seconds."""
        return float(np.frombuffer(self.team.broadcast(np.float64(time.perf_counter()).tobytes()))[0])

    def _start_clock(self) -> None:
        self._mark = (self._now(), self.step)

    def _read(self) -> Any:
        """Wait for the session, check for divergence, tell the callbacks, and set the pace of the next reading."""
        status = self.session.status()
        now = self._now()
        seconds, steps = now - self._mark[0], self.step - self._mark[1]
        self._epoch_seconds += seconds
        self._mark = (now, self.step)
        if status.nonfinite or not math.isfinite(status.loss_mean):
            raise self._diverged()
        if not steps:
            return status
        if now - self._kept[1] >= READING_SECONDS:
            self._keep()
        pace = seconds / steps
        if not self.log_every:
            self._interval = max(1, min(1000, int(READING_SECONDS / max(pace, 1e-9))))
        per_epoch = self.session.steps_per_epoch
        left = self.epochs * per_epoch - self.step
        reading = Reading(
            self.epochs_done + 1,
            self.epochs,
            self.step - self.epochs_done * per_epoch,
            per_epoch,
            float(status.loss_mean),
            float(status.last_loss),
            self.session.count / (per_epoch * max(pace, 1e-9)),
            left * pace + (self.epochs - self.epochs_done) * self._test_seconds,
        )
        try:
            self._tell("reading", self, reading)
        except CallbackError:
            if self.team.size == 1:  # of several ranks all must take part in a snapshot
                self._save(self._snapshot(), self.run.last)
            raise
        return status

    def _tell(self, what: str, *news: Any) -> None:
        """Call the method `what` of every callback. When all have been told, raises CallbackError for the first that raised."""
        failed: list[CallbackError] = []
        for callback in self.callbacks:
            try:
                getattr(callback, what)(*news)
            except Exception as error:
                saved = self._saved or self.team.size == 1
                where = f"the checkpoints are in {self.run.path}" if saved else "no checkpoint had been saved yet"
                if isinstance(self.run, InMemory):
                    where = "nothing was written, and the weights are those of the last training step"
                said = CallbackError(f"the callback {type(callback).__name__}.{what} raised {type(error).__name__}: {words(error)}; {where}", error)
                said.__cause__ = error
                failed.append(said)
        if failed:
            raise failed[0]

    def _snapshot(self) -> Tensors:
        """The session's state. Raises Diverged if it is not finite: a checkpoint with NaN must never replace a good one."""
        tensors = self.session.state()
        for tensor in tensors.values():
            if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
                raise self._diverged()
        if self.team.size > 1:
            self.team.agree({"state": b"".join(tensor.tobytes() for tensor in tensors.values())})
        return tensors

    def _save(self, tensors: Tensors, path: Path) -> None:
        position = {"step": self.step, "epochs_done": self.epochs_done, "epoch_seconds": self._epoch_seconds}
        # The checkpoint holds the digest of its metrics, and a copy of the last row, because a crash may cost the end of a file.
        metrics = {"metrics": self._digest.hexdigest()} | ({"row": json.dumps(self.rows[-1])} if self.rows else {})
        if self.team.leads:
            self.run.keep(path, tensors, {**self.notes, **self.identity, **metrics, **{name: str(value) for name, value in position.items()}})
        self._saved = path

    def _add(self, row: Row) -> None:
        """Add the metrics of one more epoch."""
        self.rows.append(row)
        self._digest.update(line_of(row))
        self._least = min(self._least, loss_of(row))

    def _keep(self) -> None:
        """Copy the state into host memory, from where `_origin` starts."""
        self._kept = (self.step, self._now(), self.session.state())

    def _left(self) -> str:
        """What an ended training has left, in words."""
        return f"the last checkpoint is {self._saved}, which --resume continues" if self._saved else "no checkpoint had been saved yet"

    def _diverged(self) -> Diverged:
        saved = f"the last good checkpoint is {self._saved}" if self._saved else "no checkpoint had been saved yet"
        if isinstance(self.run, InMemory):
            saved = "nothing was written"
        rate = float(self.learning_rates.max())
        size, other = self.session.optimizer.other_rate(rate)
        advice = f"a smaller learning rate ({other:.3g}), clip-norm 1 or init torch usually helps"
        if size == "small":
            advice = f"the learning rate, {rate:.3g}, is small already: look for huge values in the data and the first weights"
        unbound = f"; {self._unbound}, from which this run went on, has no checksum of its names and notes: they may have been changed"
        origin = f"NaN or Inf in epoch {self.epochs_done + 1}, {self._origin()}"
        return Diverged(f"training diverged: {origin}; {saved}; {advice}{unbound if self._unbound else ''}")

    def _origin(self) -> str:
        """Find what was NaN or Inf first, by repeating the training steps since the last kept state and checking each."""
        start, _, tensors = self._kept
        if not self.session.repeats:
            steps = f"steps {start + 1:,} to {self.step:,}" if self.step > start + 1 else f"step {self.step:,}"
            return f"in training {steps}, which cannot be repeated to find out where: the batches came from a callable"
        self.session.load_state(tensors)
        for step in range(start, self.step):
            self.session.step()
            if self.session.status().nonfinite:
                self.session.load_state(tensors)
                for _ in range(start, step):
                    self.session.step()
                return f"training step {step + 1:,}, first in {self.session.first_nonfinite()}"
        if start == self.step:
            return f"in the evaluation after training step {self.step:,}"
        steps = f"steps {start + 1:,} to {self.step:,}, which are" if self.step > start + 1 else f"step {self.step:,}, which is"
        return f"not in the training {steps} finite when repeated: in the evaluation"

    def _result(self) -> Result:
        best = min(self.rows, key=loss_of, default=None)
        last = self.rows[-1] if self.rows else None
        interrupted = self.epochs_done < self.epochs and not self._stopped
        unfinished = self._epoch_seconds if interrupted else 0.0
        seconds = sum(row["seconds"] for row in self.rows)
        return Result(
            interrupted,
            self._stop if interrupted else None,
            self.epochs_done,
            self.step,
            last["train_loss"] if last else None,
            last.get("test_loss") if last else None,
            loss_of(best) if best else None,
            best["epoch"] if best else None,
            seconds + unfinished,
            self.session.count * self.step / self.session.steps_per_epoch / max(seconds + unfinished, 1e-9),
            self._stopped if self.epochs_done < self.epochs else "",
        )


def loss_of(row: Row) -> float:
    """What the best epoch has the least of: the test loss of an epoch's metrics, or without a test set the training loss."""
    return float(row["test_loss"] if "test_loss" in row else row["train_loss"])
