"""The kernel: eight warps multiply, four bring what they multiply, four make pixels of it, and barriers in shared memory tell them when.

What of every round goes round in shared memory, each with a barrier that it is full and one that it is empty:

    a stage   8 channels of points, made by one filling warp, and of filters, which it has TMA bring; emptied by the eight
    products  by the eight; emptied by the four that finish, who take pixels of them into registers
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, jit, types, u4
from nbcnn.ops.conv.onchip.fill import lane_start, loading, transforming
from nbcnn.ops.conv.onchip.finish import End, making, pixel_floats, quad_of
from nbcnn.ops.conv.onchip.form import (
    AT_POINTS,
    CHANNELS,
    FILLERS,
    FILTER_STAGE,
    FILTERS,
    FINISHERS,
    MULTIPLIERS,
    POINT_STAGE,
    ROW,
    SLOTS,
    STAGES,
    THREADS,
    TURNS,
    Form,
)
from nbcnn.ops.conv.onchip.multiply import COLUMNS, FACTORS, FILTERS_RUN, POINTS_RUN, RUNS, cleared, lane_place, products, storing
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_arrive_if, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.registers import give_registers, take_registers
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.ptx.tma import fence_async_shared, load_bytes
from nbcnn.ops.ptx.vector import load4

u8 = types.uint64
_MULTIPLY_WARPS = MULTIPLIERS // WARP
_REGISTERS = 160, 88, 104
"""Of threads that multiply, that fill, that finish: 256·160 + 128·88 + 128·104 are all that a multiprocessor has, 128 for each of 512."""
_FILTER_BYTES = 4 * FILTER_STAGE
_LOG_TURNS = TURNS.bit_length() - 1


@cache
def _multiplying(form: Form) -> Any:
    """Device function (memory, barriers, warp, lane, rounds): everything that a multiplying warp does."""
    CHUNKS, SUMS = form.C // CHANNELS, 2 * form.across * COLUMNS
    first, others, last = products(form)
    store, clear = storing(form), cleared(form)

    @jit(device=True)
    def run(memory, barriers, warp, lane, rounds):
        acc = cuda.local.array(SUMS, f4)
        rows = cuda.local.array(FACTORS, f4)
        strip, filter = lane_place(lane)
        arrives = i4(lane == i4(0))
        empty = barriers + u4(8 * TURNS)
        done = empty + u4(8 * TURNS)
        to_points = i4(i4(AT_POINTS) + warp * i4(2 * ROW) + strip * i4(SLOTS))
        to_filters = i4(warp * i4(2 * FILTERS) + filter)
        stage, all_stages = u4(0), u4(rounds * i4(CHUNKS))
        mbarrier_wait(barriers, u4(0))
        at_points, at_filters = to_points, to_filters
        first(acc, rows, memory, at_points, at_filters)
        round = i4(0)
        while round < rounds:
            clear(acc)
            runs = i4(0)
            while runs < i4(CHUNKS * RUNS):
                others(acc, rows, memory, at_points, at_filters)
                runs = i4(runs + i4(1))
                at_points, at_filters = i4(at_points + i4(POINTS_RUN)), i4(at_filters + i4(FILTERS_RUN))
                # Always so while a run is a whole stage; written without the condition the loop gets 34 instructions more (bench/LOG.md).
                if runs & i4(RUNS - 1) == i4(0):
                    # All of the stage is in registers, once loads before the fence are over: TMA brings the next filters to its place.
                    fence_async_shared()
                    cuda.syncwarp()
                    mbarrier_arrive_if(empty + u4((stage & u4(TURNS - 1)) * u4(8)), arrives)
                    stage = u4(stage + u4(1))
                    odd = i4(stage & u4(STAGES - 1))
                    at_points, at_filters = i4(to_points + odd * i4(POINT_STAGE)), i4(to_filters + odd * i4(FILTER_STAGE))
                    if stage < all_stages:
                        mbarrier_wait(barriers + u4((stage & u4(TURNS - 1)) * u4(8)), u4((stage >> u4(_LOG_TURNS)) & u4(1)))
                last(acc, rows, memory, at_points, at_filters)
            mbarrier_wait(done + u4(8), u4(round & i4(1)) ^ u4(1))
            store(memory, acc, warp, strip, filter)
            cuda.syncwarp()
            mbarrier_arrive_if(done, arrives)
            round = i4(round + i4(1))

    return run


@cache
def _filling(form: Form) -> Any:
    """Device function (memory, x, u, barriers, n, round, chunk, stage, lane): the stage of this number, the round's channels `chunk` of image n."""
    FLOATS = 4 * (2 * form.across + 2)
    load, transform = loading(form), transforming(form)

    @jit(device=True)
    def run(memory, x, u, barriers, n, round, chunk, stage, lane):
        d = cuda.local.array(FLOATS, f4)
        odd = i4(stage & i4(STAGES - 1))
        full = barriers + u4((stage & i4(TURNS - 1)) * i4(8))
        load(d, x, n, round, chunk, lane)
        before = i4(stage - i4(STAGES))  # whose place it takes; of the first ones, a turn that counts as over
        mbarrier_wait(barriers + u4(8 * TURNS) + u4((before & i4(TURNS - 1)) * i4(8)), u4((before >> i4(_LOG_TURNS)) & i4(1)))
        if lane == i4(0):
            mbarrier_arrive_expect_tx(full, u4(_FILTER_BYTES))
            to = byte_address_shared(memory) + u4(odd * i4(_FILTER_BYTES))
            load_bytes(to, byte_address_global(u) + u8(chunk * i4(_FILTER_BYTES)), u4(_FILTER_BYTES), full)
        transform(memory, i4(i4(AT_POINTS) + odd * i4(POINT_STAGE) + lane_start(lane)), d)
        cuda.syncwarp()
        if lane == i4(0):
            mbarrier_arrive(full)

    return run


