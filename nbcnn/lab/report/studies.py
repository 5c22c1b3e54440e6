"""This module makes the report's sections of studies: convolution of series and S4ConvD, fused kernels, the MNIST classifier, several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from nbcnn.lab.report import page, svg
from nbcnn.lab.report.bench import Parts
from nbcnn.lab.report.source import Missing, Source
from nbcnn.lab.report.titles import titled

Row = dict[str, Any]


# -- series


def series(source: Source) -> Parts:
    """Depthwise convolution of series by size, its bytes beside ncu's, and the training step of S4ConvD."""
    found = False
    for name, sizes, where in source.sections("dwconv"):
        found = True
        for at, size in enumerate(sizes):
            title = f"{titled(name)}; N {_size(size)}"
            chart = page.figure(svg.bars(_fprop(size), "µs of the forward pass"), "Microseconds of the forward pass by variant; less is better.")
            content = chart + _paths(size) + (_sequences(size["sequences"]) if size["sequences"] else "")
            yield page.heading(title) + content if at == 0 else page.folded(title, content)
        yield page.provenance(where)
    if not found:
        yield Missing("depthwise convolution of series", "python -m nbcnn study dwconv --save")
    for name, rows, where in source.sections("dwcounters"):
        for row in rows:
            head = ("variant", "path", "different MB", "asked for", "DRAM read", "written")
            sizes = ("least", "logical", "dram_read", "dram_write")
            table = [(each["variant"], each["path"], *(f"{each[size] / 1e6:,.1f}" for size in sizes)) for each in row["kernels"]]
            title = f"{titled(name)}; N {_size(row)}; the model's bytes beside ncu's"
            yield page.folded(title, page.table(head, table, words=2) + page.provenance(where))
    yield from _steps(source)


def _size(size: Row) -> str:
    n, c, length, taps = size["shape"]
    return f"{n:,}, C {c}, L {length:,}, T {taps}"


def _fprop(size: Row) -> list[tuple[str, float, str]]:
    rows = [(row["variant"], row["ms"]) for row in size["rows"] if row["path"] == "fprop"]
    rows += [(f"PyTorch {row['form']}", row["ms"]) for row in size["peers"] if row.get("path") == "fprop"]
    return [(name, ms["median"] * 1e3, f"{ms['median'] * 1e3:,.1f} µs") for name, ms in rows]


def _paths(size: Row) -> str:
    table = [
        (
            *(row["variant"], row["path"], f"{row['ms']['median'] * 1e3:,.1f}", f"{row['compulsory'] / size['bandwidth'] * 1e6:,.1f}"),
            *(f"{row['of_bandwidth']:.0%}", f"{row['logical_tbs']:.2f}", row["limiter"]),
            *(f"{row[name]:.1f}×" if row.get(name) is not None else None for name in ("over_naive", "over_torch")),
        )
        for row in size["rows"]
    ]
    head = ("variant", "path", "µs", "floor µs", "of it", "TB/s asked for", "limited by", "over naive", "over PyTorch's best")
    return page.table(head, table, words=2)


def _sequences(rows: Sequence[Row]) -> str:
    """The table of the paths of a training step, timed one after the other."""
    table = [
        (row["variant"], " + ".join(f"{ms * 1e3:,.0f}" for ms in row["paths"].values()), f"{row['ms']['median'] * 1e3:,.1f}", f"{row['off']:+.1%}")
        for row in rows
    ]
    return page.table(("variant", "paths alone, µs", "in sequence, µs", "off the sum by"), table)


def _steps(source: Source) -> Parts:
    found = False
    for name, rows, where in source.sections("s4convd"):
        found = True
        yield page.heading(titled(name))
        parts = list(dict.fromkeys(part for row in rows for part in row.get("parts_ms", {})))
        table = [
            (
                *(row["form"], f"{row['step_ms']['median']:,.2f}", f"{row['predicted_ms']:.2f}" if "predicted_ms" in row else None),
                *(f"{row['windows_per_second']:,.0f}", f"{row['ratio']:.2f}×"),
                *(f"{row['parts_ms'][part]:.2f}" if part in row.get("parts_ms", {}) else None for part in parts),
            )
            for row in rows
        ]
        yield page.table(("form", "ms/step", "predicted", "windows/s", "over our fastest", *parts), table)
        yield page.provenance(where)
    if not found:
        yield Missing("the training step of S4ConvD", "python -m nbcnn study dwconv --save")


# -- fusion


