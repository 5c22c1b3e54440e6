"""This module defines the element-wise activations, and Softmax. `nbcnn.ops.activations.table` has their functions and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.arguments import finite
from nbcnn.nn.graphs import Layer
from nbcnn.nn.layer import Built, NoParams, Param, constant, counts, later
from nbcnn.plan.graph import Buf, ShapeError, Tape
from nbcnn.plan.op import Op


@dataclass(frozen=True)
class Elsewhere:
    """What other programs call a function; "" where they have none of exactly this kind.

    onnx, torch  the op of ONNX, and the class in torch.nn.
    fields       by the field of the layer, what both call it: (attribute of the op, argument of the class).
    """

    onnx: str = ""
    torch: str = ""
    fields: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Elementwise(NoParams):
    """y = f(x) for every element of a tensor of any shape. A layer names its op in `kind`; its fields are f's parameters.

    `reads`: what f′ reads, the input ("x") or the output ("y"), as the op's entry in the table of activations says. `elsewhere`: its names in other
    programs, from which the nodes of ONNX files and the modules of PyTorch are made.
    """

    kind: ClassVar[str]
    reads: ClassVar[str] = "x"
    elsewhere: ClassVar[Elsewhere] = Elsewhere()

    def attrs(self) -> dict[str, Any]:
        """The op's parameters: the fields, by their names."""
        return asdict(self)

    @property
    def function(self) -> str:
        """The name of the activation in the table."""
        return self.kind

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        attrs = self.attrs()
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit(Op(self.function, "fprop"), [x], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op(self.function, "dgrad"), [dy, y if self.reads == "y" else x], [dx], scope, **attrs)
            return dx

        return y, backward


@dataclass(frozen=True)
class ReLU(Elementwise):
    """max(x, 0), element by element.

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.ReLU()], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8))
        array([[0., 1.]], dtype=float32)
    """

    kind: ClassVar[str] = "relu"
    reads: ClassVar[str] = "y"
    elsewhere: ClassVar[Elsewhere] = Elsewhere("Relu", "ReLU")


@dataclass(frozen=True)
class LeakyReLU(Elementwise):
    """x where x > 0, else negative_slope·x.

    Shapes: any shape, float32, stays as it is. Raises UsageError unless `negative_slope` is positive and finite.

    Example:
        >>> import nbcnn
        >>> nbcnn.LeakyReLU(0.1)
        LeakyReLU(negative_slope=0.1)
    """

    negative_slope: float = 0.01
    kind: ClassVar[str] = "leaky_relu"
    reads: ClassVar[str] = "y"
    elsewhere: ClassVar[Elsewhere] = Elsewhere("LeakyRelu", "LeakyReLU", {"negative_slope": ("alpha", "negative_slope")})

    def __post_init__(self) -> None:
        if not 0 < self.negative_slope < math.inf:
            raise UsageError(f"LeakyReLU needs a positive, finite negative_slope, got {self.negative_slope}; ReLU is the layer for 0")

    def attrs(self) -> dict[str, Any]:
        return {"slope": self.negative_slope}


@dataclass(frozen=True)
class Sigmoid(Elementwise):
    """1 / (1 + exp(−x)), element by element.

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Sigmoid()], mode="cpu").build((1,)).predict(np.zeros((1, 1), np.uint8))
        array([[0.5]], dtype=float32)
    """

    kind: ClassVar[str] = "sigmoid"
    reads: ClassVar[str] = "y"
    elsewhere: ClassVar[Elsewhere] = Elsewhere("Sigmoid", "Sigmoid")


@dataclass(frozen=True)
class Swish(Elementwise):
    """x·sigmoid(x) (Ramachandran, Zoph and Le, 2017; also called SiLU).

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Swish()], mode="cpu").build((1,)).predict(np.zeros((1, 1), np.uint8))
        array([[0.]], dtype=float32)
    """

    kind: ClassVar[str] = "swish"
    elsewhere: ClassVar[Elsewhere] = Elsewhere(torch="SiLU")


