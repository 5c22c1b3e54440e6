"""The twin of examples/cifar94.py in PyTorch: the same network, first weights, recipe and views, from the data set to the test accuracy.

    python -m nbcnn.lab.peers.cifar94 --data-dir data --seeds 5 --form compile --out twin.json

It does what makes PyTorch fast: channels_last, autocast to bfloat16, fused SGD, images augmented on the GPU once per epoch, and the whole training
step as one CUDA graph, of the eager step (`graph`) or of one whose network went through torch.compile (`compile`; `compile-max` is its
max-autotune). The seconds are those from the first training step's images to the last update, without compilation and capture; predictions are timed
apart. Random numbers are PyTorch's, so a seed draws other weights and shifts than the same seed of the example.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.datasets import Dataset, load
from nbcnn.files import numerals
from nbcnn.files.extras import PackageMissing
from nbcnn.lab.peers.torch_step import MISSING, available, captured
from nbcnn.nn.optim import Piecewise

FORMS = ("eager", "graph", "compile", "compile-max")
BATCH, MOMENTUM, SHIFT = 1000, 0.85, 2
RATE = 11.5 / (1024 * (1 + 1 / (1 - MOMENTUM))) * BATCH
DECAY = 0.0153 / 11.5
BIASES = 64.0
SMOOTHING = 0.2
WARM_STEPS = 3


def network(images: Any) -> Any:
    """The network on the device of `images` (M, 3, 32, 32), normalised float32, which its first convolution whitens."""
    import torch

    nn = torch.nn

    class Ninth(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x / 9

    def block(channels: int, filters: int) -> list[Any]:
        convs = [nn.Conv2d(c, filters, 3, padding=1, bias=False) for c in (channels, filters)]
        for conv in convs:
            nn.init.dirac_(conv.weight[: min(conv.weight.shape[:2])].data)
        norms = [nn.BatchNorm2d(filters, momentum=0.4) for _ in convs]
        return [convs[0], nn.MaxPool2d(2), norms[0], nn.GELU(), convs[1], norms[1], nn.GELU()]

    whitening = nn.Conv2d(3, 24, 2)
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    variances, directions = torch.linalg.eigh(torch.cov(patches.T.double()))
    filters = (directions / (variances + 5e-4).sqrt()).T.reshape(12, 3, 2, 2).float()
    whitening.weight.data[:] = torch.cat([filters, -filters])
    whitening.bias.data.zero_()
    net = nn.Sequential(
        *(whitening, nn.GELU(), *block(24, 64), *block(64, 256), *block(256, 256)),
        *(nn.MaxPool2d(3), nn.Flatten(), nn.Linear(256, 10, bias=False), Ninth()),
    )
    whitening.weight.requires_grad_(False)
    for module in net:
        if isinstance(module, nn.BatchNorm2d):
            module.weight.requires_grad_(False)
    return net.to(images.device, memory_format=torch.channels_last)


def groups(net: Any) -> list[dict[str, Any]]:
    """The parameters that are trained, as an optimizer takes them: the norms' biases, fast and without decay; all others."""
    import torch

    norms = [module.bias for module in net if isinstance(module, torch.nn.BatchNorm2d)]
    fast = {id(each) for each in norms}
    others = [each for each in net.parameters() if each.requires_grad and id(each) not in fast]
    device = others[0].device
    rates = [torch.zeros((), device=device) for _ in range(2)]  # a tensor, so that a captured step reads the present rate
    return [{"params": norms, "lr": rates[0], "weight_decay": 0.0}, {"params": others, "lr": rates[1], "weight_decay": DECAY}]


class Augmented:
    """All training images of an epoch: mirrored in every other epoch, from the first or the second on; shifted, their borders reflected."""

    def __init__(self, images: Any) -> None:
        import torch

        self.padded = torch.nn.functional.pad(images, (SHIFT,) * 4, mode="reflect").to(torch.bfloat16).permute(0, 2, 3, 1).contiguous()
        self.coins = torch.randint(0, 2, (len(images),), device=images.device)

    def epoch(self, epoch: int) -> Any:
        """The images of `epoch`, bfloat16 (M, 32, 32, 3)."""
        import torch

        count, height, width, _ = self.padded.shape
        height, width, device = height - 2 * SHIFT, width - 2 * SHIFT, self.padded.device
        down, right = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), device=device)
        rows, columns = torch.arange(height, device=device) + down, torch.arange(width, device=device) + right
        mirrored = ((self.coins + epoch) % 2 == 1)[:, None]
        columns = torch.where(mirrored, columns.flip(1), columns)
        which = torch.arange(count, device=device)[:, None, None]
        return self.padded[which, rows[:, :, None], columns[:, None, :]]


def step_of(net: Any, optimizer: Any, x: Any, y: Any, form: str) -> Callable[[], Any]:
    """One training step on the batch that is in `x` and `y`."""
    import torch

    forward = net
    if form.startswith("compile"):
        forward = torch.compile(net, dynamic=False, mode="max-autotune-no-cudagraphs" if form == "compile-max" else "default")
    kind = x.device.type

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(kind, dtype=torch.bfloat16):
            logits = forward(x)
        torch.nn.functional.cross_entropy(logits.float(), y, label_smoothing=SMOOTHING).backward()
        optimizer.step()

    return step


