"""This module defines the rules by which fused layers replace plain ones, and applies them.

`fuse` rewrites a list of named layers, `fuse_nodes` a graph of them: wherever the plain layers of a rule follow each other, one fused layer takes
their place, if the row of the op table has its ops. In a graph they follow each other where nobody else reads what is between them. A fused layer is
an ordinary layer: its parameters and its name are those of the convolution inside, its reference is the composition of its parts, and it records
them one by one where a shape does not fit (an odd image cannot be pooled in a convolution's epilogue).

    Conv2d, ReLU, MaxPool2d      ConvReLUPool    writes the pooled output and the argmax of each window, two bits
    Conv2d, EvoNormS0 or B0      ConvEvoNorm     writes the normalised output, and the convolution's own for the gradients
    Upsample2d, Conv2d, MSE      UpConvMSE       neither the doubled image nor the network's output is ever stored
    Upsample2d, Conv2d           UpConv
    DepthwiseConv1d              DepthwiseTogether   both gradients from one load of x and dy; StateSpaceConv1d likewise
    PointwiseConv1d, GLU         GatedPointwise  stores the gated series, and at the end of a Residual's body adds its input on the way
    Residual, LastStep           LastOfResidual  the layers at the body's end that treat every hour by itself compute the last hour only

Maps of results and what stands around BatchNorm2d are fused on the plan (`nbcnn.plan.merging`). The body of a Residual is fused as a list of its own.
The layers are defined in `fuse_convs.py`, `fuse_sums.py` and `fuse_series.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from nbcnn.nn.activations import ReLU
from nbcnn.nn.fuse_convs import ConvEvoNorm, ConvReLUPool, UpConv, UpConvMSE
from nbcnn.nn.fuse_series import DepthwiseTogether, GatedPointwise, LastOfResidual, ends_hourly, few_taps, gates
from nbcnn.nn.fuse_sums import FusedResidual
from nbcnn.nn.joins import Add
from nbcnn.nn.layers import Conv2d, Residual
from nbcnn.nn.losses import MSE
from nbcnn.nn.norms import EvoNormB0, EvoNormS0
from nbcnn.nn.resampling import MaxPool2d, Upsample2d
from nbcnn.nn.series_layers import GLU, DepthwiseConv1d, LastStep, PointwiseConv1d, StateSpaceConv1d
from nbcnn.plan.graph import Named, Node, Wired, chain, named
from nbcnn.plan.op import Op


def _plain(parts: Sequence[Any]) -> bool:
    """Whether the convolution has a bias and is not general, and pooling, where there is any, takes 2×2 windows."""
    conv, *_, last = parts
    pools = not isinstance(last, MaxPool2d) or (last.kernel_size, last.stride or last.kernel_size, last.padding) == (2, 2, 0)
    return conv.bias and pools and not conv.general


def _folds(parts: Sequence[Any]) -> bool:
    """Whether the image is doubled and a 3×3 convolution keeps its size: the algebra of the folded form holds for these alone."""
    up, conv, *_ = parts
    return up.scale_factor == 2 and conv.bias and not conv.general and conv.kernel_size in (3, (3, 3)) and (conv.stride, conv.padding) == (1, 1)


@dataclass(frozen=True)
class Rule:
    """`kinds` in a row become `fused`, if `fits` says that their settings allow it."""

    kinds: tuple[type, ...]
    fused: Any
    fits: Callable[[Sequence[Any]], bool]


RULES = (
    Rule((Conv2d, ReLU, MaxPool2d), ConvReLUPool, _plain),
    Rule((Upsample2d, Conv2d, MSE), UpConvMSE, _folds),
    Rule((Upsample2d, Conv2d), UpConv, _folds),
    Rule((Conv2d, EvoNormS0), ConvEvoNorm, _plain),
    Rule((Conv2d, EvoNormB0), ConvEvoNorm, _plain),
    Rule((Residual, LastStep), LastOfResidual, ends_hourly),
    Rule((FusedResidual, LastStep), LastOfResidual, ends_hourly),
    Rule((PointwiseConv1d, GLU), GatedPointwise, gates),
    Rule((DepthwiseConv1d,), DepthwiseTogether, few_taps),
    Rule((StateSpaceConv1d,), DepthwiseTogether, few_taps),
)
"""The rules, tried in this order at every position of the list."""


def _inside(name: str, layer: Any, ops: Container[Op]) -> Any:
    """A Residual with its body fused, if there is something to fuse; any other layer as it is."""
    if type(layer) is not Residual:
        return layer
    plain = named(layer.body, f"{name}.")
    body = fuse(plain, ops)
    return layer if body == plain else FusedResidual(tuple(body), layer.params())


def fuse(layers: Sequence[Named], ops: Container[Op]) -> list[Named]:
    """A list of `layers` with the fused layers whose ops are all among `ops`."""
    return [(node.name, node.layer) for node in fuse_nodes(chain(layers), ops).nodes]


def fuse_nodes(wired: Wired, ops: Container[Op]) -> Wired:
    """`wired` with the fused layers whose ops are all among `ops`.

    Each stands where the first of its parts stood; one that reads further values on its way, where the last stood, when they have been made.
    """
    nodes = [node._replace(layer=_inside(node.name, node.layer, ops)) for node in wired.nodes]
    readers = Counter(at for node in nodes for at in node.reads) + Counter(wired.outputs)
    reader, place = {at: node for node in nodes for at in node.reads}, {node.writes: at for at, node in enumerate(nodes)}
    made, gone = dict[int, Node](), set[int]()
    for at, node in enumerate(nodes):
        if node.writes in gone:
            continue
        made[at] = node
        for rule in RULES:
            parts = _following(node, rule.kinds, readers, reader, gone)
            if parts and rule.fits([part.layer for part in parts]):
                layer = rule.fused(tuple((part.name, part.layer) for part in parts))
                if not all(op in ops for op in layer.ops):
                    continue
                others = [each for before, part in pairwise(parts) for each in part.reads if each != before.writes]
                name = parts[-1].name if rule.fused is UpConvMSE else layer.scope
                del made[at]
                made[place[parts[-1].writes] if others else at] = Node(name, layer, (*node.reads, *others), parts[-1].writes)
                gone |= {part.writes for part in parts}
                break
    return replace(wired, nodes=tuple(made[at] for at in sorted(made)))


def _following(node: Node, kinds: Sequence[type], readers: Counter[int], reader: dict[int, Node], gone: set[int]) -> list[Node]:
    """`node` and the nodes that follow, if their layers are of these `kinds`: each is the only reader of what the one before it writes; else none.

    Behind the first, a sum of two values may be among them (`Add`), whose other value the fused layer reads, too; and nobody else reads two.
    """
    parts = [node]
    while type(parts[-1].layer) is kinds[len(parts) - 1]:
        if len(parts) == len(kinds):
            return parts
        after = reader.get(parts[-1].writes)
        if readers[parts[-1].writes] != 1 or after is None or after.writes in gone or len(after.reads) > (2 if type(after.layer) is Add else 1):
            break
        parts.append(after)
    return []
