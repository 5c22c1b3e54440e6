"""This module makes the report's sections of a device's results: ladder, roofline, where the time goes, and everything beside its peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbcnn.lab.report import page, sections, svg
from nbcnn.lab.report.source import Missing, Source
from nbcnn.lab.report.svg import Dot, Series
from nbcnn.lab.report.tables import joined
from nbcnn.lab.report.titles import titled
from nbcnn.lab.studies import warmup_costs

Parts = Iterator[str | Missing]
COLOURS = {"compute": 1, "memory": 2}


def ladder(source: Source) -> Parts:
    """Every mode of the machine, from NumPy up."""
    for name, rows, where in source.sections("ladder"):
        yield page.heading(titled(name, rows))
        bars = [(_mode(row), row["images_per_second"], f"{row['images_per_second']:,.0f}") for row in rows]
        yield page.figure(svg.bars(bars, "training images per second"), "Training images per second of every mode; higher is better.")
        yield sections.ladder(rows).html()
        yield page.provenance(where)
    if not source.has("ladder"):
        yield Missing("the ladder", "python -m nbcnn ladder --save")
    for kind in ("climb", "sums", "hopper"):
        for name, rows, where in source.sections(kind):
            yield page.folded(titled(name), sections.kernel_ladder(rows).html() + page.provenance(where))
    for name, rows, where in source.sections("compilers"):
        yield page.folded(titled(name), sections.compilers(rows).html() + page.provenance(where))


def _mode(row: dict[str, Any]) -> str:
    return f"{row['mode']} {row['precision']}" if row["mode"] == "tensorcore" else str(row["mode"])


def roofline(source: Source) -> Parts:
    """Every step of the plan under the roofs that its GPU was measured to have."""
    for name, rows, where in source.sections("roofline"):
        yield page.heading(titled(name, rows))
        for row in rows:
            yield from _roofline(row)
        yield page.provenance(where)
    if not source.has("roofline"):
        yield Missing("the roofline", "python -m nbcnn roofline --save")
    yield from _counters(source)


def _roofline(rows: dict[str, Any]) -> Iterator[str]:
    precision = rows.get("precision", "fp32")
    # fp32 on tensor cores is made of six bfloat16 products.
    key, products = ("bf16", 6) if (rows.get("mode"), precision) == ("tensorcore", "fp32") else (precision, 1)
    dots = []
    for point in (point for point in rows["points"] if point["flops"]):
        seconds = point["ms"]["median"] / 1e3
        title = f"{point['scope']} {point['op']}: {point['fraction']:.0%} of attainable, {point['limiter']}"
        colour = COLOURS.get(point["limiter"], 3)
        for which, hollow in (("compulsory", False), ("logical", True)):
            nbytes = point[f"{which}_bytes"]
            if nbytes:
                dots.append(Dot(point["flops"] / nbytes, point["flops"] / seconds / 1e12, colour, f"{title} ({which} bytes)", hollow))
    if dots:
        ends = (min(dot.x for dot in dots) / 3, max(dot.x for dot in dots) * 3)
        roofs = []
        for label, ceilings, dash in (("measured", rows["ceilings"]["measured"], False), ("datasheet", rows["ceilings"].get("datasheet"), True)):
            if ceilings and key in ceilings and "copy" in ceilings:
                line = _roof(ceilings[key] / products, ceilings["copy"], *ends)
                roofs.append(Series(f"{label} {precision} and copy", line, 5 if dash else 4, dash))
        caption = "Filled: flops over compulsory bytes (every operand once); hollow: over logical bytes (what the kernels ask for). "
        caption += "Blue: compute is the limit; orange: memory; green: neither. Steps without flops stand in the table only."
        yield page.figure(svg.scatter(dots, roofs, "flop per byte", "TFLOP/s"), caption)
    yield sections.roofline(rows).html()
    total, whole = rows["sum_ms"], rows["whole_step_ms"]
    yield page.paragraph(f"The steps timed one by one sum to {total:.3f} ms; the whole training step takes {whole:.3f} ms ({total / whole:.0%}).")


def _roof(peak: float, bandwidth: float, low: float, high: float) -> list[tuple[float, float]]:
    """TFLOP/s that flop/s and byte/s allow between two intensities, with the ridge."""
    ridge = peak / bandwidth
    xs = sorted({low, high, *([ridge] if low < ridge < high else [])})
    return [(x, min(peak, bandwidth * x) / 1e12) for x in xs]


def _counters(source: Source) -> Parts:
    """The model's bytes beside what ncu counted."""
    for name, rows, where in source.sections("counters"):
        for row in rows:
            content = sections.counters(row).html() + page.provenance(where)
            yield page.folded(f"{titled(name)}; the model's bytes beside ncu's", content)
    if not source.has("counters"):
        yield Missing("the model's bytes beside DRAM's", "python -m nbcnn roofline --ncu --save")


