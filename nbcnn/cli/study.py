"""`python -m nbcnn study WHAT`: picks the study's module and lets it parse the rest."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from nbcnn.cli.flags import Parser, one_of

STUDIES = {
    "dwconv": ("study_dwconv", "depthwise convolution of series in five variants, and the S4ConvD step around it"),
    "gemm": ("study_fusion", "matrix products in fp32, tf32 and bf16 beside cuBLAS"),
    "elementwise": ("study_fusion", "ReLU, Sigmoid and Swish beside PyTorch and Triton"),
    "evonorm": ("study_fusion", "EvoNorm, forward and backward, alone and behind a convolution"),
    "sweep": ("study_fusion", "small networks, fused and unfused, batch 1 to 16,384"),
    "mnist": ("study_mnist", "the MNIST classifier over several seeds, fused and unfused; its step beside PyTorch's"),
}
"""What there is: the module nbcnn.cli.MODULE with `main(study, argv) -> exit code`, and what the study is about."""
EXAMPLES = tuple(f"python -m nbcnn study {name}" for name in STUDIES)


def parser() -> Parser:
    made = Parser("python -m nbcnn study", "Studies of one question each.", EXAMPLES, "{" + ",".join(STUDIES) + "}")
    text = "; ".join(f"{name}: {about}" for name, (_, about) in STUDIES.items())
    made.add_argument("what", metavar="WHAT", type=one_of(*STUDIES), help=f"{text}. `study WHAT --help` has its flags")
    made.add_argument("rest", nargs=argparse.REMAINDER, help="the study's own flags")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study that `argv` names; returns its exit code. Exits 2 for an unknown one."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in STUDIES:
        parser().parse_args(words[:1] or ["--help"])
    name, *rest = words
    return int(importlib.import_module(f"nbcnn.cli.{STUDIES[name][0]}").main(name, rest))
