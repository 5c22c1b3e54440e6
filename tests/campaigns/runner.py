"""One campaign, for some seconds: attempts with seeds counted upwards, each in an empty folder."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Result:
    """What one campaign tried; `lost` has the seed and the complaint of every attempt that was not survived."""

    name: str
    tried: int = 0
    seconds: float = 0.0
    lost: list[tuple[int, str]] = field(default_factory=list)


def run(name: str, seconds: float, attempts: int | None = None, first: int = 0) -> Result:
    """Attempts of campaign `name` with the seeds `first`, `first` + 1, … until `seconds` or `attempts` are spent; at least one."""
    attack = importlib.import_module(f"{__package__}.{name}").attack
    result, start = Result(name), time.perf_counter()
    while not result.tried or (result.seconds < seconds and (attempts is None or result.tried < attempts)):
        seed = first + result.tried
        with tempfile.TemporaryDirectory(prefix=f"campaign-{name}-") as folder:
            try:
                attack(seed, Path(folder))
            except AssertionError as complaint:
                result.lost.append((seed, str(complaint)))
                print(f"{name}: seed {seed}: {complaint}", file=sys.stderr, flush=True)
        result.tried += 1
        result.seconds = time.perf_counter() - start
    return result


def table(results: list[Result]) -> str:
    """The counts as a table of Markdown."""
    lines = ["| campaign | tried | survived | lost | seconds |", "| --- | ---: | ---: | ---: | ---: |"]
    lines += [f"| {r.name} | {r.tried} | {r.tried - len(r.lost)} | {len(r.lost)} | {r.seconds:.0f} |" for r in results]
    return "\n".join(lines)
