"""`python -m nbcnn study dwconv` studies depthwise convolution by bytes, intensity and ceilings, and by times where there is a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import guarded
from nbcnn.cli.flags import GPU_MODES, OWN_PRECISION, Parser, count, flag, one_of, real, results_flags, some_of
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files import numerals
from nbcnn.files.quote import quoted
from nbcnn.plan.names import DWCONV, PRECISIONS

EXAMPLES = (
    "python -m nbcnn study dwconv                                      every variant at four sizes, and the step of S4ConvD",
    "python -m nbcnn study dwconv --shapes 512x128x48x48 --variants naive,best --no-step --chart dwconv.svg",
    "python -m nbcnn study dwconv --no-times --tflops 15.6 --tbs 1.5   another GPU, by its ceilings",
    "python -m nbcnn study dwconv --ncu                                the model's bytes beside DRAM's",
)
TFLOPS, TBS = 67.0, 4.3
"""An H200: fp32 at its highest clock, and the bandwidth of a large copy. With times both are measured."""
BATCH = 16384


def shapes(text: str) -> tuple[tuple[int, ...], ...]:
    """A converter to (N, C, L, T) of each of `NxCxLxT`, with commas between them."""
    made = []
    for part in text.split(","):
        try:
            images, channels, length, taps = numerals.sizes(part, "x")
        except ValueError:
            raise argparse.ArgumentTypeError(f"{quoted(part)} is not N x C x L x T, as in 512x128x48x48") from None
        made.append((images, channels, length, taps))
    return tuple(made)


shapes.metavar = "NxCxLxT,…"  # type: ignore[attr-defined]


def parser() -> Parser:
    made = Parser("python -m nbcnn study dwconv", "What limits depthwise convolution of series, without hardware counters.", EXAMPLES)
    group = made.add_argument_group("study")
    flag(group, "--shapes", shapes, "series, channels, length and taps", "the paper's size and three others")
    flag(group, "--variants", some_of(*DWCONV), "which kernels", ",".join(DWCONV))
    flag(group, "--padding", one_of("causal", "same"), "where the taps lie", "causal")
    flag(group, "--share", real(0, below=1), "part of a training step that naive's three paths take, for the prediction of the whole's gain", 0.32)
    flag(group, "--tflops", real(0, exclusive=True), "peak of fp32", f"measured, else {TFLOPS:g}", "TFLOP/s")
    flag(group, "--tbs", real(0, exclusive=True), "memory's bandwidth", f"that of a copy, measured, else {TBS:g}", "TB/s")
    flag(group, "--no-times", bool, "model only, though there is a GPU", "off")
    flag(group, "--ncu", bool, "count the DRAM bytes of every kernel at the first shape with NVIDIA's ncu, instead of timing", "off")
    flag(group, "--peer", one_of("torch", "none"), "PyTorch's forms in the same turns", "torch")
    group = made.add_argument_group("the whole step of S4ConvD")
    flag(group, "--no-step", bool, "only the convolutions alone", "off")
    flag(group, "--batch", count(1), "windows of the training step", BATCH, "windows")
    flag(group, "--mode", one_of(*GPU_MODES), "how its other layers are computed", "cudacore")
    flag(group, "--precision", one_of(*PRECISIONS), "what their multiplications round to", OWN_PRECISION)
    group = made.add_argument_group("output")
    flag(group, "--chart", paths.WRITES_TEXT, "draw the first shape's times and roofline into this PNG or SVG file", "none", metavar="FILE")
    results_flags(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the study; returns 0. Exit 4 for --ncu without a GPU."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _study(flags), without_gpu="python -m nbcnn study dwconv, which models the bytes")


def _study(flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu, gpu_missing
    from nbcnn.gpu.language import SIMULATOR
    from nbcnn.lab.measure import results
    from nbcnn.lab.studies import dwconv

    flags.shapes, flags.variants = flags.shapes or dwconv.SHAPES, flags.variants or DWCONV
    flags.padding, flags.batch = flags.padding or "causal", flags.batch or BATCH
    flags.share = 0.32 if flags.share is None else flags.share
    if flags.ncu:
        return _counted(flags)
    missing = "--no-times" if flags.no_times else "the simulator's times mean nothing" if SIMULATOR else gpu_missing()
    if missing:
        found = _modelled(flags, dwconv)
        assumed = {"--tflops": flags.tflops or TFLOPS, "--tbs": flags.tbs or TBS}
        whose = "as given" if flags.tflops and flags.tbs else "an H200's where no flag says otherwise: --tflops, --tbs"
        ceilings = f"ceilings assumed: {assumed['--tflops']:g} TFLOP/s, {assumed['--tbs']:g} TB/s ({whose})"
        _show(flags, found, f"none ({missing}); {ceilings}; modelled ms take every logical byte from memory")
        _json(flags, found, [])
        return 0
    device = Gpu()
    if flags.save:
        results.opened(device.device_name, flags.results)
    found = _sizes(flags, device)
    _show(flags, found, device.device_name)
    if flags.save:
        results.save(f"dwconv-{flags.padding}", found, device.device_name, flags.results)

    def keep(steps: list[dict[str, Any]]) -> None:
        if flags.save:
            named = [steps[0]["mode"], *([steps[0]["precision"]] if steps[0]["mode"] == "tensorcore" else []), str(flags.batch)]
            results.save("-".join(["s4convd", *named]), steps, device.device_name, flags.results)

    steps = [] if flags.no_step else _steps(flags, found, keep)
    _json(flags, found, steps)
    return 0


def _ceiling(flags: SimpleNamespace, measured: dict[str, float]) -> Any:
    from nbcnn.lab.studies.dwconv import Ceiling

    peak = flags.tflops * 1e12 if flags.tflops else measured.get("fp32", TFLOPS * 1e12)
    return Ceiling(peak, flags.tbs * 1e12 if flags.tbs else measured.get("copy", TBS * 1e12))


def _modelled(flags: SimpleNamespace, dwconv: Any) -> list[dict[str, Any]]:
    ceiling = _ceiling(flags, {})
    return [
        {
            "shape": list(shape),
            "padding": flags.padding,
            "peak": ceiling.peak,
            "bandwidth": ceiling.bandwidth,
            "rows": list(dwconv.models(shape, flags.variants, flags.padding, ceiling)),
        }
        for shape in flags.shapes
    ]


def _torch(flags: SimpleNamespace) -> bool:
    """True if PyTorch is wanted and there; says so if it is missing."""
    from nbcnn.lab.peers import torch_step as peers

    there = flags.peer != "none" and peers.available()
    if flags.peer != "none" and not there:
        _say(peers.MISSING)
    return there


def _sizes(flags: SimpleNamespace, device: Any) -> list[dict[str, Any]]:
    """Verify and time every size."""
    from nbcnn.lab.measure import ceilings
    from nbcnn.lab.peers import dwconv as dwconv_peers
    from nbcnn.lab.studies import dwconv_times

    works = dwconv_peers.works if _torch(flags) else None
    _say(f"{dwconv_times.compile_sizes(flags.shapes, flags.variants, flags.padding, device)} kernels compiled")
    _say("measuring what this GPU can do …")
    ceiling = _ceiling(flags, ceilings.measure(device, ("fp32", "copy")))
    found = []
    for shape in flags.shapes:
        _say(f"{'×'.join(map(str, shape))}: verifying and timing {', '.join(flags.variants)}, {', '.join(dwconv_times.SLOW)} less often …")
        found.append(dwconv_times.measure(shape, flags.variants, flags.padding, ceiling, device, works))
    return found


def _steps(flags: SimpleNamespace, found: list[dict[str, Any]], keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """The training step of S4ConvD with every variant; Amdahl's prediction needs the times of its convolutions alone."""
    from nbcnn.lab.peers import forecast as forecast_peers
    from nbcnn.lab.studies import dwconv, dwconv_report, forecast_step
    from nbcnn.run.rows import choose_mode

    shape = forecast_step.shape_of(flags.batch)
    alone = [row for size in found if tuple(size["shape"]) == shape and flags.padding == "causal" for row in size["rows"]]
    trios = {row["variant"]: row["trio_ms"] for row in dwconv.gains(alone, flags.share)}
    if not trios:
        _say(f"no prediction: --shapes has no {'x'.join(map(str, shape))}, the step's own convolutions, with naive among the variants")
    options = {"mode": flags.mode or "cudacore", "precision": flags.precision}
    precision = choose_mode(**options).row.precision
    forms = forecast_peers.FORMS if _torch(flags) else ()
    if forms and precision not in forecast_peers.TOLERANCE:
        _say(f"the step beside PyTorch's is in {' or '.join(forecast_peers.TOLERANCE)}, this one is in {precision}: it is timed alone")
        forms = ()
    steps = forecast_step.measure(flags.batch, flags.variants, trios, say=_say, keep=keep, forms=forms, **options)
    if not flags.json:
        to_stdout("\n" + "\n".join(dwconv_report.step_table(steps)))
    return steps