@dataclass(frozen=True)
class Softmax(NoParams):
    """exp(x)/Σ exp(x) along the channels of every pixel, or the features of every vector (J. S. Bridle, 1990).

    Shapes: (N, F), (N, C, L) or (N, C, H, W), float32, stays as it is. The loss "cross_entropy" has a softmax of its own: of a network that ends in
    this layer it takes what comes before it, so that outputs are probabilities and training is that of logits. Raises ShapeError for another number
    of axes, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Softmax()], mode="cpu").build((2,)).predict(np.zeros((1, 2), np.uint8))
        array([[0.5, 0.5]], dtype=float32)
    """

    kind: ClassVar[str] = "softmax"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        return _along_channels(self.kind, tape, x, scope)


@dataclass(frozen=True)
class LogSoftmax(NoParams):
    """x − log Σ exp(x) along the channels of every pixel, or the features of every vector: the logarithm of Softmax, finite for all finite x.

    Shapes: (N, F), (N, C, L) or (N, C, H, W), float32, stays as it is. The loss "cross_entropy" makes the same of it as of what comes before it.
    Raises ShapeError for another number of axes, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.LogSoftmax()], mode="cpu").build((2,)).predict(np.zeros((1, 2), np.uint8)).round(3)
        array([[-0.693, -0.693]], dtype=float32)
    """

    kind: ClassVar[str] = "log_softmax"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        return _along_channels(self.kind, tape, x, scope)


def _along_channels(kind: str, tape: Tape, x: Buf, scope: str) -> Built:
    """Record the op `kind` of `x`, and a backward that reads what it made."""
    if len(x.shape) not in (2, 3, 4):
        raise ShapeError(f"{scope} takes vectors, series or images, got {x.shape}")
    y = tape.temp(f"{scope}.y", x.shape)
    tape.emit(Op(kind, "fprop"), [x], [y], scope)

    def backward(dy: Buf) -> Buf:
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit(Op(kind, "dgrad"), [dy, y], [dx], scope)
        return dx

    return y, backward


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
    elsewhere: ClassVar[Elsewhere] = Elsewhere("Tanh", "Tanh")


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
    elsewhere: ClassVar[Elsewhere] = Elsewhere("Elu", "ELU", {"alpha": ("alpha", "alpha")})

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
    elsewhere: ClassVar[Elsewhere] = Elsewhere(torch="ReLU6")


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
    elsewhere: ClassVar[Elsewhere] = Elsewhere("HardSwish", "Hardswish")


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
        if not finite(self.init):
            raise UsageError(f"PReLU needs a finite init, got {self.init}")

    def params(self) -> dict[str, Param]:
        return {"weight": Param((self.num_parameters,), 1, decay=False, first=constant(self.init))}

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if self.num_parameters not in (1, x.shape[1]):
            raise ShapeError(f"{scope} has {self.num_parameters} slopes, and its input {x.shape} has {x.shape[1]} channels: give 1 or as many")
        slopes = tape.param(scope, "weight", (self.num_parameters,))
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit(Op("prelu", "fprop"), [x, slopes], [y], scope)

        def backward(dy: Buf) -> Buf:
            tape.emit(Op("prelu", "wgrad"), [dy, x], [tape.grad(slopes)], scope)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("prelu", "dgrad"), [dy, x, slopes], [dx], scope)
            return dx

        return y, backward


@dataclass(frozen=True)
class GELU(Elementwise):
    """x·Φ(x) (Hendrycks and Gimpel, arXiv:1606.08415; as torch.nn.GELU).

    Shapes: any shape, float32, stays as it is.

    approximate  "none" is the exact function, "tanh" the form x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2. Raises UsageError for another word.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.GELU()], mode="cpu").build((1,)).predict(np.zeros((1, 1), np.uint8))
        array([[0.]], dtype=float32)
    """

    approximate: str = later("none")
    kind: ClassVar[str] = "gelu"
    elsewhere: ClassVar[Elsewhere] = Elsewhere("Gelu", "GELU", {"approximate": ("approximate", "approximate")})

    def __post_init__(self) -> None:
        if self.approximate not in ("none", "tanh"):
            raise UsageError(f'GELU takes approximate="none" or "tanh", got {quoted(self.approximate)}')

    def attrs(self) -> dict[str, Any]:
        return {}

    @property
    def function(self) -> str:
        return "gelu" if self.approximate == "none" else "gelu_tanh"