def ready(step: Callable[[], Any], net: Any, optimizer: Any, form: str, device: Any) -> Callable[[], Any]:
    """`step` compiled and captured; network and momenta are as they were before."""

    kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    if device.type == "cpu":
        return step
    made = step
    if form == "eager":
        for _ in range(WARM_STEPS):
            step()
    else:
        made = captured(step, WARM_STEPS)
    net.load_state_dict(kept)
    for held in optimizer.state.values():
        held["momentum_buffer"].zero_()
    return made


def predicted(net: Any, images: Any, batch: int = 2000) -> Any:
    """Logits (M, 10), means over the image, its mirror image, and both moved by a pixel along the diagonal in both directions."""
    import torch

    functional, found = torch.nn.functional, []
    height, width = images.shape[2:]
    net.eval()
    with torch.no_grad(), torch.autocast(images.device.type, dtype=torch.bfloat16):
        for x in images.split(batch):
            padded = functional.pad(x, (1,) * 4, mode="reflect")
            views = [(0.5, x), (0.25, padded[:, :, :height, :width]), (0.25, padded[:, :, 2:, 2:])]
            found.append(sum(weight / 2 * (net(view) + net(view.flip(3))).float() for weight, view in views))
    net.train()
    return torch.cat(found)


def train(data: Dataset, *, epochs: int = 10, seed: int = 0, form: str = "graph", batch: int = BATCH, device: Any = None) -> dict[str, Any]:
    """Train once; {"form", "seed", "accuracy", "seconds", "warm_seconds", "predict_seconds", "steps"}."""
    import torch

    device = torch.device(device or "cuda")
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    pixels, tests = (torch.from_numpy(np.array(each)).to(device) for each in (data.train_images, data.test_images))
    labels = torch.from_numpy(np.array(data.train_labels)).long().to(device)
    mean, deviation = (each.reshape(1, 3, 1, 1) for each in _normalisation(pixels))
    images, tests = ((each.float() / 255 - mean) / deviation for each in (pixels, tests))
    net = network(images[:5000])
    optimizer = torch.optim.SGD(groups(net), momentum=MOMENTUM, nesterov=True, fused=True)
    batch = min(batch, len(images))
    x = torch.zeros((batch, *images.shape[1:]), dtype=torch.bfloat16, device=device).to(memory_format=torch.channels_last)
    y = torch.zeros(batch, dtype=torch.long, device=device)
    steps = len(images) // batch
    rates = Piecewise(RATE, points=((0, 0.2), (0.23 * epochs, 1), (epochs, 0.07))).rates(epochs * steps, steps)
    began = time.perf_counter()
    step = ready(step_of(net, optimizer, x, y, form), net, optimizer, form, device)
    augmented = Augmented(images)
    augmented.epoch(0)
    wait()
    warm, began, at = time.perf_counter() - began, time.perf_counter(), 0
    for epoch in range(epochs):
        moved, order = augmented.epoch(epoch), torch.randperm(len(images), device=device)
        for start in range(0, steps * batch, batch):
            chosen = order[start : start + batch]
            torch.index_select(moved, 0, chosen, out=x.permute(0, 2, 3, 1))
            torch.index_select(labels, 0, chosen, out=y)
            for group, factor in zip(optimizer.param_groups, (BIASES, 1.0), strict=True):
                group["lr"].fill_(float(rates[at]) * factor)
            step()
            at += 1
    wait()
    seconds, began = time.perf_counter() - began, time.perf_counter()
    logits = predicted(net, tests)
    wait()
    predict_seconds = time.perf_counter() - began
    right = torch.from_numpy(np.array(data.test_labels)).to(device)
    accuracy = float((logits.argmax(1) == right).double().mean())
    found = {"form": form, "seed": seed, "accuracy": accuracy, "seconds": seconds, "warm_seconds": warm, "predict_seconds": predict_seconds}
    return found | {"steps": epochs * steps, "batch": batch, "torch": torch.__version__}


def _normalisation(pixels: Any) -> tuple[Any, Any]:
    """Mean and deviation of the channels of `pixels` (M, 3, H, W), uint8, as fractions of 255."""
    parts = [part.double().div_(255) for part in pixels.split(5000)]
    count = pixels.numel() // pixels.shape[1]
    mean = sum(part.sum((0, 2, 3)) for part in parts) / count
    variance = sum(((part - mean.reshape(1, -1, 1, 1)) ** 2).sum((0, 2, 3)) for part in parts) / count
    return mean.float(), variance.sqrt().float()


def main(argv: Sequence[str] | None = None) -> int:
    """Train with every seed, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data", help="where CIFAR-10 is (data/README.md)")
    parser.add_argument("--epochs", type=numerals.whole, default=10)
    parser.add_argument("--seeds", type=numerals.whole, default=1, help="how many trainings")
    parser.add_argument("--form", choices=FORMS, default="graph")
    parser.add_argument("--limit", type=numerals.whole, default=None, help="take so many images of each set")
    parser.add_argument("--out", type=Path, default=None, help="write the results to this JSON file")
    args = parser.parse_args(argv)
    if not available():
        print(f"nbcnn: error: {MISSING}", file=sys.stderr)
        return PackageMissing.exit_code
    data = load("cifar10", data_dir=args.data_dir, limit=args.limit)
    once = partial(train, data, epochs=args.epochs, form=args.form)
    rows = []
    for seed in range(args.seeds):
        rows.append(once(seed=seed))
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
        row = rows[-1]
        print(f"PyTorch {row['form']}, seed {seed}: test accuracy {row['accuracy']:.2%} after {row['seconds']:.2f} s of training", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
