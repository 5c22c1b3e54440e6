"""This module is the one door to the compiler: only what stands behind it imports Numba and llvmlite, at the first use,
and only it NVIDIA's bindings.

What kernels are made of is described in `nbcnn.gpu.language`; here the descriptions become things of the compiler's own: dispatchers,
intrinsics, types. A *dispatcher* is what `cuda.jit` returns, or in the simulator what stands in its place. There are two compilers
(`nbcnn.gpu.backends`); NBCNN_COMPILER says which one a process uses.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.files.extras import PackageMissing, named_in
from nbcnn.files.numerals import whole_in
from nbcnn.files.quote import quoted
from nbcnn.gpu.backends import LETTERS as LETTERS
from nbcnn.gpu.backends import Backend

COMPILERS = {"numba": "numba-cuda", "mlir": "numba-cuda-mlir"}
"""The compilers, by what NBCNN_COMPILER may be, and the packages that they are."""


def _asked(variable: str) -> int:
    """The whole number in a variable of the environment, 0 without it or where it is empty.

    Other text is 0 in a variable of Numba's, of which Numba warns; in one of ours UsageError is raised.
    """
    if not os.environ.get(variable):
        return 0
    try:
        return whole_in(os.environ, variable, 0, (1 << 31) - 1)
    except ValueError as error:
        if variable.startswith("NUMBA_"):
            return 0
        raise UsageError(str(error)) from None


LOCKSTEP = bool(_asked("NBCNN_SIMULATOR"))
"""True when NBCNN_SIMULATOR=1: kernels run as lanes of NumPy arrays (`nbcnn.gpu.lockstep`), without a GPU and without Numba."""
NUMBA_SIMULATOR = not LOCKSTEP and bool(_asked("NUMBA_ENABLE_CUDASIM"))
"""True when NUMBA_ENABLE_CUDASIM=1: kernels run as Python threads in Numba's simulator."""
SIMULATOR = LOCKSTEP or NUMBA_SIMULATOR
"""True when kernels run in either simulator."""
SIMULATED_CAPABILITY = (8, 0) if _asked("NBCNN_SIMULATOR") == 80 else (7, 5) if LOCKSTEP else (7, 0)
"""The compute capability of the simulated GPU: NBCNN_SIMULATOR=80 asks for Ampere's tensor cores, 1 has Turing's, Numba's simulator none."""
SIMULATED_BY = "NBCNN_SIMULATOR=1" if LOCKSTEP else "NUMBA_ENABLE_CUDASIM=1"
"""The variable of the environment that asks for the simulator."""
CHOSEN = "numba" if NUMBA_SIMULATOR else os.environ.get("NBCNN_COMPILER") or "numba"
"""Which of COMPILERS this process uses, as NBCNN_COMPILER says; Numba's simulator is Numba's."""


@cache
def backend() -> Backend:
    """The compiler that this process uses; nothing of it is imported yet. Raises UsageError where NBCNN_COMPILER names none."""
    if CHOSEN not in COMPILERS:
        raise UsageError(f"NBCNN_COMPILER is {quoted(CHOSEN)}: choose {' or '.join(COMPILERS)}, or unset it for numba")
    return importlib.import_module(f"nbcnn.gpu.backends.{CHOSEN}")


def missing() -> str | None:
    """None if the compiler can be imported or is not needed, else the reason in words, with the extra that brings it."""
    return None if LOCKSTEP else backend().opened()[1] or None


def numba_cuda() -> Any:
    """The compiler's module `cuda` (`numba.cuda` or `numba_cuda_mlir.cuda`), imported and made ready; in a simulator what stands for it.

    Raises PackageMissing, or UsageError where Numba simulates and nbcnn does not.
    """
    if LOCKSTEP:
        return importlib.import_module("nbcnn.gpu.lockstep.host")
    module, reason = backend().opened()
    if module is None:
        raise PackageMissing(reason) if named_in(reason) else UsageError(reason)
    return module


