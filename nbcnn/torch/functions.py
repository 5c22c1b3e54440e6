"""The functions, methods and ATen ops of PyTorch that are read: for each a handler, which has PyTorch's parameters and makes layers.

A method, an ATen op and the function of the same name share a handler (`FUNCTIONS`), and the modules call these functions (`modules.py`). A handler
raises Refused for arguments of which no layer is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nbcnn.nn.activations import ELU, GELU, HardSwish, LeakyReLU, PReLU, ReLU, ReLU6, Sigmoid, Softmax, Swish, Tanh
from nbcnn.nn.corruption import Dropout
from nbcnn.nn.graphs import Value
from nbcnn.nn.joins import Add, Concat, Mul, Pad, Reshape
from nbcnn.nn.layers import Conv2d, ConvTranspose2d, Flatten, Linear
from nbcnn.nn.norms import BatchNorm2d, GroupNorm, InstanceNorm2d, LayerNorm
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d, Resize, Upsample2d
from nbcnn.torch.calls import Call, Held, Refused, held_of, image_of, two, values_of

# -- layers with weights


def conv2d(c: Call, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Value:
    held = held_of(weight, "weight")
    if held.tensor.ndim != 4:
        raise Refused(f"a convolution whose weight has {held.tensor.ndim} axes")
    k, channels, r, s = held.tensor.shape
    down, across = two(dilation)
    if padding == "same":
        rows, columns = down * (r - 1), across * (s - 1)
        sides: Any = (rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)
    else:
        sides = 0 if padding == "valid" else two(padding)
    window, sizes = (r, s) if r != s else r, {"dilation": (down, across), "groups": groups, "in_channels": channels * groups}
    made = Conv2d(k, window, stride=two(stride), padding=sides, bias=bias is not None, **sizes)
    return c.make_of(made, input, weight=held, bias=bias)


def conv_transpose2d(
    c: Call, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
) -> Value:
    held = held_of(weight, "weight")
    if held.tensor.ndim != 4:
        raise Refused(f"a transposed convolution whose weight has {held.tensor.ndim} axes")
    channels, k, r, s = held.tensor.shape
    window, sizes = (r, s) if r != s else r, {"dilation": two(dilation), "groups": groups, "in_channels": channels}
    made = ConvTranspose2d(
        k * groups, window, stride=two(stride), padding=two(padding), output_padding=two(output_padding), bias=bias is not None, **sizes
    )
    return c.make_of(made, input, weight=held, bias=bias)


def linear(c: Call, input: Any, weight: Any, bias: Any = None) -> Value:
    held = held_of(weight, "weight")
    if len(values_of(input).shape) != 1:
        raise Refused(f"along the last axis of {input.shape}; Linear takes vectors")
    k, features = held.tensor.shape
    return c.make_of(Linear(k, bias=bias is not None, in_features=features), input, weight=held, bias=bias)


def batch_norm(
    c: Call,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Value:
    image_of(input)
    mean, var = held_of(running_mean, "running mean"), held_of(running_var, "running variance")
    if momentum is None:
        raise Refused("momentum=None, a cumulative mean")
    channels = len(mean.tensor)
    home = mean.name.rpartition(".")[0]
    scale = weight or Held(f"{home}.weight", torch.ones(channels))
    offset = bias or Held(f"{home}.bias", torch.zeros(channels))
    made = BatchNorm2d(eps=float(eps), momentum=float(momentum), channels=channels)
    return c.make_of(made, input, weight=scale, bias=offset, running_mean=mean, running_var=var)


def _aten_batch_norm(
    c: Call, input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: Any, momentum: Any, eps: float, cudnn: Any = None
) -> Value:
    return batch_norm(c, input, mean, var, weight, bias, training, momentum, eps)


def _batch_norm(c: Call, input: Any, *given: Any, **more: Any) -> Value:
    """F.batch_norm and ATen's op have one name and another order."""
    return (_aten_batch_norm if len(given) > 7 else batch_norm)(c, input, *given, **more)


def group_norm(c: Call, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = None) -> Value:
    scale, offset = _affine(c, input, weight, bias, values_of(input).shape[:1])
    return c.make_of(GroupNorm(int(num_groups), eps=float(eps), channels=input.shape[0]), input, weight=scale, bias=offset)


def layer_norm(c: Call, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = None) -> Value:
    shape = tuple(int(n) for n in normalized_shape)
    if shape != values_of(input).shape:
        raise Refused(f"over {shape} of {input.shape}; LayerNorm is over the whole example")
    scale, offset = _affine(c, input, weight, bias, shape)
    return c.make_of(LayerNorm(eps=float(eps), normalized_shape=shape), input, weight=scale, bias=offset)


