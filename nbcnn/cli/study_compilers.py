"""`study compilers` runs kernels and whole training steps as both compilers make them: times in turn, ratios, and whether the bits are the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace

from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import Parser, count, flag, results_flags
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted

EXAMPLES = (
    "python -m nbcnn study compilers --save",
    "python -m nbcnn study compilers --parts 'tensorcore bf16' --rounds 5",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn study compilers", "Kernels and training steps by numba-cuda and by numba-cuda-mlir.", EXAMPLES)
    group = made.add_argument_group("study")
    flag(group, "--parts", str, "only parts in whose name this stands: hopper, step, 'step naive', 'bf16 1024', …", "every part", metavar="TEXT")
    flag(group, "--rounds", count(1), "turns of each compiler for a part", 3)
    results_flags(made.add_argument_group("output"))
    return made


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns 0, or 1 if a part fails under a compiler. Exit 4 without a GPU, or without one of the compilers."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags), without_gpu="python -m nbcnn kernels --compilers numba,mlir compiles by both, and compares registers")


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn.cli.env import version
    from nbcnn.files import extras
    from nbcnn.gpu import kernel_store
    from nbcnn.gpu.compiler import COMPILERS
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.studies import compilers, kernel_ladders

    def say(text: str) -> None:
        to_stderr(text)

    parts = [part for part in compilers.PARTS if (flags.parts or "") in part]
    if not parts:
        raise UsageError(f"no part has {quoted(flags.parts)} in its name; the parts are {', '.join(compilers.PARTS)}")
    gpu = Gpu()
    for name, package in COMPILERS.items():
        if version(package) is None and kernel_store.precompiled() is None:
            extra = {"numba": "cu13", "mlir": "mlir"}[name]
            raise extras.PackageMissing(f"{package} is not installed, and there is no package of precompiled kernels: {extras.line(extra)}")
    if gpu.capability != kernel_ladders.HOPPER.exactly:
        parts = [part for part in parts if part not in compilers.HOPPER]
        say("the ladder for Hopper is left out: it needs compute capability 9.0")
    with results.keeping("compilers", gpu.device_name, flags.results, wanted=bool(flags.save)) as rows:
        for row in compilers.measure(parts, flags.rounds or 3, say):
            rows.append(row)
        if rows:
            to_stdout(json.dumps(rows) if flags.json else compilers.table(rows))
    return RUNTIME if not rows or compilers.failures(rows) else OK
