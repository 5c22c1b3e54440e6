"""The sum of the losses of several outputs, added in their order in float64.

Its gradient needs no op: every loss has the gradient of its own output.

    sum_losses        losses (), (), … float64 -> their sum () float64
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.op import Op


def sum_losses(*operands: np.ndarray) -> None:
    """The last operand, a float64 scalar, = the sum of the others, added from the left."""
    *losses, value = operands
    total = losses[0].copy()
    for loss in losses[1:]:
        total += loss
    np.copyto(value, total)


@cache
def add_loss_kernel() -> Any:
    """value[0] = a[0] + b[0] in float64.

    grid    1, block 1
    owns    thread: the sum
    moves   24 bytes
    """

    @jit()
    def add_loss_kernel(a, b, value):
        if cuda.threadIdx.x == 0:
            value[0] = a[0] + b[0]

    return add_loss_kernel


def bind(call: Call) -> list[Launch]:
    """losses -> their sum. One launch for every loss but the first, each of which adds it to the sum so far."""
    value, made, first = call.outs[0], [], call.ins[0]
    for loss in call.ins[1:]:
        made.append(Launch(add_loss_kernel(), 1, 1, (first, loss, value)))
        first = value
    return made


HOST, OPS = {Op("sum_losses"): host(sum_losses)}, {Op("sum_losses"): Impl(bind)}


def cases() -> Iterator[Case]:
    """Sums of two losses and of three."""
    for count in (2, 3):
        values = tuple(np.array(value, np.float64) for value in np.random.default_rng(41).standard_normal(count))
        yield Case(Op("sum_losses"), f"{count} losses", values, (((), "float64"),), {}, count)
