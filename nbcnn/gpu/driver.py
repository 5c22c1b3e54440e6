"""The host's side of CUDA through NVIDIA's driver API: one device and its primary context, memory, streams, events.

Nothing here needs a compiler, so a program whose kernels are all on disk (`nbcnn.gpu.kernel_store`) never imports Numba. The bindings are
`cuda.bindings.driver`, imported at the first use: 0.11 s of processor time, where `cuda.core` takes 0.48 s and `numba.cuda` 1.05 s.
The primary context is the one that Numba, PyTorch and NCCL use, too.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import numpy as np

from nbcnn.files import extras
from nbcnn.files.quote import quoted
from nbcnn.gpu import faults
from nbcnn.gpu.compiler import SIMULATOR, bindings

WARP = 32

_asked = False


def in_use() -> bool:
    """True once this process has asked the driver for its devices, which it does only once (`nbcnn.gpu.select`)."""
    return _asked


class DriverError(RuntimeError):
    """A call of the driver failed; the message names what was tried and the driver's word for the failure."""


class DriverMissing(RuntimeError):
    """There is no usable driver, GPU, or package that calls the driver; the message says which."""

    exit_code = 4


def checked(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a CUDA call (a tuple of several), or DriverError with the driver's word for what failed."""
    if int(result[0]) != 0:
        raise DriverError(f"could not {doing}: {getattr(result[0], 'name', result[0])}")
    return result[1] if len(result) == 2 else result[1:] or None


def _usable() -> Any:
    """The driver's functions, where it has at least one GPU. Opens none. Raises DriverMissing, or GpuFault in a forked process."""
    global _asked
    try:
        api = bindings("driver")
    except Exception as error:  # a version that this Python does not go with: each fails in its own way
        raise DriverMissing(extras.broken("cuda", error)) from None
    _asked = True
    try:
        status = api.cuInit(0)[0]
    except Exception as error:  # libcuda is absent: each version of the bindings raises its own kind
        text = " ".join(str(error).split())
        raise DriverMissing(f"no usable CUDA driver ({text})") from None
    if int(status) != 0:
        name = getattr(status, "name", str(status))
        if name == "CUDA_ERROR_NOT_INITIALIZED":
            raise faults.forked()
        raise DriverMissing("no CUDA GPU visible" if name == "CUDA_ERROR_NO_DEVICE" else f"no usable CUDA driver ({name})")
    if not checked(api.cuDeviceGetCount(), "count the GPUs"):
        raise DriverMissing("no CUDA GPU visible")
    return api


def visible() -> bool:
    """True if there is a GPU; it is not opened, so another process can measure what opening costs."""
    try:
        _usable()
    except (DriverMissing, DriverError):
        return False
    return True


class Device:
    """The GPU that this process sees first, and its primary context, which is retained until the process ends.

    Raises DriverMissing, or GpuFault where other processes hold the GPU's memory.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        try:
            self.api = _usable()
            self.device = checked(self.api.cuDeviceGet(0), "find the GPU")
            self.context = checked(self.api.cuDevicePrimaryCtxRetain(self.device), "open the GPU")
        except DriverError as error:
            if (fault := faults.explained(error)) and fault.exit_code == faults.NO_MEMORY:
                raise fault from error
            raise DriverMissing(f"the CUDA device cannot be opened ({error})") from None
        self._threads = threading.local()

    def enter(self) -> None:
        """Make the context the calling thread's."""
        if not getattr(self._threads, "entered", False):
            checked(self.api.cuCtxSetCurrent(self.context), "enter the GPU's context")
            self._threads.entered = True

    def attribute(self, name: str) -> int:
        """A device attribute by its name in the driver API, such as "MULTIPROCESSOR_COUNT"."""
        return int(
            checked(self.api.cuDeviceGetAttribute(getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), self.device), "ask the GPU")
        )

    @property
    def capability(self) -> tuple[int, int]:
        return self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def name(self) -> str:
        return bytes(checked(self.api.cuDeviceGetName(256, self.device), "ask for the GPU's name")).split(b"\0")[0].decode()

    @property
    def uuid(self) -> str:
        """The identity of the GPU as nvidia-smi prints it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx."""
        digits = bytes(checked(self.api.cuDeviceGetUuid(self.device), "ask for the GPU's identity").bytes).hex()
        return "GPU-" + "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory, (free, in all)."""
        free, whole = checked(self.api.cuMemGetInfo(), "ask for free memory")
        return int(free), int(whole)

    def profile(self, on: bool) -> None:
        """Start or stop what a profiler records."""
        checked(self.api.cuProfilerStart() if on else self.api.cuProfilerStop(), "talk to the profiler")


