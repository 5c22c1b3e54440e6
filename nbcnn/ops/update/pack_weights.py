"""Packed weights: copies of weights that an implementation wants in another order, padded, or with taps summed.

Launches at the start of every plan write all of them, so that no copy can be stale. Sums are made in float32 and rounded once, to how the copy is
stored. Copies that are transpositions of filter banks are written tile by tile out of shared memory, as a table says (`nbcnn.plan.packing`); the
others, which stand before them, element by element, as an index map says: packed[i] = Σ_t params[map[t, i]], a negative index adding nothing.

    pack_weights      params (P), map (n) or (terms, n) int32[, table int32] -> packed (n, and what the table copies)     tiles: of the table
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, f4, i4, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, outputs
from nbcnn.ops.ptx.vector import load1_if
from nbcnn.plan.op import Op
from nbcnn.plan.packing import COPY, ROWS, RUN, TILE, Placement, table, tiles_of
from nbcnn.plan.shapes import numel

THREADS = 256
ELEMENTS = 4
"""Elements of one thread, THREADS apart: neighbouring lanes write neighbouring elements, whose sources mostly lie within a few lines."""
TERMS = 4
"""Terms of a sum that are in flight at once, for each element."""
TILE_THREADS = 32 if SIMULATOR else THREADS
LANES = 32


def pack_weights(params: np.ndarray, index: np.ndarray, *operands: np.ndarray, tiles: int = 0) -> None:
    """packed: the sums over t of params (P) [index (terms, n) or (n) int32], negative indices adding nothing; then what `table` copies."""
    *tables, packed = operands
    rows = index if index.ndim == 2 else index[None]
    mapped = rows.shape[-1]
    packed.fill(0)
    for row in rows if mapped else ():
        packed[:mapped] += np.where(row >= 0, np.take(params, row, mode="clip"), 0)
    for numbers in tables:
        for first, stride, filters, channels, taps, k, c, at in numbers[: TILE * tiles].reshape(-1, TILE).tolist():
            source = params[(first + np.arange(filters)[:, None] * stride + np.arange(channels * taps)).reshape(filters, channels, taps)]
            while numbers[at] >= 0:
                start, along_k, along_c, slots = numbers[at : at + COPY].tolist()
                place = start + (k + np.arange(filters)[:, None, None]) * along_k + (c + np.arange(channels)[:, None]) * along_c
                packed[place + numbers[at + COPY : at + COPY + taps]] = source
                at += COPY + slots


@functools.cache
def pack_kernel(kind: str, terms: int) -> Any:
    """The kernel for `terms` terms per element and a copy stored as `kind`."""
    mapped = mapped_elements(kind, terms)

    @jit()
    def pack_weights_kernel(params, index, packed, count):
        """packed[i] = Σ_t params[index[t·count + i]] over the indices that are not negative.

        grid ⌈n/1024⌉, block 256, a thread owns four elements; moves (4·terms + size of an element)·n bytes, and the
        gathered params, which mostly come from L2.
        """
        mapped(params, index, packed, count, cuda.blockIdx.x * (ELEMENTS * THREADS) + cuda.threadIdx.x, THREADS)

    return pack_weights_kernel


@functools.cache
def mapped_elements(kind: str, terms: int) -> Any:
    """Device function (params, index, packed, count, first, threads): four elements of the copy that a map says, first, first + threads, …"""
    _, store = scalar_io(kind)
    CHUNK = min(terms, TERMS)
    CHUNKS, INDICES = -(-terms // CHUNK), ELEMENTS * CHUNK

    @jit(device=True)
    def gather(params, index, packed, count, first, threads):
        where = cuda.local.array(INDICES, i4)
        value = cuda.local.array(INDICES, f4)
        total = cuda.local.array(ELEMENTS, f4)
        for j in range(ELEMENTS):
            total[j] = 0.0
        for chunk in range(CHUNKS):
            for t in range(CHUNK):
                row = chunk * CHUNK + t
                for j in range(ELEMENTS):
                    # Beyond the end the last element's index is read again, and its sum not stored.
                    i = min(first + j * threads, count - 1)
                    where[ELEMENTS * t + j] = index[min(row, terms - 1) * count + i]
                    if terms % CHUNK != 0 and row >= terms:
                        where[ELEMENTS * t + j] = -1
            for j in range(INDICES):
                value[j] = load1_if(params, where[j], where[j] >= 0)
            for j in range(INDICES):
                total[j % ELEMENTS] += value[j]
        for j in range(ELEMENTS):
            i = first + j * threads
            if i < count:
                store(packed, i, total[j])

    return gather


@functools.cache
def pack_tiles_kernel(kind: str, terms: int) -> Any:
    """The kernel for copies of which some are said by a table of tiles, others by a map of `terms` terms; stored as `kind`."""
    _, store = scalar_io(kind)
    mapped = mapped_elements(kind, terms)
    THREADS, WARPS = TILE_THREADS, TILE_THREADS // LANES
    FLIGHT = RUN // LANES
    MEMORY = ROWS * (RUN + 1)

    @jit(device=True)
    def stage(params, memory, first, stride, filters, run, pitch):
        # A warp loads the run of one filter at a time: up to nine loads of 128 bytes, all in flight.
        values = cuda.local.array(FLIGHT, f4)
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        for k in range(warp, filters, WARPS):
            for j in range(FLIGHT):
                i = lane + j * LANES
                values[j] = load1_if(params, first + k * stride + i, i < run)
            for j in range(FLIGHT):
                i = lane + j * LANES
                if i < run:
                    memory[k * pitch + i] = values[j]

    @jit(device=True)
    def copy(table, packed, memory, at, slots, taps, start, extents, pitches, apart):
        # Lines of `extents[1]` elements for one slot, `apart` elements from the next in the copy. A warp has neighbouring lines and goes through
        # the slots, so that what belongs to a slot is computed once for all of them. With a slot for every line a warp had about 96 instructions
        # per line, and 24 million elements took 80 µs (H200).
        lines, across = extents
        of_line, of_lane = pitches
        line_apart, lane_apart = apart
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        each = (lines + WARPS - 1) // WARPS
        begin = warp * each
        end = min(begin + each, lines)
        for slot in range(slots):
            first = start + table[at + slot] + begin * line_apart
            source = begin * of_line + slot
            for i in range(lane, across, LANES):
                to, of = first + i * lane_apart, source + i * of_lane
                if slot < taps:
                    for _ in range(begin, end):
                        store(packed, to, memory[of])
                        to += line_apart
                        of += of_line
                else:
                    for _ in range(begin, end):
                        store(packed, to, 0.0)
                        to += line_apart

    @jit()
    def pack_weights_tiles_kernel(params, index, table, packed, count, tiles):
        """Tiles of filter banks transposed in shared memory, as `table` says; behind their blocks packed[i] = Σ_t params[index[t·count + i]].

        grid tiles + ⌈n/1024⌉, block 256; owns: one block per tile of 32 filters × 288 weights at most, for all of its copies, or 1,024 elements of
        the map. shared 37 KB, with rows of an odd length, so that neither reads along filters nor along channels meet in a bank (taps odd).
        moves 4 bytes per weight, and each copy once.
        """
        memory = cuda.shared.array(MEMORY, f4)
        block = cuda.blockIdx.x
        if block < tiles:
            row = block * TILE
            filters, channels, taps = table[row + 2], table[row + 3], table[row + 4]
            k, c, at = table[row + 5], table[row + 6], table[row + 7]
            run = channels * taps
            pitch = run | 1
            stage(params, memory, table[row], table[row + 1], filters, run, pitch)
            cuda.syncthreads()
            start = table[at]
            while start >= 0:
                along_k, along_c, slots = table[at + 1], table[at + 2], table[at + 3]
                first = start + k * along_k + c * along_c
                at += COPY
                # Neighbouring lanes write neighbouring elements: along filters or along channels, whichever are closer in the copy.
                if along_k < along_c:
                    copy(table, packed, memory, at, slots, taps, first, (channels, filters), (taps, pitch), (along_c, along_k))
                else:
                    copy(table, packed, memory, at, slots, taps, first, (filters, channels), (pitch, taps), (along_k, along_c))
                at += slots
                start = table[at]
        else:
            mapped(params, index, packed, count, (block - tiles) * (ELEMENTS * THREADS) + cuda.threadIdx.x, THREADS)

    return pack_weights_tiles_kernel


def _terms(call: Call) -> tuple[int, int]:
    """Terms and elements of the map."""
    shape = call.in_shapes[1]
    return (shape[0] if len(shape) == 2 else 1), shape[-1]


def bind(call: Call) -> list[Launch]:
    """params (P), map (n) or (terms, n) int32 -> packed (n), stored as its dtype says."""
    (params, index, *tables), (packed,) = call.ins, call.outs
    terms, count = _terms(call)
    kind = kinds(call)[1]
    if not tables:
        return [Launch(pack_kernel(kind, terms), blocks(count, ELEMENTS * THREADS), THREADS, (params, index, packed, np.int32(count)))]
    tiles = call.attrs["tiles"]
    grid = tiles + ceil_div(count, ELEMENTS * TILE_THREADS)
    args = (params, index, tables[0], packed, np.int32(count), np.int32(tiles))
    return [Launch(pack_tiles_kernel(kind, terms), grid, TILE_THREADS, args)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`, as if no index were negative: the map of a call is not known here, and few of its indices are.

    Whole blocks fetch indices and weights: beyond the end those of the last element again, and of terms whole chunks of indices. Of tiles each
    weight counts once, as if each had two copies: one for the forward and one for the backward pass.
    """
    terms, count = _terms(call)
    chunk, block = min(terms, TERMS), ELEMENTS * (THREADS if len(call.in_shapes) == 2 else TILE_THREADS)
    threads = ceil_div(count, block) * block
    placed = min(numel(call.in_shapes[0]), (numel(call.out_shapes[0]) - count) // 2)
    gathered = min(numel(call.in_shapes[0]), terms * count)
    return [Traffic(4 * (threads * (ceil_div(terms, chunk) * chunk + terms) + placed), outputs(call), 4 * (terms * count + gathered + placed))]


HOST, OPS = {Op("pack_weights"): host(pack_weights)}, {Op("pack_weights"): Impl(bind, traffic=traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """Weights picked out of `count`, and sums of several of them; filter banks that are copied in two orders behind a few elements of a map."""
    w = normal(17, count)
    index = np.random.default_rng(21).integers(-1, count, 777).astype(np.int32)
    yield Case(Op("pack_weights"), f"777 of {count}", (w, index), (((777,), "float32"),))
    for terms in (1, 4, 6):
        sums = np.random.default_rng(22).integers(-1, count, (terms, 260)).astype(np.int32)
        yield Case(Op("pack_weights"), f"{terms} terms", (w, sums), (((260,), "float32"),), {}, terms)
    for label, banks, elements in (
        ("two copies", [(3, (5, 7, 3), {40: Placement(21, 1, (0, 7, 14)), 145: Placement(1, 5, (70, 35, 0))})], 250),
        ("zeros between taps", [(1, (4, 3, 2), {40: Placement(1, 4, (0, 24, 12))}), (500, (35, 1, 1), {76: Placement(1, 35, (0,))})], 111),
    ):
        few = index[:40]
        yield Case(Op("pack_weights"), label, (w, few, table(banks)), (((elements,), "float32"),), {"tiles": tiles_of(banks)})
