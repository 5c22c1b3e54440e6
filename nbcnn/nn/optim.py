"""This module defines the optimizers: each is one launch over the flat parameter buffer; learning rates come from a table by training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nbcnn.plan.graph import Buf, Tape

SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class _Optimizer:
    """What all optimizers share: gradient clipping and L2 weight decay, off at 0. They apply in this order (`nbcnn.ops.update.sgd`):

    clip_norm     first the whole gradient is scaled down to this Euclidean norm if it is longer.
    clip_value    then every gradient element is cut to [−clip_value, clip_value].
    weight_decay  last, weight_decay · w is added to the gradient of the parameters that decay (`nbcnn.nn.layers.Param`).
    """

    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    op: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        for name in ("weight_decay", "clip_value", "clip_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def record(self, tape: Tape, weights: Buf, grads: Buf, moments: Sequence[Buf], rates: Buf, state: Buf, decayed: int) -> None:
        """Record the update of the flat buffer: the gradient's norm if it is clipped, then one step."""
        ins = [weights, grads, *moments, rates, state]
        if self.clip_norm:
            norm = tape.temp("grad_norm", (), "float64")
            tape.emit("grad_norm", [grads], [norm], "update")
            ins.append(norm)
        tape.emit(self.op, ins, [weights, *moments, state], "update", decayed=decayed, **self.attrs())

    def attrs(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay, "clip_value": self.clip_value, "clip_norm": self.clip_norm}


@dataclass(frozen=True)
class SGD(_Optimizer):
    """m = momentum·m + g; w −= lr·m (as torch.optim.SGD)."""

    momentum: float = 0.9
    op: ClassVar[str] = "sgd"
    moments: ClassVar[tuple[str, ...]] = ("m",)

    def attrs(self) -> dict[str, Any]:
        return {"momentum": self.momentum, **super().attrs()}


@dataclass(frozen=True)
class Adam(_Optimizer):
    """Adam with bias correction (Kingma and Ba, 2015; as torch.optim.Adam)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    op: ClassVar[str] = "adam"
    moments: ClassVar[tuple[str, ...]] = ("m", "v")

    def attrs(self) -> dict[str, Any]:
        return {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps, **super().attrs()}


def learning_rates(schedule: str, rate: float, steps: int, warmup: int = 0) -> np.ndarray:
    """The learning rate of every training step, (steps,) float32.

    constant  `rate` throughout.
    cosine    half a cosine from `rate` at the first step towards 0 after the last (Loshchilov and Hutter, 2017).
    warmup    the first `warmup` steps are scaled by a ramp from 1/warmup to 1 (Goyal et al., 2017).
    Raises ValueError for another name.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"no schedule {schedule!r}; one of {', '.join(SCHEDULES)}")
    at = np.arange(steps)
    ramp = np.minimum(1.0, (at + 1) / max(warmup, 1))
    shape = 1.0 if schedule == "constant" else 0.5 * (1 + np.cos(np.pi * at / max(steps, 1)))
    return (rate * ramp * shape).astype(np.float32)
