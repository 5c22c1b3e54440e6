"""This module says what a loss reads of a network that ends in the loss's own activation: what comes before that.

The cross-entropy has a softmax of its own, and the binary one a sigmoid. Networks of other programs often end in one, as every classifier of Keras
does: their outputs are probabilities, and a second softmax would train something else (logits of 2, −1 and 0.5 would lose 0.70 instead of 0.24).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.nn.activations import Sigmoid, Softmax
from nbcnn.nn.joins import Losses, Reshape
from nbcnn.nn.layers import Flatten
from nbcnn.nn.losses import BCEWithLogits, SoftmaxCrossEntropy
from nbcnn.plan.graph import Buf, Node, Tape, Wired, joins

Shape = tuple[int, ...]

ENDS: dict[type, type] = {SoftmaxCrossEntropy: Softmax, BCEWithLogits: Sigmoid}
"""By the class of a loss, the activation that it has itself."""


MOVES = (Reshape, Flatten)
"""Layers that change the shape of examples alone, and may stand between the activation and the loss."""


def ended(layers: Wired, inputs: Sequence[Shape]) -> list[bool]:
    """For each output that the loss of `layers`, its last node, reads: whether it comes out of the loss's own activation. `inputs`: their shapes."""
    return [bool(each) for each in _ends(layers, inputs)]


def before_ends(layers: Wired, inputs: Sequence[Shape]) -> Wired:
    """`layers` whose loss reads what comes before its own activation, which goes where nothing else reads it; moves behind it stay."""
    *body, last = layers.nodes
    reads, left = list[int](), set[int]()
    free = last.writes + 1
    for at, end in zip(last.reads, _ends(layers, inputs), strict=True):
        for node in end:
            left.add(node.writes)
            if type(node.layer) in MOVES:
                body.append(node._replace(reads=(at,), writes=free))
                at, free = free, free + 1
            else:
                at = node.reads[0]
        reads.append(at)
    for at in sorted(left, reverse=True):
        if at not in reads and not any(at in node.reads for node in body):
            body = [node for node in body if node.writes != at]
    return Wired((*body, last._replace(reads=tuple(reads))), layers.outputs, layers.inputs)


def _ends(layers: Wired, inputs: Sequence[Shape]) -> list[list[Node]]:
    """For each output that the loss reads the loss's own activation with the moves behind it; none where the output does not come of one."""
    *body, last = layers.nodes
    made: dict[int, Node] = {node.writes: node for node in body}
    parts = last.layer.parts if isinstance(last.layer, Losses) else [last.layer] * len(last.reads)
    found = list[list[Node]]()
    for at, part in zip(last.reads, parts, strict=False):
        nodes = [made[at]] if at in made else []
        while nodes and type(nodes[0].layer) in MOVES and nodes[0].reads[0] in made:
            nodes.insert(0, made[nodes[0].reads[0]])
        ends = bool(nodes) and type(nodes[0].layer) is ENDS.get(type(part))
        found.append(nodes if ends and (len(nodes) == 1 or _same_classes(nodes, body, inputs)) else [])
    return found


def _same_classes(nodes: Sequence[Node], body: Sequence[Node], inputs: Sequence[Shape]) -> bool:
    """Whether moves leave the classes of a softmax what they are: the first axis. A sigmoid has none."""
    if type(nodes[0].layer) is not Softmax:
        return True
    tape, values = Tape(training=False), {at: Buf(f"input{at}", (1, *shape)) for at, shape in enumerate(inputs)}
    for node in body:
        read = [values[at] for at in node.reads]
        values[node.writes], _ = node.layer.build(tape, read if joins(node.layer) else read[0], node.name)
    return len({values[node.writes].shape[1] for node in nodes}) == 1


def logits_of(loss: Any, outputs: np.ndarray) -> np.ndarray:
    """What `loss` reads, of the probabilities that its own activation made of it, float64; of 0 and 1 what is next to them in float32."""
    least = float(np.finfo(np.float32).tiny)
    made = outputs.astype(np.float64)
    if ENDS[type(loss)] is Softmax:
        return np.asarray(np.log(np.maximum(made, least)))
    made = np.clip(made, least, 1 - float(np.finfo(np.float32).epsneg) / 2)
    return np.asarray(np.log(made) - np.log1p(-made))
