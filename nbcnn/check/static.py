"""This module compiles a kernel without a GPU and reads its registers, stack frame and shared memory from the cubin.

A kernel is compiled the way it is compiled at run time (NVVM link-time IR, then nvJitLink), for any architecture.
A stack frame is local memory: spilled registers, or a local array that the compiler could not keep in registers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.compiler import array_type, cubin, ptx, scalar_type
from nbcnn.gpu.language import resolved
from nbcnn.ops.kernel.call import Launch

_REGCOUNT, _FRAME_SIZE, _CLUSTER = 0x2F, 0x11, 0x3D
_SIZED_VALUE = 0x04


@dataclass(frozen=True)
class StaticReport:
    """One compiled kernel: 32-bit registers per thread, stack frame bytes per thread, static shared bytes per block, blocks of a cluster or 0."""

    name: str
    arch: str
    registers: int
    frame_bytes: int
    shared_bytes: int
    cluster: int
    cubin: bytes


def signature_of(launch: Launch) -> tuple[Any, ...]:
    """The compiler's types of a launch's arguments; arrays may be NumPy stand-ins."""
    return tuple(
        (array_type if hasattr(value, "dtype") and getattr(value, "ndim", 0) == 1 else scalar_type)(getattr(value, "dtype", type(value)))
        for value in launch.args
    )


def compile_kernel(kernel: Any, args: tuple[Any, ...], arch: str = "90a") -> StaticReport:
    """Compile `kernel`, as `jit` describes it, for the compiler's types `args` of its arguments and architecture such as "75", "80", "90a".

    Raises whatever the compiler, NVVM or nvJitLink raise: a kernel that does not compile.
    """
    made = cubin(resolved(kernel), args, arch)
    return StaticReport(kernel.py_func.__name__, f"sm_{arch}", *_resources(made), made)


def ptx_of_launch(launch: Launch, arch: str = "90a") -> str:
    """The PTX of a bound launch's kernel, before registers are allocated. Raises as `compile_kernel`."""
    return ptx(resolved(launch.kernel), signature_of(launch), arch)


def compile_launch(launch: Launch, arch: str = "90a") -> StaticReport:
    """`compile_kernel` for a bound launch, whose arrays may be NumPy arrays."""
    return compile_kernel(launch.kernel, signature_of(launch), arch)


def _resources(cubin: bytes) -> tuple[int, int, int, int]:
    """(registers, frame bytes, shared bytes, blocks of a cluster) of the only kernel in a 64-bit ELF cubin."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    strings = sections[names][4]
    registers = frame = shared = cluster = 0
    for name, _, _, _, offset, length, *_ in sections:
        start = strings + name
        title = cubin[start : cubin.index(b"\0", start)].decode()
        # What is reserved belongs to the KiB that the driver keeps of every block.
        if title.startswith(".nv.shared.") and not title.startswith(".nv.shared.reserved"):
            shared += length
        if title == ".nv.info":
            for attribute, payload in _attributes(cubin[offset : offset + length]):
                if attribute == _REGCOUNT:
                    registers = max(registers, struct.unpack_from("<II", payload)[1])
                if attribute == _FRAME_SIZE:
                    frame = max(frame, struct.unpack_from("<II", payload)[1])
        if title.startswith(".nv.info."):
            for attribute, payload in _attributes(cubin[offset : offset + length]):
                if attribute == _CLUSTER:
                    cluster = struct.unpack_from("<I", payload)[0]
    return registers, frame, shared, cluster


def _attributes(info: bytes):
    """(attribute, payload) pairs of a `.nv.info` section."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED_VALUE:
            yield attribute, info[at : at + length]
            at += length
