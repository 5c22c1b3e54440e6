"""The code that numba-cuda-mlir makes of numbers of 32 bits (`nbcnn.gpu.typing32`), of array elements and of loops over ranges, so that NVVM
gets what Numba-CUDA gives it. The backend `mlir` imports this module, and nothing else does.

Its own code would test each index for Python's negative ones, multiply it by a stride that it reads from the arguments, and count a range's
steps in 64 bits. Functions that `typing32.narrow` did not mark are lowered as ever.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

from numba_cuda_mlir import cuda
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, builtin, func, llvm, memref, nvvm
from numba_cuda_mlir.lowering import cuda as cuda_lowering
from numba_cuda_mlir.lowering_utilities import (
    IterResult,
    RangeObject,
    UniTupleIterObject,
    get_or_insert_function,
    memref_descriptor_type,
)
from numba_cuda_mlir.mlir_lowering import MLIRLower
from numba_cuda_mlir.models import IntegerModel, register_model
from numba_cuda_mlir.numba_cuda.types.ext_types import Dim3

from nbcnn.gpu.typing32 import SIGNATURES, Literal32, Signature32, marked, types
from nbcnn.gpu.typing32 import ir as numba_ir

register_model(Literal32)(IntegerModel)


def inlined_before_typing(expr: Any, caller: Any, callee: Any) -> bool:
    return False


def _int(width: int) -> Any:
    return ir.IntegerType.get_signless(width)


def _constant(kind: Any, value: int) -> Any:
    return arith.constant(kind, value)


# Numbers


def _assume(relation: Any, number: Any) -> None:
    """Promise the compiler that a number is > 0, or >= 0."""
    if not isinstance(number.owner, ir.Block) and number.owner.operation.name == "arith.constant":
        return
    llvm.intr_assume(arith.cmpi(relation, number, _constant(number.type, 0)), [], [])


def _floordiv(x: Any, y: Any, signed: bool) -> Any:
    if not signed:
        return arith.divui(x, y)
    _assume(arith.CmpIPredicate.sgt, y)
    quotient, zero = arith.divsi(x, y), _constant(x.type, 0)
    below = arith.cmpi(arith.CmpIPredicate.slt, arith.remsi(x, y), zero)
    return arith.select(below, arith.subi(quotient, _constant(x.type, 1)), quotient)


def _mod(x: Any, y: Any, signed: bool) -> Any:
    if not signed:
        return arith.remui(x, y)
    _assume(arith.CmpIPredicate.sgt, y)
    rest, zero = arith.remsi(x, y), _constant(x.type, 0)
    return arith.select(arith.cmpi(arith.CmpIPredicate.slt, rest, zero), arith.addi(rest, y), rest)


EMIT: dict[Any, Callable[..., Any]] = {
    operator.add: lambda x, y, signed: arith.addi(x, y),
    operator.sub: lambda x, y, signed: arith.subi(x, y),
    operator.mul: lambda x, y, signed: arith.muli(x, y),
    operator.floordiv: _floordiv,
    operator.mod: _mod,
    operator.and_: lambda x, y, signed: arith.andi(x, y),
    operator.or_: lambda x, y, signed: arith.ori(x, y),
    operator.xor: lambda x, y, signed: arith.xori(x, y),
    operator.lshift: lambda x, y, signed: arith.shli(x, y),
    operator.rshift: lambda x, y, signed: arith.shrsi(x, y) if signed else arith.shrui(x, y),
}
_FLOATS: dict[Any, Callable[..., Any]] = {
    operator.add: arith.addf,
    operator.sub: arith.subf,
    operator.mul: arith.mulf,
    operator.truediv: arith.divf,
}
_COMPARE = {operator.lt: "lt", operator.le: "le", operator.gt: "gt", operator.ge: "ge", operator.eq: "eq", operator.ne: "ne"}
_IN_PLACE = {getattr(operator, "i" + op.__name__.strip("_")): op for op in (*EMIT, operator.truediv)}


def _compared(op: Any, x: Any, y: Any, kind: Any) -> Any:
    name = _COMPARE[op]
    if isinstance(kind, types.Float):
        # A comparison with a NaN is false, but for "not equal".
        return arith.cmpf(getattr(arith.CmpFPredicate, "UNE" if name == "ne" else "O" + name.upper()), x, y)
    sign = "" if name in ("eq", "ne") else "s" if isinstance(kind, types.Integer) and kind.signed else "u"
    return arith.cmpi(getattr(arith.CmpIPredicate, sign + name), x, y)


def _values(lower: MLIRLower, variables: Any, kinds: Any) -> list[Any]:
    """The values of variables, cast to types: what type inference decided, where the package would go by NumPy's promotion."""
    return [lower.lower_cast(lower.get_numba_type(var.name), kind, lower.load_var(var)) for var, kind in zip(variables, kinds, strict=True)]


