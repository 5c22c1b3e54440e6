"""This module makes the report's sections of studies: convolution of series and S4ConvD, fused kernels, the MNIST classifier, several GPUs."""

from __future__ import annotations

from typing import Any

from nbcnn.lab.report import page, sections, svg
from nbcnn.lab.report.bench import Parts
from nbcnn.lab.report.sections import size_of
from nbcnn.lab.report.source import Missing, Source
from nbcnn.lab.report.titles import titled

Row = dict[str, Any]


# -- series


def series(source: Source) -> Parts:
    """Depthwise convolution of series by size, its bytes beside ncu's, and the training step of S4ConvD."""
    for name, sizes, where in source.sections("dwconv"):
        for at, size in enumerate(sizes):
            title = f"{titled(name)}; N {size_of(size)}"
            chart = page.figure(svg.bars(_fprop(size), "µs of the forward pass"), "Microseconds of the forward pass by variant; less is better.")
            content = chart + sections.dwconv(size).html() + (sections.sequences(size).html() if size["sequences"] else "")
            yield page.heading(title) + content if at == 0 else page.folded(title, content)
        yield page.provenance(where)
    if not source.has("dwconv"):
        yield Missing("depthwise convolution of series", "python -m nbcnn study dwconv --save")
    for name, rows, where in source.sections("dwcounters"):
        for row in rows:
            title = f"{titled(name)}; N {size_of(row)}; the model's bytes beside ncu's"
            yield page.folded(title, sections.dwcounters(row).html() + page.provenance(where))
    yield from _steps(source)


def _fprop(size: Row) -> list[tuple[str, float, str]]:
    rows = [(row["variant"], row["ms"]) for row in size["rows"] if row["path"] == "fprop"]
    rows += [(f"PyTorch {row['form']}", row["ms"]) for row in size["peers"] if row.get("path") == "fprop"]
    return [(name, ms["median"] * 1e3, f"{ms['median'] * 1e3:,.1f} µs") for name, ms in rows]


def _steps(source: Source) -> Parts:
    for name, rows, where in source.sections("s4convd"):
        yield page.heading(titled(name))
        yield sections.s4convd(rows).html()
        yield page.provenance(where)
    if not source.has("s4convd"):
        yield Missing("the training step of S4ConvD", "python -m nbcnn study dwconv --save")


# -- fusion


def fusion(source: Source) -> Parts:
    """Small works and fused kernels beside PyTorch and Triton; the MNIST classifier."""
    for name, rows, where in source.sections("fusion"):
        shown = [row for row in rows if row["launch"] == "graph"] or rows
        table, unit = sections.cases("case", shown), "TFLOP/s" if sections.is_products(shown) else "µs per call"
        title = f"{titled(name)}; {len(table.rows)} cases, {unit} in a replayed graph"
        yield page.folded(title, table.html() + page.provenance(where))
    if not source.has("fusion"):
        yield Missing("fused and small works", "python -m nbcnn study elementwise --save (and evonorm, gemm, sweep)")
    yield from _classifier(source)


def _classifier(source: Source) -> Parts:
    for name, rows, where in source.sections("mnist"):
        yield page.heading(titled(name))
        table = sections.mnist(rows)
        if table.rows:
            yield table.html()
        steps = [(row["form"], f"{row['batch']:,}", f"{row['step_ms']['median'] * 1e3:,.0f}") for row in rows if row["what"] == "step"]
        if steps:
            yield page.table(("training step", "batch", "µs"), steps)
        yield page.provenance(where)
    if not source.has("mnist"):
        yield Missing("the MNIST classifier", "python -m nbcnn study mnist --save")


# -- networks


def networks(source: Source) -> Parts:
    """Training steps of several networks beside PyTorch's, and where ours go; and predictions."""
    found = list(source.sections("nets"))
    if found:
        yield sections.nets([row for _, rows, _ in found for row in rows]).html()
    else:
        yield Missing("training steps of several networks", "python -m nbcnn bench nets --breakdown --save")
    for name, rows, _ in found:
        yield from (page.paragraph(f"{row['what']} {row['precision']}, {row['form']}: {row['why']}") for row in rows if "why" in row)
        yield from (page.folded(f"{titled(name)}: where it goes", sections.spent(row).html()) for row in rows if "ops" in row)
    if found:
        yield page.provenance(found[-1][2])
    if predicted := list(source.sections("predict")):
        yield page.heading("Predictions")
        yield sections.predictions([row for _, rows, _ in predicted for row in rows]).html()
        yield page.provenance(predicted[-1][2])


# -- several GPUs


def scaling(source: Source) -> Parts:
    """Training on several GPUs beside PyTorch's DistributedDataParallel, the all-reduce alone, and what was checked."""
    for _, rows, where in source.sections("scaling"):
        steps = [row for row in rows if "step_ms" in row]
        bars = [(_form(row), row["images_per_second"], f"{row['images_per_second']:,.0f}") for row in steps]
        if bars:
            yield page.figure(svg.bars(bars, "training images per second"), "Training images per second; higher is better.")
        if steps:
            yield sections.scaling(rows).html()
        if alone := sections.reduced(rows):
            yield page.paragraph(alone)
        if checked := sections.parity(rows):
            yield page.paragraph("Checked before timing: how far the GPUs are from one, as ‖difference‖ / ‖one GPU's‖.")
            yield checked.html()
        yield page.provenance(where)
    if not source.has("scaling"):
        yield Missing("training on several GPUs", "python -m nbcnn bench scaling --save")


def _form(row: Row) -> str:
    return f"{row['form'].replace('PyTorch', 'Torch')} {row['precision']} ×{row['ranks']}{' strong' if row['what'] == 'strong' else ''}"
