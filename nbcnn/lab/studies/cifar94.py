"""This study, `study cifar94`, trains the network of examples/cifar94.py over several seeds, beside its twin in PyTorch.

Seconds of both are those from the first training step's images to the last update, with what lies between the epochs, without compilation, capture
and predictions; accuracy is the share of the test images of which the mean of six views is right.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from nbcnn.datasets.dataset import Dataset
from nbcnn.files.errors import UsageError
from nbcnn.train.events import Callback, Epoch
from nbcnn.train.trainer import Trainer

EXAMPLE = Path(__file__).parents[3] / "examples" / "cifar94.py"
VIEWS = "flip,shift:1"
TEST_BATCH = 1000


def example() -> ModuleType:
    """The example as a module. Raises UsageError where nbcnn is installed without its repository."""
    spec = importlib.util.spec_from_file_location("cifar94", EXAMPLE)
    if spec is None or spec.loader is None or not EXAMPLE.is_file():
        raise UsageError(f"study cifar94 trains the network of {EXAMPLE}, which is not there: run it in a checkout of the repository")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock(Callback):
    """When the first epoch began and the last one ended."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        self.ended = time.perf_counter()
        self.began = self.began or self.ended - epoch.seconds


def train(data: Dataset, seed: int, epochs: int) -> dict[str, Any]:
    """One training of ours: accuracy, seconds, those of its epochs alone, and the seconds that it took to be ready."""
    clock, began = Clock(), time.perf_counter()
    model, history = example().train(data, epochs, seed, callbacks=[clock])
    with model:
        scores = model.evaluate(data.test_images, data.test_labels, batch_size=min(TEST_BATCH, len(data.test_images)), views=VIEWS)
        row = {"form": f"nbcnn {model.net.mode} {model.net.precision}", "seed": seed, "epochs": epochs, "accuracy": float(scores["accuracy"])}
    row |= {"seconds": clock.ended - clock.began, "ready_seconds": clock.began - began}
    return row | {"epoch_seconds": sum(each["seconds"] for each in history.rows), "train_loss": float(history.history["loss"][-1])}


def peer(data: Dataset, seed: int, epochs: int, form: str, device: str = "cuda") -> dict[str, Any]:
    """One training of the twin in PyTorch, in the same fields."""
    from nbcnn.lab.peers import cifar94 as twin

    found = twin.train(data, epochs=epochs, seed=seed, form=form, device=device)
    row = {"form": f"PyTorch {form}", "seed": seed, "epochs": epochs, "accuracy": found["accuracy"], "seconds": found["seconds"]}
    return row | {"ready_seconds": found["warm_seconds"], "torch": found["torch"]}
