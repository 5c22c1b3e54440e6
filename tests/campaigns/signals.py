"""SIGINT and SIGTERM to a training at random moments of its process's life, also twice: right exit code, a sentence, no traceback, nothing lost.

Every tenth training is train.py itself, the others a smaller one that is told and begins likewise (`training`).
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts import ROOT

from nbcnn.cli.process import ENDED
from nbcnn.files.lock import WRITER

from .training import FLAGS, LAST, at_a_moment, continued, differences, finished, result

PROGRAMS = {False: (str(ROOT / "train.py"),), True: ("-m", "campaigns.training")}
"""What trains, by whether it is quick."""
STEP = "finishing this step", "interrupted: saving"
"""What a training says that a signal stops between two steps."""


@functools.cache
def undisturbed(quick: bool) -> tuple[dict[str, Any], float]:
    """What an uninterrupted training makes, and how many seconds it takes from the start of Python to its end."""
    with tempfile.TemporaryDirectory() as folder:
        run, start = Path(folder) / "run", time.perf_counter()
        with started(run, quick) as process:
            assert process.wait(300) == 0
        return result(run), time.perf_counter() - start


def started(run: Path, quick: bool) -> subprocess.Popen[bytes]:
    """A training in that folder; what it says is in said.txt beside it."""
    words = [sys.executable, *PROGRAMS[quick], *FLAGS, "--out", str(run)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    with open(run.with_name("said.txt"), "wb") as said:
        return subprocess.Popen(words, env=environment, stdout=said, stderr=said)


def has_begun(process: subprocess.Popen[bytes]) -> bool:
    """False while Python itself starts, which no program can change: until then a signal does what it does to every Python."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    masks = (int(text[text.index(name) :].split()[1], 16) for name in ("SigCgt:", "SigIgn:"))
    return any(mask >> signal.SIGTERM - 1 & 1 for mask in masks) or process.poll() is not None


def attack(seed: int, folder: Path) -> None:
    """Send one signal, or two of a kind, then resume."""
    choose, run, quick = random.Random(seed), folder / "run", bool(seed % 10)
    asked, seconds = undisturbed(quick)
    number = choose.choice((signal.SIGINT, signal.SIGTERM))
    twice, ours, start = choose.random() < 0.25, False, time.perf_counter()
    with started(run, quick) as process:
        at_a_moment(choose, run, seconds, lambda: process.poll() is None)
        moment = f"{number.name} at {time.perf_counter() - start:.3f} s"
        ours = process.poll() is not None or has_begun(process)  # a process that is not waited for keeps its place in /proc
        process.send_signal(number)
        if twice:
            time.sleep(choose.uniform(0, 0.1))
            process.send_signal(number)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{moment} is ignored for a minute") from None
    check(run, number, code, (folder / "said.txt").read_text(), ours=ours, twice=twice)
    words = continued(run)
    assert finished(words, quick=quick) == 0, f"train.py {' '.join(words)} fails after {moment}"
    different = differences(result(run), asked)
    assert not different, f"resumed after {moment} the run differs from the uninterrupted one in {different}"


def check(run: Path, number: signal.Signals, code: int, said: str, *, ours: bool, twice: bool) -> None:
    """The exit code, what was said and what is in the folder fit each other."""
    files = {path.name for path in run.iterdir()} if run.exists() else set()
    if not ours and code not in (0, 128 + number):
        assert not files, f"{number.name} before the first line leaves {files}"
        return
    assert code in (0, 128 + number), f"{number.name} gives exit code {code}: {said[-300:]}"
    assert "Traceback" not in said, said
    assert "Exception ignored" not in said, said
    stopped = any(words in said for words in STEP)
    if code:
        assert stopped or ENDED[number] in said, f"{number.name} gives exit code {code} without a word: {said[-300:]}"
    # A second signal waits for nothing: not for the state to be saved, and not for the lock's files to be removed, which the next writer takes over.
    left = {name for name in files if name.startswith(".")} - ({WRITER, f"{WRITER}.lock"} if twice else set())
    assert not left, f"temporary files are left: {files}"
    assert LAST in files or twice or not (stopped or code == 0), f"nothing is saved: {files}"
    if code == 0:
        assert {"config.json", "metrics.csv"} <= files, f"exit code 0, but the run is not complete: {files}"
