"""This module makes numbers in kernels 32 bits wide without casts: it changes the compiler's type inference for our kernels.

Numba-CUDA types every int literal, and every result of int32 arithmetic, as int64, and every float literal as float64; numba-cuda-mlir has a
copy of this type inference. In functions that `narrow` marks they do not: their types follow the rules below, and so does the code of `a + b`
(`backends/numba32.py`, `backends/mlir32.py`). Other functions are compiled as ever.

1. A literal, or a frozen Python constant, is int32 if it fits (else int64) or float32. Beside uint32 an int literal is uint32, in arithmetic,
   comparison, and where two branches meet.
2. int32 ∘ int32 is int32, with bools and smaller integers counted as int32; uint32 ∘ uint32 is uint32. A shift is of the left side's type.
3. int32 ∘ uint32 is uint32 for + - * & | ^, and a TypingError for // and %: say u4(a) or i4(b).
4. a // b and a % b round down, as in Python, and b must be positive. Where the compiler sees that a is not negative: an unsigned division.
5. An integer beside float32 is float32, in arithmetic, comparison, min, max, and where two branches meet. int / int is float32.
6. array[i] knows no negative indices: i goes to the address as it is, so that nothing tests it.
7. 64 bits are asked for: i8(n) * plane. cuda.grid() and array.size have 64; so has what is computed with them.
8. What overflows wraps around, as in NumPy.

The simulator knows nothing of this: its ints are Python's or NumPy's, and beside a float32 NumPy 2 keeps a literal float32 as well.
A backend of `nbcnn.gpu.compiler` imports this module with its compiler, and the door itself once that is there; nothing else does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from nbcnn.gpu import compiler

_ROOT = compiler.backend().ROOT
types: Any = import_module(f"{_ROOT}.types")
ir: Any = import_module(f"{_ROOT}.core.ir")
typeinfer: Any = import_module(f"{_ROOT}.core.typeinfer")
TypingError: Any = import_module(f"{_ROOT}.core.errors").TypingError
Signature: Any = import_module(f"{_ROOT}.typing.templates").Signature

i4, u4, f4 = types.int32, types.uint32, types.float32


def narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a Python function, before it is given to `cuda.jit`, as one that is compiled by these rules."""
    function.__numbers__ = 32  # type: ignore[attr-defined]
    return function


def marked(func_ir: Any) -> bool:
    return getattr(func_ir.func_id.func, "__numbers__", None) == 32


class Literal32(types.IntegerLiteral):
    """An int literal whose type, where its value no longer matters, is int32."""

    literal_type = i4


class Signature32(Signature):
    """The signature of an operator of two equal 32-bit types, which the backend lowers. The compiler's own would widen to 64 bits."""