@cache
def _bringing(form: Form) -> Any:
    """Device function (memory, x, u, barriers, tid, N): everything that a filling warp does."""
    CHUNKS, ROUNDS, fill = form.C // CHANNELS, form.rounds, _filling(form)

    @jit(device=True)
    def run(memory, x, u, barriers, tid, N):
        lane, warp = i4(tid & i4(WARP - 1)), i4(tid >> i4(5))
        item, stage = i4(cuda.blockIdx.x), warp
        while item < i4(N * i4(ROUNDS)):
            n = i4(u4(item) // u4(ROUNDS))
            round = i4(item - n * i4(ROUNDS))
            chunk = warp
            while chunk < i4(CHUNKS):
                fill(memory, x, u, barriers, n, round, chunk, stage, lane)
                chunk, stage = i4(chunk + i4(TURNS)), i4(stage + i4(TURNS))
            item = i4(item + i4(cuda.gridDim.x))

    return run


@cache
def _ending(form: Form, end: End) -> Any:
    """Device function (memory, b, arrays, barriers, tid, N, eps, momentum): everything that a finishing warp does."""
    ROUNDS, FLOATS, SUMS, PACKETS = form.rounds, pixel_floats(form), end.sums, end.packets
    begin, make, finish = end.begin, making(form, end), end.finish

    @jit(device=True)
    def run(memory, b, arrays, barriers, tid, N, eps, momentum):
        x = cuda.local.array(FLOATS, f4)
        sums = cuda.local.array(SUMS, f4)
        begin(memory, arrays, tid)
        lane, full = i4(tid & i4(WARP - 1)), barriers + u4(16 * TURNS)
        item, rounds = i4(cuda.blockIdx.x), i4(0)
        # Every launch writes every packet once, so that any of them tells the turn until it is sent.
        turn = i4(arrays[8][u4(item * i4(4 * PACKETS) + i4(1))] + i4(1)) if PACKETS > 0 else i4(0)
        while item < i4(N * i4(ROUNDS)):
            n = i4(u4(item) // u4(ROUNDS))
            round = i4(item - n * i4(ROUNDS))
            bias = load4(b, quad_of(tid))
            mbarrier_wait(full, u4(rounds & i4(1)))
            last = i4(item + i4(cuda.gridDim.x) >= i4(N * i4(ROUNDS)))
            make(memory, x, sums, bias, arrays[4], n, round, tid, last)
            cuda.syncwarp()
            if lane == i4(0):
                mbarrier_arrive(full + u4(8))
            finish(memory, x, sums, arrays, tid, n, round, turn, last, N, eps, momentum)
            rounds, item = i4(rounds + i4(1)), i4(item + i4(cuda.gridDim.x))

    return run


@cache
def onchip_kernel(form: Form, end: End) -> Any:
    """The kernel of one form and end."""
    multiply, bring, finish = _multiplying(form), _bringing(form), _ending(form, end)
    BARRIERS, ROUNDS = 4 * form.at_barriers, form.rounds
    of_multipliers, of_fillers, of_finishers = take_registers(_REGISTERS[0]), give_registers(_REGISTERS[1]), give_registers(_REGISTERS[2])

    @jit(launch_bounds=(THREADS, 1))
    def winograd_onchip_kernel(x, u, b, gamma, beta, v, running, z, y, shift, std, packets, batch_shift, batch_std, N, eps, momentum):
        """z (N,H,W,64) = Aᵀ [Σ_c (G w Gᵀ) ⊙ (Bᵀ d B)] A + b; u = [c][point][filter], and what the end does with it.

        gemm    16 of tiles × 64 × C a round, 4·across tiles
        grid    rounds of all images, or fewer, but not fewer than those of one where rounds meet; a block takes every grid-th
        block   512: eight warps that multiply, four that fill, four that finish
        owns    a block a round of all filters; a multiplying thread `across` tiles × 8 filters × 2 points, a filling one a channel of a strip, a
                finishing one 4 filters of every other tile of a strip
        shared  `form.shared_bytes`; moves: x about (2·across + 2)/across times, mostly from caches; u once a round from L2; z, y once, and
                what the end reads back
        needs   compute capability 9.0. source: arXiv:1509.09308
        """
        memory = cuda.shared.array(0, f4)  # the only shared array, so that it begins where accesses of 16 bytes may
        t = i4(cuda.threadIdx.x)
        barriers = byte_address_shared(memory) + u4(BARRIERS)
        if t == i4(0):
            for turn in range(TURNS):
                mbarrier_init(barriers + u4(8 * turn), u4(2))  # who makes points, and TMA's bytes, which it also expects
                mbarrier_init(barriers + u4(8 * (TURNS + turn)), u4(_MULTIPLY_WARPS))
            mbarrier_init(barriers + u4(8 * 2 * TURNS), u4(_MULTIPLY_WARPS))
            mbarrier_init(barriers + u4(8 * (2 * TURNS + 1)), u4(FINISHERS // WARP))
            fence_mbarrier_init()
        cuda.syncthreads()
        arrays = gamma, beta, v, running, z, y, shift, std, packets, batch_shift, batch_std
        rounds = i4(u4(i4(N * i4(ROUNDS)) - i4(cuda.blockIdx.x) + i4(cuda.gridDim.x) - i4(1)) // u4(cuda.gridDim.x))
        if t < i4(MULTIPLIERS):
            of_multipliers()
            multiply(memory, barriers, i4(t >> i4(5)), i4(t & i4(WARP - 1)), rounds)
        elif t < i4(MULTIPLIERS + FILLERS):
            of_fillers()
            bring(memory, x, u, barriers, i4(t - i4(MULTIPLIERS)), N)
        else:
            of_finishers()
            finish(memory, b, arrays, barriers, i4(t - i4(MULTIPLIERS + FILLERS)), N, eps, momentum)

    return winograd_onchip_kernel
