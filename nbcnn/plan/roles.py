"""This module says which role each operand of an op has: how it is stored, and what is counted of it, follow from the role.

    input, output  what a product reads and makes in its forward pass, or the gradients of these
    filter         its weights (K, C, R, S) or (C, T), or their gradient; of a state space model everything that its filter is made of
    table          a data set that stays on the device: one step reads a part of it
    given          the caller's own array, outside the doors of a net
    value          any other: activations and their gradients, parameters, statistics, state

Kinds that are not listed have values alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from nbcnn.plan.op import Op


class Role(Enum):
    INPUT, OUTPUT, FILTER, TABLE, GIVEN, VALUE = "input", "output", "filter", "table", "given", "value"


_FORWARD = ((Role.INPUT, Role.FILTER), (Role.OUTPUT,))
_PRODUCT = {
    "fprop": _FORWARD,
    "infer": _FORWARD,
    "dgrad": ((Role.OUTPUT, Role.FILTER), (Role.INPUT,)),
    "wgrad": ((Role.INPUT, Role.OUTPUT), (Role.FILTER,)),
}
_FILTERS = ((Role.FILTER,) * 8, (Role.FILTER,) * 8)
_TABLE = {"": ((Role.TABLE,), ())}
ROLES: Mapping[str, Mapping[str, tuple[tuple[Role, ...], tuple[Role, ...]]]] = {
    **dict.fromkeys(("conv", "upconv", "gconv", "pwconv1d"), _PRODUCT),
    "dwconv1d": _PRODUCT | {"bwd": ((Role.OUTPUT, Role.INPUT, Role.FILTER), (Role.INPUT, Role.FILTER))},
    "s4kernel": {"fprop": _FILTERS, "dgrad": _FILTERS},
    **dict.fromkeys(("gather", "gather_labels", "gather_windows"), _TABLE),
    "convert": {"": ((Role.GIVEN,), ())},
}
"""By kind and direction the roles of the first operands that are read, and of the first that are written."""


def role(op: Op, side: str, position: int) -> Role:
    """The role of an operand of `op`: of the `side` "in" or "out", counted from 0.

    >>> role(Op("conv", "wgrad"), "out", 0)
    <Role.FILTER: 'filter'>
    """
    roles = ROLES.get(op.kind, {}).get(op.direction, ((), ()))[side == "out"]
    return roles[position] if position < len(roles) else Role.VALUE
