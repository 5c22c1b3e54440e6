"""Gradients of the parts of a batch, added up so that they are the gradient of the whole batch at once, whatever the mean of the loss is over.

Part i has the loss L_i and the gradient g_i, both divided by c_i, and adds C_i to what the whole batch is divided by, which is known at its end. The
parts are added in their order, in one more buffer of the gradients' layout, so the sum has the same bits every time:

    a mean         of examples, or of what their labels count      L = Σ c_i·L_i / C,      g = Σ c_i·g_i / C,            C = Σ C_i
    a root of one  L_i² is a mean over C_i = c_i examples (RMSLE)   L = √(Σ c_i·L_i² / C),  g = Σ c_i·L_i·g_i / (C·L)

A batch of which nothing counts has the loss and the gradient 0. Of several ranks c_i is of this rank's examples, and C_i of all ranks'; `share`, the
rank's part of the batch, makes its loss one that ranks can add up by their shares.

    weigh_part        loss () float64, counted (4) float64[, c_i () float64, C_i (1)]
                                             -> counted, loss () float64, share·C () float64   (in place)   images, examples, first, share, root
    accumulate        g (P), total (P), counted (4) -> total, or g for the last part           (in place)   first, last

`counted` holds between the parts: Σ c_i·L_i (of roots Σ c_i·L_i²), C so far, what the gradient of this part is multiplied by, and what the sum is
multiplied by at the end. Without the last two operands a part counts its `images`, and those of all ranks, `examples`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import f4, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.maps import launch_map
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.plan.op import Op

COUNTED = 4
"""Elements of `counted`."""
LOST, TOTAL, WEIGHT, SCALE = range(COUNTED)

f8: Any = types.float64


def weigh_part(*operands: np.ndarray, images: int, examples: int, first: bool, share: float, root: bool) -> None:
    """Take a part into `counted` (4) float64; loss () float64 of the batch so far, and what it counts () float64, follow."""
    loss, counted, *given = operands[:-3]
    made, batch_loss, count = operands[-3:]
    own, whole = (float(given[0]), float(given[1][0])) if given else (float(images), float(examples))
    value, (lost, total) = float(loss), (0.0, 0.0) if first else counted[:WEIGHT]
    lost, total = lost + own * value * (value if root else 1.0), total + whole
    divisor = share * total
    mean = lost / divisor if divisor > 0 else 0 * lost
    if root:
        mean = math.sqrt(mean)
        own, divisor = own * value, total * mean
    else:
        divisor = total
    made[...] = lost, total, own, 1 / divisor if divisor > 0 else 0.0
    batch_loss[...], count[...] = mean, share * total


def accumulate(g: np.ndarray, total: np.ndarray, counted: np.ndarray, out: np.ndarray, *, first: bool, last: bool) -> None:
    """out (P) = weight·g + total, without total where `first`, and times the scale where `last`; `out` is g or total itself."""
    added = g.dtype.type(counted[WEIGHT]) * g
    added = added if first else added + total
    np.copyto(out, added * g.dtype.type(counted[SCALE]) if last else added)


@functools.cache
def weigh_kernel(root: bool) -> Any:
    """The kernel for a loss that is a mean, or the root of one."""

    @jit()
    def weigh_part_kernel(loss, counted, own, whole, batch_loss, count, images, examples, first, share, weighted):
        """counted, batch_loss and count as in `weigh_part`; own[0] and whole[0] are read if `weighted`.

        grid    1, block 1
        owns    thread: all numbers
        moves   about 100 bytes
        """
        value, mine, added, lost, total = loss[0], f8(images), f8(examples), f8(0), f8(0)
        if weighted != 0:
            mine, added = own[0], f8(whole[0])
        if first == 0:
            lost, total = counted[LOST], counted[TOTAL]
        lost += mine * value * value if root else mine * value
        total += added
        counts = share * total
        # A NaN stays one where nothing counts.
        mean = lost / counts if counts > f8(0) else lost * f8(0)
        divisor = total
        if root:
            mean = math.sqrt(mean)
            mine, divisor = mine * value, total * mean
        counted[LOST], counted[TOTAL], counted[WEIGHT] = lost, total, mine
        counted[SCALE] = f8(1) / divisor if divisor > f8(0) else f8(0)
        batch_loss[0], count[0] = mean, counts

    return weigh_part_kernel


@jit(device=True)
def _weights(table, state, norm, numbers):
    """What this part's gradient is multiplied by, and the sum at the end; `table` is what counts so far."""
    return f4(table[WEIGHT]), f4(table[SCALE])


