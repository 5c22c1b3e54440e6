"""The tables and pictures of the README and of the pages in docs, made from the results files.

`python -m nbcnn.lab.report.readme` makes them anew, and a test compares. A table stands between `<!-- table NAME -->` and `<!-- end -->`, in
any document of `documents`; the functions below make one each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from nbcnn.lab.measure import schema, sources
from nbcnn.lab.measure.results import RESULTS
from nbcnn.lab.report import (
    classes,
    compilers,
    kernel_ladders,
    learning,
    phases,
    published,
    readme_devices,
    readme_nets,
    readme_onnx,
    readme_scaling,
    sections,
    shown,
    support,
)
from nbcnn.lab.report import readme_front as front
from nbcnn.lab.report import readme_fusion as fusion
from nbcnn.lab.report import readme_laboratory as laboratory
from nbcnn.lab.report import readme_series as series
from nbcnn.lab.report import readme_tensorcore as tensorcore
from nbcnn.lab.report.stamp import stamp
from nbcnn.lab.report.tables import GPU, footer, joined, kept, markdown, measured, section
from nbcnn.lab.studies.ladder import chart as rung_chart
from nbcnn.lab.studies.nets import mib

ROOT = Path(__file__).parents[3]
README, DOCS = ROOT / "README.md", ROOT / "docs"
CPU = "cpu.json"
_BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.S)


def step() -> str:
    """The whole fp32 training step of mode cudacore beside PyTorch."""
    rows: list[tuple[str, ...]] = []
    environments = []
    for batch in (1, 64, 256, 1024):
        rows_of, environment = section(GPU, f"step-{batch}")
        ours, peers = rows_of[0], [row for row in sections.peers(rows_of) if row["form"].startswith("PyTorch")]
        environments.append(environment)
        mine = ours["step_ms"]["median"]
        times = {peer["form"].split()[-1]: peer["step_ms"]["median"] for peer in peers}
        cells = [f"{times[form]:.3f} ({times[form] / mine:.2f}×)" if form in times else "" for form in ("graph", "compile", "compile-graph")]
        least = min((peer for peer in peers if "peak_bytes" in peer), key=lambda peer: peer["peak_bytes"], default=None)
        memory = f"{sections.planned_mib(ours):,.0f} / {mib(least)}"
        rows.append((str(batch), f"**{mine:.3f}**", f"{ours['images_per_second']:,.0f}", *cells, memory))
    head = ("batch", "nbcnn ms", "images/s", "CUDA graph", "torch.compile", "torch.compile in a CUDA graph", "MiB: nbcnn / PyTorch at its least")
    return sections.Table(head, tuple(rows)).filled().markdown() + footer(*environments)


def convs() -> str:
    """Every convolution beside cuDNN."""
    rows, environment = section(GPU, "convs-1024")
    return sections.convs(rows).labelled("batch", "1024").filled().markdown() + footer(environment)


def ladder() -> str:
    """cpu → naive → tiled → im2col → cudacore → tensorcore, at batch 1 and 256."""
    found = [section(GPU, f"ladder-{batch}") for batch in (1, 256)]
    environments = [environment for _, environment in found]
    table = joined([sections.ladder(rows) for rows, _ in found]).without("TFLOP/s").filled()
    name = f" ({environments[-1]['cpu']})" if environments[-1].get("cpu") else ""
    cores = f" The cpu rung uses {environments[-1]['cpu_cores']} cores{name}."
    longer = [f"{row['mode']} {row['precision']} at {row['batch']}" for rows, _ in found for row in rows if row["rest_ms"] < 0]
    alone = f" Each pass is timed alone, in a row, so that the passes may sum to more than their step: {', '.join(longer)}." if longer else ""
    return table.markdown() + footer(*environments).rstrip("\n") + cores + alone + "\n"


def cpu() -> str:
    """The NumPy path on a small machine."""
    (row,), environment = section(CPU, "ladder-64")
    achieved = row["tflops"] * 1e3
    share = 100 * achieved / row["sgemm_gflops"]
    head = ("cores", "batch", "images/s", "GFLOP/s", "this machine's sgemm, GFLOP/s", "share", "peak memory, MiB")
    cells = (str(environment["cpu_cores"]), str(row["batch"]), f"{row['images_per_second']:.0f}", f"{achieved:.0f}", f"{row['sgemm_gflops']:.0f}")
    return markdown(head, [(*cells, f"{share:.0f} %", f"{row['host_peak_bytes'] / 2**20:,.0f}")]) + footer(environment)


def quality() -> str:
    """What comes out: reconstruction error, features, accuracy."""
    rows = [row for job in ("main", "baselines", "per-image") for row in section(GPU, f"quality-{job}")[0]]
    environment = section(GPU, "quality-main")[1]
    since = section(GPU, "quality-precisions")[0] if measured(GPU, "quality-precisions") else []
    lines: list[tuple[str, ...]] = []
    for row in rows:
        seed = f"seed {row['seed']}"
        if row["what"].startswith("train"):
            name = "per-image recipe, 20 epochs" if "per-image" in row["what"] else "default recipe, 15 epochs"
            same = [other for other in since if all(other[key] == row[key] for key in ("mode", "precision", "epochs", "seed"))]
            took = ", later ".join(f"{one['seconds']:.1f} s" for one in (row, *same))
            lines.append((f"{name}, {seed}", f"test MSE {row['test_loss']:.5f}", took, f"{row['wall_seconds']:.0f} s"))
        elif row["what"] == "features":
            lines.append(
                (
                    f"features of {row['images']:,} images, {seed}",
                    f"{row['width']:,} each",
                    f"{row['compute_seconds']:.2f} s",
                    f"{row['wall_seconds']:.0f} s",
                )
            )
        else:
            for name, found in row["classifiers"].items():
                if row["what"].endswith("baselines") and name == "encoder":
                    continue
                spent = sum(found["seconds"].values())
                accuracy = f"{100 * found['test_accuracy']:.2f} % test, {100 * found['train_accuracy']:.2f} % train"
                lines.append((f"RBF SVM on {name}, {seed}", accuracy, f"{spent:.1f} s", f"{row['wall_seconds']:.0f} s"))
    return markdown(("what", "result", "time", "whole command"), lines, 2) + footer(environment)


TABLES: dict[str, Callable[[], str]] = {
    "step": step,
    "convs": convs,
    "ladder": ladder,
    "cpu": cpu,
    "quality": quality,
    "tensorcore": tensorcore.step,
    "precisions": tensorcore.precisions,
    "gradients": tensorcore.gradients,
    **front.TABLES,
    **laboratory.TABLES,
    **readme_scaling.TABLES,
    **readme_nets.TABLES,
    **readme_devices.TABLES,
    **fusion.TABLES,
    **series.TABLES,
    **kernel_ladders.TABLES,
    **phases.TABLES,
    **published.TABLES,
    **classes.TABLES,
    **shown.TABLES,
    **compilers.TABLES,
    **learning.TABLES,
    **readme_onnx.TABLES,
    **support.TABLES,
}
for _name, _table, _section in (
    ("layers", tensorcore.layers, "convs-fused-tensorcore-bf16-1024"),
    ("engines", tensorcore.engines, "convs-tensorcore-bf16-mma-1024"),
    ("epoch", tensorcore.epoch, "epoch-tensorcore-bf16-1024"),
):
    # A table that was measured must stand in a document; one that was not must not.
    if measured(GPU, _section):
        TABLES[_name] = _table


def documents() -> Mapping[Path, str]:
    """The documents in which tables stand, with their texts."""
    pages = sorted(page for page in DOCS.rglob("*.md") if _BLOCK.search(page.read_text(encoding="utf-8")))
    return {path: path.read_text(encoding="utf-8") for path in (README, RESULTS / "README.md", *pages)}


def rewritten(text: str) -> str:
    """A document's text with every table made anew. Raises KeyError for a table or section that does not exist."""
    tables = {**TABLES, "schema": schema.table}
    return _BLOCK.sub(lambda block: block[1] + tables[block[2]]() + block[3], text)


