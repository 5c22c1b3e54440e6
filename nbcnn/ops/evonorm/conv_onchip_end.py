"""EvoNorm behind Winograd's convolution in one kernel: the end that its finishing warps have (nbcnn/ops/conv/onchip/finish.py).

An image's rounds are multiplied by different blocks at the same time. They tell each other what they have of its groups, and every block then
normalises its own pixels, which wait in shared memory while its next round is multiplied.
What an end writes:

    "s0"        y of EvoNorm-S0, z (the convolution's own output, which the gradients want), shift and std of groups
    "s0 infer"  y of EvoNorm-S0 alone
    "planes"    z, shift and std of planes: EvoNorm-B0 in training still wants the other images of the batch
    "b0 infer"  y of EvoNorm-B0 with the running variance
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, jit, u4
from nbcnn.ops.conv.onchip.finish import ROWS, End, placing, storing_pixels
from nbcnn.ops.conv.onchip.form import FILTERS, FINISHERS, QUADS, STRIPS, Form
from nbcnn.ops.evonorm.quads import MOMENTS, PIXELS, QUAD, spreading
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal
from nbcnn.ops.ptx.grid import receive_two, send
from nbcnn.ops.ptx.mbarrier import bar_sync
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.ptx.vector import load4, shared_load4
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.traffic import ceil_div

_WARPS = FINISHERS // WARP
_LARGEST = 3e38
"""Its reciprocal counts as 0."""


def spare_of(form: Form, group: int) -> int:
    """Floats of shared memory: warps' statistics of groups, their first values, their deviations, statistics of all rounds of an image."""
    return (MOMENTS * _WARPS + 2 + 2 * form.rounds) * (FILTERS // group)


@jit(device=True)
def finite(x):
    """x, but for ±∞ the largest number of this sign; NaN stays NaN."""
    return f4(_LARGEST) if x > f4(_LARGEST) else f4(-_LARGEST) if x < f4(-_LARGEST) else x


@jit(device=True)
def _add(sums, out, made):
    """Pixels of a tile to the sums of the thread's four channels: a lead (its first value), Σ (x − lead), Σ (x − lead)²."""
    for q in range(QUAD):
        sums[q] = out[q] if made == i4(0) else sums[q]
        for p in range(PIXELS):
            away = out[QUAD * p + q] - sums[q]
            sums[QUAD + q] += away
            sums[2 * QUAD + q] += away * away


@cache
def _telling(form: Form, group: int, name: str) -> Any:
    """Device function (memory, sums, made, arrays, tid, n, round, turn): what finishers have of the round's groups, to a packet of each."""
    GROUP, ROUNDS, SETS, WARPS, LEADING = group, form.rounds, FILTERS // group, _WARPS, name in ("s0", "planes")
    FIRST, OWN = form.at_spare, FINISHERS - SETS
    SQUARES, COUNTS, LEADS = FIRST + WARPS * SETS, FIRST + 2 * WARPS * SETS, FIRST + MOMENTS * WARPS * SETS
    spread, join = spreading(FILTERS, group, FINISHERS, FIRST), bar_sync(1, FINISHERS)

    @jit(device=True)
    def run(memory, sums, made, arrays, tid, n, round, turn):
        if LEADING and round == i4(0) and tid < i4(QUADS):
            # The image's first pixel, and of its channels those that begin a group.
            for q in range(QUAD):
                channel = i4(tid * i4(QUAD) + i4(q))
                set_ = i4(u4(channel) // u4(GROUP))
                if channel == set_ * i4(GROUP):
                    memory[u4(i4(LEADS) + set_)] = sums[q]
        spread(memory, sums, made, tid)
        join()
        # By the last threads, who never have more tiles than the others.
        if tid >= i4(OWN):
            own = i4(tid - i4(OWN))
            at = i4(own * i4(WARPS))
            lead, count, away, squares = memory[u4(i4(FIRST) + at)], memory[u4(i4(COUNTS) + at)], f4(0), memory[u4(i4(SQUARES) + at)]
            for warp in range(1, WARPS):
                pixels = memory[u4(i4(COUNTS + warp) + at)]
                count += pixels
                away += pixels * (memory[u4(i4(FIRST + warp) + at)] - lead)
            mean = lead + divide(away, count)
            off = lead - mean
            squares += memory[u4(i4(COUNTS) + at)] * off * off
            for warp in range(1, WARPS):
                off = memory[u4(i4(FIRST + warp) + at)] - mean
                squares += memory[u4(i4(SQUARES + warp) + at)] + memory[u4(i4(COUNTS + warp) + at)] * off * off
            send(arrays[8], i4(i4(n * i4(ROUNDS) + round) * i4(SETS) + own), turn, mean, squares)

    return run


@cache
def _hearing(form: Form, group: int, name: str) -> Any:
    """Device function (memory, arrays, tid, n, round, turn, eps): the image's groups, from packets of all its rounds.

    Deviations to shared memory; the block that has the image's first round stores shift and std in training.
    """
    ROUNDS, SETS, ALL, TILES, STORES = form.rounds, FILTERS // group, form.strips, form.across, name in ("s0", "planes")
    LEADS, OWN, PACKETS = form.at_spare + MOMENTS * _WARPS * SETS, FINISHERS - SETS, ROUNDS * SETS
    COUNT, TILE = f4(group * form.H * form.W), PIXELS * group
    SCALES, MEANS, SQUARES, TRIPS = LEADS + SETS, LEADS + 2 * SETS, LEADS + 2 * SETS + PACKETS, ceil_div(PACKETS, 2 * FINISHERS)
    join = bar_sync(1, FINISHERS)

    @jit(device=True)
    def pixels_of(round):
        """Of a group, in this round."""
        return f4(i4(min(i4(STRIPS), i4(i4(ALL) - round * i4(STRIPS))) * i4(TILES * TILE)))

    @jit(device=True)
    def all_rounds(memory, own):
        """(mean, Σ (x − mean)²) of a group, from those of its rounds."""
        lead, away, squares = memory[u4(i4(MEANS) + own)], f4(0), f4(0)
        for round in range(1, ROUNDS):
            away += pixels_of(i4(round)) * (memory[u4(i4(MEANS + round * SETS) + own)] - lead)
        mean = lead + away * (f4(1) / COUNT)
        for round in range(ROUNDS):
            off = memory[u4(i4(MEANS + round * SETS) + own)] - mean
            squares += memory[u4(i4(SQUARES + round * SETS) + own)] + pixels_of(i4(round)) * off * off
        return mean, squares

    @jit(device=True)
    def run(memory, arrays, tid, n, round, turn, eps):
        shift, std, packets = arrays[6], arrays[7], arrays[8]
        first = i4(n * i4(PACKETS))
        for trip in range(TRIPS):
            one = i4(tid + i4(trip * 2 * FINISHERS))
            if one < i4(PACKETS):
                # Beyond the last packet the same one twice.
                other = i4(one + i4(FINISHERS)) if one + i4(FINISHERS) < i4(PACKETS) else one
                mean, squares, other_mean, other_squares = receive_two(packets, i4(first + one), i4(first + other), turn)
                memory[u4(i4(MEANS) + one)], memory[u4(i4(SQUARES) + one)] = mean, squares
                memory[u4(i4(MEANS) + other)], memory[u4(i4(SQUARES) + other)] = other_mean, other_squares
        join()
        if tid >= i4(OWN):
            own = i4(tid - i4(OWN))
            mean, squares = all_rounds(memory, own)
            s = f4(math.sqrt(squares * f4(f4(1) / COUNT) + eps))
            memory[u4(i4(SCALES) + own)] = s
            if STORES and round == i4(0):
                to = u4(n * i4(SETS) + own)
                shift[to], std[to] = mean - memory[u4(i4(LEADS) + own)], s
        join()

    return run


@cache
def _normalising(form: Form, group: int, name: str) -> Any:
    """Device function (memory, arrays, tid, n, round, own, eps): y of the round's pixels that this thread made, and z in training, once products
    need not wait for it; own: γ, β, v of its channels, and the running variance.

    y = x/(inverse·(1 + 2^(slope·x))) + plus for S0, where one division makes σ and γ/s: an inverse that γ = 0 would make infinite ends at a
    number whose reciprocal is 0. Else y = inverse·x/max(least, slope·x + scale) + plus.
    """
    GROUP, S0, PASSES, FLOATS, POINT, FIRST = (
        group,
        name != "b0 infer",
        ceil_div(form.tiles, ROWS),
        QUAD * PIXELS,
        form.tiles * FILTERS,
        form.first_kept,
    )
    SCALES = form.at_spare + (MOMENTS * _WARPS + 1) * (FILTERS // group)
    place, store, STORES = placing(form), storing_pixels(form), name == "s0"

    @jit(device=True)
    def run(memory, arrays, tid, n, round, own, eps):
        held = cuda.local.array(FLOATS, f4)
        inverses = cuda.local.array(QUAD, f4)
        slopes = cuda.local.array(QUAD, f4)
        scales = cuda.local.array(QUAD, f4)
        leasts = cuda.local.array(QUAD, f4)
        quad, tile = i4((tid & i4(QUADS - 1)) * i4(QUAD)), i4(u4(tid) // u4(QUADS))
        gammas, plus, vs, of_batch = own
        for q in range(QUAD):
            scales[q] = memory[u4(i4(SCALES) + i4(u4(quad + i4(q)) // u4(GROUP)))]
            inverses[q] = finite(divide(scales[q], gammas[q])) if S0 else gammas[q]
            slopes[q] = vs[q] * f4(-LOG2E) if S0 else vs[q]
            leasts[q] = f4(0) if S0 else f4(math.sqrt(of_batch[q] + eps))
        step = i4(0)
        while step < i4(PASSES):
            there, at, to = place(n, round, tile, quad)
            if there:
                for p in range(PIXELS):
                    held[4 * p], held[4 * p + 1], held[4 * p + 2], held[4 * p + 3] = shared_load4(memory, i4(at + i4((FIRST + p) * POINT)))
                if STORES:
                    store(arrays[4], to, held)
                for i in range(FLOATS):
                    x, q = held[i], i % QUAD
                    if S0:
                        held[i] = x * reciprocal(exp2(slopes[q] * x) * inverses[q] + inverses[q]) + plus[q]
                    else:
                        held[i] = inverses[q] * (x * reciprocal(max(leasts[q], slopes[q] * x + scales[q]))) + plus[q]
                store(arrays[5], to, held)
            tile = i4(tile + i4(ROWS))
            step = i4(step + i4(1))

    return run


@cache
def norm_end(form: Form, group: int, name: str) -> End:
    """The end of this name for groups of `group` channels. `form.spare` is what `spare_of` says."""
    tell, hear, normalise = _telling(form, group, name), _hearing(form, group, name), _normalising(form, group, name)
    join = bar_sync(1, FINISHERS)
    NORMALISES, WITH_RUNNING = name != "planes", name == "b0 infer"

    @jit(device=True)
    def finish(memory, sums, made, arrays, tid, n, round, turn, eps):
        tell(memory, sums, made, arrays, tid, n, round, turn)
        if NORMALISES:
            # On their way while packets are.
            quad = i4((tid & i4(QUADS - 1)) * i4(QUAD))
            vs = load4(arrays[2], quad)
            own = load4(arrays[0], quad), load4(arrays[1], quad), vs, load4(arrays[3], quad) if WITH_RUNNING else vs
            hear(memory, arrays, tid, n, round, turn, eps)
            normalise(memory, arrays, tid, n, round, own, eps)
        else:
            if round == i4(0):
                hear(memory, arrays, tid, n, round, turn, eps)
            # Before the next round's statistics come to the place of these.
            join()

    return End(_add, finish, MOMENTS * QUAD, FILTERS // group, stores=not NORMALISES, keeps=NORMALISES)
