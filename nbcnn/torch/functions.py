"""The functions, methods and ATen ops of PyTorch that are read: for each a handler, which has PyTorch's parameters and makes layers.

A method, an ATen op and the function of the same name share a handler (`FUNCTIONS`), and the modules call these functions (`modules.py`). Most say
which op of ONNX the function is (`Call.op`). A handler raises Refused for arguments of which no layer is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.nn.activations import Threshold
from nbcnn.nn.corruption import Dropout
from nbcnn.nn.joins import Detach
from nbcnn.nn.norms import InstanceNorm2d
from nbcnn.nn.resampling import GlobalAvgPool2d
from nbcnn.onnx.rows import Resizing, taken
from nbcnn.onnx.shapes import interpolated
from nbcnn.onnx.values import Val
from nbcnn.plan.shapes import numel
from nbcnn.torch.calls import Call, Held, Refused, held_of, numbers, value_of, values_of

PADS = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
"""The modes of paddings, and what the op Pad calls them."""


def _axis(x: Val, dim: int, more: int = 0) -> int:
    """An axis of PyTorch, not negative. `more`: of a value that has so many axes more."""
    rank = len(x.dims) + 1 + more
    if not -rank <= dim < rank:
        raise Refused(f"axis {dim} of {rank} axes")
    return dim % rank


# -- layers with weights


def _space(input: Any) -> int:
    """The axes of space of images or series."""
    count = len(value_of(input).dims) - 1
    if count not in (1, 2):
        raise Refused(f"of examples {input.dims}; images and series are taken")
    return count


def conv(
    c: Call, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, mode: str = "zeros"
) -> Val:
    held, count = held_of(weight, "weight"), _space(input)
    if held.tensor.ndim != count + 2:
        raise Refused(f"a convolution whose weight has {held.tensor.ndim} axes")
    apart, window = numbers(dilation, count), held.tensor.shape[2:]
    if padding == "same":
        reach = [step * (size - 1) for step, size in zip(apart, window, strict=True)]
        before, after = [each // 2 for each in reach], [each - each // 2 for each in reach]
    else:
        before = after = [0] * count if padding == "valid" else numbers(padding, count)
    if mode != "zeros":
        input = c.op("Pad", input, [0, 0, *before, 0, 0, *after], mode=PADS[mode])
        before = after = [0] * count
    return c.op("Conv", input, held, bias, strides=numbers(stride, count), pads=[*before, *after], dilations=apart, group=int(groups))


def conv_transpose(
    c: Call, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
) -> Val:
    held, count = held_of(weight, "weight"), _space(input)
    given = {"strides": stride, "output_padding": output_padding, "dilations": dilation}
    sides = numbers(padding, count)
    attributes = {name: numbers(each, count) for name, each in given.items()}
    return c.op("ConvTranspose", input, held, bias, pads=[*sides, *sides], group=int(groups), **attributes)


def _aten_convolution(
    c: Call, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Val:
    if transposed:
        return conv_transpose(c, input, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(c, input, weight, bias, stride, padding, dilation, groups)


def linear(c: Call, input: Any, weight: Any, bias: Any = None) -> Val:
    held = held_of(weight, "weight")
    if len(value_of(input).dims) == 1:
        return c.op("Gemm", input, held, bias, transB=1)
    # Rows of features: a convolution of 1×1 over them.
    outer, k = numel(input.dims[:-1]), input.dims[-1]
    columns = c.sheet.permuted(input.seen((outer, k)), (1, 0))
    images = Val(c.sheet.shaped(columns, (k, outer, 1)), (k, outer, 1))
    square = Held(held.name, held.tensor[:, :, None, None], held.trained)
    made = c.op("Conv", images, square, bias)
    return c.sheet.permuted(made.seen((made.dims[0], outer)), (1, 0)).seen((*input.dims[:-1], made.dims[0]))


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
) -> Val:
    mode = c.mode(training)
    if mode == "always":
        raise Refused("training=True, statistics of the batch in predictions, too")
    mean, var = held_of(running_mean, "running mean"), held_of(running_var, "running variance")
    channels = value_of(input).dims[0]
    if mode == "training":
        if momentum is None:
            raise Refused("momentum=None, a cumulative mean")
        scale, offset = (np.full(channels, value, np.float32) if each is None else each for each, value in ((weight, 1.0), (bias, 0.0)))
        return c.op("BatchNormalization", input, scale, offset, mean, var, epsilon=float(eps), momentum=1 - float(momentum))
    # Statistics that never move are a factor and an offset for each channel, which are no parameters.
    factor = 1 / np.sqrt(var.tensor.double().numpy() + eps)
    wide = (-1, *(1,) * (len(input.dims) - 1))
    y = c.sheet.affine(input, factor.reshape(wide), (-mean.tensor.double().numpy() * factor).reshape(wide))
    return _affine(c, y, weight, bias, wide)


def _affine(c: Call, x: Any, weight: Any, bias: Any, shape: Sequence[int]) -> Val:
    """weight·x + bias, tensors of the module or None, each seen in `shape`."""
    held = {key: each for key, each in (("weight", weight), ("bias", bias)) if each is not None}
    arrays = {key: each.tensor.detach().numpy().reshape(shape) for key, each in held.items()}
    return c.sheet.affine(x, arrays.get("weight"), arrays.get("bias"), {key: each.name for key, each in held.items()})


def _aten_batch_norm(
    c: Call, input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: Any, momentum: Any, eps: float, cudnn: Any = None
) -> Val:
    return batch_norm(c, input, mean, var, weight, bias, training, momentum, eps)


def _batch_norm(c: Call, input: Any, *given: Any, **more: Any) -> Val:
    """F.batch_norm and ATen's op have one name and another order."""
    return (_aten_batch_norm if len(given) > 7 else batch_norm)(c, input, *given, **more)


