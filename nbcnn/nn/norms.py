"""The normalisation layers. Their parameters have no weight decay; formulas stand in `nbcnn.ops.norms`.

BatchNorm2d, GroupNorm, InstanceNorm2d and LayerNorm have PyTorch's names and conventions: weight = 1 and bias = 0 at first.

EvoNormB0 and EvoNormS0 (H. Liu, A. Brock, K. Simonyan, Q. V. Le, arXiv:2004.02967) normalise and activate, so no activation follows. They have
three parameters per channel, γ = 1, β = 0, v = 1 at first.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.arguments import finite
from nbcnn.nn.graphs import Layer
from nbcnn.nn.layer import Built, NoParams, Param, constant, counts, images, known, unsized
from nbcnn.plan.graph import Buf, ShapeError, Sync, Tape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

FIRST = {"gamma": 1.0, "beta": 0.0, "v": 1.0}
"""The names and first values of an EvoNorm's parameters."""
AFFINE = {"weight": 1.0, "bias": 0.0}
"""The names and first values of the parameters of the other norms."""
RUNNING = {"running_mean": 0.0, "running_var": 1.0}
"""The names and first values of the states of BatchNorm2d."""


@dataclass(frozen=True)
class _EvoNorm(Layer):
    channels: int | None = unsized()
    kind: ClassVar[str] = "evonorm"
    orders: ClassVar[tuple[str, ...]] = ("channels",)
    size_of_input: ClassVar[str] = "channels"

    def params(self) -> dict[str, Param]:
        return {name: Param((known(self),), 1, decay=False, first=constant(value)) for name, value in FIRST.items()}

    def check(self, x: Buf, scope: str) -> tuple[int, int, int, int]:
        """x's shape; raises ShapeError if x is no batch of images with the layer's channels."""
        n, c, h, w = images(x, scope)
        if c != self.channels:
            raise ShapeError(f"{scope} takes {self.channels} channels, got {c} (its input is {x.shape})")
        return n, c, h, w

    def weights(self, tape: Tape, scope: str) -> list[Buf]:
        """The parameters γ, β, v as Bufs."""
        return [tape.param(scope, name, (known(self),)) for name in FIRST]


@dataclass(frozen=True)
class EvoNormS0(_EvoNorm):
    """γ·x·σ(v·x)/s + β, s the deviation of a group of channels of one image; the same in training and inference (arXiv:2004.02967).

    Shapes: (N, C, H, W), float32, stays as it is. Parameters: gamma, beta and v, each (C,).

    `groups` divides `channels`, which None takes from the input; `eps` > 0 is added to the variance. Raises UsageError otherwise, and ShapeError
    for what is no image, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.EvoNormS0(groups=2)], mode="cpu").build((4, 8, 8)).predict(np.zeros((5, 4, 8, 8), np.uint8)).shape
        (5, 4, 8, 8)
    """

    _: KW_ONLY
    groups: int = 32
    eps: float = 1e-5

    def __post_init__(self) -> None:
        counts(self, "groups", "channels")
        if (self.channels or self.groups) % self.groups or not (self.eps > 0 and finite(self.eps)):
            raise UsageError(f"EvoNormS0 needs groups that divide its {self.channels} channels and eps > 0, got {self.groups} and {self.eps}")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, *_ = self.check(x, scope)
        y = tape.temp(f"{scope}.y", x.shape)
        gamma, beta, v = self.weights(tape, scope)
        shift, std = (tape.temp(f"{scope}.{name}", (n * self.groups,)) for name in ("shift", "std"))
        tape.emit(Op("evonorm_s0", "fprop"), [x, gamma, beta, v], [y, shift, std], scope, groups=self.groups, eps=self.eps)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            grads = [tape.grad(buf) for buf in (gamma, beta, v)]
            tape.emit(Op("evonorm_s0", "grads"), [dy, x, gamma, v, shift, std], [dx, *grads], scope, groups=self.groups)
            return dx

        return y, backward


