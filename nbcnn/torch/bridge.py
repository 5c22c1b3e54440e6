"""This module makes ops of PyTorch of our layers: `nbcnn::forward` and `nbcnn::backward`, which autograd and torch.compile know as opaque functions.

Tensors are read and written where they lie: on the host as NumPy arrays of the same memory, on a GPU by their addresses, on PyTorch's current
stream. What the backward pass needs comes out of the forward op as one tensor of bytes, `kept`, so that PyTorch owns it and frees it. States (running
statistics) come out as new tensors, because an op with a gradient must not change its inputs.

Both ops find what they compute by a key, which names the layers and how they are computed: an op takes tensors, numbers and a string alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.gpu.device import Gpu, Host
from nbcnn.gpu.driver import Array
from nbcnn.nn.corruption import draws, inside
from nbcnn.nn.graphs import Graph
from nbcnn.nn.layer import parameters, sized, states
from nbcnn.nn.params import INITS, ParameterLayout
from nbcnn.plan.graph import named
from nbcnn.run.function import BACKWARD, FORWARD, PARAMETERS, Function
from nbcnn.run.rows import choose_mode
from nbcnn.torch.weights import home_of

PLANS = 32
"""Functions that one module keeps planned, by shape of the batch and form; the one that was used longest ago goes first."""
ALIGNED = 16
"""Bytes to a multiple of which kernels want the address of an array: the width of their widest loads. Of a tensor that begins elsewhere a copy is
made; PyTorch's own allocations are aligned to 512 bytes."""


@dataclass
class Spec:
    """Layers and how they are computed, the names of their parameters and then of their states, and the functions that are planned."""

    layers: Sequence[Any]
    names: list[str]
    mode: str
    precision: str | None
    fuse: bool
    planned: OrderedDict[Any, Function] = field(default_factory=OrderedDict)

    def function(self, x: Tensor, training: bool, gradients: bool) -> Function:
        """The function for inputs like `x`. Raises UsageError for a device or dtype that it does not have."""
        return self.function_for(tuple(int(n) for n in x.shape), x.device, x.dtype, training, gradients)

    def function_for(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, training: bool, gradients: bool) -> Function:
        """See `function`."""
        key = (shape, device.type, dtype, training, gradients)
        if key not in self.planned:
            while len(self.planned) >= PLANS:
                self.planned.popitem(last=False)
            gpu = _on_gpu(device)
            row, _ = choose_mode(self.mode, self.precision) if gpu else choose_mode("cpu", None)
            if row.scales_loss and self.precision is None and self.mode == "auto":
                row, _ = choose_mode("cudacore", None)  # gradients come from PyTorch, and nobody may have scaled the loss
            if gpu and row.device != "gpu":
                raise UsageError(f"mode {row.mode} is for tensors on the CPU, and this one is on {device}")
            name = {torch.float32: "float32", torch.float64: "float64"}.get(dtype)
            if name is None:
                raise UsageError(f"nbcnn computes float32 tensors, on the CPU float64 too, not {dtype}")
            options: dict[str, Any] = {"training": training, "gradients": gradients, "dtype": name, "fusing": self.fuse}
            self.planned[key] = Function(self.layers, shape, row, _gpu() if gpu else Host(), **options)
        self.planned.move_to_end(key)
        return self.planned[key]


_SPECS: dict[str, Spec] = {}
_GPUS: list[Gpu] = []


def _gpu() -> Gpu:
    """The GPU, opened once."""
    if not _GPUS:
        _GPUS.append(Gpu())
    return _GPUS[0]


def _on_gpu(device: torch.device) -> bool:
    """Whether tensors of this device are on the GPU that nbcnn uses. Raises UsageError for one where it cannot compute."""
    if device.type == "cpu":
        return False
    if device.type != "cuda" or device.index not in (None, 0):
        raise UsageError(f"nbcnn computes on the CPU and on the first GPU that the process sees, not on {device}")
    return True


def _flat(tensor: Tensor) -> Any:
    """The flat array of a tensor's memory, which is not kept alive by it."""
    if tensor.device.type == "cpu":
        return tensor.detach().reshape(-1).numpy()
    return Array(max(1, tensor.numel()), _DTYPES[tensor.dtype], tensor.data_ptr(), None)


_DTYPES = {torch.float32: np.dtype(np.float32), torch.uint8: np.dtype(np.uint8)}


