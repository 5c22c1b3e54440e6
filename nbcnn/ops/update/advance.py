"""StepState, and the op that advances it at the end of every training step.

What changes from one training step to the next lives on the device and is updated in place, so that a captured CUDA
graph stays valid. StepState is two arrays:

    state  int64[8]    STEP       training steps taken since the start of training
                       EPOCH      number of the running epoch, from 0
                       POSITION   images of this epoch consumed so far: where `gather` starts in `order`
                       SEED       key of every random choice
                       NONFINITE  1 once a loss or an updated weight was not finite; nothing here resets it
                       the other three are 0
    sums   float64[4]  LOSS_SUM   Σ of mean loss × batch size
                       COUNT      images in that sum
                       LAST_LOSS  mean loss of the latest batch
                       the last one is 0

Whoever starts an epoch (the trainer) writes EPOCH, POSITION = 0 and zero sums between two training steps.

    advance           loss () float64, state, sums (4) float64 -> state, sums   (in place)          count
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

STATE_SIZE, SUMS_SIZE = 8, 4
STEP, EPOCH, POSITION, SEED, NONFINITE = range(5)
LOSS_SUM, COUNT, LAST_LOSS = range(3)

f8: Any = types.float64


def advance(loss: np.ndarray, state: np.ndarray, sums: np.ndarray, state_out: np.ndarray, sums_out: np.ndarray, *, count: int) -> None:
    """Account for one training step on `count` images: loss () float64, state (8) int64, sums (4) float64.

    `state_out` and `sums_out` are `state` and `sums` themselves: the op works in place.
    """
    state_out[STEP] = state[STEP] + 1
    state_out[POSITION] = state[POSITION] + count
    sums_out[LOSS_SUM] = sums[LOSS_SUM] + loss * count
    sums_out[COUNT] = sums[COUNT] + count
    sums_out[LAST_LOSS] = loss
    if not np.isfinite(loss):
        state_out[NONFINITE] = 1


@jit()
def advance_kernel(loss, state, sums, count):
    """STEP += 1, POSITION += count, LOSS_SUM += loss·count, COUNT += count, LAST_LOSS = loss.

    grid 1, block 1; moves about 100 bytes.
    """
    value = loss[0]
    state[STEP] += i8(1)
    state[POSITION] += i8(count)
    sums[LOSS_SUM] += value * f8(count)
    sums[COUNT] += f8(count)
    sums[LAST_LOSS] = value
    if not math.isfinite(value):
        state[NONFINITE] = i8(1)


def bind(call: Call) -> list[Launch]:
    loss, state, sums = call.ins
    return [Launch(advance_kernel, 1, 1, (loss, state, sums, np.int32(call.attrs["count"])))]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: the loss and two entries each of state and sums in, two and three of them out."""
    return [once(8 + 16 + 16, 16 + 24)]


HOST, OPS = {"advance": host(advance)}, {"advance": Impl(bind, traffic=traffic)}


def cases() -> Iterator[Case]:
    """One training step."""
    yield Case("advance", "64 images", (np.array(0.5), example_state(), np.arange(4.0)), (1, 2), {"count": 64})


def example_state() -> np.ndarray:
    """The state in the middle of a training, for cases."""
    return np.array([3, 1, 2, 99, 0, 0, 0, 0], np.int64)
