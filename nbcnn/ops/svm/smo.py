"""The dual problems of a support vector machine, all pairs of classes at once: one block per pair.

A pair has samples of class a (y = +1) and of class b (y = −1), a coefficient 0 ≤ α ≤ C each, Σ yα = 0, and minimises
½ Σ yα·K·yα − Σ α. Its gradient, times y, is f = K·(yα) − y. A step takes two samples:

    i = argmax −f over those whose yα may grow    (up:  y = +1 and α < C, or y = −1 and α > 0)
    j = argmax (f_j − f_i)² / (K_ii + K_jj − 2 K_ij) over those whose yα may shrink (low) and f_j > f_i
    yα_i += t, yα_j −= t, f += t·(K_i − K_j)

and the pair is solved when no f of low is more than `tolerance` above one of up. The kernel has K_ii = 1.

f is a float32 with a second one for what was rounded off, so 10⁵ steps add no error; α is a float64. `refresh` computes f anew from α in
float64, which also judges the result.

    smo        K, segments, α, f -> α, f, steps taken and gap of every pair, after at most `budget` steps
    refresh    K, segments, α -> f

Arrays of a pair are in its own order: the samples of a, room up to a multiple of four, those of b.

Source: R.-E. Fan, P.-H. Chen, C.-J. Lin, "Working set selection using second order information for training support vector machines",
JMLR 6 (2005), the choice of libsvm; J. Platt, "Sequential minimal optimization" (1998).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, types
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import ceil_div, unrolled
from nbcnn.ops.ptx.cvt import unknown
from nbcnn.ops.ptx.shuffle import WARP, warp_argmax, warp_sum_everywhere
from nbcnn.ops.ptx.vector import load4_if

f8: Any = types.float64
SEGMENTS = 5
"""int32 of a pair's description: first row of a in its matrix, samples of a, first row of b, samples of b, pitch of the matrix."""
SMALLEST = 1e-12
"""The curvature that stands for 0 where two samples are alike (libsvm's TAU)."""
LEAST = -3.0e38
ROWS = 4
"""Rows of K that a warp of `refresh` multiplies at once."""
WARPS = 8
_FILE = 65536


@dataclass(frozen=True)
class Pair:
    """Where a pair's kernel values are: rows and columns first_a … and first_b … of a matrix of `pitch` floats per row, `offset` floats into an
    array.

    Both first ones are multiples of 4, and so is the pitch; behind the last sample of a
    class the matrix has rows and columns up to the next multiple of 4.
    """

    first_a: int
    count_a: int
    first_b: int
    count_b: int
    pitch: int
    offset: int = 0

    @property
    def places(self) -> int:
        """Length of the pair's arrays."""
        return 4 * (ceil_div(self.count_a, 4) + ceil_div(self.count_b, 4))

    def order(self) -> np.ndarray:
        """Row of the matrix of every place of the pair's arrays (int64), and −1 for room."""
        found = np.full(self.places, -1)
        half = 4 * ceil_div(self.count_a, 4)
        found[: self.count_a] = np.arange(self.first_a, self.first_a + self.count_a)
        found[half : half + self.count_b] = np.arange(self.first_b, self.first_b + self.count_b)
        return found

    def signs(self) -> np.ndarray:
        """y of every place, 0 for room; float64."""
        half = 4 * ceil_div(self.count_a, 4)
        y = np.where(np.arange(self.places) < half, 1.0, -1.0)
        y[self.order() < 0] = 0
        return y