@dataclass(frozen=True)
class EvoNormB0(_EvoNorm):
    """γ·x/max(s_B, v·x + s_I) + β; s_I the deviation of a channel of one image, s_B that of the channel over the batch (arXiv:2004.02967).

    Shapes: (N, C, H, W), float32, stays as it is. Parameters: gamma, beta and v, each (C,); state: running (C,). `channels` None is the input's.

    In inference s_B is √(running + eps), where each training step moves the state `running` by `momentum` towards the batch's
    unbiased variance. `eps` is added to every variance. Of several ranks that train together each takes its own part of the batch
    for the batch, unless the tape says `sync`. Raises UsageError unless eps > 0 and 0 ≤ momentum ≤ 1, and ShapeError for what is no image, when the
    network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.EvoNormB0()], mode="cpu").build((4, 8, 8)).predict(np.zeros((5, 4, 8, 8), np.uint8)).shape
        (5, 4, 8, 8)
    """

    _: KW_ONLY
    eps: float = 1e-3
    momentum: float = 0.1

    def __post_init__(self) -> None:
        counts(self, "channels")
        if not (self.eps > 0 and finite(self.eps)) or not 0 <= self.momentum <= 1:
            raise UsageError(f"EvoNormB0 needs eps > 0 and a momentum in [0, 1], got {self.eps} and {self.momentum}")

    def state(self) -> dict[str, Param]:
        return {"running": Param((known(self),), 1, first=constant(1.0))}

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, *_ = self.check(x, scope)
        several_values(tape, x, scope)
        y = tape.temp(f"{scope}.y", x.shape)
        gamma, beta, v = self.weights(tape, scope)
        running = tape.state(scope, "running", (c,))
        ins = [x, gamma, beta, v, running]
        if not tape.training:
            tape.emit(Op("evonorm_b0", "infer"), ins, [y], scope, eps=self.eps)
            return y, no_backward
        shift, std = (tape.temp(f"{scope}.{name}", (n * c,)) for name in ("shift", "std"))
        batch_shift, batch_std = (tape.temp(f"{scope}.{name}", (c,)) for name in ("batch_shift", "batch_std"))
        attrs, sync = {"eps": self.eps, "momentum": self.momentum}, tape.sync

        if sync is None:
            tape.emit(Op("evonorm_b0", "fprop"), ins, [y, shift, std, batch_shift, batch_std, running], scope, **attrs)
        else:
            parts, which = tape.temp(f"{scope}.parts", (4 * sync.ranks * c,)), {"rank": sync.rank, "images": sync.images}
            tape.emit(Op("evonorm_b0", "statistics"), [x], [shift, std, parts], scope, eps=self.eps, ranks=sync.ranks, **which)
            tape.emit(Op("all_reduce"), [parts], [parts], scope, weight=1.0)
            tape.emit(Op("evonorm_b0", "together"), [*ins, std, parts], [y, batch_shift, batch_std, running], scope, ranks=sync.ranks, **attrs)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            grads = [tape.grad(buf) for buf in (gamma, beta, v)]
            kept = [dy, x, gamma, v, shift, std, batch_shift, batch_std]
            if sync is None:
                tape.emit(Op("evonorm_b0", "grads"), kept, [dx, *grads], scope)
                return dx
            own, batch = tape.temp(f"{scope}.own", (n * c,)), tape.temp(f"{scope}.batch", (c,))
            tape.emit(Op("evonorm_b0", "sums"), [dy, x, gamma, v, std, batch_std], [own, batch, *grads], scope)
            tape.emit(Op("all_reduce"), [batch], [batch], scope, weight=sync.weight)
            tape.emit(Op("evonorm_b0", "dgrad"), [*kept, own, batch], [dx], scope)
            return dx

        return y, backward


def several_values(tape: Tape, x: Buf, scope: str) -> None:
    """Raise ShapeError where statistics of a training step would be of one value per channel: a variance of it is 0, and its gradient nothing."""
    n, _, h, w = x.shape
    if tape.training and tape.sync is None and n * h * w == 1:
        raise ShapeError(
            f"{scope} normalises over the examples of a batch, and here a batch is one example of one pixel (its input is {x.shape}): "
            "choose a batch size that leaves no single example over, or another norm"
        )


