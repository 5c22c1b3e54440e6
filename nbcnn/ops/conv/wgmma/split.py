"""float32 as the exact sum of three bfloat16: hi + mid + lo, 8 bits of the mantissa each, in three planes one after another.

Of the nine products of such sums six reach float32's bits. They run at the rate of bfloat16, whose operands wgmma also takes MN-major. Two values of
tf32 reach float32's bits too, with three products of half the rate: weight gradients whose operands are split on the way take those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.traffic import Traffic, once
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bf16x2
from nbcnn.ops.ptx.vector import load4, store_halves4
from nbcnn.plan.arena import ALIGNMENT, align
from nbcnn.plan.shapes import numel

THREADS = 256
PLANES = 3
PRODUCTS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0)), PLANES: ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))}
"""By the number of planes (2 are of tf32), the pairs of them that are multiplied, the smallest first: small sums lose least to large ones."""
SPLIT_BYTES = 4 + 2 * PLANES
"""Bytes that `launch_split` moves an element."""


@jit(device=True)
def _split_pair(a, b):
    """Words of the highest bits of two floats, and what is left of them (exact: the difference of near numbers)."""
    word = bf16x2(a, b)
    return word, a - bf16_low(word), b - bf16_high(word)


@jit()
def split_kernel(x, planes, count):
    """planes[p·count + i] = bfloat16 p of x[i]: x = hi + mid + lo up to 2⁻²⁵·|x|.

    grid: blocks of 1,024 elements; thread: four. moves: 10 bytes per element. count: a multiple of 4, whose three planes may be beyond 32 bits.
    """
    i = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * 4
    if i < count:
        a, b, c, d = load4(x, i)
        for plane in range(PLANES):
            low, a, b = _split_pair(a, b)
            high, c, d = _split_pair(c, d)
            store_halves4(planes, i8(plane) * count + i, low, high)


def planes_bytes(count: int) -> int:
    """Bytes of the planes of `count` floats, rounded up so that what lies behind them is aligned."""
    return align(2 * PLANES * count, ALIGNMENT)


def planes_of(scratch: Any, count: int) -> tuple[Any, Any]:
    """(the planes of `count` floats, uint16, at the start of `scratch`; the scratch behind them)."""
    return scratch[: 2 * PLANES * count].view(np.uint16), scratch[planes_bytes(count) :]


def split_bytes(call: Call, positions: Sequence[int]) -> dict[int, int]:
    """By position, the bytes that the planes of these operands take of a call's scratch: `Impl.splits`."""
    return {position: planes_bytes(numel(call.in_shapes[position])) for position in positions}


def own_bytes(call: Call, positions: Sequence[int]) -> int:
    """The same of all of them that the call does not share with others."""
    return sum(taken for position, taken in split_bytes(call, positions).items() if position not in call.planes)


def in_planes(call: Call, positions: Sequence[int]) -> tuple[list[Any], list[Launch], Any]:
    """(planes of these operands, the launches that make those that no earlier step has made, what is left of the call's scratch behind them)."""
    found, launches, scratch = [], list[Launch](), call.scratch
    for position in positions:
        count, shared = numel(call.in_shapes[position]), call.planes.get(position)
        if shared is None:
            planes, scratch = planes_of(scratch, count)
        else:
            planes = shared.array[: PLANES * count]
        found.append(planes)
        if shared is None or not shared.made:
            launches.append(launch_split(call.ins[position], planes, count))
    return found, launches, scratch


def traffic_of_planes(call: Call, positions: Sequence[int]) -> list[Traffic]:
    """Bytes of the launches of `in_planes`."""
    made = (numel(call.in_shapes[position]) for position in positions if position not in call.planes or not call.planes[position].made)
    return list(map(split_traffic, made))


def launch_split(x: Any, planes: Any, count: int) -> Launch:
    """Launch that splits the `count` floats of x into `planes`, uint16, three times as many."""
    return Launch(split_kernel, blocks(count, 4 * THREADS), THREADS, (x, planes, np.int32(count)))


def split_traffic(count: int) -> Traffic:
    """Bytes of `launch_split`."""
    return once(4 * count, 2 * PLANES * count)
