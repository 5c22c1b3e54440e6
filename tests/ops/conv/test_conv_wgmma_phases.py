"""Tests of strided input gradients on wgmma, four phases of unequal taps: which taps, in which order, on played blocks; compiled, and on a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import played_warps
import pytest
from played_warps import Block, Stuck, on_host

from nbcnn.check.gradcheck import bound, parity
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.target import H200
from nbcnn.modes import Row, named
from nbcnn.ops.conv.frame.correlation import Spans, by_parity, correlation, in_phases, parity_filters
from nbcnn.ops.conv.fused import relu_cases, second_cases
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.wgmma import patch
from nbcnn.ops.conv.wgmma.engine import implementations, traffic
from nbcnn.ops.conv.wgmma.patch import PatchTile
from nbcnn.ops.conv.wgmma.phases import BAND, taps_of, tile_in_bands, turned
from nbcnn.ops.conv.wgmma.tile import KINDS, Tile, steps_of_tap, tiles_of
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.case import Case
from nbcnn.ops.ptx.vector import load1_if
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape

THREE = Spans(((1, 2), (0, 2)), ((1, 2), (0, 2)))
ONE = Spans(((0, 1), (0, 0)), ((0, 1), (0, 0)))
FILTERS = [(R, S, pad) for R in range(1, 8) for S in range(1, 8) for pad in range(min(R, S))]


def bare(case: Case) -> Call:
    return Call(case.op, (), (), tuple(a.shape for a in case.ins), tuple(shape for shape, _ in case.outs), case.attrs, "NHWC")


def gradient(shape: ConvShape, op: str = "conv_dgrad") -> Case:
    return next(case for case in (*conv_cases(shape), *relu_cases(shape), *second_cases(shape)) if case.op == named(op))


def strided(N: int, C: int, K: int, size: int, taps: int, pad: int) -> ConvShape:
    return ConvShape(N, C, size, size, K, taps, taps, 2, pad)


@pytest.mark.parametrize(("R", "S", "pad"), FILTERS)
def test_spans_are_the_taps_that_are_not_zeros(R, S, pad):
    """Of all phases, as kernels walk them; none has a hole."""
    down, across = by_parity(R, pad), by_parity(S, pad)
    spans = Spans(down.spans, across.spans)
    there = parity_filters(np.arange(R * S).reshape(1, 1, R, S), pad)[:, 0, 0] >= 0
    walk = on_host(taps_of(spans, down.taps, across.taps))
    walked = {(phase, r, s) for phase in range(4) for top, end, left, right in [walk(phase)] for r in range(top, end) for s in range(left, right)}
    assert walked == {tuple(map(int, at)) for at in np.argwhere(there)}
    assert len(walked) == R * S == spans.total
    assert [spans.taps(phase) for phase in range(4)] == list(there.sum((1, 2)))
    assert spans.busy == there.any((1, 2)).sum()


def test_correlations_know_the_taps_that_are_not_zeros():
    assert correlation(bare(gradient(strided(1, 8, 8, 8, 3, 1)))).spans == THREE
    assert correlation(bare(gradient(strided(1, 8, 8, 8, 1, 0)))).spans == ONE
    assert correlation(bare(gradient(strided(1, 8, 8, 8, 4, 1)))).spans is None  # every phase has 2×2 taps
    assert correlation(bare(gradient(strided(1, 8, 8, 8, 2, 0)))).mean_taps == 1  # one of 2×2, and a different one each
    assert correlation(bare(gradient(strided(1, 8, 8, 8, 5, 2)))).mean_taps == 25 / 4


@pytest.mark.parametrize("blocks", [2, 3, 5, 114, 132, 264])
@pytest.mark.parametrize("tiles_of_phase", [1, 2, 3])
def test_every_tile_of_persistent_blocks_is_there_once(blocks, tiles_of_phase):
    down, across, phase_of = 301, 4 * tiles_of_phase, on_host(turned)
    made = [(tile // across, (tile % across) >> 2, phase_of(tile, tile % across, blocks)) for tile in range(down * across)]
    assert len(set(made)) == len(made) == down * across
    if blocks % 4 == 0:
        for block in range(blocks):
            phases = [phase for _, _, phase in made[block::blocks]]
            assert all(set(phases[i : i + 4]) == set(range(4)) for i in range(len(phases) - 3))


@pytest.mark.parametrize("down", [1, BAND - 1, BAND, BAND + 1, 3 * BAND + 5])
@pytest.mark.parametrize("tiles_of_phase", [1, 3])
def test_every_tile_in_bands_is_there_once_the_longest_first(down, tiles_of_phase):
    across, place = 4 * tiles_of_phase, on_host(tile_in_bands(THREE))
    made = [place(block, down, across, tiles_of_phase) for block in range(down * across)]
    assert sorted(made) == sorted((row, column, phase) for row in range(down) for column in range(tiles_of_phase) for phase in range(4))
    band = -(-down // -(-down // BAND))
    for first in range(0, down, band):
        taps = [THREE.taps(phase) for row, _, phase in made if first <= row < first + band]
        assert taps == sorted(taps, reverse=True)
    assert [row // band for row, _, _ in made] == sorted(row // band for row, _, _ in made)


# -- played


def bound_on_host(case: Case, precision: str, tile: Tile | PatchTile) -> Bound:
    impl, options = implementations(precision)[case.op], {"attrs": case.attrs, "layout": "NHWC", "device": nb.Host(), "tile": tile}
    return Bound(impl, case.op, case.ins, case.outs, store=STORE[precision], **options)


def numbers(args: tuple) -> tuple:
    return tuple(int(each) if isinstance(each, np.int32) else 0.0 if isinstance(each, np.float32) else None for each in args)


def put(block, acc, floor, results, *rest):
    block.results[results], acc.log = acc.log, []


def wanted(g, kind, phase: int, n0: int) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """(channel, line, column) of the source before the first pixel, and (column, row) of packed filters, of every step of a phase."""
    made = []
    for r, s in [(r, s) for top, end, left, right in [g.spans.of(phase)] for r in range(top, end) for s in range(left, right)]:
        for c in range(0, g.C, kind.channels):
            made.append(((c, r + (phase >> 1) - g.top, s + (phase & 1) - g.left), ((r * g.S + s) * g.C + c, phase * g.K + n0)))
    return made


PUTS = {"put_fragments": put, "put_transposed": put}
PLAYED = (
    (3, 1, PatchTile(1, 16, 8, 64, 2, 3, 1, 3)),
    (3, 1, PatchTile(1, 8, 16, 64, 1, 2, 1, 2)),
    (3, 1, PatchTile(1, 8, 8, 64, 1, 3, 1, 4, turns=2)),
    (1, 0, PatchTile(1, 16, 8, 64, 2, 3, 1, 3)),
    (1, 0, PatchTile(1, 8, 8, 64, 1, 2, 1, 3, turns=2)),
    (1, 0, PatchTile(1, 8, 8, 64, 1, 5, 1, 1, turns=2)),
    (2, 0, PatchTile(1, 8, 8, 64, 1, 4, 1, 4, turns=2)),
    (5, 2, PatchTile(1, 8, 8, 64, 1, 5, 1, 1, turns=2)),
    (5, 2, PatchTile(1, 16, 16, 64, 2, 4, 1, 1)),
    (3, 1, PatchTile(1, 16, 8, 64, 1, 4, 2, 3, turns=2, swapped=True)),
    (3, 1, PatchTile(1, 16, 16, 64, 1, 3, 1, 2, turns=2, swapped=True)),
    (1, 0, PatchTile(1, 16, 8, 64, 1, 2, 2, 3, turns=2, swapped=True)),
    (2, 0, PatchTile(2, 16, 8, 64, 1, 4, 1, 4, turns=2, swapped=True)),
    (5, 2, PatchTile(1, 16, 16, 64, 2, 4, 1, 1, swapped=True)),
)


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize(("taps", "pad", "tile"), PLAYED, ids=str)
def test_played_blocks_multiply_the_taps_of_their_phases(taps, pad, tile):
    """Every square of dx is stored once, with the products of the taps that reach it, and no block waits for ever."""
    case, kind = gradient(strided(2, 128, 128, 32, taps, pad)), KINDS["bf16"]
    g, (launch,) = correlation(bare(case)), bound_on_host(case, "bf16", tile).launches
    PH, PW = patch.patch_extent(tile, patch.window(g))
    sizes = {"cp_async_bulk_tensor_4d": patch.patch_load(tile, patch.window(g)), "cp_async_bulk_tensor_2d": 128 * tile.BN}
    # Products of a step: of squares, or of strips that have several.
    products, tall = (tile.strips, tile.TH // 8) if tile.swapped else (tile.BM // tile.groups // 64, 1)
    squares: Counter = Counter()
    for number in range(tile.resident):
        block = Block(number, tile.resident, tile.threads // 32, sizes, {load1_if.py_func.__qualname__: lambda *_: 0.0} | PUTS)
        block.play(launch.kernel, numbers(launch.args))
        assert all(barrier.bytes == 0 and barrier.left == barrier.count for at, barrier in block.barriers.items())
        at: Counter = Counter()
        for target, (n0, w, h, image), log in block.stored:
            phase = (target - 256) // 128
            squares[phase, n0, w, h, image] += 1
            # The squares of a warpgroup are stored one after another.
            product, below = divmod(at[id(log)], tall)
            at[id(log)] += 1
            got = []
            for operands in log[product::products]:
                (offset, (_, _, (c, w_, h_, n))), (_, (_, _, filters)) = operands[::-1] if tile.swapped else operands
                row = offset // 128 + below * 8 * PW
                line, column = row // PW % PH, row % PW
                assert row // PW // PH + n == image
                got.append(((c, h_ + line - h, w_ + column - w), filters))
            assert sorted(got) == sorted(wanted(g, kind, phase, n0 // tile.BN * tile.BN))
    expected = [(p, n, w, h, i) for p in range(4) for n in range(0, g.K, 64) for w in range(0, 16, 8) for h in range(0, 16, 8) for i in range(g.N)]
    assert squares == Counter(expected)


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize("full", [True, False], ids=["full", "empty"])
def test_played_blocks_that_wait_for_the_wrong_phase_fail(full, monkeypatch):
    """Of the barriers of full stages, or of empty ones: numbers are read before they are there, or the block stands still."""
    right, first = Block._wait, []

    def wait(self, at, parity):
        # The first to wait is the producer, for an empty stage: of a fresh barrier the phase before, 1, has ended. Consumers wait for phase 0 first.
        kinds = self.__dict__.setdefault("kinds", {})
        kind = kinds.setdefault(at, parity == 0)
        first.append(at)
        right(self, at, parity ^ (kind == full))

    monkeypatch.setattr(Block, "_wait", wait)
    monkeypatch.setattr(played_warps, "_SECONDS", 0.5)
    with pytest.raises((Stuck, AssertionError)):
        test_played_blocks_multiply_the_taps_of_their_phases(*PLAYED[0])
    assert first


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize(("taps", "pad"), [(3, 1), (1, 0), (2, 0), (5, 2)])
@pytest.mark.parametrize("op", ["conv_dgrad", "conv_dgrad_relu"])
def test_played_blocks_of_columns_multiply_the_taps_of_their_phases(taps, pad, op):
    tile, case, kind = Tile(64, 64, 1, 2, 1), gradient(strided(3, 72, 128, 12, taps, pad), op), KINDS["bf16"]
    g, (launch,) = correlation(bare(case)), bound_on_host(case, "bf16", tile).launches
    down, across = tiles_of(g, tile)
    assert launch.grid == down * across
    seen = set()

    def store(block, ring, x, y, t, m0, n0, *rest):
        if t == 0:
            *_, r, s, _, _ = rest
            block.stored.append((m0, n0, 2 * r + s, block.results[ring]))

    for number in range(launch.grid):
        sizes = {"cp_async_bulk_tensor_4d_im2col": 128 * tile.BM, "cp_async_bulk_tensor_2d": 128 * tile.BN}
        replaced = {load1_if.py_func.__qualname__: lambda *_: 0.0, "put_fragments": put, "store_rows": store}
        block = Block(number, launch.grid, tile.threads // 32, sizes, replaced)
        block.play(launch.kernel, numbers(launch.args))
        ((m0, n0, phase, log),) = block.stored
        seen.add((m0, n0, phase))
        first = (m0 // (g.P * g.Q), m0 // g.Q % g.P - g.top, m0 % g.Q - g.left)
        got = []
        for (_, (_, _, (c, w, h, n, right, low))), (_, (_, _, filters)) in log:
            assert (n, h, w) == first
            got.append(((c, int(low) - g.top, int(right) - g.left), filters))
        assert sorted(got) == sorted(wanted(g, kind, phase, n0))
    assert seen == {(m * 64, n * 64, phase) for m in range(down) for n in range(across // 4) for phase in range(4)}


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize(("K", "steps"), [(128, (4, 4)), (96, (4, 2)), (112, (4, 3)), (48, (3,)), (168, (4, 4, 3))])
def test_played_blocks_of_columns_multiply_no_channels_that_there_are_not(K, steps):
    """Of every stage of a tap as many instructions along K are issued as have channels; the order of the stages stays."""
    tile, case, kind = Tile(128, 64, 1, 3, 1), gradient(strided(1, 64, K, 12, 3, 1)), KINDS["bf16"]
    g, (launch,) = correlation(bare(case)), bound_on_host(case, "bf16", tile).launches
    assert steps_of_tap(g.C, kind) == (steps if set(steps) != {4} else (4,))
    sums = {}

    def store(block, ring, x, y, t, m0, n0, *rest):
        if t == 0:
            *_, r, s, _, _ = rest
            sums[2 * r + s] = block.here.sums

    for number in range(launch.grid):
        sizes = {"cp_async_bulk_tensor_4d_im2col": 128 * tile.BM, "cp_async_bulk_tensor_2d": 128 * tile.BN}
        kept = {"put_fragments": lambda *_: None, "store_rows": store}
        Block(number, launch.grid, tile.threads // 32, sizes, {load1_if.py_func.__qualname__: lambda *_: 0.0} | kept).play(
            launch.kernel, numbers(launch.args)
        )
    assert {phase: made.products for phase, made in sums.items()} == {phase: g.spans.taps(phase) * sum(steps) * 2 for phase in range(4)}


# -- bytes, compiled code, a GPU


@pytest.mark.parametrize(("taps", "pad"), [(3, 1), (1, 0), (2, 0), (5, 2)])
def test_bytes_are_those_of_taps_that_are_not_zeros(taps, pad):
    tile, kind = Tile(64, 64, 1, 4, 3), KINDS["bf16"]
    call = replace(bare(gradient(strided(4, 96, 128, 16, taps, pad))), tile=tile, out_dtypes=("bfloat16",))
    g = correlation(call)
    pixels = rows = 0
    for phase in range(4):
        top, end, left, right = g.spans.of(phase)
        for r, s in [(r, s) for r in range(top, end) for s in range(left, right)]:
            lines = sum(0 <= p + r + (phase >> 1) - g.top < g.H for p in range(g.P))
            pixels += lines * sum(0 <= q + s + (phase & 1) - g.left < g.W for q in range(g.Q))
            # The second tile of 64 of 96 channels goes on into the next phase's.
            rows += 128 if phase < 3 else 96
    (moved,) = traffic(call, kind)
    assert moved.read == 2 * 128 * (2 * 4 * pixels + rows * tiles_of(g, tile)[0])
    assert moved.distinct == 2 * 128 * (4 * 64 + taps * taps * 96)
    if taps == 1:
        # Every pixel once, no border; the only tile of filters goes on into the next phase's.
        (moved,) = traffic(replace(call, tile=PatchTile(4, 8, 8, 128, 2, 3, 1, 132)), kind)
        assert moved.read == 2 * 128 * (4 * 64 + 128)


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_tiles_cost_the_taps_that_are_not_zeros(precision):
    """The model of a tile counts the mean of the phases: 9 of 16 taps of 3×3 ones, of which a patch is loaded by all, 1 of 4 of 1×1 ones."""
    g, kind = correlation(bare(gradient(strided(64, 64, 64, 32, 3, 1)))), KINDS[precision]
    steps = 64 // kind.channels
    assert g.mean_taps == 9 / 4
    for tile in implementations(precision)[named("conv_dgrad")].candidates(bare(gradient(strided(64, 64, 64, 32, 3, 1))), H200):
        if isinstance(tile, PatchTile):
            assert patch.work(g, kind, tile, "rows").steps == steps * 9 / 4
    one = correlation(bare(gradient(strided(64, 64, 64, 32, 1, 0))))
    assert one.mean_taps == 1 / 4
    assert bool(patch.candidates(one, kind, H200)) == (kind.planes == 1)


@pytest.mark.sampled
@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("precision", "op", "taps", "tile"),
    [
        ("bf16", "conv_dgrad", 3, Tile(128, 128, 2, 3, 2)),
        ("tf32", "conv_dgrad_relu", 1, Tile(128, 64, 2, 4, 2)),
        ("fp32", "conv_dgrad", 1, Tile(128, 128, 2, 2, 1)),
        ("bf16", "conv_dgrad", 1, PatchTile(2, 8, 8, 128, 1, 6, 1, 2, turns=2)),
        ("bf16", "conv_dgrad", 3, PatchTile(4, 8, 8, 64, 2, 6, 1, 2)),
        ("tf32", "conv_dgrad", 3, PatchTile(2, 8, 8, 128, 1, 3, 1, 2, turns=2)),
        ("bf16", "conv_dgrad", 2, PatchTile(1, 16, 8, 64, 1, 4, 2, 2, swapped=True)),
        ("bf16", "conv_dgrad", 2, PatchTile(1, 16, 16, 64, 1, 6, 1, 2, turns=2, swapped=True)),
    ],
)
def test_kernels_compile_without_spills(precision, op, taps, tile):
    *_, launch = bound_on_host(gradient(strided(4, 64, 64, 16, taps, (taps - 1) // 2), op), precision, tile).launches
    report = compile_launch(launch, "90a")
    assert report.frame_bytes == 0
    assert report.registers <= 224 // tile.blocks


GRADIENTS = [
    *((1, strided(5, *sizes, taps, taps // 2)) for sizes in ((64, 128, 32), (136, 64, 16), (72, 192, 12), (64, 64, 14)) for taps in (1, 3)),
    *((3, strided(5, *sizes, taps, pad)) for sizes in ((64, 128, 32), (72, 192, 12)) for taps, pad in ((2, 0), (4, 1), (5, 2))),
]
"""Convolutions, each with how far apart the tiles are that are tested: phases that are squares of 8×8, and that are not."""


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("op", ["conv_dgrad", "conv_dgrad_relu", "conv_dgrad_add_relu"])
def test_parity(gpu, precision, op):
    """Tiles of both kernels, on blocks that have many: of a number that four divides, and not."""
    if gpu.capability != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")
    if op not in implementations(precision):
        pytest.skip("three planes have no patches")
    impl = implementations(precision)[named(op)]
    row = Row("tensorcore", precision, "gpu", "NHWC", (("wgmma", {op: impl}),))
    served = 0
    for every, shape in GRADIENTS:
        case = gradient(shape, op)
        if impl.supports(bare(case), H200):
            continue
        assert in_phases(bare(case))
        served += 1
        for tile in impl.candidates(bare(case), gpu.target)[::every]:
            few = [replace(tile, resident=min(tile.resident, blocks)) for blocks in (3, 4)] if isinstance(tile, PatchTile) else [tile]
            for each in few:
                assert parity(row, impl, case, gpu, each) <= bound(case, precision), f"{case.label} {each}"
    assert served >= 5