def _affine(c: Call, input: Any, weight: Any, bias: Any, shape: tuple[int, ...]) -> tuple[Held, Held]:
    """Weight and bias, ones and zeros where there are none."""
    home = next((each.name.rpartition(".")[0] for each in (weight, bias) if each), str(c.node.target) if c.module is not None else c.node.name)
    return weight or Held(f"{home}.weight", torch.ones(shape)), bias or Held(f"{home}.bias", torch.zeros(shape))


def instance_norm(
    c: Call,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    own: Any = True,
    *rest: Any,
    eps: Any = 1e-5,
) -> Value:
    channels, *_ = image_of(input)
    if running_mean is not None or running_var is not None:
        raise Refused("track_running_stats=True")
    layer = InstanceNorm2d(eps=float(rest[1] if len(rest) > 1 else eps), affine=weight is not None, channels=channels)
    if weight is None:
        return c.make(layer, input)
    return c.make_of(layer, input, weight=weight, bias=bias or Held(f"{weight.name.rpartition('.')[0]}.bias", torch.zeros(channels)))


def _instance_norm(c: Call, input: Any, *given: Any, **more: Any) -> Value:
    """F.instance_norm and ATen's op have one name and another order."""
    if len(given) > 7:
        weight, bias, mean, var, *rest = given
        return instance_norm(c, input, mean, var, weight, bias, *rest)
    more = {("own" if name == "use_input_stats" else name): value for name, value in more.items() if name != "momentum"}
    return instance_norm(c, input, *given, **more)


def prelu(c: Call, input: Any, weight: Any) -> Value:
    held = held_of(weight, "weight")
    return c.make_of(PReLU(held.tensor.numel()), input, weight=held)


# -- layers without


def _plain(kind: Callable[..., Any], *known: str) -> Callable[..., Value]:
    """The handler of an element-wise function; `known` are its parameters, in PyTorch's order, by which `kind` is made."""

    def handler(c: Call, input: Any, *given: Any, inplace: Any = False, **more: Any) -> Value:
        values = dict(zip(known, given, strict=False)) | {name: value for name, value in more.items() if name in known}
        return c.make(kind(**values), input)

    return handler


def softmax(c: Call, input: Any, dim: Any = None, *_: Any, **__: Any) -> Value:
    axes = len(values_of(input).shape) + 1
    if dim is None or dim % axes != 1:
        raise Refused(f"along axis {dim}; Softmax is along the channels, axis 1")
    return c.make(Softmax(), input)


def hardtanh(c: Call, input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: Any = False) -> Value:
    if (min_val, max_val) != (0, 6):
        raise Refused(f"between {min_val} and {max_val}; ReLU6 is between 0 and 6")
    return c.make(ReLU6(), input)


def elu(c: Call, input: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: Any = False) -> Value:
    if scale not in (1, False) or input_scale != 1:
        raise Refused("with a scale")
    return c.make(ELU(float(alpha)), input)


def dropout(c: Call, input: Any, p: float = 0.5, training: Any = True, inplace: Any = False) -> Value:
    return c.make(Dropout(float(p)), input)


def _pool(kind: Any) -> Callable[..., Value]:
    def made(c: Call, input: Any, kernel_size: Any, stride: Any, padding: Any, **more: Any) -> Value:
        size = two(kernel_size)
        return c.make(kind(size, two(stride) if stride not in (None, [], ()) else None, padding=two(padding), **more), input)

    return made


