"""This module writes a network as a torch.fx.GraphModule: a submodule for every layer, under the layer's name, and the calls between them.

Every handler of `MODULES` makes the module of PyTorch that computes what a layer does, with parameters of the same names and shapes, so that the
weights go over as a state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from nbcnn.files.errors import UsageError
from nbcnn.model.files import COUNTERS
from nbcnn.nn.activations import (
    ELEMENTWISE,
    Abs,
    Clip,
    Elementwise,
    LogSoftmax,
    Power,
    PReLU,
    Scale,
    Softmax,
)
from nbcnn.nn.corruption import Dropout, MaskSquares, Noise
from nbcnn.nn.graphs import Graph, wired
from nbcnn.nn.joins import Add, Concat, Detach, Mul, Pad, Reshape
from nbcnn.nn.layer import pair
from nbcnn.nn.layers import Conv2d, ConvTranspose2d, Flatten, Linear, Residual
from nbcnn.nn.maps import LinearMap, Permute
from nbcnn.nn.norms import BatchNorm2d, EvoNormB0, EvoNormS0, GroupNorm, InstanceNorm2d, LayerNorm
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d, Resize, Upsample2d
from nbcnn.nn.whitening import Root
from nbcnn.plan.graph import layer_of
from nbcnn.torch import Unsupported, state_dict
from nbcnn.torch.modules import Own
from nbcnn.torch.weights import home_of


def exported(model: Any) -> fx.GraphModule:
    """See `nbcnn.torch.to_module`."""
    if not hasattr(model, "net"):
        raise UsageError(f"to_module takes a nbcnn.Model, got {type(model).__name__}")
    made = filled(module_of(model.net.body), state_dict(model)).eval()
    own = dict(made.named_parameters())
    for name in model.frozen():
        own[name].requires_grad_(False)
    return made


def module_of(layers: Any) -> fx.GraphModule:
    """The module of `layers`, a list or a graph without loss whose sizes are known, in training mode with PyTorch's first weights.

    Raises Unsupported, which names every layer that has no counterpart.
    """
    writing = _Writing()
    whole = wired(layers)
    shapes = layers.shapes() if isinstance(layers, Graph) else []
    values: dict[int, fx.Node] = {}
    for at in range(whole.inputs):
        values[at] = writing.graph.placeholder("x" if whole.inputs == 1 else f"x{at + 1}")
    for name, layer, reads, writes in whole.nodes:
        given = [values[at] for at in reads]
        if isinstance(layer, Mul):
            given = writing.widened(given, [shapes[at] for at in reads])
        values[writes] = writing.call(layer_of(name), layer, given)
    if writing.problems:
        raise Unsupported("PyTorch has no counterpart of these layers", list(dict.fromkeys(writing.problems)))
    made = [values[at] for at in whole.outputs]
    writing.graph.output(made[0] if len(made) == 1 else tuple(made))
    return fx.GraphModule(writing.root, writing.graph, "Nbcnn")


def filled(module: fx.GraphModule, state: Mapping[str, Tensor]) -> fx.GraphModule:
    """`module` with the parameters and states of its layers, by name."""
    missing, unexpected = module.load_state_dict(state, strict=False)
    if unexpected or any(not name.endswith(COUNTERS) for name in missing):
        raise AssertionError(f"a handler has other names than its layer: {missing} {unexpected}")
    return module


class _Writing:
    """A graph of calls that is being written, and the modules that it calls."""

    def __init__(self) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.problems: list[str] = []

    def widened(self, reads: Sequence[fx.Node], shapes: Sequence[tuple[int, ...]]) -> list[fx.Node]:
        """The operands of a product; a factor (N, C) of images as (N, C, 1, 1), because broadcasting matches the last axes."""
        axes = max(map(len, shapes))
        return [
            x if len(shape) == axes else self.graph.call_function(torch.reshape, (x, (-1, *shape, *(1,) * (axes - len(shape)))))
            for x, shape in zip(reads, shapes, strict=True)
        ]

    def call(self, name: str, layer: Any, reads: Sequence[fx.Node]) -> fx.Node:
        """The node of a layer called on others."""
        if isinstance(layer, Residual):
            y = reads[0]
            for inner, part in layer.named_body(name):
                y = self.call(inner, part, [y])
            return self.graph.call_function(torch.add, (y, reads[0]))
        if type(layer) in FUNCTIONS:
            return FUNCTIONS[type(layer)](self.graph, layer, reads)
        if type(layer) not in MODULES:
            self.problems.append(f"{name}: {type(layer).__name__}")
            return reads[0]
        home, last = home_of(self.root, name)
        if not hasattr(home, last):
            home.add_module(last, MODULES[type(layer)](layer))
        # PyTorch's convolutions pad both sides of an axis alike.
        uneven = isinstance(layer, Conv2d | ConvTranspose2d) and layer.borders[::2] != layer.borders[1::2]
        if uneven and isinstance(layer, Conv2d):
            reads = [_pad(self.graph, Pad(layer.borders), reads)]
        made = self.graph.call_module(name, tuple(reads))
        if uneven and isinstance(layer, ConvTranspose2d):
            top, bottom, left, right = layer.borders
            made = _pad(self.graph, Pad((-top, -bottom, -left, -right)), [made])
        return made


class Layered(Own):
    """A layer without parameters that PyTorch has no module for: its function is in `FORWARD`."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        if isinstance(layer, LinearMap):
            rows = layer.rows()
            taps = max(1, *map(len, rows))
            filled = [[*row, *([(0, 0.0)] * (taps - len(row)))] for row in rows]
            # Buffers, so that they move with the module, but no part of its state dict.
            self.register_buffer("indices", torch.tensor([at for row in filled for at, _ in row]), persistent=False)
            self.register_buffer("weights", torch.tensor([[weight for _, weight in row] for row in filled]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """y of a batch x."""
        return FORWARD[type(self.layer)](self, x)


def _mapped(module: Any, x: Tensor) -> Tensor:
    """y[…, p, …] = Σ_k weights[p, k]·x[…, indices[p, k], …]."""
    axis, (made, taps) = module.layer.axis, module.weights.shape
    taken = x.index_select(axis, module.indices).unflatten(axis, (made, taps))
    return (taken * module.weights.view(made, taps, *(1,) * (3 - axis))).sum(axis + 1)


def _permuted(module: Any, x: Tensor) -> Tensor:
    layer = module.layer
    made = x.reshape(-1, *(layer.shape or x.shape[1:])).permute(0, *(axis + 1 for axis in layer.axes))
    return made if len(layer.axes) == 3 else made.flatten(1)


def _masked(module: Any, x: Tensor) -> Tensor:
    """0 in a random share of the squares in training, elsewhere x/(1 − share)."""
    layer = module.layer
    if not module.training or not layer.share:
        return x
    (height, width), size = x.shape[2:], layer.size
    kept = torch.rand(len(x), 1, -(-height // size), -(-width // size), device=x.device) >= layer.share
    kept = kept.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :height, :width]
    return x * kept / (1 - layer.share)


FORWARD: dict[type, Callable[[Any, Tensor], Tensor]] = {
    Abs: lambda module, x: x.abs(),
    Clip: lambda module, x: x.clamp(module.layer.low, module.layer.high),
    Power: lambda module, x: x**module.layer.exponent,
    Scale: lambda module, x: module.layer.factor * x + module.layer.shift,
    Root: lambda module, x: x / torch.sqrt(x.abs() + module.layer.eps),
    LinearMap: _mapped,
    Permute: _permuted,
    Noise: lambda module, x: x + module.layer.sigma * torch.randn_like(x) if module.training else x,
    MaskSquares: _masked,
}
"""What the layers of `Layered` compute."""


class EvoNormS0Module(Own):
    """γ·x·σ(v·x)/s + β, s the deviation of a group of channels of one image (arXiv:2004.02967). Shapes: (N, C, H, W) stays as it is."""

    def __init__(self, layer: EvoNormS0) -> None:
        super().__init__()
        self.layer, self.groups, self.eps = layer, layer.groups, layer.eps
        for name, param in layer.params().items():
            self.register_parameter(name, nn.Parameter(torch.empty(param.shape)))

    def forward(self, x: Tensor) -> Tensor:
        """y of images x."""
        gamma, beta, v = (each.view(1, -1, 1, 1) for each in (self.gamma, self.beta, self.v))
        variance = x.reshape(len(x), self.groups, -1).var(2, correction=0)
        spread = torch.sqrt(variance + self.eps).repeat_interleave(x.shape[1] // self.groups, 1)[:, :, None, None]
        return gamma * x * torch.sigmoid(v * x) / spread + beta


class EvoNormB0Module(Own):
    """γ·x/max(s_B, v·x + s_I) + β; s_I the deviation of a channel of one image, s_B that of the channel over the batch, or in evaluation √running.

    Shapes: (N, C, H, W) stays as it is. The source is arXiv:2004.02967.
    """

    def __init__(self, layer: EvoNormB0) -> None:
        super().__init__()
        self.layer, self.eps, self.momentum = layer, layer.eps, layer.momentum
        for name, param in layer.params().items():
            self.register_parameter(name, nn.Parameter(torch.empty(param.shape)))
        self.register_buffer("running", torch.empty(layer.state()["running"].shape))

    def forward(self, x: Tensor) -> Tensor:
        """y of images x."""
        gamma, beta, v = (each.view(1, -1, 1, 1) for each in (self.gamma, self.beta, self.v))
        variance = self.running
        if self.training:
            variance = x.var((0, 2, 3), correction=0)
            count = x.numel() // x.shape[1]
            with torch.no_grad():
                self.running.lerp_(variance * (count / max(count - 1, 1)), self.momentum)
        own = torch.sqrt(x.var((2, 3), correction=0, keepdim=True) + self.eps)
        return gamma * x / torch.maximum(torch.sqrt(variance + self.eps).view(1, -1, 1, 1), v * x + own) + beta


def _padding(layer: Conv2d | ConvTranspose2d) -> tuple[int, int]:
    """The padding of rows and columns that the module has; (0, 0) where a pad stands before it, or a crop behind it."""
    top, bottom, left, right = layer.borders
    return (top, left) if (top, left) == (bottom, right) else (0, 0)


def _conv(layer: Conv2d) -> nn.Module:
    window, stride, dilation = pair(layer.kernel_size), pair(layer.stride), pair(layer.dilation)
    return nn.Conv2d(layer.in_channels, layer.out_channels, window, stride, _padding(layer), dilation, layer.groups, layer.bias)


def _transposed(layer: ConvTranspose2d) -> nn.Module:
    window, stride, more, dilation = map(pair, (layer.kernel_size, layer.stride, layer.output_padding, layer.dilation))
    return nn.ConvTranspose2d(
        layer.in_channels, layer.out_channels, window, stride, _padding(layer), more, layer.groups, layer.bias, dilation=dilation
    )


def _resize(layer: Resize) -> nn.Module:
    down, across = pair(layer.scale_factor)
    return nn.Upsample(scale_factor=(float(down), float(across)), mode=layer.mode, **({"align_corners": False} if layer.mode == "bilinear" else {}))


def _activation(layer: Elementwise) -> nn.Module:
    made: nn.Module = getattr(nn, layer.elsewhere.torch)(**{argument: getattr(layer, name) for name, (_, argument) in layer.elsewhere.fields.items()})
    return made


MODULES: dict[type, Callable[[Any], nn.Module]] = {
    Conv2d: _conv,
    ConvTranspose2d: _transposed,
    Linear: lambda each: nn.Linear(each.in_features, each.out_features, each.bias),
    Flatten: lambda each: nn.Flatten(),
    BatchNorm2d: lambda each: nn.BatchNorm2d(each.channels, each.eps, each.momentum),
    GroupNorm: lambda each: nn.GroupNorm(each.num_groups, each.channels, each.eps),
    InstanceNorm2d: lambda each: nn.InstanceNorm2d(each.channels, each.eps, affine=each.affine),
    LayerNorm: lambda each: nn.LayerNorm(each.normalized_shape, each.eps),
    EvoNormS0: EvoNormS0Module,
    EvoNormB0: EvoNormB0Module,
    **{each: _activation for each in ELEMENTWISE if each.elsewhere.torch},
    PReLU: lambda each: nn.PReLU(each.num_parameters),
    Softmax: lambda each: nn.Softmax(1),
    Dropout: lambda each: nn.Dropout(each.p),
    MaxPool2d: lambda each: nn.MaxPool2d(*each.geometry(), ceil_mode=each.ceil_mode),
    AvgPool2d: lambda each: nn.AvgPool2d(*each.geometry(), ceil_mode=each.ceil_mode, count_include_pad=each.count_include_pad),
    Upsample2d: lambda each: nn.Upsample(scale_factor=float(each.scale_factor)),
    Resize: _resize,
    LogSoftmax: lambda each: nn.LogSoftmax(1),
    **dict.fromkeys(FORWARD, Layered),
}
"""The module of each layer that is one."""


def _pad(graph: fx.Graph, layer: Pad, reads: Sequence[fx.Node]) -> fx.Node:
    top, bottom, left, right = layer.sides()
    return graph.call_function(nn.functional.pad, (reads[0], (left, right, top, bottom)), {"value": layer.value})


def _sum(graph: fx.Graph, layer: Add, reads: Sequence[fx.Node]) -> fx.Node:
    y = reads[0]
    for x in reads[1:]:
        y = graph.call_function(torch.add, (y, x))
    return y


FUNCTIONS: dict[type, Callable[[fx.Graph, Any, Sequence[fx.Node]], fx.Node]] = {
    Add: _sum,
    Mul: lambda graph, layer, reads: graph.call_function(torch.mul, tuple(reads)),
    Concat: lambda graph, layer, reads: graph.call_function(torch.cat, (list(reads), 1)),
    Pad: _pad,
    Reshape: lambda graph, layer, reads: graph.call_function(torch.reshape, (reads[0], (-1, *layer.shape))),
    GlobalAvgPool2d: lambda graph, layer, reads: graph.call_function(torch.mean, (reads[0], (2, 3))),
    Detach: lambda graph, layer, reads: graph.call_method("detach", (reads[0],)),
}
"""What is a function in PyTorch, not a module."""
