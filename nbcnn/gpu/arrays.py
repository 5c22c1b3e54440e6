"""This module takes arrays of other libraries that lie in GPU memory, and gives ours to them, without a copy.

Two protocols say where an array lies, and which stream it is ordered behind. DLPack (https://dmlc.github.io/dlpack/latest/python_spec.html; PyTorch,
CuPy, JAX): the consumer names its stream, and the producer has it wait. `__cuda_array_interface__` (https://nvidia.github.io/numba-cuda; Numba and
others): the producer names its stream, and the consumer waits. Of an array that has both DLPack is used, because PyTorch's interface names no stream.

    array = as_device_array(x)          a `DeviceArray` of the same memory, if `x` is on the GPU; else `x` itself
    array.wait(stream)          what is put on `stream` from now on sees what its producer wrote
    torch.from_dlpack(array)    back, as any library does it
"""

from __future__ import annotations

import ctypes
from functools import cache
from math import prod
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.gpu import driver
from nbcnn.gpu.compiler import SIMULATOR

CUDA, CUDA_MANAGED = 2, 13
"""DLPack's numbers of the two kinds of memory that a GPU has."""
_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}
"""DLPack's codes of the dtypes that NumPy has too, as NumPy's."""
_CODES = {kind: code for code, kind in _KINDS.items()}
LEGACY, PER_THREAD, NO_STREAM = 1, 2, -1
"""The streams that both protocols name by small numbers: the legacy default stream and that of the thread; and DLPack's word for no stream at all."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor: a tensor, and how its owner is told that nobody uses it any more."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_NAME = b"dltensor"


@cache
def _python() -> ctypes.PyDLL:
    """Python's own functions of capsules, with types that no other module changes."""
    api = ctypes.PyDLL(None)
    api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return api


@cache
def _raw() -> ctypes.PyDLL:
    """The same for a capsule that is being destroyed, which no Python object may refer to."""
    api = ctypes.PyDLL(None)
    api.PyCapsule_IsValid.restype, api.PyCapsule_IsValid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
    api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
    return api


_given_away: dict[int, Any] = {}
"""What the consumers of our capsules use, by the address of its DLManagedTensor."""


@_Deleter
def _done_with(address: int) -> None:
    _given_away.pop(address, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _capsule_dies(capsule: int) -> None:
    """Give back what a capsule holds that nobody has consumed; a consumer renames it, and calls the deleter itself."""
    if _raw().PyCapsule_IsValid(capsule, _NAME):
        _done_with(_raw().PyCapsule_GetPointer(capsule, _NAME))


class DeviceArray:
    """A C-contiguous array in GPU memory: `shape`, `dtype`, parts a[i:j] of the first axis, `reshape`, and a host copy by `numpy.asarray`.

    flat   its elements (`driver.Array`), which keep their owner alive.
    ready  the event that what wrote it has run; None if it has. stream  on which this library goes on with it.

    Other libraries take it without a copy: torch.from_dlpack(a), cupy.from_dlpack(a), jax.dlpack.from_dlpack(a), numba.cuda.as_cuda_array(a).
    """

    def __init__(self, flat: driver.Array, shape: tuple[int, ...], ready: Any = None, stream: Any = None) -> None:
        self.flat, self.shape, self.ready, self.stream = flat, shape, ready, stream

    @property
    def dtype(self) -> np.dtype:
        return self.flat.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.flat.size

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype} {self.shape} on the GPU>"

    def __getitem__(self, part: slice) -> DeviceArray:
        start, stop, step = part.indices(self.shape[0])
        if step != 1:
            raise ValueError("a part of a device array has step 1")
        row, count = prod(self.shape[1:]), max(0, stop - start)
        return DeviceArray(self.flat[start * row : (start + count) * row], (count, *self.shape[1:]), self.ready, self.stream)

    def reshape(self, *shape: int) -> DeviceArray:
        """The same elements as an array of `shape`. Raises ValueError for another number of them."""
        if prod(shape) != self.size:
            raise ValueError(f"{self.shape} has {self.size} elements, {shape} has {prod(shape)}")
        return DeviceArray(self.flat, shape, self.ready, self.stream)

    def wait(self, stream: Any) -> None:
        """Let what is put on `stream` from now on wait until the array is written."""
        if self.ready is not None:
            self.ready.wait(stream)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A host copy. Raises ValueError for copy=False."""
        if copy is False:
            raise ValueError("the array is in GPU memory: NumPy cannot have it without a copy")
        stream = _import_stream()
        self.wait(stream)
        made = self.flat.copy_to_host(stream).reshape(self.shape)
        return made if dtype is None else made.astype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = LEGACY if self.stream is None else int(self.stream.handle)
        if self.ready is not None and self.stream is not None:
            self.wait(self.stream)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.flat.address, False), "strides": None, "version": 3, "stream": stream}

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any:
        """A capsule of the array, on which the consumer's `stream` goes on. Raises BufferError for another device, or a copy."""
        if copy or (dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__()):
            raise BufferError("a device array is given as it is: on its GPU, without a copy")
        if stream != NO_STREAM:
            self.wait(stream or LEGACY)
        dims = (ctypes.c_int64 * max(1, self.ndim))(*self.shape)
        strides = (ctypes.c_int64 * max(1, self.ndim))(*(prod(self.shape[at + 1 :]) for at in range(self.ndim)))
        kind = _Dtype(_CODES[self.dtype.kind], 8 * self.dtype.itemsize, 1)
        tensor = _Tensor(self.flat.address, _Device(CUDA, 0), self.ndim, kind, dims, strides, 0)
        managed = _Managed(tensor, None, _done_with)
        address = ctypes.addressof(managed)
        _given_away[address] = (managed, dims, strides, self)
        return _python().PyCapsule_New(address, _NAME, ctypes.cast(_capsule_dies, ctypes.c_void_p))


