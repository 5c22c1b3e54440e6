"""The element-wise layers Tanh, ELU, ReLU6, HardSwish and PReLU; the others stand in `layers.py`, GELU in `series_layers.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.nn.graphs import Layer
from nbcnn.nn.layers import Built, Elementwise, Param, constant, counts
from nbcnn.plan.graph import Buf, ShapeError, Tape


@dataclass(frozen=True)
class Tanh(Elementwise):
    """tanh(x), element by element.

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Tanh()], mode="cpu").build((1,)).predict(np.zeros((1, 1), np.uint8))
        array([[0.]], dtype=float32)
    """

    kind: ClassVar[str] = "tanh"
    reads: ClassVar[str] = "y"


@dataclass(frozen=True)
class ELU(Elementwise):
    """x where x > 0, else alpha·(exp(x) − 1) (Clevert et al., arXiv:1511.07289).

    Shapes: any shape, float32, stays as it is. Raises UsageError unless `alpha` is positive and finite.

    Example:
        >>> import nbcnn
        >>> nbcnn.ELU(0.5)
        ELU(alpha=0.5)
    """

    alpha: float = 1.0
    kind: ClassVar[str] = "elu"
    reads: ClassVar[str] = "y"

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise UsageError(f"ELU needs a positive, finite alpha, got {self.alpha}; ReLU is the layer for 0")


@dataclass(frozen=True)
class ReLU6(Elementwise):
    """min(max(x, 0), 6), element by element (Howard et al., arXiv:1704.04861).

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.ReLU6()], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8))
        array([[0., 1.]], dtype=float32)
    """

    kind: ClassVar[str] = "relu6"
    reads: ClassVar[str] = "y"


@dataclass(frozen=True)
class HardSwish(Elementwise):
    """x·min(max(x + 3, 0), 6)/6 (Howard et al., arXiv:1905.02244).

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.HardSwish()], mode="cpu").build((1,)).predict(np.zeros((1, 1), np.uint8))
        array([[0.]], dtype=float32)
    """

    kind: ClassVar[str] = "hard_swish"


@dataclass(frozen=True)
class PReLU(Layer):
    """x where x > 0, else a·x with a learnt slope a (He et al., arXiv:1502.01852; as torch.nn.PReLU).

    Shapes: (N, C), (N, C, L) or (N, C, H, W), float32, stays as it is. Parameter: weight (num_parameters,), without weight decay.

    num_parameters  1, one slope for all, or the number of channels, one for each. init  the first value of every slope, finite.
    Raises UsageError for other numbers, and, when the network is built, ShapeError for an input of another number of channels.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.PReLU(3)], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 3, 8, 8)
    """

    num_parameters: int = 1
    init: float = 0.25
    kind: ClassVar[str] = "prelu"

    def __post_init__(self) -> None:
        counts(self, "num_parameters")
        if not math.isfinite(self.init):
            raise UsageError(f"PReLU needs a finite init, got {self.init}")

    def params(self) -> dict[str, Param]:
        return {"weight": Param((self.num_parameters,), 1, decay=False, first=constant(self.init))}

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if self.num_parameters not in (1, x.shape[1]):
            raise ShapeError(f"{scope} has {self.num_parameters} slopes, and its input {x.shape} has {x.shape[1]} channels: give 1 or as many")
        slopes = tape.param(scope, "weight", (self.num_parameters,))
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit("prelu_fprop", [x, slopes], [y], scope)

        def backward(dy: Buf) -> Buf:
            tape.emit("prelu_wgrad", [dy, x], [tape.grad(slopes)], scope)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit("prelu_dgrad", [dy, x, slopes], [dx], scope)
            return dx

        return y, backward
