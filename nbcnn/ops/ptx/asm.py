"""Inline-PTX instructions as functions that kernels can call.

`instruction(name, asm, result, operands)` returns an intrinsic; `$0, $1, …` in `asm` are the results first, then the
operands. `accumulating` makes one whose results are elements of a local array, kept in the registers they came in.
`byte_address_shared` and `byte_address_global` give the addresses that load and store instructions take.

These are descriptions (`nbcnn.gpu.language`): Numba learns of an instruction when the first kernel that names it is compiled.
"""

from __future__ import annotations

from typing import Any

from nbcnn.files.quote import quoted
from nbcnn.gpu import compiler
from nbcnn.gpu.language import Intrinsic, Number


def instruction(name: str, asm: str, result: Any, operands: tuple[Any, ...], *, pure: bool = False) -> Any:
    """An intrinsic that emits `asm`.

    result    None, a scalar type, or a tuple of equal scalar types (the call then returns a tuple).
    operands  scalar types; arguments are cast to them.
    pure      True for arithmetic: the compiler may move, merge or drop it. False for memory accesses and barriers.
    """
    is_tuple = isinstance(result, tuple)
    parts = () if result is None else result if is_tuple else (result,)
    return Intrinsic(name, compiler.instruction, name, asm, _names(parts), _names(operands), is_tuple, pure)


def accumulating(name: str, asm: str, count: int, first: int, operands: tuple[Any, ...] = ()) -> Any:
    """An intrinsic f(acc, *operands) that emits `asm` with acc[first : first + count], float32, as operands read and written.

    $0 … $(count−1) are the elements of `acc`, a `cuda.local.array`; the operands follow. Each element is tied to one register for input
    and output. So an asynchronous instruction adds where the sums already lie, and nothing is copied between two of them.
    """
    return Intrinsic(name, compiler.accumulating, name, asm, count, first, _names(operands))


def _names(types: tuple[Any, ...]) -> tuple[str, ...]:
    for kind in types:
        if not isinstance(kind, Number) or kind.name not in compiler.LETTERS:
            raise TypeError(f"an instruction has no operand of type {quoted(kind)}: there are {', '.join(compiler.LETTERS)}")
    return tuple(kind.name for kind in types)


byte_address_shared = Intrinsic("byte_address_shared", compiler.byte_address, 3, "uint32")
"""32-bit address of a shared array's first element, in the shared window."""
byte_address_global = Intrinsic("byte_address_global", compiler.byte_address, 1, "uint64")
"""64-bit address of a device array's first element."""
