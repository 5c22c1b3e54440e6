"""This module defines the two devices on which a plan can run, `Host` and `Gpu`, and asks for a GPU's capabilities.

`Host` and `Gpu` offer the same few methods (allocate, view, copy, replay), so that what runs a plan need not ask which one it holds.
Kernels take flat C-contiguous 1-D arrays and 32-bit scalars; a view is an offset into one of a few large allocations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from nbcnn.files.extras import PackageMissing, named_in
from nbcnn.gpu import compiler, driver, memory
from nbcnn.gpu.capture import ALONE, MAIN, CapturedGraph
from nbcnn.gpu.compiler import SIMULATOR, numba_cuda
from nbcnn.gpu.select import demanded, refused
from nbcnn.gpu.target import Target
from nbcnn.plan.storage import numpy_dtype

POLL_SECONDS = 50e-6
"""How often `Gpu.wait` looks."""


class GpuUnavailable(RuntimeError):
    """A GPU was asked for and there is no usable one; the message says what is missing. On the command line the exit code is 4.

    Mode "auto" takes the CPU then, and raises this only where a GPU was chosen by its name (`nbcnn.use_device`).

    Example:
        >>> import nbcnn
        >>> def fastest(layers):
        ...     try:
        ...         return nbcnn.Model(layers, mode="tensorcore", input_shape=(3, 32, 32))
        ...     except nbcnn.GpuUnavailable:
        ...         return nbcnn.Model(layers, mode="cpu", input_shape=(3, 32, 32))
        >>> nbcnn.GpuUnavailable.exit_code
        4
    """

    exit_code = 4


GPU_MEMORY = "GPU, all programs"
"""The name in `used_bytes` of what is taken of a GPU's memory."""


def capability_of_gpu() -> tuple[int, int]:
    """The compute capability of the current GPU, which must be there; 7.5 in our simulator unless it is asked for another."""
    if SIMULATOR:
        return compiler.SIMULATED_CAPABILITY
    return driver.device().capability


def target_of_gpu() -> Target:
    """The properties of the current GPU, which must be there, by which implementations are chosen; in the simulator those of a small one."""
    if SIMULATOR:
        return Target(compiler.SIMULATED_CAPABILITY, 2, simulated=True)
    ask = driver.device().attribute
    shared = ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"), ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
    return Target(driver.device().capability, ask("MULTIPROCESSOR_COUNT"), *shared)


def gpu_missing() -> str | None:
    """None if kernels can run here (a GPU, or the simulator), else the reason in words: the GPU's, or the extra that is not installed.

    Raises `faults.GpuFault` where a GPU is and this process cannot use it: other processes hold its memory, or this one was forked from one that
    has used it. Mode auto would train on the CPU otherwise, without being asked to.
    """
    if SIMULATOR:
        return compiler.missing()
    try:
        driver.device()
    except driver.DriverMissing as error:
        return str(error)
    return None


def unavailable(reason: str) -> Exception:
    """The error to raise where `gpu_missing` gave a reason: PackageMissing where a package is what is missing, else GpuUnavailable."""
    return PackageMissing(reason) if named_in(reason) else GpuUnavailable(reason)


def cpu_instead() -> str | None:
    """Why what may run on either takes the CPU, in words; None where it takes a GPU.

    Raises GpuUnavailable if `nbcnn.use_device` chose a GPU by its name, and there is none; PackageMissing where what uses one is not installed.
    """
    missing = refused() or gpu_missing()
    if missing and (name := demanded()):
        raise unavailable(f"there is no {name}, which was asked for by its name: {missing}. Ask for no device, or for cpu, to run on the CPU")
    return missing


def constant(values: np.ndarray) -> Any:
    """`values` on the device, in an allocation of their own (256-byte aligned), for a launch to keep; the array itself without a GPU."""
    if SIMULATOR or gpu_missing():
        return values
    with ALONE:  # an upload uses the default stream
        return driver.upload(values)


def event(timing: bool = True) -> Any:
    """An event, to be recorded on a place's stream: `driver.Event`, or the simulator's."""
    return numba_cuda().event(timing=timing) if SIMULATOR else driver.Event(timing)


def elapsed_ms(before: Any, behind: Any) -> float:
    """Milliseconds between two events that are past."""
    return float(numba_cuda().event_elapsed_time(before, behind)) if SIMULATOR else float(before.until(behind))


def _run_all(launches: Sequence[Any], stream: Any) -> None:
    for launch in launches:
        launch.run(stream)


class _Place:
    """What both devices say of themselves."""

    target: Target

    @property
    def multiprocessors(self) -> int:
        return self.target.multiprocessors

    @property
    def capability(self) -> tuple[int, int]:
        return self.target.capability


