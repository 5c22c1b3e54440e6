"""`study cifar94` trains the network of examples/cifar94.py over several seeds, beside its twin in PyTorch: accuracy, and seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.flags import Parser, count, flag, results_flags, some_of
from nbcnn.cli.saying import to_stderr, to_stdout

EXAMPLES = (
    "python -m nbcnn study cifar94 --data-dir data --seeds 5",
    "python -m nbcnn study cifar94 --data-dir data --seeds 1 --peers graph,compile-max",
    "python -m nbcnn study cifar94 --limit 100 --epochs 1 --seeds 1",
)
PEERS = ("graph", "compile", "compile-max", "eager", "none")
EPOCHS, SEEDS = 10, 5


def parser() -> Parser:
    made = Parser("python -m nbcnn study cifar94", "Train CIFAR-10 in seconds as examples/cifar94.py does, beside its twin in PyTorch.", EXAMPLES)
    group = made.add_argument_group("data")
    flag(group, "--data-dir", paths.DATA_TEXT, "folder with CIFAR-10", "data", metavar="DIR")
    flag(group, "--limit", count(1), "use only the first N images of each split", "all", "images")
    group = made.add_argument_group("study")
    flag(group, "--seeds", count(1), "trainings of each form", SEEDS)
    flag(group, "--epochs", count(1), "passes over the training images", EPOCHS)
    forms = "PyTorch's forms, in bf16: its step as a CUDA graph, of a compiled network, of a max-autotuned one, step by step"
    flag(group, "--peers", some_of(*PEERS), forms, "graph where PyTorch is installed")
    results_flags(made.add_argument_group("output"))
    return made


def main(argv: Sequence[str]) -> int:
    """Train and print; returns 0. Exit 3 without the data. It trains in fp32 on the CPU where there is no GPU."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags))


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn import datasets
    from nbcnn.gpu.device import Gpu, gpu_missing
    from nbcnn.lab.measure import results
    from nbcnn.lab.peers import torch_step
    from nbcnn.lab.studies import cifar94, resnet

    device = "CPU" if gpu_missing() else Gpu().device_name
    data = datasets.load("cifar10", data_dir=flags.data_dir or "data", limit=flags.limit, progress=False)
    wanted = [form for form in flags.peers or ("graph",) if form != "none"] if device != "CPU" else []
    if wanted and not torch_step.available():
        to_stderr(torch_step.MISSING)
        wanted = []
    if flags.save:
        results.opened(device, flags.results)
    rows: list[dict[str, Any]] = []

    def kept(row: dict[str, Any]) -> None:
        rows.append(row | {"data": data.name})
        to_stderr(resnet.line(row))
        if flags.save:  # after every training: one that is interrupted keeps what it has
            results.save(f"cifar94-{rows[0]['form'].removeprefix('nbcnn ').replace(' ', '-')}", rows, device, flags.results)

    # Ours and theirs by turns, so that both meet the same clocks and temperatures.
    epochs = flags.epochs or EPOCHS
    for seed in range(flags.seeds or SEEDS):
        kept(cifar94.train(data, seed, epochs))
        for form in wanted:
            kept(cifar94.peer(data, seed, epochs, form))
    to_stdout(json.dumps(rows) if flags.json else "\n".join(resnet.summary(rows, "examples/cifar94.py")))
    return OK
