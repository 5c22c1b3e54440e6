"""The modules of PyTorch that are read: for each class the call of the function that it stands for, with the module's own tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from nbcnn.nn.activations import ELU, GELU, HardSwish, LeakyReLU, ReLU, ReLU6, Sigmoid, Swish, Tanh
from nbcnn.nn.graphs import Value
from nbcnn.nn.resampling import AvgPool2d, MaxPool2d
from nbcnn.torch import functions
from nbcnn.torch.calls import Call, Refused


def _conv(c: Call, m: Any, input: Any) -> Value:
    if m.padding_mode != "zeros":
        raise Refused(f"padding_mode={m.padding_mode!r}")
    return functions.conv2d(c, input, c.held("weight"), c.held("bias"), m.stride, m.padding, m.dilation, m.groups)


def _conv_transpose(c: Call, m: Any, input: Any, output_size: Any = None) -> Value:
    if output_size is not None:
        raise Refused("output_size")
    return functions.conv_transpose2d(c, input, c.held("weight"), c.held("bias"), m.stride, m.padding, m.output_padding, m.groups, m.dilation)


def _batch_norm_module(c: Call, m: Any, input: Any) -> Value:
    if not m.track_running_stats:
        raise Refused("track_running_stats=False")
    mean, var, weight, bias = map(c.held, ("running_mean", "running_var", "weight", "bias"))
    return functions.batch_norm(c, input, mean, var, weight, bias, False, m.momentum, m.eps)


def _pad_module(c: Call, m: Any, input: Any) -> Value:
    return functions.pad(c, input, m.padding, "constant", getattr(m, "value", 0))


MODULES: dict[type, Callable[..., Value]] = {
    nn.Conv2d: _conv,
    nn.ConvTranspose2d: _conv_transpose,
    nn.Linear: lambda c, m, x: functions.linear(c, x, c.held("weight"), c.held("bias")),
    nn.BatchNorm2d: _batch_norm_module,
    nn.GroupNorm: lambda c, m, x: functions.group_norm(c, x, m.num_groups, c.held("weight"), c.held("bias"), m.eps),
    nn.InstanceNorm2d: lambda c, m, x: functions.instance_norm(c, x, *map(c.held, ("running_mean", "running_var", "weight", "bias")), eps=m.eps),
    nn.LayerNorm: lambda c, m, x: functions.layer_norm(c, x, m.normalized_shape, c.held("weight"), c.held("bias"), m.eps),
    nn.PReLU: lambda c, m, x: functions.prelu(c, x, c.held("weight")),
    nn.ReLU: lambda c, m, x: c.make(ReLU(), x),
    nn.ReLU6: lambda c, m, x: c.make(ReLU6(), x),
    nn.LeakyReLU: lambda c, m, x: c.make(LeakyReLU(float(m.negative_slope)), x),
    nn.ELU: lambda c, m, x: c.make(ELU(float(m.alpha)), x),
    nn.GELU: lambda c, m, x: c.make(GELU(approximate=m.approximate), x),
    nn.SiLU: lambda c, m, x: c.make(Swish(), x),
    nn.Hardswish: lambda c, m, x: c.make(HardSwish(), x),
    nn.Hardtanh: lambda c, m, x: functions.hardtanh(c, x, m.min_val, m.max_val),
    nn.Sigmoid: lambda c, m, x: c.make(Sigmoid(), x),
    nn.Tanh: lambda c, m, x: c.make(Tanh(), x),
    nn.Softmax: lambda c, m, x: functions.softmax(c, x, m.dim),
    nn.Softmax2d: lambda c, m, x: functions.softmax(c, x, 1),
    nn.Dropout: lambda c, m, x: functions.dropout(c, x, m.p),
    nn.MaxPool2d: lambda c, m, x: functions.max_pool2d(c, x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices),
    nn.AvgPool2d: lambda c, m, x: functions.avg_pool2d(
        c, x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override
    ),
    nn.AdaptiveAvgPool2d: lambda c, m, x: functions.adaptive_pool(AvgPool2d)(c, x, m.output_size),
    nn.AdaptiveMaxPool2d: lambda c, m, x: functions.adaptive_pool(MaxPool2d)(c, x, m.output_size, m.return_indices),
    nn.Flatten: lambda c, m, x: functions.reshaped(c, x),
    nn.Unflatten: lambda c, m, x: functions.reshaped(c, x),
    nn.Identity: lambda c, m, x: functions.same(c, x),
    nn.ZeroPad2d: _pad_module,
    nn.ConstantPad2d: _pad_module,
    nn.Upsample: lambda c, m, x: functions.interpolate(c, x, mode=m.mode, align_corners=m.align_corners),
}
"""Modules by their class."""
