"""Tests of weight gradients through registers: what every lane reads, multiplies and stores, and the barriers of a block, both on the host."""

from __future__ import annotations

from collections import Counter

import numpy as np
import played_warps
import pytest
from played_warps import Block, Stuck

from nbcnn.check.one_op import Bound
from nbcnn.gpu import device as nb
from nbcnn.gpu.language import Intrinsic
from nbcnn.modes import named
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.wgmma import wgrad, wgrad_registers, wgrad_tile, wgrad_transpose
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape

TILES = [tile for precision in ("tf32", "fp32") for tile in wgrad_tile._TILES[precision] if tile.through_registers]
RING = 1024


class Lane(Block):
    """A block whose shared memory has numbers, and whose products are kept with their words; code runs for one lane after another."""

    def __init__(self) -> None:
        super().__init__(0, 1, 1, {}, {})
        self.shared: dict[int, float] = {}
        self.products: list[tuple[int, tuple]] = []

    def _played(self, value, cuda, known=None):
        if isinstance(value, Intrinsic) and value.__name__.startswith("wgmma_m64"):
            first_sum = value.made_by[4]
            return lambda sums, *operands: self.products.append((first_sum, operands))
        return super()._played(value, cuda, known)

    def _instruction(self, name):
        known = {
            "wgmma_commit_group": lambda: None,
            "ld_shared_b32_at": lambda at: self.shared[at],
            "ld_shared_v4_b32_at": lambda at: tuple(self.shared[at + 4 * i] for i in range(4)),
            "st_shared_v4_b32_at": lambda at, *words: self.shared.update({at + 4 * i: word for i, word in enumerate(words)}),
            "cvt_rna_tf32_f32": tf32,
        }
        return known.get(name) or super()._instruction(name)


def tf32(value):
    """A float with the 10 bits of tf32's mantissa, rounded half away from zero."""
    bits = np.float32(value).view(np.uint32) + np.uint32(0x1000)
    return float((bits & np.uint32(0xFFFFE000)).view(np.float32))


