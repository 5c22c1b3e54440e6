"""This module watches what the tests launch in the simulator: no race, nothing out of bounds, and no kernel left out.

NBCNN_TEST_LAUNCHES names a file. Where it is set, a launch of a kernel of `nbcnn.ops` runs in the checking mode if it is one of the first of its
specialisation, or larger than what has been checked; a fault fails the test that launches it. At the end of the process the file gets a line a
kernel: module, name, and how often a block of it was at a barrier in one launch at most.
"""

from __future__ import annotations

import atexit
import os
from collections import Counter
from functools import wraps
from pathlib import Path

from nbcnn.gpu import compiler

LAUNCHES = "NBCNN_TEST_LAUNCHES"
FIRST = 4
"""Of a kernel so many specialisations are checked, whatever their sizes."""
LARGER = 1.25
"""A launch on arrays of so many times the elements of the largest that was checked is checked, too."""


def watch_launches():
    """Note and check launches from now on; without effect where LAUNCHES is not set, or outside this project's simulator."""
    if not (path := os.environ.get(LAUNCHES)) or not compiler.LOCKSTEP:
        return
    from nbcnn.gpu.lockstep.check import checking
    from nbcnn.gpu.lockstep.launch import Kernel, watchers

    plain = Kernel.launch
    launched, largest, specialisations, met = Counter(), Counter(), Counter(), set()

    @wraps(plain)
    def launch(self, grid, block, args, *rest, **options):
        name = f"{self.py_func.__module__} {self.py_func.__qualname__}"
        if not name.startswith("nbcnn.ops."):
            return plain(self, grid, block, args, *rest, **options)
        launched[name] += 0
        elements = sum(getattr(value, "size", 1) for value in args)
        new = self not in met and specialisations[name] < FIRST
        if watchers or not (new or elements > LARGER * largest[name]):
            return plain(self, grid, block, args, *rest, **options)
        met.add(self)
        specialisations[name] += new
        largest[name] = max(largest[name], elements)
        with checking() as found:
            plain(self, grid, block, args, *rest, **options)
        assert not found.faults, "\n".join(map(str, (name, *found.faults)))
        launched[name] = max(launched[name], *(report.barriers for report in found.launches))

    Kernel.launch = launch
    atexit.register(lambda: Path(path).write_text("".join(f"{name} {barriers}\n" for name, barriers in sorted(launched.items()))))


def read(path):
    """{module and name of a kernel: barriers} of a file that `watch_launches` has written."""
    return {name: int(barriers) for name, _, barriers in (line.rpartition(" ") for line in Path(path).read_text().splitlines())}
