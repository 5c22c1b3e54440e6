"""This module is the one door to the compiler: it alone imports Numba, llvmlite and NVIDIA's bindings, and only at the first use.

What kernels are made of is described in `nbcnn.gpu.language`; here the descriptions become Numba's own things: dispatchers,
intrinsics, types. A *dispatcher* is what Numba's `cuda.jit` returns, or in the simulator what stands in its place.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbcnn.gpu import simulator

INSTALL = 'install the extra cu13, or cu12 for drivers before 580: pip install "nbcnn[cu13]"'
"""What brings Numba-CUDA and the CUDA toolkit."""


class CompilerMissing(RuntimeError):
    """Numba-CUDA is not installed or cannot be imported; the message names the extra that brings it."""

    exit_code = 4


def _asked(variable: str) -> int:
    """A variable of the environment as Numba reads its own: an integer, 0 where it is none."""
    try:
        return int(os.environ.get(variable, "0"))
    except ValueError:
        return 0


LOCKSTEP = bool(_asked("NBCNN_SIMULATOR"))
"""True when NBCNN_SIMULATOR=1: kernels run as lanes of NumPy arrays (`nbcnn.gpu.lockstep`), without a GPU and without Numba."""
NUMBA_SIMULATOR = not LOCKSTEP and bool(_asked("NUMBA_ENABLE_CUDASIM"))
"""True when NUMBA_ENABLE_CUDASIM=1: kernels run as Python threads in Numba's simulator."""
SIMULATOR = LOCKSTEP or NUMBA_SIMULATOR
"""True when kernels run in either simulator."""
SIMULATED_CAPABILITY = (8, 0) if _asked("NBCNN_SIMULATOR") == 80 else (7, 5)
"""The compute capability of the simulated GPU: NBCNN_SIMULATOR=80 asks for Ampere's tensor cores."""
SIMULATED_BY = "NBCNN_SIMULATOR=1" if LOCKSTEP else "NUMBA_ENABLE_CUDASIM=1"
"""The variable of the environment that asks for the simulator."""

_NOT_IN_SIMULATOR = ("launch_bounds", "max_registers", "lto")


@cache
def _opened() -> tuple[Any, str]:
    """The module `numba.cuda`, made ready; or None, and the reason why it cannot be imported."""
    try:
        from numba import cuda
        from numba.cuda.core import config, errors
    except ModuleNotFoundError as error:
        found = "is not installed" if (error.name or "").split(".")[0] in ("numba", "numba_cuda") else f"lacks a package ({error})"
        return None, f"Numba-CUDA {found}: {INSTALL}"
    except Exception as error:  # a version of NumPy or of Numba that it does not go with: each fails in its own way
        return None, f"Numba-CUDA cannot be imported ({type(error).__name__}: {error}): {INSTALL}"
    # One block of a small test shape is no performance problem, and users cannot act on the message.
    warnings.simplefilter("ignore", errors.NumbaPerformanceWarning)
    if bool(config.ENABLE_CUDASIM) != NUMBA_SIMULATOR:
        return None, "Numba simulates and nbcnn does not, or the reverse: set NUMBA_ENABLE_CUDASIM before Python starts, not in .numba_config.yaml"
    if NUMBA_SIMULATOR:
        from numba.cuda.simulator import kernel, kernelapi

        simulator.quicken(kernel, kernelapi, cuda)
    else:
        # Here, and not where a kernel is first marked: a worker of the compile pool is handed marked kernels, and would compile them by
        # Numba's own rules (sums in float64: mode tiled took 3.4 times as long).
        from nbcnn.gpu import typing32  # noqa: F401
    return cuda, ""


def missing() -> str | None:
    """None if Numba-CUDA can be imported or is not needed, else the reason in words, with the extra that brings it."""
    return None if LOCKSTEP else _opened()[1] or None


def numba_cuda() -> Any:
    """The module `numba.cuda`: streams, events, memory and devices of the host's side; the simulator's stand-in. Raises CompilerMissing."""
    if LOCKSTEP:
        return importlib.import_module("nbcnn.gpu.lockstep.host")
    module, reason = _opened()
    if module is None:
        raise CompilerMissing(reason)
    return module


def bindings(name: str) -> Any:
    """The module `name` ("driver", "runtime", "nvml") of NVIDIA's `cuda.bindings`. Raises ImportError where it is not installed."""
    return importlib.import_module(f"cuda.bindings.{name}")


def named(path: str) -> Any:
    """What Numba has under a dotted name, such as "cuda.shared.array" or "types.float32"; what stands for it in the simulator."""
    if LOCKSTEP:
        from nbcnn.gpu.lockstep import names

        return names.named(path)
    numba_cuda()
    # Not `numba.types`, which becomes another module when somebody imports it by that name: kernels on disk would not be found again.
    root, _, rest = path.partition(".")
    module = importlib.import_module({"cuda": "numba.cuda", "types": "numba.core.types"}[root])
    return attrgetter(rest)(module) if rest else module


