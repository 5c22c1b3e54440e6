"""`study resnet` trains ResNet-18 on CIFAR-10 over several seeds by the recipe of `train --model resnet18`, beside PyTorch's twin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import MODE_CPU, OK, guarded
from nbcnn.cli.flags import MODES, OWN_PRECISION, Parser, count, flag, one_of, results_flags, some_of
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.plan.names import PRECISIONS

EXAMPLES = (
    "python -m nbcnn study resnet --data-dir data",
    "python -m nbcnn study resnet --data-dir data --seeds 1 --peers graph,compile-max --out resnet.json",
    "python -m nbcnn study resnet --dataset digits --mode cpu --filters 4 --seeds 1 --epochs 1 --batch 32 --limit 64",
)
PEERS = ("graph", "compile", "compile-max", "eager", "none")


def parser() -> Parser:
    made = Parser("python -m nbcnn study resnet", "Train ResNet-18 by the recipe of train --model resnet18, beside PyTorch's twin.", EXAMPLES)
    group = made.add_argument_group("data")
    flag(group, "--dataset", one_of("cifar10", "digits", "shapes"), "labelled images", "cifar10")
    flag(group, "--data-dir", paths.DATA_TEXT, "folder with the data set's files", "data", metavar="DIR")
    flag(group, "--limit", count(1), "use only the first N images of each split", "all", "images")
    group = made.add_argument_group("study")
    flag(group, "--mode", one_of("auto", *MODES), "how layers are computed", "auto")
    flag(group, "--precision", one_of(*PRECISIONS), "what multiplications round to", OWN_PRECISION)
    flag(group, "--seeds", count(1), "trainings of each form", 3)
    flag(group, "--epochs", count(1), "passes over the training images", "the recipe's, 16")
    flag(group, "--batch", count(1), "images per training step", "the recipe's, 512", "images")
    flag(group, "--filters", count(1), "channels of the first stage", 64)
    forms = "PyTorch's forms: a CUDA graph, torch.compile and max-autotune inside one, step by step; in bf16"
    flag(group, "--peers", some_of(*PEERS), forms, "graph where PyTorch is installed")
    group = made.add_argument_group("output")
    flag(group, "--out", paths.WRITES, "also write the rows into this file, as JSON, after every training", "none", metavar="FILE")
    results_flags(group)
    return made


def main(argv: Sequence[str]) -> int:
    """Train and print; returns 0. Exit 3 without the data, 4 without a GPU (unless --mode cpu)."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags), without_gpu=MODE_CPU)


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn import datasets
    from nbcnn.cli.recipes import RECIPES
    from nbcnn.files import atomic
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.peers import resnet as peer
    from nbcnn.lab.peers import torch_step
    from nbcnn.lab.studies import resnet
    from nbcnn.run.rows import choose_mode

    choice = choose_mode(flags.mode or "auto", flags.precision)
    data = datasets.load(flags.dataset or "cifar10", data_dir=flags.data_dir or "data", limit=flags.limit, progress=False)
    own = RECIPES["resnet"] | ({"batch": flags.batch} if flags.batch else {})
    recipe = resnet.recipe_of(own, len(data.train_images), flags.epochs or own["epochs"])
    wanted = [form for form in flags.peers or ("graph",) if form != "none"] if choice.row.device == "gpu" else []
    if wanted and not torch_step.available():
        to_stderr(torch_step.MISSING)
        wanted = []
    device = Gpu().device_name if choice.row.device == "gpu" else "CPU"
    if flags.save:
        results.opened(device, flags.results)
    rows: list[dict[str, Any]] = []

    def kept(row: dict[str, Any]) -> None:
        rows.append(row | {"data": data.name})
        to_stderr(resnet.line(row))
        if flags.out:
            atomic.replace_bytes(flags.out, (json.dumps(rows, indent=1) + "\n").encode())
        if flags.save:  # after every training: one that is interrupted keeps what it has
            results.save(f"resnet-{choice.row.mode}-{choice.row.precision}", rows, device, flags.results)

    # Ours and theirs by turns, so that both meet the same clocks and temperatures.
    for seed in range(flags.seeds or 3):
        kept(resnet.train(data, recipe, choice, seed, flags.filters or 64))
        for form in wanted:
            kept(peer.train(data, recipe, seed=seed, form=form, filters=flags.filters or 64))
    to_stdout(json.dumps(rows) if flags.json else "\n".join(resnet.summary(rows)))
    return OK
