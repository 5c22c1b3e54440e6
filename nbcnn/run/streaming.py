"""Training on images that stay in host memory, or in a file: worker threads collect them in the order of the epoch, a chunk ahead of the GPU.

    host     images (M, C, H, W), an array or a memory map
    pinned   PINNED chunks, each whole batches in the order of the epoch, which threads fill
    GPU      a ring of RING chunks; the op `gather` reads row (POSITION mod ring) of it, and the captured graph never changes

Targets that are streamed too have rings of their own, of as many rows. Where a callable yields the batches (`Batches`), a chunk is one of them.

A chunk is copied to the GPU on a stream of its own, while the chunk before it is trained on. Two events keep the order: the kernels wait until
their chunk is there, and a copy waits until the kernels have read what it overwrites. Order, augmentation and arithmetic are those of a
resident data set, so every bit of the training is too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.gpu.upload import Uploads
from nbcnn.plan.shapes import numel

if TYPE_CHECKING:
    from concurrent.futures import Future

CHUNK_BYTES = 8 << 20
"""A chunk has as many batches as fit into this, but at least one: large enough that a copy's fixed cost of about 20 µs is lost in its 150 µs."""
RING = 3
"""Chunks on the GPU: one is trained on, one is copied, one is ready."""
PINNED = 5
"""Chunks of page-locked host memory: as on the GPU, and two that are being filled."""
FEEDER = "nbcnn-feeder"
"""How the names of threads begin that collect images, or read the batches of a callable."""
POLL_SECONDS = 50e-6
PATIENCE = 5.0
"""Seconds of polling for a copy after which ranks ask whether the others are still there."""
_LEFT: list[Any] = []
"""Page-locked memory into which a thread that was left behind may still write."""


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


class Batches:
    """The batches that a callable yields, epoch by epoch, as arrays of one type; one thread reads them ahead.

    start   called with the number of an epoch, from 0; an iterable of its batches.
    read    what an item of that is, by the names of a feeder's rings. A number of the batch goes with it, for messages.
    batch   examples of a batch; only the last one of an epoch may have fewer.
    steps   batches of an epoch; what `start` yields beyond them is left.
    opened  an epoch that is begun already: its number, and the iterator of its batches.

    Raises UsageError in `take` for batches of another size, and for an epoch that ends early.
    """

    def __init__(
        self,
        start: Callable[[int], Iterable[Any]],
        read: Callable[[Any, int], Mapping[str, np.ndarray]],
        batch: int,
        steps: int,
        opened: tuple[int, Iterator[Any]],
    ) -> None:
        self._start, self._read, self.batch, self.steps = start, read, batch, steps
        self._opened: tuple[int, Iterator[Any]] | None = opened
        self._epoch = opened[0]
        self._items: Iterator[Any] | None = None
        self.sizes: dict[int, int] = {}

    def begin(self, epoch: int) -> None:
        """The next batch is the first of `epoch`; nothing is read before it is asked for."""
        self._epoch, self._items, self.sizes = epoch, None, {}

    def take(self, number: int, into: Mapping[str, np.ndarray]) -> None:
        """Read batch `number` of the epoch, the one after the last, into the first rows of arrays by name; its size is in `sizes` then."""
        if self._items is None:
            opened, self._opened = self._opened, None
            self._items = opened[1] if opened and opened[0] == self._epoch else iter(self._start(self._epoch))
        where = f"batch {number + 1:,} of epoch {self._epoch + 1}"
        try:
            item = next(self._items)
        except StopIteration:
            raise UsageError(f"epoch {self._epoch + 1} ended after {number:,} of {self.steps:,} batches: every epoch must have as many") from None
        arrays = self._read(item, number)
        sizes = {len(array) for array in arrays.values()}
        size = sizes.pop()
        if size > self.batch or (size < self.batch and number < self.steps - 1):
            raise UsageError(f"{where} has {size:,} examples, the first had {self.batch:,}: only the last batch of an epoch may be smaller")
        for name, array in arrays.items():
            np.copyto(into[name][:size], array.reshape(size, -1), casting="no")
        self.sizes[number] = size


