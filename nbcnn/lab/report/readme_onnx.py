"""The tables of docs/howto/onnx.md: ops that are read, with ONNX's own cases of them, and layers that are written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from nbcnn.lab.report.tables import markdown
from nbcnn.onnx.importer import LOSSES
from nbcnn.onnx.node import OPS
from nbcnn.onnx.writers import WRITERS

CASES = Path(__file__).parents[3] / "tests" / "onnx" / "node_cases.tsv"


def _cases() -> list[tuple[str, str, str]]:
    """(op, case, result) of the committed table."""
    lines = CASES.read_text(encoding="utf-8").splitlines()[1:]
    return [(op, case, result) for op, case, result in (line.split("\t") for line in lines)]


def _right(result: str) -> bool:
    return result in ("batched", "whole")


def ops() -> str:
    """The ops that are taken, what they become, what is not taken, and how many of ONNX's node cases are right."""
    found = _cases()
    every, right = Counter(op for op, _, _ in found), Counter(op for op, _, result in found if _right(result))
    rows = [(f"`{name}`", op.layers, op.limits, f"{right[name]} of {every[name]}" if every[name] else "") for name, op in OPS.items()]
    rows += [(f"`{name}`", "the model's loss", "reductions other than mean", f"{right[name]} of {every[name]}") for name in LOSSES]
    total = f"{sum(right.values())} of {sum(every.values())}"
    return markdown(("op", "becomes", "not taken", "node cases right"), [*sorted(rows), ("all", "", "", total)], 3) + "\n"


def reasons() -> str:
    """The cases that are not right, by op and reason."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for op, case, result in _cases():
        if not _right(result):
            wrong.setdefault((op, result), []).append(case.removeprefix("test_"))
    rows = [(f"`{op}`", ", ".join(cases), reason) for (op, reason), cases in sorted(wrong.items())]
    return markdown(("op", "cases", "why not"), rows, 3) + "\n"


def layers() -> str:
    """The layers that are written."""
    return ", ".join(f"`{kind.__name__}`" for kind in sorted(WRITERS, key=lambda kind: kind.__name__)) + "\n"


TABLES = {"onnx_ops": ops, "onnx_reasons": reasons, "onnx_layers": layers}
