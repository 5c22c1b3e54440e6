"""This module is what the importer hands to the handler of a node: the call with its module, and what makes layers of it.

A handler has PyTorch's own parameters. Mostly it names an op of ONNX (`Call.op`), whose function makes the layers (`nbcnn.onnx.node.OPS`): one table
says what becomes of an op, in a file of ONNX and in a module of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from nbcnn.onnx import elementwise, norms, products, reductions, shapes, windows  # noqa: F401  # they enter their ops
from nbcnn.onnx.errors import Unsupported as Refused
from nbcnn.onnx.node import OPS, Node
from nbcnn.onnx.values import Sheet, Val
from nbcnn.torch.weights import array

OPSET = 21
"""The version of ONNX's ops that handlers mean."""

__all__ = ["Call", "Held", "Refused", "held_of", "key_of", "numbers", "value_of", "values_of"]


@dataclass(frozen=True)
class Held:
    """A tensor of the module, its name there, and whether the module trains it."""

    name: str
    tensor: Tensor
    trained: bool


@dataclass(frozen=True)
class Call:
    """One node: the shape of what it makes, without the batch, and what handlers do with it.

    known    the tensors of the module by their identity (`key_of`).
    trains   whether the node's module is in training mode when the network is; of a function None.
    differs  a number of the call is another one in training than in evaluation.
    """

    sheet: Sheet
    node: fx.Node
    shape: tuple[int, ...]
    module: nn.Module | None
    known: dict[Any, Held]
    trains: bool | None = None
    differs: bool = False

    def held(self, name: str) -> Held | None:
        """A tensor of the node's module, None if it has none of this name. Raises Refused for one that is computed of others."""
        tensor = getattr(self.module, name)
        if tensor is None:
            return None
        if key_of(tensor) not in self.known:
            raise Refused(f"its {name} is computed of other tensors, which training would not reach")
        return self.known[key_of(tensor)]

    def op(self, name: str, *operands: Any, **attributes: Any) -> Val:
        """What the op `name` of ONNX makes of values, tensors of the module, numbers, lists of whole numbers and None (`parts`)."""
        return self.parts(1, name, *operands, **attributes)[0]

    def parts(self, outputs: int, name: str, *operands: Any, **attributes: Any) -> list[Val]:
        """What an op with several outputs makes. Raises Refused if a tensor that the module trains became a constant."""
        made = [_operand(each) for each in operands]
        while made and made[-1] is None:
            made.pop()
        names = [each.name if isinstance(each, Held) else "" for each in operands[: len(made)]]
        self.sheet.claimed.clear()
        node = Node(name, self.sheet.node, OPSET, made, names, attributes, outputs, [True] * outputs, self.sheet, True)
        results: Any = OPS[name].make(node)
        lost = [each.name for each in operands if isinstance(each, Held) and each.trained and each.name not in self.sheet.claimed]
        if lost:
            raise Refused("a tensor that is trained, and no layer has it as a weight here", lost[0])
        return list(results)

    def mode(self, given: Any) -> str:
        """When a norm or a dropout with the flag `given` acts as in training: "training", "never" or "always"."""
        if self.trains is not None:
            return "training" if self.trains else "never"
        if given and self.differs:
            raise Refused("it trains in evaluation alone")
        return "always" if given else "training" if self.differs else "never"


def key_of(tensor: Tensor) -> Any:
    """What is one and the same of a tensor wherever the module, or a trace of it, has it."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _operand(given: Any) -> Any:
    if isinstance(given, Held):
        return array(given.tensor, given.name) if given.tensor.is_floating_point() else given.tensor.detach().numpy()
    if given is None or isinstance(given, Val | np.ndarray):
        return given
    whole = isinstance(given, list | tuple) and all(isinstance(each, int) for each in given)
    return np.asarray(given, np.int64 if whole else np.float32)


def value_of(x: Any) -> Val:
    """A value. Raises Refused for tensors of the module and for numbers."""
    if not isinstance(x, Val):
        raise Refused(f"an operand is {'a tensor of the module' if isinstance(x, Held) else repr(x)}, and layers are called on values")
    return x


def values_of(given: Sequence[Any]) -> list[Val]:
    """A list of values (`value_of`)."""
    return [value_of(each) for each in given]


def numbers(given: Any, count: int) -> list[int]:
    """`count` whole numbers of one, or of as many."""
    made = [int(n) for n in given] if isinstance(given, Sequence) else [int(given)]
    return made * count if len(made) == 1 else made


def held_of(given: Any, what: str) -> Held:
    """An operand that must be a tensor of the module; `what` it is, in words, for the reason why not."""
    if not isinstance(given, Held):
        raise Refused(f"its {what} is no tensor of the module")
    return given