def _keep(lower: MLIRLower, target: Any, value: Any, kind: Any) -> bool:
    lower.store_var(target, lower.lower_cast(kind, lower.get_numba_type(target.name), value))
    return True


def _binop(lower: MLIRLower, target: Any, expr: Any) -> bool:
    signature = lower.fndesc.calltypes[expr]
    op, kinds = _IN_PLACE.get(expr.fn, expr.fn), set(map(types.unliteral, signature.args))
    if len(kinds) != 1 or not isinstance(kind := kinds.pop(), types.Number | types.Boolean):
        return False
    is_float = isinstance(kind, types.Float)
    if op not in _COMPARE and not (op in _FLOATS if is_float else isinstance(signature, Signature32) or (op in EMIT and _plain(op, kind))):
        return False
    x, y = _values(lower, (expr.lhs, expr.rhs), (kind, kind))
    if op in _COMPARE:
        return _keep(lower, target, _compared(op, x, y, kind), types.boolean)
    return _keep(lower, target, _FLOATS[op](x, y) if is_float else EMIT[op](x, y, kind.signed), kind)


def _plain(op: Any, kind: Any) -> bool:
    """Whether the code of an operator of two integers of 64 bits is that of 32 bits: divisions know nothing of what may divide."""
    return isinstance(kind, types.Integer) and kind.bitwidth == 64 and (not kind.signed or op not in (operator.floordiv, operator.mod))


def _unary(lower: MLIRLower, target: Any, expr: Any) -> bool:
    signature = lower.fndesc.calltypes[expr]
    kind = types.unliteral(signature.args[0])
    if expr.fn not in (operator.neg, operator.pos, operator.invert) or not isinstance(kind, types.Integer | types.Float):
        return False
    (x,) = _values(lower, (expr.value,), (kind,))
    if expr.fn is operator.neg:
        x = arith.negf(x) if isinstance(kind, types.Float) else arith.subi(_constant(x.type, 0), x)
    elif expr.fn is operator.invert:
        x = arith.xori(x, _constant(x.type, -1))
    return _keep(lower, target, x, kind)


def _minmax(lower: MLIRLower, target: Any, expr: Any, largest: bool) -> bool:
    """min or max of two numbers; of floats by libdevice, which drops a NaN as Numba-CUDA does."""
    kinds = set(map(types.unliteral, lower.fndesc.calltypes[expr].args))
    if len(expr.args) != 2 or expr.kws or len(kinds) != 1 or not isinstance(kind := kinds.pop(), types.Integer | types.Float):
        return False
    x, y = _values(lower, expr.args, (kind, kind))
    if isinstance(kind, types.Float):
        name = f"__nv_f{'max' if largest else 'min'}{'f' if kind.bitwidth == 32 else ''}"
        callee = get_or_insert_function(name, ir.FunctionType.get([x.type] * 2, [x.type]), lower.mlir_gpu_module)
        return _keep(lower, target, func.call(result=[x.type], callee=callee.name.value, operands_=[x, y]), kind)
    second = _compared(operator.gt if largest else operator.lt, y, x, kind)
    return _keep(lower, target, arith.select(second, y, x), kind)


# Array elements: no negative indices, no strides


