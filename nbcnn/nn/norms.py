"""The normalisation layers: EvoNorm-B0 and EvoNorm-S0 (H. Liu, A. Brock, K. Simonyan, Q. V. Le, arXiv:2004.02967).

Each normalises and activates, so no activation follows. Three parameters a channel, γ = 1, β = 0, v = 1 at first, without
weight decay. Formulas: `nbcnn.ops.norms`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.nn.graphs import Layer
from nbcnn.nn.layers import Built, Param, constant, counts, images, known, unsized
from nbcnn.plan.graph import Backward, Buf, ShapeError, Tape

Emit = Callable[..., None]
"""A function (op, ins, outs, **attrs) that records a step."""
Forward = Callable[[Emit], None]

FIRST = {"gamma": 1.0, "beta": 0.0, "v": 1.0}
"""The parameters' names and first values."""


@dataclass(frozen=True)
class _EvoNorm(Layer, ABC):
    channels: int | None = unsized()
    kind: ClassVar[str] = "evonorm"
    size_of_input: ClassVar[str] = "channels"

    def params(self) -> dict[str, Param]:
        return {name: Param((known(self),), 1, decay=False, first=constant(value)) for name, value in FIRST.items()}

    def check(self, x: Buf, scope: str) -> tuple[int, int, int, int]:
        """x's shape; raises ShapeError if x is no batch of images with the layer's channels."""
        n, c, h, w = images(x, scope)
        if c != self.channels:
            raise ShapeError(f"{scope} takes {self.channels} channels, got {c} (its input is {x.shape})")
        return n, c, h, w

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        y = tape.temp(f"{scope}.y", x.shape)
        forward, backward = self.record(tape, x, y, scope)
        forward(partial(tape.emit, scope=scope))
        return y, backward

    @abstractmethod
    def record(self, tape: Tape, x: Buf, y: Buf, scope: str) -> tuple[Forward, Backward]:
        """Returns (forward, backward): forward(emit) records y = norm(x) by `emit`, which may make another op of it. Raises ShapeError."""

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

    groups: int = 32
    eps: float = 1e-5

    def __post_init__(self) -> None:
        counts(self, "groups", "channels")
        if (self.channels or self.groups) % self.groups or not 0 < self.eps < math.inf:
            raise UsageError(f"EvoNormS0 needs groups that divide its {self.channels} channels and eps > 0, got {self.groups} and {self.eps}")

    def record(self, tape: Tape, x: Buf, y: Buf, scope: str) -> tuple[Forward, Backward]:
        n, *_ = self.check(x, scope)
        gamma, beta, v = self.weights(tape, scope)
        shift, std = (tape.temp(f"{scope}.{name}", (n * self.groups,)) for name in ("shift", "std"))

        def forward(emit: Emit) -> None:
            emit("evonorm_s0_fprop", [x, gamma, beta, v], [y, shift, std], groups=self.groups, eps=self.eps)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            grads = [tape.grad(buf) for buf in (gamma, beta, v)]
            tape.emit("evonorm_s0_grads", [dy, x, gamma, v, shift, std], [dx, *grads], scope, groups=self.groups)
            return dx

        return forward, backward


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

    eps: float = 1e-3
    momentum: float = 0.1

    def __post_init__(self) -> None:
        counts(self, "channels")
        if not 0 < self.eps < math.inf or not 0 <= self.momentum <= 1:
            raise UsageError(f"EvoNormB0 needs eps > 0 and a momentum in [0, 1], got {self.eps} and {self.momentum}")

    def state(self) -> dict[str, Param]:
        return {"running": Param((known(self),), 1, first=constant(1.0))}

    def record(self, tape: Tape, x: Buf, y: Buf, scope: str) -> tuple[Forward, Backward]:
        n, c, *_ = self.check(x, scope)
        gamma, beta, v = self.weights(tape, scope)
        running = tape.state(scope, "running", (c,))
        ins = [x, gamma, beta, v, running]
        if not tape.training:
            return (lambda emit: emit("evonorm_b0_infer", ins, [y], eps=self.eps)), _no_backward
        shift, std = (tape.temp(f"{scope}.{name}", (n * c,)) for name in ("shift", "std"))
        batch_shift, batch_std = (tape.temp(f"{scope}.{name}", (c,)) for name in ("batch_shift", "batch_std"))
        attrs, sync = {"eps": self.eps, "momentum": self.momentum}, tape.sync

        def forward(emit: Emit) -> None:
            if sync is None:
                emit("evonorm_b0_fprop", ins, [y, shift, std, batch_shift, batch_std, running], **attrs)
                return
            parts, which = tape.temp(f"{scope}.parts", (4 * sync.ranks * c,)), {"rank": sync.rank, "images": sync.images}
            emit("evonorm_b0_statistics", [x], [shift, std, parts], eps=self.eps, ranks=sync.ranks, **which)
            emit("all_reduce", [parts], [parts], weight=1.0)
            emit("evonorm_b0_together", [*ins, std, parts], [y, batch_shift, batch_std, running], ranks=sync.ranks, **attrs)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            grads = [tape.grad(buf) for buf in (gamma, beta, v)]
            kept = [dy, x, gamma, v, shift, std, batch_shift, batch_std]
            if sync is None:
                tape.emit("evonorm_b0_grads", kept, [dx, *grads], scope)
                return dx
            own, batch = tape.temp(f"{scope}.own", (n * c,)), tape.temp(f"{scope}.batch", (c,))
            tape.emit("evonorm_b0_sums", [dy, x, gamma, v, std, batch_std], [own, batch, *grads], scope)
            tape.emit("all_reduce", [batch], [batch], scope, weight=sync.weight)
            tape.emit("evonorm_b0_dgrad", [*kept, own, batch], [dx], scope)
            return dx

        return forward, backward


def _no_backward(dy: Buf) -> Buf:
    raise ValueError("this EvoNormB0 is recorded for inference: it has no backward")
