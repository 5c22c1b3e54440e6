"""The modules of PyTorch that are read: for each class the call of the function that it stands for, with the module's own tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from nbcnn.nn.graphs import Layer
from nbcnn.onnx.values import Val
from nbcnn.torch import functions
from nbcnn.torch.calls import Call, Refused, value_of
from nbcnn.torch.functions import FUNCTIONS


class Own(nn.Module):
    """A layer of nbcnn in a module that `to_module` made: `from_module` takes it as it is, with its parameters and buffers."""

    layer: Layer


def own(c: Call, m: Own, input: Any) -> Val:
    """The layer of an `Own` module, with the module's tensors."""
    layer: Any = m.layer
    held = {name: c.held(name) for name in (*layer.params(), *(layer.state() if hasattr(layer, "state") else ()))}
    kept = {name: each for name, each in held.items() if each is not None}
    arrays = {name: each.tensor.detach().numpy() for name, each in kept.items()}
    x = value_of(input)
    y = c.sheet.call(layer, c.sheet.shaped(x, x.dims), arrays, {name: each.name for name, each in kept.items()})
    return Val(y, y.shape)


def _conv(c: Call, m: Any, input: Any) -> Val:
    return functions.conv(c, input, c.held("weight"), c.held("bias"), m.stride, m.padding, m.dilation, m.groups, m.padding_mode)


def _conv_transpose(c: Call, m: Any, input: Any, output_size: Any = None) -> Val:
    if output_size is not None:
        raise Refused("output_size")
    return functions.conv_transpose(c, input, c.held("weight"), c.held("bias"), m.stride, m.padding, m.output_padding, m.groups, m.dilation)


def _batch_norm(c: Call, m: Any, input: Any) -> Val:
    if not m.track_running_stats:
        raise Refused("track_running_stats=False")
    mean, var, weight, bias = map(c.held, ("running_mean", "running_var", "weight", "bias"))
    return functions.batch_norm(c, input, mean, var, weight, bias, False, m.momentum, m.eps)


def _instance_norm(c: Call, m: Any, input: Any) -> Val:
    mean, var, weight, bias = map(c.held, ("running_mean", "running_var", "weight", "bias"))
    return functions.instance_norm(c, input, mean, var, weight, bias, eps=m.eps)


def _pad(mode: str) -> Callable[..., Val]:
    return lambda c, m, x: functions.pad(c, x, m.padding, mode, getattr(m, "value", 0))


def _pool(name: str) -> Callable[..., Val]:
    if name.startswith("max"):
        return lambda c, m, x: FUNCTIONS[name](c, x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)
    return lambda c, m, x: FUNCTIONS[name](
        c, x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, getattr(m, "divisor_override", None)
    )


def _with(name: str, *attributes: str) -> Callable[..., Val]:
    """The function `name`, whose parameters after the input are the module's `attributes`, in this order."""
    return lambda c, m, x: FUNCTIONS[name](c, x, *(getattr(m, each) for each in attributes))


MODULES: dict[type, Callable[..., Val]] = {
    Own: own,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d), _conv),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d), _conv_transpose),
    nn.Linear: lambda c, m, x: functions.linear(c, x, c.held("weight"), c.held("bias")),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d), _batch_norm),
    nn.GroupNorm: lambda c, m, x: functions.group_norm(c, x, m.num_groups, c.held("weight"), c.held("bias"), m.eps),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d), _instance_norm),
    nn.LayerNorm: lambda c, m, x: functions.layer_norm(c, x, m.normalized_shape, c.held("weight"), c.held("bias"), m.eps),
    nn.RMSNorm: lambda c, m, x: functions.rms_norm(c, x, m.normalized_shape, c.held("weight"), m.eps),
    nn.LocalResponseNorm: _with("local_response_norm", "size", "alpha", "beta", "k"),
    nn.PReLU: lambda c, m, x: functions.prelu(c, x, c.held("weight")),
    nn.ReLU: _with("relu"),
    nn.ReLU6: _with("relu6"),
    nn.LeakyReLU: _with("leaky_relu", "negative_slope"),
    nn.ELU: _with("elu", "alpha"),
    nn.SELU: _with("selu"),
    nn.CELU: _with("celu", "alpha"),
    nn.GELU: _with("gelu", "approximate"),
    nn.SiLU: _with("silu"),
    nn.Mish: _with("mish"),
    nn.Hardswish: _with("hardswish"),
    nn.Hardsigmoid: _with("hardsigmoid"),
    nn.Hardtanh: _with("hardtanh", "min_val", "max_val"),
    nn.Sigmoid: _with("sigmoid"),
    nn.Tanh: _with("tanh"),
    nn.Softplus: _with("softplus", "beta", "threshold"),
    nn.LogSigmoid: _with("logsigmoid"),
    nn.Softsign: _with("softsign"),
    nn.Tanhshrink: _with("tanhshrink"),
    nn.Softshrink: _with("softshrink", "lambd"),
    nn.Hardshrink: _with("hardshrink", "lambd"),
    nn.Threshold: _with("threshold", "threshold", "value"),
    nn.GLU: _with("glu", "dim"),
    nn.Softmax: _with("softmax", "dim"),
    nn.LogSoftmax: _with("log_softmax", "dim"),
    nn.Softmax2d: lambda c, m, x: FUNCTIONS["softmax"](c, x, 1),
    nn.Dropout: _with("dropout", "p"),
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout), _with("dropout2d", "p")),
    nn.MaxPool1d: _pool("max_pool1d"),
    nn.MaxPool2d: _pool("max_pool2d"),
    nn.AvgPool1d: _pool("avg_pool1d"),
    nn.AvgPool2d: _pool("avg_pool2d"),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), _with("adaptive_avg_pool2d", "output_size")),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d), _with("adaptive_max_pool2d", "output_size", "return_indices")),
    nn.Flatten: _with("flatten"),
    nn.Unflatten: _with("unflatten"),
    nn.Identity: lambda c, m, x: functions.same(c, x),
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ConstantPad1d, nn.ConstantPad2d), _pad("constant")),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d), _pad("reflect")),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d), _pad("replicate")),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d), _pad("circular")),
    nn.Upsample: lambda c, m, x: functions.interpolate(c, x, m.size, m.scale_factor, m.mode, m.align_corners, m.recompute_scale_factor),
    nn.PixelShuffle: _with("pixel_shuffle", "upscale_factor"),
    nn.PixelUnshuffle: _with("pixel_unshuffle", "downscale_factor"),
    nn.ChannelShuffle: _with("channel_shuffle", "groups"),
}
"""Modules by their class."""
