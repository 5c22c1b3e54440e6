"""Mutants of kernels: one operator, bound, barrier, wait, sign or order is changed, and the tests that launch the kernel must notice.

    python -m tests.campaigns.broken_kernels --count 60

A seed makes one mutant of a kernel that the simulator runs. Its ops are checked as gradcheck does, with races looked for; what survives that is run
by the tests that launch the kernel: those that pytest alone runs in the simulator, then those that .ci/full adds to the same files. The survivors
that change nothing stand in SURVIVORS, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 120
"""A check that takes so many seconds of a core, beside what it takes where kernels are right, does not end any more: noticed."""
IDLE = 10
"""How many times as long by the clock a check may take, beside others."""
SURVIVORS: dict[str, str] = json.loads(Path(__file__).with_name("broken_kernels.json").read_text())
"""Mutants, as `str` writes them, that need not be noticed, and why."""
BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr, ast.RShift: ast.LShift}
COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
BARRIERS = ("syncthreads", "syncwarp", "warp_barrier", "threadfence", "cp_async_commit")
WAITS = ("wait", "landed", "all_landed", "cluster_wait")


@dataclass(frozen=True)
class Mutant:
    """A changed piece of a kernel's source."""

    file: str
    kernel: str
    line: int
    kind: str
    before: str
    after: str
    span: tuple[int, int]
    number: int = 1
    """Which of the same changes of the same kernel, in the order of the source."""

    def __str__(self) -> str:
        which = f", number {self.number}" if self.number > 1 else ""
        return f"{self.file} {self.kernel}: {self.kind}, {self.before} -> {self.after}{which}"


