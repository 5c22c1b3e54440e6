"""Numba-CUDA as the compiler of kernels: dispatchers, intrinsics and types of `numba.cuda`, compiled by NVVM and linked by nvJitLink."""

from __future__ import annotations

import hashlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbcnn.files import extras
from nbcnn.gpu import simulator
from nbcnn.gpu.backends import capability, constraints, letters, tied, typer
from nbcnn.gpu.compiler import NUMBA_SIMULATOR

ROOT = "numba.cuda"

_NOT_IN_SIMULATOR = ("launch_bounds", "max_registers", "lto", "cluster")


@cache
def opened() -> tuple[Any, str]:
    """The module `numba.cuda`, made ready; or None, and the reason why it cannot be imported."""
    try:
        from numba import cuda
        from numba.cuda.core import config, errors

        if not NUMBA_SIMULATOR and not hasattr(np, "row_stack"):
            # numba-cuda 0.30 takes `row_stack` from NumPy, which left it out in 2.5: it was another name of `vstack`. Others shall not see it.
            with _exchanged(np, "row_stack", np.vstack):
                importlib.import_module("numba.cuda.np.arrayobj")
    except Exception as error:  # a version of NumPy or of Numba that it does not go with: each fails in its own way
        return None, extras.broken("numba", error)
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
        from nbcnn.gpu.backends import numba32  # noqa: F401
    return cuda, ""


def named(path: str) -> Any:
    # Not `numba.types`, which becomes another module when somebody imports it by that name: kernels on disk would not be found again.
    root, _, rest = path.partition(".")
    module = importlib.import_module({"cuda": "numba.cuda", "types": "numba.core.types"}[root])
    return attrgetter(rest)(module) if rest else module


def dispatcher(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """`cuda.jit(**options)(function)` with numbers of 32 bits (`typing32`), less the options that Numba's simulator does not know.

    `cluster`, which Numba-CUDA does not know either, stays among the options that it carries along; `_library` reads it there.
    """
    cuda, chosen = opened()[0], dict(options)
    if NUMBA_SIMULATOR:
        for name in _NOT_IN_SIMULATOR:
            chosen.pop(name, None)
        return cuda.jit(**chosen)(function)
    from nbcnn.gpu.typing32 import narrow

    return cuda.jit(**chosen)(narrow(function))


def linked(kernel: Any, types: tuple[Any, ...], arch: str) -> tuple[bytes, str]:
    """The way Numba compiles at run time: NVVM's link-time IR, then nvJitLink. Raises NotImplementedError for a cooperative kernel."""
    library, cc = _library(kernel, types, arch, lto=True)
    library._lto, library._max_registers = True, kernel.targetoptions.get("max_registers")
    code = bytes(library.get_cubin(cc=cc).code)
    if library.use_cooperative:
        raise NotImplementedError(f"{kernel.py_func.__name__} needs a cooperative launch, which nbcnn does not make")
    return code, str(library._entry_name)


def ptx(kernel: Any, types: tuple[Any, ...], arch: str) -> str:
    library, cc = _library(kernel, types, arch, lto=False)
    return str(library.get_asm_str(cc=cc))


def _library(kernel: Any, args: tuple[Any, ...], arch: str, lto: bool) -> tuple[Any, tuple[Any, ...]]:
    """What Numba makes of a kernel before linking, and the compute capability."""

    from numba.cuda import compiler, dispatcher
    from numba.cuda.cudadrv import nvvm

    major, minor, letter = capability(arch)
    cc: tuple[Any, ...] = (major, minor, letter) if letter else (major, minor)
    device = SimpleNamespace(compute_capability=cc[:2])
    options = kernel.targetoptions
    # Device functions ask the current device for its compute capability; without a GPU there is none to ask.
    with ExitStack() as patches:
        for module in (dispatcher, compiler):
            patches.enter_context(_exchanged(module, "get_current_device", lambda: device))
        if (cluster := options.get("cluster")) is not None:
            if major < 9:
                raise NotImplementedError(
                    f"{kernel.py_func.__name__} has clusters of blocks, which GPUs have from compute capability 9.0 on, not {arch}"
                )
            patches.enter_context(_exchanged(nvvm, "set_launch_bounds", _in_clusters(nvvm.set_launch_bounds, int(cluster))))
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


@contextmanager
def _exchanged(module: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which `name` of a module is `value`: Numba has no parameter for it. A name that was not there is gone afterwards."""
    there, kept = hasattr(module, name), getattr(module, name, None)
    setattr(module, name, value)
    try:
        yield
    finally:
        if there:
            setattr(module, name, kept)
        else:
            delattr(module, name)


def _in_clusters(bounded: Callable[..., None], blocks: int) -> Callable[..., None]:
    """Numba's `set_launch_bounds`, which then also writes into the kernel that its clusters have so many blocks along x: `.reqnctapercluster`.

    With the size in the kernel an ordinary launch makes clusters, and so does a node of a CUDA graph.
    """

    def annotated(kernel: Any, launch_bounds: Any) -> None:
        from llvmlite import ir
        from numba.cuda import cgutils

        bounded(kernel, launch_bounds)
        module = kernel.module
        annotations = cgutils.get_or_insert_named_metadata(module, "nvvm.annotations")
        for axis, size in (("x", blocks), ("y", 1), ("z", 1)):
            name = ir.MetaDataString(module, f"cluster_dim_{axis}")
            annotations.add(module.add_metadata((kernel, name, ir.Constant(ir.IntType(32), size))))

    return annotated


# Intrinsics. The names given to Numba are derived from the instruction's text: an intrinsic's default identity is random, and would make the
# code of a kernel another one in every process.


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
    gives, takes = letters(results), letters(operands)
    spelled, effect = constraints(gives, takes, pure), not pure

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        from numba.cuda import cgutils

        made = _emit(builder, asm, spelled, gives, takes, effect, values)
        if not gives:
            return context.get_dummy_value()
        if not as_tuple:
            return made
        return cgutils.pack_array(builder, [builder.extract_value(made, i) for i in range(len(gives))])

    function = typer(name, (), len(operands), lambda: (_signature(results, operands, as_tuple), codegen))
    return _intrinsic(function, f"{name}|{asm}|{spelled}")


def accumulating(name: str, asm: str, count: int, first: int, operands: tuple[str, ...]) -> Any:
    takes = letters(operands)
    spelled = tied(count, takes)

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        from llvmlite import ir

        data = context.make_array(sig.args[0])(context, builder, value=values[0]).data
        elements = [builder.gep(data, [ir.Constant(ir.IntType(32), first + i)]) for i in range(count)]
        loaded = [builder.load(element) for element in elements]
        made = _emit(builder, asm, spelled, "f" * count, takes + "f" * count, True, [*values[1:], *loaded])
        for i, element in enumerate(elements):
            builder.store(builder.extract_value(made, i), element)
        return context.get_dummy_value()

    def signed(acc: Any) -> Any:
        from numba.cuda.typing import signature

        types = named("types")
        return signature(types.void, acc, *(getattr(types, kind) for kind in operands)), codegen

    return _intrinsic(typer(name, ("acc",), len(operands), signed), f"{name}|{asm}|{spelled}|{first}")


def byte_address(space: int, number: str) -> Any:
    letter = letters((number,))

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