class Feeder:
    """Fills rings on the GPU with images, and with their targets, of `sources`, in the order that `begin` is given.

    device, rings  where, and by name flat arrays of RING·rows images or targets.
    sources       by the same names arrays, C-contiguous, of any dtype; they must not change. With `batches` they only say shapes and dtypes.
    rows          images of a chunk (`chunk_rows`).
    patient       called while a copy takes longer than PATIENCE; it may raise.
    batches       what a callable yields instead, a chunk each.
    """

    def __init__(
        self,
        device: Any,
        rings: Mapping[str, Any],
        sources: Mapping[str, np.ndarray],
        rows: int,
        patient: Callable[[], None] = lambda: None,
        batches: Batches | None = None,
    ) -> None:
        self._device, self._rows, self._patient, self._batches = device, rows, patient, batches
        self._sources = {} if batches else {name: source.reshape(len(source), -1) for name, source in sources.items()}
        self._uploads = Uploads(device)
        from concurrent.futures import ThreadPoolExecutor  # with logging, and most trainings stream nothing

        from nbcnn.files.threads import LeftBehind

        sizes = {name: rows * numel(source.shape[1:]) for name, source in sources.items()}
        self._slots = [{name: ring[k * sizes[name] : (k + 1) * sizes[name]] for name, ring in rings.items()} for k in range(RING)]
        self._pinned = [{name: self._uploads.pinned(sizes[name], source.dtype.name) for name, source in sources.items()} for _ in range(PINNED)]
        # One thread for batches of a callable: they have an order.
        self._threads = 1 if batches else workers()
        self._pool: Any = LeftBehind(FEEDER) if batches else ThreadPoolExecutor(self._threads, thread_name_prefix=FEEDER)
        self._abandoned = False
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
        """Wait until no thread and no copy touches memory of this feeder; not for threads that a signal made the program leave."""
        with self._waiting():
            for part in (part for parts in self._filling.values() for part in parts):
                if not part.cancelled() and not self._abandoned:
                    part.exception()
        self._uploads.synchronize()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A context that waits for the threads. When a signal leaves the training, nobody waits for them: a source may hang."""
        try:
            if isinstance(sys.exception(), KeyboardInterrupt | SystemExit):
                self._leave()
            yield
        except (KeyboardInterrupt, SystemExit):
            self._leave()
            raise

    def _leave(self) -> None:
        if not self._abandoned:
            self._abandoned = True
            _LEFT.append(self._pinned)

    def begin(self, order: np.ndarray, position: int, epoch: int = 0) -> None:
        """From now on row i of the epoch is image `order`[i]; the next step reads from `position` on. All steps enqueued must have run.

        A callable's `epoch` begins with the next step.
        """
        self._order = np.asarray(order, np.int64)
        self._forget(position // self._rows)
        if self._batches:
            self._batches.begin(epoch)
        else:
            self._fill_ahead()

    def ready(self, position: int) -> int:
        """Call before a step that reads from `position` on is enqueued: its kernels will wait for their images, and later chunks are sent ahead.

        Returns how many images the chunk has. Raises what a thread raised: an OSError if a file cannot be read, a callable's own errors.
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
        return self._batches.sizes[chunk] if self._batches else self._rows

    def _copy_next(self) -> None:
        """Enqueue the next chunk's copy, after its filling."""
        chunk = self._next_copy
        if chunk not in self._filling:
            self._fill(chunk)
        with self._waiting():
            for part in self._filling.pop(chunk):
                part.result()
        after = self._read.pop(chunk - RING, None)
        for name, slot in self._slots[chunk % RING].items():
            self._copied[chunk] = self._uploads.copy(slot, self._pinned[chunk % PINNED][name], after)
        self._next_copy += 1

    def _filled(self, chunk: int) -> bool:
        # What failed is asked for only when a step needs it: the steps before it are trained.
        return chunk in self._filling and all(part.done() and not part.exception() for part in self._filling[chunk])

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
        targets = {name: pinned.reshape(self._rows, -1) for name, pinned in self._pinned[chunk % PINNED].items()}
        self._next_fill = chunk + 1
        if self._batches:
            self._filling[chunk] = [self._pool.submit(self._batches.take, chunk, targets)]
            return
        rows = self._order[chunk * self._rows : (chunk + 1) * self._rows]
        part = -(-len(rows) // self._threads)
        self._filling[chunk] = [
            self._pool.submit(self._collect, source, rows[at : at + part], targets[name][at : at + part])
            for name, source in self._sources.items()
            for at in range(0, len(rows), part)
        ]

    def _collect(self, source: np.ndarray, rows: np.ndarray, target: np.ndarray) -> None:
        # Not mode="raise", which would collect into a buffer of NumPy's and copy that.
        np.take(source, rows, axis=0, out=target[: len(rows)], mode="clip")

    def close(self) -> None:
        """End the threads."""
        self._forget(0)
        self._pool.shutdown(wait=not self._abandoned)
