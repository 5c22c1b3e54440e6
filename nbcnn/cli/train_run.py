"""What train.py needs between its flags and its Trainer: the run folder, where a resumed run starts, what is written down."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbcnn import __version__
from nbcnn.cli import train_flags
from nbcnn.cli.env import version
from nbcnn.cli.train_data import Material
from nbcnn.files import document
from nbcnn.files.errors import UsageError
from nbcnn.nn.optim import SGD, Adam, learning_rates
from nbcnn.train import checkpoint
from nbcnn.train.runlog import RunError, RunFolder

FORMAT = "nbcnn-training-1"
_UNSAVED = frozenset({"given", "explain", "json", "quiet", "out", "resume"})


@dataclass(frozen=True)
class Start:
    """Where a run begins: its flags, its folder (None until it has a name), and for a resumed run its checkpoint."""

    flags: SimpleNamespace
    folder: RunFolder | None = None
    checkpoint: Path | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def tiles(self, mode: str, precision: str, device: str) -> dict[str, Any]:
        """The tiles of the resumed checkpoint if all three are still the same, else none: choose anew. Another GPU may lack what they need."""
        same = tuple(self.notes.get(name) for name in ("mode", "precision", "device")) == (mode, precision, device)
        if not same or "tiles" not in self.notes:
            return {}
        tiles = document.parse(self.notes["tiles"], f"{self.checkpoint}: its note of tiles")
        document.fits(tiles, {str: {str: int}}, f"{self.checkpoint}: tiles")
        return dict(tiles)


def start(given: SimpleNamespace) -> Start:
    """Fill in the flags and check the run folder, before anything slow.

    Raises UsageError, CheckpointError or RunError for a run that cannot be resumed, OSError if the folder cannot be written.
    """
    if given.resume:
        if given.out:
            raise UsageError("--out and --resume exclude each other: a resumed run stays in its folder")
        return _resumed(given)
    flags = train_flags.fill(given)
    folder = RunFolder(flags.out) if flags.out else None
    if folder and folder.is_taken():
        raise UsageError(f"--out {folder.path} is there already; choose a new folder, or continue that run with --resume {folder.path}")
    if not flags.explain:
        (folder or RunFolder("runs")).check_writable()
    return Start(flags, folder)


def _resumed(given: SimpleNamespace) -> Start:
    path = Path(given.resume)
    saved = path if path.is_file() else path / checkpoint.LAST
    folder = RunFolder(saved.parent)
    config = folder.read_known()
    absent = sorted(vars(train_flags.fill(train_flags.parse([]))).keys() - _UNSAVED - train_flags.FREE_ON_RESUME - config["flags"].keys())
    if absent:
        raise RunError(f"{folder.config_path} is damaged or of another version: {absent[0]!r} is missing in its 'flags'")
    _, notes = checkpoint.load(saved)
    flags = train_flags.from_run(given, config["flags"], folder.path)
    flags.dataset = config["data"]["name"]
    if "mode" not in flags.given:
        flags.mode = notes.get("mode", flags.mode)
    folder.check_writable()
    return Start(flags, folder, saved, notes)


def new_folder(data: Material, mode: str) -> RunFolder:
    """The default run folder, runs/<date-time>-<dataset>-<mode>, with a number behind it if that is taken."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{data.name}-{mode}"
    tries = (RunFolder(Path("runs") / (name + (f"-{number}" if number > 1 else ""))) for number in range(1, 1000))
    return next(folder for folder in tries if not folder.is_taken())


def optimizer(flags: SimpleNamespace) -> SGD | Adam:
    """The optimizer that the flags describe."""
    shared = {"weight_decay": flags.weight_decay, "clip_value": flags.clip_value, "clip_norm": flags.clip_norm}
    return Adam(**shared) if flags.optimizer == "adam" else SGD(momentum=flags.momentum, **shared)


def rates(flags: SimpleNamespace, images: int) -> np.ndarray:
    """The learning rate of every training step of the run, float32, for a training set of so many images or windows."""
    per_epoch = -(-images // flags.batch)
    return learning_rates(flags.schedule, flags.lr, flags.epochs * per_epoch, round(flags.warmup * per_epoch))


def identity(flags: SimpleNamespace, data: Material) -> dict[str, str]:
    """Which run this is, for its checkpoints: a resumed run must agree in all of it."""
    return {
        "format": FORMAT,
        "model": flags.model,
        "data": f"{data.name}, {data.checksum}",
        "batch": str(flags.batch),
        "optimizer": flags.optimizer,
    }


def notes(net: Any, session: Any) -> dict[str, str]:
    """How it was computed, for its checkpoints."""
    return {"mode": net.mode, "precision": net.precision, "device": net.device_name, "tiles": json.dumps(session.tiles()), "nbcnn": __version__}


def config(flags: SimpleNamespace, data: Material, net: Any, session: Any) -> dict[str, Any]:
    """The content of config.json: every flag, the data, how it runs, and all versions."""
    return {
        "flags": {name: value for name, value in vars(flags).items() if name not in _UNSAVED},
        "data": {
            "name": data.name,
            "source": data.source,
            f"training_{data.noun}": data.count,
            f"{data.test_noun.replace(' ', '_')}": data.test_count,
            "shape" if data.noun == "windows" else "image_shape": list(data.shape),
        },
        "mode": net.mode,
        "precision": net.precision,
        "device": net.device_name,
        "ranks": session.team.size,
        "parameters": net.params.count,
        "planned_bytes": session.planned_bytes,
        "tiles": session.tiles(),
        "versions": {"nbcnn": __version__, "python": platform.python_version()} | {name: version(name) for name in ("numpy", "numba", "numba-cuda")},
        "command": sys.argv,
    }


def record_memory(run: RunFolder, net: Any) -> None:
    """Add what the run took of memory to its config.json, beside what was planned."""
    run.write_config(run.read_config() | {"used_bytes": net.place.used_bytes()})