class Host(_Place):
    """NumPy memory: where `cpu` mode runs."""

    name = "host"
    target = Target((0, 0), 1)
    device_name = "CPU"

    def empty(self, count: int, dtype: str) -> np.ndarray:
        """`count` uninitialised elements of `dtype`, 1-D."""
        return np.empty(count, numpy_dtype(dtype))

    def view(self, raw: np.ndarray, offset: int, count: int, dtype: str) -> np.ndarray:
        """`count` elements of `dtype` that start `offset` bytes into the uint8 array `raw`."""
        kind = numpy_dtype(dtype)
        return raw[offset : offset + count * kind.itemsize].view(kind)

    def upload(self, target: np.ndarray, values: np.ndarray) -> None:
        """Copy host `values` into `target`; sizes must agree."""
        np.copyto(target, np.ascontiguousarray(values, target.dtype).reshape(-1))

    def download(self, source: np.ndarray) -> np.ndarray:
        """A fresh host copy of `source`."""
        return source.copy()

    def replayable(self, launches: Sequence[Any], branches: Sequence[str] | None = None) -> Callable[[], None]:
        """A function that runs `launches` in order (a host has no branches, so `branches` do not matter)."""
        return partial(_run_all, list(launches), 0)

    def synchronize(self) -> None:
        """Wait until everything recorded has run (nothing to wait for on the host)."""

    def wait(self, check: Callable[[], None], timeout: float) -> None:
        """Wait like `synchronize`: nothing is awaited on the host."""

    def free_bytes(self) -> int:
        """Bytes of memory that can still be taken."""
        return memory.available()

    def used_bytes(self) -> dict[str, int | None]:
        """What this program held at its most, by name."""
        return {"host, at its most": memory.peak()}


class Gpu(_Place):
    """Device memory and one stream of the current CUDA device (or of the simulator).

    Raises GpuUnavailable if there is none.
    """

    name = "gpu"

    def __init__(self) -> None:
        reason = gpu_missing()
        if reason:
            raise unavailable(reason)
        self.stream: Any = 0 if SIMULATOR else driver.Stream()
        self._side: Any = None
        self.target = target_of_gpu()

    @property
    def device_name(self) -> str:
        """The GPU's name and compute capability."""
        if SIMULATOR:
            return "CUDA simulator"
        return f"{driver.device().name} (compute capability {self.capability[0]}.{self.capability[1]})"

    def empty(self, count: int, dtype: str) -> Any:
        """`count` uninitialised elements of `dtype` on the device, 1-D (at least one, so that a view exists)."""
        made = numba_cuda().device_array if SIMULATOR else driver.empty
        return made(max(count, 1), numpy_dtype(dtype))

    def view(self, raw: Any, offset: int, count: int, dtype: str) -> Any:
        """`count` elements of `dtype` that start `offset` bytes into the uint8 device array `raw`."""
        kind = numpy_dtype(dtype)
        return raw[offset : offset + count * kind.itemsize].view(kind)

    def upload(self, target: Any, values: np.ndarray) -> None:
        """Copy host `values` into device `target`; sizes must agree. Returns when `values` may be reused."""
        flat = np.ascontiguousarray(values, target.dtype).reshape(-1)  # which must live until the stream has read it
        target.copy_to_device(flat, stream=self.stream)
        self.synchronize()

    def download(self, source: Any) -> np.ndarray:
        """A fresh host copy of `source`, after everything on the stream has run."""
        self.synchronize()
        return source.copy_to_host(stream=self.stream)

    def download_into(self, source: Any, target: np.ndarray) -> None:
        """Enqueue a copy of the first values of `source` to `target`, which is page-locked: it is filled when the stream has run."""
        if SIMULATOR:
            np.copyto(target, source.copy_to_host()[: target.size])
        else:
            source[: target.size].copy_into(target, self.stream)

    def replayable(self, launches: Sequence[Any], branches: Sequence[str] | None = None) -> Callable[[], None]:
        """Capture `launches` into one CUDA graph and return the function that replays it on the stream.

        `branches` says which may run beside others (`nbcnn.gpu.capture`). Runs them once before, because a kernel cannot be compiled
        or loaded during a capture. The graph holds the arrays' addresses, so they must stay alive and in place.
        """
        if SIMULATOR:
            return partial(_run_all, list(launches), self.stream)
        with ALONE:
            _run_all(launches, self.stream)
            if self._side is None:
                self._side = driver.Stream()
            return CapturedGraph((self.stream, self._side), launches, branches or [MAIN] * len(launches))

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        if not SIMULATOR:
            self.stream.synchronize()

    def wait(self, check: Callable[[], None], timeout: float) -> None:
        """Wait like `synchronize`, but call `check`, which may raise, meanwhile; raises TimeoutError after `timeout` seconds.

        Signals are handled meanwhile, too: in the driver's own wait Python does not see them.
        """
        if SIMULATOR:
            return
        reached, until = driver.Event(timing=False), time.monotonic() + timeout
        reached.record(self.stream)
        while not reached.query():
            check()
            if time.monotonic() >= until:
                raise TimeoutError(f"the GPU was not done after {timeout:.0f} s")
            time.sleep(POLL_SECONDS)

    def free_bytes(self) -> int:
        """Bytes of device memory that can still be allocated."""
        return 1 << 34 if SIMULATOR else driver.device().memory()[0]

    def used_bytes(self) -> dict[str, int | None]:
        """What this program held of the host at its most, and what all programs hold of the GPU now (None in the simulator), by name."""
        free, whole = (0, 0) if SIMULATOR else driver.device().memory()
        return {"host, at its most": memory.peak(), GPU_MEMORY: None if SIMULATOR else whole - free}