def smo(K: np.ndarray, y: np.ndarray, C: float, tolerance: float, alpha: np.ndarray, f: np.ndarray, budget: int) -> tuple[int, float]:
    """Steps taken and gap left of one pair, in float64: K (m, m), y ±1 (m,); `alpha` and `f` (m,) are updated in place."""
    diagonal = K.diagonal()
    for step in range(budget + 1):
        up, low = np.where(y > 0, alpha < C, alpha > 0), np.where(y > 0, alpha > 0, alpha < C)
        i = int(np.where(up, -f, -np.inf).argmax())
        gap = float(np.where(low, f, -np.inf).max() - f[i])
        if gap < tolerance or step == budget:
            return step, gap
        rise = f - f[i]
        curvature = np.maximum(diagonal[i] + diagonal - 2 * K[i], SMALLEST)
        j = int(np.where(low & (rise > 0), rise**2 / curvature, -1).argmax())
        room_i, room_j = (C - alpha[i] if y[i] > 0 else alpha[i]), (alpha[j] if y[j] > 0 else C - alpha[j])
        t = min(rise[j] / curvature[j], room_i, room_j)
        alpha[i] = (C if y[i] > 0 else 0.0) if t == room_i else alpha[i] + y[i] * t
        alpha[j] = (0.0 if y[j] > 0 else C) if t == room_j else alpha[j] - y[j] * t
        f += t * (K[i] - K[j])
    raise AssertionError("the loop returns")


def refresh(K: np.ndarray, y: np.ndarray, alpha: np.ndarray, f: np.ndarray) -> None:
    """f = K·(yα) − y of one pair, float64."""
    np.subtract(K @ (y * alpha), y, out=f)


def _each(quads: int, unroll: bool) -> Callable[[Any], Any]:
    """From a device function (s, …) one that calls it for all s < quads; if unrolled, a thread's arrays are registers."""

    def several(body: Any) -> Any:
        def one(s: int) -> Any:
            AT = s

            @jit(device=True)
            def run(*args):
                body(AT, *args)

            return run

        if unroll:
            return unrolled([one(s) for s in range(quads)])

        @jit(device=True)
        def all_of_them(*args):
            for s in range(quads):
                body(s, *args)

        return all_of_them

    return several


@jit(device=True)
def _may_rise(positive, a, C):
    return a < C if positive else a > f8(0)


@jit(device=True)
def _may_fall(positive, a, C):
    return a > f8(0) if positive else a < C


@jit(device=True)
def _marks(positive, a, C):
    """1 if a sample with this α is in up, plus 16 if it is in low."""
    return (1 if _may_rise(positive, a, C) else 0) + (16 if _may_fall(positive, a, C) else 0)


@jit(device=True)
def places_of(segments, pair):
    """(first_a, count_a, shift_b, count_b, half, places) of a pair: place k is row k + first_a of the matrix in class a, which has the places before
    `half`, and k + shift_b in class b."""
    first_a, count_a = segments[pair * SEGMENTS], segments[pair * SEGMENTS + 1]
    first_b, count_b = segments[pair * SEGMENTS + 2], segments[pair * SEGMENTS + 3]
    half = (count_a + 3) // 4 * 4
    return first_a, count_a, first_b - half, count_b, half, half + (count_b + 3) // 4 * 4


