"""This module chooses how many threads BLAS has for the products of a plan on the host: one, or as many as it has anyway.

BLAS splits every product among its threads and waits for the slowest. Where another program has one of the cores, that wait is the rest of its time
slice, 24 ms on Linux with two cores and three programs, whatever the product takes. The training of `small-autoencoder` on digits ran at 87 images
per second with two threads and at 927 with one; where the cores are free, one thread costs such a network next to nothing, because copying windows
into columns takes longer than the products.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from nbcnn.plan.flops import conv_shape
from nbcnn.plan.graph import Plan

WORTH_FLOPS = 32_000_000
"""Flops of one image's product from which on it is split: 0.3 ms of one core. `nbcnn.ops.conv.reference` multiplies image by image."""

_turn = threading.Lock()
"""Held by the thread whose limit is in force: only that one may take it back (threadpoolctl from 3.7 on ignores all others)."""


def one_thread(plan: Plan) -> bool:
    """Whether every product of `plan` is too small to be worth a second thread. Sizes alone decide, so a plan's bits repeat."""
    shapes = [shape for item in plan.steps if (shape := conv_shape(item.step)) is not None]
    return all(shape.flops() < WORTH_FLOPS * shape.N for shape in shapes)


@cache
def _controller() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def threads() -> int:
    """How many threads BLAS has in this process: sums are split among them, so the last bits on a CPU depend on it."""
    return max((int(library["num_threads"]) for library in _controller().info() if library["user_api"] == "blas"), default=1)


@contextmanager
def single() -> Iterator[None]:
    """Within, BLAS has one thread in this process; of several threads at once the first one's context counts, and the others compute as they can."""
    if not _turn.acquire(blocking=False):
        yield
        return
    try:
        with _controller().limit(limits=1, user_api="blas"):
            yield
    finally:
        _turn.release()
