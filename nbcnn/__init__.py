"""nbcnn: convolutional networks trained by Numba-CUDA kernels a student can read.

    >>> import nbcnn
    >>> from nbcnn import Conv2d, Flatten, Linear, MaxPool2d, ReLU
    >>> model = nbcnn.Model([Conv2d(64, 3, padding=1), ReLU(), MaxPool2d(2), Flatten(), Linear(10)], loss="cross_entropy")

`Model` trains and predicts, `load` reads what was saved; the rest are its layers, optimizers, schedules and callbacks. A name is imported when it
is first used, so that `import nbcnn` costs next to nothing.
"""

from __future__ import annotations

from nbcnn.files.quote import quoted

TYPE_CHECKING = False  # typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from nbcnn.datasets.arrays import Form
    from nbcnn.datasets.normalisation import Normalisation
    from nbcnn.files.errors import UsageError
    from nbcnn.files.extras import PackageMissing
    from nbcnn.gpu.device import GpuUnavailable
    from nbcnn.gpu.select import use_device
    from nbcnn.model.declare import activation, augmentation, loss, optimizer
    from nbcnn.model.files import Loaded, load
    from nbcnn.model.history import History
    from nbcnn.model.network import Model
    from nbcnn.nn.activations import (
        ELU,
        GELU,
        Abs,
        Clip,
        HardSwish,
        LeakyReLU,
        LogSoftmax,
        Power,
        PReLU,
        ReLU,
        ReLU6,
        Scale,
        Sigmoid,
        Softmax,
        Softplus,
        Swish,
        Tanh,
        Threshold,
    )
    from nbcnn.nn.corruption import Dropout, KSparse, MaskSquares, Noise
    from nbcnn.nn.graphs import Graph, Input, Layer
    from nbcnn.nn.joins import Add, Concat, Detach, Losses, Mul, Pad, Reshape
    from nbcnn.nn.layers import Conv2d, ConvTranspose2d, Flatten, Linear, Residual
    from nbcnn.nn.losses import L1, MSE, RMSLE, BCEWithLogits, ForecastMSE, Huber, SoftmaxCrossEntropy
    from nbcnn.nn.maps import LinearMap, Permute
    from nbcnn.nn.models import autoencoder, mnist_cnn, mobilenet, patches, patches2, resnet18, s4convd, unet
    from nbcnn.nn.norms import BatchNorm2d, EvoNormB0, EvoNormS0, GroupNorm, InstanceNorm2d, LayerNorm
    from nbcnn.nn.optim import SGD, Adam, AdamW, Constant, Cosine, OneCycle, Piecewise, StepDecay
    from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d, Resize, Upsample2d
    from nbcnn.nn.series_layers import GLU, Conv1d, DepthwiseConv1d, LastStep, PointwiseConv1d, StateSpaceConv1d
    from nbcnn.nn.whitening import Root, Whiten, WhitenPatches
    from nbcnn.plan.graph import ShapeError
    from nbcnn.run.allocation import MemoryPlanError
    from nbcnn.train.callbacks import EarlyStopping, Progress
    from nbcnn.train.checkpoint import CheckpointError
    from nbcnn.train.events import Callback, Epoch, Reading, Result
    from nbcnn.train.trainer import CallbackError, Diverged

__version__ = "0.2.0"

