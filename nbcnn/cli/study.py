"""`python -m nbcnn study WHAT` picks the study's module and lets it parse the rest."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from nbcnn.cli.flags import Parser, one_of

STUDIES = {
    "dwconv": "depthwise convolution of series in five variants, by bytes, intensity, ceilings and times, and the S4ConvD step around it",
    "gemm": "matrix products in fp32, tf32 and bf16 beside cuBLAS",
    "elementwise": "ReLU, Sigmoid and Swish beside PyTorch and Triton",
    "evonorm": "EvoNorm, forward and backward, alone and behind a convolution",
    "sweep": "small networks, fused and unfused, batch 1 to 16,384",
    "features": "accuracy on features of trained encoders and of controls, by number of labels; pictures",
    "engines": "every implementation of every step of networks, and what the choice among them costs",
    "compilers": "kernels and training steps by numba-cuda and by numba-cuda-mlir: times in turn, and whether bits are the same",
    "mnist": "the MNIST classifier over several seeds, fused and unfused; its step beside PyTorch's",
    "cifar94": "CIFAR-10 in seconds: the network of examples/cifar94.py over several seeds beside its twin in PyTorch",
    "resnet": "ResNet-18 on CIFAR-10 over several seeds, by the recipe of train: accuracy and seconds beside PyTorch's twin",
}
"""The studies; each is the module nbcnn.cli.study_WHAT with `main(argv) -> exit code`."""
SHARED = dict.fromkeys(("gemm", "elementwise", "evonorm", "sweep"), "study_fusion")
"""Studies that share one module, whose `main(argv, study)` takes the study's name too."""
EXAMPLES = (
    "python -m nbcnn study dwconv                          every variant at four sizes, and the step of S4ConvD",
    "python -m nbcnn study evonorm --out pictures          heatmaps, and a CSV beside each",
    "python -m nbcnn study dwconv --no-times --tflops 15.6 --tbs 1.5",
    "python -m nbcnn study gemm --help",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn study", "Studies, each of one question.", EXAMPLES, "{" + ",".join(STUDIES) + "}")
    text = "; ".join(f"{name}: {about}" for name, about in STUDIES.items())
    made.add_argument("what", metavar="WHAT", type=one_of(*STUDIES), help=f"{text}. `study WHAT --help` has its flags")
    made.add_argument("rest", nargs=argparse.REMAINDER, help="the study's own flags")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study that `argv` names; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in STUDIES:
        parser().parse_args(words[:1] or ["--help"])
    name, rest = words[0], words[1:]
    run: Any = importlib.import_module(f"nbcnn.cli.{SHARED.get(name, f'study_{name}')}").main
    return int(run(rest, name) if name in SHARED else run(rest))
