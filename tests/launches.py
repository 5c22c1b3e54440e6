"""This module watches what the tests launch in the simulator: no race, nothing out of bounds, and no kernel left out.

NBCNN_TEST_LAUNCHES names a file. Where it is set, a launch of a kernel of `nbcnn.ops` runs in the checking mode if it is one of the first of its
specialisation, or larger than what has been checked; a fault fails the test that launches it. At the end of the process the file gets what `Launched`
says of every kernel.
"""

from __future__ import annotations

import ast
import atexit
import inspect
import json
import os
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

import nbcnn
from nbcnn.gpu import compiler

LAUNCHES = "NBCNN_TEST_LAUNCHES"
FIRST = 8
"""Of a kernel so many specialisations are checked, whatever their sizes."""
LARGER = 1.25
"""A launch on arrays of so many times the elements of the largest that was checked is checked, too."""


@dataclass
class Launched:
    """What is known of a kernel.

    tests    the tests that launch it
    reached  of `decided` the loops that have gone round twice or more, and the tests that had both answers, in the launches that were checked
    """

    tests: list[str] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)


class _Paths:
    """Trips of loops and sides of tests, by the code and the line where they stand."""

    def __init__(self) -> None:
        self.on = False
        self.trips, self.sides = Counter[tuple[Any, int]](), defaultdict[tuple[Any, int], int](int)

    def watch(self) -> None:
        """Have rewritten kernels tell. Before the first is rewritten."""
        from nbcnn.gpu.lockstep import lanes, numbers, rewrite

        paths = self

        class Loop(lanes.Loop):
            def __init__(self, returns: Any = None) -> None:
                super().__init__(returns)
                self.line, self.count = _caller(), 0

            def again(self) -> bool:
                self.count += 1
                if paths.on:
                    paths.trips[self.line] = max(paths.trips[self.line], self.count)
                return super().again()

        def over(*bounds: Any) -> Any:
            if any(type(bound) is np.ndarray for bound in bounds):
                loop = Loop()
                loop.line = _caller()
                return loop.over(*bounds)
            values = range(*map(int, bounds))
            if paths.on:
                paths.trips[_caller()] = max(paths.trips[_caller()], len(values))
            return values

        def told(function: Any) -> Any:
            @wraps(function)
            def run(condition: Any, *rest: Any) -> Any:
                if paths.on:
                    answers = np.atleast_1d(condition)
                    if len(answers) > 1 and lanes.now.mask is not None:
                        answers = answers[lanes.now.mask]
                    paths.sides[_caller()] |= int((answers != 0).any()) + 2 * int((answers == 0).any())
                return function(condition, *rest)

            return run

        mine = {"over": over, "Loop": Loop, "split": told(lanes.split), "choose": told(lanes.choose), "select": told(numbers.select)}
        rewrite.RUNTIME.update({rewrite.PREFIX + name: value for name, value in mine.items()})


def _caller() -> tuple[Any, int]:
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def decided(tree: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """(line, source) of the loops and tests of a kernel that a launch decides: not all they name is known when it is compiled."""
    local = {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    local |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    for node in ast.walk(tree):
        asked = node.iter if isinstance(node, ast.For) else node.test if isinstance(node, ast.While | ast.If | ast.IfExp) else None
        names = list(ast.walk(asked)) if asked is not None else []
        if any(isinstance(each, ast.Attribute) or (isinstance(each, ast.Name) and each.id in local) for each in names):
            yield node.lineno, f"{'for' if isinstance(node, ast.For) else type(node).__name__.lower()} {ast.unparse(asked)}"


def all_decided(kernel: str) -> set[str]:
    """What `decided` finds in the source of a kernel, "module name"."""
    module, name = kernel.split()
    tree = ast.parse((Path(nbcnn.__file__).parents[1] / f"{module.replace('.', '/')}.py").read_text())
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == name.rpartition(".")[2]]
    return {source for each in functions for _, source in decided(each)}


def never_reached(parts: dict[str, dict[str, list[str]]]) -> dict[str, list[str]]:
    """{kernel: what of `decided` no part reaches}, of {part: {kernel: what it reaches}}; kernels of which everything is reached are left out."""
    reached = defaultdict[str, set[str]](set)
    for kernels in parts.values():
        for kernel, paths in kernels.items():
            reached[kernel].update(paths)
    never = {kernel: sorted(all_decided(kernel) - reached[kernel]) for kernel in sorted(reached)}
    return {kernel: paths for kernel, paths in never.items() if paths}


def grown(before: dict[str, dict[str, list[str]]], now: dict[str, dict[str, list[str]]]) -> dict[str, list[str]]:
    """{kernel: the paths} of those kernels of the list `before` of which more paths than there are never reached. A new kernel may have some."""
    known = {kernel for part, kernels in before.items() if part != "never" for kernel in kernels}
    were = before["never"]
    return {kernel: paths for kernel, paths in now["never"].items() if kernel in known and len(paths) > len(were.get(kernel, []))}


def watch_launches():
    """Note and check launches from now on; without effect where LAUNCHES is not set, or outside this project's simulator."""
    if not (path := os.environ.get(LAUNCHES)) or not compiler.LOCKSTEP:
        return
    from nbcnn.gpu.lockstep.check import checking
    from nbcnn.gpu.lockstep.launch import Kernel, watchers

    plain, paths = Kernel.launch, _Paths()
    paths.watch()
    launched, functions, largest, specialisations, met = defaultdict(Launched), {}, Counter(), Counter(), set()

    @wraps(plain)
    def launch(self, grid, block, args, *rest, **options):
        name = f"{self.py_func.__module__} {self.py_func.__qualname__}"
        if not name.startswith("nbcnn.ops."):
            return plain(self, grid, block, args, *rest, **options)
        functions[name] = self.py_func
        if (test := _test()) not in launched[name].tests:
            launched[name].tests.append(test)
        elements = sum(getattr(value, "size", 1) for value in args)
        new = self not in met and specialisations[name] < FIRST
        if watchers or not (new or elements > LARGER * largest[name]):
            return plain(self, grid, block, args, *rest, **options)
        met.add(self)
        specialisations[name] += new
        largest[name] = max(largest[name], elements)
        paths.on = True
        try:
            with checking() as found:
                plain(self, grid, block, args, *rest, **options)
        finally:
            paths.on = False
        assert not found.faults, "\n".join(map(str, (name, *found.faults)))

    def write():
        for name, function in functions.items():
            lines, first = inspect.getsourcelines(function)
            (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
            for line, source in decided(tree):
                place = function.__code__.co_filename, first + line - 1
                if paths.trips[place] > 1 if source.startswith(("for", "while")) else paths.sides[place] == 3:
                    launched[name].reached.append(source)
        Path(path).write_text(json.dumps({name: asdict(launched[name]) for name in sorted(functions)}))

    Kernel.launch = launch
    atexit.register(write)


def _test():
    """The test that runs, as pytest takes it; its file where a fixture launches, on which other tests may depend."""
    test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    return test if phase == "(call)" else test.partition("::")[0]


def read(path):
    """{module and name of a kernel: a dict of `Launched`} of a file that `watch_launches` has written."""
    return json.loads(Path(path).read_text())
