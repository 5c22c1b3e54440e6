"""`python -m nbcnn study WHAT`: picks the study's module and lets it parse the rest."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from nbcnn.cli.errors import USAGE
from nbcnn.suggest import nearest

STUDIES = {
    "gemm": ("study_fusion", "matrix products in fp32, tf32 and bf16 beside cuBLAS"),
    "elementwise": ("study_fusion", "ReLU, Sigmoid and Swish beside PyTorch and Triton"),
    "evonorm": ("study_fusion", "EvoNorm, forward and backward, alone and behind a convolution"),
    "sweep": ("study_fusion", "small networks, fused and unfused, batch 1 to 16,384"),
    "mnist": ("study_mnist", "the MNIST classifier over several seeds, fused and unfused; its step beside PyTorch's"),
}
"""What there is: the module nbcnn.cli.MODULE with `main(study, argv) -> exit code`, and what the study is about."""

HELP = "\n".join(
    (
        "usage: python -m nbcnn study WHAT [flags]      (study WHAT --help lists its flags)",
        "",
        *(f"  {name:12} {about}" for name, (_, about) in STUDIES.items()),
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study that `argv` names; returns its exit code, 2 for an unknown one."""
    given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name, rest = given[0], given[1:]
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name not in STUDIES:
        print(f"nbcnn: error: no study {name!r}{nearest(name, tuple(STUDIES))}\n  python -m nbcnn study --help lists them", file=sys.stderr)
        return USAGE
    run: Any = importlib.import_module(f"nbcnn.cli.{STUDIES[name][0]}").main
    return int(run(name, rest))
