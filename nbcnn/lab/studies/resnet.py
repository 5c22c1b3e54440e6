"""This study, `study resnet`, trains ResNet-18 on small images by the recipe that train.py has for it, over several seeds, beside PyTorch's twin.

Seconds are those of the training alone, from the first epoch's permutation to the last update, without compilation, capture and evaluation; accuracy
is the share of the test images whose largest logit is right after the last epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import mean
from typing import Any

from nbcnn.datasets.augment import Augment
from nbcnn.datasets.dataset import Dataset
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.lab.peers.resnet import Recipe
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.nn.models import resnet18
from nbcnn.nn.optim import SGD, OneCycle
from nbcnn.run.net import Net
from nbcnn.run.rows import Choice
from nbcnn.run.session import TrainingSession


def recipe_of(flags: Mapping[str, Any], images: int, epochs: int) -> Recipe:
    """The recipe of `flags`, those of `nbcnn.cli.recipes`, for so many training images and epochs."""
    augment, steps = Augment.parse(flags["augment"]), -(-images // flags["batch"])
    rates = OneCycle(flags["lr"], rise=flags["rise"]).rates(epochs * steps, steps)
    chosen = {name: flags[name] for name in ("batch", "momentum", "weight_decay", "label_smoothing")}
    return Recipe(**chosen, crop=augment.crop, flip=bool(augment.flip), rates=rates.tolist(), epochs=epochs)


def train(data: Dataset, recipe: Recipe, choice: Choice, seed: int, filters: int = 64) -> dict[str, Any]:
    """One training of ours: accuracy, seconds, and the seconds that the session took to be ready. Raises ValueError for data without labels."""
    import numpy as np

    if data.train_labels is None or data.test_labels is None or data.classes is None:
        raise ValueError(f"{data.name} has no labels")
    began, shape = time.perf_counter(), data.train_images.shape[1:]
    channels, height, width = shape
    graph = resnet18(channels, height, width, classes=len(data.classes), filters=filters).with_loss(
        SoftmaxCrossEntropy(label_smoothing=recipe.label_smoothing)
    )
    net = Net(graph, shape, choice=choice, seed=seed, normalisation=Normalisation.of(data.train_images))
    session = TrainingSession(
        net,
        data.train_images,
        optimizer=SGD(momentum=recipe.momentum, nesterov=True, weight_decay=recipe.weight_decay),
        learning_rates=np.array(recipe.rates, np.float32),
        batch=recipe.batch,
        seed=seed,
        labels=data.train_labels,
        augment=Augment(flip=recipe.flip, crop=recipe.crop),
    )
    net.device.synchronize()
    ready, began = time.perf_counter() - began, time.perf_counter()
    for epoch in range(recipe.epochs):
        session.begin_epoch(epoch)
        while session.steps_left:
            session.step()
    net.device.synchronize()
    seconds = time.perf_counter() - began
    loss = session.status().loss_mean
    session.close()
    found = net.predict(data.test_images, min(1000, len(data.test_images))).argmax(1)
    row = {"form": f"nbcnn {net.mode} {net.precision}", "seed": seed, "epochs": recipe.epochs, "accuracy": float((found == data.test_labels).mean())}
    net.close()
    return row | {"seconds": seconds, "ready_seconds": ready, "train_loss": loss}


def line(row: Mapping[str, Any]) -> str:
    """One training in words."""
    about = f"ready after {row['ready_seconds']:.1f} s"
    return f"{row['form']:24} seed {row['seed']}: accuracy {row['accuracy']:.2%} after {row['seconds']:.2f} s of training, {about}"


def summary(rows: list[dict[str, Any]], title: str = "ResNet-18") -> list[str]:
    """Means over the seeds of trainings called `title`, and what ours are to each peer's."""
    forms = list(dict.fromkeys(row["form"] for row in rows))
    means = {form: tuple(mean(row[name] for row in rows if row["form"] == form) for name in ("accuracy", "seconds")) for form in forms}
    own = means[forms[0]]
    lines = [f"{title}, {rows[0]['epochs']} epochs, mean of {len({row['seed'] for row in rows})} seeds"]
    for form, (accuracy, seconds) in means.items():
        beside = "" if form == forms[0] else f"  nbcnn: {100 * (own[0] - accuracy):+.2f} points, {own[1] / seconds:.2f} × the time"
        lines.append(f"  {form:24} {accuracy:8.2%} {seconds:8.2f} s{beside}")
    return lines
