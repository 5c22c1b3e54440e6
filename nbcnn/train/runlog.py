"""This module reads and writes the run folder (config.json, metrics, names of checkpoints and pictures) and checks that its files agree.

A checkpoint says in its metadata which flags its run has and which metrics it counts on, so that a file that was edited, or is another run's, is
noticed before it changes what a resumed run computes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbcnn.files import atomic, document, lock, regular
from nbcnn.files.quote import brief, quoted
from nbcnn.files.suggest import for_shell
from nbcnn.train import checkpoint, former
from nbcnn.train.checkpoint import BEST, LAST, Metadata, Tensors

OWN_MODEL = "own"
"""What config.json calls a network that is no ready-made one."""
Row = dict[str, Any]
"""One epoch's metrics; "epoch" counts from 1."""


_FORM = {"flags": {"model": str, "data_dir": str}, "data": {"name": str}, "command?": (str, [str])}
"""The form that every reader of config.json checks; each command checks further entries itself."""

_OTHERS = {
    "features.json": "it holds features, which python -m nbcnn classify {} reads; name the run that they were extracted from",
    "classify.json": "it holds a classifier, which python -m nbcnn predict RUN IMAGES --classifier {}/classifier.safetensors applies",
    "pipeline.json": "it holds a pipeline, which python -m nbcnn pipeline --resume {} continues; name the run in it",
}
"""What other folders of nbcnn are, by the files that describe them."""


class RunError(Exception):
    """A folder is not the run folder that was asked for; the message says why."""

    exit_code = 3