_HOMES = {
    "datasets.arrays": ("Form",),
    "datasets.normalisation": ("Normalisation",),
    "files.errors": ("UsageError",),
    "files.extras": ("PackageMissing",),
    "gpu.device": ("GpuUnavailable",),
    "gpu.select": ("use_device",),
    "model.declare": ("activation", "augmentation", "loss", "optimizer"),
    "model.files": ("Loaded", "load"),
    "model.history": ("History",),
    "model.network": ("Model",),
    "nn.activations": (
        *("ELU", "GELU", "HardSwish", "LeakyReLU", "LogSoftmax", "PReLU", "ReLU", "ReLU6", "Sigmoid", "Softmax", "Swish", "Tanh"),
        *("Abs", "Clip", "Power", "Scale", "Softplus", "Threshold"),
    ),
    "nn.corruption": ("Dropout", "KSparse", "MaskSquares", "Noise"),
    "nn.graphs": ("Graph", "Input", "Layer"),
    "nn.joins": ("Add", "Concat", "Detach", "Losses", "Mul", "Pad", "Reshape"),
    "nn.layers": ("Conv2d", "ConvTranspose2d", "Flatten", "Linear", "Residual"),
    "nn.losses": ("L1", "MSE", "RMSLE", "BCEWithLogits", "ForecastMSE", "Huber", "SoftmaxCrossEntropy"),
    "nn.maps": ("LinearMap", "Permute"),
    "nn.models": ("autoencoder", "mnist_cnn", "s4convd", "patches", "patches2", "resnet18", "mobilenet", "unet"),
    "nn.norms": ("EvoNormB0", "EvoNormS0", "BatchNorm2d", "GroupNorm", "InstanceNorm2d", "LayerNorm"),
    "nn.optim": ("SGD", "Adam", "AdamW", "Constant", "Cosine", "OneCycle", "Piecewise", "StepDecay"),
    "nn.resampling": ("AvgPool2d", "GlobalAvgPool2d", "MaxPool2d", "Resize", "Upsample2d"),
    "nn.series_layers": ("GLU", "Conv1d", "DepthwiseConv1d", "LastStep", "PointwiseConv1d", "StateSpaceConv1d"),
    "nn.whitening": ("Root", "Whiten", "WhitenPatches"),
    "plan.graph": ("ShapeError",),
    "run.allocation": ("MemoryPlanError",),
    "train.callbacks": ("EarlyStopping", "Progress"),
    "train.checkpoint": ("CheckpointError",),
    "train.events": ("Callback", "Epoch", "Reading", "Result"),
    "train.trainer": ("CallbackError", "Diverged"),
}
"""The module of every public name; the imports above say the same to type checkers, and a test compares them."""
_MODULE = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ELU",
    "GELU",
    "GLU",
    "L1",
    "MSE",
    "RMSLE",
    "SGD",
    "Abs",
    "Adam",
    "AdamW",
    "Add",
    "AvgPool2d",
    "BCEWithLogits",
    "BatchNorm2d",
    "Callback",
    "CallbackError",
    "CheckpointError",
    "Clip",
    "Concat",
    "Constant",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Cosine",
    "DepthwiseConv1d",
    "Detach",
    "Diverged",
    "Dropout",
    "EarlyStopping",
    "Epoch",
    "EvoNormB0",
    "EvoNormS0",
    "Flatten",
    "ForecastMSE",
    "Form",
    "GlobalAvgPool2d",
    "GpuUnavailable",
    "Graph",
    "GroupNorm",
    "HardSwish",
    "History",
    "Huber",
    "Input",
    "InstanceNorm2d",
    "KSparse",
    "LastStep",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LinearMap",
    "Loaded",
    "LogSoftmax",
    "Losses",
    "MaskSquares",
    "MaxPool2d",
    "MemoryPlanError",
    "Model",
    "Mul",
    "Noise",
    "Normalisation",
    "OneCycle",
    "PReLU",
    "PackageMissing",
    "Pad",
    "Permute",
    "Piecewise",
    "PointwiseConv1d",
    "Power",
    "Progress",
    "ReLU",
    "ReLU6",
    "Reading",
    "Reshape",
    "Residual",
    "Resize",
    "Result",
    "Root",
    "Scale",
    "ShapeError",
    "Sigmoid",
    "Softmax",
    "SoftmaxCrossEntropy",
    "Softplus",
    "StateSpaceConv1d",
    "StepDecay",
    "Swish",
    "Tanh",
    "Threshold",
    "Upsample2d",
    "UsageError",
    "Whiten",
    "WhitenPatches",
    "__version__",
    "activation",
    "augmentation",
    "autoencoder",
    "load",
    "loss",
    "mnist_cnn",
    "mobilenet",
    "optimizer",
    "patches",
    "patches2",
    "resnet18",
    "s4convd",
    "unet",
    "use_device",
]


_PACKAGES = ("datasets", "onnx", "sklearn", "torch")
"""Packages for users beside the names above: nbcnn.datasets.load works after `import nbcnn` alone."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        import importlib

        return importlib.import_module(f"nbcnn.{name}")
    if name not in _MODULE:
        raise AttributeError(f"module 'nbcnn' has no attribute {quoted(name)}")
    import importlib

    value = getattr(importlib.import_module(f"nbcnn.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE, *_PACKAGES})
