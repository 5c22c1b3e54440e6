"""The errors of reading and writing ONNX files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbcnn.files import extras
from nbcnn.files.errors import Whole
from nbcnn.files.quote import printable, quoted

SHOWN, LONGEST = 50, 600
"""Reasons that a message lists, and characters of each."""


class OnnxError(Exception):
    """A file is no ONNX file, is damaged, or holds what is not taken; the message says where. On the command line the exit code is 3."""

    exit_code = 3


class UnsupportedNodes(Whole, OnnxError):
    """Nodes of a file, or layers of a model, that the other side has nothing for; `reasons` has a line for each, the message some of them."""

    def __init__(self, what: str, reasons: list[str]) -> None:
        self.reasons = reasons
        more = [f"and {len(reasons) - SHOWN:,} more"] if len(reasons) > SHOWN else []
        super().__init__("\n  ".join((what, *(printable(each)[:LONGEST] for each in reasons[:SHOWN]), *more)))


class Unsupported(Whole, Exception):
    """One node cannot be taken; the reason in words. The importer collects them, and counts those of one kind: `of`, what it is that only this node
    has, such as a tensor, is named beside the node."""

    def __init__(self, why: str, of: str = "") -> None:
        super().__init__(why)
        self.of = of

    def beside(self, node: str) -> str:
        """The node, with the tensor."""
        return f"{node} with {quoted(self.of)}" if self.of else node


class BothComputed(Unsupported):
    """A product of two computed values, as in attention: no layer is one, whatever their shapes."""

    def __init__(self) -> None:
        super().__init__("both operands are computed, and one must be a constant")


NAMED = 4
"""Places of one problem that a message names; the others are counted."""


def grouped(problems: Sequence[tuple[str, str, str]]) -> list[str]:
    """A line for each kind of problem, (place, what is there, why not): the place where there is one, else their number and the first of them."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for place, what, why in problems:
        kinds.setdefault((what, why), []).append(place)
    lines = []
    for (what, why), places in kinds.items():
        said = what + (f" ({why})" if why else "")
        if len(places) == 1:
            lines.append(f"{places[0]}: {said}")
        else:
            more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
            lines.append(f"{said}, {len(places)}×: {', '.join(places[:NAMED])}{more}")
    return lines


def onnx_package() -> Any:
    """The package onnx, imported. Raises PackageMissing."""
    try:
        import onnx
        from onnx import ModelProto  # noqa: F401  # a folder of that name is no package onnx
    except ImportError as error:
        raise extras.PackageMissing(f"ONNX files need the package onnx: {extras.broken('onnx', error)}", name="onnx") from None
    return onnx
