"""Activations: the table of element-wise functions (functions.py). From an entry follow its reference, kernels, cases and epilogue.

    NAME_fprop        x -> y                              its parameters
    NAME_dgrad        dy, x or y -> dx                    its parameters

Tensors have any shape. The layer of the same name stands in nbcnn/nn/activations.py (Root: whitening.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.activations.functions import FUNCTIONS
from nbcnn.ops.kernel.call import Call, Impl, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import element_part, same, supports
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import MAPS, Map, Op, Pool, undone

ACTIVATIONS = {each.name: each for each in FUNCTIONS}
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
        Op(each.name, "fprop"): Impl(each.bind_fprop, supports=supports, traffic=streamed, pitched=element_part),
        Op(each.name, "dgrad"): Impl(each.bind_dgrad, supports=supports, traffic=streamed, pitched=element_part),
    }


def host_of(each: Activation) -> dict[Op, Impl]:
    """Both passes of an activation in NumPy."""
    return {Op(each.name, "fprop"): host(each.fprop), Op(each.name, "dgrad"): host(each.dgrad)}


HOST = {op: impl for each in ACTIVATIONS.values() for op, impl in host_of(each).items()}
OPS = {op: impl for each in ACTIVATIONS.values() for op, impl in ops_of(each).items()}


def applied(after: Any) -> tuple[bool, Any]:
    """Whether an epilogue that a kernel's factory was given is a device function, and that function; words such as "mask" and None are none."""
    return (False, same) if after is None or isinstance(after, str) else (True, after)


def activated_convs(name: str) -> tuple[Op, ...]:
    """conv_NAME_fprop and upconv_NAME_fprop."""
    return tuple(Op(kind, "fprop", after=(Map(name),)) for kind in ("conv", "upconv"))


def activated_norms(name: str) -> tuple[Op, ...]:
    """batchnorm_NAME_fprop, _infer, _apply and _grads."""
    after = (Map(name),)
    return *(Op("batchnorm", path, after=after) for path in ("fprop", "infer", "apply")), Op("batchnorm", "grads", before=undone(after))


def activated_ops(name: str) -> tuple[Op, ...]:
    """The fused ops whose kernels take any activation as a device function: `activated_convs` and `activated_norms`."""
    return activated_convs(name) + activated_norms(name)


def with_activations(ops: Mapping[Op, Impl], names: Iterable[str] = ACTIVATIONS) -> dict[Op, Impl]:
    """`ops`, and where they have one of `activated_ops` with a ReLU the same with the other activations."""
    relus = [ops.get(op) for op in activated_ops("relu")]
    made = {op: relu for name in names for op, relu in zip(activated_ops(name), relus, strict=True) if relu is not None}
    return {**ops, **made}


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
