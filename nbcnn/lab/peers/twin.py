"""This module makes the PyTorch twin of a network of ours: a torch.nn.Module of the same layers, wired alike, with the same weights.

It is made from the layers themselves, a list or a `Graph`, so that a network of the user's own has a twin, too. This file needs torch; import it only
where torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nbcnn.files.errors import UsageError
from nbcnn.nn import activations, joins, layers, losses, norms, resampling
from nbcnn.nn.graphs import wired
from nbcnn.nn.layers import Residual, pair
from nbcnn.plan.graph import named


class _Conv2d(nn.Conv2d):
    """A convolution whose borders may differ from side to side: (top, bottom, left, right)."""

    def __init__(self, layer: Any) -> None:
        top, bottom, left, right = layer.borders
        self.uneven = (left, right, top, bottom) if (top, left) != (bottom, right) else None
        pad = 0 if self.uneven else (top, left)
        sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, pad, layer.dilation, layer.groups, layer.bias)
        super().__init__(*sizes)

    def forward(self, x: Any) -> Any:
        return super().forward(F.pad(x, self.uneven) if self.uneven else x)


class _Function(nn.Module):
    """A layer without parameters, as a function of what it reads."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *xs: Any) -> Any:
        return self.function(*xs)


class _Around(nn.Module):
    """y = body(x) + x."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.body = Twin(layer.body)

    def forward(self, x: Any) -> Any:
        return self.body(x) + x


def _pool(layer: Any) -> dict[str, Any]:
    size, stride, pad = layer.geometry()
    return {"kernel_size": size, "stride": stride, "padding": pad, "ceil_mode": layer.ceil_mode}


def _added(*xs: Any) -> Any:
    y = xs[0]
    for x in xs[1:]:
        y = y + x
    return y


def _transposed(layer: Any) -> nn.Module:
    sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.output_padding)
    return nn.ConvTranspose2d(*sizes, bias=layer.bias)


def _padded(layer: Any) -> nn.Module:
    top, bottom, left, right = layer.sides()
    return _Function(lambda x: F.pad(x, (left, right, top, bottom), value=layer.value))


MODULES: dict[type, Callable[[Any], Any]] = {
    layers.Conv2d: _Conv2d,
    layers.ConvTranspose2d: _transposed,
    layers.Linear: lambda layer: nn.Linear(layer.in_features, layer.out_features, layer.bias),
    layers.Flatten: lambda layer: nn.Flatten(),
    Residual: _Around,
    activations.ReLU: lambda layer: nn.ReLU(),
    activations.LeakyReLU: lambda layer: nn.LeakyReLU(layer.negative_slope),
    activations.Sigmoid: lambda layer: nn.Sigmoid(),
    activations.Swish: lambda layer: nn.SiLU(),
    activations.Softmax: lambda layer: nn.Softmax(1),
    activations.Tanh: lambda layer: nn.Tanh(),
    activations.ELU: lambda layer: nn.ELU(layer.alpha),
    activations.ReLU6: lambda layer: nn.ReLU6(),
    activations.HardSwish: lambda layer: nn.Hardswish(),
    activations.PReLU: lambda layer: nn.PReLU(layer.num_parameters),
    activations.GELU: lambda layer: nn.GELU(layer.approximate),
    norms.BatchNorm2d: lambda layer: nn.BatchNorm2d(layer.channels, layer.eps, layer.momentum),
    norms.GroupNorm: lambda layer: nn.GroupNorm(layer.num_groups, layer.channels, layer.eps),
    norms.InstanceNorm2d: lambda layer: nn.InstanceNorm2d(layer.channels, layer.eps, affine=layer.affine),
    norms.LayerNorm: lambda layer: nn.LayerNorm(layer.normalized_shape, layer.eps),
    resampling.MaxPool2d: lambda layer: nn.MaxPool2d(**_pool(layer)),
    resampling.AvgPool2d: lambda layer: nn.AvgPool2d(**_pool(layer), count_include_pad=layer.count_include_pad),
    resampling.GlobalAvgPool2d: lambda layer: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    resampling.Upsample2d: lambda layer: nn.Upsample(scale_factor=layer.scale_factor),
    resampling.Resize: lambda layer: nn.Upsample(scale_factor=pair(layer.scale_factor), mode=layer.mode),
    joins.Add: lambda layer: _Function(_added),
    joins.Mul: lambda layer: _Function(lambda a, b: a * b),
    joins.Concat: lambda layer: _Function(lambda *xs: torch.cat(xs, 1)),
    joins.Pad: _padded,
    joins.Reshape: lambda layer: _Function(lambda x: x.reshape(len(x), *layer.shape)),
}
"""By the class of a layer of ours, the function that makes its module. A layer that draws random numbers has none: no two libraries draw alike."""

LOSSES: dict[type, Callable[[Any], Callable[[Any, Any], Any]]] = {
    losses.MSE: lambda loss: F.mse_loss,
    losses.L1: lambda loss: F.l1_loss,
    losses.Huber: lambda loss: lambda y, target: F.huber_loss(y, target, delta=loss.delta),
    losses.BCEWithLogits: lambda loss: F.binary_cross_entropy_with_logits,
    losses.SoftmaxCrossEntropy: lambda loss: _CrossEntropy(loss),
}
"""By the class of a loss, the function that makes it of outputs and targets."""


class _CrossEntropy:
    def __init__(self, loss: Any) -> None:
        self.weight = loss.weight
        self.named = {"ignore_index": -100 if loss.ignore_index is None else loss.ignore_index, "label_smoothing": loss.label_smoothing}

    def __call__(self, y: Any, target: Any) -> Any:
        weight = None if self.weight is None else torch.tensor(self.weight, dtype=y.dtype, device=y.device)
        return F.cross_entropy(y, target, weight, **self.named)


def strangers(made: Sequence[Any]) -> list[str]:
    """The classes of layers and losses that have no twin, each once."""
    found = []
    for layer in made:
        if isinstance(layer, Residual):
            found += strangers(layer.body)
        elif type(layer) not in MODULES and type(layer) not in LOSSES:
            found.append(type(layer).__name__)
    return list(dict.fromkeys(found))


class Twin(nn.Module):
    """The module of `made`, a list of layers or a graph whose sizes are filled in; a loss at its end is left out.

    Raises UsageError that names every class of layers that has no twin.
    """

    def __init__(self, made: Any) -> None:
        super().__init__()
        if unknown := strangers(made):
            raise UsageError(f"PyTorch's form of {', '.join(unknown)} is not known here, so the network has no peer")
        nodes, outputs = wired(made).nodes, wired(made).outputs
        if hasattr(made[-1], "needs_labels"):
            nodes, outputs = nodes[:-1], nodes[-1].reads
        (self._output,) = outputs
        # A name of a layer may have dots, which the name of a module must not.
        self._names = {name: f"m{at}" for at, (name, layer) in enumerate(named(made)) if not hasattr(layer, "needs_labels")}
        for name, layer in named(made):
            if name in self._names:
                self.add_module(self._names[name], MODULES[type(layer)](layer))
        # What a call reads for the last time is let go, as a variable of a handwritten forward would be: it may take memory otherwise.
        self._calls: list[tuple[str, tuple[int, ...], int, tuple[int, ...]]] = []
        kept = {self._output}
        for node in reversed(nodes):
            self._calls.insert(0, (self._names[node.name.split("@")[0]], node.reads, node.writes, tuple(set(node.reads) - kept)))
            kept |= set(node.reads)

    def forward(self, x: Any) -> Any:
        values = {0: x}
        for name, reads, writes, done in self._calls:
            values[writes] = getattr(self, name)(*[values[at] for at in reads])
            for at in done:
                del values[at]
        return values[self._output]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Parameters and buffers by the names that our parameters and states have."""
        for name, module in self._names.items():
            made = getattr(self, module)
            if isinstance(made, _Around):
                yield from ((f"{name}.{inner}", tensor) for inner, tensor in made.body.tensors())
                continue
            inside = {**dict(made.named_parameters()), **dict(made.named_buffers())}
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in inside.items() if inner != "num_batches_tracked")

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over our weights and states, float32, by name. Raises KeyError if one is missing."""
        with torch.no_grad():
            for name, tensor in self.tensors():
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name])))


def loss_of(made: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """PyTorch's form of the loss at the end of `made`: outputs, targets → mean loss. Raises UsageError for one that has no twin."""
    if type(made[-1]) not in LOSSES:
        raise UsageError(f"PyTorch's form of the loss {type(made[-1]).__name__} is not known here, so the network has no peer")
    return LOSSES[type(made[-1])](made[-1])
