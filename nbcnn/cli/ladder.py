"""`python -m nbcnn ladder`: every mode of this machine, whole training step and passes, as table, chart and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from nbcnn.cli.errors import guarded
from nbcnn.cli.flags import Parser, count, flag, results_flags

EXAMPLES = (
    "python -m nbcnn ladder",
    "python -m nbcnn ladder --batch 1 --json",
    "python -m nbcnn ladder --save --chart nbcnn/bench/results/ladder.png",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn ladder", "Climb from the NumPy path to the fastest kernels on this machine.", EXAMPLES)
    group = made.add_argument_group("model")
    flag(group, "--batch", count(1), "images per training step", 256, "images")
    group = made.add_argument_group("output")
    flag(group, "--chart", str, "write the chart to this PNG file", "none", metavar="FILE")
    results_flags(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 if no rung could be measured."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _climb(flags))


def _climb(flags: SimpleNamespace) -> int:
    from nbcnn.bench import ladder, results

    batch = flags.batch or 256
    rows = list(ladder.climb(batch, lambda text: print(text, file=sys.stderr, flush=True)))
    if not rows:
        return 1
    device = rows[-1]["device"]
    if flags.save:
        results.save(f"ladder-{batch}", rows, device, Path(flags.results) if flags.results else None)
    if flags.chart:
        ladder.chart(rows, Path(flags.chart), f"{device.split('(')[0].strip()}, batch {batch}")
    print(json.dumps(rows) if flags.json else ladder.table(rows))
    return 0
