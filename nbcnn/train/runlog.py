"""A run's folder: config.json, metrics.csv and metrics.jsonl, the names of its checkpoints and pictures."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbcnn.datasets import NAMES, SERIES
from nbcnn.files import atomic, document
from nbcnn.nn.models import MODELS
from nbcnn.train.checkpoint import BEST, LAST

Row = dict[str, Any]
"""One epoch's metrics; "epoch" counts from 1."""


_FORM = {"flags": {"model": str, "data_dir": str}, "data": {"name": str}}
"""What every reader of config.json needs; each command asks for more by itself."""


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
        self._csv, self._jsonl = self.path / "metrics.csv", self.path / "metrics.jsonl"

    def is_taken(self) -> bool:
        """True if something with this name exists and is not an empty folder."""
        return self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))

    def check_writable(self) -> None:
        """Raise OSError now if the folder could not be made or written later; leaves nothing behind."""
        nearest = self.path
        while not nearest.exists():
            nearest = nearest.parent
        try:
            with tempfile.TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            raise OSError(error.errno, f"cannot write the run folder ({error.strerror}); choose another with --out", str(self.path)) from None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, in a new folder if need be."""
        self.path.mkdir(parents=True, exist_ok=True)
        atomic.replace_bytes(self.config_path, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())

    def read_config(self) -> dict[str, Any]:
        """The content of config.json. Raises RunError if it is missing, or does not say what was trained on which data."""
        try:
            config = document.load(self.config_path)
        except OSError as error:
            raise RunError(f"{self.path} is no run folder: {self.config_path.name} cannot be read ({error.strerror})") from None
        except document.DocumentError as error:
            raise RunError(str(error)) from None
        for part, form in _FORM.items():
            held = config.get(part) if isinstance(config, dict) else None
            absent = [name for name in form if not isinstance(held, dict) or name not in held]
            if absent:
                raise RunError(f"{self.config_path} is no description of a run: {absent[0]!r} is missing in its {part!r}")
        try:
            document.fits(config, _FORM, str(self.config_path))
        except document.DocumentError as error:
            raise RunError(f"{error}; it is damaged, or of another version") from None
        return config

    def read_known(self) -> dict[str, Any]:
        """`read_config`, for who makes the network and loads the data again. Raises RunError if this version knows one of them not."""
        config = self.read_config()
        for what, name, known in (("model", config["flags"]["model"], (*MODELS, "s4convd")), ("data set", config["data"]["name"], (*NAMES, *SERIES))):
            if name not in known:
                raise RunError(f"{self.config_path} is damaged or of another version: there is no {what} {name!r}")
        return config

    def append(self, row: Row) -> None:
        """Add one epoch's metrics to both files."""
        with open(self._jsonl, "a") as file:
            file.write(json.dumps(row) + "\n")
        new = not self._csv.exists()
        with open(self._csv, "a", newline="") as file:
            file.write(_csv_lines([row], header=new))

    def rows(self) -> list[Row]:
        """The metrics so far; a line that a crash cut short is left out."""
        made = []
        try:
            lines = self._jsonl.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                made.append(document.parse(line, str(self._jsonl)))
            except document.DocumentError:
                continue
        return made

    def truncate(self, epochs: int) -> list[Row]:
        """Keep the metrics of the first `epochs` epochs, drop the rest from both files, and return what is kept."""
        kept = [row for row in self.rows() if row["epoch"] <= epochs]
        atomic.replace_bytes(self._jsonl, "".join(json.dumps(row) + "\n" for row in kept).encode())
        if kept:
            atomic.replace_bytes(self._csv, _csv_lines(kept, header=True).encode())
        else:
            self._csv.unlink(missing_ok=True)
        return kept


def _csv_lines(rows: list[Row], header: bool) -> str:
    text = io.StringIO()
    numbers = [name for name in rows[0] if name != "time"]  # which is a table of its own, and only in the JSON lines
    writer = csv.DictWriter(text, numbers, lineterminator="\n", extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
