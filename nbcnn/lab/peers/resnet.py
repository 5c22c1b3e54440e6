"""This module trains the PyTorch twin of `nbcnn.resnet18` by the recipe that `nbcnn train --model resnet18` has: the peer of `study resnet`.

It does what makes PyTorch fast: channels_last, autocast to bfloat16, fused SGD, images augmented on the GPU once per epoch, and a whole training step
as one CUDA graph, of the eager step (`graph`) or of one whose network went through torch.compile (`compile`; `compile-max`: its max-autotune). The
seconds are those from the first training step's images to the last update; compilation, capture and predictions are timed apart. Random numbers and
first weights are PyTorch's own, of the same distributions as ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.datasets.dataset import Dataset
from nbcnn.lab.peers.torch_step import captured
from nbcnn.nn.models import resnet18

FORMS = ("graph", "compile", "compile-max", "eager")


@dataclass(frozen=True)
class Recipe:
    """How ResNet-18 is trained: images per step, SGD's momentum (Nesterov's), weight decay of what is no norm, what is spread of every label, pixels
    by which images are shifted, and whether they are mirrored; `rates` are those of every training step."""

    batch: int
    momentum: float
    weight_decay: float
    label_smoothing: float
    crop: int
    flip: bool
    rates: Sequence[float]
    epochs: int


class Augmented:
    """Normalised training images: of every epoch in a new order, shifted and mirrored at random; what comes in from outside is zero, as ours."""

    def __init__(self, images: Any, labels: Any, recipe: Recipe) -> None:
        import torch

        crop = recipe.crop
        self.padded = torch.nn.functional.pad(images, (crop,) * 4).permute(0, 2, 3, 1).contiguous()
        self.labels, self.recipe = labels, recipe

    def epoch(self) -> tuple[Any, Any]:
        """Images (M, C, H, W), channels_last, and their labels."""
        import torch

        count, height, width, _ = self.padded.shape
        crop, device = self.recipe.crop, self.padded.device
        order = torch.randperm(count, device=device)
        down, right = torch.randint(0, 2 * crop + 1, (2, count, 1), device=device)
        rows, columns = torch.arange(height - 2 * crop, device=device) + down, torch.arange(width - 2 * crop, device=device) + right
        if self.recipe.flip:
            columns = torch.where(torch.rand(count, 1, device=device) < 0.5, columns.flip(1), columns)
        return self.padded[order[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2), self.labels[order]


def train(data: Dataset, recipe: Recipe, *, seed: int = 0, form: str = "graph", device: str = "cuda", filters: int = 64) -> dict[str, Any]:
    """One training: a row with accuracy after the last epoch, seconds of the training, and seconds that it took to compile and capture."""
    import torch

    from nbcnn.lab.peers.twin import twin

    where = torch.device(device)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    wait: Callable[[], Any] = torch.cuda.synchronize if where.type == "cuda" else (lambda: None)
    pixels, tests = (torch.from_numpy(np.array(each)).to(where) for each in (data.train_images, data.test_images))
    labels, known = (torch.from_numpy(np.array(each)).long().to(where) for each in (data.train_labels, data.test_labels))
    whole = pixels.float() / 255
    mean, deviation = whole.mean((0, 2, 3), keepdim=True), whole.std((0, 2, 3), keepdim=True)
    images, tests = (whole - mean) / deviation, (tests.float() / 255 - mean) / deviation
    channels, height, width = shape = data.train_images.shape[1:]
    net = twin(resnet18(channels, height, width, classes=len(data.classes or ()), filters=filters).sized(shape)).to(
        where, memory_format=torch.channels_last
    )
    norms = [weight for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d) for weight in module.parameters()]
    of_norms = {id(weight) for weight in norms}
    rate = torch.zeros((), device=where)  # a tensor, so that a captured step reads the present rate
    optimizer = torch.optim.SGD(
        [
            {"params": [weight for weight in net.parameters() if id(weight) not in of_norms], "weight_decay": recipe.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=rate,
        momentum=recipe.momentum,
        nesterov=True,
        fused=True,
    )
    augmented, began = Augmented(images.to(torch.bfloat16), labels, recipe), time.perf_counter()
    sizes = {min(recipe.batch, len(images) - start) for start in range(0, len(images), recipe.batch)}
    steps = _steps(net, optimizer, sizes, augmented.epoch(), recipe.label_smoothing, form)
    wait()
    warm, began, at = time.perf_counter() - began, time.perf_counter(), 0
    for _ in range(recipe.epochs):
        moved, wanted = augmented.epoch()
        for start in range(0, len(images), recipe.batch):
            x, y, step = steps[min(recipe.batch, len(images) - start)]
            x.copy_(moved[start : start + len(x)])
            y.copy_(wanted[start : start + len(y)])
            rate.fill_(float(recipe.rates[at]))
            step()
            at += 1
    wait()
    seconds = time.perf_counter() - began
    net.eval()
    with torch.no_grad(), torch.autocast(where.type, dtype=torch.bfloat16):
        found = torch.cat([net(part.to(memory_format=torch.channels_last)).argmax(1) for part in tests.split(1000)])
    accuracy = float((found == known).double().mean())
    row = {"form": f"PyTorch {form}", "seed": seed, "epochs": recipe.epochs, "accuracy": accuracy, "seconds": seconds, "ready_seconds": warm}
    return row | {"torch": torch.__version__}


Step = tuple[Any, Any, Callable[[], Any]]
"""The images and labels that a training step reads, and the step."""


def _steps(net: Any, optimizer: Any, sizes: set[int], first: tuple[Any, Any], smoothing: float, form: str) -> dict[int, Step]:
    """By size of batch the training step, compiled and captured. `net` is then as it was before."""
    import torch

    kind = first[0].device.type
    modes = {"compile": "default", "compile-max": "max-autotune-no-cudagraphs"}
    forward = torch.compile(net, dynamic=False, mode=modes[form]) if form in modes else net
    kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    made: dict[int, Step] = {}
    for size in sorted(sizes, reverse=True):
        x, y = first[0][:size].clone(memory_format=torch.channels_last), first[1][:size].clone()

        def step(x: Any = x, y: Any = y) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(kind, dtype=torch.bfloat16):
                logits = forward(x)
            torch.nn.functional.cross_entropy(logits.float(), y, label_smoothing=smoothing).backward()
            optimizer.step()

        made[size] = x, y, captured(step) if kind == "cuda" and form != "eager" else step
        if kind == "cuda" and form == "eager":
            step()
    net.load_state_dict(kept)
    for held in optimizer.state.values():
        held["momentum_buffer"].zero_()
    return made
