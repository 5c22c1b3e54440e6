"""`python -m nbcnn kernels` compiles every kernel for any architecture, without a GPU, and reports registers, spills and instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import GPU_MODES, Parser, flag, one_of, some_of
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files import atomic
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.plan.names import ARCHITECTURES, PRECISIONS, REPORTED

COMPILERS = ("numba", "mlir")
"""A copy of the names of `nbcnn.gpu.compiler`, which takes longer to import than `--help` may."""
EXAMPLES = (
    "python -m nbcnn kernels --mode tensorcore --precision bf16 --arch 90a",
    "python -m nbcnn kernels --op conv_wgrad --arch 80,90a",
    "python -m nbcnn kernels --json > kernels.json",
    "python -m nbcnn kernels --mode naive --arch 90a --compilers numba,mlir     side by side what two compilers make",
    "python -m nbcnn kernels --page docs/kernels.md             every kernel once: its file, and who launches it",
)


def parser() -> Parser:
    made = Parser(
        "python -m nbcnn kernels",
        "Compile every kernel without a GPU: registers, spills, shared memory, occupancy, instructions. All of them take one core an hour.",
        EXAMPLES,
    )
    group = made.add_argument_group("kernels")
    flag(group, "--mode", one_of(*GPU_MODES), "only this mode's kernels", "all modes")
    flag(group, "--precision", one_of(*PRECISIONS), "only this precision's", "all")
    flag(group, "--arch", some_of(*ARCHITECTURES), f"architectures to compile for, sm_… ({', '.join(ARCHITECTURES)})", ",".join(REPORTED))
    flag(group, "--op", str, "only this op's kernels", "all ops", metavar="OP")
    flag(group, "--kinds", bool, "compile only the first of the kernels that share their Python code and the types of their arguments", "off")
    flag(group, "--compilers", some_of(*COMPILERS), "compile by each of these, and report them side by side", "the one of NBCNN_COMPILER")
    group = made.add_argument_group("output")
    flag(group, "--registers", bool, "count no instructions; without nvdisasm that would take a second compilation", "off")
    flag(group, "--quiet", bool, "no progress", "off")
    flag(group, "--json", bool, "print one line of JSON instead of the table", "off")
    flag(
        group,
        "--page",
        paths.WRITES_TEXT,
        "write the page of all kernels instead; more than half an hour on two cores",
        "off",
        metavar="FILE",
    )
    flag(group, "--new", bool, "with --page: keep the registers that the page has, and compile the kernels that it lacks", "off")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print; returns 0, or 1 if a kernel does not compile, or has a number that is 64 bits wide though no cast asks for it."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _report(flags), without_gpu="python -m nbcnn env says what is missing here")


def _report(flags: SimpleNamespace) -> int:
    from nbcnn.gpu.compiler import SIMULATED_BY, SIMULATOR, numba_cuda
    from nbcnn.lab.measure import kernels

    if SIMULATOR:
        raise UsageError(f"the simulator compiles nothing: run kernels without {SIMULATED_BY}")

    def say(text: str) -> None:
        if not flags.quiet:
            to_stderr(text)

    if flags.page:
        if flags.mode or flags.precision or flags.arch or flags.op or flags.json or flags.registers or flags.kinds or flags.compilers:
            raise UsageError("--page is of all kernels, modes and ops: it goes with --new and --quiet alone")
        from nbcnn.lab.report import kernels_page

        numba_cuda()  # without it there is nothing to report
        kept = kernels_page.kept(Path(flags.page)) if flags.new else {}
        atomic.replace_bytes(Path(flags.page), kernels_page.page(kernels_page.compiled(say, kept)).encode())
        return OK
    if flags.new:
        raise UsageError("--new goes with --page")
    chosen = kernels.rows(flags.mode, flags.precision)
    if not chosen:
        raise UsageError(f"mode {flags.mode} has no precision {quoted(flags.precision)}")
    known = sorted({str(op) for row in chosen for op in row.ops})
    if flags.op and flags.op not in known:
        raise UsageError(f"no op {quoted(flags.op)} in these modes{nearest(flags.op, known)}")
    if flags.compilers:
        return _side_by_side(flags)
    numba_cuda()

    how = {"counting": not flags.registers, "kinds": bool(flags.kinds)}
    found = list(kernels.report(flags.mode, flags.precision, flags.arch or REPORTED, flags.op, say, **how))
    to_stdout(json.dumps(found) if flags.json else kernels.table(found))
    return RUNTIME if any("error" in row or row["wide"] for row in found) else OK


def _side_by_side(flags: SimpleNamespace) -> int:
    """Each compiler in a process of its own: a process has one. What fails under one of them does not fail under the other."""
    from nbcnn.lab.measure import kernels

    found: dict[str, list[dict[str, Any]]] = {}
    for name in flags.compilers:
        words = [sys.executable, "-m", "nbcnn", "kernels", "--json"]
        words += [f"--{word}" for word in ("quiet", "registers", "kinds") if getattr(flags, word)]
        for option in ("mode", "precision", "op"):
            words += [f"--{option}", getattr(flags, option)] if getattr(flags, option) else []
        words += ["--arch", ",".join(flags.arch)] if flags.arch else []
        if not flags.quiet:
            to_stderr(f"{name}:")
        done = subprocess.run(words, env=os.environ | {"NBCNN_COMPILER": name}, stdout=subprocess.PIPE, text=True)
        if not done.stdout:
            said = f"{name}: its process ended with exit code {done.returncode} and reported nothing; what it said stands above"
            to_stderr(f"nbcnn: error: {said}")
            return max(done.returncode, RUNTIME)
        found[name] = json.loads(done.stdout)
    rows = kernels.beside(found)
    to_stdout(json.dumps(rows) if flags.json else kernels.table_beside(rows, flags.compilers))
    return RUNTIME if any("error" in row[name] or row[name].get("wide") for row in rows for name in flags.compilers) else OK
