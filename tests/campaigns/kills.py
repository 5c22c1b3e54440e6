"""A training is killed (SIGKILL) at random moments, up to three times, and resumed: it must end with the bits of one that nothing has happened to."""

from __future__ import annotations

import functools
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from .training import FLAGS, at_a_moment, begun, continued, differences, finished, result


@functools.cache
def undisturbed() -> tuple[dict[str, Any], float]:
    """What an uninterrupted training makes, and how many seconds it takes."""
    with tempfile.TemporaryDirectory() as folder:
        run, start = Path(folder) / "run", time.perf_counter()
        assert finished([*FLAGS, "--out", run], quick=True) == 0
        return result(run), time.perf_counter() - start


def attack(seed: int, folder: Path) -> None:
    """Kill once, twice or three times, then resume."""
    choose, (asked, seconds), run = random.Random(seed), undisturbed(), folder / "run"
    words: list[Any] = [*FLAGS, "--out", run]
    for _ in range(choose.randint(1, 3)):
        process = begun(words, quick=True)
        at_a_moment(choose, run, seconds, process.is_alive)
        process.kill()
        process.join()
        words = continued(run)
    code = finished(words, quick=True)
    assert code == 0, f"train.py {' '.join(words)} ended with exit code {code}"
    different = differences(result(run), asked)
    assert not different, f"the resumed run differs from the uninterrupted one in {different}"
