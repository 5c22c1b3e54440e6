"""Tables of what the encoder learned, for docs and the report: accuracy on its features beside the controls, and by number of labels.

They are made from the section `features` of the results, which `python -m nbcnn study features --save` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from nbcnn.files.suggest import called
from nbcnn.lab.report import page
from nbcnn.lab.report.bench import Parts
from nbcnn.lab.report.source import Missing, Source
from nbcnn.lab.report.tables import GPU, Table, footer, measured, section
from nbcnn.lab.report.titles import titled
from nbcnn.lab.studies.features import grouped, spread

Row = dict[str, Any]
SECTION = "features"
CLASSIFIERS = ("C-SVC", "ridge")
HEAD = ("features of", "processing", "features", *CLASSIFIERS, "training", "extraction")
PICTURES = {
    "filters": "The first filters, each stretched to its own largest weight: edges and contrasts of colours where something was learned, else noise.",
    "neighbours": "Test images and their nearest training images among the features; no label took part in finding them.",
    "map": "Features in the plane by t-SNE, coloured by class; the encoder and the map saw no class.",
}
"""By the name in classify.json: what is written below a picture."""


def headline(rows: Sequence[Row]) -> Table:
    """A line for each encoder: accuracies with all labels, their means over the seeds, and the median of their seconds."""
    lines, found = [], grouped(rows)
    most = max((row["labels"] for row in rows if row["what"] == "accuracy"), default=0)
    for encoder in dict.fromkeys(row["encoder"] for row in rows if row["what"] == "accuracy"):
        runs = [row for row in rows if row["encoder"] == encoder]
        own = runs[0]
        cells = (spread(found.get((encoder, name, most), [])) for name in CLASSIFIERS)
        process = "standardised" if own["process"] == "none" else f"`{own['process']}`"
        times = (median(row[name] for row in runs) for name in ("train_seconds", "extract_seconds"))
        seconds = (f"{time:.1f} s" if time else "" for time in times)
        lines.append((encoder, process, f"{own['features']:,}", *cells, *seconds))
    return Table(HEAD, tuple(lines), 2)


def by_labels(rows: Sequence[Row]) -> Table:
    """Accuracy by number of labels, of the classifier that is there and comes last in `CLASSIFIERS`."""
    found = grouped(rows)
    counts = sorted({count for _, _, count in found})
    name = next((each for each in reversed(CLASSIFIERS) if any(each == other for _, other, _ in found)), "")
    encoders = dict.fromkeys(encoder for encoder, _, _ in found)
    lines = tuple((encoder, *(spread(found.get((encoder, name, count), [])) for count in counts)) for encoder in encoders)
    return Table((f"features of ({name})", *(f"{count:,} labels" for count in counts)), lines)


def _skipped(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["what"] == "skipped":
            yield f"{row['encoder']} is left out: {row['why']}."


def features() -> str:
    """Encoders and controls with all labels; nothing before it is measured."""
    if not measured(GPU, SECTION):
        return ""
    rows, environment = section(GPU, SECTION)
    text = "**Accuracy on test images with all labels** (mean ± standard deviation, number of seeds):\n\n" + headline(rows).markdown()
    left = "".join(f"\n\n{line}" for line in _skipped(rows))
    return text + left + footer(environment)


def labels() -> str:
    """The same by number of labels; nothing before it is measured."""
    if not measured(GPU, SECTION):
        return ""
    rows, environment = section(GPU, SECTION)
    return "**Accuracy on test images by number of labels**:\n\n" + by_labels(rows).markdown() + footer(environment)


def learned(source: Source) -> Parts:
    """What the encoder learned: of a run its pictures, of results the tables."""
    if source.run:
        drawn = (source.classified or {}).get("pictures", {})
        for name, caption in PICTURES.items():
            path = Path(drawn.get(name, ""))
            if name in drawn and path.is_file():
                yield page.figure(page.png(path, caption), caption)
            elif name in drawn:
                yield Missing(f"the picture {path.name}", called("classify", path.parent.parent, "--pictures"), "it is not where it was drawn")
        return
    found = False
    for name, rows, where in source.sections(SECTION):
        found = True
        yield page.heading(titled(name))
        yield headline(rows).html()
        yield by_labels(rows).html()
        for words in _skipped(rows):
            yield page.paragraph(words)
        yield page.provenance(where)
    if not found:
        yield Missing("what features are worth beside their controls", "python -m nbcnn study features --save")


TABLES = {"features": features, "labels": labels}