def stage(tile, rng):
    """A played stage as TMA writes it, and both operands: (stationary, shifted), 32 pixels × channels."""
    lane, operands = Lane(), [rng.standard_normal((32, channels)).astype(np.float32) for channels in (tile.BM, tile.BN)]
    for pixel, channel in np.ndindex(32, tile.BM + tile.BN):
        panel, c = divmod(channel, 32)
        at = RING + panel * tile.panel_bytes + pixel * 128 + (c // 4 ^ pixel & 7) * 16 + c % 4 * 4
        lane.shared[at] = float(np.concatenate(operands, axis=1)[pixel, channel])
    return lane, operands


def transposed(lane, tile):
    """Have helper warps transpose the stationary panels of a stage."""
    read, write = lane.code(wgrad_transpose.read_panel), lane.code(wgrad_transpose.write_panel(tile))
    for panel in range(tile.BM // 32):
        values = [[0.0] * 32 for _ in range(32)]
        for each in range(32):
            read(values[each], RING + panel * tile.panel_bytes, each)
        for each in range(32):
            write(values[each], RING + panel * tile.panel_bytes, each)


def multiplied(lane, tile, warp):
    """The sums of a warp's lanes after one stage, by what the manual says of fragments: (32, BM)."""
    at, steps = lane.code(wgrad_registers.first_word(tile)), [lane.code(wgrad_registers._multiply(tile, first)) for first in (0, 2)]
    words_of = []
    for each in range(32):
        lane.products.clear()
        for step in steps:
            step(None, [0] * (wgrad_registers.WORDS * tile.planes), at(RING, warp, each), RING, 1)
        words_of.append(list(lane.products))
    sums = np.zeros((32, tile.BM))
    for products in zip(*words_of, strict=True):
        A, B = np.zeros((16, 8)), np.zeros((8, tile.BM))
        for each, (_, (a0, a1, a2, a3, _, _)) in enumerate(products):
            i, k = each // 4, each % 4
            A[i, k], A[i + 8, k], A[i, k + 4], A[i + 8, k + 4] = a0, a1, a2, a3
        start = (products[0][1][4] & 0x3FFF) << 4
        for n, k in np.ndindex(tile.BM, 8):
            at = start + n * 128 + k * 4
            B[k, n] = lane.shared[at ^ (at >> 7 & 7) << 4]
        D, first = A @ B, products[0][0]
        for each in range(32):
            i, column = each // 4, 2 * (each % 4)
            for j, h, e in np.ndindex(tile.BM // 8, 2, 2):
                sums[each, first + 4 * j + 2 * h + e] += D[i + 8 * h, 8 * j + column + e]
    return sums


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_lanes_multiply_the_pixels_of_their_channels_and_store_each_sum_once(tile):
    rng = np.random.default_rng(0)
    lane, (stationary, shifted) = stage(tile, rng)
    transposed(lane, tile)
    M, C, taps = tile.BM - 8, tile.BN - 4, 1
    store = lane.code(wgrad_registers.store_product(tile))
    for warp in range(4 * tile.groups):
        sums = multiplied(lane, tile, warp)
        for each in range(32):
            store(list(sums[each]), None, 32 * warp + each, 0, 0, 0, tile.BN // 32, M, C, taps, 1)
    got = np.zeros((M, C))
    assert len(lane.out) == M * C
    for at, value in lane.out.items():
        got[at // C, at % C] = value
    wanted = (stationary.astype(np.float64).T @ shifted)[:M, :C]
    # tf32 takes the words as they are here; two values of it are within 2^-24 of a float32, and the product of the low ones is left out.
    bound = 0 if tile.planes == 1 else 2.0**-22 * (np.abs(stationary).T @ np.abs(shifted))[:M, :C]
    assert np.all(np.abs(got - wanted) <= bound + 1e-12)


SHAPE = ConvShape(3, 40, 12, 12, 72, 3, 3, 1, 1)
NUMBERS = (
    "_multiply.<locals>.keep",
    "read_panel",
    "_transpose_share.<locals>.wanted_of",
    "add_pixels",
    "_store_share",
    "store_product",
)


def play(tile):
    """Run the first block of a gradient of SHAPE, which has all pixels; (its stages' loads into the block, the steps that it should make)."""
    case = next(case for case in conv_cases(SHAPE) if str(case.op) == "conv_wgrad" and len(case.outs) == 2)
    precision = "fp32" if tile.planes == 2 else "tf32"
    options = {"attrs": case.attrs, "layout": "NHWC", "device": nb.Host(), "tile": tile, "store": STORE[precision]}
    launch = Bound(wgrad.ops(precision)[named("conv_wgrad")], case.op, case.ins, case.outs, **options).launches[0]
    loaded = []

    def size(source):
        loaded.append(source)
        return tile.panel_bytes

    sizes = dict.fromkeys(("cp_async_bulk_tensor_2d", "cp_async_bulk_tensor_4d_im2col"), size)
    products = Counter()

    def stored(block, acc, *_):
        products[len(products)] = acc.products

    def written(block, values, at, lane):
        if tile.planes == 2:
            with block.changed:
                block.memory[at + tile.landed_bytes] = (None, tile.panel_bytes, ())

    replaced = dict.fromkeys(NUMBERS, lambda *_: 0) | {"write_panel": written, "store_product": stored}
    block = Block(0, launch.grid[0], tile.threads(True) // 32, sizes, replaced)
    block.play(launch.kernel, tuple(int(each) if isinstance(each, np.int32) else None for each in launch.args))
    assert all(barrier.bytes == 0 and barrier.left == barrier.count for barrier in block.barriers.values())
    return loaded, products


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_played_blocks_multiply_every_step_and_end(tile):
    loaded, products = play(tile)
    steps = -(-SHAPE.N * 12 * 12 // tile.BK)
    assert len(loaded) == steps * (tile.BM + tile.BN) // 32
    # Four products of eight pixels in two halves make a step; two planes are multiplied into sums of their own, which are then added.
    assert set(products.values()) == ({steps * 8} if tile.planes == 1 else {0})
    assert len(products) == 4 * tile.groups


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["full", "empty", "ready"])
def test_played_blocks_that_wait_for_the_wrong_phase_fail(kind, monkeypatch):
    """Of the barriers of one kind: operands are read before they are there or overwritten while they are multiplied, or the block stands still."""
    tile, right = TILES[0], Block._wait
    first = RING + tile.slots * (tile.stage_bytes + 8 * kind)
    waited = []

    def wait(self, at, parity):
        wrong = first <= at < first + 8 * tile.slots
        waited.append(wrong)
        right(self, at, parity ^ wrong)

    monkeypatch.setattr(Block, "_wait", wait)
    monkeypatch.setattr(played_warps, "_SECONDS", 0.5)
    with pytest.raises((Stuck, AssertionError, ValueError)):
        play(tile)
    assert any(waited)
