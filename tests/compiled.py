"""This module checks kernels that are compiled for real GPUs, which needs none: registers, frames, instructions."""

from __future__ import annotations

import pytest

from nbcnn.check.static import compile_launch
from nbcnn.gpu import device


def full(*values):
    """Values of a parameter that `.ci/full` alone tests: the default tests run the same kernels at another size."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full) for value in values]


def on_every_arch(test):
    """Run `test` with `arch`: the lowest compute capability that kernels support, and that of an H200."""
    skipped = pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
    return skipped(pytest.mark.parametrize("arch", ["75", "90a"])(test))


def assert_lean(launch, arch, registers=64):
    """No stack frame (registers were spilled, or an array indexed at run time), and at most `registers` per thread.

    64 leave 1,024 threads on a multiprocessor, enough loads in flight to fill the memory system; 32 leave all 2,048.
    """
    report = compile_launch(launch, arch)
    assert (report.frame_bytes, report.registers <= registers) == (0, True), report.name
