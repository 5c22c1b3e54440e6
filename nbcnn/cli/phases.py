"""Where the time between a program's start and its first step went."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Phases:
    """Seconds of one phase after another; the first is from the start of the process to `began`, a reading of time.perf_counter."""

    def __init__(self, began: float) -> None:
        self._last = began
        self.seconds: dict[str, float] = {}
        if (before := _since_start(began)) is not None:
            self.seconds["Python"] = before

    def mark(self, name: str) -> None:
        """The phase `name` ends here."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def text(self) -> str:
        """The phases in a line."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"  start    {sum(self.seconds.values()):.2f} s: {parts}"


def _since_start(moment: float) -> float | None:
    """Seconds from the start of this process to a reading of time.perf_counter, in hundredths; None where the system does not say."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0.0, up - began - (time.perf_counter() - moment))