@functools.cache
def _added(first: bool, last: bool) -> Any:
    """Device function of an element: weight·g + total, without total for the first part, times the scale for the last."""

    @jit(device=True)
    def first_part(g, weight, scale):
        return scale * (weight * g) if last else weight * g

    @jit(device=True)
    def part(g, total, weight, scale):
        return scale * (weight * g + total) if last else weight * g + total

    return first_part if first else part


def bind_weigh(call: Call) -> list[Launch]:
    """One launch."""
    loss, counted, *given = call.ins
    _, batch_loss, count = call.outs
    numbers = (np.int32(call.attrs["images"]), np.int32(call.attrs["examples"]), np.int32(call.attrs["first"]), np.float64(call.attrs["share"]))
    # Without them the kernel reads none, and `loss` stands in for both.
    own, whole = given or (loss, loss)
    args = (loss, counted, own, whole, batch_loss, count, *numbers, np.int32(len(given)))
    return [Launch(weigh_kernel(bool(call.attrs["root"])), 1, 1, args)]


def bind(call: Call) -> list[Launch]:
    """One launch; that of the first part reads no total."""
    first, last = bool(call.attrs["first"]), bool(call.attrs["last"])
    how: dict[str, Any] = {"reads": 1 if first else 2, "prelude": _weights, "arrays": (call.ins[2],)}
    return launch_map("accumulate_gradients_kernel", _added(first, last), call, **how)


def traffic_weigh(call: Call) -> list[Traffic]:
    """Bytes of `bind_weigh`: the loss, what counts, two numbers of the parts before; four, the loss and its count out."""
    return [once(8 + (12 if len(call.in_shapes) > 2 else 0) + (0 if call.attrs["first"] else 16), 8 * COUNTED + 16)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`; the two numbers of `counted` come from L1."""
    return [once(size(call, "in", 0) * (1 if call.attrs["first"] else 2), size(call, "out", 0))]


HOST = {Op("weigh_part"): host(weigh_part), Op("accumulate"): host(accumulate)}
OPS = {Op("weigh_part"): Impl(bind_weigh, traffic=traffic_weigh), Op("accumulate"): Impl(bind, traffic=traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """The first of several parts, one between, the last; a mean over examples, over what labels count, and a root."""
    g, total, counted = normal(18, count), normal(19, count), np.array([3.0, 8.0, 3.0, 0.125])
    for first, last in ((True, False), (False, False), (False, True)):
        ends = {"first": first, "last": last}
        yield Case(Op("accumulate"), "first" if first else "last" if last else "between", (g, total, counted), (0 if last else 1,), ends, 2)
    loss, scalar = np.array(0.5), ((), "float64")
    for label, given, root in (("examples", (), False), ("labels", (np.array(1.5), np.array([2.5], np.float32)), False), ("root", (), True)):
        for first in (True, False):
            attrs: dict[str, Any] = {"images": 4, "examples": 8, "first": first, "share": 1.0 if root else 0.5, "root": root}
            yield Case(Op("weigh_part"), f"{label}{' first' if first else ''}", (loss, counted, *given), (1, scalar, scalar), attrs, 2)
    nothing = {"images": 4, "examples": 8, "first": True, "share": 1.0, "root": False}
    yield Case(Op("weigh_part"), "nothing counts", (loss, counted, np.array(0.0), np.zeros(1, np.float32)), (1, scalar, scalar), nothing)
