"""The compilers of kernels behind the door `nbcnn.gpu.compiler`, which imports the one that NBCNN_COMPILER names.

| NBCNN_COMPILER | module | package | lowering of 32-bit numbers |
| --- | --- | --- | --- |
| `numba` (the default) | `backends/numba.py` | numba-cuda, with Numba and llvmlite | `backends/numba32.py` |
| `mlir` | `backends/mlir.py`, `backends/mlir_passes.py` | numba-cuda-mlir | `backends/mlir32.py` |

Both type kernels by the rules of `nbcnn.gpu.typing32`. What a backend is made of is the protocol `Backend`; what both say in the same words is below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

LETTERS = {"uint16": "h", "uint32": "r", "int32": "r", "uint64": "l", "int64": "l", "float32": "f"}
"""Constraint letters of inline PTX."""


class Backend(Protocol):
    """A compiler: a module with these names."""

    ROOT: str
    """The package in which it keeps `types` and `core`."""

    def opened(self) -> tuple[Any, str]:
        """Its module `cuda`, made ready; or None, and the reason why it cannot be imported."""

    def named(self, path: str) -> Any:
        """What it has under a dotted name, such as "cuda.shared.array" or "types.float32"."""

    def dispatcher(self, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
        """What its `cuda.jit(**options)` makes of a function whose numbers have 32 bits."""

    def linked(self, kernel: Any, types: tuple[Any, ...], arch: str) -> tuple[bytes, str]:
        """The cubin of a kernel for its types of arguments and an architecture such as "90a", and the kernel's name in it. Needs no GPU."""

    def ptx(self, kernel: Any, types: tuple[Any, ...], arch: str) -> str:
        """The PTX of a kernel, as `linked`."""

    def instruction(self, name: str, asm: str, results: tuple[str, ...], operands: tuple[str, ...], as_tuple: bool, pure: bool) -> Any:
        """The intrinsic that emits `asm`; `results` and `operands` are names of scalar types."""

    def accumulating(self, name: str, asm: str, count: int, first: int, operands: tuple[str, ...]) -> Any:
        """The intrinsic (acc, *operands) that emits `asm` with acc[first : first + count] tied to registers that it reads and writes."""

    def byte_address(self, space: int, number: str) -> Any:
        """The intrinsic (array) -> the address of its first element in an address space, as this type."""


def capability(arch: str) -> tuple[int, int, str]:
    """(9, 0, "a") of "90a"; the letter is empty where an architecture has none."""
    digits = arch.rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits[:-1]), int(digits[-1]), arch[len(digits) :]


def letters(names: tuple[str, ...]) -> str:
    """The constraint letters of types."""
    return "".join(LETTERS[name] for name in names)


def constraints(gives: str, takes: str, pure: bool) -> str:
    """The constraints of inline PTX whose results and operands have these letters; what is not pure may read and write memory."""
    return ",".join(["=" + letter for letter in gives] + list(takes) + ([] if pure else ["~{memory}"]))


def tied(count: int, takes: str) -> str:
    """The constraints of inline PTX with `count` float32 that are read and written in place, after operands with these letters."""
    return ",".join(["=f"] * count + list(takes) + [str(i) for i in range(count)] + ["~{memory}"])


def typer(name: str, first: tuple[str, ...], count: int, made: Callable[..., Any]) -> Callable[..., Any]:
    """A function `name(typingctx, *first, a0 … a<count − 1>)` that returns made(*first): the compilers count an intrinsic's arguments by it."""
    arguments = "".join(f", {argument}" for argument in (*first, *(f"a{i}" for i in range(count))))
    scope: dict[str, Any] = {"made": made}
    exec(f"def {name}(typingctx{arguments}):\n    return made({', '.join(first)})\n", scope)  # noqa: S102 - of names and numbers that this package makes
    return scope[name]
