"""This module says what a loss reads of a network that ends in the loss's own activation: what comes before that.

The cross-entropy has a softmax of its own, and the binary one a sigmoid. Networks of other programs often end in one, as every classifier of Keras
does: their outputs are probabilities, and a second softmax would train something else (logits of 2, −1 and 0.5 would lose 0.70 instead of 0.24).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.nn.activations import Sigmoid, Softmax
from nbcnn.nn.joins import Losses
from nbcnn.nn.losses import BCEWithLogits, SoftmaxCrossEntropy
from nbcnn.plan.graph import Node, Wired

ENDS: dict[type, type] = {SoftmaxCrossEntropy: Softmax, BCEWithLogits: Sigmoid}
"""By the class of a loss, the activation that it has itself."""


def ended(layers: Wired) -> list[bool]:
    """For each output that the loss of `layers`, its last node, reads: whether it comes out of the loss's own activation."""
    *body, last = layers.nodes
    made: dict[int, Node] = {node.writes: node for node in body}
    parts = last.layer.parts if isinstance(last.layer, Losses) else [last.layer] * len(last.reads)
    return [at in made and type(made[at].layer) is ENDS.get(type(part)) for at, part in zip(last.reads, parts, strict=False)]


def before_ends(layers: Wired) -> Wired:
    """`layers` whose loss reads what comes before its own activation, which goes where nothing else reads it."""
    *body, last = layers.nodes
    made = {node.writes: node for node in body}
    reads = tuple(made[at].reads[0] if end else at for at, end in zip(last.reads, ended(layers), strict=True))
    gone = set(last.reads) - set(reads) - {at for node in body for at in node.reads}
    return Wired((*(node for node in body if node.writes not in gone), last._replace(reads=reads)), layers.outputs, layers.inputs)


def logits_of(loss: Any, outputs: np.ndarray) -> np.ndarray:
    """What `loss` reads, of the probabilities that its own activation made of it, float64; of 0 and 1 what is next to them in float32."""
    least = float(np.finfo(np.float32).tiny)
    made = outputs.astype(np.float64)
    if ENDS[type(loss)] is Softmax:
        return np.asarray(np.log(np.maximum(made, least)))
    made = np.clip(made, least, 1 - float(np.finfo(np.float32).epsneg) / 2)
    return np.asarray(np.log(made) - np.log1p(-made))
