"""Exponential moving average of the weights: e ← e + (1 − d)·(w − e) with d = min(decay, (1 + t)/(10 + t)), t = STEP + 1 − SKIPPED.

The second bound lets the average follow the weights closely in the first steps, where it would otherwise stay near the random first weights for
about 1/(1 − decay) steps. d depends on the step alone, so a resumed training goes on with the same bits. A step whose gradients were not finite
(`nbcnn.ops.update.loss_scale`) is none: neither the weights nor their average move, and t does not count it.
Sources: B. T. Polyak, A. B. Juditsky, "Acceleration of stochastic approximation by averaging", 1992; the bound is that of
tf.train.ExponentialMovingAverage (num_updates).

    ema               e (P), w (P), state -> e   (in place)                                         decay
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import f4, i8, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.maps import launch_map
from nbcnn.ops.kernel.traffic import mapped
from nbcnn.ops.update.advance import GOOD, SKIPPED, STEP, example_state
from nbcnn.plan.op import Op

f8: Any = types.float64


def ema(average: np.ndarray, w: np.ndarray, state: np.ndarray, out: np.ndarray, *, decay: float) -> None:
    """One step in place: average and w (P), state (8) int64; `out` is `average` itself."""
    if state[GOOD] < 0:
        return
    t = int(state[STEP] - state[SKIPPED]) + 1
    share = w.dtype.type(1 - min(decay, (1 + t) / (10 + t)))
    np.add(average, share * (w - average), out=out)


@jit(device=True)
def _share(table, state, norm, numbers):
    """1 − min(decay, (1 + t)/(10 + t)), worked out in float64 by every thread; 0 in a step that leaves the weights alone."""
    t = f8(state[STEP] - state[SKIPPED] + i8(1))
    if state[GOOD] < i8(0):
        return (0.0,)
    return (f4(f8(1) - min(numbers[0], (f8(1) + t) / (f8(10) + t))),)


@jit(device=True)
def _nearer(average, w, share):
    return average + share * (w - average)


def bind(call: Call) -> list[Launch]:
    """One launch."""
    return launch_map("ema_kernel", _nearer, call, np.float64(call.attrs["decay"]), reads=2, prelude=_share, arrays=(call.ins[2], call.ins[2]))


HOST, OPS = {Op("ema"): host(ema)}, {Op("ema"): Impl(bind, traffic=mapped(2))}


def cases(count: int = 1003) -> Iterator[Case]:
    """An early step, where the step bounds the decay, and a decay that is smaller than its bound."""
    for decay in (0.999, 0.1):
        yield Case(Op("ema"), f"{decay}", (normal(17, count), normal(18, count), example_state()), (0,), {"decay": decay}, 2)
    skipped = example_state()
    skipped[[GOOD, SKIPPED]] = -1, 2
    yield Case(Op("ema"), "of a step that is skipped", (normal(17, count), normal(18, count), skipped), (0,), {"decay": 0.1}, 2)
