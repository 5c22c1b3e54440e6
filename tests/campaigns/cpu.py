"""Training steps of `--mode cpu` beside PyTorch's on the same processor: networks of the table of docs/howto/pytorch.md.

    python -m tests.campaigns.cpu                        all of them, with one thread each; needs PyTorch
    python -m tests.campaigns.cpu resnet18 --repeats 9   one of them
    python -m tests.campaigns.cpu resnet18 --profile     and the processor time of each op

Both sides take SGD steps in float32 in turns, so that what else the machine does meets both alike. Given are medians of processor time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import numpy as np
import torch

from nbcnn.lab.peers.twin import LOSSES, load, twin
from nbcnn.nn import models
from nbcnn.nn.graphs import Graph
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD
from nbcnn.run.net import Net
from nbcnn.run.program import Program
from nbcnn.run.session import TrainingSession

NETWORKS = {
    "small-autoencoder": ((3, 32, 32), 32),
    "autoencoder": ((3, 32, 32), 8),
    "mnist-cnn": ((1, 28, 28), 64),
    "mobilenet": ((3, 32, 32), 32),
    "resnet18": ((3, 32, 32), 8),
}
"""The shape of an image, and the batch."""


def sides(name: str) -> tuple[TrainingSession, Callable[[], None]]:
    """A session of the network, and a function that takes one step of its twin."""
    shape, batch = NETWORKS[name]
    layers = models.MODELS[name](*shape)
    if not hasattr(list(layers)[-1], "needs_labels"):
        layers = layers.with_loss(MSE()) if isinstance(layers, Graph) else [*layers, MSE()]
    net = Net(layers, shape, mode="cpu", seed=1)
    random = np.random.default_rng(2)
    images = random.random((batch, *shape), dtype=np.float32)
    labels = random.integers(0, 10, batch).astype(np.int32) if net.takes_classes else None
    rates = np.full(100_000, 1e-3, np.float32)
    session = TrainingSession(net, images, optimizer=SGD(momentum=0.9), learning_rates=rates, batch=batch, labels=labels)
    module = twin(net.layers).train()
    load(module, net.params.as_dict())
    loss = LOSSES[type(net.layers[-1])](net.layers[-1])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    x = torch.from_numpy(images)
    target = x if labels is None else torch.from_numpy(labels.astype(np.int64))

    def step() -> None:
        optimizer.zero_grad()
        loss(module(x), target).backward()
        optimizer.step()

    return session, step


def ours(session: TrainingSession, run: Callable[[Program], None] = Program.replay) -> None:
    """One step of a session."""
    if not session.steps_left:
        session.begin_epoch(session.status().epoch + 1)
    session.step(run)


def spent(step: Callable[[], None]) -> float:
    """Milliseconds of processor time."""
    began = time.process_time()
    step()
    return 1e3 * (time.process_time() - began)


def profiled(session: TrainingSession, repeats: int) -> dict[str, float]:
    """Milliseconds of processor time of each op of a step, the median."""
    rows: list[dict[str, float]] = []

    def run(program: Program) -> None:
        found: dict[str, float] = defaultdict(float)
        for item, launches in program.bound:
            for launch in launches:
                found[str(item.step.op)] += spent(partial(launch.run, 0))
        rows.append(found)

    for _ in range(repeats):
        ours(session, run)
    return {op: median(row[op] for row in rows) for op in rows[0]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | image | batch | nbcnn, ms | PyTorch, ms | nbcnn / PyTorch |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for name in given.networks:
        session, theirs = sides(name)
        session.begin_epoch(0)
        pairs = [(spent(partial(ours, session)), spent(theirs)) for _ in range(given.repeats + 2)][2:]
        mine, other = (median(each) for each in zip(*pairs, strict=True))
        shape, batch = NETWORKS[name]
        ratio = median(a / b for a, b in pairs)
        print(f"| `{name}` | {'×'.join(map(str, shape))} | {batch} | {mine:.1f} | {other:.1f} | {ratio:.2f} |", flush=True)
        if given.profile:
            for op, ms in sorted(profiled(session, 5).items(), key=lambda each: -each[1]):
                print(f"    {op:60} {ms:8.2f}")
        session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