class RunFolder:
    """The files of one run; nothing is made before something is written."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.last, self.best = self.path / LAST, self.path / BEST
        self.curves, self.reconstructions = self.path / "curves.png", self.path / "reconstructions.png"
        self.confusion, self.mistakes = self.path / "confusion.png", self.path / "mistakes.png"
        self.segmentation = self.path / "segmentation.png"
        self._csv, self._jsonl = self.path / "metrics.csv", self.path / "metrics.jsonl"
        self._held = False
        self._config: dict[str, Any] = {}

    def is_taken(self) -> bool:
        """True if something with this name exists and is not an empty folder. Hidden files do not count: a killed run may leave only its lock."""
        return self.path.exists() and not (self.path.is_dir() and all(file.name.startswith(".") for file in self.path.iterdir()))

    def other(self) -> str:
        """What the folder is, where it is one of nbcnn's and no run's; empty elsewhere."""
        return next((words.format(for_shell(self.path)) for mark, words in _OTHERS.items() if (self.path / mark).is_file()), "")

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which this process is the folder's only writer; makes the folder if need be; may be nested. Raises `lock.Held`."""
        if self._held:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with lock.writing(self.path):
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def checkpoint(self, which: str | None = None) -> Path:
        """The checkpoint that this run's weights are read from: "last" or "best", or None for the run's own rule.

        That is the last one, or the best where the training had --patience or EarlyStopping (`note_best`). Raises RunError for another folder of
        nbcnn.
        """
        if not self.config_path.exists() and (other := self.other()):
            raise RunError(f"{self.path} is no run folder: {other}")
        if which is None:
            try:
                which = str(document.load(self.config_path).get("checkpoint", "last"))
            except (OSError, ValueError, AttributeError):
                which = "last"  # who reads the checkpoint says what is wrong with the folder
        return self.best if which == "best" else self.last

    def note_best(self) -> None:
        """Have config.json say that the run's weights are those of its best epoch."""
        self.amend_config(lambda config: config | {"checkpoint": "best"})

    def record_epochs(self, epochs: int) -> None:
        """Have config.json, which a command's run has, say how many epochs the run has now."""
        if self._config:
            self.amend_config(lambda config: config | {"flags": config["flags"] | {"epochs": epochs}})

    def prepare(self) -> None:
        """Make the folder if need be."""
        self.path.mkdir(parents=True, exist_ok=True)

    def keep(self, path: Path, tensors: Tensors, metadata: Metadata) -> None:
        """Put a checkpoint in place of `path`, as `checkpoint.save`."""
        checkpoint.save(path, tensors, metadata)

    def has_checkpoint(self) -> bool:
        """Whether there is any checkpoint, whole or not."""
        return any(self.path.glob("checkpoint-*.safetensors"))

    def check_writable(self, flag: str = "--out") -> None:
        """Raise OSError now if the folder could not be made or written later; leaves nothing behind.

        `flag` is what the message says names the folder.
        """
        nearest = self.path
        while not nearest.exists():
            nearest = nearest.parent
        try:
            with tempfile.TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            raise OSError(error.errno, f"cannot write the run folder ({error.strerror}); choose another with {flag}", str(self.path)) from None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, in a new folder if need be. Raises UsageError for what could not be read again."""
        self.path.mkdir(parents=True, exist_ok=True)
        # A command may name files in bytes that are no UTF-8, which no document holds.
        command = config.get("command")  # older versions wrote one string
        words = {"command": [os.fsencode(word).decode(errors="backslashreplace") for word in command]} if isinstance(command, list) else {}
        text = json.dumps({**config, **words}, indent=2, ensure_ascii=False) + "\n"
        atomic.replace_bytes(self.config_path, document.readable(text, str(self.config_path)).encode())
        self._config = dict(config)

    def amend_config(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Put what `change` makes of config.json in its place; where somebody removed it in the meantime, of what this process wrote or read last."""
        before = self._config if self._config and not self.config_path.exists() else self.read_config()
        if (after := change(before)) != before or not self.config_path.exists():
            self.write_config(after)

    def read_config(self) -> dict[str, Any]:
        """The content of config.json. Raises RunError if it is missing, or does not say what was trained on which data."""
        try:
            config = former.of_config(document.load(self.config_path))
        except OSError as error:
            why = "it is a file" if self.path.is_file() else self.other() or f"{self.config_path.name} cannot be read ({error.strerror})"
            raise RunError(f"{self.path} is no run folder: {why}") from None
        except document.DocumentError as error:
            raise RunError(str(error)) from None
        for part in ("flags", "data"):
            held = config.get(part) if isinstance(config, dict) else None
            absent = [name for name in _FORM[part] if not isinstance(held, dict) or name not in held]
            if absent:
                raise RunError(f"{self.config_path} is no description of a run: {quoted(absent[0])} is missing in its {quoted(part)}")
        try:
            document.fits(config, _FORM, str(self.config_path))
        except document.DocumentError as error:
            raise RunError(f"{error}; it is damaged, or of another version") from None
        self._config = config
        return config

    def append(self, rows: Sequence[Row]) -> None:
        """Add the last of `rows`, one epoch's metrics, to both files; the lines of JSON are then on the disk, for the checkpoint that counts on them.

        A file that somebody removed in the meantime, or put something else in its place, is written anew with all `rows`.
        """
        if not (self._jsonl.is_file() and self._csv.is_file()):
            self.rewrite(rows)
            return
        with atomic.named(self._jsonl), open(self._jsonl, "ab") as file:
            file.write(line_of(rows[-1]))
            file.flush()
            os.fsync(file.fileno())
        with atomic.named(self._csv), open(self._csv, "a", newline="") as file:
            file.write(_csv_lines(rows[-1:], header=False))

    def rows(self) -> list[Row]:
        """The metrics so far; lines that are cut short or damaged are left out."""
        return [row for row in self._lines() if row is not None]

    def _lines(self) -> list[Row | None]:
        """The row of every line of the metrics, None for a line that holds no row."""
        try:
            return [_row(line) for line in regular.read(self._jsonl).splitlines()]
        except FileNotFoundError:
            return []

    def recall(self, epochs: int, digest: str | None, last: str | None) -> tuple[list[Row], str]:
        """The metrics of the first `epochs` epochs as a checkpoint knows them, and what to say about it, mostly nothing.

        `digest` is the checkpoint's `digest` of them and `last` the last of them, which a crash may have cost; None for checkpoints of earlier
        versions, which had neither. Raises RunError if they are not those.
        """
        found = self._lines()[:epochs]
        rows = [row for number, row in enumerate(found, 1) if row is not None and row["epoch"] == number]
        if digest is None or not epochs:
            if len(rows) != epochs:
                raise RunError(f"{self._jsonl} has {len(rows)} of the {epochs} epochs before the checkpoint")
            return rows, ""
        final = _row((last or "").encode())
        if final is None:
            raise RunError(f"the checkpoint beside {self._jsonl} does not say what its last epoch's metrics were")
        if len(rows) == epochs and rows_digest(rows) == digest:
            return rows, ""
        # Every line but the last was there when an earlier checkpoint was written; of the last the checkpoint has a copy.
        whole = [*rows[: epochs - 1], final]
        if len(whole) != epochs or rows_digest(whole) != digest:
            raise RunError(
                f"{self._jsonl} is not the one that the checkpoint counts on: a line of its first {epochs} epochs was lost or changed; "
                f"put the file back, or start a new run from the weights with --weights {for_shell(self.path)}"
            )
        return whole, f"{self._jsonl} had lost what epoch {epochs} wrote; the checkpoint knows it, and the line is written again"

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Make both files of metrics those of `rows`; without rows there are none."""
        if not rows:
            self._jsonl.unlink(missing_ok=True)
            self._csv.unlink(missing_ok=True)
            return
        for path, content in ((self._jsonl, b"".join(map(line_of, rows))), (self._csv, _csv_lines(rows, header=True).encode())):
            if not path.is_file() or regular.read(path) != content:
                atomic.replace_bytes(path, content)


class InMemory(RunFolder):
    """A run of which nothing is written: its metrics are the trainer's, its checkpoints `kept`, by their names."""

    def __init__(self) -> None:
        super().__init__("memory")
        self.kept: dict[str, Tensors] = {}

    def prepare(self) -> None:
        """Nothing: there is no folder."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing: nobody else can write here."""
        yield

    def keep(self, path: Path, tensors: Tensors, metadata: Metadata) -> None:
        """Keep the best tensors, in place of the ones before. The last ones are the session's, which is still there."""
        if path.name == BEST:
            self.kept[path.name] = tensors

    def note_best(self) -> None:
        """Nothing: the network in memory has the weights."""

    def append(self, rows: Sequence[Row]) -> None:
        """Nothing: the trainer has the rows."""

    def rows(self) -> list[Row]:
        """None: a run in memory is never continued from its folder."""
        return []


