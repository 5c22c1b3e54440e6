"""This module checks examples and targets that lie in GPU memory, as arrays of another library, against what a network takes.

They are read where they lie, so nothing about them is changed: no scale, no order of axes, no dtype; and their values are not looked at. What does
not fit is an error that says what the other library can make of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.datasets.arrays import Form, Forms
from nbcnn.files.errors import UsageError
from nbcnn.gpu.arrays import DeviceArray, as_device_array
from nbcnn.run.net import Net

_AS_THEY_ARE = (None, (0.0, 1.0))


def device_arrays(x: Any, y: Any, validation: Any) -> tuple[Any, Any, Any]:
    """x, y and validation data with what lies on the GPU as `DeviceArray`; y stays x where it is the same object."""
    made = as_device_array(x, "x")
    held = (
        tuple(as_device_array(each, "validation data") for each in validation)
        if isinstance(validation, tuple | list)
        else as_device_array(validation)
    )
    return made, made if y is x else as_device_array(y, "y"), held


def form_on_gpu(x: DeviceArray, shape: tuple[int, ...] | None) -> Form:
    """The form of the first examples, of `shape` where that is known already: floats are taken as they are."""
    return Form(shape or x.shape[1:], scale=(0.0, 1.0) if x.dtype == np.float32 else None)


def examples(x: DeviceArray, form: Form | Forms, channels_last: bool | None, name: str = "examples") -> DeviceArray:
    """`x` as uint8 or float32 (N, *shape). Raises UsageError for what the form, learnt from the first data, would have to change."""
    if isinstance(form, Forms):
        raise UsageError("GPU arrays are for networks with one input: give NumPy arrays")
    made = x.reshape(1, *x.shape) if x.shape == form.shape else x
    if made.shape[1:] != form.shape or not made.size:
        raise UsageError(f"{name} on the GPU are {x.shape}, and for this network they must be (N, {', '.join(map(str, form.shape))})")
    if channels_last or (form.channels_last and channels_last is None):
        raise UsageError(f"{name} on the GPU must be (N, C, H, W), as they are read where they lie: give x.permute(0, 3, 1, 2).contiguous()")
    if made.dtype not in (np.uint8, np.float32):
        raise UsageError(f"{name} on the GPU are {made.dtype}: give uint8, of which 255 is 1, or float32")
    if made.dtype == np.uint8 and not form.bytes_are_parts:
        raise UsageError(f"{name} on the GPU are uint8, of which 255 is 1, and the network was trained on {form.words()}: give float32 like those")
    if form.scale not in _AS_THEY_ARE:
        low, high = form.scale or (0.0, 1.0)
        raise UsageError(
            f"the network's numbers are scaled from {low:g}…{high:g} to 0…1, and GPU arrays are read as they are: scale them alike first"
        )
    return made


def targets(y: DeviceArray, count: int, net: Net, name: str) -> DeviceArray:
    """`y` as values to be predicted, uint8 or float32 (N, *output). Raises UsageError for others."""
    made = y.reshape(*y.shape, 1) if net.output_shape == (1,) and y.ndim == 1 else y
    if made.shape != (count, *net.output_shape):
        raise UsageError(f"{name} on the GPU are {y.shape}, and the network's output is ({count}, {', '.join(map(str, net.output_shape))})")
    if made.dtype != np.float32 and (made.dtype != np.uint8 or len(net.output_shape) != 3):
        raise UsageError(f"{name} on the GPU are {y.dtype}: give float32, or images of uint8")
    return made


def must_be_there(net: Net) -> None:
    """Raise UsageError if `net` computes on the host."""
    if net.device.name != "gpu":
        raise UsageError(f"the arrays are on the GPU, and the network's mode is {net.mode}: give x.cpu(), or choose a mode of the GPU")
