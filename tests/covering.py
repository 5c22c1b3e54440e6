"""This module chooses what a GPU test compiles, of cases and tiles whose product would be hundreds of kernels: a kernel takes a core for seconds.

A kernel is made by a factory from arguments: a tile, a precision, an activation, whether there is a bias. Of a test's cases those are run that
have a value of an argument, or of a field of one, which none before them had, and those whose kernels are compiled already. Left out are new
combinations of known values; all tiles are run.
The simulator, which compiles nothing, runs all.
"""

from __future__ import annotations

import json

import pytest

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.gpu import identity, launching
from nbcnn.gpu.compiler import SIMULATOR


def together(cases, key=lambda case: "all", ids=str):
    """Lists of cases, as values of a parameter. On a GPU those of the same key are one test, which has one `Cover`; in the simulator, of whose tests
    pytest runs a sample, each is a test.
    """
    lists = {}
    for case in cases:
        lists.setdefault(ids(case) if SIMULATOR else key(case), []).append(case)
    return [pytest.param(of, id=str(name)) for name, of in lists.items()]


class Cover:
    """The values of arguments that the kernels of a test have had."""

    def __init__(self) -> None:
        self._values, self._kernels = set(), set()

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
