"""Activations: the table of element-wise functions. From an entry (`activation.Activation`) follow its reference, kernels, cases and epilogue.

    relu_fprop        x -> y                              relu_dgrad        dy, y -> dx
    leaky_relu_fprop  x -> y   slope                      leaky_relu_dgrad  dy, y -> dx       slope
    sigmoid_fprop     x -> y                              sigmoid_dgrad     dy, y -> dx
    swish_fprop       x -> y                              swish_dgrad       dy, x -> dx
    gelu_fprop        x -> y                              gelu_dgrad        dy, x -> dx
    gelu_tanh_fprop   x -> y                              gelu_tanh_dgrad   dy, x -> dx
    tanh_fprop        x -> y                              tanh_dgrad        dy, y -> dx
    elu_fprop         x -> y   alpha                      elu_dgrad         dy, y -> dx       alpha
    relu6_fprop       x -> y                              relu6_dgrad       dy, y -> dx
    hard_swish_fprop  x -> y                              hard_swish_dgrad  dy, x -> dx
    root_fprop        x -> y   offset                     root_dgrad        dy, x -> dx       offset
    abs_fprop         x -> y                              abs_dgrad         dy, x -> dx
    clip_fprop        x -> y   low, high                  clip_dgrad        dy, x -> dx       low, high
    power_fprop       x -> y   exponent                   power_dgrad       dy, x -> dx       exponent
    scale_fprop       x -> y   factor, shift              scale_dgrad       dy, x -> dx       factor, shift
    softplus_fprop    x -> y                              softplus_dgrad    dy, y -> dx
    threshold_fprop   x -> y   limit, value               threshold_dgrad   dy, x -> dx       limit, value

Tensors have any shape. The layer of the same name stands in nbcnn/nn/activations.py (Root: whitening.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.activations.elu import ELU
from nbcnn.ops.activations.gelu import GELU
from nbcnn.ops.activations.gelu_tanh import GELU_TANH
from nbcnn.ops.activations.hard_swish import HARD_SWISH
from nbcnn.ops.activations.leaky_relu import LEAKY_RELU
from nbcnn.ops.activations.relu import RELU
from nbcnn.ops.activations.relu6 import RELU6
from nbcnn.ops.activations.root import ROOT
from nbcnn.ops.activations.sigmoid import SIGMOID
from nbcnn.ops.activations.simple import SIMPLE
from nbcnn.ops.activations.swish import SWISH
from nbcnn.ops.activations.tanh import TANH
from nbcnn.ops.kernel.call import Call, Impl, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import same, supports
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import MAPS, Op, Pool

ACTIVATIONS = {each.name: each for each in (RELU, LEAKY_RELU, SIGMOID, SWISH, GELU, GELU_TANH, TANH, ELU, RELU6, HARD_SWISH, ROOT, *SIMPLE)}
"""By name: the ops are their fprop and dgrad."""
MAPS.update(ACTIVATIONS)


def epilogue_of(op: Op) -> str:
    """The activation of each result of a fused convolution, "" if it has none; a pooling has its ReLU."""
    return "" if op.has(Pool) else op.map


def epilogue_function(call: Call) -> Any:
    """What a fused convolution does to each of its results, a device function with the parameters of the call; None if nothing."""
    name = epilogue_of(call.op)
    return ACTIVATIONS[name].of(call.attrs) if name else None


def ops_of(each: Activation) -> dict[Op, Impl]:
    """The kernels of both passes of an activation, in every GPU row."""
    return {
        Op(each.name, "fprop"): Impl(each.bind_fprop, supports=supports, traffic=streamed),
        Op(each.name, "dgrad"): Impl(each.bind_dgrad, supports=supports, traffic=streamed),
    }


HOST = {Op(each.name, path): host(reference) for each in ACTIVATIONS.values() for path, reference in (("fprop", each.fprop), ("dgrad", each.dgrad))}
OPS = {op: impl for each in ACTIVATIONS.values() for op, impl in ops_of(each).items()}


def applied(after: Any) -> tuple[bool, Any]:
    """Whether an epilogue that a kernel's factory was given is a device function, and that function; words such as "mask" and None are none."""
    return (False, same) if after is None or isinstance(after, str) else (True, after)


@jit(device=True)
def _passed_on(dy, z):
    return dy


@cache
def gradient_of(activation: str) -> Any:
    """Device function (dy, z) -> the gradient of z, of which an activation without parameters is taken; "": none is."""
    if not activation:
        return _passed_on
    function, gradient = ACTIVATIONS[activation].function, ACTIVATIONS[activation].gradient

    @jit(device=True)
    def reads_y(dy, z):
        return gradient(dy, function(z))

    return reads_y if ACTIVATIONS[activation].reads == "y" else gradient


def _gradient(each: Activation) -> Gradient:
    """The entry's derivative, as `gradcheck` takes it."""

    def operands(ins: Any, outs: Any, v: np.ndarray) -> tuple[np.ndarray, ...]:
        return v, ins[0] if each.reads == "x" else outs[0]

    return Gradient(Op(each.name, "fprop"), operands)


GRADIENTS = {Op(each.name, "dgrad"): _gradient(each) for each in ACTIVATIONS.values()}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes of every activation."""
    for shape in images:
        x, dy = normal(5, *shape), normal(6, *shape)
        label, out = label_of(shape), ((shape, "float32"),)
        for each in ACTIVATIONS.values():
            attrs, y = dict(each.parameters), np.empty(shape)
            each.fprop(x.astype(np.float64), y, **attrs)
            yield Case(Op(each.name, "fprop"), label, (x,), out, attrs, 4)
            yield Case(Op(each.name, "dgrad"), label, (dy, x if each.reads == "x" else y.astype(np.float32)), out, attrs, 4)
