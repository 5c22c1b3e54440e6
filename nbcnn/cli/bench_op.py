"""This module is `bench OP`, `bench selftest` and `bench warmup`: it measures rows and formats them as lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli.saying import to_stderr

Rows = tuple[list[dict[str, Any]], list[str]]
CACHES = ("cold", "hot", "rotate")
UNKNOWN = 0.03
"""A median whose 95 % interval is wider than this part of it is shown with the interval."""
ITERATIONS = (1, 10, 100, 1000)
HEAD = (
    *("variant", "cache", "calls", "min µs", "p5", "median", "p95", "max", "mean", "CV %", "n"),
    *("GB/s", "TFLOP/s", "% roof", "MHz", "°C", "× first", ""),
)


def choices(flags: SimpleNamespace) -> list[Any]:
    """The variants that --mode, --precision and --engine name: every mode with every precision that it has."""
    from nbcnn.lab.measure.op import Choice
    from nbcnn.modes import MODES

    made = []
    for mode in flags.modes or ("cudacore",):
        has = [precision for known, precision in MODES if known == mode]
        wanted = [precision for precision in flags.precisions or (None,) if precision in has or precision is None]
        # A mode that has none of the precisions asked for is refused by choose_mode, in words.
        made += [Choice(mode, precision, flags.engine or "auto") for precision in wanted or flags.precisions]
    return made


def op(flags: SimpleNamespace) -> Rows:
    """Verify the op in every mode asked for, then time them in turn in every cache mode and number of calls."""
    from nbcnn.lab.measure import dram, opcases
    from nbcnn.lab.measure import op as bench
    from nbcnn.lab.measure.clocks import Watch
    from nbcnn.lab.peers import ops as peers_ops

    problem = opcases.problem(flags.what, flags.shape)
    wanted = choices(flags)
    caches = flags.cache or CACHES
    prepared = []
    for choice in wanted:
        prepared.append(bench.prepare(choice, problem, rotate="rotate" in caches))
        made = prepared[-1]
        to_stderr(f"{choice.label}: error {made.error:.1e} (bound {made.limit:.1e}), runs as {made.part}")
    if len({each.row.device for each in prepared}) > 1 and flags.graph:
        to_stderr("a host captures no graph: --graph counts for the GPU's variants only")
    beside = peers_ops.works(prepared[0], problem) if flags.peer == "torch" and prepared[0].device.name == "gpu" else None
    if flags.peer == "torch" and beside is None:
        to_stderr(f"PyTorch has no {flags.what} of its own that could be timed beside {wanted[0].label}")
    rows = []
    with Watch(next((each.device for each in prepared if each.device.name == "gpu"), prepared[0].device)) as watch:
        how: dict[str, Any] = {"caches": caches, "iterations": flags.iters or ITERATIONS, "graphs": (False, True) if flags.graph else (False,)}
        how |= {"warmup": None if flags.warmup == "auto" else flags.warmup, "cap": flags.seconds or 3.0}
        for row in bench.study(prepared, watch, peers=beside, **how):
            rows.append({**row, "clock_source": watch.source})
            to_stderr(f"{row['variant']} {row['cache']} {row['iterations']}{' graph' if row['graph'] else ''}")
    lines = op_lines(rows)
    for choice, made in zip(wanted, prepared, strict=True) if flags.ncu else ():
        found = dram.table_rows(choice.label, flags.what, flags.shape or "", to_stderr)
        of = dram.model(made.step)
        rows += [{"variant": choice.label, "op": flags.what, "model": of, **row} for row in found]
        lines += ["", f"{choice.label}: DRAM bytes as ncu counts them", *dram.table(found, of)] if found else []
    return rows, lines


def op_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a table, what each column means where it is not plain, and the headline."""
    from nbcnn.lab.measure.roofline import aligned

    lines = [line.rstrip() for line in aligned([HEAD, *(_cells(row) for row in rows)], range(2))]
    lines.append(
        "GB/s: of compulsory bytes, every operand once. % roof: of the datasheet's roofline for them. × first: time over the first variant's."
    )
    if any(row["graph"] for row in rows):
        lines.append("calls with a g: replayed as one captured CUDA graph.")
    if rows[0]["clock_source"] is None:
        lines.append("the GPU's clock cannot be read here (no NVML, no nvidia-smi): steady means that times stand still")
    quoted = [row for row in rows if (row["cache"], row["iterations"]) == ("rotate", 100)]
    lines += [f"headline: {row['variant']}{_graph(row)} {row['ms']['median'] * 1e3:.2f} µs per call (rotate, 100 calls)" for row in quoted]
    return lines