def _placed(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor itself if it is contiguous, aligned and of the dtype, else a copy that is."""
    made = tensor.to(dtype or tensor.dtype).contiguous()
    return made if made.device.type == "cpu" or made.data_ptr() % ALIGNED == 0 else made.clone()


def _run(function: Function, part: str, tensors: dict[str, Tensor], like: Tensor) -> None:
    """Run a part on tensors by name, on the current stream; the arena is PyTorch's memory too, freed in the order of the stream."""
    arena = torch.empty(max(1, function.arena_bytes[part]), dtype=torch.uint8, device=like.device)
    stream = torch.cuda.current_stream().cuda_stream if like.device.type == "cuda" else 0
    function.run(part, {name: _flat(tensor) for name, tensor in (tensors | {"arena": arena}).items()}, stream)


@torch.library.custom_op("nbcnn::forward", mutates_args=())
def forward(x: Tensor, params: Sequence[Tensor], states: Sequence[Tensor], key: str, training: bool, gradients: bool) -> list[Tensor]:
    """y, what the backward pass needs of the forward one, and the new states."""
    function = _SPECS[key].function(x, training, gradients)
    for name, tensor in zip(_SPECS[key].names, [*params, *states], strict=True):
        if (tensor.dtype, tensor.device) != (x.dtype, x.device):
            raise UsageError(f"the input is {x.dtype} on {x.device}, and {name} is {tensor.dtype} on {tensor.device}: module.to(x) has them alike")
    y, kept = _empty(function, x)
    new = [state.detach().clone(memory_format=torch.contiguous_format) for state in states]
    given = dict(zip(_SPECS[key].names, [*(_placed(param.detach()) for param in params), *new], strict=True))
    _run(function, FORWARD, given | {"x": _placed(x.detach()), "y": y, "kept": kept}, x)
    return [y, kept, *new]


@forward.register_fake
def _(x, params, states, key, training, gradients):
    return [*_empty(_SPECS[key].function(x, training, gradients), x), *map(_like, states)]


def _empty(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """y and what is kept, not initialised."""
    return x.new_empty(function.output_shape), x.new_empty(max(1, function.kept_bytes), dtype=torch.uint8)


@torch.library.custom_op("nbcnn::backward", mutates_args=())
def backward(
    dy: Tensor,
    saved: Sequence[Tensor],
    kept: Tensor,
    params: Sequence[Tensor],
    states: Sequence[Tensor],
    key: str,
    shape: Sequence[int],
    training: bool,
    input_grad: bool,
) -> list[Tensor]:
    """The gradients of the parameters, and before them that of the input where it is wanted; `saved` is what `Function.reads` names."""
    spec = _SPECS[key]
    function = spec.function_for(tuple(shape), dy.device, dy.dtype, training, True)
    made = [*([dy.new_empty(tuple(shape))] if input_grad else []), *map(_like, params)]
    given = dict(zip(spec.names, [*(_placed(param.detach()) for param in params), *states], strict=True))
    given |= dict(zip(function.reads, map(_placed, saved), strict=True)) | {"dy": _placed(dy), "kept": kept}
    given |= {f"grad.{name}": grad for name, grad in zip(spec.names, made[input_grad:], strict=False)}
    _run(function, BACKWARD if input_grad else PARAMETERS, given | ({"dx": made[0]} if input_grad else {}), dy)
    return made


@backward.register_fake
def _(dy, saved, kept, params, states, key, shape, training, input_grad):
    return [*([dy.new_empty(tuple(shape))] if input_grad else []), *map(_like, params)]


def _like(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same shape, which torch.empty_like does not promise."""
    return tensor.new_empty(tuple(tensor.shape))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, params, _, key, training, gradients = inputs
    if not gradients:
        return
    y, kept, *new = output
    function = _SPECS[key].function(x, training, gradients)
    ctx.no_gradient = function.no_gradient
    saved = [each for name, each in (("x", x), ("y", y)) if name in function.reads]
    ctx.save_for_backward(kept, *saved, *params, *new)
    ctx.counts, ctx.key, ctx.training, ctx.shape = (len(saved), len(params)), key, training, list(x.shape)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if ctx.no_gradient:
        raise UsageError(f"there is no gradient in evaluation: {ctx.no_gradient}; call train() first")
    kept, *rest = ctx.saved_tensors
    saved, params = ctx.counts
    dy = grads[0]
    nothing = (None, [None] * params, [None] * (len(rest) - saved - params), None, None, None)
    if dy is None:
        return nothing
    input_grad = bool(ctx.needs_input_grad[0])
    given = (rest[:saved], kept, rest[saved : saved + params], rest[saved + params :])
    made = torch.ops.nbcnn.backward(dy, *given, ctx.key, ctx.shape, ctx.training, input_grad)
    return (made[0] if input_grad else None, made[input_grad:], *nothing[2:])


forward.register_autograd(_backward, setup_context=_setup)


class Layers(torch.nn.Module):
    """Layers of nbcnn as a module of PyTorch: `nbcnn.torch.module` makes it and says what it takes.

    `names` are its parameters and states as nbcnn knows them.
    """

    def __init__(self, layers: Any, input_shape: Sequence[int] | None, *, mode: str, precision: str | None, seed: int, init: str, fuse: bool) -> None:
        super().__init__()
        if init not in INITS:
            raise UsageError(f"no initialisation {quoted(init)}; one of {', '.join(INITS)}")
        weights: dict[str, np.ndarray] = {}
        if hasattr(layers, "net") and hasattr(layers, "fit"):
            weights, layers = layers.net.params.as_dict(), layers.net.body
        self._single = not isinstance(layers, Sequence)
        made: Any = layers if isinstance(layers, Graph) else [layers] if self._single else list(layers)
        _check(made)
        if isinstance(made, Graph) and len(made.outputs) > 1:
            raise UsageError("a module has one output, and these layers have several: make one of each part, or train them by nbcnn.Model")
        if input_shape is not None:
            made = sized(made, tuple(int(n) for n in input_shape))
        elif isinstance(made, Graph):
            made = made.sized()
        shapes, running = parameters(made), states(made)
        first = {name: array for each in (shapes, running) for name, array in _first(each, seed, init).items()} | weights
        self.names, self._counts = [*shapes, *running], (len(shapes), len(running))
        for name in self.names:
            home, last = home_of(self, self._own(name))
            tensor = torch.from_numpy(np.array(first[name], np.float32))
            if name in shapes:
                home.register_parameter(last, torch.nn.Parameter(tensor))
            else:
                home.register_buffer(last, tensor)
        self._paths = [self._own(name).split(".") for name in self.names]
        self._spec = (made, mode, precision, fuse)
        self._key = self._registered()

    def _own(self, name: str) -> str:
        """The name of a parameter in this module: of a single layer without the layer's."""
        return name.split(".", 1)[1] if self._single else name

    def _registered(self) -> str:
        layers, mode, precision, fuse = self._spec
        key = f"{type(layers).__name__} {getattr(layers, 'called', '')} {layers!r} {mode} {precision} {fuse}"
        _SPECS.setdefault(key, Spec(layers, self.names, mode, precision, fuse))
        return key

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._registered()

    def extra_repr(self) -> str:
        """The layers, for print."""
        layers, mode, precision, _ = self._spec
        return f"{', '.join(map(repr, layers))}; mode {mode}" + (f", {precision}" if precision else "")

    def forward(self, x: Tensor) -> Tensor:
        """The output of the layers for a batch `x` (N, …), float32, or float64 on the CPU; other floats become float32."""
        if x.dtype not in (torch.float32, torch.float64):
            x = x.to(torch.float32)
        tensors = [_at(self, path) for path in self._paths]
        params, states = tensors[: self._counts[0]], tensors[self._counts[0] :]
        gradients = torch.is_grad_enabled() and (x.requires_grad or any(param.requires_grad for param in params))
        y, _, *new = torch.ops.nbcnn.forward(x, params, states, self._key, self.training, gradients)
        if self.training:
            with torch.no_grad():
                for at, state in enumerate(states):
                    state.copy_(new[at])
        return y


def _at(module: Any, path: Sequence[str]) -> Tensor:
    for part in path:
        module = getattr(module, part)
    return module


def _first(shapes: dict[str, Any], seed: int, init: str) -> dict[str, np.ndarray]:
    """First values of parameters or states."""
    layout = ParameterLayout(shapes)
    return layout.split(layout.initial(seed, init))


def _check(layers: Sequence[Any]) -> None:
    """Raise UsageError for what is no layer, for losses, and for layers that draw random numbers of a data set."""
    for name, layer in inside(named(layers)):
        if isinstance(layer, type) or not hasattr(layer, "build") or hasattr(layer, "needs_labels"):
            raise UsageError(f"{quoted(layer)} is no layer: one is made by its class, as in nbcnn.ReLU(); losses are PyTorch's there")
        if getattr(layer, "prepares", False):
            raise UsageError(f"{name} is fitted to images by nbcnn.dictionary and has no gradient: use it in a nbcnn.Model")
        if draws(layer):
            raise UsageError(f"{name} draws random numbers by the example's place in a data set, which a module does not know: use PyTorch's own")
