"""numba-cuda-mlir as the compiler of kernels: Numba's frontend and type inference, MLIR, then NVVM and nvJitLink. It needs no Numba.

It asks the driver for the GPU that is in the machine even where an architecture is given; `_made` says what the driver would answer. It has no
simulator (`nbcnn.gpu.lockstep` is the project's own).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from nbcnn.files import extras
from nbcnn.gpu.backends import LETTERS, capability, constraints, letters, tied, typer

ROOT = "numba_cuda_mlir.numba_cuda"


@cache
def opened() -> tuple[Any, str]:
    """The module `numba_cuda_mlir.cuda`, made ready; or None, and the reason why it cannot be imported."""
    try:
        from numba_cuda_mlir import cuda
        from numba_cuda_mlir.numba_cuda.core import errors
    except Exception as error:  # a version of NumPy or of the C library that it does not go with: each fails in its own way
        return None, extras.broken("numba_cuda_mlir", error)
    warnings.simplefilter("ignore", errors.NumbaPerformanceWarning)
    from nbcnn.gpu.backends import mlir32, mlir_passes  # noqa: F401

    return cuda, ""


def named(path: str) -> Any:
    root, _, rest = path.partition(".")
    module = importlib.import_module({"cuda": "numba_cuda_mlir.cuda", "types": f"{ROOT}.types"}[root])
    return attrgetter(rest)(module) if rest else module


def dispatcher(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """`cuda.jit(**options)(function)` with numbers of 32 bits (`typing32`). Device functions are calls until MLIR puts them in place."""
    from nbcnn.gpu.backends.mlir32 import inlined_before_typing
    from nbcnn.gpu.typing32 import narrow

    chosen = {name: value for name, value in options.items() if name not in ("lto", "cluster")}
    made = opened()[0].jit(inline=inlined_before_typing, annotations_as_signatures=False, **chosen)(narrow(function))
    if "cluster" in options:
        made.targetoptions["cluster"] = int(options["cluster"])  # of which `jit` knows nothing
    return made


def linked(kernel: Any, types: tuple[Any, ...], arch: str) -> tuple[bytes, str]:
    """The same way as Numba-CUDA's: NVVM's link-time IR, then nvJitLink. Raises NotImplementedError for a cooperative kernel."""
    made = _made(kernel, types, arch, lto=True)
    if made.metadata.get("use_cooperative"):
        raise NotImplementedError(f"{kernel.py_func.__name__} needs a cooperative launch, which nbcnn does not make")
    return bytes(made.metadata["cubin"]), str(made.metadata["func_name"])


def ptx(kernel: Any, types: tuple[Any, ...], arch: str) -> str:
    return str(_made(kernel, types, arch, lto=False).metadata["ptx"])


def _made(kernel: Any, args: tuple[Any, ...], arch: str, lto: bool) -> Any:
    from numba_cuda_mlir import tools
    from numba_cuda_mlir.descriptor import mlir_target
    from numba_cuda_mlir.mlir_compiler import compile_mlir
    from numba_cuda_mlir.mlir_optimization import optimize

    from nbcnn.gpu.backends.mlir_passes import clusters

    major, minor, _ = capability(arch)
    # What it would ask the driver: the GPU for which to compile is the one that is there.
    tools._cached_cc = (major, minor)
    mlir_target.ensure_initialized()
    if _new:
        mlir_target.refresh_registries(typing=True, target=False)  # it has read them before these intrinsics were made
        _new.clear()
    options = dict(kernel.targetoptions)
    cluster = options.pop("cluster", 0)
    # Clusters stand in PTX alone.
    options |= {"chip": f"sm_{arch}", "lto": lto and not cluster, "_lto_explicit": True}
    made = compile_mlir(kernel.py_func, None, args, targetoptions=options)
    with clusters(cluster):
        optimize(made)
    return made


# Intrinsics

_new: list[Any] = []
"""Intrinsics that the compiler does not know yet."""


def _intrinsic(function: Callable[..., Any]) -> Any:
    from numba_cuda_mlir.extending import intrinsic

    _new.append(intrinsic(function))
    return _new[-1]


def _mlir(letter: str) -> Any:
    """The MLIR type of a constraint letter."""
    from numba_cuda_mlir._mlir import ir

    return ir.F32Type.get() if letter == "f" else ir.IntegerType.get_signless({"h": 16, "r": 32, "l": 64}[letter])


def _emit(asm: str, spelled: str, gives: str, values: list[Any], effect: bool) -> list[Any]:
    """The results of inline PTX."""
    from numba_cuda_mlir._mlir import ir
    from numba_cuda_mlir._mlir.dialects import llvm

    kinds = [_mlir(letter) for letter in gives]
    if len(kinds) < 2:
        made = llvm.inline_asm(kinds[0] if kinds else None, values, asm, spelled, has_side_effects=effect)
        return [made] if kinds else []
    whole = llvm.inline_asm(llvm.StructType.get_literal(kinds), values, asm, spelled, has_side_effects=effect)
    return [llvm.extractvalue(kind, whole, ir.DenseI64ArrayAttr.get([at])) for at, kind in enumerate(kinds)]


def _cast(builder: Any, variables: Any, operands: tuple[str, ...]) -> list[Any]:
    """The values of arguments, as the types of an instruction's operands: signed numbers keep their sign."""
    types = named("types")
    return [
        builder.lower_cast(builder.get_numba_type(each.name), getattr(types, kind), builder.load_var(each)) for each, kind in zip(variables, operands)
    ]


def instruction(name: str, asm: str, results: tuple[str, ...], operands: tuple[str, ...], as_tuple: bool, pure: bool) -> Any:
    gives, takes = letters(results), letters(operands)
    spelled = constraints(gives, takes, pure)

    def lower(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
        made = _emit(asm, spelled, gives, _cast(builder, args, operands), not pure)
        builder.store_var(target, tuple(made) if as_tuple else made[0] if made else None)

    def signed() -> Any:
        types = named("types")
        kinds = [getattr(types, kind) for kind in results]
        returned = types.void if not kinds else types.UniTuple(kinds[0], len(kinds)) if as_tuple else kinds[0]
        return returned(*(getattr(types, kind) for kind in operands)), lower

    return _intrinsic(typer(name, (), len(operands), signed))


def accumulating(name: str, asm: str, count: int, first: int, operands: tuple[str, ...]) -> Any:
    spelled = tied(count, letters(operands))

    def lower(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
        from nbcnn.gpu.backends.mlir32 import element, read, write

        acc = builder.load_var(args[0])
        places = [element(acc, first + i) for i in range(count)]
        made = _emit(asm, spelled, "f" * count, [*_cast(builder, args[1:], operands), *map(read, places)], True)
        for place, value in zip(places, made):
            write(place, value)
        builder.store_var(target, None)

    def signed(acc: Any) -> Any:
        types = named("types")
        return types.void(acc, *(getattr(types, kind) for kind in operands)), lower

    return _intrinsic(typer(name, ("acc",), len(operands), signed))


def byte_address(space: int, number: str) -> Any:
    letter = LETTERS[number]

    def lower(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
        from numba_cuda_mlir._mlir.dialects import llvm

        from nbcnn.gpu.backends.mlir32 import pointer

        in_space = llvm.addrspacecast(llvm.PointerType.get(space), pointer(builder.load_var(args[0])))
        builder.store_var(target, llvm.ptrtoint(_mlir(letter), in_space))

    def address(typingctx, array):
        return getattr(named("types"), number)(array), lower

    return _intrinsic(address)
