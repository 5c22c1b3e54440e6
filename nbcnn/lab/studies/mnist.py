"""This study, `study mnist`, trains the classifier over several seeds, fused and unfused, and times its training step beside PyTorch's.

The recipe is train.py's for `mnist-cnn`: He init, batch 128, Adam at 0.001, cosine to zero. An epoch's time is the training alone, from its
permutation to its last step, the smaller last batch included; accuracy is the share of the test images whose largest logit is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import numpy as np

from nbcnn.datasets.dataset import Dataset
from nbcnn.lab.measure.timing import summarise, wall_ms
from nbcnn.nn.models import mnist_cnn
from nbcnn.nn.optim import Adam, learning_rates
from nbcnn.run.net import Net
from nbcnn.run.rows import Choice
from nbcnn.run.session import TrainingSession

BATCH = 128
RATE = 0.001
STEPS = 200
"""Training steps that the step's time is made of."""


@dataclass(frozen=True)
class Way:
    """How the classifier is trained: the flags of one form."""

    choice: Choice
    norm: str = "s0"
    fusing: bool = True

    @property
    def form(self) -> str:
        return "fused" if self.fusing else "unfused"


def session_of(data: Dataset, way: Way, seed: int, epochs: int) -> TrainingSession:
    """The session of one run. Raises ValueError for a data set without labels."""
    if data.train_labels is None or data.test_labels is None or data.classes is None:
        raise ValueError(f"{data.name} has no labels")
    shape = data.train_images.shape[1:]
    layers = mnist_cnn(classes=len(data.classes), norm=way.norm)
    net = Net(layers, shape, choice=way.choice, fusing=way.fusing, seed=seed, init="he")
    rates = learning_rates("cosine", RATE, epochs * -(-len(data.train_images) // BATCH))
    return TrainingSession(
        net,
        data.train_images,
        optimizer=Adam(),
        learning_rates=rates,
        batch=BATCH,
        seed=seed,
        labels=data.train_labels,
        test_labels=data.test_labels,
    )


def train(data: Dataset, way: Way, seed: int, epochs: int) -> dict[str, Any]:
    """One run: accuracy after the last epoch, milliseconds of its epochs (the first warms up and does not count, unless it is the only one)."""
    session = session_of(data, way, seed, epochs)
    net = session.net

    def one(epoch: int) -> None:
        session.begin_epoch(epoch)
        while session.steps_left:
            session.step()

    spent = [wall_ms(partial(one, epoch), net.device.synchronize) for epoch in range(epochs)]
    predicted = net.predict(data.test_images, 1000).argmax(1)
    return {
        "what": "train",
        "data": data.name,
        "mode": net.mode,
        "precision": net.precision,
        "norm": way.norm,
        "form": way.form,
        "seed": seed,
        "epochs": epochs,
        "accuracy": float((predicted == data.test_labels).mean()),
        "epoch_ms": summarise(spent[1:] or spent).as_dict(),
    }


def steps(data: Dataset, way: Way) -> dict[str, Any]:
    """The training step on full batches, replayed; not the reading of its loss."""
    session = session_of(data, way, 0, 1)
    device = session.net.device
    session.begin_epoch(0)
    count = min(STEPS, session.count // BATCH)
    for _ in range(min(20, count)):
        session.step()
    spent = _spent(session.step, count, device.synchronize, lambda: session.begin_epoch(0))
    return step_row(f"nbcnn {session.net.mode} {session.net.precision} {way.form}", spent)


def _spent(step: Callable[[], Any], count: int, wait: Callable[[], None], before: Callable[[], Any] = lambda: None) -> list[float]:
    """Milliseconds of a step in each of five rows of `count` steps; what `before` does between the rows does not count."""
    spent = []
    for _ in range(5):
        before()
        spent.append(wall_ms(lambda: [step() for _ in range(count)], wait) / count)
    return spent


def step_row(form: str, milliseconds: list[float]) -> dict[str, Any]:
    """A row of a training step's times."""
    return {"what": "step", "form": form, "batch": BATCH, "step_ms": summarise(milliseconds).as_dict()}


def torch_steps(data: Dataset, precisions: tuple[str, ...] = ("fp32", "tf32")) -> Iterator[dict[str, Any]]:
    """The same step in PyTorch, captured as one CUDA graph: gather, forward, loss, backward, Adam (capturable, fused)."""
    import torch

    from nbcnn.lab.peers import torch_step as peers

    images, labels = torch.from_numpy(data.train_images).cuda(), torch.from_numpy(data.train_labels).long().cuda()
    for precision in precisions:
        peers._prepare(precision)
        net = _module(data).cuda()
        optimizer = torch.optim.Adam(net.parameters(), lr=RATE, fused=True, capturable=True)
        order = torch.randperm(len(images), device="cuda")
        at = torch.zeros((), dtype=torch.long, device="cuda")

        def step(net: Any = net, optimizer: Any = optimizer, order: Any = order, at: Any = at) -> None:
            chosen = order[(torch.arange(BATCH, device="cuda") + at) % len(images)]
            x, y = images[chosen].float() / 255, labels[chosen]
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            at += BATCH

        yield step_row(f"PyTorch {precision}, as a graph", _replayed(peers.captured(step)))


def _replayed(replay: Callable[[], None]) -> list[float]:
    import torch

    for _ in range(20):
        replay()
    return _spent(replay, STEPS, torch.cuda.synchronize)


def _module(data: Dataset) -> Any:
    """The network in PyTorch's own operations, with its own first weights: only its time counts."""
    import torch

    from nbcnn.lab.peers.fusion import torch_norm

    nn, (channels, height, width) = torch.nn, data.train_images.shape[1:]

    class Norm(torch.nn.Module):
        def __init__(self, filters: int) -> None:
            super().__init__()
            self.v, self.gamma = (torch.nn.Parameter(torch.ones(1, filters, 1, 1)) for _ in range(2))
            self.beta = torch.nn.Parameter(torch.zeros(1, filters, 1, 1))
            self.function = torch_norm("s0", 1e-5, filters // 2)

        def forward(self, x: Any) -> Any:
            return self.function(x, self.v, self.gamma, self.beta)

    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), Norm(32), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), Norm(64), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 128), nn.ReLU(), nn.Linear(128, len(data.classes or ()))),
    )


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in words."""
    lines = []
    for form in dict.fromkeys(row["form"] for row in rows if row["what"] == "train"):
        runs = [row for row in rows if row["what"] == "train" and row["form"] == form]
        found = [row["accuracy"] for row in runs]
        seconds = [row["epoch_ms"]["median"] / 1e3 for row in runs]
        each = ", ".join(f"{accuracy:.2%}" for accuracy in found)
        lines.append(
            f"{runs[0]['data']}, {runs[0]['mode']} {runs[0]['precision']}, EvoNorm-{runs[0]['norm'].upper()}, {form}, {runs[0]['epochs']} epochs:"
        )
        lines.append(f"  accuracy by seed {each}; mean {mean(found):.2%}, least {min(found):.2%}; {np.median(seconds):.3f} s per epoch")
    forms = [row for row in rows if row["what"] == "step"]
    for row in forms:
        ratio = row["step_ms"]["median"] / forms[0]["step_ms"]["median"]
        lines.append(f"training step of {BATCH}: {row['form']:32} {row['step_ms']['median'] * 1e3:8.1f} µs  {ratio:5.2f}×")
    return lines
