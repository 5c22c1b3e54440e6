"""This module chooses what a GPU test compiles, of cases and tiles whose product would be hundreds of kernels: a kernel takes a core for seconds.

A kernel is made by a factory from arguments: a tile, a precision, an activation, whether there is a bias. Of a test's cases those are run that
have a value of an argument, or of a field of one, which none before them had, and those whose kernels are compiled already. Left out are new
combinations of known values; all tiles are run, each in one precision. Fused ops whose kernels take any activation as a device function are run in
every row of modes with a ReLU, and with each other activation in one of them (`in_turn`).
The simulator, which compiles nothing, runs all.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from zlib import crc32

import pytest

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound, Unsupported
from nbcnn.gpu import identity, launching
from nbcnn.gpu.compiler import SIMULATOR
from nbcnn.gpu.device import Host
from nbcnn.modes import MODES
from nbcnn.ops.activations.table import ACTIVATIONS, activated_ops, ops_of


def together(cases, key=lambda case: "all", ids=str):
    """Lists of cases, as values of a parameter. On a GPU those of the same key are one test, which has one `Cover`; in the simulator, of whose tests
    pytest runs a sample, each is a test.
    """
    lists = {}
    for case in cases:
        lists.setdefault(ids(case) if SIMULATOR else key(case), []).append(case)
    return [pytest.param(of, id=str(name)) for name, of in lists.items()]


NOT_RELU = {op: name for name, each in ACTIVATIONS.items() if name != "relu" for op in (*activated_ops(name), *ops_of(each))}
"""The activation of each op with another one than ReLU."""


def in_turn(key, op) -> bool:
    """Whether a GPU runs an op in the row `key`: one of NOT_RELU in one of the rows that have kernels of their own for it, the same for all ops of an
    activation.
    """
    rows = _rows_of(op) if op in NOT_RELU else ()
    return SIMULATOR or not rows or key == rows[crc32(NOT_RELU[op].encode()) % len(rows)]


@cache
def _rows_of(op):
    """Rows of a GPU that have kernels for an op which no row before has for images that are stored alike."""
    rows, met = [], set()
    for key, row in MODES.items():
        if row.device == "gpu":
            own = {(impl.bind, row.layout, row.store, row.precision) for _, impl in row.chain(op)}
            rows += [key] if own - met else []
            met |= own
    return tuple(rows)


def new_sizes(tiles):
    """Of tiles those that have a size or a property which none before has."""
    had = set()
    for tile in tiles:
        if new := {(type(tile).__name__, *each) for each in vars(tile).items()} - had:
            had |= new
            yield tile


class Cover:
    """The values of arguments that the kernels of a test have had, and those of the tests `before` it: (row, implementation, case, tile) of what they
    take in other precisions, of which a GPU runs a tile in one.
    """

    def __init__(self, before=()) -> None:
        self._values, self._kernels = set(), set()
        for row, impl, case, tile in () if SIMULATOR else before:
            with suppress(Unsupported):
                self.takes_case(row, impl, case, Host(), tile)

    def takes(self, launches) -> bool:
        """Whether `launches` are to be run; if so, their values are had from now on."""
        if SIMULATOR:
            return True
        kernels = [_arguments(launch) for launch in launches if getattr(launch, "kernel", None) is not None]
        values = {value for kernel in kernels for value in kernel}
        taken = not values <= self._values or self._kernels.issuperset(kernels)
        if taken:
            self._values |= values
            self._kernels |= set(kernels)
        return taken

    def takes_case(self, row, impl, case, device, tile=None) -> bool:
        """The same for what `gradcheck.parity` runs of these. Raises Unsupported."""
        case = gradcheck.rounded(case, row.precision)
        options = {"attrs": case.attrs, "device": device, "layout": row.layout, "store": row.store, "tile": tile}
        return SIMULATOR or self.takes(Bound(impl, case.op, case.ins, case.outs, **options).launches)


def _arguments(launch) -> frozenset[tuple[str, str]]:
    """(function and argument, value) of all that a launch's kernel was made of; the types of its own arguments are among them."""
    function = launch.kernel.py_func
    try:
        made = identity.recipe(launch.kernel).get("arguments", {})
    except identity.Unknown:
        made = {"kernel": id(launch.kernel)}
    return frozenset(_parts(f"{function.__module__}.{function.__qualname__}", made | {"types": launching.signature(launch.args)}))


def _parts(name, value):
    """An argument, or of one with fields each of them; a tile is also one value as a whole. Of an activation the kernel is left out."""
    fields = value.get("fields", value) if isinstance(value, dict) and not {"function", "of"} & value.keys() else None
    if fields is None or value.get("dataclass", "").endswith("Tile"):
        # An activation is one device function, whichever kernel calls it.
        yield "activation" if name.endswith((".after", ".activation")) else name, json.dumps(value, sort_keys=True)
    for field, part in (fields or {}).items():
        yield from _parts(f"{name}.{field}", part)
