"""This module makes Numba's simulator quick: threads of a block run in turn, and names are looked up once instead of at every call.

As Numba has it, every thread of a block is a Python thread, all run at the same time, and one more asks them without pause whether they
wait. Here one runs at a time, in the order of their numbers, until it reaches a barrier or its end: no processor time goes into waiting,
every run is alike, and no two threads can make the same shared array.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np


def let_others_go_first() -> None:
    """Let the other threads of the block go on before this one: in a loop that waits for what one of them writes."""
    threading.current_thread().step_aside()  # type: ignore[attr-defined]


def quicken(kernel: Any, kernelapi: Any, cuda: Any) -> None:
    """Change the modules `kernel` and `kernelapi` of numba.cuda.simulator, whose stand-in for `cuda` kernels see."""
    _take_turns(kernel)
    _look_up_once(kernel, cuda)
    _wrap_around(kernelapi.types.Integer)

    def array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        """The shared array of the calling line. Numba reads the source of all lines of the stack to find it."""
        if shape == 0 or alignment is not None:
            return whole(self, shape, dtype, alignment)
        frame = sys._getframe(1)
        line = frame.f_code.co_filename, frame.f_lineno
        found = self._allocations.get(line)
        if found is None:
            dtype = kernelapi.numpy_support.as_dtype(dtype) if isinstance(dtype, kernelapi.types.Type) else dtype
            found = self._allocations[line] = np.empty(shape, dtype)
        return found

    whole = kernelapi.FakeCUDAShared.array
    kernelapi.FakeCUDAShared.array = array


def _take_turns(kernel: Any) -> None:
    """One thread of a block runs at a time. `after` links those that have not ended into a ring; `turn` is locked but for the one that runs."""

    class Thread(kernel.BlockThread):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.turn = threading.Lock()
            self.turn.acquire()
            self.before = self.after = self

        def run(self) -> None:
            self.turn.acquire()
            try:
                if not self.abort:
                    super().run()
            finally:
                self._manager.ended(self)

        def syncthreads(self) -> None:
            self.syncthreads_blocked = True
            self.step_aside()

        def step_aside(self) -> None:
            following = self._following()
            if following is not self:
                following.turn.release()
                self.turn.acquire()
            if self.abort:
                raise RuntimeError("another thread of the block has failed")

        def _following(self) -> Thread:
            """Whose turn it is next: who is not at the barrier. If all are, they leave it."""
            thread = self.after
            while thread.syncthreads_blocked:
                if thread is self:
                    while thread.syncthreads_blocked:
                        thread.syncthreads_blocked = False
                        thread = thread.after
                    return self.after
                thread = thread.after
            return thread

    def run(self: Any, grid_point: tuple[int, ...], *args: Any) -> None:
        """Run a block to its end; raises what the first thread that failed has raised."""
        threads = [Thread(lambda: self._f(*args), self, grid_point, point, self._debug) for point in np.ndindex(*self._block_dim)]
        for one, other in zip(threads, threads[1:] + threads[:1], strict=True):
            one.after, other.before = other, one
        self.failure, self.all_ended = None, threading.Event()
        for thread in threads:
            thread.start()
        threads[0].turn.release()
        try:
            self.all_ended.wait()
        except BaseException:
            for thread in threads:  # a signal: they end at their next barrier, and nobody waits for that
                thread.abort = True
            raise
        if self.failure is not None:
            raise self.failure[0].with_traceback(self.failure[1])

    def ended(self: Any, thread: Thread) -> None:
        if thread.exception and self.failure is None:
            self.failure = thread.exception
            other = thread.after
            while other is not thread:
                other.abort, other.syncthreads_blocked = True, False
                other = other.after
        if thread.after is thread:
            self.all_ended.set()
            return
        # It counts no more at a barrier where the others wait.
        thread.before.after, thread.after.before = thread.after, thread.before
        thread.before._following().turn.release()

    kernel.BlockManager.run, kernel.BlockManager.ended = run, ended


def _look_up_once(kernel: Any, cuda: Any) -> None:
    """A module's `cuda` is exchanged for the simulated one until a launch ends. Numba exchanges it at every call of a device function."""
    exchanged: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def call(self: Any, *args: Any) -> Any:
        if not (self._device or kernel._kernel_context):
            try:
                return launch(self, *args)
            finally:
                for names, before in exchanged.values():
                    names.update(before)
                exchanged.clear()
        names = self.fn.__globals__
        if id(names) not in exchanged:
            before = {name: value for name, value in names.items() if value is cuda}
            exchanged[id(names)] = names, before
            names.update(dict.fromkeys(before, kernel._get_kernel_context()))
        return self.fn(*args)

    launch = kernel.FakeCUDAKernel.__call__
    kernel.FakeCUDAKernel.__call__ = call


def _wrap_around(integer: Any) -> None:
    """A cast keeps the low bits of what does not fit, as on a GPU: u4(-1) is 2^32 - 1. NumPy refuses Python's own ints there."""

    def cast(self: Any, value: Any) -> Any:
        number = getattr(np, self.name)
        try:
            return number(value)
        except OverflowError:
            return np.uint64(value & 0xFFFFFFFFFFFFFFFF).astype(number)

    integer.cast_python_value = cast