def _counted(flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.studies import dwconv_counters

    device = Gpu()
    shape = flags.shapes[0]
    _say(f"{'×'.join(map(str, shape))}: counting with ncu …")
    rows = dwconv_counters.count(shape, flags.variants, flags.padding, device.target)
    if flags.save:
        results.save(f"dwcounters-{flags.padding}", [{"shape": list(shape), "kernels": rows}], device.device_name, flags.results)
    to_stdout(json.dumps(rows) if flags.json else "\n".join(dwconv_counters.table(rows)))
    return 0


def _show(flags: SimpleNamespace, found: list[dict[str, Any]], times: str) -> None:
    """The chart, and the tables unless JSON is wanted."""
    from nbcnn.lab.studies import dwconv, dwconv_report

    if flags.chart:
        n, c, length, taps = found[0]["shape"]
        dwconv_report.chart(found[0], Path(flags.chart), f"depthwise convolution, N {n:,}, C {c}, L {length:,}, T {taps}, {flags.padding}")
    if flags.json:
        return
    ceiling = dwconv.Ceiling(found[0]["peak"], found[0]["bandwidth"])
    to_stdout(f"ceilings: {ceiling.peak / 1e12:.3g} TFLOP/s, {ceiling.bandwidth / 1e12:.3g} TB/s; memory limits below {ceiling.ridge:.1f} flop/B")
    to_stdout(f"times: {times}")
    for each in found:
        to_stdout("\n" + "\n".join(dwconv_report.tables(each, flags.share)))


def _json(flags: SimpleNamespace, found: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """Print one line of JSON if --json asks for it."""
    from nbcnn.lab.studies.dwconv import gains

    if flags.json:
        made = [row for each in found for row in gains(each["rows"], flags.share)]
        to_stdout(json.dumps({"sizes": found, "gains": made, "share": flags.share, "steps": steps}))


def _say(text: str) -> None:
    to_stderr(text)
