"""The code that Numba-CUDA makes of numbers of 32 bits (`nbcnn.gpu.typing32`). The backend `numba` imports this module, and nothing else does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir as llvm
from numba.cuda import types
from numba.cuda.datamodel.models import IntegerModel, register_default
from numba.cuda.lowering import Lower

from nbcnn.gpu.typing32 import Literal32, Signature32, marked

register_default(Literal32)(IntegerModel)


def _assume(b: Any, relation: str, number: Any) -> None:
    """Promise the compiler that a number is > 0, or >= 0."""
    if not isinstance(number, llvm.Constant):
        assume = b.module.declare_intrinsic("llvm.assume", fnty=llvm.FunctionType(llvm.VoidType(), [llvm.IntType(1)]))
        b.call(assume, [b.icmp_signed(relation, number, llvm.Constant(number.type, 0))])


def _floordiv(b: Any, x: Any, y: Any, signed: bool) -> Any:
    if not signed:
        return b.udiv(x, y)
    _assume(b, ">", y)
    quotient = b.sdiv(x, y)
    return b.select(b.icmp_signed("<", b.srem(x, y), llvm.Constant(x.type, 0)), b.sub(quotient, llvm.Constant(x.type, 1)), quotient)


def _mod(b: Any, x: Any, y: Any, signed: bool) -> Any:
    if not signed:
        return b.urem(x, y)
    _assume(b, ">", y)
    rest = b.srem(x, y)
    return b.select(b.icmp_signed("<", rest, llvm.Constant(x.type, 0)), b.add(rest, y), rest)


# Without `nsw`, which Numba's own lowering sets: with it on int32, NVVM computes trip counts and unrolls loops by itself, to seven times
# the instructions (wgmma's `correlate`: 1,087 instead of 147).
EMIT: dict[Any, Callable[..., Any]] = {
    operator.add: lambda b, x, y, signed: b.add(x, y),
    operator.sub: lambda b, x, y, signed: b.sub(x, y),
    operator.mul: lambda b, x, y, signed: b.mul(x, y),
    operator.floordiv: _floordiv,
    operator.mod: _mod,
    operator.and_: lambda b, x, y, signed: b.and_(x, y),
    operator.or_: lambda b, x, y, signed: b.or_(x, y),
    operator.xor: lambda b, x, y, signed: b.xor(x, y),
    operator.lshift: lambda b, x, y, signed: b.shl(x, y),
    operator.rshift: lambda b, x, y, signed: b.ashr(x, y) if signed else b.lshr(x, y),
}


_numba_binop, _numba_expr = Lower.lower_binop, Lower.lower_expr


def _lower_binop(self: Any, resty: Any, expr: Any, op: Any) -> Any:
    signature = self.fndesc.calltypes[expr]
    if not isinstance(signature, Signature32):
        return _numba_binop(self, resty, expr, op)
    kind, names = signature.return_type, (expr.lhs.name, expr.rhs.name)
    x, y = (self.context.cast(self.builder, self.loadvar(name), self.typeof(name), kind) for name in names)
    return self.context.cast(self.builder, EMIT[op](self.builder, x, y, kind.signed), kind, resty)


def _lower_expr(self: Any, resty: Any, expr: Any) -> Any:
    made = _numba_expr(self, resty, expr)
    if expr.op == "getattr" and self.typeof(expr.value.name) == types.dim3 and marked(self.func_ir):
        _assume(self.builder, ">=", made)  # threadIdx and the like: so the compiler knows which sums and products are not negative
    return made


Lower.lower_binop = _lower_binop
Lower.lower_expr = _lower_expr