OPERATORS = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.and_,
    operator.or_,
    operator.xor,
    operator.lshift,
    operator.rshift,
}
"""The operators that have a `Signature32`."""
_DIVISIONS = {operator.floordiv, operator.mod}
_SHIFTS = {operator.lshift, operator.rshift}
_LOGIC = {operator.and_, operator.or_, operator.xor}
_COMPARE = {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
_UNARY = {operator.neg, operator.pos, operator.invert}
_WITH_FLOAT = {operator.add, operator.sub, operator.mul, operator.truediv, *_DIVISIONS, *_COMPARE, min, max}
_IN_PLACE = {getattr(operator, "i" + op.__name__.strip("_")): op for op in (*OPERATORS, operator.truediv)}


def _short(ty: Any) -> Any:
    """int32 or uint32 for a type that counts as one, else None."""
    if isinstance(ty, types.Integer) and ty.bitwidth <= 32:
        return u4 if ty.bitwidth == 32 and not ty.signed else i4
    return i4 if isinstance(ty, types.Boolean) else None


def _literal(ty: Any) -> Any:
    """The type of a constant: int literals that fit become `Literal32`, in tuples too."""
    if type(ty) is types.IntegerLiteral and i4.minval <= ty.literal_value <= i4.maxval:
        return Literal32(ty.literal_value)
    return _of_items(_literal, ty)


def _unliteral(ty: Any) -> Any:
    """A device function is compiled for types, not for values, in tuples neither."""
    return _of_items(_unliteral, types.unliteral(ty))


def _of_items(change: Callable[[Any], Any], ty: Any) -> Any:
    if not isinstance(ty, types.BaseAnonymousTuple) or isinstance(ty, (types.StarArgTuple, types.StarArgUniTuple)):
        return ty  # that of *args is what the caller made it
    return types.BaseTuple.from_types([change(item) for item in ty.types])


def _beside_unsigned(ty: Any, other: Any) -> Any:
    return u4 if other == u4 and isinstance(ty, types.IntegerLiteral) and 0 <= ty.literal_value <= u4.maxval else ty


def _address(array: Any, index: Any) -> Any:
    """An index as an unsigned 64-bit number: only signed ones are tested for Python's negative indices. The cast extends the sign."""
    return types.uint64 if isinstance(array, types.Buffer) and isinstance(index, types.Integer) and index.signed else index


SIGNATURES: dict[Any, Callable[..., Any]] = {}
"""By function, its signature for types of arguments, where a compiler has another than Numba-CUDA (`backends/mlir32.py`)."""


class _Context32:
    """A typing context with other rules for constants, operators and indices; the real one does the rest, and all inner calls."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def resolve_value_type(self, value: Any) -> Any:
        if type(value) is float:
            return f4
        return i4 if type(value) is int and i4.minval <= value <= i4.maxval else self._real.resolve_value_type(value)

    def unify_pairs(self, first: Any, second: Any) -> Any:
        for one, other in ((first, second), (second, first)):
            if _beside_unsigned(one, other) == u4 and other == u4:
                return u4
            if one == f4 and isinstance(other, types.Integer) and _short(other):
                return f4
        return self._real.unify_pairs(first, second)

    def unify_types(self, *tys: Any) -> Any:
        return type(self._real).unify_types(self, *tys)  # which calls the above

    def resolve_setitem(self, target: Any, index: Any, value: Any) -> Any:
        return self._real.resolve_setitem(target, _address(target, index), value)

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        key = getattr(func, "typing_key", func)
        op = _IN_PLACE.get(key, key) if callable(key) else key
        if callable(key) and key in SIGNATURES:
            return SIGNATURES[key](*args)
        if isinstance(func, types.Dispatcher):
            args = tuple(map(_unliteral, args))
        elif op is operator.getitem:
            args = (args[0], _address(*args))
        elif op in _UNARY and isinstance(args[0], types.Integer) and _short(args[0]):
            kind = _short(args[0])
            return self._real.resolve_function_type(func, (kind,), kws).replace(return_type=kind)
        elif op in _WITH_FLOAT and f4 in args and all(ty == f4 or _short(ty) for ty in args):
            args = (f4,) * len(args)
        elif op is operator.truediv and all(map(_short, args)):
            args = (f4, f4)
        elif op in OPERATORS or op in _COMPARE:
            args = _beside_unsigned(*args), _beside_unsigned(*args[::-1])
            left, right = map(_short, args)
            if left and right and op in OPERATORS and not (op in _LOGIC and all(isinstance(ty, types.Boolean) for ty in args)):
                if left != right and op in _DIVISIONS:
                    raise TypingError(f"{op.__name__} of {args[0]} and {args[1]}: make both signed or both unsigned")
                kind = left if op in _SHIFTS or left == right else u4
                return Signature32(kind, (kind, kind), None)
        return self._real.resolve_function_type(func, args, kws)


_watched: list[str] | None = None
_PLAIN = {min, max, abs, round, pow, sum, *(value for value in vars(math).values() if callable(value))}


@contextmanager
def watching() -> Iterator[list[str]]:
    """Within, what `widened` finds in the functions that are compiled is added to the list."""
    global _watched
    _watched = []
    try:
        yield _watched
    finally:
        _watched = None


def widened(func_ir: Any, typemap: Any, returns: Any) -> Iterator[str]:
    """The places of a function where a number becomes 64 bits wide though none of what it is made of is, and no cast asks for it.

    That is a sum of an unsigned and a signed number where two branches meet, a function of Python's or of math's, or a division of integers.
    Branches meet in a variable or, by the bytecode of Python 3.13, only in the type `returns` of what the function returns.
    Casts, device functions, instructions and elements of wide arrays are meant to be what they are.
    """

    def is_wide(found: Any) -> bool:
        return isinstance(found, types.Integer | types.Float) and found.bitwidth > 32

    def wide(variable: Any) -> bool:
        return is_wide(typemap.get(variable.name))

    # What is returned has been cast to the type of all that is.
    returned = [func_ir.get_definition(block.terminator.value) for block in func_ir.blocks.values() if isinstance(block.terminator, ir.Return)]
    if is_wide(returns) and not any(wide(made.value) for made in returned if isinstance(made, ir.Expr) and made.op == "cast"):
        yield f"{func_ir.loc.filename}:{func_ir.loc.line}: what it returns is {returns}"
    for block in func_ir.blocks.values():
        for made in block.find_insts(ir.Assign):
            value, sources = made.value, None
            if isinstance(value, ir.Var):
                sources = [value]
            elif isinstance(value, ir.Expr) and value.op in ("binop", "inplace_binop", "unary", "phi"):
                sources = [v for v in value.list_vars() if v.name in typemap and isinstance(typemap[v.name], types.Number | types.Boolean)]
            elif isinstance(value, ir.Expr) and value.op == "call" and getattr(typemap[value.func.name], "typing_key", None) in _PLAIN:
                sources = value.args
            if sources and wide(made.target) and not any(map(wide, sources)):
                yield f"{made.loc.filename}:{made.loc.line}: {made.target.name.split('.')[0]} is {typemap[made.target.name]}"


class Inferer32(typeinfer.TypeInferer):
    """Type inference by these rules for marked functions, by Numba's own for all others."""

    def __init__(self, context: Any, func_ir: Any, warnings: Any) -> None:
        self._marked = marked(func_ir)
        super().__init__(_Context32(context) if self._marked and not isinstance(context, _Context32) else context, func_ir, warnings)

    def unify(self, *args: Any, **named: Any) -> Any:
        found = super().unify(*args, **named)
        if self._marked and _watched is not None:
            _watched.extend(widened(self.func_ir, found[0], found[1]))
        return found

    def add_type(self, var: Any, tp: Any, *rest: Any, **named: Any) -> None:
        super().add_type(var, _literal(tp) if self._marked else tp, *rest, **named)

    def lock_type(self, var: Any, tp: Any, *rest: Any, **named: Any) -> None:
        super().lock_type(var, _literal(tp) if self._marked else tp, *rest, **named)


typeinfer.TypeInferer = Inferer32
