"""`python -m nbcnn ladder` times every mode on this machine, whole training step and passes, as table, chart and JSON; or the ladder for Hopper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import Parser, compare_flag, count, flag, results_flags
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files.errors import UsageError

EXAMPLES = (
    "python -m nbcnn ladder",
    "python -m nbcnn ladder --batch 1 --json",
    "python -m nbcnn ladder --save --chart nbcnn/lab/results/ladder.png",
    "python -m nbcnn ladder --compare nbcnn/lab/results/nvidia-h200.json",
    "python -m nbcnn ladder --hopper --save",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn ladder", "Climb from the NumPy path to the fastest kernels on this machine.", EXAMPLES)
    group = made.add_argument_group("model")
    flag(group, "--batch", count(1), "images per training step", "256, with --hopper 1024", "images")
    flag(group, "--hopper", bool, "one convolution instead, in six kernels from im2col to TMA, wgmma and warp roles (docs/hopper-ladder.md)", "off")
    group = made.add_argument_group("output")
    flag(group, "--chart", paths.WRITES_TEXT, "write the chart to this PNG file", "none", metavar="FILE")
    results_flags(group)
    compare_flag(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 if no rung could be measured or --compare finds something slower. --hopper exits 4 without such a GPU."""
    flags = parser().parse_args(argv)
    if flags.hopper:
        return guarded(lambda: _hopper(flags), without_gpu="python -m nbcnn ladder --batch 1 climbs what this machine has, from the NumPy path up")
    return guarded(lambda: _climb(flags))


def _hopper(flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import regressions, results
    from nbcnn.lab.studies import hopper

    if flags.chart:
        raise UsageError("--chart belongs to the ladder of modes: --hopper draws none")
    batch = flags.batch or 1024
    device, section = Gpu().device_name, f"hopper-{batch}"
    before = regressions.baseline(flags, section, device)
    with results.keeping(section, device, flags.results, wanted=bool(flags.save)) as rows:
        rows += hopper.climb(batch, to_stderr)
        to_stdout(json.dumps(rows) if flags.json else hopper.table(rows))
    return RUNTIME if before is not None and before.regressed(rows, flags) else OK


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
