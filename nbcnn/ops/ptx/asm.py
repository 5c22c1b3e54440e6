"""How an inline-PTX instruction becomes a function that Numba kernels can call.

`instruction(name, asm, result, operands)` returns an intrinsic; `$0, $1, …` in `asm` are the results first, then the
operands. `accumulating` makes one whose results are elements of a local array, kept in the registers they came in.
`byte_address_shared` and `byte_address_global` give the addresses that load and store instructions take.

The names given to Numba are derived from the instruction text: Numba pickles a closure to find a kernel in the disk
cache, and an intrinsic's default identity is random, so that the cache would never hit.
"""

from __future__ import annotations

import hashlib
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbcnn.gpu.language import types

_CONSTRAINT = {
    types.uint16: "h",
    types.uint32: "r",
    types.int32: "r",
    types.uint64: "l",
    types.int64: "l",
    types.float32: "f",
}


def _llvm(constraint: str) -> Any:
    """The LLVM type of a constraint letter, made on demand: llvmlite types change their pickle once printed."""
    return {"f": ir.FloatType(), "h": ir.IntType(16), "r": ir.IntType(32), "l": ir.IntType(64)}[constraint]


def _emit(builder: Any, asm: str, constraints: str, results: str, operands: str, effect: bool, values: Any) -> Any:
    kinds: Any = [_llvm(c) for c in results]
    returned = ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    function = ir.FunctionType(returned, [_llvm(c) for c in operands])
    return builder.call(ir.InlineAsm(function, asm, constraints, side_effect=effect), values)


def _named(made: Any, text: str) -> Any:
    made._set_uuid("asm-" + hashlib.sha256(text.encode()).hexdigest())
    return made


def instruction(name: str, asm: str, result: Any, operands: tuple[Any, ...], *, pure: bool = False) -> Any:
    """An intrinsic that emits `asm`.

    result    None, a Numba scalar type, or a tuple of equal scalar types (the call then returns a tuple).
    operands  Numba scalar types; arguments are cast to them.
    pure      True for arithmetic: the compiler may move, merge or drop it. False for memory accesses and barriers.
    """
    is_tuple = isinstance(result, tuple)
    parts = () if result is None else result if is_tuple else (result,)
    results = "".join(_CONSTRAINT[t] for t in parts)
    letters = "".join(_CONSTRAINT[t] for t in operands)
    clobber = [] if pure else ["~{memory}"]
    constraints = ",".join(["=" + c for c in results] + list(letters) + clobber)
    returned = types.void if not parts else types.UniTuple(parts[0], len(parts)) if is_tuple else parts[0]
    effect = not pure

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        made = _emit(builder, asm, constraints, results, letters, effect, values)
        if not results:
            return context.get_dummy_value()
        if not is_tuple:
            return made
        return cgutils.pack_array(builder, [builder.extract_value(made, i) for i in range(len(results))])

    sig = signature(returned, *operands)
    arguments = "".join(f", a{i}" for i in range(len(operands)))
    scope: dict[str, Any] = {"sig": sig, "codegen": codegen}
    exec(f"def {name}(typingctx{arguments}):\n    return sig, codegen\n", scope)
    return _named(intrinsic(scope[name]), f"{name}|{asm}|{constraints}")


def accumulating(name: str, asm: str, count: int, first: int, operands: tuple[Any, ...] = ()) -> Any:
    """An intrinsic f(acc, *operands) that emits `asm` with acc[first : first + count], float32, as operands read and written.

    $0 … $(count−1) are the elements of `acc`, a `cuda.local.array`; the operands follow. Each element is tied to one register for input
    and output. So an asynchronous instruction adds where the sums already lie, and nothing is copied between two of them.
    """
    letters = "".join(_CONSTRAINT[t] for t in operands)
    constraints = ",".join(["=f"] * count + list(letters) + [str(i) for i in range(count)] + ["~{memory}"])

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, value=values[0]).data
        elements = [builder.gep(data, [ir.Constant(ir.IntType(32), first + i)]) for i in range(count)]
        loaded = [builder.load(element) for element in elements]
        made = _emit(builder, asm, constraints, "f" * count, letters + "f" * count, True, [*values[1:], *loaded])
        for i, element in enumerate(elements):
            builder.store(builder.extract_value(made, i), element)
        return context.get_dummy_value()

    arguments = "".join(f", a{i}" for i in range(len(operands)))
    scope: dict[str, Any] = {"signature": signature, "void": types.void, "operands": operands, "codegen": codegen}
    exec(f"def {name}(typingctx, acc{arguments}):\n    return signature(void, acc, *operands), codegen\n", scope)
    return _named(intrinsic(scope[name]), f"{name}|{asm}|{constraints}|{first}")


def _address_of(space: int, letter: str, number: Any) -> Any:
    def address(typingctx, array):
        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            data = context.make_array(sig.args[0])(context, builder, value=values[0]).data
            pointer = builder.bitcast(data, ir.IntType(8).as_pointer())
            in_space = builder.addrspacecast(pointer, ir.PointerType(ir.IntType(8), space))
            return builder.ptrtoint(in_space, _llvm(letter))

        return signature(number, array), codegen

    return _named(intrinsic(address), f"address of space {space}")


byte_address_shared = _address_of(3, "r", types.uint32)
"""32-bit address of a shared array's first element, in the shared window."""
byte_address_global = _address_of(1, "l", types.uint64)
"""64-bit address of a device array's first element."""
