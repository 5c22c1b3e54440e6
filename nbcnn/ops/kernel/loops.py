"""Small things that every kernel and its launcher may use: unrolled loops, quotients, pixels split into coordinates, alignment."""

from __future__ import annotations

import functools
from typing import Any

from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, i4, jit, u4

ALIGNMENT = None if NUMBA_SIMULATOR else 16
"""Alignment of shared arrays in bytes, as 16-byte loads need it (the simulator takes no such argument)."""


def ceil_div(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`; 1 for 0."""
    return 1 << max(least - 1, 0).bit_length()


def in_sequence(functions: list[Any]) -> Any:
    """One device function that calls each of `functions` with the same five arguments: a loop unrolled for certain.

    The compiler does not reliably unroll a loop over a body this large, and register arrays need constant indices.
    """

    def both(one, other):
        @jit(device=True)
        def run(a, b, c, d, e):
            one(a, b, c, d, e)
            other(a, b, c, d, e)

        return run

    return functools.reduce(both, functions)


def unrolled(steps: list[Any]) -> Any:
    """One device function that calls each of `steps` in a row with the arguments it gets: a loop unrolled for certain."""

    def both(one: Any, other: Any) -> Any:
        @jit(device=True)
        def run(*args):
            one(*args)
            other(*args)

        return run

    return functools.reduce(both, steps)


@jit(device=True)
def quotient(a, b):
    """a // b for non-negative int32, as an unsigned division: a signed one, which rounds down, takes five instructions more.

    In a kernel itself the compiler knows that thread and block numbers are not negative, and divides what is made of them like this by itself.
    """
    return i4(u4(a) // u4(b))


@jit(device=True)
def within(i, count):
    """0 ≤ i < count for int32, by one unsigned comparison: a negative number is larger than any count as uint32."""
    return u4(i) < u4(count)


@jit(device=True)
def split_pixel(m, P, Q):
    """(n, p, q) of pixel m of images of P×Q pixels; m ≥ 0."""
    plane = P * Q
    image = quotient(m, plane)
    rest = m - image * plane
    row = quotient(rest, Q)
    return image, row, rest - row * Q


@jit(device=True)
def step_pixel(n, p, q, dn, dp, dq, P, Q):
    """(n, p, q) plus (dn, dp, dq) with carries: a walk in equal steps without divisions."""
    q += dq
    p += dp
    n += dn
    if q >= Q:
        q -= Q
        p += 1
    if p >= P:
        p -= P
        n += 1
    return n, p, q


@jit(device=True)
def keep_order():
    """Loads written before this call are issued before loads written after it.

    The assembler otherwise moves a load whose value is needed only in the next iteration of a loop to the end of this one,
    where it is too late to hide its latency. A barrier of the warp costs one empty instruction and holds it in place.
    The simulator, which has no warps, needs none.
    """
    if not NUMBA_SIMULATOR:
        cuda.syncwarp()