def time(source: Source) -> Parts:
    """Where a training step's time goes: of a run by kernel, of results by pass."""
    spent = [row for row in source.metrics if isinstance(row.get("time"), dict)]
    if source.run and spent:
        yield from _where(spent)
    elif source.run:
        yield Missing("where this run's time went", "python train.py", "metrics.jsonl has none of it: an older version, or no finished epoch")
    rungs = [(name, row) for name, rows, _ in (*source.sections("ladder"), *source.sections("step")) for row in rows if "passes_ms" in row]
    if rungs:
        yield page.heading(f"By pass, on {source.results['device']}" if source.results else "By pass")
        # A row of every mode, precision and batch, the last one measured.
        last = {(_mode(row), row["batch"]): row for _, row in rungs}
        rows = [(f"{mode} {batch:,}", _passes(row), f"{svg.short(row['step_ms']['median'])} ms") for (mode, batch), row in last.items()]
        caption = (
            "Share of the training step by mode and batch: the convolutions' three passes, and the rest (pooling, ReLU, loss, update, launches)."
        )
        yield page.figure(svg.stacked(rows, "share of the training step"), caption)
        head = ("study", "runs as", "batch", "ms", "fprop", "dgrad", "wgrad", "rest")
        yield page.table(head, [(titled(name).split(":")[0], _mode(row), f"{row['batch']:,}", *_milliseconds(row)) for name, row in rungs], words=2)
    elif not source.run:
        yield Missing("where the time goes", "python -m nbcnn ladder --save")


def _passes(row: dict[str, Any]) -> list[tuple[str, float]]:
    return [*((name, row["passes_ms"][name]["median"]) for name in ("fprop", "dgrad", "wgrad")), ("rest", max(0.0, row["rest_ms"]))]


def _milliseconds(row: dict[str, Any]) -> list[str]:
    return [
        f"{value:,.3f}" for value in (row["step_ms"]["median"], *(row["passes_ms"][n]["median"] for n in ("fprop", "dgrad", "wgrad")), row["rest_ms"])
    ]


def _where(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines "where the time went" of a run: one training step per epoch, launch by launch."""

    def parts(found: dict[str, Any]) -> list[tuple[str, float]]:
        return [*found["kernels_ms"].items(), ("gaps", found["gaps_ms"])]

    last = rows[-1]["time"]
    yield page.heading(f"One training step of epoch {rows[-1]['epoch']}, launch by launch: {last['step_ms']:.3f} ms")
    bars = [(name, max(ms, 0.0), f"{ms:.3f} ms, {ms / max(last['step_ms'], 1e-9):.0%}") for name, ms in parts(last)]
    host = f" Enqueuing the step one launch at a time took the host {last['host_ms']:.3f} ms." if last["host_ms"] else ""  # nothing on a CPU
    caption = f"{'Kernels' if host else 'Times'} by op and pass, and the gaps between launches.{host}"
    yield page.figure(svg.bars(bars, "milliseconds", log=False), caption)
    names = list(dict.fromkeys(name for row in rows for name, _ in parts(row["time"])))
    table = [
        (
            row["epoch"],
            *(f"{dict(parts(row['time'])).get(name, 0.0):.3f}" for name in names),
            f"{row['time']['step_ms']:.3f}",
            *([f"{row['time']['host_ms']:.3f}"] if host else []),
        )
        for row in rows
    ]
    yield page.folded("every epoch", page.table(("epoch", *names, "step", *(["host"] if host else [])), table))


def peers(source: Source) -> Parts:
    """Whole steps, epochs and convolutions; what else was measured."""
    yield from _steps(source)
    yield from _epochs(source)
    yield from _convs(source)
    yield from _ops(source)
    yield from _selftest(source)
    yield from _warmup(source)


def _steps(source: Source) -> Parts:
    for name, rows, where in source.sections("step"):
        yield page.heading(titled(name, rows))
        yield sections.steps(rows).html()
        yield page.provenance(where)
    if not source.has("step"):
        yield Missing("the training step beside PyTorch", "python -m nbcnn bench step --save")


def _epochs(source: Source) -> Parts:
    found = [sections.epochs(rows).labelled("study", titled(name, rows)) for name, rows, _ in source.sections("epoch")]
    if found:
        yield page.heading("Whole epochs")
        yield joined(found).html()
    else:
        yield Missing("whole epochs", "python -m nbcnn bench epoch --save")


def _convs(source: Source) -> Parts:
    for name, rows, where in source.sections("convs"):
        content = sections.convs(rows).html() + page.provenance(where)
        yield page.folded(f"{titled(name, rows)}; every layer and pass", content)
    if not source.has("convs"):
        yield Missing("single convolutions beside cuDNN", "python -m nbcnn bench convs --save")


def _ops(source: Source) -> Parts:
    """Single ops, and comparisons of two ways to run one. Nobody misses them: there are too many to have them all."""
    for name, rows, where in (*source.sections("op"), *source.sections("compare")):
        timed = [each for row in rows for each in row.get("times", [row]) if "ms" in each]
        content = sections.ops(timed).html() + page.provenance(where)
        yield page.folded(titled(name), content)


def _selftest(source: Source) -> Parts:
    for _, rows, where in source.sections("selftest"):
        yield page.heading("What the benchmark says about things known beforehand")
        yield sections.selftest(rows).html()
        yield page.provenance(where)
    if not source.has("selftest"):
        yield Missing("the benchmark's self-test", "python -m nbcnn bench selftest --save")


def _warmup(source: Source) -> Parts:
    for name, rows, where in source.sections("warmup"):
        for row in rows:
            yield page.heading(f"{titled(name)}, {row['op']} {row['shape']}, {row['variant']}")
            yield sections.warmup(row).html()
            yield page.paragraph(warmup_costs.paragraph(row))
            yield page.table(("what a single call may cost beside itself", "", "in warm calls", "from"), warmup_costs.table(row))
            yield page.provenance(where)
    if not source.has("warmup"):
        yield Missing("the warm-up study", "python -m nbcnn bench warmup --save")
