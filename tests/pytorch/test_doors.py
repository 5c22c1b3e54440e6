"""Small modules and ready networks through both doors and back, as `python -m tests.campaigns.doors` has them: right or refused in words.

Of the small modules a sixth is tested here, the same every time; the campaign takes all of them.
"""

from __future__ import annotations

from zlib import crc32

import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed (the extra onnx-tests)")
pytestmark = pytest.mark.full

from campaigns.doors import outcome, ready_cases, small_cases  # noqa: E402
from small import MODULES, REFUSED, name_of, small  # noqa: E402

from nbcnn.torch import modules  # noqa: E402

UNTAKEN = {name_of(module) for module, _ in REFUSED}
UNTAKEN |= {f"function {name}" for name in ("softmin", "argmax", "cumsum", "sorted", "log", "sin", "floor", "einsum", "over examples")}
UNTAKEN |= {f"weights of {name}" for name in ("one factor", "divisor", "used in two ways", "scaled weight", "concatenated")}
"""What from_module refuses in every way."""


def outcomes(cases):
    found = [(case.door, case.way, *outcome(case)) for case in cases]
    return [each for each in found if each[2] == "wrong"], {(door, way): what for door, way, what, _ in found}


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in small() if crc32(name.encode()) % 6 == 0))
def test_a_small_module_is_the_same_behind_both_doors_or_refused(name):
    wrong, found = outcomes(small_cases(("from_module", "script"), only=name))
    assert not wrong
    assert found[("from_module", "whole")] == ("refused" if name in UNTAKEN else "right")


@pytest.mark.parametrize("case", list(ready_cases()), ids=lambda case: f"{case.name} {case.door}")
def test_a_ready_network_is_the_same_behind_both_doors_or_refused(case):
    assert outcome(case)[0] == ("refused" if "patches" in case.name else "right"), outcome(case)[1]


def test_every_module_that_is_read_is_among_the_small_ones():
    assert {type(module) for module, _ in MODULES + REFUSED} >= set(modules.MODULES) - {modules.Own}