def pointer(array: Any) -> Any:
    """The address of an array's first element, of no address space."""
    kind = ir.MemRefType(array.type)
    if kind.memory_space is not None:
        kind = ir.MemRefType.get(kind.shape, kind.element_type, kind.layout)
        array = memref.memory_space_cast(dest=kind, source=array)
    described = builtin.unrealized_conversion_cast([memref_descriptor_type(kind.rank)], [array])
    return llvm.extractvalue(llvm.PointerType.get(), described, ir.DenseI64ArrayAttr.get([1]))


def element(array: Any, index: Any) -> tuple[Any, Any]:
    """(address, type) of an element, at a number or at a value of 64 bits."""
    kind = ir.MemRefType(array.type).element_type
    address = pointer(array)
    if isinstance(index, int):
        return llvm.getelementptr(address.type, address, [], [index], kind, None), kind
    return llvm.getelementptr(address.type, address, [index], [-(2**31)], kind, None), kind


def read(place: tuple[Any, Any]) -> Any:
    return llvm.load(place[1], place[0])


def write(place: tuple[Any, Any], value: Any) -> None:
    llvm.store(value, place[0])


def _flat(lower: MLIRLower, array: Any, index: Any) -> bool:
    kind = lower.get_numba_type(array.name)
    if not isinstance(kind, types.Array) or kind.ndim != 1 or kind.layout != "C":
        return False
    return isinstance(index, int) or (isinstance(index, numba_ir.Var) and isinstance(lower.get_numba_type(index.name), types.Integer))


def _place(lower: MLIRLower, array: Any, index: Any) -> tuple[Any, Any]:
    if not isinstance(index, int):
        kind = lower.get_numba_type(index.name)
        index = lower.lower_cast(kind, types.int64 if kind.signed else types.uint64, lower.load_var(index))
    return element(lower.load_var(array), index)


def _getitem(lower: MLIRLower, target: Any, array: Any, index: Any) -> bool:
    if not _flat(lower, array, index):
        return False
    kind = lower.get_numba_type(array.name).dtype
    value = lower.from_storage(kind, read(_place(lower, array, index)))
    lower.store_var(target, lower.lower_cast(kind, lower.get_numba_type(target.name), value))
    return True


def _setitem(lower: MLIRLower, statement: Any) -> bool:
    index = getattr(statement, "index_var", statement.index)
    if not _flat(lower, statement.target, index):
        return False
    kind = lower.get_numba_type(statement.target.name).dtype
    value = lower.lower_cast(lower.get_numba_type(statement.value.name), kind, lower.load_var(statement.value))
    write(_place(lower, statement.target, index), lower.as_storage(kind, value))
    return True


_package_shared, _numbers = cuda_lowering.cuda_static_shared_memory, itertools.count()


def _shared(lower: MLIRLower, target: Any, shape: Any, dtype: Any, alignment: int) -> None:
    """A shared array as a variable of LLVM's: the package's own is lost where the function that has it is called by another."""
    if not marked(lower.func_ir):
        _package_shared(lower, target, shape, dtype, alignment)
        return
    kind, sizes = lower.get_storage_type(cuda_lowering._resolve_numba_dtype(lower, dtype)), [int(size) for size in shape]
    name, whole = f"shared_array_{next(_numbers)}", ir.Type.parse(f"!llvm.array<{math.prod(sizes)} x {kind}>")
    with ir.InsertionPoint(lower.mlir_gpu_module.bodyRegion.blocks[0]):
        llvm.GlobalOp(whole, name, ir.Attribute.parse("#llvm.linkage<internal>"), addr_space=3, alignment=alignment)
    address = llvm.addrspacecast(llvm.PointerType.get(), llvm.mlir_addressof(llvm.PointerType.get(3), name))
    made = llvm.UndefOp(memref_descriptor_type(len(sizes))).result
    strides = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    parts: list[tuple[Any, list[int]]] = [(address, [0]), (address, [1]), (_constant(_int(64), 0), [2])]
    parts += [(_constant(_int(64), each), [row, at]) for row, numbers in ((3, sizes), (4, strides)) for at, each in enumerate(numbers)]
    for value, place in parts:
        made = llvm.insertvalue(container=made, value=value, position=ir.DenseI64ArrayAttr.get(place))
    lower.store_var(target, builtin.unrealized_conversion_cast([ir.MemRefType.get(sizes, kind)], [made]))


