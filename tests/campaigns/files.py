"""Damaged files: data sets, feature folders, checkpoints, runs, reports and tile caches, cut, flipped, spliced, with huge numbers and deep nesting.

Whoever reads them must go on (exit code 0) or say in a sentence what is wrong with the data (3), in bounded time and memory.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from nbcnn import datasets, modes
from nbcnn.classify.feature_writer import FeatureWriter, publish
from nbcnn.classify.features import Origin, read_features
from nbcnn.cli import classify
from nbcnn.cli.errors import DATA, OK, exit_code, message
from nbcnn.datasets import cifar10, gepiii, mnist
from nbcnn.lab.report.source import opened
from nbcnn.lab.report.write import report
from nbcnn.modes import named
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.run import autotune
from nbcnn.run.net import Net
from nbcnn.train import checkpoint

from .damage import damaged, damaged_json

sys.path.append(str(Path(__file__).parents[1]))
import samples
from scripts import TINY, exits, extract, train

SECONDS, BYTES = 20, 1 << 30
"""What one reading may take, of a core and of memory: the slowest good one takes a second, the largest less than 200 MB."""
DEADLINE = 200
"""Seconds of a clock, on a machine with much else to do."""

_kept = tempfile.TemporaryDirectory(prefix="campaign-files-good-")


@dataclass(frozen=True)
class Subject:
    """What is read. `make` writes good files into a folder, `read` reads them; of `files`, patterns, one is damaged."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: tuple[str, ...] = ("*",)


@cache
def good(name: str) -> Path:
    """The folder with the good files of a subject, made once."""
    folder = Path(_kept.name) / name
    folder.mkdir()
    SUBJECTS[name].make(folder)
    return folder


def attack(seed: int, folder: Path) -> None:
    """Damage one file of one subject and read it."""
    random = Random(seed)
    name = random.choice(ORDER)
    subject = SUBJECTS[name]
    shutil.copytree(good(name), folder, dirs_exist_ok=True)
    path = random.choice(sorted({path for pattern in subject.files for path in folder.rglob(pattern) if path.is_file()}))
    spoil(random, path)
    code, text = outcome(lambda: subject.read(folder))
    where = f"{name}, {path.name}: exit {code}"
    assert code in (OK, DATA), f"{where}: {text[:300]}"
    assert code == OK or sentence(text), f"{where}, but no sentence: {text[:300]!r}"


def spoil(random: Random, path: Path) -> None:
    """Damage the file: documents as such, what is compressed also inside."""
    content = path.read_bytes()
    if path.suffix == ".json":
        content = damaged_json(random, content)
    elif path.suffix == ".jsonl":
        lines = content.splitlines(keepends=True)
        at = random.randrange(len(lines))
        lines[at] = damaged_json(random, lines[at]).replace(b"\n", b"") + b"\n"
        content = b"".join(lines)
    elif path.suffix == ".gz" and random.random() < 0.6:
        content = gzip.compress(damaged(random, gzip.decompress(content)), 1)
    else:
        content = damaged(random, content)
    path.write_bytes(content)


def sentence(text: str) -> bool:
    """Whether `text` is words for people: short, and not an error of Python with its name in front."""
    return 20 < len(text) < 3000 and not re.match(r"[\w.]*(Error|Exception|Warning)\b", text) and "Traceback" not in text


class TooLong(BaseException):
    """A reading took longer than `SECONDS`; no handler of the program's may take it for something of its own."""


