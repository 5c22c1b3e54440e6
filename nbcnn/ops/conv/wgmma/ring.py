"""The ring between a thread that has tiles fetched and the warps that multiply them: stages in shared memory, with two barriers each.

    full[stage]    its phase ends when TMA has written all bytes of the stage
    empty[stage]   its phase ends when every consumer warp has finished reading the stage

Each side keeps the number of its stage and the parity of the phase that it waits for next. Both start at stage 0, the producer with
parity 1, which of a fresh barrier counts as ended, the consumers with parity 0. Barriers are 8 bytes apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait, wgmma_wait_all

u8 = types.uint64


@jit(device=True)
def aligned(address):
    """The first multiple of ALIGNMENT from a shared address on, where a swizzled tile may start."""
    return (address + (ALIGNMENT - 1)) & ~(ALIGNMENT - 1)


@cache
def init_ring(stages: int, arrivals: int) -> Any:
    """Device function (full, empty) for one thread: initialise the barriers; `arrivals` warps empty a stage."""

    @jit(device=True)
    def run(full, empty):
        for stage in range(stages):
            mbarrier_init(full + stage * 8, 1)
            mbarrier_init(empty + stage * 8, arrivals)

    return run


@cache
def claim_stage(stage_bytes: int) -> Any:
    """Device function (full, empty, stage, parity) -> the stage's full barrier: wait until the stage is empty, and announce `stage_bytes`."""

    @jit(device=True)
    def run(full, empty, stage, parity):
        barrier = full + stage * 8
        mbarrier_wait(empty + stage * 8, parity)
        mbarrier_arrive_expect_tx(barrier, stage_bytes)
        return barrier

    return run


@cache
def next_stage(stages: int) -> Any:
    """Device function (stage, parity) -> the next stage, and the parity to wait for there."""

    @jit(device=True)
    def run(stage, parity):
        stage += 1
        if stage == stages:
            stage = 0
            parity ^= 1
        return stage, parity

    return run


@cache
def skip_stages(stages: int) -> Any:
    """Device function (stage, parity, count) -> stage and parity behind `count` stages that others take."""

    @jit(device=True)
    def run(stage, parity, count):
        stage += count
        rounds = stage // stages
        return stage - rounds * stages, parity ^ (rounds & 1)

    return run


def products_of_stage(instructions: Sequence[tuple[Any, int, int, bool]], operand: Any) -> Any:
    """Device function (acc, a, b, add): issue acc (+)= all products of one stage, whose tiles start at shared addresses a and b.

    instructions  of each product its device function, how far its operands lie behind a and b in units of 16 bytes, and whether it is the first
                  of its sums, which forgets the old ones where `add` is 0
    operand       device function (address) -> descriptor
    """

    def instruction(product: Any, A_MORE: int, B_MORE: int, STARTS: bool) -> Any:
        @jit(device=True)
        def run(acc, a, b, add):
            product(acc, a + u8(A_MORE), b + u8(B_MORE), add if STARTS else 1)

        return run

    every = unrolled([instruction(*each) for each in instructions])

    @jit(device=True)
    def run(acc, a, b, add):
        wgmma_fence()
        every(acc, operand(a), operand(b), add)
        wgmma_commit()

    return run


@cache
def consumer(multiply: tuple[Any, ...], sums: int, stages: int, stage_bytes: int, b_offset: int, persistent: bool = False) -> Any:
    """Device function (acc, ring, full, empty, own, lane, steps, stage, parity) -> stage and parity behind the tile: acc += A·Bᵀ over `steps` stages.

    The tensor cores work on one stage while the products of the next are issued; a stage is given back when the one after it is under way.
    There is at least one step. The loop ends in the middle: a path around the products would have the sums copied.

    multiply    device functions (acc, a, b, add), each of which issues all products of a stage, in the order in which stages take turns with them;
                `steps` is a multiple of their number. `add` 0 forgets the old sums
    b_offset    bytes from the start of a stage to the tile of B; `own`: to the warpgroup's rows of A
    persistent  tile follows tile: the first products of each forget the sums of the last, and its last stage is given back too
    """
    advance, one_running, all_done, TURNS = next_stage(stages), wgmma_wait(1), wgmma_wait_all(sums), len(multiply)

    def in_turn(turn: int) -> Any:
        """Device function for the stages of a turn and of those behind it: -> the last stage, the next one, its parity."""
        products = multiply[turn]

        @jit(device=True)
        def last(acc, ring, full, empty, own, lane, step, previous, stage, parity):
            mbarrier_wait(full + stage * 8, parity)
            here = ring + stage * stage_bytes
            products(acc, here + own, here + b_offset, step > 0 if persistent else 1)
            one_running()
            if lane == 0 and step > 0:
                mbarrier_arrive(empty + previous * 8)
            following, parity = advance(stage, parity)
            return stage, following, parity

        if turn == TURNS - 1:
            return last
        others = in_turn(turn + 1)

        @jit(device=True)
        def run(acc, ring, full, empty, own, lane, step, previous, stage, parity):
            previous, stage, parity = last(acc, ring, full, empty, own, lane, step, previous, stage, parity)
            return others(acc, ring, full, empty, own, lane, step + 1, previous, stage, parity)

        return run

    turns = in_turn(0)

    @jit(device=True)
    def run(acc, ring, full, empty, own, lane, steps, stage, parity):
        step, previous = 0, 0
        while True:
            previous, stage, parity = turns(acc, ring, full, empty, own, lane, step, previous, stage, parity)
            step += TURNS
            if step >= steps:
                break
        all_done(acc)
        if persistent and lane == 0:
            mbarrier_arrive(empty + previous * 8)
        return stage, parity

    return run


@cache
def promoting_consumer(multiply: Any, sums: int, stages: int, stage_bytes: int, b_offset: int) -> Any:
    """`consumer` for products of float32: the sums leave the tensor cores after each step, and are added where additions round.

    Tensor cores cut off what falls below a sum's last bit, always towards zero: over thousands of products that shows in float32.
    Meanwhile another warpgroup multiplies.
    """
    advance, all_done = next_stage(stages), wgmma_wait_all(sums)

    @jit(device=True)
    def run(acc, ring, full, empty, own, lane, steps, stage, parity):
        part = cuda.local.array(sums, f4)
        for i in range(sums):
            part[i] = 0.0
        step = 0
        while True:
            mbarrier_wait(full + stage * 8, parity)
            here = ring + stage * stage_bytes
            multiply(part, here + own, here + b_offset, 0)
            all_done(part)
            if lane == 0:
                mbarrier_arrive(empty + stage * 8)
            for i in range(sums):
                acc[i] += part[i]
            stage, parity = advance(stage, parity)
            step += 1
            if step >= steps:
                break
        return stage, parity

    return run