def max_pool2d(
    c: Call,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Value:
    if two(dilation) != (1, 1) or return_indices:
        raise Refused("with dilation, or with its indices")
    return _pool(MaxPool2d)(c, input, kernel_size, stride, padding, ceil_mode=bool(ceil_mode))


def avg_pool2d(
    c: Call,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Value:
    if divisor_override is not None:
        raise Refused("divisor_override")
    return _pool(AvgPool2d)(c, input, kernel_size, stride, padding, ceil_mode=bool(ceil_mode), count_include_pad=bool(count_include_pad))


def adaptive_pool(kind: Any) -> Callable[..., Value]:
    def handler(c: Call, input: Any, output_size: Any, return_indices: bool = False) -> Value:
        channels, height, width = image_of(input)
        rows, columns = c.shape[1:]
        if height % rows or width % columns or return_indices:
            raise Refused(f"{height}×{width} to {rows}×{columns}, whose windows differ in size")
        if (rows, columns) == (1, 1) and kind is AvgPool2d:
            return c.make(Reshape((channels, 1, 1)), c.make(GlobalAvgPool2d(), input), own=False)
        return c.make(kind((height // rows, width // columns)), input)

    return handler


def mean(c: Call, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    axes = len(values_of(input).shape) + 1
    found = sorted(each % axes for each in (dim if isinstance(dim, Sequence) else [-1 if dim is None else dim]))
    if axes != 4 or found != [2, 3]:
        raise Refused(f"over axes {dim}; GlobalAvgPool2d is the mean of rows and columns")
    made = c.make(GlobalAvgPool2d(), input)
    return c.make(Reshape((*made.shape, 1, 1)), made, own=False) if keepdim else made


def reshaped(c: Call, input: Any, *_: Any, **__: Any) -> Value:
    """Every way to give an example another shape without moving its elements: the shape is known from the example."""
    x, shape = values_of(input), c.shape
    if x.shape == shape:
        return x
    if isinstance(x.layer, Reshape) and x.reads[0].shape == shape:
        return x.reads[0]
    if len(shape) not in (1, 3):
        raise Refused(f"an example becomes {shape}; it must be (F,) or (C, H, W)")
    return c.make(Flatten() if len(shape) == 1 and len(x.shape) == 3 else Reshape(shape), x)


def same(c: Call, input: Any, *_: Any, **__: Any) -> Value:
    """What changes nothing that layers see."""
    return values_of(input)


def add(c: Call, input: Any, other: Any, *, alpha: Any = 1) -> Value:
    if alpha != 1:
        raise Refused(f"alpha={alpha}")
    return c.make(Add(), [input, other])


def mul(c: Call, input: Any, other: Any) -> Value:
    shapes = [value.shape for value in values_of([input, other])]
    if len({len(shape) for shape in shapes}) > 1:
        raise Refused(
            f"examples of {shapes[0]} and {shapes[1]}, which broadcasting matches from the last axis; view the factor of channels as (N, C, 1, 1)"
        )
    return c.make(Mul(), [input, other])


def cat(c: Call, tensors: Any, dim: Any = 0) -> Value:
    values = list(tensors)
    if dim % (len(values_of(values)[0].shape) + 1) != 1:
        raise Refused(f"along axis {dim}; Concat is along the channels, axis 1")
    return c.make(Concat(), values)


def pad(c: Call, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Value:
    sides = [int(n) for n in pad]
    if mode != "constant" or len(sides) not in (2, 4):
        raise Refused(f"mode {mode!r} of {len(sides) // 2} axes; Pad is constant, of rows and columns")
    left, right, top, bottom = [*sides, 0, 0][:4]
    return c.make(Pad((top, bottom, left, right), float(value or 0)), input)


def interpolate(
    c: Call, input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: Any = None, *_: Any, **__: Any
) -> Value:
    height, width = image_of(input)[1:]
    rows, columns = c.shape[1:]
    if rows % height or columns % width or align_corners:
        raise Refused(f"{height}×{width} to {rows}×{columns}{', aligned at corners' if align_corners else ''}; Resize is by whole numbers")
    factors = (rows // height, columns // width)
    if mode in ("nearest", "nearest-exact"):
        return c.make(Upsample2d(factors[0]) if factors[0] == factors[1] else Resize(factors), input)
    if mode != "bilinear":
        raise Refused(f"mode {mode!r}")
    return c.make(Resize(factors[0] if factors[0] == factors[1] else factors, mode="bilinear"), input)


def _upsample(mode: str) -> Callable[..., Value]:
    """ATen's op of one mode, whose parameters have another order."""

    def handler(c: Call, input: Any, output_size: Any = None, *given: Any, **__: Any) -> Value:
        corners = bool(given[0]) if mode == "bilinear" and given else False
        return interpolate(c, input, mode=mode, align_corners=corners)

    return handler


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "conv2d": conv2d,
    "conv_transpose2d": conv_transpose2d,
    "linear": linear,
    "batch_norm": _batch_norm,
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "instance_norm": _instance_norm,
    "prelu": prelu,
    "relu": _plain(ReLU),
    "relu6": _plain(ReLU6),
    "leaky_relu": _plain(LeakyReLU, "negative_slope"),
    "elu": elu,
    "gelu": _plain(GELU, "approximate"),
    "silu": _plain(Swish),
    "hardswish": _plain(HardSwish),
    "hardtanh": hardtanh,
    "sigmoid": _plain(Sigmoid),
    "tanh": _plain(Tanh),
    "softmax": softmax,
    "dropout": dropout,
    "max_pool2d": max_pool2d,
    "avg_pool2d": avg_pool2d,
    "adaptive_avg_pool2d": adaptive_pool(AvgPool2d),
    "adaptive_max_pool2d": adaptive_pool(MaxPool2d),
    "mean": mean,
    **dict.fromkeys(("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten"), reshaped),
    **dict.fromkeys(("contiguous", "clone", "detach", "alias", "float"), same),
    "add": add,
    "mul": mul,
    "multiply": mul,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "pad": pad,
    "constant_pad_nd": lambda c, input, sides, value=0: pad(c, input, sides, "constant", value),
    "interpolate": interpolate,
    "upsample_nearest2d": _upsample("nearest"),
    "upsample_bilinear2d": _upsample("bilinear"),
    operator.getitem.__name__: lambda c, input, at: values_of(input[at] if isinstance(input, tuple | list) else None),
}
"""Functions, methods and ATen ops by name."""