def all_gpus() -> list[dict[str, Any]]:
    """Name, compute capability ("9.0") and bytes of memory of every GPU that this process sees; none of them is opened for it."""
    api = device().api

    def ask(name: str, gpu: Any) -> int:
        return int(checked(api.cuDeviceGetAttribute(getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), gpu), "ask a GPU"))

    found = []
    for at in range(int(checked(api.cuDeviceGetCount(), "count the GPUs"))):
        gpu = checked(api.cuDeviceGet(at), "find a GPU")
        name = bytes(checked(api.cuDeviceGetName(256, gpu), "ask for a GPU's name")).split(b"\0")[0].decode()
        capability = f"{ask('COMPUTE_CAPABILITY_MAJOR', gpu)}.{ask('COMPUTE_CAPABILITY_MINOR', gpu)}"
        nbytes = int(checked(api.cuDeviceTotalMem(gpu), "ask for a GPU's memory"))
        found.append({"name": name, "compute_capability": capability, "memory_bytes": nbytes})
    return found


_OPENING = threading.Lock()


@cache
def _device() -> Device:
    return Device()


def device() -> Device:
    """The GPU, opened at the first call, its context the calling thread's.

    Raises DriverMissing, or GpuFault where a GPU is and this process cannot use it: others hold its memory, or this process was forked from one
    that uses it.
    """
    with _OPENING:
        found = _device()
    if found.process != os.getpid():
        raise faults.forked()
    found.enter()
    return found


def open_ahead() -> None:
    """Open the GPU in a thread of its own, beside what the caller does meanwhile. What fails there fails again where the GPU is used."""

    def opening() -> None:
        with suppress(Exception):
            device()

    if not SIMULATOR:
        threading.Thread(target=opening, name="opening the GPU").start()  # no daemon: Python must not end while it imports the bindings


@cache
def arch() -> str:
    """The architecture that kernels are compiled for here, as "80" or "90a": from 9.0 on with what only this architecture has."""
    major, minor = device().capability
    return f"{major}{minor}{'a' if (major, minor) >= (9, 0) else ''}"


# Memory

_held_back: list[tuple[Device, Callable[[], Any]]] | None = None


def _free(gpu: Device, give_back: Callable[[], Any]) -> None:
    """Give memory of `gpu` back; during a capture, whose thread must not free any, when it has ended."""
    if _held_back is not None:
        _held_back.append((gpu, give_back))
    elif not sys.is_finalizing():
        with suppress(Exception):  # at the end of the process the driver may have gone first
            gpu.enter()
            give_back()


@contextmanager
def nothing_freed() -> Iterator[None]:
    """Within, arrays that die keep their memory until the end: what a graph capture needs, which freeing memory would break."""
    global _held_back
    _held_back = []
    try:
        yield
    finally:
        waiting, _held_back = _held_back, None
        for gpu, give_back in waiting:
            _free(gpu, give_back)


