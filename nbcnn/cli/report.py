"""`python -m nbcnn report RUN|BENCH` writes one HTML file of a training run or of a device's results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.flags import Parser, flag
from nbcnn.cli.saying import to_stderr, to_stdout

SUMMARY = "Write one HTML file that shows a run, or all results of a device; needs no GPU and no internet, nor does reading it."
EXAMPLES = (
    "python -m nbcnn report runs/cifar                              RUN/report.html, with the results of its device",
    "python -m nbcnn report runs/cifar --features features/cifar    with the confusion matrix of these features",
    "python -m nbcnn report nvidia-h200                             what this project measured there, as nvidia-h200.html",
    "python -m nbcnn report my-results/nvidia-t4.json --out t4.html",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn report", SUMMARY, EXAMPLES, "RUN|BENCH")
    made.add_argument("target", metavar="RUN|BENCH", type=paths.READS, help="a run folder, a results file, or a device in nbcnn/lab/results")
    group = made.add_argument_group("data")
    flag(
        group,
        "--features",
        paths.READS,
        "RUN: the features whose classification to show",
        "features/<data set>, if made from this run",
        metavar="DIR",
    )
    flag(
        group,
        "--bench",
        paths.READS,
        "RUN: the results file for ladder, roofline and benchmarks",
        "that of the run's device in nbcnn/lab/results",
        metavar="FILE",
    )
    group = made.add_argument_group("output")
    flag(group, "--out", paths.WRITES, "the HTML file", "RUN/report.html, or <device>.html here", metavar="FILE")
    flag(group, "--json", bool, "print one line of JSON: the file, its size, what was not measured", "off")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print where it is; returns 0. Exit 3 for a target that is neither run nor results, or damaged."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _report(flags))


def _report(flags: SimpleNamespace) -> int:
    from nbcnn.files import atomic
    from nbcnn.lab.report.source import opened
    from nbcnn.lab.report.write import report

    source = opened(flags.target, flags.bench, flags.features)
    text, missing = report(source)
    path = flags.out or (source.run.path / "report.html" if source.run else Path(f"{flags.target.stem}.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode(errors="backslashreplace")  # names of files may be any bytes
    atomic.replace_bytes(path, content)
    if flags.json:
        to_stdout(json.dumps({"report": str(path), "bytes": len(content), "missing": [vars(each) for each in missing]}))
        return OK
    for each in missing:
        to_stderr(f"not measured: {each.what}" + "".join(f" ({words})" for words in (each.why, each.command) if words))
    to_stdout(f"{path}: {len(content) / 1024:,.0f} KiB, open it in any browser")
    return OK
