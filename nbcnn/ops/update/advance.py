"""StepState, and the op that advances it at the end of every training step.

What changes from one training step to the next lives on the device and is updated in place, so that a captured CUDA
graph stays valid. StepState is two arrays:

    state  int64[8]    STEP       training steps taken since the start of training
                       EPOCH      number of the running epoch, from 0
                       POSITION   images of this epoch consumed so far: where `gather` starts in `order`
                       SEED       key of every random choice
                       NONFINITE  1 once a loss or an updated weight was not finite; nothing here resets it
                       GOOD       of a training with a loss scale (loss_scale.py): training steps since the scale changed, all of them with
                                  finite gradients; −1 while a training step has others
                       SCALE      loss scale = 2^(16 + SCALE)
                       SKIPPED    training steps whose gradients were not finite, and which so left the weights alone
    sums   float64[4]  LOSS_SUM   Σ of mean loss × batch size
                       COUNT      images in that sum
                       LAST_LOSS  mean loss of the latest batch
                       the last one is 0

Whoever starts an epoch (the trainer) writes EPOCH, POSITION = 0 and zero sums between two training steps.

A training step that adds up the gradients of several parts of its batch advances once per part, and of all but the last by 0 steps: these move
POSITION alone, and the last one accounts for the loss of the whole batch. A loss whose mean is not over examples gives what it counts as `weight`.

    advance           loss () float64, state, sums (4) float64[, weight () float64] -> state, sums   (in place)          count, steps, scaled
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import i8, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case
from nbcnn.ops.kernel.traffic import Traffic, once
from nbcnn.plan.op import Op

STATE_SIZE, SUMS_SIZE = 8, 4
STEP, EPOCH, POSITION, SEED, NONFINITE, GOOD, SCALE, SKIPPED = range(STATE_SIZE)
LOSS_SUM, COUNT, LAST_LOSS = range(3)

FIRST_SCALE, LEAST_SCALE, MOST_SCALE = 16, -32, 32
"""The exponent of the first loss scale, and how far SCALE goes: gradients that are not finite at 2^-16 are so without a scale."""
INTERVAL = 2000
"""Training steps with finite gradients in a row after which the loss scale doubles."""

f8: Any = types.float64


def advance(*operands: np.ndarray, count: int, steps: int = 1, scaled: bool = False) -> None:
    """Account for `steps` training steps, 1 or 0, on `count` images: loss () float64, state (8) int64, sums (4) float64[, weight () float64].

    The last two operands, `state` and `sums` themselves, are written: the op works in place. The loss counts `weight`, without it `count`.
    A step that is `scaled` moves the loss scale.
    """
    loss, state, sums, *weight = operands[:-2]
    state_out, sums_out = operands[-2:]
    counted = weight[0] if weight else count
    state_out[STEP] = state[STEP] + steps
    state_out[POSITION] = state[POSITION] + count
    if steps:
        sums_out[LOSS_SUM] = sums[LOSS_SUM] + loss * counted
        sums_out[COUNT] = sums[COUNT] + counted
        sums_out[LAST_LOSS] = loss
    if not np.isfinite(loss):
        state_out[NONFINITE] = 1
    if steps and scaled and state_out[GOOD] < 0:
        state_out[[GOOD, SCALE, SKIPPED]] += (1, -1, 1)
        if state_out[SCALE] < LEAST_SCALE:
            state_out[NONFINITE] = 1
    elif steps and scaled:
        state_out[GOOD] += 1
        if state_out[GOOD] == INTERVAL:
            state_out[GOOD], state_out[SCALE] = 0, min(state_out[SCALE] + 1, MOST_SCALE)


@jit()
def advance_kernel(loss, state, sums, weight, count, steps, weighted, scaled):
    """STEP += steps, POSITION += count; if steps > 0: LOSS_SUM += loss·c, COUNT += c, LAST_LOSS = loss; c is weight[0] if `weighted`, else count.

    If steps > 0 and `scaled`: GOOD += 1, at INTERVAL 0 and SCALE += 1; after gradients that are not finite GOOD = 0, SCALE −= 1, SKIPPED += 1.
    grid 1, block 1; moves about 100 bytes.
    """
    value, counted = loss[0], f8(count)
    if weighted != 0:
        counted = weight[0]
    state[STEP] += i8(steps)
    state[POSITION] += i8(count)
    if steps > 0:
        sums[LOSS_SUM] += value * counted
        sums[COUNT] += counted
        sums[LAST_LOSS] = value
    if not math.isfinite(value):
        state[NONFINITE] = i8(1)
    # Branch-free: race-checked launches must not need both outcomes from one thread.
    on = i8(steps) * i8(scaled)
    bad = on * max(-state[GOOD], i8(0))
    good = state[GOOD] + on
    doubled = on * (good // i8(INTERVAL))
    state[GOOD] = good - doubled * i8(INTERVAL)
    state[SCALE] = min(state[SCALE] + doubled - bad, i8(MOST_SCALE))
    state[SKIPPED] += bad
    state[NONFINITE] = max(state[NONFINITE], min(max(i8(LEAST_SCALE) - state[SCALE], i8(0)), i8(1)))


def bind(call: Call) -> list[Launch]:
    loss, state, sums, *weight = call.ins
    get = call.attrs.get
    numbers = tuple(map(np.int32, (get("count"), get("steps", 1), len(weight), get("scaled", False))))
    # Without a weight the kernel reads none, and `loss` stands in for it.
    return [Launch(advance_kernel, 1, 1, (loss, state, sums, weight[0] if weight else loss, *numbers))]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: the loss, its weight, two entries each of state and sums in, two and three of them out."""
    return [once(8 * (len(call.in_shapes) - 2) + 16 + 16, 16 + 24)]


HOST, OPS = {Op("advance"): host(advance)}, {Op("advance"): Impl(bind, traffic=traffic)}


def cases() -> Iterator[Case]:
    """One training step; one whose loss counts more than its images; a part of one."""
    yield Case(Op("advance"), "64 images", (np.array(0.5), example_state(), np.arange(4.0)), (1, 2), {"count": 64})
    weighted = (np.array(0.5), example_state(), np.arange(4.0), np.array(7.5))
    yield Case(Op("advance"), "4 images that count 7.5", weighted, (1, 2), {"count": 4})
    yield Case(Op("advance"), "a part of 4 images", weighted[:3], (1, 2), {"count": 4, "steps": 0})
    for good, scale in ((-1, 3), (7, 3), (INTERVAL - 1, -5), (INTERVAL - 1, MOST_SCALE), (-1, LEAST_SCALE)):
        state = example_state()
        state[[GOOD, SCALE]] = good, scale
        yield Case(Op("advance"), f"scaled, {good} good at {scale}", (np.array(0.5), state, np.arange(4.0)), (1, 2), {"count": 4, "scaled": True})


def example_state() -> np.ndarray:
    """The state in the middle of a training, for cases."""
    return np.array([3, 1, 2, 99, 0, 0, 0, 0], np.int64)
