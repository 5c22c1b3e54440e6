"""`python -m nbcnn study dwconv`: depthwise convolution by bytes, intensity and ceilings; with times where there is a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from nbcnn.cli.errors import guarded
from nbcnn.cli.flags import DWCONV, Parser, flag, one_of, real, some_of

EXAMPLES = (
    "python -m nbcnn study dwconv                                      every variant at four sizes",
    "python -m nbcnn study dwconv --shapes 512x128x48x48 --variants naive,best",
    "python -m nbcnn study dwconv --no-times --tflops 15.6 --tbs 1.5   another GPU, by its ceilings",
)
TFLOPS, TBS = 67.0, 4.3
"""An H200: fp32 at its highest clock, and the bandwidth of a large copy."""


def shapes(text: str) -> tuple[tuple[int, ...], ...]:
    """A converter to (N, C, L, T) of each of `NxCxLxT`, with commas between them."""
    made = []
    for part in text.split(","):
        sizes = part.strip().split("x")
        if len(sizes) != 4 or not all(size.isdigit() and int(size) for size in sizes):
            raise argparse.ArgumentTypeError(f"{part!r} is not N x C x L x T, as in 512x128x48x48")
        made.append(tuple(map(int, sizes)))
    return tuple(made)


shapes.metavar = "NxCxLxT,…"  # type: ignore[attr-defined]


def parser() -> Parser:
    made = Parser("python -m nbcnn study", "What limits the variants of an op, without hardware counters.", EXAMPLES, "dwconv")
    made.add_argument("what", metavar="dwconv", type=one_of("dwconv"), help="depthwise convolution of series, after arXiv:2604.25422")
    group = made.add_argument_group("study")
    flag(group, "--shapes", shapes, "series, channels, length and taps", "the paper's size and three others")
    flag(group, "--variants", some_of(*DWCONV), "which kernels", ",".join(DWCONV))
    flag(group, "--padding", one_of("causal", "same"), "where the taps lie", "causal")
    flag(group, "--share", real(0, below=1), "part of a training step that naive's three paths take, for the prediction of the whole's gain", 0.32)
    flag(group, "--tflops", real(0, exclusive=True), "peak of fp32", TFLOPS, "TFLOP/s")
    flag(group, "--tbs", real(0, exclusive=True), "memory's bandwidth", TBS, "TB/s")
    flag(group, "--no-times", bool, "model only, though there is a GPU", "off")
    group = made.add_argument_group("output")
    flag(group, "--json", bool, "print one line of JSON instead of the tables", "off")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the study; returns 0."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _study(flags))


def _study(flags: SimpleNamespace) -> int:
    from nbcnn.bench import dwconv
    from nbcnn.cuda import SIMULATOR, Gpu, gpu_missing

    ceiling = dwconv.Ceiling((flags.tflops or TFLOPS) * 1e12, (flags.tbs or TBS) * 1e12)
    missing = "--no-times" if flags.no_times else "the simulator's times mean nothing" if SIMULATOR else gpu_missing()
    place = None if missing else Gpu()
    chosen: Any = flags.shapes or dwconv.SHAPES
    rows = list(dwconv.study(chosen, flags.variants or DWCONV, flags.padding or "causal", ceiling, place))
    share = 0.32 if flags.share is None else flags.share
    found = dwconv.gains(rows, share)
    if flags.json:
        print(json.dumps({"rows": rows, "gains": found, "share": share, "peak": ceiling.peak, "bandwidth": ceiling.bandwidth}))
        return 0
    print(f"ceilings: {ceiling.peak / 1e12:g} TFLOP/s, {ceiling.bandwidth / 1e12:g} TB/s; memory limits below {ceiling.ridge:.1f} flop/B")
    print(f"times: {place.device_name if place else f'none ({missing}); modelled ms take every logical byte from memory'}")
    for shape in chosen:
        print("\n" + "\n".join(table([row for row in rows if tuple(row["shape"]) == shape])))
        print("\n".join(_gain(row, share) for row in found if tuple(row["shape"]) == shape))
    return 0


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of one shape: bytes in MB, intensities in flop/B, times in ms."""
    if not rows:
        return ["no variant takes this shape"]
    n, c, length, taps = rows[0]["shape"]
    columns = [("variant", "variant"), ("path", "path"), ("MB read", "read"), ("written", "written"), ("compulsory", "compulsory")]
    columns += [("flop/B", "intensity_logical"), ("of compulsory", "intensity_compulsory"), ("TFLOP/s att.", "attainable_tflops")]
    columns += [("floor ms", "floor_ms"), ("modelled ms", "modelled_ms")]
    if "ms" in rows[0]:
        columns += [("ms", "ms"), ("TB/s logical", "logical_tbs"), ("effective", "effective_tbs"), ("of attainable", "of_attainable")]
    columns.append(("limiter", "limiter"))
    cells = [[title for title, _ in columns], *([_cell(name, row[name]) for _, name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))) for line in cells]
    return [f"N {n:,}, C {c}, L {length:,}, T {taps}: {rows[0]['flop'] / 1e9:.2f} GFLOP a path", *lines]


def _cell(name: str, value: Any) -> str:
    if name in ("read", "written", "compulsory"):
        return f"{value / 1e6:,.1f}"
    if isinstance(value, str):
        return value
    return f"{value:.0%}" if name == "of_attainable" else f"{value:.3f}" if name.endswith("ms") else f"{value:.2f}"


def _gain(row: dict[str, Any], share: float) -> str:
    what = "measured" if row["by"] == "ms" else "modelled"
    speed = f"{row['trio_ms']:.3f} ms {what}, {row['speedup']:.2f} times naive"
    return f"{row['variant']:10} three paths {speed}; the whole {row['predicted_gain']:.2f} times (Amdahl, {share:.0%} of it naive)"
