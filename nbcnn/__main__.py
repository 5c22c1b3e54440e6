"""`python -m nbcnn COMMAND` and the console script `nbcnn`: picks the command's module and lets it parse the rest."""

from __future__ import annotations

if __name__ == "__main__":
    from nbcnn.cli import process

    process.begin()  # first of all, so that no signal and no closed output ends the process without a message

import importlib
import sys
from collections.abc import Sequence

from nbcnn import __version__
from nbcnn.cli.errors import USAGE
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import call_as, nearest

COMMANDS = {
    "train": "train a network on images or series; python train.py is the same",
    "extract": "write the features that a run's encoder makes; python extract_features.py is the same",
    "predict": "apply a trained network to image files: classes, probabilities, reconstructions",
    "evaluate": "loss, accuracy, precision, recall and F1 of a trained network on a data set",
    "export": "write a trained network as an ONNX file, which other programs run",
    "import": "make a network of an ONNX file, to predict with and to train further",
    "pipeline": "train, extract and classify, one after the other, in one folder",
    "env": "versions, driver and GPU; what works on this machine and what to install",
    "cache": "compiled kernels on disk: list, clear, or compile those of ready-made models in advance",
    "classify": "train and judge a support vector machine on extracted features",
    "gradcheck": "check every op of every mode against its float64 reference",
    "ladder": "climb from the NumPy path to the fastest kernels: table, chart, JSON",
    "roofline": "every step of the training plan under the ceilings of this GPU, as table, chart and JSON",
    "kernels": "what the compiler makes of every kernel, for any architecture and without a GPU",
    "simulate": "run one op's kernels without a GPU: what a block did, bank conflicts, transactions, races",
    "bench": "time ops, training steps and convolutions beside PyTorch and cuDNN",
    "study": "one question each: depthwise variants, GEMM, fused norms; tables, CSV, charts",
    "compare": "two modes, kernels or tiles for one op: results, paired times, registers, roofline",
    "launch": "run train, extract or classify as several ranks, one per GPU",
    "report": "one self-contained HTML file of a run or of a device's results",
}
"""The commands; each is the module nbcnn.cli.COMMAND with `main(argv) -> exit code`."""

HELP = "\n".join(
    (
        f"nbcnn {__version__}: convolutional networks trained by Numba-CUDA kernels",
        "",
        "usage: nbcnn COMMAND [flags]      (or python -m nbcnn COMMAND; COMMAND --help lists its flags)",
        "",
        *(f"  {name:12} {text}" for name, text in COMMANDS.items()),
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; returns its exit code, 2 for an unknown one."""
    given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name, rest = given[0], given[1:]
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"nbcnn: error: no command {quoted(name)}{nearest(name, tuple(COMMANDS))}\n  python -m nbcnn --help lists them", file=sys.stderr)
        return USAGE
    return int(importlib.import_module(f"nbcnn.cli.{name}").main(rest))


def console() -> int:
    """The console script `nbcnn`."""
    from nbcnn.cli import process

    process.begin()
    call_as("nbcnn")
    return main()


if __name__ == "__main__":
    call_as("python -m nbcnn")
    sys.exit(main())
