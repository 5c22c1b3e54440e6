"""The product behind a weight gradient on mma.sync: both operands have the pixels they are summed over as rows, as images lie in memory.

    D[m][(r,s), c] = Σ_(n,p,q) stationary[(n,p,q)][m] · shifted[n, stride·p + r − top, stride·q + s − left][c]

`stationary` is read pixel by pixel, `shifted` a tap further (zero outside the image). conv_wgrad: stationary = dy, shifted = x.
upconv_wgrad: stationary = x, shifted = dy, whose 4×4 taps of stride 2 see every pixel of the doubled image.

A block keeps `stages` steps of BK pixels in shared memory: while its warps multiply one, copies of those behind are under way
(wgrad_load). A warp loads fragments for one depth of pixels while it multiplies those before (wgrad_product), across the end of a step too.

The bias gradient is the sum of dy over all pixels. Warps that hold the same channels of dy in their fragments take turns, a step each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.ops.conv.mma.wgrad_load import NEVER, copy_shifted, copy_stationary, describe_pixel, land
from nbcnn.ops.conv.mma.wgrad_product import COLUMNS, ROWS, add_pixels, lane_offset, load_a, load_b, multiply, row_of, store_sums
from nbcnn.ops.conv.mma.wgrad_tile import ALIGNMENT, DESCRIPTOR, KINDS, Kind, PixelTile
from nbcnn.ops.kernel.loops import split_pixel, step_pixel, unrolled
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cp_async import cp_async_commit, cp_async_wait, nothing
from nbcnn.ops.ptx.cvt import bits_float, float_bits
from nbcnn.ops.ptx.shared import load_words_1, store_words_1

_NO_STEP = 1 << 30


@jit(device=True)
def is_inner(r, s):
    """True for the inner four of 4×4 taps."""
    return (r == 1 or r == 2) and (s == 1 or s == 2)


@cache
def step_of_pixels(tile: PixelTile, kind: Kind, width_stationary: int, width_shifted: int, bias: str) -> Any:
    """Device function (acc, words, sums, turn, a, b, next_a, next_b, copy…) for one step: multiply, and copy a later one.

    words holds two sets of fragments: one is multiplied while the other is loaded. The last depth of a step loads the first of the next,
    whose copies must have landed: there the block waits.
    """
    pitch_a, pitch_b = tile.pitch(tile.BM, kind), tile.pitch(tile.BN, kind)
    words_a, words_b = tile.WM // ROWS * 4, tile.WN // COLUMNS * 2
    depths, words = tile.BK // kind.depth, words_a + words_b
    rows_a, rows_b = (tile.BK * tile.BM // (kind.chunk * tile.threads), tile.BK * tile.BN // (kind.chunk * tile.threads))
    landed, commit = (cp_async_wait(tile.stages - 2), cp_async_commit) if kind.asynchronous else (nothing, nothing)
    land_a, land_b = land(kind, pitch_a, rows_a), land(kind, pitch_b, rows_b)

    rounds = tile.WM // ROWS

    def shares(count: int, part: int, parts: int) -> tuple[int, int]:
        """(first, end) of what part `part` of `parts` does of `count` things; none beyond the last part."""
        return (count * part // parts, count * (part + 1) // parts) if 0 <= part < parts else (0, 0)

    def in_round(depth: int, i: int) -> Any:
        """One 16 rows of a depth; between products, its part of the loads and copies: in a burst, they would hold up the warp."""
        LAST, COPIED = depth == depths - 1 and i == 1, depth == depths - 2 and i == rounds - 1
        NEXT = depth == depths - 1
        now, following = depth % 2 * words, (depth + 1) % 2 * words
        # The last depth makes its first products before it waits for the next step.
        loading = i - 1 if NEXT else i
        fetch_a = load_a(kind, pitch_a, *shares(rounds, loading, rounds - 1), following, (depth + 1) % depths)
        fetch_b = load_b(kind, pitch_b, *shares(tile.WN // 16, loading, rounds - 1), following + words_a, (depth + 1) % depths)
        product = multiply(kind, tile.WN, i, i + 1, now, now + words_a)
        SUMMED = bias != "" and i == 0
        add = add_pixels(kind, "B", tile.WN, now + words_a) if bias == "shifted" else add_pixels(kind, "A", tile.WM, now)
        copying = depth * rounds + i, (depths - 1) * rounds
        copy_a = copy_stationary(kind, width_stationary, pitch_a, *shares(rows_a, *copying))
        copy_b = copy_shifted(kind, width_shifted, pitch_b, *shares(rows_b, *copying))

        @jit(device=True)
        def run(
            acc, words, sums, turn, a, b, next_a, next_b, stationary, shifted, to_a, to_b, pixel, m, M, apart, limit, table, delta, left, bits,
            held_a, held_b,
        ):  # fmt: skip
            if SUMMED and turn:
                add(sums, words)
            if LAST:
                land_a(to_a, held_a)
                land_b(to_b, held_b)
                landed()
                cuda.syncthreads()
            if NEXT:
                fetch_b(words, next_b)
                fetch_a(words, next_a)
            else:
                fetch_b(words, b)
                fetch_a(words, a)
            copy_a(to_a, stationary, byte_address_global(stationary), pixel, m, M, apart, limit, held_a)
            copy_b(to_b, shifted, byte_address_global(shifted), table, delta, left, bits, held_b)
            if COPIED:
                commit()
            product(acc, words)

        return run

    return unrolled([in_round(depth, i) for depth in range(depths) for i in range(rounds)])


@cache
def gather_sums(tile: PixelTile, kind: Kind, bias: str) -> tuple[Any, Any]:
    """Device functions: (sums, stage, lane, down, across) of every warp; then, after a barrier, (stage, column) -> the sum over the block."""
    STATIONARY = bias == "stationary"
    SIDE, WARP_SIDE, OTHER_WARPS = (tile.BM, tile.WM, tile.BN // tile.WN) if STATIONARY else (tile.BN, tile.WN, tile.BM // tile.WM)
    COUNT, HOLDERS, place = WARP_SIDE // COLUMNS, 4 * OTHER_WARPS, row_of(kind)

    @jit(device=True)
    def put(sums, stage, lane, down, across):
        own, other, g = (down, across, lane >> 2) if STATIONARY else (across, down, lane >> 2)
        holder = other * 4 + (lane & 3)
        for i in range(COUNT):
            inside = i // 2 * ROWS + place(i % 2, g) if STATIONARY else i * COLUMNS + g
            store_words_1(stage + (holder * SIDE + own * WARP_SIDE + inside) * 4, float_bits(sums[i]))

    @jit(device=True)
    def total(stage, column):
        made = 0.0
        for holder in range(HOLDERS):
            made += bits_float(load_words_1(stage + (holder * SIDE + column) * 4))
        return made

    return put, total


@cache
def pixel_product(tile: PixelTile, precision: str, width_stationary: int, width_shifted: int, bias: str) -> Any:
    kind = KINDS[precision]
    BM, BN, BK, WM, WN, STAGES, THREADS = tile.BM, tile.BN, tile.BK, tile.WM, tile.WN, tile.stages, tile.threads
    PITCH_A, PITCH_B, SLOT, CHUNK, ELEMENT = tile.pitch(BM, kind), tile.pitch(BN, kind), tile.slot_bytes(kind), kind.chunk, kind.element
    A_BYTES, ALIGN, DESCRIBERS, TABLE = BK * PITCH_A, ALIGNMENT, tile.describers, tile.describers * DESCRIPTOR
    ACROSS_A, ACROSS_B, WARPS_ACROSS, WARPS_DOWN = BM // CHUNK, BN // CHUNK, BN // WN, BM // WM
    ROWS_A, ROWS_B = BK * ACROSS_A // THREADS, BK * ACROSS_B // THREADS
    WORDS_A, WORDS_B = WM // ROWS * 4, WN // COLUMNS * 2
    ACC, ALL_WORDS, SUMS = WM * WN // 32, 2 * (WORDS_A + WORDS_B), max(WM, WN) // COLUMNS
    multiply_step = step_of_pixels(tile, kind, width_stationary, width_shifted, bias)
    copy_a = copy_stationary(kind, width_stationary, PITCH_A, 0, ROWS_A)
    copy_b = copy_shifted(kind, width_shifted, PITCH_B, 0, ROWS_B)
    land_a, land_b = land(kind, PITCH_A, ROWS_A), land(kind, PITCH_B, ROWS_B)
    HELD_A, HELD_B = (1, 1) if kind.asynchronous else (4 * ROWS_A, 4 * ROWS_B)
    first_a, first_b = load_a(kind, PITCH_A, 0, WM // 16, 0, 0), load_b(kind, PITCH_B, 0, WN // 16, WORDS_A, 0)
    offset_a, offset_b = lane_offset(kind, PITCH_A, "A"), lane_offset(kind, PITCH_B, "B")
    store, landed, all_landed, commit = store_sums(kind, WM, WN), cp_async_wait(STAGES - 2), cp_async_wait(0), cp_async_commit
    if not kind.asynchronous:
        landed = all_landed = commit = nothing
    put_sums, total = gather_sums(tile, kind, bias or "stationary")
    STATIONARY, SHIFTED = bias == "stationary", bias == "shifted"

    @jit(launch_bounds=(THREADS, tile.blocks_by_registers(kind)))
    def pixel_product_kernel(
        stationary, shifted, partials, partials_b, M, C, H, W, P, Q, R, S, stride, top, left, pixels, steps, column_tiles, row_tiles, dn, dp, dq,
        apart, from_pixel
    ):  # fmt: skip
        """partials[z][m][(r,s)][c] = Σ_pixel stationary[pixel][m] · shifted[pixel shifted by (r,s)][c] over part z; bias sums of it in partials_b.

        gemm: GM = M, GN = R·S·(C in whole chunks), GK = pixels; block tile BM × BN, BK pixels per step.
        grid: (row tiles × column tiles, split), columns first: blocks that run together read the same pixels, out of L2.
        block: warps of WM × WN; owns: per block BM × BN, per warp WM × WN, per thread what mma.sync gives it.
        shared: stages · BK · (BM + BN) elements and their padding; moves per block: steps·BK·(BM + BN) elements + 4·BM·BN bytes.
        apart, from_pixel: elements from one pixel to the next of `stationary` and of `shifted`.
        needs: compute capability 8.0 (mma.sync, cp.async), in float16 7.5.
        bias: "stationary" sums that operand, column tiles and warps taking turns: partials_b[z][column tile][m]; "shifted" sums the inner four
        of 4×4 taps of stride 2, which see each pixel once, row tiles and warps taking turns: partials_b[z][row tile][inner tap][c].
        """
        shared = cuda.shared.array(0, types.uint8)
        ring = (byte_address_shared(shared) + (ALIGN - 1)) & -ALIGN
        tables = ring + STAGES * SLOT
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        down = warp // WARPS_ACROSS
        across = warp - down * WARPS_ACROSS
        row_tile = cuda.blockIdx.x // column_tiles
        column_tile = cuda.blockIdx.x - row_tile * column_tiles
        z = cuda.blockIdx.y
        m0, n0 = row_tile * BM, column_tile * BN
        tap_columns = (C + (CHUNK - 1)) // CHUNK * CHUNK
        first = z * steps
        limit = min((first + steps) * BK, pixels)

        # What this thread copies of the stationary operand: one chunk of channels, ROWS_A pixels in a row.
        row_a = tid // ACROSS_A
        m = m0 + (tid - row_a * ACROSS_A) * CHUNK
        row_a *= ROWS_A
        limit_a = limit if m < M else 0
        into_a = row_a * PITCH_A + (m - m0) * ELEMENT
        # And of the shifted one: one chunk of one tap.
        row_b = tid // ACROSS_B
        chunk = tid - row_b * ACROSS_B
        row_b *= ROWS_B
        column = n0 + chunk * CHUNK
        tap = column // tap_columns
        c = column - tap * tap_columns
        r = tap // S
        s = tap - r * S
        delta, channels_left = (r * W + s) * from_pixel + c, C - c
        bits = (u4(1) << r) | (u4(0x10000) << s) if r < R else NEVER
        into_b = A_BYTES + row_b * PITCH_B + chunk * 16

        # The pixel that this thread describes, if it is one of the first BK (of a whole warp where BK is less).
        pixel = first * BK + tid
        image, p, q = split_pixel(pixel, P, Q)
        here = tables + tid * DESCRIPTOR
        slot, even = ring, 0
        step_pixels = first * BK + row_a
        held_a = cuda.local.array(HELD_A, u4)
        held_b = cuda.local.array(HELD_B, u4)
        for _ in range(STAGES - 1):
            if tid < DESCRIBERS:
                describe_pixel(here + even, pixel < limit, image, p, q, from_pixel, H, W, R, S, stride, top, left)
            image, p, q = step_pixel(image, p, q, dn, dp, dq, P, Q)
            pixel += BK
            cuda.syncthreads()
            copy_a(slot + into_a, stationary, byte_address_global(stationary), step_pixels, m, M, apart, limit_a, held_a)
            copy_b(slot + into_b, shifted, byte_address_global(shifted), tables + even + row_b * DESCRIPTOR, delta, channels_left, bits, held_b)
            land_a(slot + into_a, held_a)
            land_b(slot + into_b, held_b)
            commit()
            slot += SLOT
            step_pixels += BK
            even = TABLE - even
        if tid < DESCRIBERS:
            describe_pixel(here + even, pixel < limit, image, p, q, from_pixel, H, W, R, S, stride, top, left)

        # A warp's own turn at the bias gradient: every `period`-th step from `due` on.
        due, period = first + column_tile * WARPS_ACROSS + across, column_tiles * WARPS_ACROSS
        if SHIFTED:
            due, period = _NO_STEP, row_tiles * WARPS_DOWN
            last_tap = (n0 + (across + 1) * WN - 1) // tap_columns
            tap = (n0 + across * WN) // tap_columns
            while tap <= last_tap:
                if is_inner(tap >> 2, tap & 3):
                    due = first + row_tile * WARPS_DOWN + down
                tap += 1

        acc = cuda.local.array(ACC, f4)
        words = cuda.local.array(ALL_WORDS, u4)
        sums = cuda.local.array(SUMS, f4)
        for i in range(ACC):
            acc[i] = 0.0
        for i in range(SUMS):
            sums[i] = 0.0
        from_a = offset_a(lane) + down * (WM * ELEMENT)
        from_b = offset_b(lane) + (A_BYTES + across * (WN * ELEMENT))
        read, end = ring, ring + STAGES * SLOT
        landed()
        cuda.syncthreads()
        first_a(words, read + from_a)
        first_b(words, read + from_b)
        step, last = first, first + steps
        while step < last:
            ahead = read + SLOT
            if ahead == end:
                ahead = ring
            image, p, q = step_pixel(image, p, q, dn, dp, dq, P, Q)
            pixel += BK
            # Copies read this table since the last barrier; the one written here was last read before it.
            table = tables + even + row_b * DESCRIPTOR
            even = TABLE - even
            if tid < DESCRIBERS:
                describe_pixel(here + even, pixel < limit, image, p, q, from_pixel, H, W, R, S, stride, top, left)
            turn = step == due
            multiply_step(
                acc, words, sums, turn, read + from_a, read + from_b, ahead + from_a, ahead + from_b,
                stationary, shifted, slot + into_a, slot + into_b, step_pixels, m, M, apart, limit_a, table, delta, channels_left, bits,
                held_a, held_b,
            )  # fmt: skip
            if turn:
                due += period
            slot = read
            read = ahead
            step_pixels += BK
            step += 1

        store(acc, partials, lane, z, m0 + down * WM, n0 + across * WN, M, R * S * tap_columns)
        if STATIONARY or SHIFTED:
            all_landed()
            cuda.syncthreads()
            put_sums(sums, ring, lane, down, across)
            cuda.syncthreads()
            i = tid
            if STATIONARY:
                while i < BM:
                    if m0 + i < M:
                        partials_b[i8(z * column_tiles + column_tile) * M + (m0 + i)] = total(ring, i)
                    i += THREADS
            else:
                while i < BN:
                    tap = (n0 + i) // tap_columns
                    c = n0 + i - tap * tap_columns
                    if is_inner(tap >> 2, tap & 3) and tap < 16 and c < C:
                        inner = ((tap >> 2) - 1) * 2 + (tap & 3) - 1
                        partials_b[i8((z * row_tiles + row_tile) * 4 + inner) * C + c] = total(ring, i)
                    i += THREADS

    return pixel_product_kernel
