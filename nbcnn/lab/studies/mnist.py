"""This study, `study mnist`, trains the classifier over several seeds, fused, unfused and by its twin in PyTorch, and times its training step.

The recipe is train.py's for `mnist-cnn`: He init, batch 128, Adam at 0.001, cosine to zero. An epoch's time is the training alone, from its
permutation to its last step, the smaller last batch included; accuracy is the share of images whose largest logit is right, of the test images and
of all training images, after the first epoch and after the last.
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
ROWS = 5
"""How often they are timed."""


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
    """One run: accuracies, milliseconds of its epochs (the first warms up and counts by itself, unless it is the only one)."""
    session = session_of(data, way, seed, epochs)
    net = session.net

    def one(epoch: int) -> None:
        session.begin_epoch(epoch)
        while session.steps_left:
            session.step()

    def accuracy(images: np.ndarray, labels: np.ndarray) -> float:
        return float((net.predict(images, 1000).argmax(1) == labels).mean())

    found = _run(data, epochs, one, net.device.synchronize, accuracy)
    return {"form": way.form, "mode": net.mode, "precision": net.precision, "norm": way.norm, "seed": seed} | found


def torch_train(data: Dataset, seed: int, epochs: int, norm: str = "s0", precision: str = "fp32", device: str = "cuda") -> dict[str, Any]:
    """The same run by the twin in PyTorch."""
    from nbcnn.lab.peers import mnist as twins

    twin = twins.Twin(data, BATCH, RATE, epochs, norm=norm, precision=precision, seed=seed, device=device)
    found = _run(data, epochs, lambda epoch: twin.epoch(), twin.wait, twin.accuracy)
    return {"form": twins.FORM, "precision": precision, "norm": norm, "seed": seed} | found


def _run(data: Dataset, epochs: int, one: Callable[[int], Any], wait: Callable[[], None], accuracy: Callable[..., float]) -> dict[str, Any]:
    """Train by `one`, epoch by epoch: accuracies after the first epoch and the last, and times."""
    spent, right = [], []
    for epoch in range(epochs):
        spent.append(wall_ms(partial(one, epoch), wait))
        if epoch in (0, epochs - 1):
            right.append((accuracy(data.test_images, data.test_labels), accuracy(data.train_images, data.train_labels)))
    return {
        "what": "train",
        "data": data.name,
        "epochs": epochs,
        "accuracy": right[-1][0],
        "train_accuracy": right[-1][1],
        "first_accuracy": right[0][0],
        "first_train_accuracy": right[0][1],
        "first_epoch_ms": spent[0],
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
    """Milliseconds of a step in each of ROWS rows of `count` steps; what `before` does between the rows does not count."""
    spent = []
    for _ in range(ROWS):
        before()
        spent.append(wall_ms(lambda: [step() for _ in range(count)], wait) / count)
    return spent


def step_row(form: str, milliseconds: list[float]) -> dict[str, Any]:
    """A row of a training step's times."""
    return {"what": "step", "form": form, "batch": BATCH, "step_ms": summarise(milliseconds).as_dict()}


def torch_steps(data: Dataset, norm: str = "s0", precisions: tuple[str, ...] = ("fp32", "tf32"), device: str = "cuda") -> Iterator[dict[str, Any]]:
    """The same step in PyTorch, captured as one CUDA graph: gather, forward, loss, backward, Adam (capturable, fused)."""
    from nbcnn.lab.peers import mnist as twins

    for precision in precisions:
        twin = twins.Twin(data, BATCH, RATE, ROWS, norm=norm, precision=precision, device=device)  # a learning rate for every step of all rows
        count = min(STEPS, twin.whole)
        yield step_row(f"PyTorch {precision}, as a graph", _spent(twin.step, count, twin.wait, twin.begin_epoch))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in words."""
    lines = []
    for form in dict.fromkeys(row["form"] for row in rows if row["what"] == "train"):
        runs = [row for row in rows if row["what"] == "train" and row["form"] == form]
        found = [row["accuracy"] for row in runs]
        seconds = [row["epoch_ms"]["median"] / 1e3 for row in runs]
        way = f"{runs[0]['mode']} {runs[0]['precision']}, {form}" if "mode" in runs[0] else f"{form}, {runs[0]['precision']}"
        each = ", ".join(f"{accuracy:.2%}" for accuracy in found)
        lines.append(f"{runs[0]['data']}, {way}, EvoNorm-{runs[0]['norm'].upper()}, {runs[0]['epochs']} epochs:")
        lines.append(f"  accuracy by seed {each}; mean {mean(found):.2%}, least {min(found):.2%}; {np.median(seconds):.3f} s per epoch")
        first, last, test = (mean(row[name] for row in runs) for name in ("first_train_accuracy", "train_accuracy", "first_accuracy"))
        lines.append(
            f"  after epoch 1: {first:.2%} of the training images, {test:.2%} of the test images; in the end {last:.2%} of the training images"
        )
    forms = [row for row in rows if row["what"] == "step"]
    for row in forms:
        ratio = row["step_ms"]["median"] / forms[0]["step_ms"]["median"]
        lines.append(f"training step of {BATCH}: {row['form']:32} {row['step_ms']['median'] * 1e3:8.1f} µs  {ratio:5.2f}×")
    return lines
