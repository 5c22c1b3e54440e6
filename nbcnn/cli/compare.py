"""`python -m nbcnn compare A B` compares two modes, engines or tiles of one op: results, times, registers, roofline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace

from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.flags import MODES, Parser, count, flag, real, results_flags, some_of
from nbcnn.cli.saying import to_stdout
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest

EXAMPLES = (
    "python -m nbcnn compare cudacore tensorcore:bf16 --shape conv4@1024",
    "python -m nbcnn compare tensorcore:bf16/wgmma tensorcore:bf16/mma --op conv_wgrad --shape conv2@256",
    "python -m nbcnn compare im2col im2col@64,64,16,4,4,1 --op conv_fprop --shape conv3@256",
    "python -m nbcnn compare naive tiled --op conv_dgrad --cache hot,rotate --json",
)
CHOICE = "MODE[:PRECISION[:ENGINE]][/PART][@TILE]"


def parser() -> Parser:
    made = Parser(
        "python -m nbcnn compare", "Compare two ways to run one op: results, paired times, registers, occupancy, roofline.", EXAMPLES, "A B"
    )
    made.add_argument("a", metavar="A", help=f"{CHOICE}: a mode, or a part of it (an engine), or a tile by its numbers")
    made.add_argument("b", metavar="B", help="the other one")
    group = made.add_argument_group("op")
    flag(group, "--op", str, "which op", "conv_fprop", metavar="OP")
    flag(group, "--shape", str, "N,C,H,W,K[,R,S[,stride,pad]] or conv4@1024; N,C,H,W; N,F; COUNT", "256 images of conv2", metavar="SHAPE")
    group = made.add_argument_group("timing")
    flag(group, "--cache", some_of("cold", "hot", "rotate"), "where operands are when a call begins", "rotate")
    flag(group, "--iters", count(1), "calls between two events (on a GPU as one captured graph)", 100)
    flag(group, "--seconds", real(0.0, exclusive=True), "time limit of one figure", 3, "seconds")
    group = made.add_argument_group("output")
    results_flags(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns 0. Exit 4 without a GPU, unless both run on the CPU."""
    flags = parser().parse_args(argv)
    without = "python -m nbcnn compare cpu cpu works; python -m nbcnn bench OP --mode cpu times the NumPy path"
    return guarded(lambda: _compare(flags), without_gpu=without)


def _compare(flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import compare, results
    from nbcnn.lab.measure.clocks import Watch
    from nbcnn.lab.measure.op import Choice
    from nbcnn.lab.measure.opcases import problem

    a, b = Choice.parse(flags.a), Choice.parse(flags.b)
    for choice in (a, b):
        # Before the GPU is asked for: a mistyped mode should not be told that there is none.
        if choice.mode not in MODES:
            raise UsageError(f"no mode {quoted(choice.mode)} (there are {', '.join(MODES)}){nearest(choice.mode, MODES)}")
    op = flags.op or "conv_fprop"
    caches, calls, cap = flags.cache or ("rotate",), flags.iters or 100, flags.seconds or 3.0
    device = "CPU" if {a.mode, b.mode} == {"cpu"} else Gpu().device_name
    if flags.save:
        results.opened(device, flags.results)
    found = compare.compare(a, b, problem(op, flags.shape), Watch, caches=caches, iterations=calls, cap=cap)
    to_stdout(json.dumps(found) if flags.json else "\n".join(compare.text(found)))
    if flags.save:
        results.save(f"compare-{op}-{flags.shape or 'default'}-{a.label}-{b.label}", [found], device, flags.results)
    return OK
