"""Tests of weight gradients by clusters: which parts are added where and in which order, on played blocks; compiled, and on a GPU."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from played_warps import Block, on_host, play_cluster

from nbcnn.check.gradcheck import bound, reference, relative_error, rounded
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.target import H200
from nbcnn.modes import named
from nbcnn.ops.conv.frame.wgrad import correlation
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.wgmma import wgrad, wgrad_square
from nbcnn.ops.conv.wgmma.wgrad_cluster import add_ranks, place_of_block, put_sums, steps_of_part
from nbcnn.ops.conv.wgmma.wgrad_square import PAIR, SquareTile
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape

SQUARE = SquareTile(64, 3, 3, 8)
EVERY = [SQUARE, SquareTile(64, 2, 3, 8), SquareTile(64, 3, 2, 8), SquareTile(64, 3, 1, 8)]


def gradient(shape: ConvShape, bias: bool = True) -> Case:
    return next(case for case in conv_cases(shape) if str(case.op) == "conv_wgrad" and (len(case.outs) == 2) == bias)


def bare(case: Case, tile: SquareTile) -> Call:
    shapes = tuple(a.shape for a in case.ins), tuple(shape for shape, _ in case.outs)
    store = STORE["bf16"]
    return Call(case.op, (), (), *shapes, case.attrs, "NHWC", tile, in_dtypes=(store, store), out_dtypes=("float32",) * len(case.outs))


def product_of(case: Case, tile: SquareTile):
    """The launches of a gradient, bound to host memory: the product first."""
    options = {"attrs": case.attrs, "layout": "NHWC", "device": nb.Host(), "tile": tile, "store": STORE["bf16"]}
    return Bound(wgrad.ops("bf16")[case.op], case.op, case.ins, case.outs, **options).launches


def numbers(args: tuple) -> tuple:
    return tuple(int(each) if isinstance(each, np.int32) else None for each in args)


# -- who has what


@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize(("M", "column_tiles", "planes"), [(64, 1, 5), (200, 3, 2), (128, 2, 1)])
def test_a_cluster_has_neighbouring_parts_of_one_tile(cluster, M, column_tiles, planes):
    rows = -(-M // 64)
    grid = rows * column_tiles * planes * cluster
    placed = [Block(number, grid, 1, {}, {}).code(place_of_block(64, cluster))(M, column_tiles) for number in range(grid)]
    assert sorted(placed) == sorted((r, c, z) for r in range(rows) for c in range(column_tiles) for z in range(planes * cluster))
    for first in range(0, grid, cluster):
        row, column, z = placed[first]
        assert z % cluster == 0
        assert placed[first : first + cluster] == [(row, column, z + rank) for rank in range(cluster)]
    # All tiles of some parts are behind each other.
    assert [z // cluster for _, _, z in placed] == sorted(z // cluster for _, _, z in placed)


@pytest.mark.parametrize(("steps", "parts"), [(4, 4), (5, 4), (7, 4), (8, 4), (131, 128), (8192, 128), (133, 132)])
def test_every_part_has_a_step(steps, parts):
    share = on_host(steps_of_part)
    spans = [share(z, steps, parts) for z in range(parts)]
    assert [at for first, end in spans for at in range(first, end)] == list(range(steps))
    assert all(-(-steps // parts) - 1 <= end - first <= -(-steps // parts) and end > first for first, end in spans)


def test_parts_are_whole_clusters_of_blocks_with_steps():
    shape = ConvShape(3, 64, 16, 16, 64, 3, 3, 1, 1)
    g = correlation(bare(gradient(shape), SQUARE))
    assert SQUARE.pixel_steps(g) == 12
    for cluster, split, parts in ((4, 1, 4), (4, 3, 4), (4, 4, 4), (4, 5, 8), (4, 12, 12), (4, 128, 12), (2, 3, 4), (2, 128, 12), (1, 5, 4)):
        tile = replace(SQUARE, split=split, cluster=cluster)
        assert (tile.parts(g), tile.partials_written(g)) == (parts, parts // cluster)
        assert tile.steps(g) == -(-12 // parts)
    few = ConvShape(1, 64, 8, 8, 64, 3, 3, 1, 1)
    assert not [tile for tile in wgrad_square.candidates(correlation(bare(gradient(few), SQUARE)), H200) if tile.cluster > 1]


def test_pairs_are_candidates_beside_single_blocks():
    g = correlation(bare(gradient(ConvShape(512, 64, 32, 32, 64, 3, 3, 1, 1)), SQUARE))
    assert {(tile.split, tile.cluster) for tile in wgrad_square.candidates(g, H200)} == {(66, 1), (66, PAIR), (132, 1), (132, PAIR)}


# -- played


def form(tile):
    """(threads, sums of a thread, place of a four)."""
    return tile.consumers, 32 * tile.S, wgrad_square.place_of_four()


@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("tile", EVERY, ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_sum_of_every_thread_is_stored_once_in_the_order_of_the_ranks(tile, cluster, ragged):
    """As without clusters, where a thread stores its own: the same place has the sums of the same thread of all ranks, from the owner's on."""
    threads, sums, place = form(tile)
    taps_across, taps = tile.S, tile.R * tile.S
    C, M = (72, tile.BM + 24) if ragged else (256, 2 * tile.BM)
    m0 = tile.BM
    column0 = 64
    blocks = [Block(rank, cluster, 1, {}, {}) for rank in range(cluster)]
    for rank, block in enumerate(blocks):
        block.rank, block.cluster.blocks = rank, blocks
        put = block.code(put_sums(threads, sums))
        for t in range(threads):
            put([((rank, t, e),) for e in range(sums)], 1024, t)
        assert sorted(block.written) == list(range(1024, 1024 + 4 * threads * sums, 4))
    plane = 2
    for rank, block in enumerate(blocks):
        add = block.code(add_ranks(threads, sums, cluster, place))
        for t in range(threads):
            add(None, 1024, t, rank, plane, m0, column0, M, C, taps, taps_across)
    found = {}
    for block in blocks:
        assert not found.keys() & block.out.keys()
        found |= block.out
    share = sums // cluster
    assert found
    for who in found.values():
        (_, t, e), owner = who[0], who[0][2] // share
        assert who == tuple(((owner + j) % cluster, t, e) for j in range(cluster))
    # As `square_product_kernel` stores them: thread t of warpgroup r has rows of 16 per warp, columns of 8.
    expected = {}
    for t in range(threads):
        for e in range(sums):
            m = m0 + t // 32 % 4 * 16 + t % 32 // 4 + e // 2 % 2 * 8
            tap, c = t // 128 * tile.S + e // 32, column0 + e // 4 % 8 * 8 + t % 4 * 2 + e % 2
            if m < M and c < C:
                expected[((plane * M + m) * taps + tap) * C + c] = (t, e)
    assert {at: who[0][1:] for at, who in found.items()} == expected