# Loops


class Range(RangeObject):
    """A loop over a range, as Numba-CUDA counts it: the steps that are left, in the type of the range."""

    def __init__(self, lower: MLIRLower, kind: Any, values: list[Any]) -> None:
        start, stop, self._step = {1: lambda: (0, values[0], 1), 2: lambda: (*values, 1), 3: lambda: values}[len(values)]()
        zero, one = _constant(kind, 0), _constant(kind, 1)
        start, stop, self._step = (_constant(kind, each) if isinstance(each, int) else each for each in (start, stop, self._step))
        with lower.alloca_insertion_point():
            place = ir.MemRefType.get([], kind)
            self._at, self._left = memref.alloca(place, [], []), memref.alloca(place, [], [])
        less = arith.CmpIPredicate.slt
        span = arith.subi(stop, start)
        upwards = arith.cmpi(less, zero, span)
        against = arith.xori(upwards, arith.cmpi(less, zero, self._step))
        rest = arith.remsi(span, self._step)
        rest = arith.select(upwards, rest, arith.subi(zero, rest))
        steps = arith.addi(arith.divsi(span, self._step), arith.select(arith.cmpi(less, zero, rest), one, zero))
        memref.store(start, self._at, [])
        memref.store(arith.select(against, zero, steps), self._left, [])

    def next(self) -> IterResult:
        left, at = memref.load(self._left, []), memref.load(self._at, [])
        zero, one = _constant(left.type, 0), _constant(left.type, 1)
        valid = arith.cmpi(arith.CmpIPredicate.slt, zero, left)
        # Also where the loop ends, because nobody reads them any more.
        memref.store(arith.subi(left, one, overflow_flags=arith.IntegerOverflowFlags.nsw), self._left, [])
        memref.store(arith.addi(at, self._step), self._at, [])
        return IterResult(at, valid)


class Items(UniTupleIterObject):
    """A loop over a tuple of numbers, or of tuples of them. The package's stops counting at the end, so that NVVM does not see how often the
    loop runs; and it knows no tuples of different numbers.
    """

    def __init__(self, lower: MLIRLower, kind: Any, kinds: list[Any], values: list[Any]) -> None:
        self._count, self._all = len(values), _in_arrays(lower, kind, kinds, values)
        with lower.alloca_insertion_point():
            self._at = memref.alloca(ir.MemRefType.get([], _int(32)), [], [])
        memref.store(_constant(_int(32), 0), self._at, [])

    def next(self) -> IterResult:
        at = memref.load(self._at, [])
        valid = arith.cmpi(arith.CmpIPredicate.slt, at, _constant(_int(32), self._count))
        memref.store(arith.addi(at, _constant(_int(32), 1)), self._at, [])
        place = arith.extui(_int(64), arith.select(valid, at, _constant(_int(32), 0)))
        return IterResult(_out_of_arrays(self._all, place), valid)


def _in_arrays(lower: MLIRLower, kind: Any, kinds: list[Any], values: list[Any]) -> Any:
    """Values of types `kinds`, as `kind`, in a local array; of tuples a tuple of arrays."""
    if isinstance(kind, types.BaseTuple):
        return tuple(_in_arrays(lower, part, [each[at] for each in kinds], [each[at] for each in values]) for at, part in enumerate(kind))
    with lower.alloca_insertion_point():
        made = memref.alloca(ir.MemRefType.get([len(values)], lower.get_storage_type(kind)), [], [])
    for at, (one, value) in enumerate(zip(kinds, values, strict=True)):
        write(element(made, at), lower.lower_cast(one, kind, value))
    return made