@cache
def kernels() -> dict[tuple[str, str], tuple[str, ...]]:
    """{(file, name): ops} of the kernels that the simulator launches."""
    parts = json.loads((ROOT / "tests" / "gpu" / "launched.json").read_text())
    parts.pop("never")
    launched = {(f"{module.replace('.', '/')}.py", name.rpartition(".")[2]) for part in parts.values() for module, name in map(str.split, part)}
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| ([^|]*) \|", (ROOT / "docs" / "kernels.md").read_text(), re.M)
    return {(file, name): tuple(ops.split(", ")) for name, file, ops in rows if (file, name) in launched}


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(kind, what comes in its place) of every mutation of one node."""
    made = copy.deepcopy(node)
    if isinstance(made, ast.BinOp) and type(made.op) in BINARY:
        made.op = BINARY[type(made.op)]()
        yield "operator", made
    elif isinstance(made, ast.Compare) and type(made.ops[0]) in COMPARED:
        made.ops[0] = COMPARED[type(made.ops[0])]()
        yield "bound", made
    elif isinstance(made, ast.UnaryOp) and isinstance(made.op, ast.USub):
        yield "sign", made.operand
    elif isinstance(made, ast.AugAssign) and isinstance(made.op, ast.Add):
        made.op = ast.Sub()
        yield "sign", made
    elif isinstance(made, ast.Expr) and isinstance(made.value, ast.Call):
        called = ast.unparse(made.value.func).rpartition(".")[2]
        if called in BARRIERS:
            yield "barrier", ast.Pass()
        elif called in WAITS:
            yield "wait", ast.Pass()
    elif isinstance(made, ast.Call) and ast.unparse(made.func) == "cp_async_wait":
        made.args[0] = ast.BinOp(made.args[0], ast.Add(), ast.Constant(1))
        yield "wait", made
    elif isinstance(made, ast.Call) and ast.unparse(made.func) == "range" and len(made.args) > 1:
        made.args[0] = ast.BinOp(made.args[0], ast.Add(), ast.Constant(1))
        yield "order", made


@cache
def mutants() -> tuple[Mutant, ...]:
    """Every mutant, in the order of the files."""
    found, met = [], Counter[str]()
    for file, name in sorted(kernels()):
        source = (ROOT / file).read_text()
        starts = [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        tree = list(ast.walk(ast.parse(source)))
        for function in (each for each in tree if isinstance(each, ast.FunctionDef) and each.name == name):
            waits = (each for each in tree if isinstance(each, ast.Call) and ast.unparse(each.func) == "cp_async_wait")  # of the factory
            for node in (*waits, *(inner for statement in function.body for inner in ast.walk(statement))):
                for kind, changed in changes(node):
                    span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
                    after = ast.unparse(changed)
                    after = f"({after})" if isinstance(changed, ast.expr) else after
                    mutant = Mutant(file, name, node.lineno, kind, source.encode()[span[0] : span[1]].decode(), after, span)
                    met[str(mutant)] += 1
                    found.append(dataclasses.replace(mutant, number=met[str(mutant)]))
    return tuple(found)


def sample(count: int, seed: int = 0) -> list[Mutant]:
    """`count` mutants: each kind as often as another, as far as there are any."""
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants():
        by_kind.setdefault(mutant.kind, []).append(mutant)
    chosen: list[Mutant] = []
    for each in by_kind.values():
        random.Random(seed).shuffle(each)
    while len(chosen) < count and any(by_kind.values()):
        chosen += [each.pop() for each in by_kind.values() if each]
    return chosen[:count]


def copied(folder: Path) -> Path:
    """A copy of the package and its tests."""
    for name in ("nbcnn", "tests", "docs", "data", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "train.py", "extract_features.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


MARKS = {"pytest": "not full", ".ci/full": "gpu and full"}
"""Who runs tests in the simulator, and the marks of what it runs there; .ci/full beside what pytest runs."""


@dataclass(frozen=True)
class Launching:
    """What launches a kernel: tests, and the seconds that they take where it is right."""

    tests: list[str] = field(default_factory=list)
    seconds: float = 0.0


def launching(folder: Path) -> dict[str, Launching]:
    """{"file kernel": what launches it}, of the tests that pytest runs in the simulator: they are run once, in a copy that is right; a line each."""
    sys.path.insert(0, str(ROOT / "tests"))  # what the tests share, as pytest has it
    from gpu.test_simulator import CONVOLUTIONS, ELSEWHERE, PARTS
    from launches import read

    found: dict[str, set[str]] = {}
    took: dict[str, float] = {}
    for name, part in PARTS.items():
        begun, noted = time.perf_counter(), folder / "launched"
        noted.write_text("{}")
        files = [str(next((folder / "tests").rglob(file)).relative_to(folder)) for file in part]
        marks = "gpu and not full" if part in (CONVOLUTIONS, ELSEWHERE) else MARKS["pytest"]
        said = _passes(folder, [*_pytest(marks, files), "--durations=0"], noted, 3600)
        if said is None:
            raise RuntimeError(f"{part}: tests of kernels that are right fail")
        took |= {test: float(seconds) for seconds, test in re.findall(r"^ *([\d.]+)s call +(.*)$", said, re.M)}
        for kernel, about in read(noted).items():
            module, kernel = kernel.split()
            found.setdefault(f"{module.replace('.', '/')}.py {kernel.rpartition('.')[2]}", set()).update(about["tests"])
        print(f"{time.perf_counter() - begun:5.0f} s  what the tests of part {name} launch", flush=True)
    return {kernel: Launching(sorted(tests), sum(took.get(test, 0.0) for test in tests)) for kernel, tests in found.items()}


def noticed(mutant: Mutant, folder: Path, tests: list[str], marks: str = MARKS["pytest"], seconds: float = 0.0) -> str:
    """What notices a mutant: gradcheck or a test; empty if nothing does. `folder`: of `copied`; `seconds`: what the tests take without it."""
    place = folder / mutant.file
    right = place.read_bytes()
    place.write_bytes(right[: mutant.span[0]] + mutant.after.encode() + right[mutant.span[1] :])
    ops = kernels()[mutant.file, mutant.kernel]
    try:
        check = [sys.executable, "-W", "ignore", __file__, "--ops", ",".join(ops)]
        if marks == MARKS["pytest"] and _passes(folder, check) is None:
            return "gradcheck"
        return "tests" if tests and _passes(folder, _pytest(marks, tests), limit=SECONDS + 2 * seconds) is None else ""
    finally:
        place.write_bytes(right)


def _pytest(marks: str, tests: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", marks, *tests]


def _passes(folder: Path, command: list[str], launched: Path | str = os.devnull, limit: float = SECONDS) -> str | None:
    """What a command prints that ends well in the simulator within `limit` seconds of a core, else None; no tests (5) are no failure."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"NBCNN_SIMULATOR": "1", "NBCNN_TEST_LAUNCHES": str(launched), "OPENBLAS_NUM_THREADS": "1"}
    limited = ["bash", "-c", f'ulimit -t {math.ceil(limit)}; exec "$@"', "bash", *command]
    try:
        ended = subprocess.run(limited, cwd=folder, env=environment, capture_output=True, text=True, timeout=IDLE * limit)
    except subprocess.TimeoutExpired:
        return None
    return ended.stdout if ended.returncode in (0, 5) else None


