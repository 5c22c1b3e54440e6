"""Where the time between a program's start and its first step went."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Phases:
    """Seconds of one phase after another, from `began` on, a reading of time.perf_counter.

    `whole`: the first phase is from the start of the process to `began`.
    """

    def __init__(self, began: float, whole: bool = True) -> None:
        self._last = began
        self.seconds: dict[str, float] = {}
        if whole and (before := _since_start(began)) is not None:
            self.seconds["Python"] = before

    def mark(self, name: str) -> None:
        """The phase `name` ends here."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def text(self, what: str = "start") -> str:
        """The phases in a line, with the name of the whole."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"  {what:8} {self.total:.2f} s: {parts}"

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())


def _since_start(moment: float) -> float | None:
    """Seconds from the start of this process to a reading of time.perf_counter, in hundredths; None where the system does not say."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0.0, up - began - (time.perf_counter() - moment))