@dataclass(frozen=True)
class Abs(Elementwise):
    """|x|, element by element; its slope at 0 is 0.

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Scale(-1), nbcnn.Abs()], mode="cpu").build((1,)).predict(np.array([[255]], np.uint8))
        array([[1.]], dtype=float32)
    """

    kind: ClassVar[str] = "abs"
    elsewhere: ClassVar[Elsewhere] = Elsewhere("Abs")


@dataclass(frozen=True)
class Clip(Elementwise):
    """min(max(x, low), high), element by element (as torch.nn.Hardtanh).

    Shapes: any shape, float32, stays as it is. `low` and `high` may be None, for no limit. Raises UsageError for limits that are no finite numbers,
    and for a low limit above the high one.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Clip(0.25, 0.5)], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8))
        array([[0.25, 0.5 ]], dtype=float32)
    """

    low: float | None = -1.0
    high: float | None = 1.0
    kind: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        for each in (self.low, self.high):
            if each is not None and not finite(each):
                raise UsageError(f"Clip needs finite limits, or None, got {each}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise UsageError(f"Clip needs a low limit that is at most the high one, got {self.low} and {self.high}")

    def attrs(self) -> dict[str, Any]:
        return {"low": -math.inf if self.low is None else self.low, "high": math.inf if self.high is None else self.high}


@dataclass(frozen=True)
class Power(Elementwise):
    """x to the power of `exponent`, element by element: 0.5 is the root, −1 the reciprocal.

    Shapes: any shape, float32, stays as it is. A negative x to a power that is no whole number is NaN. Raises UsageError unless `exponent` is finite.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Scale(4), nbcnn.Power(0.5)], mode="cpu").build((1,)).predict(np.array([[255]], np.uint8))
        array([[2.]], dtype=float32)
    """

    exponent: float = 2.0
    kind: ClassVar[str] = "power"

    def __post_init__(self) -> None:
        if not finite(self.exponent):
            raise UsageError(f"Power needs a finite exponent, got {self.exponent}")


@dataclass(frozen=True)
class Scale(Elementwise):
    """factor·x + shift, element by element, with constants; a Conv2d(C, 1, groups=C) learns one of each for every channel.

    Shapes: any shape, float32, stays as it is. Raises UsageError unless `factor` and `shift` are finite.

    Example, bytes as −1 to 1:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Scale(2, -1)], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8))
        array([[-1.,  1.]], dtype=float32)
    """

    factor: float = 1.0
    shift: float = 0.0
    kind: ClassVar[str] = "scale"

    def __post_init__(self) -> None:
        if not finite(self.factor) or not finite(self.shift):
            raise UsageError(f"Scale needs a finite factor and shift, got {self.factor} and {self.shift}")


@dataclass(frozen=True)
class Softplus(Elementwise):
    """log(1 + exp(x)), element by element, a smooth ReLU (C. Dugas et al., NIPS 2000; as torch.nn.Softplus).

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Softplus()], mode="cpu").build((1,)).predict(np.zeros((1, 1), np.uint8)).round(3)
        array([[0.693]], dtype=float32)
    """

    kind: ClassVar[str] = "softplus"
    reads: ClassVar[str] = "y"
    elsewhere: ClassVar[Elsewhere] = Elsewhere("Softplus", "Softplus")


@dataclass(frozen=True)
class Threshold(Elementwise):
    """x where x > limit, else value, element by element (as torch.nn.Threshold).

    Shapes: any shape, float32, stays as it is. Raises UsageError unless `limit` and `value` are finite.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Threshold(0.5, -1)], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8))
        array([[-1.,  1.]], dtype=float32)
    """

    limit: float = 0.0
    value: float = 0.0
    kind: ClassVar[str] = "threshold"
    elsewhere: ClassVar[Elsewhere] = Elsewhere(torch="Threshold", fields={"limit": ("", "threshold"), "value": ("", "value")})

    def __post_init__(self) -> None:
        if not finite(self.limit) or not finite(self.value):
            raise UsageError(f"Threshold needs a finite limit and value, got {self.limit} and {self.value}")


ELEMENTWISE = tuple(each for each in list(vars().values()) if isinstance(each, type) and issubclass(each, Elementwise) and each is not Elementwise)
"""The element-wise activations of this module."""
