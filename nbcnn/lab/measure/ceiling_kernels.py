"""This module has kernels that do one thing as fast as a GPU can: multiply and add on CUDA cores, wait, or nothing at all.

Those that multiply on tensor cores and that copy stand in `nbcnn.run.peak_kernels`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit
from nbcnn.ops.ptx.timer import cycles, nanoseconds

CHAINS, UNROLLED = 8, 16
FMA_THREADS = 256
FMAS = CHAINS * UNROLLED
"""Multiply-adds of a thread in one iteration of its loop."""


@cache
def fma_kernel() -> Any:
    """Eight chains of x = x·a + b a thread, none waiting for another; what one block took goes to `watch`.

    grid    any number of blocks; 2,048 threads per multiprocessor hide all latency
    owns    thread: FMAS · turns multiply-adds
    watch   [cycles, nanoseconds] of block 0: the SM clock while it ran
    moves   nothing but one float per thread at the end
    """

    @jit(launch_bounds=(FMA_THREADS, 8))
    def fma_ceiling_kernel(x, watch, a, b, turns):
        i = i4(cuda.grid(1))
        begin, began = cycles(), nanoseconds()
        acc = cuda.local.array(CHAINS, f4)
        for chain in range(CHAINS):
            acc[chain] = x[i] + f4(chain)
        turn = 0
        while turn < turns:
            for _ in range(UNROLLED):
                for chain in range(CHAINS):
                    acc[chain] = acc[chain] * a + b
            turn += 1
        total = 0.0
        for chain in range(CHAINS):
            total += acc[chain]
        x[i] = total
        if i == 0:
            watch[0], watch[1] = cycles() - begin, nanoseconds() - began

    return fma_ceiling_kernel


@cache
def spin_kernel() -> Any:
    """One thread waits until the GPU's clock has moved on by `wanted` nanoseconds; watch = [cycles, nanoseconds] that passed."""

    @jit()
    def spin_wait_kernel(watch, wanted):
        begin, began = cycles(), nanoseconds()
        while nanoseconds() - began < i8(wanted):
            pass
        watch[0], watch[1] = cycles() - begin, nanoseconds() - began

    return spin_wait_kernel


@cache
def empty_kernel() -> Any:
    """A kernel that does nothing: its time is what a launch costs."""

    @jit()
    def empty_launch_kernel(x):
        return

    return empty_launch_kernel
