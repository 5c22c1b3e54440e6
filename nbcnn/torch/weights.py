"""This module carries tensors between PyTorch's state dicts and nbcnn's parameters, and puts parameters with dotted names into modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.model.files import COUNTERS


def array(tensor: Any, name: str) -> np.ndarray:
    """A tensor of floats as a NumPy array, float32, on the host. Raises UsageError for what is none."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{quoted(name)} is no tensor but {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise UsageError(f"{quoted(name)} is {tensor.dtype}, and parameters are floats")
    made: np.ndarray = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return made


def arrays(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a state dict as arrays, without the counters that have no counterpart."""
    return {name: array(tensor, name) for name, tensor in state.items() if not name.endswith(COUNTERS)}


def home_of(root: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    """The module in `root` that a dotted name belongs to, made if it is not there, and the last part of the name."""
    *parts, last = path.split(".")
    for part in parts:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    return root, last