@functools.cache
def smo_kernel_for(threads: int, quads: int) -> Any:
    THREADS, QUADS, ELEMENTS, BLOCK_WARPS = threads, quads, 4 * quads, threads // WARP
    each = _each(quads, in_registers(threads, quads))

    @each
    @jit(device=True)
    def begin(s, f, lost, marks, alpha, high, rest, first, half, ends, C):
        """A thread's f, α's marks: of four neighbouring samples eight bits, those in up below those in low."""
        g = cuda.threadIdx.x + s * THREADS
        mark = 0
        for e in range(4):
            k = 4 * g + e
            f[4 * s + e], lost[4 * s + e] = 0.0, 0.0
            positive = k < half
            if k < ends[0] or (k >= half and k < ends[1]):
                f[4 * s + e], lost[4 * s + e] = high[first + k], rest[first + k]
                mark |= _marks(positive, alpha[first + k], C) << e
        marks[s] = mark

    @each
    @jit(device=True)
    def keep(s, f, lost, high, rest, first, places):
        g = cuda.threadIdx.x + s * THREADS
        if 4 * g < places:
            for e in range(4):
                high[first + 4 * g + e], rest[first + 4 * g + e] = f[4 * s + e], lost[4 * s + e]

    @each
    @jit(device=True)
    def fetch(s, to, K, row, half, places, first_a, shift_b):
        # Made here each time: kept from step to step, the columns would take more registers than there are.
        k = unknown(4 * cuda.threadIdx.x) + 4 * THREADS * s
        column = k + (first_a if k < half else shift_b)
        a, b, c, d = load4_if(K, row + i8(column), k < places)
        to[4 * s], to[4 * s + 1], to[4 * s + 2], to[4 * s + 3] = a, b, c, d

    @each
    @jit(device=True)
    def extremes(s, f, marks, best, at):
        """best[0]: the largest −f of up, at[0] which of the thread's samples it is; best[1]: the largest f of low."""
        for e in range(4):
            # `&`, not `and`: a branch for each of twenty samples took half of a step's instructions.
            value = f[4 * s + e]
            higher = (marks[s] >> e & 1 != 0) & (-value > best[0])
            best[0] = -value if higher else best[0]
            at[0] = 4 * s + e if higher else at[0]
            best[1] = value if (marks[s] >> e & 16 != 0) & (value > best[1]) else best[1]

    @each
    @jit(device=True)
    def gains(s, f, marks, near, best, at, up):
        """best: rise and curvature of the sample of the largest gain; fractions are compared without dividing."""
        for e in range(4):
            rise, curvature = up + f[4 * s + e], max(2.0 - 2.0 * near[4 * s + e], SMALLEST)
            more = (marks[s] >> e & 16 != 0) & (rise > 0.0) & (rise * rise * best[1] > best[0] * best[0] * curvature)
            best[0] = rise if more else best[0]
            best[1] = curvature if more else best[1]
            at[0] = 4 * s + e if more else at[0]

    @each
    @jit(device=True)
    def update(s, f, lost, marks, near, far, step, i, marks_i, j, marks_j):
        g = cuda.threadIdx.x + s * THREADS
        for e in range(4):
            change = step * (near[4 * s + e] - far[4 * s + e]) - lost[4 * s + e]
            summed = f[4 * s + e] + change
            lost[4 * s + e] = (summed - f[4 * s + e]) - change
            f[4 * s + e] = summed
        if g == i >> 2:
            marks[s] = marks[s] & ~(17 << (i & 3)) | marks_i << (i & 3)
        if g == j >> 2:
            marks[s] = marks[s] & ~(17 << (j & 3)) | marks_j << (j & 3)

    @jit(device=True)
    def place_of(sample):
        """Place of a thread's sample; not kept for each of them, which would take as many registers."""
        return 4 * (cuda.threadIdx.x + (sample >> 2) * THREADS) + (sample & 3)

    @jit(launch_bounds=(threads, 1))
    def smo_kernel(K, offsets, segments, alpha, high, rest, steps, gaps, stride, C, tolerance, budget):
        """α and f of every pair, after at most `budget` steps or when its gap is below `tolerance`.

        grid    one block per pair; block `threads`.
        owns    one block per pair; a thread `quads` groups of four neighbouring samples, their f and marks in registers.
        shared  the best of every warp, 1 KiB.
        moves   a step 8·m bytes of K for m samples, two rows one after the other: what it takes is their latency, twice.
        source  Fan, Chen & Lin 2005; W. Kahan, "Further remarks on reducing truncation errors" (1965), for the sums.
        """
        # One a line: the simulator knows shared arrays by their lines.
        values = cuda.shared.array(WARP, f4)
        lows = cuda.shared.array(WARP, f4)
        scores = cuda.shared.array(WARP, f4)
        rises = cuda.shared.array(WARP, f4)
        curvatures = cuda.shared.array(WARP, f4)
        places_i = cuda.shared.array(WARP, i4)
        places_j = cuda.shared.array(WARP, i4)
        f, lost = cuda.local.array(ELEMENTS, f4), cuda.local.array(ELEMENTS, f4)
        near, far = cuda.local.array(ELEMENTS, f4), cuda.local.array(ELEMENTS, f4)
        marks, ends = cuda.local.array(QUADS, i4), cuda.local.array(2, i4)
        best, at = cuda.local.array(2, f4), cuda.local.array(1, i4)
        # What a step gives to its two samples. Thread 0 brings it to α in the next one, when no thread reads α of this step any more.
        given = cuda.shared.array(2, f8)

        tid = cuda.threadIdx.x
        lane, warp, pair = tid & 31, tid >> 5, cuda.blockIdx.x
        first_a, count_a, shift_b, count_b, half, places = places_of(segments, pair)
        pitch, matrix, first = segments[pair * SEGMENTS + 4], offsets[pair], i8(pair) * stride
        ends[0], ends[1] = count_a, half + count_b
        begin(f, lost, marks, alpha, high, rest, first, half, ends, C)

        step, gap, last_i, last_j, going = 0, 0.0, -1, -1, True
        while going:
            best[0], best[1], at[0] = LEAST, LEAST, 0
            extremes(f, marks, best, at)
            value, place = warp_argmax(best[0], place_of(at[0]))
            low, _ = warp_argmax(best[1], 0)
            if lane == 0:
                values[warp], places_i[warp], lows[warp] = value, place, low
            cuda.syncthreads()
            inside = lane < BLOCK_WARPS
            up, i = warp_argmax(values[lane] if inside else LEAST, places_i[lane] if inside else 0)
            low, _ = warp_argmax(lows[lane] if inside else LEAST, 0)
            gap = up + low
            if tid == 0 and last_i >= 0:
                alpha[first + last_i] = given[0]
                alpha[first + last_j] = given[1]
            if gap < tolerance or step == budget:
                going = False
            else:
                old_i = given[0] if i == last_i else given[1] if i == last_j else alpha[first + i]
                fetch(near, K, matrix + i8(i + (first_a if i < half else shift_b)) * pitch, half, places, first_a, shift_b)
                best[0], best[1], at[0] = 0.0, 1.0, -1
                gains(f, marks, near, best, at, up)
                mine = place_of(at[0]) if at[0] >= 0 else -1
                score, place = warp_argmax(best[0] * (best[0] / best[1]), mine)
                if mine == place and place >= 0:
                    scores[warp], places_j[warp], rises[warp], curvatures[warp] = score, place, best[0], best[1]
                elif lane == 0 and place < 0:
                    scores[warp], places_j[warp], rises[warp], curvatures[warp] = 0.0, -1, 0.0, 1.0
                cuda.syncthreads()
                score, of = warp_argmax(scores[lane] if inside and places_j[lane] >= 0 else LEAST, lane)
                j = places_j[of]
                if j < 0:
                    # No sample is above another although the gap says so: a kernel value is no number.
                    gap, going = -2.0 * LEAST, False
                else:
                    old_j = alpha[first + j]
                    fetch(far, K, matrix + i8(j + (first_a if j < half else shift_b)) * pitch, half, places, first_a, shift_b)
                    room_i, room_j = (C - old_i if i < half else old_i), (old_j if j < half else C - old_j)
                    t = f8(rises[of] / curvatures[of])
                    t = min(t, min(room_i, room_j))
                    new_i = old_i + t if i < half else old_i - t
                    new_j = old_j - t if j < half else old_j + t
                    if t == room_i:
                        new_i = C if i < half else f8(0)
                    if t == room_j:
                        new_j = f8(0) if j < half else C
                    last_i, last_j = i, j
                    if tid == 0:
                        given[0], given[1] = new_i, new_j
                    update(f, lost, marks, near, far, f4(t), i, _marks(i < half, new_i, C), j, _marks(j < half, new_j, C))
                    step += 1
        keep(f, lost, high, rest, first, places)
        if tid == 0:
            steps[pair] = step
            # Without a number among the f no sample may rise or fall, which is no solution.
            gaps[pair] = gap if gap > LEAST else -2.0 * LEAST

    return smo_kernel