class Array:
    """A flat contiguous array in device memory: `dtype`, `size`, and what NumPy arrays have of `shape`, `nbytes`, slices and `view`.

    Other libraries read it through `__cuda_array_interface__`. A part keeps the whole allocation alive.
    """

    ndim = 1

    def __init__(self, size: int, dtype: Any, address: int, owner: Any) -> None:
        self.size, self.dtype, self.address, self._owner = size, np.dtype(dtype), address, owner

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "strides": None, "version": 3}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Array:
        if not isinstance(part, slice):
            raise TypeError(f"a device array has parts a[i:j], not elements: {quoted(part)}")
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError("a part of a device array has step 1")
        return Array(max(0, stop - start), self.dtype, self.address + start * self.itemsize, self._owner)

    def view(self, dtype: Any) -> Array:
        """The same bytes as another dtype. Raises ValueError if they are no whole number of elements."""
        size, rest = divmod(self.nbytes, np.dtype(dtype).itemsize)
        if rest:
            raise ValueError(f"{self.nbytes} bytes are no whole number of {np.dtype(dtype)}")
        return Array(size, dtype, self.address, self._owner)

    def copy_to_device(self, values: np.ndarray, stream: Any = None) -> None:
        """Copy host `values` here, in order with what `stream` runs; they may be changed when the stream has run. Raises ValueError if
        sizes or dtypes differ."""
        if values.size != self.size or values.dtype != self.dtype:
            raise ValueError(f"{values.dtype} × {values.size} do not fit into {self.dtype} × {self.size}")
        if self.size:
            api, source = device().api, np.ascontiguousarray(values)
            checked(api.cuMemcpyHtoDAsync(self._pointer(api), source.ctypes.data, self.nbytes, handle_of(stream)), "copy to the GPU")
            if source is not values:
                synchronize(stream)

    def copy_from(self, other: Array, stream: Any = None) -> None:
        """Copy another array of the GPU here, in order with what `stream` runs. Raises ValueError if sizes or dtypes differ."""
        if other.size != self.size or other.dtype != self.dtype:
            raise ValueError(f"{other.dtype} × {other.size} do not fit into {self.dtype} × {self.size}")
        if self.size:
            api = device().api
            checked(api.cuMemcpyDtoDAsync(self._pointer(api), other._pointer(api), self.nbytes, handle_of(stream)), "copy on the GPU")

    def copy_to_host(self, stream: Any = None) -> np.ndarray:
        """A fresh host copy, after what `stream` has to run."""
        made = np.empty(self.size, self.dtype)
        if self.size:
            api = device().api
            checked(api.cuMemcpyDtoHAsync(made.ctypes.data, self._pointer(api), self.nbytes, handle_of(stream)), "copy from the GPU")
            synchronize(stream)
        return made

    def copy_into(self, target: np.ndarray, stream: Any = None) -> None:
        """Copy to contiguous host `target` in order with what `stream` runs; if it is page-locked (`pinned`), without waiting for that.

        Raises ValueError if sizes or dtypes differ.
        """
        if target.size != self.size or target.dtype != self.dtype:
            raise ValueError(f"{self.dtype} × {self.size} do not fit into {target.dtype} × {target.size}")
        if self.size:
            api = device().api
            checked(api.cuMemcpyDtoHAsync(target.ctypes.data, self._pointer(api), self.nbytes, handle_of(stream)), "copy from the GPU")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.copy_to_host() if dtype is None else self.copy_to_host().astype(dtype)

    def _pointer(self, api: Any) -> Any:
        return api.CUdeviceptr(self.address)


class _Allocation:
    """Device memory that is given back when nothing refers to it any more."""

    def __init__(self, nbytes: int) -> None:
        gpu = device()
        pointer = checked(gpu.api.cuMemAlloc(nbytes), f"allocate {nbytes:,} bytes of GPU memory")
        self.address = int(pointer)
        weakref.finalize(self, _free, gpu, partial(gpu.api.cuMemFree, pointer)).atexit = False


def empty(size: int, dtype: Any) -> Array:
    """`size` uninitialised elements on the device, aligned to 256 bytes. Raises DriverError with CUDA_ERROR_OUT_OF_MEMORY in it."""
    owner = _Allocation(max(1, size * np.dtype(dtype).itemsize))
    return Array(size, dtype, owner.address, owner)


