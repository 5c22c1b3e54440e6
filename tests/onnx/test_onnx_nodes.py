"""Tests of imported nodes against ONNX's own node cases: every case of a listed op is right, or stands in the table with its reason.

`node_cases.tsv` has op, case and result, "batched", "whole", or the reason; its first line says which version of onnx made it. Made by
`python tests/onnx/test_onnx_nodes.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)")

import node_cases
import onnx

TABLE = Path(__file__).parent / "node_cases.tsv"
HEAD = "# onnx "
pytestmark = pytest.mark.full


def table():
    """(version of onnx, {case: (op, result)})."""
    head, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    return head.removeprefix(HEAD), {case: (op, result) for op, case, result in (line.split("\t") for line in lines)}


@pytest.fixture(scope="module")
def cases():
    return node_cases.collected()


@pytest.mark.parametrize("op", node_cases.OPS)
def test_every_case_of_an_op_is_right_or_listed_with_its_reason(op, cases):
    version, wanted = table()
    found = {}
    for name, case in cases.items():
        if case.model.graph.node[0].op_type == op and (name in wanted or version == onnx.__version__):
            found[name] = op, node_cases.run(case.model, case.data_sets, case.rtol, case.atol)
    assert found == {name: each for name, each in wanted.items() if each[0] == op and name in cases}


def test_the_table_has_every_case():
    version, wanted = table()
    if version != onnx.__version__:
        pytest.skip(f"the table was made with onnx {version}, here is {onnx.__version__}")
    assert set(wanted) == set(node_cases.collected())


def test_most_cases_are_right():
    _, wanted = table()
    right = sum(result in ("batched", "whole") for _, result in wanted.values())
    assert right >= 260
    assert {op for op, _ in wanted.values()} == set(node_cases.OPS)


def make():
    lines = []
    for name, case in sorted(node_cases.collected().items(), key=lambda item: (item[1].model.graph.node[0].op_type, item[0])):
        result = node_cases.run(case.model, case.data_sets, case.rtol, case.atol)
        lines.append(f"{case.model.graph.node[0].op_type}\t{name}\t{result}\n")
    TABLE.write_text(f"{HEAD}{onnx.__version__}\n{''.join(lines)}", encoding="utf-8")


if __name__ == "__main__":
    make()
    sys.exit(0)
