"""This module defines what an optimizer is made of: a rule for one weight. Everything else of an update is the same for all of them:

    g ← clipped g + weight_decay · w          (decay only for the first `decayed` elements)
    w, states ← rule(w, g, states, lr, …)
    decoupled: w ← w − lr·weight_decay·w before the rule, in place of the decay in the gradient (as AdamW)

`lr` is a table indexed by StepState's STEP; past its end it keeps its last value. Clipping comes before the decay: first by norm,
g · min(1, clip_norm / (norm + 1e-6)) with the norm of the unclipped gradient, as torch.nn.utils.clip_grad_norm_; then by value to ±clip_value.
0 turns either off; a NaN stays a NaN. With a loss scale (loss_scale.py) an update is `scaled`: where a gradient of the training step is not finite it
leaves weights and states alone, and the step t that a rule sees does not count such steps. The zeros between two parameters of the buffer are updated
like anything else; a rule must leave them zeros.

    NAME              w, g, states …, lr (steps), state[, norm ()] -> w, states …, state   (in place)   the rule's numbers,
                                                                      weight_decay, clip_value, clip_norm, decayed, scaled
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import f4, i8, jit
from nbcnn.gpu.lockstep.arrays import on_arrays
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.maps import launch_map
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size
from nbcnn.ops.update.advance import GOOD, NONFINITE, SKIPPED, STEP, example_state

NORM_EPS = 1e-6
NORM_MISSING = "clip_norm needs the gradient norm as the last input"
PART = 1 << 16
"""Weights that a CPU updates at a time: the arrays of an update stay in a second-level cache."""
MOST_STATES, MOST_NUMBERS = 2, 4
"""States of a weight, and numbers of a rule, that the frame of maps has room for."""


def learning_rate(lr: np.ndarray, state: np.ndarray) -> np.floating:
    """The entry of the table `lr` (steps) for the training step that `state` is at."""
    return lr[min(int(state[STEP]), lr.size - 1)]


def effective_gradient(
    g: np.ndarray,
    w: np.ndarray,
    norm: np.ndarray | None,
    *,
    weight_decay: float = 0.0,
    clip_value: float = 0.0,
    clip_norm: float = 0.0,
    decayed: int = 0,
) -> np.ndarray:
    """`g` clipped by norm, then by value, plus weight_decay · w in its first `decayed` elements; `g` itself if all are off.

    Raises ValueError for clip_norm without norm.
    """
    if clip_norm > 0:
        if norm is None:
            raise ValueError(NORM_MISSING)
        g = g * g.dtype.type(np.minimum(1, clip_norm / (norm + NORM_EPS)))
    if clip_value > 0:
        g = np.clip(g, -clip_value, clip_value)
    if weight_decay > 0:
        g = g.copy()
        g[:decayed] += weight_decay * w[:decayed]
    return g


@jit(device=True)
def current_rate(lr, state):
    """lr[state[STEP]], or the last entry past the end of the table."""
    return lr[min(state[STEP], i8(lr.size) - 1)]


@jit(device=True)
def norm_factor(norm, clip_norm):
    """min(1, clip_norm / (norm + 1e-6)), NaN for a NaN; 1 where clip_norm is 0 (norm is then not read)."""
    factor = 1.0
    if clip_norm > 0.0:
        factor = clip_norm / (f4(norm[0]) + NORM_EPS)
        if factor > 1.0:
            factor = 1.0
    return factor


@jit(device=True)
def effective(g, w, index, factor, clip_value, weight_decay, decayed):
    """Element `index` of the gradient: factor · g, cut to ±clip_value unless that is 0, plus the weight decay."""
    g = factor * g
    # Comparisons, because min and max of a NaN would give the bound.
    if clip_value > 0.0:
        if g > clip_value:
            g = clip_value
        if g < -clip_value:
            g = -clip_value
    if index < decayed:
        g = g + weight_decay * w
    return g


@jit(device=True)
def _rate_and_numbers(rate, step, numbers):
    return (rate,) + numbers  # noqa: RUF005  # of tuples a compiler knows the sum


@cache
def _prelude(each_step: Any, count: int, decoupled: bool, scaled: bool) -> Any:
    """Device function (table, state, norm, numbers) -> (factor, clip_value, decay in the gradient, decay apart, decayed, good, the rule's …).

    good: less than 0 in a step that leaves everything alone.
    """

    @jit(device=True)
    def prelude(table, state, norm, numbers):
        rate = current_rate(table, state)
        clip_norm, clip_value, weight_decay, decayed = numbers[:4]
        t, good = state[STEP] + i8(1), i8(0)
        if scaled:
            t, good = t - state[SKIPPED], state[GOOD]
        if count == 0:
            own = each_step(rate, t, ())
        elif count == 1:
            own = each_step(rate, t, numbers[4:5])
        elif count == 2:
            own = each_step(rate, t, numbers[4:6])
        elif count == 3:
            own = each_step(rate, t, numbers[4:7])
        else:
            own = each_step(rate, t, numbers[4:])
        factor = norm_factor(norm, clip_norm)
        if decoupled:
            return (factor, clip_value, 0.0, rate * weight_decay, decayed, good) + own  # noqa: RUF005
        return (factor, clip_value, weight_decay, 0.0, decayed, good) + own  # noqa: RUF005

    return prelude


@cache
def _update_of(function: Any, decoupled: bool, states: int, scaled: bool) -> Any:
    """Device function (i, elements, settings, common) -> (w, states …): clipping, decay and the rule `function` for element i."""

    @jit(device=True)
    def update(i, elements, settings, common):
        factor, clip_value, coupled, apart, decayed, good = settings[:6]
        w = elements[0]
        g = effective(elements[1], w, i, factor, clip_value, coupled, decayed)
        if decoupled:
            w = w - apart * w if i < decayed else w
        own = (w, g) + elements[2:] + settings[6:]  # noqa: RUF005  # of tuples a compiler knows the sum
        made = function(*own)
        if scaled and good < i8(0):
            made = kept(elements)
        return made

    @jit(device=True)
    def kept(elements):
        return elements[0] if states == 0 else (elements[0],) + elements[2:]  # noqa: RUF005

    return update


def _rate_and_numbers_on_host(rate: float, t: int, *numbers: float) -> tuple[float, ...]:
    return rate, *numbers


@dataclass(frozen=True)
class Rule:
    """An optimizer's rule for one weight.

    function   device function (w, g, states …, settings …) -> (w, states …); g is the gradient after clipping and decay. Settings are the learning
               rate and the numbers, unless `each_step` says otherwise.
    states     what the rule keeps of each weight, by name; at most two, first zeros.
    numbers    the rule's parameters, by name, with what they are by default, as NumPy scalars of their types on the GPU; at most four.
    decoupled  whether the decay is apart from the gradient.
    each_step  device function (lr, t, numbers) -> settings, where they change with the training step t, counted from 1; every thread calls it.
    on_host    the same in Python, (lr, t, *numbers) -> settings. NumPy runs `function` on arrays.
    """

    name: str
    function: Any
    states: tuple[str, ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    decoupled: bool = False
    each_step: Any = None
    on_host: Callable[..., tuple[float, ...]] = _rate_and_numbers_on_host

    def reference(self, *operands: np.ndarray, **attrs: Any) -> None:
        """One update in place. Operands: w, g, states … (P), lr (steps), state (8) int64[, norm () float64]; then the outputs w, states …, state, the
        same arrays. Sets state[NONFINITE] to 1 if an updated weight is not finite.
        """
        count = 1 + len(self.states)
        (w, g, *states), (lr, state, *norm), outs = operands[: 1 + count], operands[1 + count : -1 - count], operands[-1 - count :]
        scaled = bool(attrs.get("scaled"))
        if scaled and state[GOOD] < 0:
            return
        numbers = [float(attrs.get(name, default)) for name, default in self.numbers.items()]
        clipping = {name: attrs[name] for name in ("weight_decay", "clip_value", "clip_norm", "decayed") if name in attrs}
        number, rate = w.dtype.type, float(learning_rate(lr, state))
        decay, decayed = clipping.pop("weight_decay", 0.0) if self.decoupled else 0.0, int(clipping.pop("decayed", 0))
        t = int(state[STEP] - scaled * state[SKIPPED]) + 1
        rule, settings = on_arrays(self.function), [number(each) for each in self.on_host(rate, t, *numbers)]
        for part in (slice(start, start + PART) for start in range(0, w.size, PART)):
            old, inside = w[part], max(0, decayed - part.start)
            step = effective_gradient(g[part], old, norm[0] if norm else None, **clipping, decayed=inside)
            if self.decoupled:
                old = old.copy()
                old[:inside] -= number(rate) * number(decay) * old[:inside]
            result = rule(old, step, *(each[part] for each in states), *settings)
            for out, value in zip(outs[:-1], result if isinstance(result, tuple) else (result,), strict=True):
                out[part] = value
        if not np.isfinite(outs[0]).all():
            outs[-1][NONFINITE] = 1

    def bind(self, call: Call) -> list[Launch]:
        """One launch."""
        count = 2 + len(self.states)
        get, (lr, state, *norm) = call.attrs.get, call.ins[count:]
        if get("clip_norm", 0) > 0 and not norm:
            raise ValueError(NORM_MISSING)
        numbers: list[Any] = [np.float32(get(name, 0)) for name in ("clip_norm", "clip_value", "weight_decay")]
        numbers += [np.int32(get("decayed", 0)), *(type(default)(get(name, default)) for name, default in self.numbers.items())]
        scaled = bool(get("scaled"))
        prelude = _prelude(self.each_step or _rate_and_numbers, len(self.numbers), self.decoupled, scaled)
        # Without clipping by norm the kernel reads no norm, and `lr` stands in for it.
        arrays = (lr, state, norm[0] if norm else lr)
        function = _update_of(self.function, self.decoupled, len(self.states), scaled)
        how: dict[str, Any] = {"reads": count, "prelude": prelude, "indexed": True, "flag": NONFINITE, "arrays": arrays}
        return launch_map(f"{self.name}_kernel", function, call, *numbers, **how)

    def traffic(self, call: Call) -> list[Traffic]:
        """Bytes of `bind`: weight, gradient and states in, weight and states out."""
        return [once(sum(size(call, "in", at) for at in range(2 + len(self.states))), outputs(call) - size(call, "out", len(self.states) + 1))]


@dataclass(frozen=True)
class Either:
    """An op of two rules with the same operands: `other` where the attribute `flag` is set, else `plain`."""

    flag: str
    plain: Rule
    other: Rule

    def of(self, attrs: Mapping[str, Any]) -> Rule:
        return self.other if attrs.get(self.flag) else self.plain

    def reference(self, *operands: np.ndarray, **attrs: Any) -> None:
        """One update in place (`Rule.reference`)."""
        self.of(attrs).reference(*operands, **attrs)

    def bind(self, call: Call) -> list[Launch]:
        """One launch."""
        return self.of(call.attrs).bind(call)


PLAIN = {"weight_decay": 0.0, "clip_value": 0.0, "clip_norm": 0.0, "decayed": 512}
CLIPPED = {"weight_decay": 0.01, "clip_value": 0.5, "clip_norm": 2.0, "decayed": 512}
"""Regularisation of the cases, of every optimizer."""


def scaled_states() -> Iterator[tuple[str, np.ndarray]]:
    """States of a training with a loss scale, for the cases of every optimizer: a step that is taken after others were not, and one that is not."""
    for label, good in (("scaled", 5), ("scaled, not finite", -1)):
        state = example_state()
        state[[GOOD, SKIPPED]] = good, 2
        yield label, state


def example_rates() -> np.ndarray:
    """Learning rates of the cases."""
    return np.linspace(0.1, 0.01, 8).astype(np.float32)
