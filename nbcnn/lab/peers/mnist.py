"""This module has the twin of `study mnist` in PyTorch: the same network, recipe and data, a training step as one CUDA graph.

Batches, learning rates and the update are in the graph, so that a step is one replay; the smaller last batch of an epoch runs eagerly. Random
numbers are PyTorch's: a seed draws other first weights and orders than ours. This file needs torch; import it only where torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from nbcnn.datasets.dataset import Dataset
from nbcnn.lab.peers import torch_step as peers
from nbcnn.lab.peers.fusion import torch_norm
from nbcnn.nn.optim import learning_rates

FORM = "PyTorch in a CUDA graph"


class Norm(nn.Module):
    """EvoNorm-S0 of two channels in a group, or EvoNorm-B0, in PyTorch's own operations."""

    def __init__(self, filters: int, kind: str) -> None:
        super().__init__()
        self.v, self.gamma = (nn.Parameter(torch.ones(1, filters, 1, 1)) for _ in range(2))
        self.beta = nn.Parameter(torch.zeros(1, filters, 1, 1))
        self.function = torch_norm(kind, {"s0": 1e-5, "b0": 1e-3}[kind], filters // 2)

    def forward(self, x: Any) -> Any:
        return self.function(x, self.v, self.gamma, self.beta)


def module(data: Dataset, kind: str) -> Any:
    """The network for `data` with He's first weights and biases of zero."""
    channels, height, width = data.train_images.shape[1:]
    net = nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), Norm(32, kind), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), Norm(64, kind), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 128), nn.ReLU(), nn.Linear(128, len(data.classes or ()))),
    )
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return net


class Twin:
    """One training: `epoch(e)` trains once through the images, `accuracy(…)` is the share of images whose largest logit is right."""

    def __init__(
        self, data: Dataset, batch: int, rate: float, epochs: int, *, norm: str, precision: str, seed: int = 0, device: str = "cuda"
    ) -> None:
        peers._prepare(precision)
        torch.manual_seed(seed)
        self.images, self.labels = torch.from_numpy(data.train_images).to(device), torch.from_numpy(np.array(data.train_labels)).long().to(device)
        count = len(self.images)
        self.whole, self.rest = divmod(count, batch)
        self.net = module(data, norm).to(device)
        self.rates = torch.from_numpy(learning_rates("cosine", rate, epochs * -(-count // batch)).astype(np.float32)).to(device)
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=self.rate, fused=True, capturable=device == "cuda")
        self.order, self.offsets = torch.arange(count, device=device), torch.arange(batch, device=device)
        self.at, self.taken = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        kept = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        self.step: Callable[[], Any] = lambda: self._step(batch)
        if device == "cuda":
            self.step = peers.captured(self.step)
            self.net.load_state_dict(kept)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
            self.taken.zero_()

    def _step(self, batch: int) -> None:
        chosen = self.order[self.at + self.offsets[:batch]]
        self.rate.copy_(self.rates[self.taken].squeeze())
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.net(self.images[chosen].float() / 255), self.labels[chosen]).backward()
        self.optimizer.step()
        self.at += batch
        self.taken += 1

    def begin_epoch(self) -> None:
        """Draw the order of an epoch."""
        self.order.copy_(torch.randperm(len(self.order), device=self.order.device))
        self.at.zero_()

    def epoch(self) -> None:
        """Train once through the images."""
        self.begin_epoch()
        for _ in range(self.whole):
            self.step()
        if self.rest:
            self._step(self.rest)

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.order.is_cuda:
            torch.cuda.synchronize()

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """The share of `images` uint8 (M, C, H, W) whose largest logit is at their label."""
        device, right = self.labels.device, 0
        with torch.no_grad():
            for x, y in zip(torch.from_numpy(images).split(1000), torch.from_numpy(np.array(labels)).split(1000), strict=True):
                right += int((self.net(x.to(device).float() / 255).argmax(1) == y.to(device)).sum())
        return right / len(images)
