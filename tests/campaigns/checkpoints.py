"""Files of a run, or of features, that were damaged, edited, swapped or lost between two commands.

Every attempt spoils one file of a copy of a small run, or of its features, and goes on: `train.py --resume`, `extract_features.py` or the reading of
the features, in this process. It is survived if the command ends with exit code 3 (2 where somebody else holds the folder) and a sentence, and has
changed no file; or with 0 and exactly the result of an undamaged run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # where scripts.py is, also for `python -m tests.campaigns`

from scripts import extract, train

from nbcnn.classify.features import read_features
from nbcnn.cli.errors import guarded
from nbcnn.datasets import shapes
from nbcnn.nn import models
from nbcnn.train import checkpoint
from nbcnn.train.callbacks import Plots
from nbcnn.train.checkpoint import BEST, LAST
from nbcnn.train.runlog import RunFolder

FLAGS = [
    "--model",
    "autoencoder",
    "--dataset",
    "shapes",
    "--mode",
    "cpu",
    "--limit",
    "4",
    "--batch",
    "2",
    "--epochs",
    "3",
    "--save-every",
    "1",
    "--quiet",
]
FEATURES = ["--mode", "cpu", "--limit", "4", "--quiet", "--out"]
VALUES = [None, True, 0, -1, 1, 7, 1e300, 0.5, "", "cpu", "photos", "x" * 300, "\ud800", [], {}, [[1]], {"a": None}]
_KEPT = tempfile.TemporaryDirectory(prefix="campaign-template-")
"""Removed when the process ends."""


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Within, the autoencoder has few filters, its data are made once, and nothing is drawn: the files are what is attacked."""
    few = {**models.MODELS, "autoencoder": lambda channels, height, width: models.autoencoder(channels, wide=3, code=2)}
    patches = [
        mock.patch.object(models, "MODELS", few),
        mock.patch.object(shapes, "load", functools.cache(shapes.load)),
        mock.patch.object(Plots, "_draw"),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def ran(command: Callable[[], int]) -> tuple[int, str]:
    """Exit code and stderr of a command in this process."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = command()
        except SystemExit as left:
            code = int(left.code or 0)
    return code, said.getvalue()


@functools.cache
def template() -> Path:
    """A folder with what is copied and spoilt: the run as it was after its second epoch, one of another seed, features as npy and csv; and the
    finished run, to compare with."""
    folder = Path(_KEPT.name)
    with small():
        for name, seed in (("run", "0"), ("other", "1")):
            stopped, real = folder / name, checkpoint.save

            def save(path: Path, *rest: Any, stopped: Path = stopped, real: Any = real) -> int:
                written: int = real(path, *rest)
                if path.name == LAST and rest[1]["step"] == "4" and rest[1]["epochs_done"] == "2":
                    shutil.copytree(path.parent, stopped, ignore=shutil.ignore_patterns(".*"))
                return written

            with mock.patch.object(checkpoint, "save", save):
                code, text = ran(lambda name=name, seed=seed: train([*FLAGS, "--seed", seed, "--out", str(folder / f"{name}-whole")]))  # type: ignore[misc]
            assert code == 0, text
        for storage in ("npy", "csv"):
            code, text = ran(lambda storage=storage: extract([str(folder / "run"), *FEATURES, str(folder / storage), "--format", storage]))  # type: ignore[misc]
            assert code == 0, text
    return folder


def ends(folder: Path) -> tuple[dict[str, bytes], list[Any]]:
    """What must be the same at the end of two runs: tensors, and metrics without times."""
    tensors, _ = checkpoint.load(folder / LAST)
    rows = [(row["epoch"], row["step"], row["learning_rate"], row["train_loss"], row["test_loss"]) for row in RunFolder(folder).rows()]
    return {name: tensor.tobytes() for name, tensor in tensors.items()}, rows


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- damage to any file


def truncated(path: Path, pick: random.Random) -> None:
    os.truncate(path, pick.randrange(path.stat().st_size))


def flipped(path: Path, pick: random.Random) -> None:
    """A few bytes changed; of a long file half of them near its beginning, where a header is."""
    content = bytearray(path.read_bytes())
    for _ in range(pick.choice([1, 1, 1, 2, 8])):
        content[pick.randrange(min(len(content), pick.choice([200, len(content)])))] ^= pick.randrange(1, 256)
    path.write_bytes(content)


def zeroed(path: Path, pick: random.Random) -> None:
    content = bytearray(path.read_bytes())
    first = pick.randrange(len(content))
    end = min(len(content), first + pick.choice([1, 64, 4096]))
    content[first:end] = bytes(end - first)
    path.write_bytes(content)


def longer(path: Path, pick: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(pick.choice([b"\0", b"x\n", pick.randbytes(50), b"{}\n"]))


def replaced(path: Path, pick: random.Random) -> None:
    path.write_bytes(
        pick.choice([b"", b"\n", b"[]", b"{}", b"null", b"PK\x03\x04" + bytes(99), b"[" * 50_000, pick.randbytes(300), b"\xff\xfe{\0}\0"])
    )


def gone(path: Path, pick: random.Random) -> None:
    path.unlink()


ANY = (truncated, flipped, flipped, zeroed, longer, replaced, gone)


# -- damage to what a file says


def edited(path: Path, pick: random.Random) -> None:
    """One value of a JSON file, at any depth, is another; or a key is missing or new."""
    content = json.loads(path.read_text())
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = pick.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or pick.random() < 0.1:
            break
        place = place[key]
    way = pick.randrange(8)
    if way == 0:
        del place[key]
    elif way == 1 and isinstance(place, dict):
        place[pick.choice(["given", "out", "resume", "explain", "new", ""])] = pick.choice(VALUES)
    else:
        place[key] = pick.choice([*VALUES, place[key] + 1 if isinstance(place[key], int | float) else "other"])
    path.write_text(json.dumps(content))


def line_edited(path: Path, pick: random.Random) -> None:
    """One line of JSON lines says something else, is missing, or stands twice."""
    lines = path.read_text().splitlines()
    at, way = pick.randrange(len(lines)), pick.randrange(4)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(at, lines[at])
    elif way == 2:
        lines.reverse()
    else:
        row = json.loads(lines[at])
        row[pick.choice(sorted(row))] = pick.choice(VALUES)
        lines[at] = json.dumps(row)
    path.write_text("".join(line + "\n" for line in lines))


def header_edited(path: Path, pick: random.Random) -> None:
    """The header of a checkpoint says something else; the seal is as it was."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    one = pick.choice(names)
    way = pick.randrange(5)
    if way == 0:  # two names of one shape, which only a checksum of the header notices
        other = pick.choice([name for name in names if header[name]["shape"] == header[one]["shape"]])
        header[one], header[other] = header[other], header[one]
    elif way == 1:
        header[one + "x"] = header.pop(one)
    elif way == 2:
        header[one][pick.choice(["dtype", "shape", "data_offsets", "more"])] = pick.choice([*VALUES, "I32", [1 << 40], [0, 4]])
    elif way == 3:
        header["__metadata__"][pick.choice(sorted(header["__metadata__"]))] = pick.choice(["", "0", "7", "-1", "nan", "x", "{}"])
    else:
        del header["__metadata__"][pick.choice(sorted(header["__metadata__"]))]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def tensors_edited(path: Path, pick: random.Random) -> None:
    """A checkpoint with its seal, whose tensors are not a run's: one more, one less, one of another shape or type, or NaN."""
    tensors, metadata = checkpoint.load(path)
    name = pick.choice(sorted(tensors))
    way = pick.randrange(5)
    if way == 0:
        tensors[pick.choice(["param.conv9.weight", "optim.v.conv1.bias", "x", "param.", "optim.m."])] = tensors[name]
    elif way == 1:
        del tensors[name]
    elif way == 2:
        tensors[name] = np.zeros((*tensors[name].shape, 2), tensors[name].dtype)
    elif way == 3:
        tensors[name] = tensors[name].astype(np.float64 if tensors[name].dtype != np.float64 else np.float32)
    else:
        name = next(name for name, tensor in tensors.items() if tensor.dtype.kind == "f")
        tensors[name] = np.full_like(tensors[name], pick.choice([np.nan, np.inf]))
    checkpoint.save(path, tensors, metadata)


def swapped(path: Path, pick: random.Random) -> None:
    """The file of the same name of another run."""
    shutil.copy(template() / "other" / path.name, path)


def of_another_flag(path: Path, pick: random.Random) -> None:
    """A flag of config.json that changes what is computed."""
    content = json.loads(path.read_text())
    flag, value = pick.choice(
        [("seed", 9), ("lr", 0.5), ("schedule", "constant"), ("momentum", 0.1), ("batch", 1), ("epochs", 4), ("loss", "rmsle"), ("flip", True)]
    )
    content["flags"][flag] = value
    path.write_text(json.dumps(content))


def of_another_host(path: Path, pick: random.Random) -> None:
    """Somebody holds the folder, as far as one can see."""
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "boot": "x"}))


