"""This module changes a whole kernel between numba-cuda-mlir's lowering and NVVM: variables become registers, functions that nobody calls go,
and local arrays move to the beginning. The backend `mlir` imports it, and nothing else does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba_cuda_mlir import mlir_optimization
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import llvm

_BEFORE_BODY = re.compile(rb"(\.entry[^{]*?)\n\{")
_pipeline, _last_patterns = mlir_optimization.get_base_pipeline, mlir_optimization.run_pre_codegen_patterns


@contextmanager
def clusters(blocks: int) -> Iterator[None]:
    """Within, PTX for a Hopper says that the kernel has clusters of so many blocks along x (0: no word of it).

    The LLVM by way of which such PTX comes leaves out the attribute `nvvm.cluster_dim`, in link-time IR too: so the directive is added here.
    """
    written = mlir_optimization._call_llvm70_capi

    def with_clusters(*args: Any, **named: Any) -> bytes:
        ptx, count = _BEFORE_BODY.subn(rb"\1\n.explicitcluster\n.reqnctapercluster %d, 1, 1\n{" % blocks, written(*args, **named), count=1)
        if count != 1:
            raise RuntimeError("the PTX of numba-cuda-mlir has no entry into which the size of clusters could be written")
        return bytes(ptx)

    if blocks:
        mlir_optimization._call_llvm70_capi = with_clusters
    try:
        yield
    finally:
        mlir_optimization._call_llvm70_capi = written


def _pipeline_with_registers() -> str:
    """MLIR's passes with variables put into registers first. Where NVVM is left to do that, it has joined loads of different variables before
    (`simplifycfg` knows variables only by their own addresses, not by parts of a described array), and both stay in local memory.
    """
    return _pipeline().replace("builtin.module(", "builtin.module(mem2reg,", 1)


def _kernel_alone(module: Any) -> Any:
    """Without the device functions that have been put in place, which NVVM would compile all the same; and with local arrays at the beginning
    of the kernel, as arrays: one of a device function lies where the function was put in place, perhaps in a loop, and NVVM keeps in registers
    only what lies in the first block.
    """
    functions = {ir.StringAttr(each.attributes["sym_name"]).value: each for each in _functions(module.operation)}
    needed = [name for name, each in functions.items() if "nvvm.kernel" in each.attributes or "gpu.kernel" in each.attributes]
    for name in needed:  # which grows
        needed += [called for called in dict.fromkeys(_called(functions[name])) if called in functions and called not in needed]
    for name in [name for name in functions if needed and name not in needed]:
        functions.pop(name).erase()
    for kernel in functions.values():
        blocks = list(kernel.regions[0].blocks)
        for block in blocks:
            for op in [op for op in block.operations if op.operation.name == "llvm.alloca"]:
                count = op.operands[0].owner
                if count.operation.name == "llvm.mlir.constant":
                    _in_front(op, ir.IntegerAttr(count.attributes["value"]).value, blocks[0])
    return _last_patterns(module)


def _functions(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "llvm.func":
                    if len(inner.regions[0].blocks):
                        yield inner.operation
                else:
                    yield from _functions(inner.operation)


def _called(op: Any) -> Iterator[str]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "llvm.call" and "callee" in inner.operation.attributes:
                    yield ir.FlatSymbolRefAttr(inner.operation.attributes["callee"]).value
                yield from _called(inner.operation)


def _in_front(op: Any, count: int, first: Any) -> None:
    kind, attributes = ir.TypeAttr(op.attributes["elem_type"]).value, {}
    if "alignment" in op.attributes:
        attributes["alignment"] = ir.IntegerAttr(op.attributes["alignment"]).value
    with ir.InsertionPoint.at_block_begin(first), op.location:
        one = llvm.ConstantOp(ir.IntegerType.get_signless(64), ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 1)).result
        whole = ir.Type.parse(f"!llvm.array<{count} x {kind}>") if count > 1 else kind
        made = llvm.AllocaOp(op.results[0].type, one, whole, **attributes).result
    op.results[0].replace_all_uses_with(made)
    op.operation.erase()


mlir_optimization.get_base_pipeline = _pipeline_with_registers
mlir_optimization.run_pre_codegen_patterns = _kernel_alone