def group_norm(c: Call, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = None) -> Val:
    channels = value_of(input).dims[0]
    scale, offset = (np.full(channels, value, np.float32) if each is None else each for each, value in ((weight, 1.0), (bias, 0.0)))
    return c.op("GroupNormalization", input, scale, offset, num_groups=int(num_groups), epsilon=float(eps))


def layer_norm(c: Call, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = None) -> Val:
    shape = tuple(numbers(normalized_shape, 1))
    if shape != value_of(input).dims[-len(shape) :]:
        raise Refused(f"over {shape} of {input.dims}")
    return c.op("LayerNormalization", input, weight, bias, axis=-len(shape), epsilon=float(eps))


def rms_norm(c: Call, input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Val:
    shape = tuple(numbers(normalized_shape, 1))
    ones = np.ones(shape, np.float32)
    epsilon = float(np.finfo(np.float32).eps if eps is None else eps)
    return c.op("RMSNormalization", input, ones if weight is None else weight, axis=-len(shape), epsilon=epsilon)


def instance_norm(
    c: Call,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: Any = True,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Val:
    if running_mean is not None or running_var is not None:
        raise Refused("track_running_stats=True")
    channels, *space = value_of(input).dims
    if weight is None and bias is None:
        if len(space) == 2 and input.value.shape == input.dims:
            return Val(c.sheet.call(InstanceNorm2d(eps=float(eps)), input.value), input.dims)
        return c.op("LayerNormalization", input.seen((channels, numel(tuple(space)))), None, None, axis=-1, epsilon=float(eps)).seen(input.dims)
    scale, offset = (np.full(channels, value, np.float32) if each is None else each for each, value in ((weight, 1.0), (bias, 0.0)))
    return c.op("InstanceNormalization", input, scale, offset, epsilon=float(eps))


def _instance_norm(c: Call, input: Any, *given: Any, **more: Any) -> Val:
    """F.instance_norm and ATen's op have one name and another order."""
    if len(given) > 7:
        weight, bias, mean, var, *rest = given
        return instance_norm(c, input, mean, var, weight, bias, *rest[:3])
    return instance_norm(c, input, *given, **more)


def prelu(c: Call, input: Any, weight: Any) -> Val:
    held = held_of(weight, "weight")
    wide = held.tensor.reshape(-1, *(1,) * (len(value_of(input).dims) - 1))
    return c.op("PRelu", input, Held(held.name, wide, held.trained))


def matmul(c: Call, input: Any, other: Any) -> Val:
    return c.op("MatMul", input, other)


# -- activations


def _op(name: str, **known: tuple[str, Any]) -> Callable[..., Val]:
    """The handler of a function that is the op `name`; `known` are its parameters in PyTorch's order, each with the op's attribute and what it is
    where it is left out."""

    def handler(c: Call, input: Any, *given: Any, inplace: Any = False, **more: Any) -> Val:
        values = dict(zip(known, given, strict=False)) | {key: value for key, value in more.items() if key in known}
        attributes = {attribute: values.get(key, default) for key, (attribute, default) in known.items()}
        return c.op(name, value_of(input), **attributes)

    return handler


def gelu(c: Call, input: Any, approximate: str = "none") -> Val:
    return c.op("Gelu", value_of(input), approximate=approximate)


def elu(c: Call, input: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: Any = False) -> Val:
    if scale not in (1, False) or input_scale != 1:
        return c.op("Selu", c.sheet.scaled(value_of(input), float(input_scale)), alpha=float(alpha), gamma=float(scale))
    return c.op("Elu", value_of(input), alpha=float(alpha))


def clamp(c: Call, input: Any, min: Any = None, max: Any = None) -> Val:
    return c.op("Clip", value_of(input), min, max)


def hardtanh(c: Call, input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: Any = False) -> Val:
    return clamp(c, input, float(min_val), float(max_val))


def softplus(c: Call, input: Any, beta: float = 1.0, threshold: float = 20.0) -> Val:
    if threshold * 1.0 < 15:
        raise Refused(f"threshold={threshold}; what is above 15 is a straight line in float32")
    return c.sheet.scaled(c.op("Softplus", c.sheet.scaled(value_of(input), float(beta))), 1 / float(beta))


def log_sigmoid(c: Call, input: Any) -> Val:
    return c.sheet.scaled(softplus(c, c.sheet.scaled(value_of(input), -1)), -1)


def softsign(c: Call, input: Any) -> Val:
    return c.op("Softsign", value_of(input))


def tanhshrink(c: Call, input: Any) -> Val:
    return c.sheet.sum([value_of(input), c.sheet.scaled(c.op("Tanh", input), -1)])


def softshrink(c: Call, input: Any, lambd: float = 0.5) -> Val:
    sheet, x = c.sheet, value_of(input)
    above, below = (c.op("Relu", sheet.scaled(x, sign, -float(lambd))) for sign in (1, -1))
    return sheet.sum([above, sheet.scaled(below, -1)])


def hardshrink(c: Call, input: Any, lambd: float = 0.5) -> Val:
    sheet, x = c.sheet, value_of(input)
    above, below = (sheet.alike(Threshold(float(lambd)), sheet.scaled(x, sign)) for sign in (1, -1))
    return sheet.sum([above, sheet.scaled(below, -1)])


def threshold(c: Call, input: Any, threshold: float, value: float, inplace: Any = False) -> Val:
    return c.sheet.alike(Threshold(float(threshold), float(value)), value_of(input))


def glu(c: Call, input: Any, dim: int = -1) -> Val:
    a, b = c.parts(2, "Split", value_of(input), axis=_axis(input, dim))
    return c.sheet.product(a, c.op("Sigmoid", b))


def _softmax(name: str) -> Callable[..., Val]:
    def handler(c: Call, input: Any, dim: Any = None, *_: Any, **__: Any) -> Val:
        if dim is None:
            raise Refused("without a dim")
        return c.op(name, value_of(input), axis=_axis(input, dim))

    return handler


def dropout(c: Call, input: Any, p: float = 0.5, training: Any = True, inplace: Any = False) -> Val:
    mode = c.mode(training)
    if mode == "always" and p:
        raise Refused("training=True, which drops in predictions, too")
    return c.sheet.alike(Dropout(float(p)), value_of(input)) if mode == "training" and p else value_of(input)


def _other_dropout(c: Call, input: Any, p: float = 0.5, training: Any = True, inplace: Any = False) -> Val:
    if c.mode(training) != "never" and p:
        raise Refused("Dropout drops single elements")
    return value_of(input)


def detach(c: Call, input: Any) -> Val:
    return c.sheet.alike(Detach(), value_of(input))


# -- arithmetic


def add(c: Call, input: Any, other: Any, *, alpha: Any = 1) -> Val:
    if alpha == 1:
        return c.op("Add", input, other)
    scaled = c.sheet.scaled(other, float(alpha)) if isinstance(other, Val) else float(other) * alpha if isinstance(other, int | float) else None
    if scaled is None:
        raise Refused(f"alpha={alpha}")
    return c.op("Add", input, scaled)


def sub(c: Call, input: Any, other: Any, *, alpha: Any = 1) -> Val:
    if alpha != 1:
        return add(c, input, other, alpha=-alpha)
    return c.op("Sub", input, other)


def rsub(c: Call, input: Any, other: Any, alpha: Any = 1) -> Val:
    return sub(c, other, input, alpha=alpha)


def _binary(name: str, swapped: bool = False) -> Callable[..., Val]:
    def handler(c: Call, input: Any, other: Any) -> Val:
        return c.op(name, *((other, input) if swapped else (input, other)))

    return handler


def div(c: Call, input: Any, other: Any, *, rounding_mode: Any = None) -> Val:
    if rounding_mode is not None:
        raise Refused(f"rounding_mode={quoted(rounding_mode)}")
    return c.op("Div", input, other)


def power(c: Call, input: Any, exponent: Any) -> Val:
    if not isinstance(exponent, int | float):
        raise Refused("an exponent that is no number")
    return c.sheet.power(value_of(input), float(exponent))


def _to_power(exponent: float) -> Callable[..., Val]:
    return lambda c, input: c.sheet.power(value_of(input), exponent)


# -- pools


def _windows(c: Call, input: Any, kernel_size: Any, stride: Any, padding: Any) -> dict[str, Any]:
    count = _space(input)
    size, sides = numbers(kernel_size, count), numbers(padding, count)
    steps = size if stride in (None, [], ()) else numbers(stride, count)
    return {"kernel_shape": size, "strides": steps, "pads": [*sides, *sides]}


def max_pool(
    c: Call,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Val:
    if return_indices:
        raise Refused("with its indices")
    apart = numbers(dilation, _space(input))
    return c.op("MaxPool", input, ceil_mode=int(ceil_mode), dilations=apart, **_windows(c, input, kernel_size, stride, padding))


def avg_pool(
    c: Call,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Val:
    if divisor_override is not None:
        raise Refused("divisor_override")
    windows = _windows(c, input, kernel_size, stride, padding)
    return c.op("AveragePool", input, ceil_mode=int(ceil_mode), count_include_pad=int(count_include_pad), **windows)


def adaptive_pool(average: bool) -> Callable[..., Val]:
    def handler(c: Call, input: Any, output_size: Any, return_indices: bool = False) -> Val:
        if return_indices:
            raise Refused("with its indices")
        count = _space(input)
        extents, made = input.dims[-count:], c.shape[-count:]
        if set(made) == {1}:
            return c.op("GlobalAveragePool" if average else "GlobalMaxPool", input)
        if all(extent % size == 0 for extent, size in zip(extents, made, strict=True)):
            window = [extent // size for extent, size in zip(extents, made, strict=True)]
            return (avg_pool if average else max_pool)(c, input, window)
        if not average:
            raise Refused(f"{extents} to {made}, whose windows differ in size")
        x = value_of(input)
        for axis, (extent, size) in enumerate(zip(extents, made, strict=True), 1):
            x = c.sheet.mapped(x, axis, [_mean(range(at * extent // size, -(-(at + 1) * extent // size))) for at in range(size)])
        return x

    return handler


def _mean(places: range) -> list[tuple[int, float]]:
    return [(at, 1 / len(places)) for at in places]


# -- reductions


def _axes(input: Any, dim: Any) -> list[int]:
    dims = range(len(value_of(input).dims) + 1) if dim is None else [dim] if isinstance(dim, int) else dim
    return [_axis(input, each) for each in dims]


def _reduced(name: str) -> Callable[..., Val]:
    def handler(c: Call, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
        return c.op(name, value_of(input), _axes(input, dim), keepdims=int(keepdim))

    return handler


def mean(c: Call, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    x, axes = value_of(input), _axes(input, dim)
    if not keepdim and sorted(axes) == [2, 3] and len(x.dims) == 3 and x.value.shape == x.dims:
        return Val(c.sheet.call(GlobalAvgPool2d(), x.value), x.dims[:1])
    return c.op("ReduceMean", x, axes, keepdims=int(keepdim))


def variance(c: Call, input: Any, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None) -> Val:
    x, axes, sheet = value_of(input), _axes(input, dim), c.sheet
    count = numel(tuple(x.dims[axis - 1] for axis in axes))
    less = (1 if unbiased else 0) if correction is None else correction
    centred = sheet.sum([x, sheet.scaled(c.op("ReduceMean", x, axes, keepdims=1), -1)])
    if count <= less:
        raise Refused(f"of {count} elements, less {less}")
    return sheet.scaled(c.op("ReduceMean", sheet.power(centred, 2), axes, keepdims=int(keepdim)), count / (count - less))


def deviation(c: Call, input: Any, *given: Any, **more: Any) -> Val:
    return c.sheet.power(variance(c, input, *given, **more), 0.5)


def norm(c: Call, input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *_: Any, **__: Any) -> Val:
    if p not in (1, 2):
        raise Refused(f"p={p}")
    return c.op(f"ReduceL{int(p)}", value_of(input), _axes(input, dim), keepdims=int(keepdim))


def normalize(c: Call, input: Any, p: Any = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Val:
    size = norm(c, input, p, dim, True)
    return c.sheet.product(input, c.sheet.power(clamp(c, size, float(eps)), -1))


# -- moves


def reshaped(c: Call, input: Any, *_: Any, **__: Any) -> Val:
    """Every way to give an example another shape without moving its elements: the shape is known from the example."""
    x = value_of(input)
    if numel(x.dims) != numel(c.shape):
        raise Refused(f"{x.dims} becomes {c.shape}: it mixes examples")
    return x.seen(c.shape)


def same(c: Call, input: Any, *_: Any, **__: Any) -> Val:
    """What changes nothing that layers see."""
    return value_of(input)


def permute(c: Call, input: Any, *dims: Any) -> Val:
    order = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], Sequence) else list(dims)
    return c.op("Transpose", value_of(input), perm=[_axis(input, each) for each in order])


def transpose(c: Call, input: Any, dim0: int, dim1: int) -> Val:
    order = list(range(len(value_of(input).dims) + 1))
    a, b = _axis(input, dim0), _axis(input, dim1)
    order[a], order[b] = order[b], order[a]
    return c.op("Transpose", input, perm=order)


def movedim(c: Call, input: Any, source: Any, destination: Any) -> Val:
    sources, targets = ([_axis(value_of(input), each) for each in ([at] if isinstance(at, int) else at)] for at in (source, destination))
    order = [axis for axis in range(len(input.dims) + 1) if axis not in sources]
    for target, axis in sorted(zip(targets, sources, strict=True)):
        order.insert(target, axis)
    return c.op("Transpose", input, perm=order)


def cat(c: Call, tensors: Any, dim: Any = 0) -> Val:
    values = values_of(list(tensors))
    return c.op("Concat", *values, axis=_axis(values[0], dim))


def stack(c: Call, tensors: Any, dim: int = 0) -> Val:
    values = values_of(list(tensors))
    axis = _axis(values[0], dim, 1)
    return c.op("Concat", *[c.op("Unsqueeze", each, [axis]) for each in values], axis=axis)


def chunk(c: Call, input: Any, chunks: int, dim: int = 0) -> tuple[Val, ...]:
    extent = _extent(input, dim)
    return split(c, input, -(-extent // int(chunks)), dim)


def split(c: Call, input: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[Val, ...]:
    extent, given = _extent(input, dim), split_size_or_sections
    sizes = [min(given, extent - at) for at in range(0, extent, given)] if isinstance(given, int) else [int(n) for n in given]
    if len(sizes) == 1:
        return (value_of(input),)
    return tuple(c.parts(len(sizes), "Split", input, sizes, axis=_axis(input, dim)))


def _extent(input: Any, dim: int) -> int:
    axis = _axis(value_of(input), dim)
    if axis == 0:
        raise Refused("it mixes examples")
    return int(input.dims[axis - 1])


def unbind(c: Call, input: Any, dim: int = 0) -> tuple[Val, ...]:
    axis = _axis(value_of(input), dim)
    parts = split(c, input, 1, dim)
    return tuple(c.op("Squeeze", each, [axis]) for each in parts)


def getitem(c: Call, input: Any, at: Any) -> Any:
    """An element of a tuple, or a part of a tensor: slices, whole numbers, None and an ellipsis."""
    if isinstance(input, tuple | list):
        return input[at]
    x, places = value_of(input), list(at) if isinstance(at, tuple) else [at]
    if not all(each is None or each is Ellipsis or (isinstance(each, slice | int) and not isinstance(each, bool)) for each in places):
        raise Refused("indices that are no slices and no whole numbers")
    count = sum(each is not None and each is not Ellipsis for each in places)
    whole = [slice(None)] * (len(x.dims) + 1 - count)
    if Ellipsis in places:
        where = places.index(Ellipsis)
        places[where : where + 1] = whole
    axis = 0
    for each in places:
        if each is None:
            x = c.op("Unsqueeze", x, [axis])
        elif isinstance(each, int):
            x = c.op("Gather", x, np.asarray(each, np.int64), axis=axis)
            continue
        elif each != slice(None):
            start, stop, step = (default if part is None else part for part, default in zip((each.start, each.stop, each.step), _WHOLE, strict=True))
            x = c.op("Slice", x, [start], [stop], [axis], [step])
        axis += 1
    return x


_WHOLE = (0, 2**63 - 1, 1)


def narrow(c: Call, input: Any, dim: int, start: int, length: int) -> Val:
    return c.op("Slice", value_of(input), [start], [start + length], [_axis(input, dim)])


def _aten_slice(c: Call, input: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Val:
    first, last = (default if each is None else each for each, default in ((start, 0), (end, 2**63 - 1)))
    return c.op("Slice", value_of(input), [first], [last], [_axis(input, dim)], [step])


def select(c: Call, input: Any, dim: int, index: int) -> Val:
    return c.op("Gather", value_of(input), np.asarray(index, np.int64), axis=_axis(input, dim))


def flip(c: Call, input: Any, *dims: Any) -> Val:
    for dim in dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims:
        input = c.sheet.mapped(input, _axis(input, dim) - 1, taken(range(_extent(input, dim) - 1, -1, -1)))
    return value_of(input)


def roll(c: Call, input: Any, shifts: Any, dims: Any = None) -> Val:
    if dims is None:
        raise Refused("of all elements in one row")
    for shift, dim in zip(numbers(shifts, 1), numbers(dims, 1), strict=True):
        extent = _extent(input, dim)
        input = c.sheet.mapped(input, _axis(input, dim) - 1, taken([(at - shift) % extent for at in range(extent)]))
    return value_of(input)


def repeat_interleave(c: Call, input: Any, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Val:
    if dim is None or not isinstance(repeats, int):
        raise Refused("of all elements in one row, or by different numbers")
    return c.sheet.mapped(input, _axis(input, dim) - 1, taken([at // repeats for at in range(_extent(input, dim) * repeats)]))


def expand(c: Call, input: Any, *sizes: Any) -> Val:
    return c.sheet.expanded(value_of(input), c.shape)


def repeat(c: Call, input: Any, *sizes: Any) -> Val:
    counts = [int(n) for n in (sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes)]
    return c.op("Tile", value_of(input), counts)


def pixel_shuffle(c: Call, input: Any, upscale_factor: int) -> Val:
    return c.op("DepthToSpace", value_of(input), blocksize=int(upscale_factor), mode="CRD")


def pixel_unshuffle(c: Call, input: Any, downscale_factor: int) -> Val:
    return c.op("SpaceToDepth", value_of(input), blocksize=int(downscale_factor), mode="CRD")


def channel_shuffle(c: Call, input: Any, groups: int) -> Val:
    channels, *space = value_of(input).dims
    moved = c.sheet.permuted(input.seen((groups, channels // groups, numel(tuple(space)))), (1, 0, 2))
    return moved.seen(input.dims)


def pad(c: Call, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Val:
    sides = [int(n) for n in pad]
    rank = len(value_of(input).dims) + 1
    before, after = [0] * rank, [0] * rank
    for at in range(len(sides) // 2):
        before[rank - 1 - at], after[rank - 1 - at] = sides[2 * at], sides[2 * at + 1]
    if mode not in PADS:
        raise Refused(f"mode {quoted(mode)}")
    return c.op("Pad", input, [*before, *after], float(value or 0), mode=PADS[mode])


# -- other sizes

_RESIZE = {
    "nearest": Resizing("nearest", "asymmetric", "floor"),
    "nearest-exact": Resizing("nearest", "half_pixel", "round_prefer_ceil"),
    "linear": Resizing("linear"),
    "bilinear": Resizing("linear"),
    "bicubic": Resizing("cubic"),
}
"""The modes of interpolation, and what the op Resize calls them."""


def interpolate(
    c: Call,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> Val:
    count = _space(input)
    if mode == "area":
        return adaptive_pool(average=True)(c, input, c.shape[-count:])
    if mode not in _RESIZE or antialias:
        raise Refused(f"mode {quoted(mode)}{', antialias' if antialias else ''}")
    how = replace(_RESIZE[mode], coordinates="align_corners") if align_corners else _RESIZE[mode]
    x, extents, made = value_of(input), input.dims[-count:], c.shape[-count:]
    # Not by the op itself, which has scales in float32: in it 8.5 pixels of a scale of 1.7 are less than 5.
    scales = [size / extent for size, extent in zip(made, extents, strict=True)]
    if scale_factor is not None and not recompute_scale_factor:
        scales = [float(n) for n in (scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * count)]
    maps = {axis: how.rows(extents[axis - 1], scales[axis - 1], made[axis - 1])[0] for axis in range(1, count + 1)}
    return interpolated(c.sheet, x, maps)


def _upsample(mode: str) -> Callable[..., Val]:
    """ATen's op of one mode: input, output_size, align_corners where it has them, scale_factors."""

    def handler(c: Call, input: Any, output_size: Any = None, *given: Any, **__: Any) -> Val:
        corners = bool(given[0]) if mode not in ("nearest", "nearest-exact") and given else False
        factors = next((each for each in given if isinstance(each, Sequence)), None)
        return interpolate(c, input, output_size, None if output_size else factors, mode, corners)

    return handler


def local_response_norm(c: Call, input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Val:
    if size % 2 == 0:
        raise Refused(f"size {size}; PyTorch's window of an even size begins elsewhere")
    return c.op("LRN", value_of(input), size=int(size), alpha=float(alpha), beta=float(beta), bias=float(k))


def where(c: Call, condition: Any, input: Any, other: Any) -> Val:
    return c.op("Where", condition, input, other)


_SLOPE = ("alpha", 0.01)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("conv1d", "conv2d"), conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d"), conv_transpose),
    "convolution": _aten_convolution,
    "linear": linear,
    **dict.fromkeys(("matmul", "mm"), matmul),
    "batch_norm": _batch_norm,
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "instance_norm": _instance_norm,
    "local_response_norm": local_response_norm,
    "prelu": prelu,
    "relu": _op("Relu"),
    "relu6": lambda c, input, inplace=False: clamp(c, input, 0.0, 6.0),
    "leaky_relu": _op("LeakyRelu", negative_slope=_SLOPE),
    "elu": elu,
    "selu": _op("Selu"),
    "celu": _op("Celu", alpha=("alpha", 1.0)),
    "gelu": gelu,
    "silu": _op("Swish"),
    "mish": _op("Mish"),
    "hardswish": _op("HardSwish"),
    "hardsigmoid": lambda c, input, inplace=False: c.op("HardSigmoid", value_of(input), alpha=1 / 6, beta=0.5),
    "hardtanh": hardtanh,
    **dict.fromkeys(("clamp", "clip"), clamp),
    "clamp_min": lambda c, input, min: clamp(c, input, min),
    "clamp_max": lambda c, input, max: clamp(c, input, None, max),
    "sigmoid": _op("Sigmoid"),
    "tanh": _op("Tanh"),
    "softplus": softplus,
    **dict.fromkeys(("logsigmoid", "log_sigmoid"), log_sigmoid),
    "softsign": softsign,
    "tanhshrink": tanhshrink,
    "softshrink": softshrink,
    "hardshrink": hardshrink,
    **dict.fromkeys(("threshold", "_threshold"), threshold),
    "glu": glu,
    "softmax": _softmax("Softmax"),
    "_softmax": _softmax("Softmax"),
    "log_softmax": _softmax("LogSoftmax"),
    "_log_softmax": _softmax("LogSoftmax"),
    "dropout": dropout,
    **dict.fromkeys(("dropout1d", "dropout2d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"), _other_dropout),
    "detach": detach,
    "max_pool1d": max_pool,
    "max_pool2d": max_pool,
    "avg_pool1d": avg_pool,
    "avg_pool2d": avg_pool,
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d"), adaptive_pool(average=True)),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d"), adaptive_pool(average=False)),
    "mean": mean,
    "sum": _reduced("ReduceSum"),
    "amax": _reduced("ReduceMax"),
    "amin": _reduced("ReduceMin"),
    "var": variance,
    "std": deviation,
    "norm": norm,
    "normalize": normalize,
    **dict.fromkeys(("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten", "_unsafe_view", "view_as", "reshape_as"), reshaped),
    **dict.fromkeys(("contiguous", "clone", "alias", "float", "to", "type_as", "_to_copy", "positive"), same),
    "permute": permute,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("movedim", "moveaxis"), movedim),
    "add": add,
    "sub": sub,
    "subtract": sub,
    "rsub": rsub,
    "mul": _binary("Mul"),
    "multiply": _binary("Mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), div),
    "neg": lambda c, input: c.sheet.scaled(value_of(input), -1),
    "negative": lambda c, input: c.sheet.scaled(value_of(input), -1),
    "abs": _op("Abs"),
    "absolute": _op("Abs"),
    "pow": power,
    "square": _to_power(2.0),
    "exp": _op("Exp"),
    "sqrt": _to_power(0.5),
    "rsqrt": _to_power(-0.5),
    "reciprocal": _to_power(-1.0),
    "maximum": _binary("Max"),
    "minimum": _binary("Min"),
    "where": where,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "stack": stack,
    "chunk": chunk,
    "split": split,
    "split_with_sizes": split,
    "unbind": unbind,
    "narrow": narrow,
    "slice": _aten_slice,
    "select": select,
    "flip": flip,
    "roll": roll,
    "repeat": repeat,
    "tile": repeat,
    "repeat_interleave": repeat_interleave,
    "expand": expand,
    "expand_as": expand,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), channel_shuffle),
    "pad": pad,
    "constant_pad_nd": lambda c, input, sides, value=0: pad(c, input, sides, "constant", value),
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d"), lambda c, input, sides: pad(c, input, sides, "reflect")),
    **dict.fromkeys(("replication_pad1d", "replication_pad2d"), lambda c, input, sides: pad(c, input, sides, "replicate")),
    "interpolate": interpolate,
    "upsample_nearest2d": _upsample("nearest"),
    "_upsample_nearest_exact2d": _upsample("nearest-exact"),
    "upsample_bilinear2d": _upsample("bilinear"),
    "upsample_bicubic2d": _upsample("bicubic"),
    "upsample_linear1d": _upsample("linear"),
    "upsample_nearest1d": _upsample("nearest"),
    operator.getitem.__name__: getitem,
}
"""Functions, methods and ATen ops by name."""
FLAGGED = {"batch_norm", "dropout", "dropout1d", "dropout2d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
"""The names of functions with a flag for training, which may say one thing in training and another in evaluation."""