@cache
def _import_stream() -> driver.Stream:
    """The stream that waits for the producers of arrays."""
    return driver.Stream()


def as_device_array(x: Any, name: str = "an array") -> Any:
    """`x` as a `DeviceArray` of its own memory, if it is an array on the GPU; anything else as it is.

    Raises UsageError for an array that is not C-contiguous, is on another GPU, has a dtype that NumPy lacks, or which its library does not give.
    """
    if isinstance(x, np.ndarray | DeviceArray) or x is None or SIMULATOR:
        return x
    place = getattr(x, "__dlpack_device__", None)
    if place is not None:
        kind, number = map(int, place())
        if kind not in (CUDA, CUDA_MANAGED):
            return x
        if number != 0:
            raise UsageError(f"{name} is on GPU {number}, and nbcnn uses the first one that the process sees: nbcnn.use_device chooses it")
        return _of_dlpack(x, name)
    interface = getattr(x, "__cuda_array_interface__", None)
    return x if interface is None else _of_interface(x, interface, name)


def _of_dlpack(x: Any, name: str) -> DeviceArray:
    """The array of an object with `__dlpack__`, whose producer has our stream wait."""
    stream = _import_stream()
    try:
        capsule = x.__dlpack__(stream=int(stream.handle))
    except (BufferError, RuntimeError, TypeError) as error:
        raise UsageError(f"{name} cannot be taken from {type(x).__module__}: {error}") from None
    tensor = _Managed.from_address(_python().PyCapsule_GetPointer(capsule, _NAME)).tensor
    shape = tuple(tensor.shape[at] for at in range(tensor.ndim))
    strides = tuple(tensor.strides[at] for at in range(tensor.ndim)) if tensor.strides else None
    if tensor.dtype.code not in _KINDS or tensor.dtype.lanes != 1:
        raise UsageError(f"{name} has a dtype that NumPy lacks, such as bfloat16: give float32 or uint8")
    kind = _KINDS[tensor.dtype.code]
    dtype = np.dtype(np.bool_) if kind == "b" else np.dtype(f"{kind}{tensor.dtype.bits // 8}")
    _check_contiguous(shape, strides, name)
    # The capsule frees what it holds when it dies, as nobody renames it.
    flat = driver.Array(prod(shape), dtype, (tensor.data or 0) + tensor.byte_offset, (capsule, x))
    return DeviceArray(flat, shape, recorded(stream), stream)


def _of_interface(x: Any, interface: dict[str, Any], name: str) -> DeviceArray:
    """The array of an object with `__cuda_array_interface__`, whose stream ours waits for."""
    shape, dtype = tuple(map(int, interface["shape"])), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if dtype.kind not in _CODES:
        raise UsageError(f"{name} is {dtype}: give float32 or uint8")
    _check_contiguous(shape, None if strides is None else tuple(each // dtype.itemsize for each in strides), name)
    stream, theirs = _import_stream(), interface.get("stream")
    if interface.get("version", 0) < 3:
        driver.finish()  # it says nothing of streams, so everything that was enqueued is waited for
    elif theirs is not None:
        recorded(int(theirs)).wait(stream)
    return DeviceArray(driver.Array(prod(shape), dtype, int(interface["data"][0] or 0), x), shape, recorded(stream), stream)


def recorded(stream: Any) -> driver.Event:
    """An event behind everything that is on `stream` now: what a `DeviceArray` is ready at."""
    event = driver.Event(timing=False)
    event.record(stream)
    return event


def _check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, name: str) -> None:
    """Raise UsageError unless elements lie one behind the other; `strides` count elements, and say nothing of axes of one."""
    if strides is None or 0 in shape:
        return
    if any(size > 1 and stride != prod(shape[at + 1 :]) for at, (size, stride) in enumerate(zip(shape, strides, strict=True))):
        raise UsageError(f"{name} of shape {shape} is not C-contiguous, and nbcnn takes GPU arrays where they lie: give x.contiguous()")