LADDER = f"ladder-{front.BATCH}"


def pictures() -> dict[str, str]:
    """The pictures beside the results files, and the section that each is drawn from."""
    found = {"ladder.png": LADDER, "precisions.png": "quality-precisions", laboratory.WARMUP: "warmup", series.CHART: series.SECTION}
    found |= {laboratory.ROOFLINE: laboratory.rooflines()[-1]} | dict.fromkeys(fusion.HEATMAPS.values(), fusion.PRODUCTS)
    return {name: of for name, of in found.items() if measured(GPU, of)}


def main() -> int:
    files = {path.name: kept(path.name)["sections"] for path in sorted(RESULTS.glob("*.json"))}
    sources.write(sources.record(files, sources.in_git))
    for path, text in documents().items():
        path.write_text(rewritten(text), encoding="utf-8")
    front.chart(DOCS / "pictures" / front.PICTURE)
    phases.chart(DOCS / "pictures" / phases.PICTURE)
    classes.chart(DOCS / "pictures" / classes.CONFUSION)
    shown.charts(DOCS / "pictures")
    rungs, environment = section(GPU, LADDER)
    rung_chart(rungs, RESULTS / "ladder.png", f"{environment['device'].split(' (')[0]}, batch {front.BATCH}")
    tensorcore.chart(RESULTS / "precisions.png")
    laboratory.charts(RESULTS)
    series.charts(RESULTS)
    fusion.charts(RESULTS)
    for name, of in pictures().items():
        stamp(RESULTS / name, section(GPU, of)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
