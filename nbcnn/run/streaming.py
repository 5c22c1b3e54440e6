"""Training on images that stay in host memory, or in a file: worker threads collect them in the order of the epoch, a chunk ahead of the GPU.

    host     images (M, C, H, W), an array or a memory map
    pinned   PINNED chunks, each whole batches in the order of the epoch, which threads fill
    GPU      a ring of RING chunks; the op `gather` reads row (POSITION mod ring) of it, and the captured graph never changes

A chunk is copied to the GPU on a stream of its own, while the chunk before it is trained on. Two events keep the order: the kernels wait until
their chunk is there, and a copy waits until the kernels have read what it overwrites. Order, augmentation and arithmetic are those of a
resident data set, so every bit of the training is too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn.gpu.upload import Uploads

if TYPE_CHECKING:
    from concurrent.futures import Future

CHUNK_BYTES = 8 << 20
"""A chunk has as many batches as fit into this, but at least one: large enough that a copy's fixed cost of about 20 µs is lost in its 150 µs."""
RING = 3
"""Chunks on the GPU: one is trained on, one is copied, one is ready."""
PINNED = 5
"""Chunks of page-locked host memory: as on the GPU, and two that are being filled."""
POLL_SECONDS = 50e-6
PATIENCE = 5.0
"""Seconds of polling for a copy after which ranks ask whether the others are still there."""


def chunk_rows(batch: int, row_bytes: int, count: int) -> int:
    """How many images a chunk has: a multiple of `batch`, and no more batches than `count` images are."""
    return batch * max(1, min(CHUNK_BYTES // max(1, batch * row_bytes), -(-count // batch)))


def workers() -> int:
    """Threads that collect images: half of the cores that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // 2))


def host_bytes(rows: int, row_bytes: int) -> int:
    """Bytes of host memory that the feeder of chunks of `rows` takes."""
    return PINNED * rows * row_bytes


class Feeder:
    """Fills a ring on the GPU with images of `source`, in the order that `begin` is given.

    place, ring  where, and its flat array of RING·rows images.
    source       the images, C-contiguous, of any dtype; they must not change.
    rows         images of a chunk (`chunk_rows`).
    patient      called while a copy takes longer than PATIENCE; it may raise.
    """

    def __init__(self, device: Any, ring: Any, source: np.ndarray, rows: int, patient: Callable[[], None] = lambda: None) -> None:
        self._device, self._rows, self._patient = device, rows, patient
        self._source = source.reshape(len(source), -1)
        self._uploads = Uploads(device)
        size = rows * self._source.shape[1]
        from concurrent.futures import ThreadPoolExecutor  # with logging, and most trainings stream nothing

        self._slots = [ring[k * size : (k + 1) * size] for k in range(RING)]
        self._pinned = [self._uploads.pinned(size, self._source.dtype.name) for _ in range(PINNED)]
        self._threads = workers()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="nbcnn-feeder")
        self._order = np.empty(0, np.int64)
        self._filling: dict[int, list[Future[None]]] = {}
        self._copied: dict[int, Any] = {}  # the end of each chunk's copy, an event
        self._read: dict[int, Any] = {}  # the end of the last step of a chunk, likewise
        self._forget(0)

    def _forget(self, chunk: int) -> None:
        """Nothing is filled or copied; the first chunk will be `chunk`."""
        for parts in self._filling.values():
            for part in parts:
                part.cancel()
        self.settle()
        self._filling, self._copied, self._read = {}, {}, {}
        self._current, self._next_fill, self._next_copy = -1, chunk, chunk

    def settle(self) -> None:
        """Wait until no thread and no copy touches memory of this feeder."""
        for parts in self._filling.values():
            for part in parts:
                if not part.cancelled():
                    part.exception()
        self._uploads.synchronize()

    def begin(self, order: np.ndarray, position: int) -> None:
        """From now on row i of the epoch is image `order`[i]; the next step reads from `position` on. All steps enqueued must have run."""
        self._order = np.asarray(order, np.int64)
        self._forget(position // self._rows)
        self._fill_ahead()

    def ready(self, position: int) -> None:
        """Call before a step that reads from `position` on is enqueued: its kernels will wait for their images, and later chunks are sent ahead.

        Raises what a thread raised: an OSError if a file cannot be read.
        """
        chunk = position // self._rows
        if chunk != self._current:
            if self._current >= 0:
                self._read[self._current] = self._uploads.mark()
            if not self._next_copy - RING <= chunk <= self._next_copy:  # a step that is repeated elsewhere than where training went on
                self._device.synchronize()
                self._forget(chunk)
            self._current = chunk
            while self._next_copy <= chunk:
                self._copy_next()
            # No event is left of a copy that `_free` has seen the end of.
            self._uploads.hold(self._copied.get(chunk))
        while self._next_copy < chunk + RING and self._filled(self._next_copy):
            self._copy_next()
        self._fill_ahead()

    def _copy_next(self) -> None:
        """Enqueue the next chunk's copy, after its filling."""
        chunk = self._next_copy
        if chunk not in self._filling:
            self._fill(chunk)
        for part in self._filling.pop(chunk):
            part.result()
        after = self._read.pop(chunk - RING, None)
        self._copied[chunk] = self._uploads.copy(self._slots[chunk % RING], self._pinned[chunk % PINNED], after)
        self._next_copy += 1

    def _filled(self, chunk: int) -> bool:
        return chunk in self._filling and all(part.done() for part in self._filling[chunk])

    def _fill_ahead(self) -> None:
        """Start filling every chunk whose page-locked memory is free."""
        while self._next_fill * self._rows < len(self._order) and self._next_fill < self._next_copy + PINNED and self._free(self._next_fill):
            self._fill(self._next_fill)

    def _free(self, chunk: int) -> bool:
        """The page-locked memory of `chunk` is not being copied any more."""
        earlier = chunk - PINNED
        if earlier in self._copied and not self._uploads.done(self._copied[earlier]):
            return False
        self._copied.pop(earlier, None)
        return earlier < self._next_copy

    def _fill(self, chunk: int) -> None:
        """Start the threads on `chunk`, once its page-locked memory is free."""
        asked = time.monotonic()
        while not self._free(chunk):
            time.sleep(POLL_SECONDS)
            if time.monotonic() - asked > PATIENCE:
                asked = time.monotonic()
                self._patient()
        rows = self._order[chunk * self._rows : (chunk + 1) * self._rows]
        target = self._pinned[chunk % PINNED].reshape(self._rows, -1)
        part = -(-len(rows) // self._threads)
        self._filling[chunk] = [self._pool.submit(self._collect, rows[at : at + part], target[at : at + part]) for at in range(0, len(rows), part)]
        self._next_fill = chunk + 1

    def _collect(self, rows: np.ndarray, target: np.ndarray) -> None:
        # Not mode="raise", which would collect into a buffer of NumPy's and copy that.
        np.take(self._source, rows, axis=0, out=target[: len(rows)], mode="clip")

    def close(self) -> None:
        """End the threads."""
        self._forget(0)
        self._pool.shutdown(wait=True)
