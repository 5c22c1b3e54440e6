"""This module says how much host memory is available, and how much this program took."""

from __future__ import annotations

import sys
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")


def available() -> int:
    """Bytes: what the system says is available, or what the control group (a container's limit) leaves, if that is less."""
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    else:
        import psutil  # installed where there is no /proc: macOS, Windows

        free = int(psutil.virtual_memory().available)
    try:
        limit = int((_GROUP / "memory.max").read_text())
        statistics = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - int(statistics["anon"]))
    except (OSError, ValueError, KeyError):
        # No such group, or one without a limit ("max").
        pass
    return free


def peak() -> int | None:
    """Bytes of host memory that this program held at its most; None where the system does not say.

    Linux's ru_maxrss begins with what the process that started this one held, for instance a notebook of gigabytes; VmHWM does not.
    """
    if _STATUS.exists():
        return int(_STATUS.read_text().partition("VmHWM:")[2].split()[0]) << 10
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