def _out_of_arrays(arrays: Any, place: Any) -> Any:
    return tuple(_out_of_arrays(each, place) for each in arrays) if isinstance(arrays, tuple) else read(element(arrays, place))


def _of_numbers(kind: Any) -> bool:
    return all(map(_of_numbers, kind)) if isinstance(kind, types.BaseTuple) else isinstance(kind, types.Integer | types.Float)


def _getiter(lower: MLIRLower, target: Any, value: Any) -> bool:
    whole, kind = lower.get_numba_type(value.name), getattr(lower.get_numba_type(target.name), "yield_type", None)
    if not isinstance(whole, types.BaseTuple) or not len(whole) or not _of_numbers(kind):
        return False
    lower.store_var(target, Items(lower, types.unliteral(kind), list(whole), list(lower.load_var(value))))
    return True


def _call(lower: MLIRLower, target: Any, expr: Any) -> bool:
    if expr.vararg is not None:
        return _starred(lower, target, expr)
    called = lower._extract_callable_from_var(expr.func)
    if called is range:
        return _range(lower, target, expr)
    if called is max or called is min:
        return _minmax(lower, target, expr, called is max)
    if called in _FENCES:
        callee = get_or_insert_function(_FENCES[called], ir.FunctionType.get([], []), lower.mlir_gpu_module)
        func.call(result=[], callee=callee.name.value, operands_=[])
        lower.store_var(target, None)
        return True
    return called in _SHUFFLES and _shuffle(lower, target, expr, _SHUFFLES[called])


def _starred(lower: MLIRLower, target: Any, expr: Any) -> bool:
    """A call by *args. The package names the arguments after the tuple alone, so a second call by the same tuple finds the names taken."""
    args = list(expr.args)
    for at, kind in enumerate(lower.get_numba_type(expr.vararg.name)):
        each = numba_ir.Var(target.scope, f"${expr.vararg.name}.{at} of {target.name}", target.loc)
        lower.fndesc.typemap[each.name] = kind
        lower.lower_getitem_expr_assign(each, expr.vararg, at)
        args.append(each)
    lower.lower_call_expr_assign(target, expr.func, args, expr.kws, expr)
    return True


def _range(lower: MLIRLower, target: Any, expr: Any) -> bool:
    kind = lower.get_numba_type(target.name).dtype
    lower.store_var(target, Range(lower, lower.get_mlir_type(kind), _values(lower, expr.args, [kind] * len(expr.args))))
    return True


# What the package does otherwise than Numba-CUDA, or not at all

_FENCES = {
    cuda.threadfence_block: "llvm.nvvm.membar.cta",
    cuda.threadfence: "llvm.nvvm.membar.gl",
    cuda.threadfence_system: "llvm.nvvm.membar.sys",
}
"""It types them and has no code for them."""
_SHUFFLES = {
    cuda.shfl_sync: nvvm.ShflKind.idx,
    cuda.shfl_up_sync: nvvm.ShflKind.up,
    cuda.shfl_down_sync: nvvm.ShflKind.down,
    cuda.shfl_xor_sync: nvvm.ShflKind.bfly,
}
SIGNATURES[cuda.ffs] = lambda kind: types.uint32(kind)
SIGNATURES[cuda.popc] = lambda kind: kind(kind)


def _shuffle(lower: MLIRLower, target: Any, expr: Any, how: Any) -> bool:
    """A shuffle of 64 bits as two of 32: the package's rounds a float64 to float32 on the way."""
    kind = types.unliteral(lower.get_numba_type(expr.args[1].name))
    if kind.bitwidth != 64:
        return False
    mask, value, lane = _values(lower, expr.args, (types.uint32, kind, types.int32))
    whole = arith.bitcast(_int(64), value) if isinstance(kind, types.Float) else value
    away, clamp = _constant(_int(64), 32), _constant(_int(32), 0 if how == nvvm.ShflKind.up else 31)
    halves = [arith.trunci(_int(32), whole), arith.trunci(_int(32), arith.shrui(whole, away))]
    low, high = (arith.extui(_int(64), nvvm.shfl_sync(mask, half, lane, clamp, how)) for half in halves)
    whole = arith.ori(low, arith.shli(high, away))
    return _keep(lower, target, arith.bitcast(value.type, whole) if isinstance(kind, types.Float) else whole, kind)