RUN: dict[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    LAST: (*ANY, header_edited, header_edited, tensors_edited, swapped),
    BEST: (*ANY, header_edited, tensors_edited, swapped),
    "config.json": (*ANY, edited, edited, of_another_flag, swapped),
    "metrics.jsonl": (*ANY, line_edited, line_edited, swapped),
    "metrics.csv": ANY,
    ".writer": (of_another_host, replaced),
    f".{LAST}.99-0a1b2c3d.tmp": (replaced,),
}
"""What is done to the files of a run."""


def attack(seed: int, folder: Path) -> None:
    pick = random.Random(seed)
    if pick.random() < 0.3:
        attack_features(pick, folder)
    else:
        attack_run(pick, folder)


def attack_run(pick: random.Random, folder: Path) -> None:
    """Spoil a file of the stopped run, then resume it or extract from it."""
    run = folder / "run"
    shutil.copytree(template() / "run", run)
    name = pick.choice(list(RUN))
    way = pick.choice(RUN[name])
    way(run / name, pick)
    before, what = contents(run), f"{name} {way.__name__}"
    with small():
        if pick.random() < 0.8:
            code, text = ran(lambda: train(["--quiet", "--resume", str(run)]))
            if code == 0:
                assert ends(run) == ends(template() / "run-whole"), f"{what}: the resumed run ended elsewhere"
                assert not list(run.glob(".*")), f"{what}: hidden files were left"
        else:
            code, text = ran(lambda: extract([str(run), *FEATURES, str(folder / "features")]))
            if code == 0:
                same_features(folder / "features", template() / "npy", what)
    sentence(code, text, what)
    if code:
        after = {name: content for name, content in contents(run).items() if not name.startswith(".writer.lock")}
        assert after == before or name.startswith("."), f"{what}: exit code {code}, but files were changed"


