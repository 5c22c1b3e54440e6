"""EvoNorm behind Winograd's convolution in one kernel: the end that its finishing warps have (nbcnn/ops/conv/onchip/finish.py).

An image's rounds are multiplied by different blocks at the same time. They tell each other what they have of its groups, and every warp then
normalises its own pixels, which wait in its registers while its block's next round is multiplied.
What an end writes:

    "s0"        y of EvoNorm-S0, z (the convolution's own output, which the gradients want), shift and std of groups
    "s0 infer"  y of EvoNorm-S0 alone
    "planes"    z, shift and std of planes: EvoNorm-B0 in training still wants the other images of the batch, and y a launch of its own
    "b0"        all of EvoNorm-B0 in training (conv_onchip_batch.py)
    "b0 infer"  y of EvoNorm-B0 with the running variance
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, jit, u4
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.conv.onchip.finish import End, breathe, pixel_floats, placing, quad_of, storing_pixel, there
from nbcnn.ops.conv.onchip.form import FILTERS, FINISHERS, QUADS, STRIPS, Form
from nbcnn.ops.kernel.loops import ceil_div, unrolled
from nbcnn.ops.norms.quads import PIXELS, QUAD
from nbcnn.ops.ptx.fast import LOG2E, larger, reciprocal, root, squashed
from nbcnn.ops.ptx.grid import receive_two, send
from nbcnn.ops.ptx.mbarrier import bar_sync
from nbcnn.ops.ptx.shuffle import WARP, from_lane, sum_over
from nbcnn.ops.ptx.vector import shared_load4

_PARAMETERS = 4
"""γ, β, v, and the running variance or v again: every round's y wants them, at once."""
_TRAINING = "s0", "planes", "b0"
"""Ends that keep what the gradients want."""
_MOMENTS = 2
"""Of what a warp, then a round, has of a group: mean, Σ (x − mean)²."""


