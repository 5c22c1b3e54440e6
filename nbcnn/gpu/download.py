"""Downloads of many outputs, one after the other: the GPU makes the next one while threads bring the last one to where it stays.

The GPU copies fast to page-locked memory alone. What it left there is copied once more, and fresh memory is zeroed page by page when it is first
written: one thread would do that at about 4 GB/s, several together do at what the memory can.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import Any

import numpy as np

from nbcnn.gpu.upload import Uploads

SLOTS = 3
"""Outputs in page-locked memory: one that the GPU writes, two that threads copy."""
PIECE = 1 << 20
"""Values that a thread copies at a time: 4 MiB."""
MOST_THREADS = 8


def in_turn(device: Any, outputs: Iterable[tuple[Any, np.ndarray]], most: int) -> Iterator[np.ndarray]:
    """Yield the target of each of `outputs`, (flat float32 array on the device, contiguous host array of as many values), when it is filled.

    Taking the next output from the iterable must enqueue what makes it, and must have waited, as an upload does, until what was enqueued before has
    run; so it may overwrite the array of the output before. `most` is the size of the largest.
    """
    uploads = Uploads(device)
    slots = cycle([(uploads.pinned(most, "float32"), list[Future[None]]()) for _ in range(SLOTS)])
    waiting: list[tuple[list[Future[None]], np.ndarray]] = []
    enqueued: tuple[np.ndarray, np.ndarray, list[Future[None]]] | None = None
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:

        def begin(pinned: np.ndarray, target: np.ndarray, copies: list[Future[None]]) -> None:
            flat = target.reshape(-1)
            pieces = [slice(first, first + PIECE) for first in range(0, flat.size, PIECE)]
            copies[:] = [threads.submit(np.copyto, flat[piece], pinned[: flat.size][piece]) for piece in pieces]
            waiting.append((list(copies), target))

        try:
            for source, target in outputs:
                pinned, copies = next(slots)
                for copy in copies:
                    copy.result()
                device.download_into(source, pinned[: target.size])
                if enqueued:
                    begin(*enqueued)
                enqueued = pinned, target, copies
                while len(waiting) >= SLOTS:
                    yield _filled(*waiting.pop(0))
        finally:
            device.synchronize()  # also where the caller wants no more of them: before the page-locked memory goes
        if enqueued:
            begin(*enqueued)
        for each in waiting:
            yield _filled(*each)


def _filled(copies: list[Future[None]], target: np.ndarray) -> np.ndarray:
    for copy in copies:
        copy.result()
    return target
