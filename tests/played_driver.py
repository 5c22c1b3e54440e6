"""A driver that plays a GPU, in place of `cuda.bindings.driver`: memory is the host's, kernels are loaded and launched without effect.

It has the functions that `nbcnn.gpu.driver` and `nbcnn.gpu.capture` call, and refuses what the real one refuses: other image formats than
ELF, blocks of more than 1,024 threads, waiting or freeing memory during a capture. `calls` counts them. Shows how nbcnn uses the driver, not
what kernels compute.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import numpy as np

calls: Counter[str] = Counter()
launched: list[tuple[tuple[int, ...], int]] = []
"""Grid, block and shared bytes of every launch, and the address of its parameters."""
_memory: dict[int, np.ndarray] = {}
_capturing = [False]
_handles = iter(range(1000, 10**9))


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


OK = CUresult.CUDA_SUCCESS
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "CLOCK_RATE": 1_980_000,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "INTEGRATED": 0,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "L2_CACHE_SIZE": 50 << 20,
}
MEMORY = 1 << 34


class _Names:
    """Enumerations of the real module: every name stands for itself."""

    def __getattr__(self, name):
        return name


def _allocate(nbytes):
    if nbytes > MEMORY:
        return (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    buffer = np.zeros(nbytes + 256, np.uint8)
    address = (buffer.ctypes.data + 255) & ~255
    _memory[address] = buffer
    return (OK, address)


def _free(address):
    if _capturing[0] or address not in _memory:
        return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    del _memory[address]
    return (OK,)


def _copy(target, source, nbytes, stream):
    ctypes.memmove(target, source, nbytes)
    return (OK,)


def _load(code, *options):
    return (OK, next(_handles)) if bytes(code[:4]) == b"\x7fELF" else (CUresult.CUDA_ERROR_INVALID_IMAGE, None)


def _launch(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
    if min(gx, gy, gz, bx, by, bz) < 1 or bx * by * bz > 1024:
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)
    launched.append(((gx, gy, gz, bx, by, bz, shared), parameters))
    return (OK,)


def _begin(stream, mode):
    _capturing[0] = True
    return (OK,)


def _end(stream):
    _capturing[0] = False
    return (OK, next(_handles))


def _wait(stream):
    return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,) if _capturing[0] else (OK,)


def _record(event, stream, flags):
    return (OK,) if (flags == 1) == _capturing[0] else (CUresult.CUDA_ERROR_INVALID_VALUE,)


FUNCTIONS = {
    "cuInit": lambda flags: (OK,),
    "cuDeviceGetCount": lambda: (OK, 1),
    "cuDeviceGet": lambda at: (OK, at),
    "cuDevicePrimaryCtxRetain": lambda device: (OK, 1),
    "cuCtxSetCurrent": lambda context: (OK,),
    "cuCtxSynchronize": lambda: (OK,),
    "cuDeviceGetAttribute": lambda name, device: (OK, ATTRIBUTES[name.removeprefix("CU_DEVICE_ATTRIBUTE_")]),
    "cuDeviceGetName": lambda size, device: (OK, b"NVIDIA Played".ljust(size, b"\0")),
    "cuDeviceGetUuid": lambda device: (OK, SimpleNamespace(bytes=bytes(range(16)))),
    "cuDeviceTotalMem": lambda device: (OK, 2 * MEMORY),
    "cuMemGetInfo": lambda: (OK, MEMORY, 2 * MEMORY),
    "cuMemAlloc": _allocate,
    "cuMemFree": _free,
    "cuMemHostAlloc": lambda nbytes, flags: _allocate(nbytes),
    "cuMemFreeHost": _free,
    "cuMemcpyHtoDAsync": _copy,
    "cuMemcpyDtoHAsync": _copy,
    "cuMemcpyDtoDAsync": _copy,
    "cuStreamCreate": lambda flags: (OK, next(_handles)),
    "cuStreamDestroy": lambda stream: (OK,),
    "cuStreamSynchronize": _wait,
    "cuStreamBeginCapture": _begin,
    "cuStreamEndCapture": _end,
    "cuStreamIsCapturing": lambda stream: (OK, "yes" if _capturing[0] else "CU_STREAM_CAPTURE_STATUS_NONE"),
    "cuStreamWaitEvent": lambda stream, event, flags: (OK,),
    "cuGraphInstantiate": lambda graph, flags: (OK, next(_handles)),
    "cuGraphLaunch": lambda graph, stream: (OK,),
    "cuGraphExecDestroy": lambda graph: (OK,),
    "cuGraphDestroy": lambda graph: (OK,),
    "cuEventCreate": lambda flags: (OK, next(_handles)),
    "cuEventDestroy": lambda event: (OK,),
    "cuEventRecord": lambda event, stream: (OK,),
    "cuEventRecordWithFlags": _record,
    "cuEventQuery": lambda event: (OK,),
    "cuEventSynchronize": lambda event: (OK,),
    "cuEventElapsedTime": lambda before, behind: (OK, 1.5),
    "cuLibraryLoadData": _load,
    "cuLibraryGetKernel": lambda library, name: (OK, next(_handles)),
    "cuKernelGetFunction": lambda kernel: (OK, next(_handles)),
    "cuFuncGetAttribute": lambda attribute, function: (OK, 7),
    "cuFuncSetAttribute": lambda function, attribute, value: (OK,),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda function, threads, shared: (OK, 2048 // threads),
    "cuLaunchKernel": _launch,
    "cuTensorMapEncodeTiled": lambda *args: (OK, SimpleNamespace(opaque=[1] * 16)),
    "cuTensorMapEncodeIm2col": lambda *args: (OK, SimpleNamespace(opaque=[1] * 16)),
}


def module():
    """The stand-in for `cuda.bindings.driver`."""
    made = ModuleType("cuda.bindings.driver")

    def counted(name, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        return call

    for name, function in FUNCTIONS.items():
        setattr(made, name, counted(name, function))
    for name in ("CUdeviceptr", "CUstream", "cuuint64_t", "cuuint32_t"):
        setattr(made, name, int)
    for name in ("CUdevice_attribute", "CUfunction_attribute", "CUstreamCaptureMode", "CUstreamCaptureStatus", "CUtensorMapDataType"):
        setattr(made, name, _Names())
    for name in ("CUtensorMapInterleave", "CUtensorMapSwizzle", "CUtensorMapL2promotion", "CUtensorMapFloatOOBfill"):
        setattr(made, name, _Names())
    made.CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0, CU_EVENT_DISABLE_TIMING=2)
    made.CUevent_record_flags = SimpleNamespace(CU_EVENT_RECORD_DEFAULT=0, CU_EVENT_RECORD_EXTERNAL=1)
    made.CUresult = CUresult
    return made


def install():
    """Have this process import the stand-in. Before the first use of the GPU."""
    sys.modules["cuda.bindings.driver"] = module()


def compile_nothing():
    """Have kernels compiled and kept in name only: lists of the names of those that the compile pool is asked for, and of those at a first launch."""
    from nbcnn.gpu import compile_pool, kernel_store

    def compiled(names):
        def compile_now(wanted, key):
            names.append(wanted.name)
            header = {"key": key, "name": wanted.name, "module": "m", "types": list(wanted.types), "arch": wanted.arch, "entry": "e", "seconds": 0.0}
            return kernel_store.Stored(header | {"compilers": {}}, b"\x7fELF")

        return compile_now

    together, alone = [], []
    compile_pool.compile_now, kernel_store.compile_now = compiled(together), compiled(alone)
    compile_pool._cores = lambda: 1
    kernel_store.keep = compile_pool.keep = lambda *_: None
    kernel_store.find = compile_pool.find = lambda *_: None
    return together, alone
