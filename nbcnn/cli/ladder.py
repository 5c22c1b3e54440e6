"""`python -m nbcnn ladder` times every mode on this machine, whole training step and passes, as table, chart and JSON; or a ladder of kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import Parser, compare_flag, count, flag, real, results_flags
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files.errors import UsageError

EXAMPLES = (
    "python -m nbcnn ladder",
    "python -m nbcnn ladder --batch 1 --json",
    "python -m nbcnn ladder --save --chart ladder.png",
    "python -m nbcnn ladder --compare nbcnn/lab/results/nvidia-h200.json",
    "python -m nbcnn ladder --cuda-cores --save",
    "python -m nbcnn ladder --hopper --save",
    "python -m nbcnn ladder --phases --save",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn ladder", "Climb from the NumPy path to the fastest kernels on this machine.", EXAMPLES)
    group = made.add_argument_group("model")
    flag(group, "--batch", count(1), "images per training step", "256, with --hopper 1024, with --phases 64", "images")
    flag(
        group,
        "--cuda-cores",
        bool,
        "one convolution and one sum instead, each in a few short kernels, from one thread per result (docs/ladder.md)",
        "off",
    )
    flag(group, "--hopper", bool, "one convolution instead, in six kernels from im2col to TMA, wgmma and warp roles (docs/hopper-ladder.md)", "off")
    flag(
        group,
        "--phases",
        bool,
        "train in every phase instead, from serial loops up: seconds of an epoch, of a training, memory (docs/ladder.md)",
        "off",
    )
    flag(group, "--seconds", real(0.0, exclusive=True), "how long a phase trains at most, with --phases", 5, "seconds")
    group = made.add_argument_group("output")
    flag(group, "--chart", paths.WRITES_TEXT, "write the chart to this PNG file", "none", metavar="FILE")
    results_flags(group)
    compare_flag(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 if no rung could be measured or --compare finds something slower. --hopper exits 4 without such a GPU."""
    flags = parser().parse_args(argv)
    names = ("hopper",) if flags.hopper else ("climb", "sums") if flags.cuda_cores else ()
    if flags.phases:
        return guarded(lambda: _phases(names, flags))
    if names:
        return guarded(
            lambda: _kernels(names, flags), without_gpu="python -m nbcnn ladder --batch 1 climbs what this machine has, from the NumPy path up"
        )
    return guarded(lambda: _climb(flags))


def _kernels(names: Sequence[str], flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import regressions, results
    from nbcnn.lab.studies.kernel_ladders import LADDERS, climb, table

    if flags.hopper and flags.cuda_cores:
        raise UsageError("--hopper and --cuda-cores are two ladders: give one of them")
    if flags.chart:
        raise UsageError("--chart belongs to the ladder of modes: those of kernels draw none")
    device, slower, made = Gpu().device_name, False, []
    for ladder in (LADDERS[name] for name in names):
        batch = flags.batch or ladder.batch
        section = f"{ladder.name}-{batch}"
        before = regressions.baseline(flags, section, device)
        with results.keeping(section, device, flags.results, wanted=bool(flags.save)) as rows:
            rows += climb(ladder, batch, to_stderr)
            if not flags.json:
                to_stdout(table(rows))
        made += rows
        slower |= before is not None and before.regressed(rows, flags)
    if flags.json:
        to_stdout(json.dumps(made))
    return RUNTIME if slower else OK


def _phases(others: Sequence[str], flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu, gpu_missing
    from nbcnn.lab.measure import regressions, results
    from nbcnn.lab.studies import phases

    if others or flags.chart:
        raise UsageError("--phases is a ladder of its own, and docs draw it: leave --chart, --hopper and --cuda-cores out")
    batch, device = flags.batch or phases.BATCH, "CPU" if gpu_missing() else Gpu().device_name
    section = f"phases-{batch}"
    before = regressions.baseline(flags, section, device)
    with results.keeping(section, device, flags.results, wanted=bool(flags.save)) as rows:
        for row in phases.climb(to_stderr, batch, seconds=flags.seconds or phases.SECONDS):
            rows.append(row)
        if rows:
            to_stdout(json.dumps(rows) if flags.json else phases.table(rows))
    return RUNTIME if not rows or (before is not None and before.regressed(rows, flags)) else OK


def _climb(flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu, gpu_missing
    from nbcnn.lab.measure import regressions, results
    from nbcnn.lab.studies import ladder

    batch = flags.batch or 256
    device, section = "CPU" if gpu_missing() else Gpu().device_name, f"ladder-{batch}"
    before = regressions.baseline(flags, section, device)
    with results.keeping(section, device, flags.results, wanted=bool(flags.save)) as rows:
        for row in ladder.climb(batch, to_stderr):
            rows.append(row)
        if rows:
            to_stdout(json.dumps(rows) if flags.json else ladder.table(rows))
    if not rows:
        return RUNTIME
    if flags.chart:
        ladder.chart(rows, Path(flags.chart), f"{device.split('(')[0].strip()}, batch {batch}")
    return RUNTIME if before is not None and before.regressed(rows, flags) else OK