def upload(values: np.ndarray) -> Array:
    """`values`, flat, in an allocation of their own."""
    flat = np.ascontiguousarray(values).reshape(-1)
    made = empty(flat.size, flat.dtype)
    made.copy_to_device(flat)
    synchronize()
    return made


def pinned(size: int, dtype: Any) -> np.ndarray:
    """`size` uninitialised elements of page-locked host memory, 1-D, which the GPU copies from without the host. Raises MemoryError."""
    gpu, nbytes = device(), max(1, size * np.dtype(dtype).itemsize)
    try:
        address = int(checked(gpu.api.cuMemHostAlloc(nbytes, 0), f"allocate {nbytes:,} bytes of page-locked memory"))
    except DriverError as error:
        raise MemoryError(str(error)) from None
    held = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(held, _free, gpu, partial(gpu.api.cuMemFreeHost, address)).atexit = False
    return np.frombuffer(held, np.dtype(dtype), size)


# Streams and events


class Stream:
    """A stream of the device; `handle` is the driver's. It is destroyed when nothing refers to it any more: a stream holds about 0.5 MiB."""

    def __init__(self) -> None:
        gpu = device()
        self.handle = checked(gpu.api.cuStreamCreate(0), "create a stream")
        weakref.finalize(self, _free, gpu, partial(gpu.api.cuStreamDestroy, self.handle)).atexit = False

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self.handle)

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        checked(device().api.cuStreamSynchronize(self.handle), "wait for the GPU")


def handle_of(stream: Any) -> Any:
    """The driver's handle of a stream: one of ours, Numba's or a number; the default stream for None and 0."""
    if isinstance(stream, Stream):
        return stream.handle
    handle = getattr(stream, "handle", stream)
    return device().api.CUstream(int(getattr(handle, "value", handle) or 0))


def synchronize(stream: Any = None) -> None:
    """Wait until `stream`, by default the default stream, is empty."""
    checked(device().api.cuStreamSynchronize(handle_of(stream)), "wait for the GPU")


def finish() -> None:
    """Wait until everything that was put on any stream of the GPU has run."""
    checked(device().api.cuCtxSynchronize(), "wait for the GPU")


class Event:
    """A point between launches. It is recorded like a launch is run; in a captured graph it is a node, and every replay records it anew."""

    def __init__(self, timing: bool = True) -> None:
        self._api = api = device().api
        flags = api.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self.handle: Any = checked(api.cuEventCreate(int(flag)), "create an event")

    def record(self, stream: Any = None) -> None:
        """Record the event behind what is on `stream`."""
        handle = handle_of(stream)
        status = checked(self._api.cuStreamIsCapturing(handle), "ask for a stream's capture")
        flags = self._api.CUevent_record_flags
        idle = status == self._api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        flag = flags.CU_EVENT_RECORD_DEFAULT if idle else flags.CU_EVENT_RECORD_EXTERNAL
        checked(self._api.cuEventRecordWithFlags(self.handle, handle, int(flag)), "record an event")

    run = record

    def wait(self, stream: Any) -> None:
        """Let what is put on `stream` from now on wait for the event."""
        checked(self._api.cuStreamWaitEvent(handle_of(stream), self.handle, 0), "wait for an event")

    def query(self) -> bool:
        """True if the GPU has come there."""
        status = self._api.cuEventQuery(self.handle)
        if getattr(status[0], "name", "") == "CUDA_ERROR_NOT_READY":
            return False
        checked(status, "ask for an event")
        return True

    def synchronize(self) -> None:
        """Wait until the GPU has come there."""
        checked(self._api.cuEventSynchronize(self.handle), "wait for an event")

    def until(self, later: Event) -> float:
        """Milliseconds from this event to a later one, both past."""
        return float(checked(self._api.cuEventElapsedTime(self.handle, later.handle), "read the time between two events"))

    def close(self) -> None:
        """Let the event go, when no graph holds it any more."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            checked(self._api.cuEventDestroy(handle), "destroy an event")

    def __del__(self) -> None:
        with suppress(Exception):  # half made, or at the end of the process
            self.close()