def fusion(source: Source) -> Parts:
    """Small works and fused kernels beside PyTorch and Triton; the MNIST classifier."""
    found = False
    for name, rows, where in source.sections("fusion"):
        found = True
        shown = [row for row in rows if row["launch"] == "graph"] or rows
        variants = list(dict.fromkeys(row["variant"] for row in shown))
        table = []
        for case in dict.fromkeys(row["case"] for row in shown):
            of = {row["variant"]: row for row in shown if row["case"] == case}
            table.append((case, *(f"{of[each]['ms']['median'] * 1e3:,.1f}" if each in of else None for each in variants), _ratio(list(of.values()))))
        content = page.table(("case, µs a call", *variants, "peers' fastest over ours"), table) + page.provenance(where)
        yield page.folded(f"{titled(name)}; {len(table)} cases, µs a call in a replayed graph", content)
    if not found:
        yield Missing("fused and small works", "python -m nbcnn study elementwise --save (and evonorm, gemm, sweep)")
    yield from _classifier(source)


def _ratio(rows: Sequence[Row]) -> str | None:
    """By precision, peers' fastest over ours; parts of a work do not count."""
    made = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        of = [row for row in rows if row["precision"] == precision and "alone" not in row["variant"]]
        ours, peers = ([row["ms"]["median"] for row in of if row["variant"].startswith("nbcnn") is mine] for mine in (True, False))
        if ours and peers:
            made.append(f"{min(peers) / min(ours):.2f}×")
    return ", ".join(made) or None


def _classifier(source: Source) -> Parts:
    found = False
    for name, rows, where in source.sections("mnist"):
        found = True
        yield page.heading(titled(name))
        table: list[tuple[Any, ...]] = []
        for form in dict.fromkeys(row["form"] for row in rows if row["what"] == "train"):
            runs = [row for row in rows if row["what"] == "train" and row["form"] == form]
            accuracy = [row["accuracy"] for row in runs]
            seconds = median(row["epoch_ms"]["median"] for row in runs) / 1e3
            table.append((form, len(runs), runs[0]["epochs"], f"{mean(accuracy):.2%}", f"{min(accuracy):.2%}", f"{seconds:.3f}"))
        if table:
            yield page.table(("form", "seeds", "epochs", "mean accuracy", "least", "seconds an epoch"), table)
        steps = [(row["form"], f"{row['batch']:,}", f"{row['step_ms']['median'] * 1e3:,.0f}") for row in rows if row["what"] == "step"]
        if steps:
            yield page.table(("training step", "batch", "µs"), steps)
        yield page.provenance(where)
    if not found:
        yield Missing("the MNIST classifier", "python -m nbcnn study mnist --save")


# -- several GPUs


def scaling(source: Source) -> Parts:
    """Training on several GPUs beside PyTorch's DistributedDataParallel, the all-reduce alone, and what was checked."""
    found = False
    for _, rows, where in source.sections("scaling"):
        found = True
        steps = [row for row in rows if "step_ms" in row]
        bars = [(_form(row), row["images_per_second"], f"{row['images_per_second']:,.0f}") for row in steps]
        if bars:
            yield page.figure(svg.bars(bars, "training images per second"), "Training images per second; higher is better.")
        table = [
            (
                *(row["form"], row["what"], row["precision"], row["ranks"], f"{row['batch']:,}", f"{row['step_ms']['median']:,.3f}"),
                *(f"{row['images_per_second']:,.0f}", f"{row['efficiency']:.1%}"),
            )
            for row in steps
        ]
        yield page.table(("form", "scaling", "precision", "GPUs", "images a step", "ms/step", "images/s", "efficiency"), table, words=3)
        reduced = [(row["form"], row["ranks"], f"{row['bytes'] / 1e6:.1f}", f"{row['ms']['median'] * 1e3:.1f}") for row in rows if "bytes" in row]
        if reduced:
            yield page.table(("all-reduce of the gradients", "GPUs", "MB", "µs"), reduced)
        checked = [
            (row["precision"], row["ranks"], f"{row['gradient_error']:.1e}", f"{row['bound']:.1e}", f"{row['drift']:.1e}")
            for row in rows
            if row["what"] == "parity"
        ]
        if checked:
            yield page.table(("checked before", "GPUs", "gradients differ from one GPU's by", "bound", "weights in the end by"), checked)
        yield page.provenance(where)
    if not found:
        yield Missing("training on several GPUs", "python -m nbcnn bench scaling --save")


def _form(row: Row) -> str:
    return f"{row['form'].replace('PyTorch', 'Torch')} {row['precision']} ×{row['ranks']}{' strong' if row['what'] == 'strong' else ''}"
