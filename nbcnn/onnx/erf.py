"""This module reads the GELU that files of opsets below 20 write with the op Erf: x/2·(1 + erf(x/√2)), its factors in any order.

There is no layer for erf itself. `Erf` stands for factor·erf(x/√2) + shift until it is multiplied with x, which makes a GELU of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.nn.activations import GELU, Scale
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.values import Sheet, Val

ERF = "Erf"
ROOT = 1e-6
"""How far a factor of a file may be from 1/√2, relatively: sixteen roundings of float32."""


@dataclass(frozen=True)
class Erf:
    """factor·erf(x/√2) + shift."""

    x: Val
    factor: float = 1.0
    shift: float = 0.0


def erf_of(sheet: Sheet, op: str, operands: Sequence[Any]) -> Any:
    """What an op makes of an `Erf`, or Erf of a value. Raises Unsupported for what is no part of a GELU."""
    if op == ERF:
        return Erf(_rooted(sheet, operands[0]))
    (at,) = (at for at, each in enumerate(operands) if isinstance(each, Erf)) if len(operands) == 2 else (None,)
    if at is None:
        raise Unsupported("it reads Erf, which is taken as a part of a GELU alone")
    erf, other = operands[at], operands[1 - at]
    if isinstance(other, Val):
        if op != "Mul" or not math.isclose(erf.factor, erf.shift, rel_tol=ROOT):
            raise Unsupported("it reads Erf, which is taken as a part of a GELU alone")
        return sheet.scaled(sheet.alike(GELU(), erf.x), 2 * erf.factor * _share(erf.x, other))
    number = np.asarray(other, np.float64)
    if number.size != 1:
        raise Unsupported(f"it reads Erf and a constant of {number.shape}")
    value = float(number.reshape(()))
    if op == "Add":
        return replace(erf, shift=erf.shift + value)
    if op == "Mul" or (op == "Div" and at == 0 and value):
        value = value if op == "Mul" else 1 / value
        return replace(erf, factor=erf.factor * value, shift=erf.shift * value)
    raise Unsupported("it reads Erf, which is taken as a part of a GELU alone")


def _rooted(sheet: Sheet, y: Any) -> Val:
    """x of y = x/√2."""
    if not isinstance(y, Val):
        raise Unsupported("its operand is a constant")
    before = y.value.layer
    if isinstance(before, Scale) and not before.shift and math.isclose(before.factor, math.sqrt(0.5), rel_tol=ROOT):
        return Val(y.value.reads[0], y.dims)
    return sheet.scaled(y, math.sqrt(2))


def _share(x: Val, other: Val) -> float:
    """How many times `x` the value `other` is."""
    before = other.value.layer
    if other.dims == x.dims and other.value is x.value:
        return 1.0
    if other.dims == x.dims and isinstance(before, Scale) and not before.shift and other.value.reads[0] is x.value:
        return before.factor
    raise Unsupported("it reads Erf, and is no GELU: another value than that of the Erf is multiplied")
