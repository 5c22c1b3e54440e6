"""Tests of weight gradients that the product writes itself: every sum once at its place in dw, on played blocks; compiled, and on a GPU."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from played_warps import Block, play_cluster

from nbcnn.check.gradcheck import bound, reference, relative_error, rounded
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.target import H200
from nbcnn.modes import named
from nbcnn.ops.conv.frame.wgrad import correlation
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.wgmma import wgrad, wgrad_square, wgrad_tile
from nbcnn.ops.conv.wgmma.split import planes_bytes
from nbcnn.ops.conv.wgmma.wgrad_square import PAIR, SquareTile
from nbcnn.ops.conv.wgmma.wgrad_whole import add_rows, put_rows, store_whole
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape

TAPS = [(3, 3), (2, 3), (3, 2), (3, 1), (1, 2)]
SQUARE, EIGHT = SquareTile(64, 3, 3, 7), SquareTile(64, 3, 3, 6, images=8)


def gradient(shape: ConvShape, bias: bool = True) -> Case:
    return next(case for case in conv_cases(shape) if str(case.op) == "conv_wgrad" and (len(case.outs) == 2) == bias)


def bare(case: Case, tile: SquareTile | None) -> Call:
    shapes = tuple(a.shape for a in case.ins), tuple(shape for shape, _ in case.outs)
    store = STORE["bf16"]
    return Call(case.op, (), (), *shapes, case.attrs, "NHWC", tile, in_dtypes=(store, store), out_dtypes=("float32",) * len(case.outs))


def launches_of(case: Case, tile: SquareTile):
    """The launches of a gradient, bound to host memory."""
    options = {"attrs": case.attrs, "layout": "NHWC", "device": nb.Host(), "tile": tile, "store": STORE["bf16"]}
    return Bound(wgrad.ops("bf16")[case.op], case.op, case.ins, case.outs, **options).launches


# -- who has what


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(("R", "S"), TAPS)
def test_every_sum_of_every_thread_is_stored_once_in_the_order_of_the_ranks(R, S, cluster, ragged):
    threads, sums, taps = 128 * R, 32 * S, R * S
    C, M = (72, 64 + 24) if ragged else (256, 128)
    m0 = c0 = 64
    blocks = [Block(rank, cluster, 1, {}, {}) for rank in range(cluster)]
    for rank, block in enumerate(blocks):
        block.rank, block.cluster.blocks = rank, blocks
        put = block.code(put_rows(R, S))
        for t in range(threads):
            put([((rank, t, e),) for e in range(sums)], 1024, t)
        assert len(block.written) == threads * sums
    found = {}
    for rank, block in enumerate(blocks):
        add = block.code(add_rows(64, R, S, threads, cluster))
        for t in range(threads):
            add(None, 1024, t, rank, m0, c0, M, C)
        assert not found.keys() & block.out.keys()
        found |= block.out
        filters = {at // (C * taps) - m0 for at in block.out}
        assert filters == {m for m in range(64 // cluster * rank, 64 // cluster * (rank + 1)) if m0 + m < M}
        for who in block.out.values():
            assert [number for number, _, _ in who] == [(rank + j) % cluster for j in range(cluster)]
            assert len({each[1:] for each in who}) == 1
    # As wgmma leaves them: thread t of warpgroup r has rows of 16 per warp, columns of 8.
    expected = {}
    for t in range(threads):
        for e in range(sums):
            m = m0 + t // 32 % 4 * 16 + t % 32 // 4 + e // 2 % 2 * 8
            tap, c = t // 128 * S + e // 32, c0 + e // 4 % 8 * 8 + t % 4 * 2 + e % 2
            if m < M and c < C:
                expected[(m * C + c) * taps + tap] = (t, e)
    assert {at: who[0][1:] for at, who in found.items()} == expected


def test_lanes_put_two_sums_into_a_bank_at_most():
    lanes = [Block(0, 1, 1, {}, {}) for _ in range(32)]
    for lane, block in enumerate(lanes):
        block.code(put_rows(3, 3))(list(range(96)), 1024, lane)
    for together in zip(*(block.written for block in lanes), strict=True):
        assert max(Counter(at // 4 % 32 for at in together).values()) <= 2


def test_sums_without_room_in_the_ring_are_refused():
    with pytest.raises(ValueError, match="no room in 1024 bytes"):
        store_whole(64, 3, 3, 384, 1, 0, 1024)


@pytest.mark.parametrize("shape", [ConvShape(512, 512, 4, 4, 512, 3, 3, 1, 1), ConvShape(16, 1024, 8, 8, 1024, 3, 3, 1, 1)], ids=str)
def test_tiles_that_have_all_pixels_are_chosen_for_many_channels(shape):
    impl = wgrad.ops("bf16")[named("conv_wgrad")]
    call = bare(gradient(replace(shape, N=1)), None)
    call = replace(call, in_shapes=tuple((shape.N, *each[1:]) for each in call.in_shapes))
    g, tile = correlation(call), impl.tile(call, H200)
    assert isinstance(tile, SquareTile)
    assert tile.whole(g)
    assert impl.scratch(replace(call, tile=tile)) < 4 * g.K * g.C


# -- bytes and launches


@pytest.mark.parametrize(("split", "cluster"), [(1, 1), (2, PAIR)])
def test_there_are_no_parts_of_the_weight_gradient(split, cluster):
    shape, tile, impl = (
        ConvShape(9, 128, 16, 16, 72, 3, 3, 1, 1),
        replace(SQUARE, split=split, cluster=cluster),
        wgrad.ops("bf16")[named("conv_wgrad")],
    )
    without, beside = (gradient(shape, bias) for bias in (False, True))
    assert impl.scratch(bare(without, tile)) == 0
    assert impl.scratch(bare(beside, tile)) == 4 * split * 2 * 72
    assert [launch.name or launch.kernel.py_func.__name__ for launch in launches_of(without, tile)] == ["conv_wgrad"]
    assert [launch.kernel.py_func.__name__ for launch in launches_of(beside, tile)] == ["square_product_kernel", "sum_partials_kernel"]
    (alone,), (product, added) = impl.traffic(bare(without, tile)), impl.traffic(bare(beside, tile))
    assert alone.write == 4 * 72 * 9 * 128
    assert product.write - alone.write == added.read == 4 * split * 2 * 72
    assert added.write == 4 * 72


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("stride", [1, 2])
def test_pixel_tiles_write_dw_where_a_part_lies_as_it_does(precision, stride):
    """One tap and one part: (K, C) in both. With more of either the second launch brings them into order, or adds them."""
    impl = wgrad.ops(precision)[named("conv_wgrad")]
    case = gradient(ConvShape(3, 64, 9, 9, 128, 1, 1, stride, 0), False)
    tile = replace(next(wgrad_tile.candidates(correlation(bare(case, None)), precision, H200)), split=1)
    options = {"attrs": case.attrs, "layout": "NHWC", "device": nb.Host(), "store": STORE[precision]}
    splits = 2 if precision == "fp32" else 0  # both operands, into planes
    *first, launch = Bound(impl, case.op, case.ins, case.outs, tile=tile, **options).launches
    assert len(first) == splits
    partials = launch.args[1]
    assert (partials.size, launch.grid[1]) == (128 * 64, 1)
    assert impl.scratch(bare(case, tile)) == (sum(planes_bytes(a.size) for a in case.ins) if splits else 0)
    assert len(Bound(impl, case.op, case.ins, case.outs, tile=replace(tile, split=2), **options).launches) == splits + 2
    more = gradient(ConvShape(3, 64, 9, 9, 128, 2, 1, 1, 0), False)
    assert len(Bound(impl, more.op, more.ins, more.outs, tile=tile, **options | {"attrs": more.attrs}).launches) == splits + 2


# -- played


class Watched(Block):
    """A block that writes down the corners of what it has TMA load, by tensor map."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.corners: dict[int, list[tuple[int, ...]]] = {0: [], 128: []}

    def _load(self, name, to, source, where) -> None:
        self.corners[source].append(where[:4])
        super()._load(name, to, source, where)


