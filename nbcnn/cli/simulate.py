"""`python -m nbcnn simulate OP` runs an op's kernels in the simulator's checking mode: what a block did, what memory was asked for, what is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import GPU_MODES, OWN_PRECISION, Parser, flag, one_of
from nbcnn.cli.saying import to_stdout
from nbcnn.files.errors import UsageError
from nbcnn.plan.names import PRECISIONS

EXAMPLES = (
    "python -m nbcnn simulate conv_fprop --shape 1,8,8,8,8",
    "python -m nbcnn simulate conv_fprop --shape 1,8,8,8,8 --mode naive --lines",
    "python -m nbcnn simulate conv_fprop --mode tensorcore --precision bf16",
    "python -m nbcnn simulate maxpool_fprop --shape 2,8,8,8 --json",
)
SHAPES = {
    "product": "64,32,64",
    "conv": "1,8,8,8,8",
    "images": "2,8,8,8",
    "rows": "64,10",
    "series": "2,8,32,8",
    "pointwise": "2,8,32,8",
    "update": "4096",
}
"""A small shape for every kind of op: a simulated thread takes a millionth of what a GPU's does."""


def parser() -> Parser:
    made = Parser(
        "python -m nbcnn simulate",
        "Run one op's kernels without a GPU and without Numba: threads, barriers, requests, bytes, bank conflicts, faults; exit 1 if there are any.",
        EXAMPLES,
        "OP",
    )
    made.add_argument("op", metavar="OP", help="which op, as bench takes it")
    group = made.add_argument_group("op")
    flag(group, "--shape", str, "N,C,H,W,K[,R,S[,stride,pad]]; N,C,H,W; N,F; COUNT", "a small one of the op's kind", metavar="SHAPE")
    group = made.add_argument_group("kernels")
    flag(group, "--mode", one_of(*GPU_MODES), "whose kernels", "im2col")
    flag(group, "--precision", one_of(*PRECISIONS), "what multiplications round to", OWN_PRECISION)
    group = made.add_argument_group("output")
    flag(group, "--lines", bool, "memory requests of every line of the kernels, with its source", "off")
    flag(group, "--json", bool, "print one line of JSON instead of the table", "off")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print; returns 0, or 1 if a kernel has a fault or a result is wrong."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _simulate(flags), without_gpu="this command needs none")


def _simulate(flags: SimpleNamespace) -> int:
    if "nbcnn.gpu.compiler" not in sys.modules:
        os.environ["NBCNN_SIMULATOR"] = "80"  # with tensor cores; which nbcnn.gpu.compiler reads when it is imported, below
    from nbcnn.gpu import compiler

    if not compiler.LOCKSTEP:
        raise UsageError("kernels run on something else in this process: set NBCNN_SIMULATOR=1 before nbcnn is imported")
    from nbcnn.check import gradcheck
    from nbcnn.gpu.lockstep.check import checking
    from nbcnn.lab.measure.op import Choice, bound_of
    from nbcnn.lab.measure.opcases import kind_of, problem

    shape = flags.shape or SHAPES[kind_of(flags.op)]
    choice = Choice(flags.mode or "im2col", flags.precision)
    asked = problem(flags.op, shape)
    made = bound_of(choice, asked)
    with checking() as found:
        made.first.run()
    error, limit = (
        gradcheck.parity(made.row, made.impl, asked.small, made.device, made.first.call.tile),
        gradcheck.bound(asked.small, made.row.precision),
    )
    right = error <= limit
    if flags.json:
        launches = [asdict(launch) for launch in found.launches]
        faults = [asdict(fault) for fault in found.faults]
        to_stdout(json.dumps({"op": flags.op, "shape": shape, "mode": choice.label, "part": made.part, "launches": launches, "faults": faults,
                          "error": error, "bound": limit}))  # fmt: skip
    else:
        to_stdout(f"{flags.op} {shape} by {made.row.mode} {made.row.precision}, part {made.part}")
        for number, launch in enumerate(found.launches, 1):
            to_stdout("\n".join(text(launch, number, flags.lines)))
        for fault in found.faults:
            to_stdout(f"FAULT {_short(fault.line)}: {str(fault)[len(fault.line) + 2 :]}")
        to_stdout(f"\n{len(found.faults)} faults; error {error:.1e}, bound {limit:.1e}{'' if right else ': WRONG'}")
    return OK if right and not found.faults else RUNTIME


def _short(line: str) -> str:
    """file:line from the package on."""
    return line[line.rfind(f"nbcnn{os.sep}") :] if f"nbcnn{os.sep}" in line else line


WHAT = ("global load", "global store", "global atomic", "shared load", "shared store")


def text(launch: Any, number: int, by_line: bool) -> list[str]:
    """A launch in words: its sizes, and a table of what memory is asked for, altogether or by line."""
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    size = "×".join(map(str, launch.grid)), "×".join(map(str, launch.block))
    lines = [
        "",
        f"launch {number}: {launch.kernel}",
        f"  grid {size[0]} = {blocks:,} blocks of {size[1]} = {threads:,} threads ({-(-threads // 32)} warps);"
        f" a block has {launch.shared:,} bytes of shared memory and {launch.barriers} barriers; {launch.shuffles:,} shuffles",
        f"  {'':14}{'requests':>10}{'bytes':>12}{'transactions':>14}{'per request':>13}{'at least':>10}",
    ]
    for what in WHAT:
        found = [launch.total(what, of) for of in ("requests", "bytes", "passes", "least")]
        if found[0]:
            lines.append(_row(what, *found))
        for line in launch.lines if by_line else ():
            if line.what == what:
                lines.append(f"{_row('', line.requests, line.bytes, line.passes, line.least)}  {_short(line.line)}: {_source(line.line)}")
    return lines


def _row(what: str, requests: int, nbytes: int, passes: int, least: int) -> str:
    return f"  {what:14}{requests:>10,}{nbytes:>12,}{passes:>14,}{passes / requests:>13.1f}{least / requests:>10.1f}"


def _source(line: str) -> str:
    import linecache

    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip()