@jit(launch_bounds=(WARPS * WARP, 2))
def smo_refresh_kernel(K, offsets, segments, alpha, high, rest, stride, count):
    """f = K·(yα) − y of every pair, added in float64; its float32 into `high`, what is above it into `rest`.

    grid    ⌈places / 32⌉ × pairs; block 256; a warp owns four rows of a pair.
    shared none; moves a pair's kernel values once, 4·m² bytes, and α once per warp, out of L2. source: the definition.
    """
    lane, warp, pair = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockIdx.y
    first_a, count_a, shift_b, count_b, half, places = places_of(segments, pair)
    pitch, matrix, first = segments[pair * SEGMENTS + 4], offsets[pair], i8(pair) * stride
    top = (cuda.blockIdx.x * WARPS + warp) * ROWS
    sums = cuda.local.array(ROWS, f8)
    for r in range(ROWS):
        sums[r] = f8(0)
    for k in range(lane, places, WARP):
        a = f8(0)
        if k < count_a:
            a = alpha[first + k]
        elif k >= half and k < half + count_b:
            a = -alpha[first + k]
        if a != f8(0):
            column = i8(k + (first_a if k < half else shift_b))
            for r in range(ROWS):
                m = min(top + r, places - 1)
                sums[r] += a * K[matrix + i8(m + (first_a if m < half else shift_b)) * pitch + column]
    for r in range(ROWS):
        total = warp_sum_everywhere(sums[r]) - (f8(1) if top + r < half else f8(-1))
        if lane == 0 and top + r < places:
            rounded = f4(total)
            high[first + top + r] = rounded
            rest[first + top + r] = f8(rounded) - total