def _slowly(block, sums, at, *rest):
    """A helper that reads a stage for long: nobody writes there meanwhile."""
    first, content = block._held(at)
    time.sleep(0.002)
    assert block.memory[first] is content, "overwritten while it was added up"
    return 0.0


PLAYED = (
    (SquareTile(64, 3, 3, 7), True, (5, 64, 16, 16, 64), 3),
    (SquareTile(64, 3, 3, 7), False, (2, 64, 16, 16, 64), 3),
    (SquareTile(64, 3, 3, 6, images=8), True, (33, 64, 4, 4, 64), 3),
    (SquareTile(64, 3, 3, 5, images=16), False, (65, 72, 2, 4, 64), 3),
)


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize(("cluster", "split"), [(4, 8), (2, 4), (4, 5)])
@pytest.mark.parametrize(("tile", "bias", "sizes", "taps"), PLAYED)
def test_played_clusters_add_the_parts_of_their_blocks(tile, bias, sizes, taps, cluster, split):
    """No block waits for ever or leaves memory that is read; no stage is overwritten that a helper or a tensor core reads; every plane is whole."""
    n, c, h, w, k = sizes
    tile, case = replace(tile, split=split, cluster=cluster), gradient(ConvShape(n, c, h, w, k, taps, taps, 1, taps // 2), bias)
    g = correlation(bare(case, tile))
    launch = product_of(case, tile)[0]
    parts, planes = tile.parts(g), tile.partials_written(g)
    tiles = tile.row_tiles(g) * tile.column_tiles(g)
    assert launch.grid == (tiles * parts, 1)
    assert parts % cluster == 0
    loads = {"cp_async_bulk_tensor_4d": lambda source: tile.patch_bytes if source else tile.panel_bytes}
    biases: list = []
    replaced = {
        "add_pixels.": _slowly,
        "store_sums": lambda block, *args: biases.append(args[-1]),
    }
    _, sums, _ = form(tile)
    found, seen, share = {}, set(), sums // cluster
    for first in range(0, tiles * parts, cluster):
        blocks = []
        for number in range(first, first + cluster):

            def fill(t, count, number=number):
                return [((number, t, e),) for e in range(count)]

            blocks.append(Block(number, launch.grid[0], launch.block // 32, loads, replaced, fill))
        play_cluster(blocks, launch.kernel, numbers(launch.args))
        for rank, block in enumerate(blocks):
            assert not any(barrier.bytes for barrier in block.barriers.values())
            assert not found.keys() & block.out.keys()
            found |= block.out
            for who in block.out.values():
                assert [number - first for number, _, _ in who] == [(rank + j) % cluster for j in range(cluster)]
                assert {who[0][1:]} == {each[1:] for each in who}
                assert who[0][2] // share == rank
                seen.add(who)
    # Lane 0 of each warp has a place of its own for each of its sums.
    assert len(seen) == len(found)
    assert max(found) < planes * g.K * g.taps * g.C
    # The bias gradient has a plane of sums for each part, not for each cluster.
    planes_b, count_b = wgrad.WgmmaWeightGradient("bf16").bias_partials(bare(case, tile))
    assert planes_b % parts == 0
    # Every share of the channels is stored where it belongs, by the helpers of its part alone.
    assert all(at < planes_b * count_b for at in biases)
    assert not bias or len({at for at in biases if at >= 0}) > parts // 2
    assert bool(biases) == bias


# -- compiled, and a GPU


@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("bias", [True, False])
def test_compiles_without_spills(bias):
    tile = replace(SQUARE, split=8, cluster=PAIR)
    launch = product_of(gradient(ConvShape(4, 128, 16, 16, 256, 3, 3, 1, 1), bias), tile)[0]
    report = compile_launch(launch, "90a")
    assert (report.frame_bytes, report.cluster) == (0, tile.cluster)
    assert report.registers * launch.block <= 65536


@pytest.mark.parametrize("tile", EVERY, ids=str)
def test_sums_fit_into_the_ring(tile):
    threads, sums, *_ = form(tile)
    assert 4 * threads * sums <= tile.slots * tile.stage_bytes
    assert sums // 4 % 4 == 0


def test_bytes_of_parts_are_those_of_clusters():
    shape = ConvShape(64, 64, 16, 16, 64, 3, 3, 1, 1)
    case, impl = gradient(shape), wgrad.ops("bf16")[named("conv_wgrad")]
    alone, together = (bare(case, replace(SQUARE, split=32, cluster=cluster)) for cluster in (1, 4))
    part, sums = 4 * 64 * 9 * 64, 4 * 32 * 64
    assert (impl.scratch(alone), impl.scratch(together)) == (32 * part + sums, 8 * part + sums)
    one, four = impl.traffic(alone), impl.traffic(together)
    assert one[0].write - four[0].write == 24 * part
    assert one[1].read - four[1].read == 24 * part


GRADIENTS = {
    "whole channels": ConvShape(9, 64, 16, 16, 64, 3, 3, 1, 1),
    "ragged channels": ConvShape(5, 72, 16, 24, 200, 3, 3, 1, 1),
    "two lines of taps": ConvShape(9, 128, 7, 8, 64, 2, 3, 1, 1),
}
PARTS = (2, 5, 16)
"""Blocks of an output tile: pairs, and not."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", GRADIENTS)
def test_parity(gpu, name, bias):
    """Pairs of blocks; the same bits again."""
    if gpu.capability != (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    case, impl = rounded(gradient(GRADIENTS[name], bias), "bf16"), wgrad.ops("bf16")[named("conv_wgrad")]
    wanted, limit, op = reference(case), bound(case, "bf16"), case.op
    options = {"attrs": case.attrs, "device": gpu, "layout": "NHWC", "store": STORE["bf16"]}
    found = [tile for tile in impl.candidates(bare(case, SQUARE), gpu.target) if isinstance(tile, SquareTile)]
    kinds = dict.fromkeys(replace(tile, split=1, cluster=1) for tile in found)
    tiles = [replace(tile, cluster=PAIR, split=split) for tile in kinds for split in PARTS]
    made = [Bound(impl, op, case.ins, case.outs, tile=tile, **options) for tile in tiles]
    compile_all(launch for each in made for launch in each.launches)
    for tile, each in zip(tiles, made, strict=True):
        each.run()
        one = each.results()
        assert max(relative_error(got, want) for got, want in zip(one, wanted, strict=True)) <= limit, tile
        each.poison()
        each.run()
        assert all(np.array_equal(got, again) for got, again in zip(one, each.results(), strict=True)), tile
