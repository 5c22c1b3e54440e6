"""This module has kernels that are loaded into the primary context, and their launches with packed arguments. Nothing here needs a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from nbcnn.gpu.driver import Array, checked, device, handle_of


def signature(args: Sequence[Any]) -> tuple[str, ...]:
    """The types of a launch's arguments: "float32[]" for a flat array, "int32" for a NumPy scalar; Python's numbers as int64 and float64."""
    return tuple(_type(value) for value in args)


def _type(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            return f"{np.dtype(interface['typestr']).name}[]"
        return "boolean" if isinstance(value, bool) else np.result_type(value).name
    if not isinstance(value, np.generic):
        if getattr(value, "ndim", 1) != 1:
            raise TypeError(f"kernels take flat arrays, this one has {value.ndim} axes")
        typestr = value.__cuda_array_interface__["typestr"] if not isinstance(dtype, np.dtype) else dtype
        return f"{np.dtype(typestr).name}[]"
    return "boolean" if dtype == np.bool_ else dtype.name


class Kernel:
    """The kernel `entry` of a cubin, loaded into the context. Raises DriverError if the driver refuses it.

    `compiler` is the one that made it (`compiler.COMPILERS`): each has its own way to pass an array.
    """

    def __init__(self, cubin: bytes, entry: str, compiler: str = "numba") -> None:
        gpu = device()
        self._api, self._gpu, self.entry, self.compiler = gpu.api, gpu, entry, compiler
        self._library = checked(gpu.api.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"load the kernel {entry}")
        kernel = checked(gpu.api.cuLibraryGetKernel(self._library, entry.encode()), f"find the kernel {entry}")
        # Asking for the function loads the code now: the driver is lazy by default, and code cannot be loaded during a graph capture.
        self.function = checked(gpu.api.cuKernelGetFunction(kernel), f"load the kernel {entry}")
        self._shared = 0

    def attribute(self, name: str) -> int:
        """NUM_REGS, LOCAL_SIZE_BYTES, SHARED_SIZE_BYTES, …"""
        attribute = getattr(self._api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(checked(self._api.cuFuncGetAttribute(attribute, self.function), "ask for a kernel's attribute"))

    def allow_shared(self, nbytes: int) -> None:
        """Let launches have `nbytes` of dynamic shared memory: above 48 KiB a kernel must ask. Raises DriverError if the GPU has less."""
        if nbytes > max(self._shared, 48 << 10):
            attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(self._api.cuFuncSetAttribute(self.function, attribute, nbytes), f"take {nbytes} bytes of shared memory")
            self._shared = nbytes

    def blocks_per_multiprocessor(self, threads: int, shared: int = 0) -> int:
        """How many blocks a multiprocessor holds at once."""
        return int(checked(self._api.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared), "work out an occupancy"))

    def check_together(self, grid: Any, block: Any) -> None:
        """Raise RuntimeError if `grid` blocks are more than the GPU holds at once: they would wait for each other forever."""
        fit = self.blocks_per_multiprocessor(prod(_three(block))) * self._gpu.attribute("MULTIPROCESSOR_COUNT")
        if prod(_three(grid)) > fit:
            raise RuntimeError(f"{self.entry}: its {prod(_three(grid))} blocks wait for each other, and the GPU holds {fit} of them at once")

    def bind(self, grid: Any, block: Any, args: Sequence[Any], shared: int = 0) -> Bound:
        """The launch with these arguments, to be run as often as wanted. The arrays must stay alive and in place."""
        return Bound(self, grid, block, args, shared)


class Bound:
    """A launch whose arguments are packed: running it is one call of the driver, of about 4 µs.

    A scalar is one word, a flat array is several (`ARRAYS`).
    """

    def __init__(self, kernel: Kernel, grid: Any, block: Any, args: Sequence[Any], shared: int) -> None:
        kernel.allow_shared(shared)
        words = [word for value in args for word in _words(value, ARRAYS[kernel.compiler])]
        self._values = np.zeros(len(words), np.uint64)
        for at, word in enumerate(words):
            self._values[at : at + 1].view(word.dtype)[0] = word
        self._pointers = self._values.ctypes.data + 8 * np.arange(len(words), dtype=np.uint64)
        self._api, self._keep = kernel._api, (kernel, args)
        self._call = self._api.cuLaunchKernel
        self._fixed = (kernel.function, *_three(grid), *_three(block), int(shared))
        self._parameters = int(self._pointers.ctypes.data)
        self._stream: Any = None
        self._stream_handle: Any = None

    def run(self, stream: Any = None) -> None:
        """Enqueue the kernel on `stream`. Raises DriverError if the driver refuses the launch."""
        if stream is not self._stream or self._stream_handle is None:
            self._stream, self._stream_handle = stream, handle_of(stream)
        (status,) = self._call(*self._fixed, self._stream_handle, self._parameters, 0)
        if int(status) != 0:
            checked((status,), f"launch {self._keep[0].entry}")


def _three(size: Any) -> tuple[int, int, int]:
    """Grid or block as three numbers."""
    given = tuple(int(v) for v in size) if isinstance(size, tuple | list) else (int(size),)
    return (*given, 1, 1)[:3]  # type: ignore[return-value]


ARRAYS: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    # Two unused, number of elements, bytes of one, address, shape, stride in bytes.
    "numba": lambda address, count, size: (0, 0, count, size, address, count, size),
    # MLIR's description of a memref: address of the allocation, of the elements, offset, shape, stride in elements.
    "mlir": lambda address, count, size: (address, address, 0, count, 1),
}
"""By the compiler that made a kernel: the words of a flat array at an address, of so many elements of so many bytes, among its parameters."""


def _words(value: Any, array: Callable[[int, int, int], tuple[int, ...]]) -> list[np.generic]:
    if isinstance(value, Array):
        address, count, size = value.address, value.size, value.itemsize
    elif (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
        if interface.get("strides") not in (None, (np.dtype(interface["typestr"]).itemsize,)):
            raise TypeError("kernels take contiguous arrays")
        address, count, size = interface["data"][0], prod(interface["shape"]), np.dtype(interface["typestr"]).itemsize
    elif isinstance(value, np.generic):
        return [value]
    elif isinstance(value, bool | int | float):
        return [np.bool_(value) if isinstance(value, bool) else np.result_type(value).type(value)]
    else:
        raise TypeError(f"a kernel takes device arrays and scalars, not {type(value).__name__}")
    return [np.uint64(word) for word in array(address, count, size)]
