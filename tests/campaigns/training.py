"""A training by train.py's own words: what `kills` and `signals` attack, in a forked process, which has everything imported already.

`python -m campaigns.training WORDS` is one from the start of Python. Pictures are left out: drawing them takes longer than the training.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nbcnn.cli import process

    process.begin()  # as train.py does

import contextlib
import functools
import io
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from scripts import exits, train

from nbcnn.datasets import shapes
from nbcnn.gpu import compiler
from nbcnn.nn import models
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.train import callbacks, checkpoint
from nbcnn.train.checkpoint import LAST

MODE = os.environ.get("NBCNN_CAMPAIGN_MODE", "cpu")
"""Where it trains. On a GPU the attacking process must not use it, since its children are forked."""

FLAGS = (
    "--model",
    "autoencoder",
    "--dataset",
    "shapes",
    "--mode",
    MODE,
    "--limit",
    "2",
    "--batch",
    "1",
    "--epochs",
    "2",
    "--save-every",
    "1",
    "--log-every",
    "1",
)


def small(channels: int, *_: int) -> list[Any]:
    """An autoencoder whose training steps take about as long as its checkpoints."""
    return [Conv2d(4, 3, padding=1, in_channels=channels), ReLU(), Conv2d(channels, 3, padding=1, in_channels=4), MSE()]


def begun(words: Sequence[Any], *, quick: bool, within: AbstractContextManager[Any] | None = None, said: str = os.devnull) -> Any:
    """A process that trains with `words`, the `small` network if it is to be `quick`, `within` a context; what it says goes to the file `said`."""
    _prepare()
    process = get_context("fork").Process(target=_forked, args=(list(map(str, words)), quick, within or contextlib.nullcontext(), said))
    process.start()
    return process


def finished(words: Sequence[Any], *, quick: bool, within: AbstractContextManager[Any] | None = None, said: str = os.devnull) -> int:
    """The exit code of that process."""
    process = begun(words, quick=quick, within=within, said=said)
    process.join(300)
    assert process.exitcode is not None, f"train.py {' '.join(map(str, words))} hangs"
    return int(process.exitcode)


def at_a_moment(choose: random.Random, run: Path, seconds: float, alive: Callable[[], bool]) -> None:
    """Return at a random moment of a training that takes about so many seconds: some time after its start, or after one of its files is there."""
    sign, part = choose.choice(((None, 0.9), ("config.json", 0.05), (LAST, 0.05), ("metrics.jsonl", 0.05)))
    delay = choose.uniform(0, part * seconds)
    while sign and alive() and not (run / sign).exists():
        time.sleep(0.0005)
    until = time.perf_counter() + delay
    while alive() and time.perf_counter() < until:
        time.sleep(min(0.01, max(0.0, until - time.perf_counter())))


def continued(run: Path) -> list[str]:
    """The words that continue the training in `run`; where not even its settings have been saved, those that start it again."""
    if (run / "config.json").exists():
        return ["--resume", str(run)]
    shutil.rmtree(run, ignore_errors=True)
    return [*FLAGS, "--out", str(run)]


def result(run: Path) -> dict[str, Any]:
    """What a training made, bit for bit: its last state, and its metrics without times."""
    tensors, _ = checkpoint.load(run / LAST)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [(row["epoch"], row["step"], row["train_loss"], row["test_loss"]) for row in rows]
    return {name: tensor.tobytes() for name, tensor in tensors.items()} | {"metrics": metrics}


def differences(found: dict[str, Any], asked: dict[str, Any]) -> str:
    """In what two results differ."""
    return ", ".join(name for name in sorted(found.keys() | asked.keys()) if found.get(name) != asked.get(name))


@functools.cache
def _prepare() -> None:
    """Import what a training imports, once, before the first process is forked."""
    with contextlib.redirect_stdout(io.StringIO()):
        if MODE == "cpu":
            trained([*FLAGS, "--explain", "--quiet"], quick=True)
        else:  # to plan for a GPU uses it
            compiler.missing()


def trained(words: Sequence[str], *, quick: bool) -> int:
    """The exit code of train.py with `words`, without pictures; of the `small` network on as few images as can be, if it is to be `quick`."""
    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(callbacks.Plots, "_draw"))
        if quick:
            changes.enter_context(mock.patch.dict(models.MODELS, {"autoencoder": small}))
            changes.enter_context(mock.patch.multiple(shapes, TRAIN_COUNT=4, TEST_COUNT=4))
        return exits(train, words)


def _forked(words: list[str], quick: bool, within: AbstractContextManager[Any], said: str) -> None:
    with open(said, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        # In a test sys.stderr is no longer the file of number 2.
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file), within:
            code = trained(words, quick=quick)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(trained(sys.argv[1:], quick=True))