def no_backward(dy: Buf) -> Buf:
    """The backward of a norm that is recorded for inference."""
    raise ValueError("this norm is recorded for inference: it has no backward")


class _Norm(NoParams):
    """A norm of images whose parameters, where it has any, are a weight and a bias of every channel."""

    channels: int | None
    size_of_input: ClassVar[str] = "channels"

    def params(self) -> dict[str, Param]:
        return {name: Param((known(self),), 1, decay=False, first=constant(value)) for name, value in AFFINE.items()}

    def check(self, x: Buf, scope: str) -> tuple[int, int, int, int]:
        """x's shape; raises ShapeError if x is no batch of images with the layer's channels."""
        n, c, h, w = images(x, scope)
        if c != self.channels:
            raise ShapeError(f"{scope} takes {self.channels} channels, got {c} (its input is {x.shape})")
        return n, c, h, w

    def affine_of(self, tape: Tape, scope: str) -> list[Buf]:
        """The parameters weight and bias as Bufs; none if the layer has none."""
        return [tape.param(scope, name, param.shape) for name, param in self.params().items()]


def _positive_eps(layer: Any) -> None:
    if not (layer.eps > 0 and finite(layer.eps)):
        raise UsageError(f"{type(layer).__name__} needs a positive, finite eps, got {layer.eps}")


@dataclass(frozen=True)
class BatchNorm2d(_Norm):
    """weight·(x − μ)/√(σ² + eps) + bias, μ and σ² of a channel over the batch (S. Ioffe, C. Szegedy, arXiv:1502.03167).

    Shapes: (N, C, H, W), float32, stays as it is. Parameters: weight and bias, each (C,); state: running_mean and running_var, each (C,).
    `channels` None is the input's. The conventions are those of torch.nn.BatchNorm2d: each training step moves the running statistics by
    `momentum` towards the batch's, the variance unbiased; evaluation and prediction normalise with them, and fold that into a convolution right
    before the layer. `eps` is added to the variance. A ReLU, ReLU6, HardSwish, Swish or GELU right behind the layer is computed with it, and so
    is the sum of two values of which this layer makes one and which a ReLU follows; in training a convolution right before the layer makes the
    statistics of the batch. Of several ranks that train together each takes its own part of the batch for the batch, unless statistics are
    shared (`--sync-stats`).

    Raises UsageError unless eps > 0 and 0 ≤ momentum ≤ 1, and ShapeError for what is no image, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> body = [nbcnn.Conv2d(8, 3, padding=1, bias=False), nbcnn.BatchNorm2d(), nbcnn.ReLU()]
        >>> nbcnn.Model(body, mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 8, 8, 8)
    """

    _: KW_ONLY
    eps: float = 1e-5
    momentum: float = 0.1
    channels: int | None = unsized()
    kind: ClassVar[str] = "batchnorm"
    orders: ClassVar[tuple[str, ...]] = ("channels eps momentum",)

    def __post_init__(self) -> None:
        counts(self, "channels")
        _positive_eps(self)
        if not 0 <= self.momentum <= 1:
            raise UsageError(f"BatchNorm2d needs a momentum in [0, 1], got {self.momentum}")

    def state(self) -> dict[str, Param]:
        return {name: Param((known(self),), 1, first=constant(value)) for name, value in RUNNING.items()}

    def running(self, tape: Tape, scope: str) -> list[Buf]:
        """The states running_mean and running_var as Bufs."""
        return [tape.state(scope, name, (known(self),)) for name in RUNNING]

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if tape.training and tape.sync is not None:
            return self._together(tape, tape.sync, x, scope)
        self.check(x, scope)
        several_values(tape, x, scope)
        affine, running = self.affine_of(tape, scope), self.running(tape, scope)
        y = tape.temp(f"{scope}.y", x.shape)
        if not tape.training:
            tape.emit(Op("batchnorm", "infer"), [x, *affine, *running], [y], scope, eps=self.eps)
            return y, no_backward
        kept = self.kept(tape, scope)
        tape.emit(Op("batchnorm", "fprop"), [x, *affine, *running], [y, *kept, *running], scope, eps=self.eps, momentum=self.momentum)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("batchnorm", "grads"), [dy, x, *affine, *kept], [dx, *map(tape.grad, affine)], scope)
            return dx

        return y, backward

    def kept(self, tape: Tape, scope: str) -> list[Buf]:
        """What the gradients want of a batch's statistics: the mean and 1/√(σ² + eps) of every channel."""
        return [tape.temp(f"{scope}.{name}", (known(self),)) for name in ("mean", "rstd")]

    def _together(self, tape: Tape, sync: Sync, x: Buf, scope: str) -> Built:
        """Record the norm with the statistics of all ranks."""
        _, c, *_ = self.check(x, scope)
        affine, running = self.affine_of(tape, scope), self.running(tape, scope)
        y, parts = tape.temp(f"{scope}.y", x.shape), tape.temp(f"{scope}.parts", (3 * sync.ranks * c,))
        kept = self.kept(tape, scope)
        tape.emit(Op("batchnorm", "statistics"), [x], [parts], scope, ranks=sync.ranks, rank=sync.rank, images=sync.images)
        tape.emit(Op("all_reduce"), [parts], [parts], scope, weight=1.0)
        attrs = {"eps": self.eps, "momentum": self.momentum, "ranks": sync.ranks}
        tape.emit(Op("batchnorm", "together"), [x, *affine, *running, parts], [y, *kept, *running], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dx, sums = tape.temp(f"{scope}.dx", x.shape), tape.temp(f"{scope}.sums", (2 * c,))
            tape.emit(Op("batchnorm", "sums"), [dy, x, *affine, *kept], [sums, *map(tape.grad, affine)], scope)
            tape.emit(Op("all_reduce"), [sums], [sums], scope, weight=sync.weight)
            tape.emit(Op("batchnorm", "dgrad"), [dy, x, *affine, *kept, sums], [dx], scope)
            return dx

        return y, backward


class _GroupNorm(_Norm):
    """What GroupNorm and InstanceNorm2d share."""

    eps: float

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, *_ = self.check(x, scope)
        affine, attrs = self.affine_of(tape, scope), {"groups": self.groups_of(c)}
        y = tape.temp(f"{scope}.y", x.shape)
        kept = [tape.temp(f"{scope}.{name}", (n * attrs["groups"],)) for name in ("mean", "rstd")]
        tape.emit(Op("groupnorm", "fprop"), [x, *affine], [y, *kept], scope, eps=self.eps, **attrs)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("groupnorm", "grads"), [dy, x, *affine[:1], *kept], [dx, *map(tape.grad, affine)], scope, **attrs)
            return dx

        return y, backward

    def groups_of(self, channels: int) -> int:
        """Into how many groups an image with so many channels falls."""
        return channels


