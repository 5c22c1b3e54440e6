"""EvoNorm-B0 in training behind Winograd's convolution, all in one kernel: the batch's statistics, and y when they are there.

Every block adds its rounds' statistics up as they come and tells them when its last round is made; a block for each channel adds up what all blocks
have and tells the channel's deviation. y of the last round leaves from registers; pixels of the rounds before are read back (from the second-level
cache while the batch fits there), by the threads that wrote them. Where a block has many rounds, y in a launch of its own is faster (conv_onchip.py).

Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, jit, u4
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.conv.onchip.finish import End, pixel_floats, placing, quad_of, storing_pixel
from nbcnn.ops.conv.onchip.form import FILTERS, FINISHERS, QUADS, STRIPS, Form
from nbcnn.ops.evonorm.conv_onchip_end import adding, beginning, hearing, not_negative, scaling, spare_of, telling
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.norms.quads import PIXELS, QUAD
from nbcnn.ops.ptx.fast import reciprocal, root
from nbcnn.ops.ptx.grid import receive, receive_two, send
from nbcnn.ops.ptx.mbarrier import bar_sync
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere
from nbcnn.ops.ptx.vector import shared_load4, shared_store4

_BLOCK = 3
"""What a block has of a channel: mean, Σ (x − mean)², rounds so far."""


def batch_spare_of(form: Form, blocks: int, rounds: int) -> int:
    """Floats of shared memory: those of `spare_of`, the block's statistics, the batch's deviations, all blocks' statistics of a channel, and the
    planes' deviations in all but the last of a block's `rounds`. Of a channel a block has two floats; twice as much keeps what follows aligned.
    """
    return spare_of(form, 1) + (_BLOCK + 1) * FILTERS + QUAD * blocks + (rounds - 1) * FILTERS


def batch_packets(blocks: int) -> int:
    """Packets of a launch beside those of rounds: of all blocks, first values, deviations; of every channel."""
    return (blocks + 2) * FILTERS


@cache
def _adding_up(form: Form) -> Any:
    """Device function (memory, own, mean, squares, arrays, item, turn, last, N): a round's statistics of channel `own` to the block's, which are
    sent in its last round. The block that has the batch's first pixel tells this.
    """
    AT, LEADS, ROUNDS, PIXELS_OF_ROUND = form.at_spare + spare_of(form, 1), _leads(form), form.rounds, f4(form.tiles * PIXELS)

    @jit(device=True)
    def run(memory, own, mean, squares, arrays, item, turn, last, N):
        at = u4(i4(AT) + own)
        rounds = memory[u4(at + u4(2 * FILTERS))]
        share = reciprocal(rounds + f4(1))
        off = mean - memory[at]
        mean = memory[at] + off * share
        squares = memory[u4(at + u4(FILTERS))] + squares + off * (off * share * (PIXELS_OF_ROUND * rounds))
        memory[at], memory[u4(at + u4(FILTERS))], memory[u4(at + u4(2 * FILTERS))] = mean, squares, rounds + f4(1)
        to = i4(i4(N * i4(ROUNDS)) * i4(FILTERS) + own)
        if last != i4(0):
            send(arrays[8], i4(to + i4(cuda.blockIdx.x) * i4(FILTERS)), turn, mean, squares)
        if item == i4(0):
            send(arrays[8], i4(to + i4(cuda.gridDim.x) * i4(FILTERS)), turn, memory[u4(i4(LEADS) + own)], f4(0))

    return run


def _leads(form: Form) -> int:
    """Where the first values of an image's planes lie in shared memory (`telling`)."""
    return form.at_spare + spare_of(form, 1) - FILTERS - 2 * form.rounds * FILTERS