def spare_of(form: Form, group: int) -> int:
    """Floats of shared memory: parameters, warps' statistics of a round's groups, their first values in an image, statistics of all its rounds."""
    return _PARAMETERS * FILTERS + (_MOMENTS * STRIPS + 1 + _MOMENTS * form.rounds) * (FILTERS // group)


@jit(device=True)
def not_negative(x):
    """x, or 0 where rounding left less; NaN stays NaN, which `max` would make 0."""
    return f4(0) if x < f4(0) else x


def _at_moments(form: Form) -> int:
    """Where warps' statistics lie in shared memory, behind the parameters; behind them first values, then statistics of rounds."""
    return form.at_spare + _PARAMETERS * FILTERS


@cache
def beginning(form: Form, name: str) -> Any:
    """Device function (memory, arrays, tid): the channels' parameters to shared memory."""
    AT, LAST = form.at_spare, 3 if name == "b0 infer" else 2
    join = bar_sync(1, FINISHERS)

    @jit(device=True)
    def run(memory, arrays, tid):
        if tid < i4(FILTERS):
            memory[u4(i4(AT) + tid)], memory[u4(i4(AT + FILTERS) + tid)] = arrays[0][u4(tid)], arrays[1][u4(tid)]
            memory[u4(i4(AT + 2 * FILTERS) + tid)], memory[u4(i4(AT + 3 * FILTERS) + tid)] = arrays[2][u4(tid)], arrays[LAST][u4(tid)]
        join()

    return run


def _late(form: Form) -> int:
    """Of a thread's pixels, the first whose σ waits until statistics are on their way: those of the last two whole tiles, and the line."""
    return max(form.across // 2 - 2, 0) * PIXELS * QUAD


def _squashing(form: Form, first: int, floats: int) -> Any:
    """Device function (memory, x, tid): x·σ(v·x) in the place of the pixels x[first : first + floats]."""
    FIRST, FLOATS, SLOPES = first, floats, form.at_spare + 2 * FILTERS

    @jit(device=True)
    def run(memory, x, tid):
        slopes = shared_load4(memory, i4(i4(SLOPES) + quad_of(tid)))
        for i in range(FIRST, FIRST + FLOATS):
            x[i] = squashed(x[i], slopes[i % QUAD] * f4(-LOG2E))

    return run


def adding(form: Form, group: int, s0: bool, first: int, floats: int) -> Any:
    """Device function (memory, x, sums, tid): pixels to sums[part of the quad] = lead, Σ (x − lead), Σ (x − lead)²; S0's first ones are squashed.

    The lead is the first value of the group that the warp has, so that the sums of its lanes add up.
    """
    OWN, WIDE = min(group, QUAD), max(group // QUAD, 1)  # channels of a group that a thread has; lanes of a tile that share a group
    PARTS, BEGINS, FIRST, COUNT, SQUASHES = QUAD // OWN, first == 0, first, floats // QUAD, s0 and first < _late(form)
    squash = _squashing(form, first, floats)

    @jit(device=True)
    def run(memory, x, sums, tid):
        for part in range(PARTS):
            if BEGINS:
                sums[3 * part] = from_lane(x[part * OWN], i4(tid & i4(QUADS - WIDE)))
            for p in range(COUNT):
                for q in range(OWN):
                    off = x[FIRST + QUAD * p + part * OWN + q] - sums[3 * part]
                    sums[3 * part + 1] += off
                    sums[3 * part + 2] += off * off
        if SQUASHES:
            squash(memory, x, tid)

    return run


@cache
def telling(form: Form, group: int, name: str, also: Any = None) -> Any:
    """Device function (memory, sums, arrays, tid, n, round, turn, last, N): what finishers have of the round's groups, to a packet of each.

    also: device function (memory, group, mean, squares, arrays, item, turn, last, N) that has it before.
    """
    ROUNDS, SETS, FIRST, LEADING, FULL = form.rounds, FILTERS // group, _at_moments(form), name in _TRAINING, form.strips % STRIPS == 0
    OWN, ALL, LEADS, GROUP = FINISHERS - SETS, SETS * STRIPS, FIRST + _MOMENTS * STRIPS * SETS, group
    STRIPS_THERE, PIXELS_OF_STRIP, SHARE = form.strips, f4(form.across * PIXELS * group), f4(1 / (form.across * PIXELS * group))
    PARTS, WIDE = max(QUAD // group, 1), max(group // QUAD, 1)
    across, join, ALSO, more = sum_over(WARP - QUADS | WIDE - 1), bar_sync(1, FINISHERS), also is not None, also

    @jit(device=True)
    def run(memory, sums, arrays, tid, n, round, turn, last, N):
        lane, warp = i4(tid & i4(WARP - 1)), i4(u4(tid) // u4(WARP))
        for part in range(PARTS):
            lead, away, squares = sums[3 * part], across(sums[3 * part + 1]), across(sums[3 * part + 2])
            if lane < i4(QUADS) and lane & i4(WIDE - 1) == i4(0):
                set_ = i4(i4(u4(lane * i4(QUAD)) // u4(GROUP)) + i4(part))
                at = u4(i4(FIRST) + i4(set_ * i4(STRIPS)) + warp)
                memory[at], memory[u4(u4(ALL) + at)] = lead + away * SHARE, not_negative(squares - away * (away * SHARE))
                if LEADING and round == i4(0) and warp == i4(0):
                    memory[u4(i4(LEADS) + set_)] = lead
        join()
        if tid >= i4(OWN):
            own = i4(tid - i4(OWN))
            at = i4(i4(FIRST) + own * i4(STRIPS))
            means, squares = shared_load4(memory, at), shared_load4(memory, i4(at + i4(ALL)))
            # All strips that are there have as many pixels; the first one always is.
            strips = i4(STRIPS) if FULL else min(i4(STRIPS), i4(i4(STRIPS_THERE) - round * i4(STRIPS)))
            away, within, between = f4(0), squares[0], f4(0)
            for other in range(1, STRIPS):
                off = means[other] - means[0] if i4(other) < strips else f4(0)
                away += off
                between += off * off
                within += squares[other] if i4(other) < strips else f4(0)
            mean = away * (f4(1 / STRIPS) if FULL else divide(f4(1), f4(strips)))
            all_squares = within + PIXELS_OF_STRIP * not_negative(between - away * mean)
            item = i4(n * i4(ROUNDS) + round)
            if ALSO:
                more(memory, own, means[0] + mean, all_squares, arrays, item, turn, last, N)
            send(arrays[8], i4(item * i4(SETS) + own), turn, means[0] + mean, all_squares)

    return run


@cache
def hearing(form: Form, group: int, name: str) -> Any:
    """Device function (memory, arrays, scales, tid, n, round, turn, eps): the image's deviations, from packets of all its rounds.

    Finishers share the packets; then every warp makes all deviations, a lane those of one group or two. scales: of the thread's four channels, or
    their reciprocals for S0. The block that has the image's first round stores shift and std in training.
    """
    ROUNDS, SETS, STORES, INVERSE = form.rounds, FILTERS // group, name in _TRAINING, name in ("s0", "s0 infer")
    MINE, LEADS, GROUP, PACKETS = max(SETS // WARP, 1), _at_moments(form) + _MOMENTS * STRIPS * SETS, group, form.rounds * SETS
    MEANS, SQUARES, TRIPS = LEADS + SETS, LEADS + SETS + PACKETS, ceil_div(PACKETS, 2 * FINISHERS)
    # Pixels of a group, in an image and in its rounds, all but the last of which are full.
    FULL = form.across * PIXELS * group * STRIPS
    LAST, COUNT = FULL * form.strips // STRIPS - FULL * (ROUNDS - 1), FULL * form.strips // STRIPS
    join = bar_sync(1, FINISHERS)

    @jit(device=True)
    def run(memory, arrays, scales, tid, n, round, turn, eps):
        made = cuda.local.array(MINE, f4)
        packets, first = arrays[8], i4(n * i4(PACKETS))
        for trip in range(TRIPS):
            one = i4(tid + i4(trip * 2 * FINISHERS))
            if one < i4(PACKETS):
                # Beyond the last packet the same one twice.
                other = i4(one + i4(FINISHERS)) if one + i4(FINISHERS) < i4(PACKETS) else one
                mean, squares, other_mean, other_squares = receive_two(packets, i4(first + one), i4(first + other), turn)
                memory[u4(i4(MEANS) + one)], memory[u4(i4(SQUARES) + one)] = mean, squares
                memory[u4(i4(MEANS) + other)], memory[u4(i4(SQUARES) + other)] = other_mean, other_squares
        join()
        lane = i4(tid & i4(WARP - 1))
        own = i4(lane * i4(MINE)) if SETS >= WARP else i4(lane & i4(SETS - 1))
        for mine in range(MINE):
            # Distances from the first round's mean: Σ pixels·distance, Σ squares + pixels·distance².
            lead, away, squares = memory[u4(i4(MEANS + mine) + own)], f4(0), memory[u4(i4(SQUARES + mine) + own)]
            for other in range(1, ROUNDS):
                off = memory[u4(i4(MEANS + mine + other * SETS) + own)] - lead
                weighed = f4(FULL if other < ROUNDS - 1 else LAST) * off
                away += weighed
                squares += weighed * off + memory[u4(i4(SQUARES + mine + other * SETS) + own)]
            mean = away * f4(1 / COUNT)
            s = root(not_negative(squares - away * mean) * f4(1 / COUNT) + eps)
            if STORES and round == i4(0) and tid < i4(min(SETS, WARP)):
                to = u4(n * i4(SETS) + own + i4(mine))
                arrays[6][to], arrays[7][to] = lead - memory[u4(i4(LEADS + mine) + own)] + mean, s
            made[mine] = reciprocal(s) if INVERSE else s
        quad = quad_of(tid)
        for q in range(QUAD):
            # Neighbouring groups lie in neighbouring lanes, or two in one.
            scales[q] = from_lane(made[q % MINE], i4(u4(quad + i4(q)) // u4(GROUP * MINE)))

    return run


def scaling(form: Form, p: int, b0: bool) -> Any:
    """Device function (x, y, to, line, factors, plus, slopes, scales, leasts, last): y of the thread's pixel p."""
    store, B0, P = storing_pixel(form, p), b0, p

    @jit(device=True)
    def run(x, y, to, line, factors, plus, slopes, scales, leasts, last):
        for q in range(QUAD):
            i = QUAD * P + q
            if B0:
                x[i] = x[i] * reciprocal(larger(leasts[q], slopes[q] * x[i] + scales[q]))
            x[i] = factors[q] * x[i] + plus[q]
        store(y, x, to, line)
        breathe(last)

    return run


@cache
def _normalising(form: Form, group: int, name: str) -> Any:
    """Device function (memory, x, arrays, tid, n, round, turn, last, N, eps): y of the thread's pixels.

    S0: x·σ(v·x) times γ/s, plus β. B0 in inference: x·γ/max(√(running + eps), v·x + s) + β.
    """
    FLOATS, B0, AT = pixel_floats(form), name == "b0 infer", form.at_spare
    hear, place, inside = hearing(form, group, name), placing(form), there(form)
    scale = unrolled([scaling(form, p, B0) for p in range(FLOATS // QUAD)])
    squash = _squashing(form, _late(form), FLOATS - _late(form))

    @jit(device=True)
    def run(memory, x, arrays, tid, n, round, turn, last, N, eps):
        scales = cuda.local.array(QUAD, f4)
        factors = cuda.local.array(QUAD, f4)
        leasts = cuda.local.array(QUAD, f4)
        if not B0 and i4(0) < N:  # always so, but a condition keeps the compiler from putting it before the packets
            squash(memory, x, tid)
        hear(memory, arrays, scales, tid, n, round, turn, eps)
        at = i4(i4(AT) + quad_of(tid))
        gammas, plus = shared_load4(memory, at), shared_load4(memory, i4(at + i4(FILTERS)))
        slopes, running = shared_load4(memory, i4(at + i4(2 * FILTERS))), shared_load4(memory, i4(at + i4(3 * FILTERS)))
        for q in range(QUAD):
            factors[q] = gammas[q] if B0 else gammas[q] * scales[q]
            leasts[q] = root(running[q] + eps) if B0 else f4(0)
        to, line = place(n, round, tid)
        if inside(round, tid):
            scale(x, arrays[5], to, line, factors, plus, slopes, scales, leasts, last)

    return run


@cache
def _planes(form: Form) -> Any:
    """As `_normalising`, of B0 in training: by the image's first round the planes' shift and std."""
    hear, join = hearing(form, 1, "planes"), bar_sync(1, FINISHERS)

    @jit(device=True)
    def run(memory, x, arrays, tid, n, round, turn, last, N, eps):
        scales = cuda.local.array(QUAD, f4)
        if round == i4(0):
            hear(memory, arrays, scales, tid, n, round, turn, eps)
        # Before the next round's statistics come to the place of these. Where all rounds hear, none goes on before packets made of these have come.
        join()

    return run


@cache
def norm_end(form: Form, group: int, name: str) -> End:
    """The end of this name for groups of `group` channels. `form.spare` is what `spare_of` says."""
    tell, behind = telling(form, group, name), _planes(form) if name == "planes" else _normalising(form, group, name)

    @jit(device=True)
    def finish(memory, x, sums, arrays, tid, n, round, turn, last, N, eps, momentum):
        tell(memory, sums, arrays, tid, n, round, turn, last, N)
        behind(memory, x, arrays, tid, n, round, turn, last, N, eps)

    add = partial(adding, form, group, name in ("s0", "s0 infer"))
    return End(beginning(form, name), add, finish, 3 * max(QUAD // group, 1), not name.endswith("infer"), FILTERS // group)