def check(ops: str) -> int:
    """In the copy, in the simulator: all that gradcheck has about ops; 1 at the first that is wrong, 0 too if gradcheck does not know them."""
    from launches import watch_launches

    from nbcnn.check import gradcheck

    watch_launches()
    known = {str(op) for op in {case.op for case in gradcheck.all_cases()} | set(gradcheck.GRADIENTS)}
    wanted = [op for op in ops.split(",") if op in known]
    return int(any(not finding.ok for finding in gradcheck.check(None, gradcheck.ops_of(",".join(wanted))))) if wanted else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after so many")
    parser.add_argument("--ops", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ops is not None:
        return check(given.ops)
    sys.path.insert(0, str(ROOT / "tests"))  # what the tests share, as pytest has it
    result = campaign(given.count, given.seed, given.seconds)
    print(f"{result.tried} mutants: {result.by['pytest']} noticed by pytest, {result.by['.ci/full']} more by .ci/full, ", end="")
    print(f"{result.justified} survive and are justified, {len(result.survivors)} survive")
    return int(bool(result.survivors))


@dataclass
class Result:
    """What came of a campaign."""

    tried: int
    by: Counter[str]
    """Who noticed how many."""
    justified: int
    survivors: list[Mutant]


def campaign(count: int, seed: int = 0, seconds: float = float("inf")) -> Result:
    """Try a sample of mutants by what pytest runs, then those that survive by what .ci/full runs; a line each. Begins none after `seconds`."""
    result = Result(0, Counter(), 0, [])
    with tempfile.TemporaryDirectory() as made:
        folder, started = copied(Path(made)), time.perf_counter()
        launched, left = launching(folder), sample(count, seed)
        for who, marks in MARKS.items():
            trying, left = left, []
            for mutant in trying:
                if (begun := time.perf_counter()) - started > seconds:
                    break
                of = launched.get(f"{mutant.file} {mutant.kernel}", Launching())
                files = sorted({test.partition("::")[0] for test in of.tests})
                # Of more tests nobody knows how long they take: ten minutes of a core.
                by = noticed(mutant, folder, of.tests, marks, of.seconds) if who == "pytest" else noticed(mutant, folder, files, marks, 300)
                result.tried += who == "pytest"
                result.by[who] += bool(by)
                known = not by and str(mutant) in SURVIVORS
                result.justified += known
                left += [mutant] if not by and not known else []
                print(
                    f"{time.perf_counter() - begun:5.0f} s  {by or ('justified' if known else 'SURVIVED'):9} {who}, line {mutant.line} of {mutant}",
                    flush=True,
                )
    return dataclasses.replace(result, survivors=left)


if __name__ == "__main__":
    sys.exit(main())