@dataclass(frozen=True)
class GroupNorm(_GroupNorm):
    """weight·(x − μ)/√(σ² + eps) + bias, μ and σ² of a group of channels of one image (Y. Wu, K. He, arXiv:1803.08494).

    Shapes: (N, C, H, W), float32, stays as it is. Parameters: weight and bias, each (C,). The layer is the same in training and inference.

    `num_groups` divides `channels`, which None takes from the input; `eps` > 0 is added to the variance. Raises UsageError otherwise, and
    ShapeError for what is no image, or has channels that do not fall into the groups, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.GroupNorm(2)], mode="cpu").build((4, 8, 8)).predict(np.zeros((5, 4, 8, 8), np.uint8)).shape
        (5, 4, 8, 8)
    """

    num_groups: int
    _: KW_ONLY
    eps: float = 1e-5
    channels: int | None = unsized()
    kind: ClassVar[str] = "groupnorm"
    orders: ClassVar[tuple[str, ...]] = ("num_groups channels eps",)

    def __post_init__(self) -> None:
        counts(self, "num_groups", "channels")
        _positive_eps(self)
        if (self.channels or self.num_groups) % self.num_groups:
            raise UsageError(f"GroupNorm needs groups that divide its {self.channels} channels, got {self.num_groups}")

    def groups_of(self, channels: int) -> int:
        return self.num_groups


