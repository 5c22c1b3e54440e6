"""This module has the kernel that keeps the GPU waiting, so that what is enqueued behind it begins at once (`nbcnn.run.timeline`)."""

from __future__ import annotations

from nbcnn.gpu.language import cuda, jit, u4

SLEEP_NS = 50_000
"""The length of one nap, of which the GPU takes between none and twice."""


@jit()
def wait_kernel(naps):
    """Nothing, for naps · 50 µs. grid 1, block 1; moves nothing."""
    for _ in range(naps):
        cuda.nanosleep(u4(SLEEP_NS))