def outcome(read: Callable[[], object]) -> tuple[int, str]:
    """The exit code of `read` as a command has it, and what it says; a warning of NumPy or Python counts as an error."""
    said = io.StringIO()
    with bounded(), warnings.catch_warnings(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            code = read()
        except TooLong:
            raise AssertionError(f"it took longer than {SECONDS} s") from None
        except Exception as error:
            return exit_code(error), message(error)
    return (code, said.getvalue().removeprefix("nbcnn: error: ")) if isinstance(code, int) else (OK, "")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Within, `SECONDS` of a core, `DEADLINE` of a clock, and `BYTES` of memory more than there are now."""

    def late(*_: object) -> None:
        raise TooLong

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    limited = ((signal.ITIMER_PROF, signal.SIGPROF, SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, DEADLINE))
    before = {number: signal.signal(number, late) for _, number, _ in limited}
    for timer, _, seconds in limited:
        signal.setitimer(timer, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, limits[1]))
    try:
        yield
    finally:
        for timer, number, _ in limited:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
        resource.setrlimit(resource.RLIMIT_AS, limits)


# -- data sets


def make_idx(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, compress in zip(mnist.FILES, (False, True, True, False), strict=True):
        shape = (5, 6, 6) if "images" in name else (5,)
        content = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
        content += rng.integers(0, 10, shape).astype(np.uint8).tobytes()
        (folder / (name + ".gz" if compress else name)).write_bytes(gzip.compress(content) if compress else content)


def _records(count: int) -> bytes:
    table = np.zeros((count, cifar10.RECORD), np.uint8)
    table[:, 0] = np.arange(count) % 10
    return table.tobytes()


def make_cifar(folder: Path) -> None:
    for name in cifar10.FILES:
        (folder / name).write_bytes(_records(2))


def make_archive(folder: Path) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in (("readme.html", b"text"), *((name, _records(2)) for name in cifar10.FILES)):
            info = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (folder / cifar10.ARCHIVE).write_bytes(gzip.compress(plain.getvalue(), 1))


def read_archive(folder: Path) -> None:
    whole, cifar10.RECORDS = cifar10.RECORDS, 2
    try:
        datasets.load("cifar10", data_dir=folder, download=False)
    finally:
        cifar10.RECORDS = whole


def make_energy(folder: Path) -> None:
    days = [day for first in (datetime(2016, 1, 1), datetime(2016, 8, 5), datetime(2016, 11, 1)) for day in (first + timedelta(d) for d in range(3))]
    stamps = [(day + timedelta(hours=hour)).strftime("%Y-%m-%d %H:%M:%S") for day in days for hour in range(24)]
    rows = {
        "building_metadata.csv": ["site_id,building_id,primary_use", "5,70,Office", "5,71,Lodging"],
        "weather_train.csv": [
            "site_id,timestamp,air_temperature,cloud_coverage,dew_temperature",
            *(f"5,{stamp},{h % 24}.5,,3" for h, stamp in enumerate(stamps)),
        ],
        "train.csv": [
            "building_id,meter,timestamp,meter_reading",
            *(f"{b},0,{stamp},{h % 24 + b}.25" for h, stamp in enumerate(stamps) for b in (70, 71)),
        ],
    }
    for name in gepiii.FILES:
        (folder / name).write_text("\n".join(rows[name]) + "\n")


# -- features, runs, reports

ORIGIN = Origin(
    "runs/x", "checkpoint-last.safetensors", "ab" * 32, "shapes", "made", ("a", "b"), (3, 8, 8), (2, 2, 2), "cpu", None, "fp32", "autoencoder"
)


def make_features(folder: Path, storage: str = "npy") -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(12, dtype=np.int32) % 2
    with (
        FeatureWriter(folder, "train", 12, 8, labels=labels, storage=storage) as first,
        FeatureWriter(folder, "test", 6, 8, labels=labels[:6], storage=storage) as second,
    ):
        for writer in (first, second):
            writer.write(0, rng.standard_normal((writer.count, 8), dtype=np.float32) + np.float32(3) * labels[: writer.count, None])
        publish(folder, ORIGIN, first, second)


def read_values(folder: Path) -> None:
    found = read_features(folder)
    assert np.isfinite(found.train).all()


def classify_features(folder: Path) -> int:
    return exits(classify.main, [folder, "--device", "cpu", "--quiet", "--jobs", "1", "--out", folder / "out"])


def make_run(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert exits(train, [*TINY, "--out", folder / "run", "--quiet"]) == 0


def make_report(folder: Path) -> None:
    make_run(folder)
    path = samples.saved(folder / "results")
    time = {"kernels_ms": {"conv fprop": 2.0, "conv wgrad": 2.5}, "gaps_ms": 0.2, "host_ms": 0.1, "step_ms": 4.8}
    (row,) = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row | {"epoch": at, "time": time}) + "\n" for at in (1, 2)))
    (folder / "classify").mkdir()
    scores = {"test_accuracy": 0.5, "train_accuracy": 1.0}
    encoder = scores | {"confusion": [[1, 1], [1, 1]], "test_samples": 4}
    found = {"dataset": "shapes", "classes": ["ring", "bar"], "checkpoint_sha256": _sha(folder / "run"), "run": "run"}
    found["classifiers"] = {"encoder": encoder, "raw pixels": scores}
    (folder / "classify" / "classify.json").write_text(json.dumps(found))
    path.rename(folder / "results.json")


def _sha(run: Path) -> str:
    return hashlib.sha256((run / checkpoint.BEST).read_bytes()).hexdigest()


def read_report(folder: Path) -> None:
    report(opened(folder / "run", folder / "results.json", folder))


def extract_run(folder: Path) -> int:
    return exits(extract, [folder / "run", "--limit", "2", "--mode", "cpu", "--quiet", "--out", folder / "features"])


def make_checkpoint(folder: Path) -> None:
    tensors = {"w": np.ones((3, 4), np.float32), "n": np.arange(4), "b": np.zeros(2, np.uint8)}
    for name in (checkpoint.LAST, checkpoint.BEST):
        checkpoint.save(folder / name, tensors, {"step": "3", "note": "x"})


# -- tiles


@dataclass(frozen=True)
class Tile:
    size: int


def _with_tiles(path: Path) -> dict[str, Any]:
    """Tune a small net whose convolution has three tiles, with the cache at `path`."""
    row = modes.MODES["cpu", "fp32"]
    impl = replace(
        row.fallbacks[0][1][named("conv_fprop")], tile=lambda call, cores: Tile(1), candidates=lambda call, cores: [Tile(n) for n in (1, 2, 3)]
    )
    changed = replace(row, fallbacks=(("cpu", dict(row.fallbacks[0][1]) | {named("conv_fprop"): impl}),))
    kept = autotune.cache_path, autotune._milliseconds
    modes.MODES["cpu", "fp32"] = changed
    autotune.cache_path, autotune._milliseconds = (lambda device: path), (lambda bound, device: float(bound.call.tile.size))
    try:
        net = Net([Conv2d(3, 3, padding=1, in_channels=3), MSE()], (3, 4, 4), mode="cpu")
        return autotune.tune(net, [net.lower(net.record_gradients(2))])
    finally:
        modes.MODES["cpu", "fp32"] = row
        autotune.cache_path, autotune._milliseconds = kept


def read_tiles(folder: Path) -> None:
    (found,) = _with_tiles(folder / "tiles.json").values()
    assert found["size"] in (1, 2, 3), f"tile {found} is none of those offered"


SUBJECTS = {
    "mnist": Subject(make_idx, lambda folder: datasets.load("mnist", data_dir=folder)),
    "cifar10 files": Subject(make_cifar, lambda folder: datasets.load("cifar10", data_dir=folder, download=False)),
    "cifar10 archive": Subject(make_archive, read_archive),
    "energy": Subject(make_energy, lambda folder: datasets.load_series("energy", data_dir=folder)),
    "features": Subject(make_features, read_values),
    "features as csv": Subject(lambda folder: make_features(folder, "csv"), read_values),
    "classification": Subject(make_features, classify_features),
    "checkpoint": Subject(make_checkpoint, lambda folder: checkpoint.load(folder / checkpoint.LAST), (checkpoint.LAST,)),
    "report": Subject(make_report, read_report, ("*.json", "metrics.jsonl", "*.png")),
    "extraction": Subject(make_run, extract_run, ("config.json", "config.json", checkpoint.LAST)),
    "tiles": Subject(lambda folder: _with_tiles(folder / "tiles.json"), read_tiles),
}
SLOW = ("energy", "classification", "extraction")
"""A year of hours, and whole commands: they come a fourth as often."""
ORDER = (*SLOW, *4 * [name for name in SUBJECTS if name not in SLOW])