@dataclass(frozen=True)
class InstanceNorm2d(_GroupNorm):
    """(x − μ)/√(σ² + eps), μ and σ² of a channel of one image (D. Ulyanov, A. Vedaldi, V. Lempitsky, arXiv:1607.08022).

    Shapes: (N, C, H, W), float32, stays as it is. Parameters, if `affine`: weight and bias, each (C,), by which the result is multiplied and to
    which it is added. `channels` None is the input's; `eps` > 0 is added to the variance. The layer is the same in training and inference.

    Raises UsageError unless eps > 0, and ShapeError for what is no image, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.InstanceNorm2d()], mode="cpu").build((4, 8, 8)).predict(np.zeros((5, 4, 8, 8), np.uint8)).shape
        (5, 4, 8, 8)
    """

    _: KW_ONLY
    eps: float = 1e-5
    affine: bool = False
    channels: int | None = unsized()
    kind: ClassVar[str] = "instancenorm"
    orders: ClassVar[tuple[str, ...]] = ("channels eps",)

    def __post_init__(self) -> None:
        counts(self, "channels")
        _positive_eps(self)

    def params(self) -> dict[str, Param]:
        return super().params() if self.affine else {}


@dataclass(frozen=True)
class LayerNorm(NoParams):
    """weight·(x − μ)/√(σ² + eps) + bias, μ and σ² of all elements of one example (J. L. Ba, J. R. Kiros, G. E. Hinton, arXiv:1607.06450).

    Shapes: any shape (N, …), float32, stays as it is. Parameters: weight and bias, each of the shape of one example. The layer is the same in
    training and inference. `normalized_shape` is the shape of one example, as torch.nn.LayerNorm takes it; None is the input's. `eps` > 0 is
    added to the variance.

    Raises UsageError for another eps or sizes below 1, and ShapeError for examples of another shape, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.LayerNorm()], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8)).round(3)
        array([[-1.,  1.]], dtype=float32)
    """

    _: KW_ONLY
    eps: float = 1e-5
    normalized_shape: tuple[int, ...] | None = unsized()
    kind: ClassVar[str] = "layernorm"
    orders: ClassVar[tuple[str, ...]] = ("normalized_shape eps",)

    def __post_init__(self) -> None:
        _positive_eps(self)
        shape = self.normalized_shape
        if shape is not None and (not shape or any(not isinstance(each, int) or each < 1 for each in shape)):
            raise UsageError(f"LayerNorm needs the shape of one example as normalized_shape, got {quoted(shape)}")

    def sized(self, shape: tuple[int, ...]) -> LayerNorm:
        """The layer with the shape of one example filled in, if it was left out."""
        return self if self.normalized_shape else replace(self, normalized_shape=shape)

    def params(self) -> dict[str, Param]:
        if self.normalized_shape is None:
            raise UsageError("LayerNorm does not know its normalized_shape yet: build the network for a shape first, or give it")
        return {name: Param(tuple(self.normalized_shape), 1, decay=False, first=constant(value)) for name, value in AFFINE.items()}

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if x.shape[1:] != self.normalized_shape:
            raise ShapeError(f"{scope} takes examples of {self.normalized_shape}, got {x.shape[1:]} (its input is {x.shape})")
        size = (numel(x.shape[1:]),)
        weight, bias = (tape.param(scope, name, param.shape) for name, param in self.params().items())
        y = tape.temp(f"{scope}.y", x.shape)
        kept = [tape.temp(f"{scope}.{name}", x.shape[:1]) for name in ("mean", "rstd")]
        # Flat, because the ops take them so: what has two axes or more is an activation to a row that stores these rounded.
        tape.emit(Op("layernorm", "fprop"), [x, weight.reshaped(size), bias.reshaped(size)], [y, *kept], scope, eps=self.eps)

        def backward(dy: Buf) -> Buf:
            dx, grads = tape.temp(f"{scope}.dx", x.shape), [tape.grad(param).reshaped(size) for param in (weight, bias)]
            tape.emit(Op("layernorm", "grads"), [dy, x, weight.reshaped(size), *kept], [dx, *grads], scope)
            return dx

        return y, backward