def dispatcher(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """`cuda.jit(**options)(function)` with numbers of 32 bits (`typing32`), less the options that Numba's simulator does not know.

    In the simulator a device function is itself, and a kernel a `lockstep.launch.Kernel`.
    """
    if LOCKSTEP:
        from nbcnn.gpu.lockstep.launch import Kernel

        return function if options.get("device") else Kernel(function, dict(options))
    cuda, chosen = numba_cuda(), dict(options)
    if NUMBA_SIMULATOR:
        for name in _NOT_IN_SIMULATOR:
            chosen.pop(name, None)
        return cuda.jit(**chosen)(function)
    from nbcnn.gpu.typing32 import narrow

    return cuda.jit(**chosen)(narrow(function))


def widened() -> AbstractContextManager[list[str]]:
    """A context that gives a list, to which every place is added where a kernel compiled within has a number of 64 bits that no cast asks for."""
    numba_cuda()
    from nbcnn.gpu.typing32 import watching

    return watching()


def scalar_type(dtype: np.dtype | type | str) -> Any:
    """Numba's type of a NumPy scalar."""
    return named(f"types.{np.dtype(dtype).name}")


def array_type(dtype: np.dtype | type | str) -> Any:
    """Numba's type of a flat contiguous array."""
    return named("types.Array")(scalar_type(dtype), 1, "C")


def types_of(names: Sequence[str]) -> tuple[Any, ...]:
    """Numba's types of a signature such as ("float32[]", "int32"): flat arrays and scalars (`driver.signature`)."""
    return tuple(array_type(name[:-2]) if name.endswith("[]") else scalar_type("bool" if name == "boolean" else name) for name in names)


def compiled(kernel: Any, types: Sequence[str], arch: str) -> tuple[bytes, str]:
    """The cubin of `kernel` for a signature and an architecture, and the name of the kernel in it. Raises as `cubin`."""
    library, code = _linked(kernel, types_of(types), arch)
    if library.use_cooperative:
        raise NotImplementedError(f"{kernel.py_func.__name__} needs a cooperative launch, which nbcnn does not make")
    return code, str(library._entry_name)


def cubin(kernel: Any, types: tuple[Any, ...], arch: str) -> bytes:
    """`kernel` compiled for these Numba types and an architecture such as "75" or "90a" the way Numba does it at run time (NVVM link-time
    IR, then nvJitLink), without a GPU. Raises whatever Numba, NVVM or nvJitLink raise."""
    return _linked(kernel, types, arch)[1]


def _linked(kernel: Any, types: tuple[Any, ...], arch: str) -> tuple[Any, bytes]:
    library, cc = _library(kernel, types, arch, lto=True)
    library._lto, library._max_registers = True, kernel.targetoptions.get("max_registers")
    return library, bytes(library.get_cubin(cc=cc).code)


def ptx(kernel: Any, types: tuple[Any, ...], arch: str) -> str:
    """The PTX of `kernel`, as `cubin`: registers are given out to it only later."""
    library, cc = _library(kernel, types, arch, lto=False)
    return str(library.get_asm_str(cc=cc))


def _library(kernel: Any, args: tuple[Any, ...], arch: str, lto: bool) -> tuple[Any, tuple[Any, ...]]:
    """What Numba makes of a kernel before linking, and the compute capability."""
    numba_cuda()
    from contextlib import ExitStack
    from unittest import mock  # which takes 29 ms to import

    from numba.cuda import compiler, dispatcher

    digits = arch.rstrip("abcdefghijklmnopqrstuvwxyz")
    cc: tuple[Any, ...] = (int(digits[:-1]), int(digits[-1])) + ((arch[len(digits) :],) if arch != digits else ())
    device = SimpleNamespace(compute_capability=cc[:2])
    options = kernel.targetoptions
    # Device functions ask the current device for its compute capability; without a GPU there is none to ask.
    with ExitStack() as patches:
        for module in (dispatcher, compiler):
            patches.enter_context(mock.patch.object(module, "get_current_device", return_value=device))
        library, _ = compiler._compile_pyfunc_with_fixup(
            kernel.py_func,
            named("types.void")(*args),
            device=False,
            abi="numba",
            cc=cc[:2],
            fastmath=options.get("fastmath", False),
            launch_bounds=options.get("launch_bounds"),
            lto=lto,
        )
    return library, cc


# Intrinsics. The names given to Numba are derived from the instruction's text: an intrinsic's default identity is random, and would make the
# code of a kernel another one in every process.

LETTERS = {"uint16": "h", "uint32": "r", "int32": "r", "uint64": "l", "int64": "l", "float32": "f"}
"""Constraint letters of inline PTX."""


def _llvm(letter: str) -> Any:
    """The LLVM type of a constraint letter."""
    from llvmlite import ir

    return {"f": ir.FloatType(), "h": ir.IntType(16), "r": ir.IntType(32), "l": ir.IntType(64)}[letter]


def _emit(builder: Any, asm: str, constraints: str, results: str, operands: str, effect: bool, values: Any) -> Any:
    from llvmlite import ir

    kinds: Any = [_llvm(c) for c in results]
    returned = ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    function = ir.FunctionType(returned, [_llvm(c) for c in operands])
    return builder.call(ir.InlineAsm(function, asm, constraints, side_effect=effect), values)


def _intrinsic(function: Callable[..., Any], text: str) -> Any:
    numba_cuda()
    from numba.cuda.extending import intrinsic

    made = intrinsic(function)
    made._set_uuid("asm-" + hashlib.sha256(text.encode()).hexdigest())
    return made


def _signature(results: tuple[str, ...], operands: tuple[str, ...], as_tuple: bool) -> Any:
    from numba.cuda.typing import signature

    types = named("types")
    kinds = [getattr(types, kind) for kind in results]
    returned = types.void if not kinds else types.UniTuple(kinds[0], len(kinds)) if as_tuple else kinds[0]
    return signature(returned, *(getattr(types, kind) for kind in operands))


def instruction(name: str, asm: str, results: tuple[str, ...], operands: tuple[str, ...], as_tuple: bool, pure: bool) -> Any:
    """The intrinsic that emits `asm`; `results` and `operands` are names of scalar types."""
    gives = "".join(LETTERS[kind] for kind in results)
    takes = "".join(LETTERS[kind] for kind in operands)
    clobber = [] if pure else ["~{memory}"]
    constraints = ",".join(["=" + c for c in gives] + list(takes) + clobber)
    effect = not pure

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        from numba.cuda import cgutils

        made = _emit(builder, asm, constraints, gives, takes, effect, values)
        if not gives:
            return context.get_dummy_value()
        if not as_tuple:
            return made
        return cgutils.pack_array(builder, [builder.extract_value(made, i) for i in range(len(gives))])

    arguments = "".join(f", a{i}" for i in range(len(operands)))
    scope: dict[str, Any] = {"signature": _signature, "types": (results, operands, as_tuple), "codegen": codegen}
    exec(f"def {name}(typingctx{arguments}):\n    return signature(*types), codegen\n", scope)  # noqa: S102 - of names and numbers that this module makes
    return _intrinsic(scope[name], f"{name}|{asm}|{constraints}")


def _accumulating_signature(acc: Any, operands: tuple[str, ...]) -> Any:
    from numba.cuda.typing import signature

    types = named("types")
    return signature(types.void, acc, *(getattr(types, kind) for kind in operands))


def accumulating(name: str, asm: str, count: int, first: int, operands: tuple[str, ...]) -> Any:
    """The intrinsic (acc, *operands) that emits `asm` with acc[first : first + count], float32, tied to registers that it reads and writes."""
    takes = "".join(LETTERS[kind] for kind in operands)
    constraints = ",".join(["=f"] * count + list(takes) + [str(i) for i in range(count)] + ["~{memory}"])

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        from llvmlite import ir

        data = context.make_array(sig.args[0])(context, builder, value=values[0]).data
        elements = [builder.gep(data, [ir.Constant(ir.IntType(32), first + i)]) for i in range(count)]
        loaded = [builder.load(element) for element in elements]
        made = _emit(builder, asm, constraints, "f" * count, takes + "f" * count, True, [*values[1:], *loaded])
        for i, element in enumerate(elements):
            builder.store(builder.extract_value(made, i), element)
        return context.get_dummy_value()

    arguments = "".join(f", a{i}" for i in range(len(operands)))
    scope: dict[str, Any] = {"signature": _accumulating_signature, "operands": operands, "codegen": codegen}
    exec(f"def {name}(typingctx, acc{arguments}):\n    return signature(acc, operands), codegen\n", scope)  # noqa: S102 - of names and numbers that this module makes
    return _intrinsic(scope[name], f"{name}|{asm}|{constraints}|{first}")


def byte_address(space: int, number: str) -> Any:
    """The intrinsic (array) -> the address of its first element in an address space, as this type."""
    letter = LETTERS[number]

    def address(typingctx, array):
        from numba.cuda.typing import signature

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            from llvmlite import ir

            data = context.make_array(sig.args[0])(context, builder, value=values[0]).data
            pointer = builder.bitcast(data, ir.IntType(8).as_pointer())
            in_space = builder.addrspacecast(pointer, ir.PointerType(ir.IntType(8), space))
            return builder.ptrtoint(in_space, _llvm(letter))

        return signature(named(f"types.{number}"), array), codegen

    return _intrinsic(address, f"address of space {space}")