def in_registers(threads: int, quads: int) -> bool:
    """True if a thread's groups of four fit its registers: 17 numbers each (f, what was rounded off, two rows of K, marks), 84 beside them."""
    warps_of_scheduler = ceil_div(threads, 4 * WARP)
    return 17 * quads + 84 <= min(255, _FILE // (4 * WARP * warps_of_scheduler) // 8 * 8)


def block_of(places: int) -> tuple[int, int]:
    """Threads and groups of four for pairs of at most so many places: the most threads whose arrays are registers, or 1,024 with arrays in memory."""
    quads = ceil_div(places, 4)
    for threads in (512, 384, 256):
        if in_registers(threads, ceil_div(quads, threads)):
            return min(threads, WARP * ceil_div(quads, WARP)), ceil_div(quads, threads)
    return 1024, ceil_div(quads, 1024)


def described(pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray, int]:
    """Offsets (int64) and segments (int32) of pairs for the kernels, and the stride of their arrays."""
    segments = np.array([[p.first_a, p.count_a, p.first_b, p.count_b, p.pitch] for p in pairs], np.int32).reshape(-1)
    return np.array([p.offset for p in pairs], np.int64), segments, max(p.places for p in pairs)


def launch_smo(
    arrays: tuple[Any, Any, Any, Any, Any, Any, Any, Any], pairs: int, stride: int, C: float, tolerance: float, budget: int, block: Any = None
) -> Launch:
    """Launch of `smo_kernel`; arrays: K, offsets, segments, alpha (float64), high, rest (float32), steps (int32), gaps (float32)."""
    threads, quads = block or block_of(stride)
    scalars = (np.int32(stride), np.float64(C), np.float32(tolerance), np.int32(budget))
    return Launch(smo_kernel_for(threads, quads), pairs, threads, (*arrays, *scalars))


def launch_refresh(arrays: tuple[Any, Any, Any, Any, Any, Any], pairs: int, stride: int) -> Launch:
    """Launch of `smo_refresh_kernel`; arrays: K, offsets, segments, alpha (float64), high, rest (float32)."""
    grid = (ceil_div(stride, WARPS * ROWS), pairs)
    return Launch(smo_refresh_kernel, grid, WARPS * WARP, (*arrays, np.int32(stride), np.int32(pairs)))