def agree(folder: RunFolder, config: Mapping[str, Any], path: Path, notes: Mapping[str, str], free: frozenset[str] = frozenset()) -> None:
    """Raise RunError unless the checkpoint `path` with the metadata `notes` is of the run that `config` describes, but for the flags `free`.

    Of a checkpoint of an earlier version only what it says is compared.
    """
    flags = config["flags"]
    told = [(name, json.dumps(flags[name]), json.dumps(value)) for name, value in flags_of(path, notes).items() if name in flags]
    told += [(name, str(flags[name]), notes[name]) for name in ("model", "batch", "optimizer", "epochs") if name in notes and name in flags]
    told += [("data", str(config["data"]["name"]), notes["data"].rsplit(", ", 2)[0])] if "data" in notes else []
    for name, here, there in told:
        if here != there and name not in free:
            raise RunError(
                f"{folder.config_path} does not belong to {path}: it says {name} {brief(here)}, the checkpoint {brief(there)}. "
                "One of the two was edited or is another run's; put the right one back"
            )


def flags_of(path: Path, notes: Mapping[str, str]) -> dict[str, Any]:
    """The flags that the metadata `notes` of the checkpoint `path` binds its run to; empty for one of an earlier version."""
    try:
        flags = document.parse(notes.get("flags", "{}"), f"{path}: its note of flags")
    except document.DocumentError as error:
        raise RunError(str(error)) from None
    if not isinstance(flags, dict):
        raise RunError(f"{path} was not written by a training run of nbcnn: its flags are no JSON object")
    return flags


def rows_digest(rows: Sequence[Row]) -> str:
    """The SHA-256 of metrics, for the checkpoint that counts on them."""
    made = hashlib.sha256()
    for row in rows:
        made.update(line_of(row))
    return made.hexdigest()


def line_of(row: Row) -> bytes:
    """One epoch's metrics as the line of JSON that is written and digested."""
    return (json.dumps(row) + "\n").encode()


def _row(line: bytes) -> Row | None:
    """The row that a line of JSON holds; None if it is none, or lacks a number that every row has."""
    try:
        row = document.parse(line, "a line of metrics")
    except document.DocumentError:
        return None
    needed = ("epoch", "step", "train_loss", "seconds")
    return row if isinstance(row, dict) and all(type(row.get(name)) in (int, float) for name in needed) else None


def _csv_lines(rows: Sequence[Row], header: bool) -> str:
    text = io.StringIO()
    numbers = [name for name in rows[0] if name != "time"]  # which is a table of its own, and only in the JSON lines
    writer = csv.DictWriter(text, numbers, lineterminator="\n", extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
