"""This module records convolutions of images, for the layers that are made of them: by an engine of the mode, or by the ops that take everything."""

from __future__ import annotations

from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.layer import Built, counts, fitting, images, pair
from nbcnn.plan.graph import Buf, Tape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, window_extent

MOST_TAPS = 15
"""Taps along an axis that every engine of convolution takes (`ops/conv/mma/wgrad_load.py`)."""


def even(value: Any) -> Any:
    """A pair, or four, of one number as that number; lists, as files have them, as tuples."""
    made = tuple(value) if isinstance(value, list | tuple) else value
    return made[0] if isinstance(made, tuple) and len(made) in (2, 4) and len(set(made)) == 1 else made


def check_padding(layer: Any) -> None:
    """Raise UsageError unless the padding of `layer` is a whole number of at least 0, or two, or four of them."""
    sides = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,)
    if len(sides) == 1:
        counts(layer, "padding", least=0)
    elif len(sides) not in (2, 4) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sides):
        kind = type(layer).__name__
        raise UsageError(f"{kind} takes one padding of at least 0, a pair, or (top, bottom, left, right), got {quoted(layer.padding)}")


def padding_of(layer: Any) -> Any:
    """The padding that a layer means by "valid" or "same" as numbers; another as it is.

    "same" keeps height and width at stride 1: of an odd number of zeros the one more is below and to the right, as in torch.nn.Conv2d.
    Raises UsageError for "same" with another stride, which PyTorch refuses and Keras pads by the size of the input, and for other words.
    """
    if not isinstance(layer.padding, str):
        return layer.padding
    if layer.padding == "valid":
        return 0
    kind = type(layer).__name__
    if layer.padding != "same":
        raise UsageError(f"{kind}: no padding {quoted(layer.padding)}; it is a number, a pair, (top, bottom, left, right), same or valid")
    reach = [step * (size - 1) for step, size in zip(pair(layer.dilation), pair(layer.kernel_size), strict=True)]
    (top, bottom), (left, right) = ((each // 2, each - each // 2) for each in reach)
    if layer.stride != 1:
        line = f"padding={even((top, bottom, left, right))} gives ⌈height/stride⌉ rows, and columns alike"
        raise UsageError(f'{kind}: padding="same" is for stride 1, got stride {layer.stride}: {line}')
    return top, bottom, left, right


def sides_of(padding: Any) -> tuple[int, int, int, int]:
    """A padding as (top, bottom, left, right)."""
    sides = padding if isinstance(padding, tuple) else (padding,) * 2
    top, bottom, left, right = sides if len(sides) == 4 else (sides[0], sides[0], sides[1], sides[1])
    return top, bottom, left, right


def conv_by_engine(layer: Any, tape: Tape, x: Buf, scope: str, shape: ConvShape) -> Built:
    """Record the convolution `shape` of `x` with `layer`'s parameters."""
    params = layer.params()
    weight = tape.param(scope, "weight", params["weight"].shape)
    biases = [tape.param(scope, "bias", params["bias"].shape)] if layer.bias else []
    w = weight.reshaped(shape.w_shape)
    y = tape.temp(f"{scope}.y", shape.y_shape)
    geometry = {"stride": shape.stride, "pad": shape.pad}
    tape.emit(Op("conv", "fprop"), [x, w, *biases], [y], scope, **geometry)

    def backward(dy: Buf) -> Buf:
        dw = tape.grad(weight).reshaped(shape.w_shape)
        tape.emit(Op("conv", "wgrad"), [x, dy], [dw, *(tape.grad(b) for b in biases)], scope, **geometry)
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit(Op("conv", "dgrad"), [dy, w], [dx], scope, **geometry)
        return dx

    return y, backward


def convolved(
    layer: Any,
    tape: Tape,
    x: Buf,
    scope: str,
    window: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    borders: tuple[int, int, int, int],
) -> Built:
    """Record the convolution of images `x` with the parameters of `layer`, which has `out_channels`, `groups` and `bias`.

    An engine of the mode computes it where it has one group, one stride, no dilation and at most `MOST_TAPS` taps along an axis; else the ops that
    take everything (`ops/conv/grouped.py`).
    """
    n, c, h, w = images(x, scope)
    by_engine = layer.groups == 1 and dilation == (1, 1) and stride[0] == stride[1] and max(window) <= MOST_TAPS
    if any(borders) and (by_engine or (layer.groups < c and len(set(borders)) > 1)):
        # A padded copy costs two passes over the image; an engine without it many times the products, or a kernel that is many times slower.
        whole, back = padded_images(tape, x, borders, scope)
        y, inner = convolved(layer, tape, whole, scope, window, stride, dilation, (0, 0, 0, 0))
        return y, lambda dy: back(inner(dy))
    if by_engine:
        return conv_by_engine(layer, tape, x, scope, fitting(scope, x, lambda: ConvShape(n, c, h, w, layer.out_channels, *window, stride[0], 0)))
    top, bottom, left, right = borders
    extent = (h + top + bottom, w + left + right)
    out = [fitting(scope, x, lambda at=at: window_extent(extent[at], dilation[at] * (window[at] - 1) + 1, stride[at])) for at in (0, 1)]
    params = layer.params()
    weight = tape.param(scope, "weight", params["weight"].shape)
    filters = (*params["weight"].shape[:2], *window)
    biases = [tape.param(scope, "bias", params["bias"].shape)] if layer.bias else []
    y = tape.temp(f"{scope}.y", (n, layer.out_channels, *out))
    attrs = {"groups": layer.groups, "stride": stride, "dilation": dilation, "pad": (top, left)}
    tape.emit(Op("gconv", "fprop"), [x, weight.reshaped(filters), *biases], [y], scope, **attrs)

    def backward(dy: Buf) -> Buf:
        gradients = [tape.grad(weight).reshaped(filters), *(tape.grad(b) for b in biases)]
        tape.emit(Op("gconv", "wgrad"), [x, dy], gradients, scope, **attrs)
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit(Op("gconv", "dgrad"), [dy, weight.reshaped(filters)], [dx], scope, **attrs)
        return dx

    return y, backward


def padded_images(tape: Tape, x: Buf, sides: tuple[int, ...], scope: str, value: float = 0.0) -> Built:
    """Record images with `value` around them; `sides` are (top, bottom, left, right), and a negative one crops."""
    (n, c, h, w), (top, bottom, left, right) = images(x, scope), sides
    y, attrs = tape.temp(f"{scope}.padded", (n, c, h + top + bottom, w + left + right)), {"top": top, "left": left}
    tape.emit(Op("pad", "fprop"), [x], [y], scope, **attrs, value=float(value))

    def backward(dy: Buf) -> Buf:
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit(Op("pad", "dgrad"), [dy], [dx], scope, **attrs)
        return dx

    return y, backward