@cache
def _channels(form: Form) -> Any:
    """Device function (memory, arrays, tid, turn, N, eps, momentum): the batch's statistics of the block's channels, from all blocks' packets."""
    ROUNDS, STATISTICS = form.rounds, form.at_spare + spare_of(form, 1) + (_BLOCK + 1) * FILTERS
    PIXELS_OF_ROUND, join = f4(form.tiles * PIXELS), bar_sync(1, FINISHERS)

    @jit(device=True)
    def run(memory, arrays, tid, turn, N, eps, momentum):
        packets, grid, rounds = arrays[8], i4(cuda.gridDim.x), i4(N * i4(ROUNDS))
        c = i4(cuda.blockIdx.x)
        while c < i4(FILTERS):
            one = tid
            while one < grid:
                # Beyond the last block the same one twice.
                other = i4(one + i4(FINISHERS)) if one + i4(FINISHERS) < grid else one
                at, at_other = i4(i4(rounds + one) * i4(FILTERS) + c), i4(i4(rounds + other) * i4(FILTERS) + c)
                mean, squares, other_mean, other_squares = receive_two(packets, at, at_other, turn)
                memory[u4(i4(STATISTICS) + one)], memory[u4(i4(STATISTICS) + other)] = mean, other_mean
                memory[u4(i4(STATISTICS) + i4(grid + one))], memory[u4(i4(STATISTICS) + i4(grid + other))] = squares, other_squares
                one = i4(one + i4(2 * FINISHERS))
            join()
            if tid < i4(WARP):
                first = receive(packets, i4(i4(rounds + grid) * i4(FILTERS) + c), turn)[0]
                # Distances from the first block's mean: Σ pixels·distance, Σ squares + pixels·distance².
                lead, away, squares, block = memory[u4(STATISTICS)], f4(0), f4(0), tid
                while block < grid:
                    its = f4(i4(u4(i4(rounds - block) + i4(grid - i4(1))) // u4(grid))) * PIXELS_OF_ROUND
                    off = memory[u4(i4(STATISTICS) + block)] - lead
                    away += its * off
                    squares += its * off * off + memory[u4(i4(STATISTICS) + i4(grid + block))]
                    block = i4(block + i4(WARP))
                count = f4(rounds) * PIXELS_OF_ROUND
                away, squares = warp_sum_everywhere(away), warp_sum_everywhere(squares)
                mean = divide(away, count)
                variance = divide(not_negative(squares - away * mean), count)
                if tid == i4(0):
                    deviation = root(variance + eps)
                    send(packets, i4(i4(rounds + grid + i4(1)) * i4(FILTERS) + c), turn, deviation, f4(0))
                    arrays[9][u4(c)], arrays[10][u4(c)] = lead - first + mean, deviation
                    unbiased = variance * divide(count, max(count - f4(1), f4(1)))
                    arrays[3][u4(c)] = (f4(1) - momentum) * arrays[3][u4(c)] + momentum * unbiased
            join()
            c = i4(c + grid)

    return run


@cache
def _normalising(form: Form) -> Any:
    """Device function (memory, x, scales, arrays, tid, item, turn, N): y of all of the block's rounds, from the last one (x, `scales`) back."""
    ROUNDS, LEASTS, PLACES = form.rounds, form.at_spare + spare_of(form, 1) + _BLOCK * FILTERS, range(pixel_floats(form) // QUAD)
    AT, DEVIATIONS, join, place = form.at_spare, LEASTS + FILTERS, bar_sync(1, FINISHERS), placing(form)
    load, scale = unrolled([storing_pixel(form, p, loads=True) for p in PLACES]), unrolled([scaling(form, p, True) for p in PLACES])

    @jit(device=True)
    def run(memory, x, scales, arrays, tid, item, turn, N):
        grid, rounds, quad = i4(cuda.gridDim.x), i4(N * i4(ROUNDS)), quad_of(tid)
        if tid < i4(FILTERS):
            memory[u4(i4(LEASTS) + tid)] = receive(arrays[8], i4(i4(rounds + grid + i4(1)) * i4(FILTERS) + tid), turn)[0]
        join()
        leasts, at = shared_load4(memory, i4(i4(LEASTS) + quad)), i4(i4(AT) + quad)
        gammas, plus, slopes = shared_load4(memory, at), shared_load4(memory, i4(at + i4(FILTERS))), shared_load4(memory, i4(at + i4(2 * FILTERS)))
        deviations = i4(i4(DEVIATIONS) + grid * i4(QUAD) + quad + i4(u4(item) // u4(grid)) * i4(FILTERS))
        while item >= i4(0):
            n = i4(u4(item) // u4(ROUNDS))
            to, line = place(n, i4(item - n * i4(ROUNDS)), tid)
            scale(x, arrays[5], to, line, gammas, plus, slopes, scales, leasts, i4(1))
            item, deviations = i4(item - grid), i4(deviations - i4(FILTERS))
            if item >= i4(0):
                n = i4(u4(item) // u4(ROUNDS))
                to, line = place(n, i4(item - n * i4(ROUNDS)), tid)
                load(arrays[4], x, to, line)
                scales[0], scales[1], scales[2], scales[3] = shared_load4(memory, deviations)

    return run


@cache
def batch_end(form: Form) -> End:
    """z, y, and every statistic of EvoNorm-B0 in training. `form.spare` is what `batch_spare_of` says; rounds are full."""
    assert form.strips % STRIPS == 0
    ROUNDS, DEVIATIONS, BLOCK = form.rounds, form.at_spare + spare_of(form, 1) + (_BLOCK + 1) * FILTERS, form.at_spare + spare_of(form, 1)
    begin_channels, tell, hear = beginning(form, "b0"), telling(form, 1, "b0", _adding_up(form)), hearing(form, 1, "b0")
    channels, normalise = _channels(form), _normalising(form)

    @jit(device=True)
    def begin(memory, arrays, tid):
        for i in range(_BLOCK):
            if tid < i4(FILTERS):
                memory[u4(i4(BLOCK + i * FILTERS) + tid)] = f4(0)
        begin_channels(memory, arrays, tid)

    @jit(device=True)
    def finish(memory, x, sums, arrays, tid, n, round, turn, last, N, eps, momentum):
        scales = cuda.local.array(QUAD, f4)
        item, grid = i4(n * i4(ROUNDS) + round), i4(cuda.gridDim.x)
        tell(memory, sums, arrays, tid, n, round, turn, last, N)
        if last != i4(0):
            channels(memory, arrays, tid, turn, N, eps, momentum)
        hear(memory, arrays, scales, tid, n, round, turn, eps)
        if last != i4(0):
            normalise(memory, x, scales, arrays, tid, item, turn, N)
        elif tid < i4(QUADS):
            at = i4(i4(DEVIATIONS) + grid * i4(QUAD) + quad_of(tid) + i4(u4(item) // u4(grid)) * i4(FILTERS))
            shared_store4(memory, at, scales[0], scales[1], scales[2], scales[3])

    return End(begin, lambda first, floats: adding(form, 1, False, first, floats), finish, 3 * QUAD, True, FILTERS)