def attack_features(pick: random.Random, folder: Path) -> None:
    """Spoil a file of features, then read them."""
    storage = pick.choice(["npy", "csv"])
    features = folder / "features"
    shutil.copytree(template() / storage, features)
    path = pick.choice(sorted(features.iterdir()))
    way = pick.choice((*ANY, edited, edited, edited) if path.suffix == ".json" else ANY)
    way(path, pick)
    what = f"{storage} {path.name} {way.__name__}"

    def read() -> int:
        read_features(features)
        return 0

    code, text = ran(lambda: guarded(read))
    if code == 0:
        same_features(features, template() / storage, what)
    sentence(code, text, what)


def same_features(found: Path, wanted: Path, what: str) -> None:
    one, other = read_features(found), read_features(wanted)
    for name in ("train", "test", "train_labels", "test_labels"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), f"{what}: {name} differs, and nobody was told"


def sentence(code: int, text: str, what: str) -> None:
    """Exit code 0, or 3 (2 where the folder is held) with a message and without a traceback."""
    allowed = (0, 2) if "elsewhere" in text else (0, 3)
    assert code in allowed, f"{what}: exit code {code}: {text.strip()[-300:]}"
    assert "Traceback" not in text, f"{what}: a traceback: {text.strip()[-300:]}"
    assert code == 0 or "nbcnn: error: " in text, f"{what}: exit code {code} without a word"
