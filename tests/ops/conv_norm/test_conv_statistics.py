"""Tests of a convolution with the statistics of the norm behind it: the reference, the bytes of both forms, kernels compiled, every tile on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import full
from covering import Cover, new_sizes

from nbcnn.check.gradcheck import bound, parity
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.target import H200
from nbcnn.modes import MODES, named
from nbcnn.ops.conv.frame.correlation import correlation
from nbcnn.ops.conv.mma.tile import Tile as MmaTile
from nbcnn.ops.conv.wgmma import patch
from nbcnn.ops.conv.wgmma.patch import PatchTile
from nbcnn.ops.conv.wgmma.tile import KINDS, Tile
from nbcnn.ops.conv_norm import statistics
from nbcnn.ops.conv_norm.statistics import OP
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.traffic import total
from nbcnn.plan.bounds import STORE
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape

PRECISIONS = ("bf16", "tf32", "fp32")


def engine(precision, part):
    """The implementation of a part of a row that takes most shapes."""
    return [impl for name, impl in MODES["tensorcore", precision].chain(named(OP)) if name == part][-1]


def bare(case, precision):
    """The call without arrays."""
    kept, ins = STORE[precision], tuple(array.shape for array in case.ins)
    outs = case.outs[0][0], *[case.outs[1][0]] * 4
    return Call(
        *(OP, (), (), ins, outs, case.attrs, "NHWC"),
        in_dtypes=(kept, *["float32"] * (len(ins) - 1)),
        out_dtypes=(kept, *["float32"] * 4),
    )


def bare_of(shape, precision):
    """The call of a convolution without a bias."""
    return bare(*statistics.cases([(shape, False)]), precision)


def test_the_statistics_are_those_of_the_result(rng):
    (case,) = statistics.cases([(ConvShape(2, 3, 5, 4, 8, 3, 3, 1, 1), True)])
    made = [np.full((2, 8, 5, 4), np.nan, np.float32), *np.full((4, 8), np.nan, np.float32)]
    statistics.conv_statistics_fprop(*case.ins, *made, **case.attrs)
    y, mean, rstd, running_mean, running_var = made
    np.testing.assert_allclose(mean, y.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(y.var((0, 2, 3)) + 1e-5), rtol=1e-5)
    np.testing.assert_allclose(running_mean, 0.9 * case.ins[-2] + 0.1 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(running_var, 0.9 * case.ins[-1] + 0.1 * y.var((0, 2, 3), ddof=1), rtol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_epilogue_saves_the_pass_over_the_result(precision):
    """What is read and written behind the convolution is a few percent of what a pass over y would read."""
    shape = ConvShape(512, 64, 32, 32, 64, 3, 3, 1, 1)
    call = bare_of(shape, precision)
    for part in ("wgmma", "mma"):
        impl = engine(precision, part)
        call = replace(call, tile=impl.tile(call, H200))
        plain = replace(call, op=Op("conv", "fprop"), in_shapes=call.in_shapes[:2], out_shapes=call.out_shapes[:1])
        plain = replace(plain, in_dtypes=call.in_dtypes[:2], out_dtypes=call.out_dtypes[:1], attrs={"stride": 1, "pad": 1})
        before = total(next(impl for name, impl in MODES["tensorcore", precision].chain(named("conv_fprop")) if name == part).traffic(plain))
        y = 512 * 64 * 32 * 32 * (2 if precision == "bf16" else 4)
        more = total(impl.traffic(call)).logical - before.logical
        assert 0 < more < 0.12 * y, part


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize(
    "shape",
    [ConvShape(64, 64, 32, 32, 64, 3, 3, 1, 1), ConvShape(64, 512, 8, 8, 512, 3, 3, 1, 1), ConvShape(6, 64, 16, 24, 136, 5, 3, 1, 1)],
    ids=str,
)
def test_patches_leave_room_for_the_sums(shape, precision):
    g, kind = correlation(replace(bare_of(shape, precision), op=Op("conv", "fprop"))), KINDS[precision]
    for tile in patch.candidates(g, kind, H200, "moments"):
        assert patch.shared_bytes(tile, kind, patch.window(g)) + patch.sums_bytes(tile, kind, "moments") <= 227 * 1024
        # Chunks are equal, so the last tile must have as many images as the others.
        chunk = tile.chunk(g)
        assert chunk is None if g.N % tile.TN else patch.tiles_of(g, tile)[0] * tile.groups * chunk == g.GM


COMPILED = ("bf16", "mma", MmaTile(32, 64, 2, 2, 4, 4))
FURTHER = (
    ("bf16", "wgmma", Tile(128, 64, 2, 4, 2)),
    ("bf16", "wgmma", Tile(128, 256, 2, 4, 1)),
    ("tf32", "wgmma", Tile(64, 64, 1, 6, 2)),
    ("fp32", "wgmma", Tile(128, 128, 2, 2, 1)),
    ("bf16", "wgmma", PatchTile(1, 8, 32, 128, 2, 4, 1, 132)),
    ("bf16", "wgmma", PatchTile(1, 8, 16, 256, 2, 2, 1, 132)),
    ("bf16", "wgmma", PatchTile(1, 8, 16, 128, 1, 6, 1, 132, turns=2)),
    ("bf16", "wgmma", PatchTile(1, 32, 8, 64, 1, 6, 1, 132, turns=2, swapped=True)),
    ("tf32", "wgmma", PatchTile(1, 16, 8, 64, 1, 4, 2, 132, swapped=True)),
    ("tf32", "wgmma", PatchTile(1, 8, 16, 64, 2, 6, 1, 132)),
    ("tf32", "wgmma", PatchTile(1, 8, 8, 64, 1, 6, 1, 132)),
    ("fp32", "mma", MmaTile(128, 128, 2, 4, 3, 1)),
)


@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("precision", "part", "tile"), [COMPILED, *full(*FURTHER)])
def test_moments_cost_no_spill(precision, part, tile):
    (case,) = statistics.cases([(ConvShape(2, 64, 32, 32, 64, 3, 3, 1, 1), False)])
    options = {"attrs": case.attrs, "layout": "NHWC", "device": nb.Host(), "tile": tile, "store": STORE[precision]}
    launches = Bound(engine(precision, part), OP, case.ins, case.outs, **options).launches
    assert len(launches) == (4 if precision == "fp32" and part == "wgmma" else 2), "the convolution and the statistics, in fp32 behind the planes"
    report = compile_launch(launches[-2], "90a")
    assert report.frame_bytes == 0
    assert report.registers <= 65536 // (tile.threads * tile.blocks) // 8 * 8


def tried(precision, target):
    """What is tested of each case: the part of the row, its implementation, the case, and a tile; None is the chosen one.

    Of two cases other tiles are tried, too, such as have a size or a property that none before has, with few blocks, so that each has several.
    """
    for case in [*statistics.cases(), *statistics.real_cases()]:
        for part, impl in MODES["tensorcore", precision].chain(named(OP)):
            call = bare(case, precision)
            if impl.lacks(target) or impl.supports(call, target):
                continue
            every = impl.candidates(call, target) if case.label.startswith(("64→64", "64→128 16×32")) else ()
            few = [replace(tile, resident=min(tile.resident, 2)) if isinstance(tile, PatchTile) else tile for tile in every]
            for tile in [None, *new_sizes(few)]:
                yield part, impl, case, tile


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_kind_of_tile_is_tried_on_a_gpu(precision):
    tiles = [tile for part, _, _, tile in tried(precision, H200) if part == "wgmma"]
    assert len(tiles) >= 12
    assert any(isinstance(tile, Tile) for tile in tiles)
    if precision != "fp32":
        assert any(isinstance(tile, PatchTile) and tile.turns == 2 for tile in tiles)
        assert any(isinstance(tile, PatchTile) and tile.swapped for tile in tiles)
        assert any(isinstance(tile, PatchTile) and tile.swapped and tile.keeps for tile in tiles) == (precision == "bf16")


@pytest.mark.parametrize("engine", ["thin", "wgmma", "mma", "cudacore"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tile_is_right(gpu, precision, engine):
    """Of an engine, by the name of its part of the row, if it is in that row."""

    def all_tried(of):
        return ((MODES["tensorcore", of], impl, case, tile) for part, impl, case, tile in tried(of, gpu.target) if part == engine)

    cover = Cover(each for other in PRECISIONS[: PRECISIONS.index(precision)] for each in all_tried(other))
    ran = 0
    for row, impl, case, tile in all_tried(precision):
        if cover.takes_case(row, impl, case, gpu, tile):
            assert parity(row, impl, case, gpu, tile) <= bound(case, precision), (case.label, tile)
            ran += 1
    assert ran or engine not in dict(MODES["tensorcore", precision].chain(named(OP)))