def corners(tile: SquareTile, g, m0: int, c0: int):
    """The corners of all squares and of their patches."""
    squares = itertools.product(range(0, g.N, tile.images), range(0, g.P, tile.lines), range(0, g.Q, tile.columns))
    for image, h, w in squares:
        if tile.images > 1:
            yield (m0, image, w, h), (c0, image, w - g.left, h - g.top)
        else:
            yield (m0, w, h, image), (c0, w - g.left, h - g.top, image)


def _slowly(block, sums, at, *rest):
    """A helper that reads a stage for long: nobody writes there meanwhile."""
    first, content = block._held(at)
    time.sleep(0.002)
    assert block.memory[first] is content, "overwritten while it was added up"
    return 0.0


PLAYED = [
    (SQUARE, (5, 72, 16, 16, 72)),
    (EIGHT, (33, 64, 5, 6, 64)),
    (SquareTile(64, 3, 3, 5, images=16), (37, 64, 6, 3, 72)),
]


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize(("split", "cluster"), [(1, 1), (2, PAIR)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("tile", "sizes"), PLAYED, ids=["8×8", "eight images", "sixteen"])
def test_played_blocks_write_dw(tile, sizes, bias, split, cluster):
    """No block waits for ever or leaves memory that is read; no stage is overwritten that a helper or a tensor core reads; the sums are of dw."""
    n, c, h, w, k = sizes
    tile, case = replace(tile, split=split, cluster=cluster), gradient(ConvShape(n, c, h, w, k, 3, 3, 1, 1), bias)
    g = correlation(bare(case, tile))
    assert tile.whole(g)
    launch = launches_of(case, tile)[0]
    tiles = tile.row_tiles(g) * tile.column_tiles(g)
    assert launch.grid == (tiles * split, 1)
    loads = {"cp_async_bulk_tensor_4d": lambda source: tile.patch_bytes if source else tile.panel_bytes}
    biases: list = []
    replaced = {"add_pixels.": _slowly, "store_sums": lambda block, *args: biases.append(args[-1])}
    found: dict = {}
    args = tuple(int(each) if isinstance(each, np.int32) else None for each in launch.args)
    for first in range(0, tiles * split, cluster):
        blocks = []
        for number in range(first, first + cluster):

            def fill(t, count, number=number):
                return [((number, t, e),) for e in range(count)]

            blocks.append(Watched(number, launch.grid[0], launch.block // 32, loads, replaced, fill))
        play_cluster(blocks, launch.kernel, args)
        row, column = divmod(first // cluster, tile.column_tiles(g))
        loaded = [pair for block in blocks for pair in zip(block.corners[0], block.corners[128], strict=True)]
        assert loaded == list(corners(tile, g, 64 * row, 64 * column))
        for rank, block in enumerate(blocks):
            assert not any(barrier.bytes for barrier in block.barriers.values())
            assert not found.keys() & block.out.keys()
            found |= block.out
            # The first lane of every warp alone is played: what the others would have written is empty.
            for who in filter(None, block.out.values()):
                assert [number - first for number, _, _ in who] == [(rank + j) % cluster for j in range(cluster)]
                assert len({each[1:] for each in who}) == 1
    assert any(found.values())
    assert max(found) < g.K * g.taps * g.C
    planes_b, count_b = wgrad.WgmmaWeightGradient("bf16").bias_partials(bare(case, tile))
    assert all(at < planes_b * count_b for at in biases)
    assert bool(biases) == bias


# -- compiled, and a GPU


@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("split", "cluster"), [(1, 1), (2, PAIR)])
@pytest.mark.parametrize("bias", [True, False])
def test_compiles_without_spills(bias, split, cluster):
    launch = launches_of(gradient(ConvShape(4, 128, 16, 16, 256, 3, 3, 1, 1), bias), replace(SQUARE, slots=8, split=split, cluster=cluster))[0]
    report = compile_launch(launch, "90a")
    assert (report.frame_bytes, report.cluster) == (0, 0 if cluster == 1 else cluster)
    assert report.registers * launch.block <= 65536


GRADIENTS = {
    "whole channels": ConvShape(9, 64, 16, 16, 64, 3, 3, 1, 1),
    "ragged channels": ConvShape(5, 72, 16, 24, 200, 3, 3, 1, 1),
    "two lines of taps": ConvShape(9, 128, 7, 8, 64, 2, 3, 1, 1),
    "a column of taps": ConvShape(9, 64, 8, 6, 64, 3, 1, 1, 0),
    "eight images": ConvShape(70, 136, 4, 4, 200, 3, 3, 1, 1),
    "sixteen images": ConvShape(70, 64, 2, 2, 72, 3, 3, 1, 1),
    "images of odd sides": ConvShape(21, 64, 7, 5, 64, 3, 3, 1, 1),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", GRADIENTS)
def test_parity(gpu, name, bias):
    """A block alone, and a pair; the same bits again."""
    if gpu.capability != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")
    case, impl = rounded(gradient(GRADIENTS[name], bias), "bf16"), wgrad.ops("bf16")[named("conv_wgrad")]
    wanted, limit, op = reference(case), bound(case, "bf16"), case.op
    options = {"attrs": case.attrs, "device": gpu, "layout": "NHWC", "store": STORE["bf16"]}
    kind = next(wgrad_square.candidates(correlation(bare(case, None)), gpu.target))
    tiles = [replace(kind, split=split, cluster=split) for split in (1, PAIR)]
    made = [Bound(impl, op, case.ins, case.outs, tile=tile, **options) for tile in tiles]
    compile_all(launch for each in made for launch in each.launches)
    for tile, each in zip(tiles, made, strict=True):
        each.run()
        one = each.results()
        assert max(relative_error(got, want) for got, want in zip(one, wanted, strict=True)) <= limit, tile
        each.poison()
        each.run()
        assert all(np.array_equal(got, again) for got, again in zip(one, each.results(), strict=True)), tile
