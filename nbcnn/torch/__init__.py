"""PyTorch's side of nbcnn: networks and weights in both directions, and layers of nbcnn as modules and ops of PyTorch.

    model = nbcnn.torch.from_module(module, example)     a torch.nn.Module as a Model, weights and names included
    module = nbcnn.torch.to_module(model)                a Model as a torch.nn.Module
    nbcnn.torch.load_state_dict(model, module.state_dict())
    layer = nbcnn.torch.module(nbcnn.Conv2d(64, 3, in_channels=32))   our kernels under PyTorch's autograd and torch.compile

PyTorch is imported when one of these functions is first called; the extra `torch` installs it. GPU arrays of PyTorch, CuPy and JAX that `Model` takes
and gives need nothing of this package (`nbcnn.gpu.arrays`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbcnn.files import extras
from nbcnn.files.errors import UsageError, Whole
from nbcnn.model.files import Loaded

__all__ = ["Unsupported", "from_module", "load_state_dict", "module", "state_dict", "to_module"]


class Unsupported(Whole, UsageError):
    """A network has parts that the other side does not have; the message names all of them. It is a UsageError; its exit code is 2.

    `parts` has a line for each: the name in the network, what it is, and why.
    """

    def __init__(self, what: str, parts: Sequence[str]) -> None:
        super().__init__(f"{what}:\n  " + "\n  ".join(parts))
        self.parts = tuple(parts)


def _needed() -> None:
    """Raise PackageMissing if PyTorch is not installed."""
    extras.need("torch", "nbcnn.torch needs")


def from_module(module: Any, example: Any, *, loss: Any = None, mode: str = "auto", precision: str | None = None, **options: Any) -> Any:
    """The network of a torch.nn.Module as a `nbcnn.Model`, with its weights and running statistics, under its names.

    module     is not changed. It is traced by torch.fx, or, where that fails, by torch.export.
    example    an input (N, C, H, W) or (N, F), float32, of which only the shape counts, or a tuple of them for several inputs.
    loss, mode, precision   of the model, as in `nbcnn.Model`, and `options` its further ones. A loss is no part of the module: give it to train on.

    A layer conv1 of a part layer1.0 is "layer1.0.conv1" in the model, its weight "layer1.0.conv1.weight". The model takes floats as they are;
    examples and outputs (N, C, L) are images (N, C, 1, L), those of more than four axes vectors. What the module does not train is frozen, what it
    shares is one parameter, what it detaches trains nothing.
    Raises Unsupported, which names at once every module and op that nbcnn does not have or that would train otherwise, and UsageError for an example
    that does not fit.

    Example:
        >>> import torch, nbcnn.torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))
        >>> nbcnn.torch.from_module(net, torch.zeros(1, 3, 8, 8), mode="cpu").net.params.names
        ['0.weight', '0.bias', '3.weight', '3.bias']
    """
    _needed()
    from nbcnn.torch.importing import imported

    return imported(module, example, loss=loss, mode=mode, precision=precision, **options)


def to_module(model: Any) -> Any:
    """The network of a built `nbcnn.Model` as a torch.nn.Module (a torch.fx.GraphModule), with its weights; the loss stays behind.

    Its state dict has the names of the model's parameters and states, and one counter num_batches_tracked of every BatchNorm. It takes what the first
    layer sees, float32 (N, …): bytes divided by 255, and normalised if the model normalises. Raises Unsupported, which names every layer that has no
    counterpart in PyTorch, and UsageError for a model that is not built.

    Example:
        >>> import torch, nbcnn.torch
        >>> model = nbcnn.Model([nbcnn.Conv2d(8, 3), nbcnn.ReLU(), nbcnn.GlobalAvgPool2d()], mode="cpu").build((3, 8, 8))
        >>> nbcnn.torch.to_module(model)(torch.zeros(5, 3, 8, 8)).shape
        torch.Size([5, 8])
    """
    _needed()
    from nbcnn.torch.exporting import exported

    return exported(model)


def state_dict(model: Any) -> dict[str, Any]:
    """Parameters and running statistics of a built `nbcnn.Model` as CPU tensors, float32, by their names. Raises UsageError before it is built.

    Example:
        >>> import torch, nbcnn.torch
        >>> list(nbcnn.torch.state_dict(nbcnn.Model([nbcnn.BatchNorm2d()], mode="cpu").build((3, 8, 8))))
        ['batchnorm1.weight', 'batchnorm1.bias', 'batchnorm1.running_mean', 'batchnorm1.running_var']
    """
    _needed()
    import torch

    return {name: torch.from_numpy(array) for name, array in model.net.params.as_dict().items()}


def load_state_dict(model: Any, state: Mapping[str, Any], *, partial: bool = False) -> Loaded:
    """Give a built `nbcnn.Model` the tensors of a PyTorch state dict that have its names and shapes; what was taken is in the result.

    state    tensors on any device; floats of another precision become float32. PyTorch's counters num_batches_tracked are passed over.
    partial  take what fits and leave the rest; else all must fit. Raises CheckpointError, and changes nothing, if not all fit, or nothing does.

    Example:
        >>> import torch, nbcnn.torch
        >>> model = nbcnn.Model([nbcnn.Linear(2)], mode="cpu").build((3,))
        >>> print(nbcnn.torch.load_state_dict(model, {"linear1.weight": torch.ones(2, 3), "linear1.bias": torch.zeros(2)}))
        2 parameters taken
    """
    _needed()
    from nbcnn.model.files import take
    from nbcnn.torch.weights import arrays

    return take(model.net, arrays(state), partial, "the state dict")


def module(
    layers: Any,
    input_shape: Sequence[int] | None = None,
    *,
    mode: str = "auto",
    precision: str | None = None,
    seed: int = 0,
    init: str = "torch",
    fuse: bool = True,
) -> Any:
    """A torch.nn.Module that computes `layers` by nbcnn's kernels, on tensors where they lie: nothing is copied on the way in and out.

    layers        a layer, a list of them, a graph of one input and one output, or a built `nbcnn.Model` of one, whose weights are taken and whose
                  loss stays behind.
    input_shape   (C, H, W) or (F,) of one example; needed where sizes of inputs are left out.
    mode, precision   of tensors on a GPU, as in `nbcnn.Model`; on the CPU mode is cpu, in float32 or float64 as the input is. In fp16
                  PyTorch has to scale the loss (torch.amp.GradScaler), so "auto" does not take it.
    seed, init    of the first weights. fuse  put layers together where the mode has a kernel for them.

    Parameters and running statistics have our names: "weight" of one layer, "conv1.weight" in a list. It works under autograd and torch.compile, to
    which it is one opaque op (`torch.ops.nbcnn.forward` and `backward`), and runs on PyTorch's current stream. Inputs are float32 and C-contiguous,
    others are made so. It has no second derivative. Layers that draw random numbers are refused, as theirs belong to a data set: torch.nn.Dropout
    is there. The first call for a shape plans it, and on a GPU compiles what is not compiled yet.

    Raises UsageError for layers that are none, ShapeError where they do not fit.

    Example:
        >>> import torch, nbcnn.torch
        >>> layer = nbcnn.torch.module(nbcnn.Conv2d(4, 3, in_channels=3))
        >>> layer(torch.ones(2, 3, 8, 8, requires_grad=True)).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([4, 3, 3, 3])
    """
    _needed()
    from nbcnn.torch.bridge import Layers

    return Layers(layers, input_shape, mode=mode, precision=precision, seed=seed, init=init, fuse=fuse)
