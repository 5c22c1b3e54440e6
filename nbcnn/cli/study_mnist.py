"""`study mnist` trains the classifier over several seeds, fused, unfused and by its twin in PyTorch, and times its training step beside PyTorch's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import MODE_CPU, OK, guarded
from nbcnn.cli.flags import MODES, OWN_PRECISION, Parser, count, flag, one_of, results_flags
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files.errors import UsageError
from nbcnn.plan.names import PRECISIONS

EXAMPLES = (
    "python -m nbcnn study mnist --data-dir data",
    "python -m nbcnn study mnist --dataset digits --mode cpu --seeds 1 --epochs 2 --limit 256",
)
SETS = ("mnist", "fashion-mnist", "digits")


def parser() -> Parser:
    made = Parser(
        "python -m nbcnn study mnist", "Train the MNIST classifier and its twin in PyTorch over several seeds; time the step of both.", EXAMPLES
    )
    group = made.add_argument_group("data")
    flag(group, "--dataset", one_of(*SETS), "labelled images", "mnist")
    flag(group, "--data-dir", paths.DATA_TEXT, "folder with the data set's files", "data", metavar="DIR")
    flag(group, "--limit", count(1), "use only the first N images of each split", "all", "images")
    group = made.add_argument_group("study")
    flag(group, "--mode", one_of("auto", *MODES), "how layers are computed", "cudacore")
    flag(group, "--precision", one_of(*PRECISIONS), "what multiplications round to", OWN_PRECISION)
    flag(group, "--norm", one_of("s0", "b0"), "which EvoNorm", "s0")
    flag(group, "--seeds", count(1), "runs of each form", 5)
    flag(group, "--epochs", count(1), "passes over the training images", 10)
    flag(group, "--forms", one_of("both", "fused", "unfused"), "with fused layers, without, or both", "both")
    flag(group, "--peer", one_of("torch", "none"), "torch: PyTorch's trainings and step too", "torch where it is installed")
    results_flags(made.add_argument_group("output"))
    return made


def main(argv: Sequence[str]) -> int:
    """Train, measure and print; returns 0. Exit 3 without the data, 4 without a GPU (unless --mode cpu)."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags), without_gpu=MODE_CPU)


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn import datasets
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.peers import torch_step as peers
    from nbcnn.lab.studies import mnist
    from nbcnn.run.rows import choose_mode

    choice = choose_mode(flags.mode or "cudacore", flags.precision)
    row = choice.row
    device = Gpu().device_name if row.device == "gpu" else "CPU"
    data = datasets.load(flags.dataset or "mnist", data_dir=flags.data_dir or "data", limit=flags.limit, progress=False)
    if len(data.train_images) < mnist.BATCH:
        raise UsageError(f"{len(data.train_images)} training images are fewer than a batch of {mnist.BATCH}")
    wanted = {"fused": (True,), "unfused": (False,)}.get(flags.forms or "both", (True, False))
    rows: list[dict[str, Any]] = []
    for fusing in wanted:
        way = mnist.Way(choice, flags.norm or "s0", fusing)
        for seed in range(flags.seeds or 5):
            rows.append(mnist.train(data, way, seed, flags.epochs or 10))
            to_stderr(f"{way.form}, seed {seed}: {rows[-1]['accuracy']:.2%}")
        if row.device == "gpu":
            rows.append(mnist.steps(data, way))
    if flags.peer != "none" and row.device == "gpu":
        if peers.available():
            for seed in range(flags.seeds or 5):
                rows.append(mnist.torch_train(data, seed, flags.epochs or 10, flags.norm or "s0"))
                to_stderr(f"{rows[-1]['form']}, seed {seed}: {rows[-1]['accuracy']:.2%}")
            rows += mnist.torch_steps(data, flags.norm or "s0")
        else:
            to_stderr(peers.MISSING)
    if flags.save:
        results.save(f"mnist-{row.mode}-{row.precision}", rows, device, Path(flags.results) if flags.results else None)
    to_stdout(json.dumps(rows) if flags.json else "\n".join(mnist.summary(rows)))
    return OK
