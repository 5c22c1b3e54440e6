"""This module defines the optimizers: each is one launch over the flat parameter buffer; learning rates come from a table by training step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.nn.arguments import Arguments
from nbcnn.plan.graph import Buf, Tape
from nbcnn.plan.op import Op

SCHEDULES = ("cosine", "constant")
"""The schedules that `learning_rates` knows by name."""
LONGEST_RUN = 1 << 26
"""Training steps of a run at most: the table of their rates has 256 MiB. At a millisecond each they take 18 hours."""
_BLOCK = 1 << 16
"""Rates that are computed at a time."""
MOST_STEPS = 1e15
"""A warm-up that is longer is so long: its rates are 0 in float32 either way, and its steps are still a whole number."""


def check_number(owner: str, name: str, value: Any, least: float = 0.0, below: float = math.inf, exclusive: bool = False) -> None:
    """Raise UsageError unless `value` is a finite number of at least `least` (more than it, if `exclusive`) and less than `below`."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not least <= value < below or (exclusive and value == least):
        bounds = f"{'more than' if exclusive else 'at least'} {least:g}" + (f" and less than {below:g}" if below < math.inf else ", and finite")
        raise UsageError(f"{owner}: {name} must be a number of {bounds}, got {quoted(value)}")


@dataclass(frozen=True)
class Schedule(Arguments):
    """The learning rate over a run: `lr` after a ramp over the first `warmup` epochs.

    lr      of the first training step after the ramp.
    warmup  epochs, which may be a fraction, over which the rate rises to its value (Goyal et al., 2017).
    Raises UsageError unless `lr` > 0 and `warmup` ≥ 0, both finite.
    """

    lr: float
    warmup: float = 0.0
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_number(type(self).__name__, "lr", self.lr, exclusive=True)
        check_number(type(self).__name__, "warmup", self.warmup)

    def rates(self, steps: int, steps_per_epoch: int) -> np.ndarray:
        """The rate of every training step of a run of so many, (steps,) float32. Raises UsageError for more than `LONGEST_RUN`."""
        if steps > LONGEST_RUN:
            raise UsageError(
                f"a run of {steps:,} training steps ({steps // max(steps_per_epoch, 1):,} epochs of {steps_per_epoch:,}) is too long: it has a table "
                f"of learning rates, of at most {LONGEST_RUN:,}; take fewer epochs, and go on with --weights, or fit again"
            )
        made = np.empty(steps, np.float32)
        warm = max(round(min(self.warmup * steps_per_epoch, MOST_STEPS)), 1)
        for first in range(0, steps, _BLOCK):
            at = np.arange(first, min(first + _BLOCK, steps))
            made[first : first + _BLOCK] = self.lr * np.minimum(1.0, (at + 1) / warm) * self.factors(at, steps, steps_per_epoch)
        return made

    def factors(self, at: np.ndarray, steps: int, steps_per_epoch: int) -> Any:
        """What `lr` is multiplied by in the training steps `at`, (steps,) int64, besides the ramp."""
        raise NotImplementedError


class Cosine(Schedule):
    """Half a cosine from `lr` at the first step towards 0 after the last (Loshchilov and Hutter, arXiv:1608.03983).

    `lr` is the first step's rate after a ramp over `warmup` epochs. Raises UsageError unless `lr` > 0 and `warmup` ≥ 0, both finite.

    Example (rates are float32, (steps,)):
        >>> import nbcnn
        >>> [round(float(rate), 3) for rate in nbcnn.Cosine(0.1).rates(steps=4, steps_per_epoch=2)]
        [0.1, 0.085, 0.05, 0.015]
    """

    name = "cosine"

    def factors(self, at: np.ndarray, steps: int, steps_per_epoch: int) -> Any:
        """Half a cosine from 1 towards 0."""
        return 0.5 * (1 + np.cos(np.pi * at / max(steps, 1)))


class Constant(Schedule):
    """`lr` throughout, after a ramp over `warmup` epochs. A plain number as an optimizer's `lr` means the same without a ramp.

    Raises UsageError unless `lr` > 0 and `warmup` ≥ 0, both finite.

    Example (rates are float32, (steps,)):
        >>> import nbcnn
        >>> nbcnn.Constant(0.5, warmup=1).rates(steps=4, steps_per_epoch=2).tolist()
        [0.25, 0.5, 0.5, 0.5]
    """

    name = "constant"

    def factors(self, at: np.ndarray, steps: int, steps_per_epoch: int) -> Any:
        """1 throughout."""
        return 1.0