# Numbers of threads and blocks: as intrinsics, because what the package has instead is inline PTX, of which NVVM knows nothing

_REGISTERS = {cuda.threadIdx: "tid", cuda.blockIdx: "ctaid", cuda.blockDim: "ntid", cuda.gridDim: "nctaid"}


def _dim3(lower: MLIRLower, target: Any, value: Any, axis: str) -> bool:
    if not isinstance(lower.get_numba_type(value.name), Dim3):
        return False
    name = f"llvm.nvvm.read.ptx.sreg.{_REGISTERS[lower.load_var(value)]}.{axis}"
    callee = get_or_insert_function(name, ir.FunctionType.get([], [_int(32)]), lower.mlir_gpu_module)
    number = func.call(result=[_int(32)], callee=callee.name.value, operands_=[])
    _assume(arith.CmpIPredicate.sge, number)  # so the compiler knows which sums and products are not negative
    lower.store_var(target, lower.lower_cast(types.int32, lower.get_numba_type(target.name), number))
    return True


_mlir_expr, _mlir_setitem = MLIRLower.lower_expr_assign, MLIRLower.lower_setitem


def _own(lower: MLIRLower, target: Any, expr: Any) -> bool:
    """Whether an expression has been lowered here."""
    match expr.op:
        case "binop" | "inplace_binop":
            return _binop(lower, target, expr)
        case "getitem":
            return _getitem(lower, target, expr.value, expr.index)
        case "static_getitem":
            return _getitem(lower, target, expr.value, expr.index if isinstance(expr.index, int) else expr.index_var)
        case "call":
            return _call(lower, target, expr)
        case "getiter":
            return _getiter(lower, target, expr.value)
        case "unary":
            return _unary(lower, target, expr)
        case "getattr":
            return _dim3(lower, target, expr.value, expr.attr)
    return False


def _lower_expr(self: Any, target: Any, expr: Any) -> None:
    if not (marked(self.func_ir) and _own(self, target, expr)):
        _mlir_expr(self, target, expr)


def _lower_setitem(self: Any, statement: Any) -> None:
    if not (marked(self.func_ir) and _setitem(self, statement)):
        _mlir_setitem(self, statement)


_mlir_error = MLIRLower._get_or_create_error_global


def _error_global(self: Any) -> Any:
    """None: kernels report no errors, as Numba-CUDA's do not, so nothing tests a tuple's index or a divisor."""
    return None if marked(self.func_ir) else _mlir_error(self)


_mlir_load = MLIRLower.load_var


def _load(self: Any, var: Any) -> Any:
    """The arguments of a call by *args come as a tuple of variables, of which the package knows nothing."""
    return tuple(self.load_var(each) for each in var) if isinstance(var, tuple) else _mlir_load(self, var)


_mlir_called, _mlir_return = MLIRLower.build_user_defined_function_call, MLIRLower.from_return


def _called(self: Any, target: Any, *args: Any) -> Any:
    """What a device function gives that returns an empty tuple, for which the package has None."""
    made = _mlir_called(self, target, *args)
    return () if self.get_numba_type(target.name) == types.Tuple(()) else made


def _returned(self: Any, kind: Any, value: Any) -> Any:
    """The package hands over a tuple of one number as that number."""
    if isinstance(kind, types.BaseTuple) and not isinstance(value, tuple):
        value = self._unflatten_abi_value(kind, iter((value,)))
    return _mlir_return(self, kind, value)


MLIRLower.lower_expr_assign = _lower_expr
MLIRLower.lower_setitem = _lower_setitem
MLIRLower.load_var = _load
MLIRLower.build_user_defined_function_call = _called
MLIRLower.from_return = _returned
cuda_lowering.cuda_static_shared_memory = _shared
MLIRLower._get_or_create_error_global = _error_global