def _graph(row: dict[str, Any]) -> str:
    return " in a graph" if row["graph"] else ""


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ms = row["ms"]
    times = tuple(f"{ms[name] * 1e3:.2f}" for name in ("least", "p5", "median", "p95", "most", "mean"))
    rates = (
        f"{row['gbytes_per_second']:.0f}",
        f"{row['tflops']:.1f}" if row["tflops"] else "",
        f"{row['roofline'] * 100:.0f}" if row["roofline"] else "",
    )
    gpu = tuple("" if row[name] is None else f"{row[name]:.0f}" for name in ("sm_mhz", "temperature"))
    versus = row.get("times_the_first")
    ratio = f"{versus['ratio']:.3f} [{versus['low']:.3f}, {versus['high']:.3f}]" if versus else ""
    notes = [*(row["throttles"]), *([] if row["steady"] else ["not steady"]), *([f"{row['discarded']} sets discarded"] if row["discarded"] else [])]
    low, high = row["median_interval"]
    if high - low > UNKNOWN * ms["median"]:
        notes.append(f"median between {low * 1e3:.1f} and {high * 1e3:.1f}")
    if row["other_processes"]:
        notes.append(f"{row['other_processes']} other processes on the GPU")
    if not row["graph"] and row["sm_mhz"] is not None and row["host_ms"] > 0.8 * ms["median"]:
        notes.append("launching takes as long")
    calls = f"{row['iterations']}{'g' if row['graph'] else ''}"
    return (row["variant"], row["cache"], calls, *times, f"{ms['cv'] * 100:.1f}", str(ms["count"]), *rates, *gpu, ratio, ", ".join(notes))


def selftest(flags: SimpleNamespace) -> Rows:
    """Measure quantities whose values are known beforehand, and the ceilings of the GPU."""
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import ceilings
    from nbcnn.lab.measure import selftest as known
    from nbcnn.run.peaks import peaks_of

    device, rows = Gpu(), []
    for row in known.checks(device):
        rows.append(row)
        to_stderr(known.text([row]))
    peaks = peaks_of(device)
    for name, rate in ceilings.measure(device).items():
        sheet = (peaks.bandwidth if name == "copy" else peaks.flops[name]) if peaks else None
        wanted = f"datasheet {sheet / 1e12:.1f}" if sheet else ""
        unit = "TB/s" if name == "copy" else "TF/s"
        rows.append({"what": f"ceiling {name}", "value": rate / 1e12, "unit": unit, "wanted": wanted, "ok": None})
    failed = [row["what"] for row in rows if row["ok"] is False]
    lines = known.text(rows).splitlines() + (["", f"{len(failed)} failed: {', '.join(failed)}"] if failed else [])
    return rows, lines


def _say(words: str) -> None:
    to_stderr(words)


def _studied(flags: SimpleNamespace) -> tuple[str, str, float]:
    """The op, its shape and the seconds of cooling down of the warm-up study."""
    return flags.op or "conv_fprop", flags.shape or "conv4@64", 5.0 if flags.sleep is None else flags.sleep


def first_calls(flags: SimpleNamespace) -> dict[str, Any] | None:
    """Run the part of the warm-up study that needs fresh processes, before this process opens the GPU; None without a GPU."""
    from nbcnn.gpu.compiler import SIMULATOR
    from nbcnn.gpu.driver import visible
    from nbcnn.lab.measure import fresh

    choice = choices(flags)[0]
    if choice.mode != "cpu" and not SIMULATOR and not visible():
        return None
    return fresh.study(choice.label, *_studied(flags), _say)


def warmup(flags: SimpleNamespace) -> Rows:
    """The warm-up study of one op: tables, answer, and a picture if --chart names a file."""
    from nbcnn.lab.studies import warmup as bench
    from nbcnn.lab.studies import warmup_report as report

    op, shape, sleep = _studied(flags)
    found = bench.study(choices(flags)[0], op, shape, sleep=sleep, ncu=bool(flags.ncu), fresh=flags.fresh, peer=flags.peer == "torch", say=_say)
    if flags.chart:
        report.chart(found, Path(flags.chart))
    return [found], report.text(found)
