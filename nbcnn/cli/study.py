"""`python -m nbcnn study WHAT`: each study is the module nbcnn.cli.study_WHAT with `main(argv) -> exit code`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from nbcnn.cli.flags import Parser, one_of

STUDIES = {"dwconv": "depthwise convolution of series in five variants, by bytes, intensity, ceilings and times, and the S4ConvD step around it"}
EXAMPLES = (
    "python -m nbcnn study dwconv                          every variant at four sizes, and the step of S4ConvD",
    "python -m nbcnn study dwconv --no-times --tflops 15.6 --tbs 1.5",
    "python -m nbcnn study dwconv --help",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn study", "Studies of one question each.", EXAMPLES, "{" + ",".join(STUDIES) + "}")
    text = "; ".join(f"{name}: {what}" for name, what in STUDIES.items())
    made.add_argument("what", metavar="WHAT", type=one_of(*STUDIES), help=f"{text}. `study WHAT --help` has its flags")
    made.add_argument("rest", nargs=argparse.REMAINDER, help="the study's own flags")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study that `argv` names; returns its exit code."""
    import sys

    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in STUDIES:
        parser().parse_args(words[:1] or ["--help"])
    return int(importlib.import_module(f"nbcnn.cli.study_{words[0]}").main(words[1:]))