def bindings(name: str) -> Any:
    """The module `name` ("driver", "runtime", "nvml") of NVIDIA's `cuda.bindings`. Raises ImportError where it is not installed."""
    return importlib.import_module(f"cuda.bindings.{name}")


def named(path: str) -> Any:
    """What the compiler has under a dotted name, such as "cuda.shared.array" or "types.float32"; what stands for it in the simulator."""
    if LOCKSTEP:
        from nbcnn.gpu.lockstep import names

        return names.named(path)
    numba_cuda()
    return backend().named(path)


def dispatcher(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """`cuda.jit(**options)(function)` with numbers of 32 bits (`typing32`).

    In the simulator a device function is itself, and a kernel a `lockstep.launch.Kernel`.
    """
    if LOCKSTEP:
        from nbcnn.gpu.lockstep.launch import Kernel

        return function if options.get("device") else Kernel(function, dict(options))
    numba_cuda()
    return backend().dispatcher(function, options)


def widened() -> AbstractContextManager[list[str]]:
    """A context that gives a list, to which every place is added where a kernel compiled within has a number of 64 bits that no cast asks for."""
    numba_cuda()
    from nbcnn.gpu.typing32 import watching

    return watching()


def scalar_type(dtype: np.dtype | type | str) -> Any:
    """The compiler's type of a NumPy scalar."""
    return named(f"types.{np.dtype(dtype).name}")


def array_type(dtype: np.dtype | type | str) -> Any:
    """The compiler's type of a flat contiguous array."""
    return named("types.Array")(scalar_type(dtype), 1, "C")


def types_of(names: Sequence[str]) -> tuple[Any, ...]:
    """The compiler's types of a signature such as ("float32[]", "int32"): flat arrays and scalars (`launching.signature`)."""
    return tuple(array_type(name[:-2]) if name.endswith("[]") else scalar_type("bool" if name == "boolean" else name) for name in names)


def compiled(kernel: Any, types: Sequence[str], arch: str) -> tuple[bytes, str]:
    """The cubin of `kernel` for a signature and an architecture, and the name of the kernel in it. Raises as `cubin`."""
    with _nothing_collected():
        return backend().linked(kernel, types_of(types), arch)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without Python's garbage collector, which walks again and again through what a compiler makes and still needs: an eighth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def cubin(kernel: Any, types: tuple[Any, ...], arch: str) -> bytes:
    """`kernel` compiled for these types of the compiler and an architecture such as "75" or "90a", without a GPU.

    Raises whatever the compiler, NVVM or nvJitLink raise, and NotImplementedError for a kernel that needs a cooperative launch, which nbcnn
    does not make.
    """
    numba_cuda()
    return backend().linked(kernel, types, arch)[0]


def ptx(kernel: Any, types: tuple[Any, ...], arch: str) -> str:
    """The PTX of `kernel`, as `cubin`: registers are given out to it only later."""
    numba_cuda()
    return backend().ptx(kernel, types, arch)


# Intrinsics: names of these functions are part of what a kernel is known by (`nbcnn.gpu.identity`).


def instruction(name: str, asm: str, results: tuple[str, ...], operands: tuple[str, ...], as_tuple: bool, pure: bool) -> Any:
    """The intrinsic that emits `asm`; `results` and `operands` are names of scalar types."""
    numba_cuda()
    return backend().instruction(name, asm, results, operands, as_tuple, pure)


def accumulating(name: str, asm: str, count: int, first: int, operands: tuple[str, ...]) -> Any:
    """The intrinsic (acc, *operands) that emits `asm` with acc[first : first + count], float32, tied to registers that it reads and writes."""
    numba_cuda()
    return backend().accumulating(name, asm, count, first, operands)


def byte_address(space: int, number: str) -> Any:
    """The intrinsic (array) -> the address of its first element in an address space, as this type."""
    numba_cuda()
    return backend().byte_address(space, number)
