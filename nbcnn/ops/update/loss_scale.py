"""Loss scaling: in float16 gradients are computed of the loss times a scale, so that small ones do not vanish, and divided by it before the update.

The scale is 2^16 · 2^state[SCALE]. Where a gradient of a training step is not finite, which may be the scale's fault, the step leaves weights and the
optimizer's state alone, and `advance` halves the scale. After INTERVAL steps in a row with finite gradients it doubles the scale. Powers of two round
nothing. The gradients of several ranks are summed before they are looked at, so all ranks decide alike.

    scale_loss        dy float32, state (8) int64 -> dy·scale, as activations are stored
    unscale           g (P), state (8) int64 -> g/scale, state            (in place)            state[GOOD] = −1 if an element is not finite

Source: P. Micikevicius et al., "Mixed precision training", arXiv:1710.03740; the numbers are those of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.maps import launch_map, supports
from nbcnn.ops.kernel.traffic import mapped, streamed
from nbcnn.ops.ptx.cvt import bits_float
from nbcnn.ops.update.advance import FIRST_SCALE, GOOD, SCALE, example_state
from nbcnn.plan.op import Op


def loss_scale(state: np.ndarray) -> float:
    """The scale, a power of two."""
    return 2.0 ** (FIRST_SCALE + int(state[SCALE]))


def halved(state: np.ndarray) -> np.ndarray:
    """A state (8) of half the scale, in which no gradient was looked at yet."""
    made = state.copy()
    made[[GOOD, SCALE]] = 0, state[SCALE] - 1
    return made


def scale_loss(dy: np.ndarray, state: np.ndarray, scaled: np.ndarray) -> None:
    """scaled = dy·scale, of any shape."""
    np.multiply(dy, dy.dtype.type(loss_scale(state)), out=scaled)


def unscale(g: np.ndarray, state: np.ndarray, out: np.ndarray, state_out: np.ndarray) -> None:
    """out (P) = g/scale; `out` and `state_out` are `g` and `state` themselves. Sets state[GOOD] to −1 if an element of it is not finite."""
    np.multiply(g, g.dtype.type(1 / loss_scale(state)), out=out)
    if not np.isfinite(out).all():
        state_out[GOOD] = -1


ONE = 127
"""The exponent field of the float32 1.0, which has 23 bits below it."""


@jit(device=True)
def _scale(table, state, norm, numbers):
    """The float32 with the exponent of the scale."""
    return (bits_float((state[SCALE] + (ONE + FIRST_SCALE)) << 23),)


@jit(device=True)
def _inverse(table, state, norm, numbers):
    return (bits_float(((ONE - FIRST_SCALE) - state[SCALE]) << 23),)


@jit(device=True)
def _times(x, factor):
    return factor * x


def bind_scale(call: Call) -> list[Launch]:
    """One launch."""
    return launch_map("scale_loss_kernel", _times, call, reads=1, prelude=_scale, arrays=(call.ins[1], call.ins[1]))


def bind_unscale(call: Call) -> list[Launch]:
    """One launch."""
    how: dict[str, Any] = {"reads": 1, "prelude": _inverse, "flag": GOOD, "mark": -1, "arrays": (call.ins[1], call.ins[1])}
    return launch_map("unscale_kernel", _times, call, **how)


HOST = {Op("scale_loss"): host(scale_loss), Op("unscale"): host(unscale)}
OPS = {
    Op("scale_loss"): Impl(bind_scale, supports=supports, traffic=streamed),
    Op("unscale"): Impl(bind_unscale, traffic=mapped(1)),
}


def cases(count: int = 1003) -> Iterator[Case]:
    """Scales above 1 and below it."""
    for offset in (0, -18):
        state = example_state()
        state[SCALE] = offset
        label = f"2^{FIRST_SCALE + offset}"
        dy = normal(18, 17, count // 17) / np.float32(loss_scale(state))
        yield Case(Op("scale_loss"), label, (dy, state), ((dy.shape, "float32"),))
        yield Case(Op("unscale"), label, (normal(18, count), state), (0, 1))