@dataclass(frozen=True)
class StepDecay(Schedule):
    """`lr`, multiplied by `gamma` whenever `every` epochs are over (as torch.optim.lr_scheduler.StepLR); after a ramp over `warmup` epochs.

    every  epochs, which may be a fraction, between two decays; more than 0. gamma  more than 0 and at most 1.
    Raises UsageError unless `lr` > 0 and `warmup` ≥ 0, all finite, and for other numbers.

    Example (rates are float32, (steps,)):
        >>> import nbcnn
        >>> nbcnn.StepDecay(0.5, every=1, gamma=0.5).rates(steps=6, steps_per_epoch=2).tolist()
        [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    """

    every: float = field(default=10.0, kw_only=True)
    gamma: float = field(default=0.1, kw_only=True)
    name = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("StepDecay", "every", self.every, exclusive=True)
        check_number("StepDecay", "gamma", self.gamma, exclusive=True, below=1 + 1e-12)

    def factors(self, at: np.ndarray, steps: int, steps_per_epoch: int) -> Any:
        """gamma to the number of decays so far."""
        past = at / (self.every * steps_per_epoch)
        # A quotient that is whole but for its rounding is whole: 11 steps of 10 per epoch are every=1.1 of them.
        whole = np.round(past)
        return float(self.gamma) ** np.where(np.abs(past - whole) <= 4 * np.finfo(np.float64).eps * whole, whole, np.floor(past))


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up to `lr` and down to nearly 0 along half cosines (L. N. Smith, N. Topin, arXiv:1708.07120; as torch.optim.lr_scheduler.OneCycleLR).

    rise         part of the training steps in which the rate rises; more than 0 and less than 1.
    div          the first rate is lr/div. final_div  the last one is lr/(div·final_div). Both at least 1.
    warmup       epochs of a ramp besides; 0 leaves the rise alone.
    The momentum of the optimizer stays (PyTorch moves it the other way unless cycle_momentum=False). Raises UsageError unless `lr` > 0 and
    `warmup` ≥ 0, both finite, and for other numbers.

    Example (rates are float32, (steps,)):
        >>> import nbcnn
        >>> [round(float(rate), 3) for rate in nbcnn.OneCycle(1.0, rise=0.4, div=10).rates(steps=10, steps_per_epoch=5)]
        [0.1, 0.325, 0.775, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067, 0.0]
    """

    rise: float = field(default=0.3, kw_only=True)
    div: float = field(default=25.0, kw_only=True)
    final_div: float = field(default=1e4, kw_only=True)
    name = "one-cycle"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("OneCycle", "rise", self.rise, exclusive=True, below=1.0)
        check_number("OneCycle", "div", self.div, least=1.0)
        check_number("OneCycle", "final_div", self.final_div, least=1.0)

    def factors(self, at: np.ndarray, steps: int, steps_per_epoch: int) -> Any:
        """Half a cosine from 1/div to 1, and another one to 1/(div·final_div)."""
        top, last = self.rise * steps - 1, max(steps - 1, 1)
        up, down = np.clip(at / max(top, 1e-12), 0, 1), np.clip((at - top) / max(last - top, 1e-12), 0, 1)
        least, end = 1 / self.div, 1 / (self.div * self.final_div)
        return np.where(at <= top, 1 + (least - 1) / 2 * (1 + np.cos(np.pi * up)), end + (1 - end) / 2 * (1 + np.cos(np.pi * down)))


@dataclass(frozen=True)
class Piecewise(Schedule):
    """`lr` times a factor that is given at some epochs: constant up to the next one, or in a straight line to it.

    points  (epoch, factor) in ascending order, epochs counted from 0 and perhaps fractions, factors at least 0 and not all 0. Before the first point
            its factor counts, behind the last one the last.
    linear  straight lines between the points; False holds every factor up to the next point.
    warmup  epochs of a ramp besides.
    Raises UsageError unless `lr` > 0 and `warmup` ≥ 0, both finite, and for points that are none.

    Example, a triangle, and two drops (rates are float32, (steps,)):
        >>> import nbcnn
        >>> nbcnn.Piecewise(0.5, points=((0, 0), (1, 1), (3, 0))).rates(steps=6, steps_per_epoch=2).tolist()
        [0.0, 0.25, 0.5, 0.375, 0.25, 0.125]
        >>> nbcnn.Piecewise(0.5, points=((0, 1), (1, 0.5), (2, 0.25)), linear=False).rates(steps=6, steps_per_epoch=2).tolist()
        [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    """

    points: tuple[tuple[float, float], ...] = field(default=((0.0, 1.0),), kw_only=True)
    linear: bool = field(default=True, kw_only=True)
    name = "piecewise"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            made = tuple((float(epoch), float(factor)) for epoch, factor in self.points)
        except (TypeError, ValueError):
            raise UsageError(f"Piecewise: points must be pairs (epoch, factor), got {quoted(self.points)}") from None
        finite = all(0 <= each < math.inf for point in made for each in point)
        if not finite or not any(factor for _, factor in made) or any(a[0] >= b[0] for a, b in pairwise(made)):
            raise UsageError(
                f"Piecewise: points must have ascending epochs from 0 and finite factors of at least 0, not all 0, got {quoted(self.points)}"
            )
        object.__setattr__(self, "points", made)

    def factors(self, at: np.ndarray, steps: int, steps_per_epoch: int) -> Any:
        """The factor at the epoch of every step."""
        epochs, values = np.array(self.points).T
        if self.linear:
            return np.interp(at / steps_per_epoch, epochs, values)
        return values[np.maximum(np.searchsorted(epochs, at / steps_per_epoch, side="right") - 1, 0)]


def points_of(text: str) -> tuple[tuple[float, float], ...]:
    """The points of `Piecewise` in words, "0:0.1,2:1,10:0". Raises UsageError for what is none."""
    try:
        made = tuple((numerals.real(epoch), numerals.real(factor)) for epoch, factor in (word.split(":") for word in text.split(",")))
    except ValueError:
        raise UsageError(f"{quoted(text)} is no list of EPOCH:FACTOR, such as 0:0.1,2:1,10:0") from None
    return Piecewise(1.0, points=made).points


class Factor(NamedTuple):
    """What a parameter's learning rate and weight decay are multiplied by; a rate of 0 leaves the parameter as it is (frozen)."""

    lr: float = 1.0
    weight_decay: float = 1.0


FROZEN = Factor(0.0, 0.0)
PLAIN = Factor()
Factors = Mapping[str, Factor]
"""By the full name of a parameter; one that is not named is PLAIN."""


def matching(pattern: str, known: Sequence[str]) -> list[str]:
    """The names in `known` that `pattern` means: shell wildcards, or the name of a layer for all its parameters. Raises UsageError for none.

    "conv1" is conv1.weight and conv1.bias, "conv*" those of all convolutions, "*.bias" every bias.
    """
    found = [name for name in known if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
    if not found:
        words = [*known, *dict.fromkeys(name.rsplit(".", 1)[0] for name in known)]
        raise UsageError(f"no parameter matches {quoted(pattern)}{nearest(pattern, words)}; there are {', '.join(known) or 'none'}")
    return found


@dataclass(frozen=True)
class Optimizer(Arguments):
    """What all optimizers share: the learning rate, gradient clipping and L2 weight decay, off at 0. These apply in this order
    (`nbcnn.ops.update.rule`):

    clip_norm     first the whole gradient is scaled down to this Euclidean norm if it is longer.
    clip_value    then every gradient element is cut to [−clip_value, clip_value].
    weight_decay  last, weight_decay · w is added to the gradient of the parameters that decay (`nbcnn.nn.layer.Param`).
    """

    lr: float | Schedule | None = None
    weight_decay: float = field(default=0.0, kw_only=True)
    clip_value: float = field(default=0.0, kw_only=True)
    clip_norm: float = field(default=0.0, kw_only=True)
    op: ClassVar[Op]
    moments: ClassVar[tuple[str, ...]]
    own_lr: ClassVar[float]

    def __post_init__(self) -> None:
        if self.lr is not None and not isinstance(self.lr, Schedule):
            check_number(type(self).__name__, "lr", self.lr, exclusive=True)
        for name in ("weight_decay", "clip_value", "clip_norm"):
            check_number(type(self).__name__, name, getattr(self, name))

    def rates(self, steps: int, steps_per_epoch: int) -> np.ndarray:
        """The learning rate of every training step, (steps,) float32; `lr` None is the optimizer's own, constant."""
        schedule = self.lr if isinstance(self.lr, Schedule) else Constant(self.own_lr if self.lr is None else self.lr)
        return schedule.rates(steps, steps_per_epoch)

    def other_rate(self, rate: float) -> tuple[str, float]:
        """How `rate` is most often wrong where a training fails, and the rate to try: ("large", a tenth), or below a hundredth of `own_lr`
        ("small", `own_lr`)."""
        return ("small", self.own_lr) if rate < self.own_lr / 100 else ("large", rate / 10)

    def norm(self, tape: Tape, grads: Buf) -> list[Buf]:
        """Record the norm of all gradients, where they are clipped by it; nothing otherwise."""
        if not self.clip_norm:
            return []
        norm = tape.temp("grad_norm", (), "float64")
        tape.emit(Op("grad_norm"), [grads], [norm], "update")
        return [norm]

    def record(
        self,
        tape: Tape,
        weights: Buf,
        grads: Buf,
        moments: Sequence[Buf],
        rates: Buf,
        state: Buf,
        decayed: int,
        norm: Sequence[Buf] | None = None,
        decay_factor: float = 1.0,
        **scaled: bool,
    ) -> None:
        """Record the update of a flat buffer: the gradient's norm if it is clipped (and `norm` does not hold it), then one step.

        scaled: True where gradients are of a loss with a scale (`nbcnn.ops.update.loss_scale`).
        """
        ins = [weights, grads, *moments, rates, state, *(self.norm(tape, grads) if norm is None else norm)]
        attrs = self.attrs() | scaled
        tape.emit(self.op, ins, [weights, *moments, state], "update", decayed=decayed, **attrs | {"weight_decay": decay_factor * self.weight_decay})

    def attrs(self) -> dict[str, Any]:
        """The attributes of the op that updates the weights."""
        return {"weight_decay": self.weight_decay, "clip_value": self.clip_value, "clip_norm": self.clip_norm}


@dataclass(frozen=True)
class SGD(Optimizer):
    """m = momentum·m + g; w −= lr·m (as torch.optim.SGD).

    lr            a number, or a schedule (`Cosine`, `Constant`, `StepDecay`, `OneCycle`, `Piecewise`); None is 0.1.
    momentum      at least 0 and less than 1.
    nesterov      w −= lr·(g + momentum·m) instead (Sutskever et al., ICML 2013); needs a momentum.
    weight_decay  at least 0: weight_decay·w is added to the gradient.
    clip_norm     at least 0: the Euclidean length that the whole gradient is cut to, before everything else; 0 does not cut.
    clip_value    at least 0: every element of the gradient is then cut to [−clip_value, clip_value]; 0 does not cut.
    Weights, gradients and m are float32. Raises UsageError for a number out of its range.

    Example:
        >>> import nbcnn
        >>> nbcnn.SGD(lr=nbcnn.Cosine(0.1), momentum=0.9, weight_decay=5e-4, nesterov=True).lr
        Cosine(lr=0.1, warmup=0.0)
    """

    momentum: float = field(default=0.9, kw_only=True)
    nesterov: bool = field(default=False, kw_only=True)
    op: ClassVar[Op] = Op("sgd")
    orders: ClassVar[tuple[str, ...]] = ("lr momentum",)
    moments: ClassVar[tuple[str, ...]] = ("m",)
    own_lr: ClassVar[float] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("SGD", "momentum", self.momentum, below=1.0)
        if self.nesterov and not self.momentum:
            raise UsageError("SGD: nesterov needs a momentum above 0")

    def attrs(self) -> dict[str, Any]:
        """The attributes of the op that updates the weights."""
        return {"momentum": self.momentum, **({"nesterov": True} if self.nesterov else {}), **super().attrs()}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with bias correction (Kingma and Ba, 2015; as torch.optim.Adam).

    lr            a number, or a schedule (`Cosine`, `Constant`); None is 0.001.
    beta1, beta2  at least 0 and less than 1. eps  more than 0.
    weight_decay  at least 0: weight_decay·w is added to the gradient, as in torch.optim.Adam; `AdamW` decays apart from it.
    clip_norm     at least 0: the Euclidean length that the whole gradient is cut to, before everything else; 0 does not cut.
    clip_value    at least 0: every element of the gradient is then cut to [−clip_value, clip_value]; 0 does not cut.
    Weights, gradients and both moments are float32. Raises UsageError for a number out of its range.

    Example:
        >>> import nbcnn
        >>> nbcnn.Adam(0.002, clip_norm=1.0).beta2
        0.999
    """

    beta1: float = field(default=0.9, kw_only=True)
    beta2: float = field(default=0.999, kw_only=True)
    eps: float = field(default=1e-8, kw_only=True)
    op: ClassVar[Op] = Op("adam")
    orders: ClassVar[tuple[str, ...]] = ("lr beta1 beta2 eps weight_decay",)
    moments: ClassVar[tuple[str, ...]] = ("m", "v")
    own_lr: ClassVar[float] = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("Adam", "beta1", self.beta1, below=1.0)
        check_number("Adam", "beta2", self.beta2, below=1.0)
        check_number("Adam", "eps", self.eps, exclusive=True)

    def attrs(self) -> dict[str, Any]:
        """The attributes of the op that updates the weights."""
        return {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps, **super().attrs()}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay is apart from the gradient: w −= lr·weight_decay·w before Adam's step (arXiv:1711.05101; as torch.optim.AdamW).

    lr            a number, or a schedule (`Cosine`, `OneCycle`, …); None is 0.001.
    weight_decay  at least 0, of the parameters that decay (weights and biases, not those of norms): their part that is lost in a step is
                  lr·weight_decay, whatever the gradient's scale.
    beta1, beta2  at least 0 and less than 1. eps  more than 0.
    clip_norm     at least 0: the Euclidean length that the whole gradient is cut to, before everything else; 0 does not cut.
    clip_value    at least 0: every element of the gradient is then cut to [−clip_value, clip_value]; 0 does not cut.
    Weights, gradients and both moments are float32. Raises UsageError for a number out of its range.

    Example:
        >>> import nbcnn
        >>> nbcnn.AdamW(nbcnn.OneCycle(0.002), weight_decay=0.05).weight_decay
        0.05
    """

    weight_decay: float = field(default=0.01, kw_only=True)

    def attrs(self) -> dict[str, Any]:
        """The attributes of the op that updates the weights."""
        return {"decoupled": True, **super().attrs()}


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
"""The optimizers of this module by the names that flags, files of settings and `fit` take."""


def optimizer_of(given: Any) -> Optimizer:
    """`given`, if it is an optimizer; of a name in `OPTIMIZERS`, in capitals or not, one with its own numbers, of None SGD().

    Raises UsageError for anything else.
    """
    if isinstance(given, Optimizer):
        return given
    if given is None or (isinstance(given, str) and given.lower() in OPTIMIZERS):
        return OPTIMIZERS[(given or "sgd").lower()]()
    close = nearest(given, list(OPTIMIZERS)) if isinstance(given, str) else ""
    known = f"nbcnn.SGD(…), nbcnn.Adam(…), nbcnn.AdamW(…), one of your own by nbcnn.optimizer, or a name ({', '.join(OPTIMIZERS)})"
    raise UsageError(f"optimizer must be {known}, got {quoted(given)}{close}")


def learning_rates(schedule: str, rate: float, steps: int, warmup: int = 0) -> np.ndarray:
    """The learning rate of every training step, (steps,) float32.

    constant  `rate` throughout.
    cosine    half a cosine from `rate` at the first step towards 0 after the last (Loshchilov and Hutter, 2017).
    warmup    the first `warmup` steps are scaled by a ramp from 1/warmup to 1 (Goyal et al., 2017).
    Raises ValueError for another name.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"no schedule {quoted(schedule)}; one of {', '.join(SCHEDULES)}")
    made = Cosine if schedule == "cosine" else Constant
    return made(rate, warmup).rates(steps, 1)
