"""Points Bᵀ d B of a round's tiles, of 8 channels: a lane makes those of a strip of neighbouring tiles of one channel, from 4 lines of it."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.conv.onchip.form import CHANNEL_PITCH, CHANNELS, ROW, SLOTS, STRIPS, Form
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.ptx.vector import load1_if, shared_store4


@cache
def loading(form: Form) -> Any:
    """Device function (d, x, n, round, chunk, lane): four lines of a channel of image n, those of the lane's strip in this round and a border."""
    H, W, C, TILES, ALL_STRIPS, OF_LINE = form.H, form.W, form.C, form.across, form.strips, form.strips_of_line
    COLUMNS = 2 * TILES + 2

    @jit(device=True)
    def run(d, x, n, round, chunk, lane):
        strip = i4(round * i4(STRIPS) + (lane >> i4(3)))
        down = i4(u4(strip) // u4(OF_LINE))
        across = i4(strip - down * i4(OF_LINE))
        there = strip < i4(ALL_STRIPS)
        line, column = i4(down * i4(2) - i4(1)), i4(across * i4(2 * TILES) - i4(1))
        first = i8(i4(i4(i4(n * i4(H) + line) * i4(W) + column) * i4(C) + chunk * i4(CHANNELS) + (lane & i4(CHANNELS - 1))))
        left, right = across > i4(0), across < i4(OF_LINE - 1)
        for a in range(4):
            wanted = there & (down > i4(0)) if a == 0 else there & (down < i4(H // 2 - 1)) if a == 3 else there
            for j in range(COLUMNS):
                inside = wanted & left if j == 0 else wanted & right if j == COLUMNS - 1 else wanted
                d[a * COLUMNS + j] = load1_if(x, first + i8((a * W + j) * C), inside)

    return run


@cache
def transforming(form: Form) -> Any:
    """Device function (memory, at, d): the points of `d` to sV, from `at` on, which is the lane's place in channel and strip."""
    TILES, COLUMNS = form.across, 2 * form.across + 2

    def point(a: int, b: int) -> Any:
        FIRST, TO = a * COLUMNS, (4 * a + b) * ROW

        @jit(device=True)
        def run(memory, at, d):
            made = cuda.local.array(SLOTS, f4)
            for i in range(SLOTS):
                j = FIRST + 2 * min(i, TILES - 1)
                if b == 0:
                    made[i] = d[j] - d[j + 2]
                elif b == 1:
                    made[i] = d[j + 1] + d[j + 2]
                elif b == 2:
                    made[i] = d[j + 2] - d[j + 1]
                else:
                    made[i] = d[j + 1] - d[j + 3]
            shared_store4(memory, at + i4(TO), made[0], made[1], made[2], made[3])
            if TILES > 4:
                shared_store4(memory, at + i4(TO + 4), made[4], made[5], made[6], made[7])

        return run

    points = unrolled([point(a, b) for a in range(4) for b in range(4)])

    @jit(device=True)
    def run(memory, at, d):
        for j in range(COLUMNS):
            one, two, three, four = d[j], d[COLUMNS + j], d[2 * COLUMNS + j], d[3 * COLUMNS + j]
            d[j], d[COLUMNS + j], d[2 * COLUMNS + j], d[3 * COLUMNS + j] = one - three, two + three, three - two, two - four
        points(memory, at, d)

    return run


@jit(device=True)
def lane_start(lane):
    """Where a lane's channel and strip begin in a stage of points, in floats."""
    return i4((lane & i4(CHANNELS - 1)) * i4(CHANNEL_PITCH) + (lane >> i4(3)) * i4(SLOTS))
