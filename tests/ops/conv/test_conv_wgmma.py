"""Tests of the Hopper engine: its correlations and packed filters in NumPy, its kernels compiled without a GPU, and all of it on one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from covering import Cover

from nbcnn.check.gradcheck import bound, parity, reference, relative_error
from nbcnn.check.one_op import Bound, pack_array
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.target import H200
from nbcnn.modes import Row, named
from nbcnn.ops.activations.table import with_activations
from nbcnn.ops.conv.frame.correlation import correlation, in_phases, pack
from nbcnn.ops.conv.frame.cost import L2_LINES, Rates, Work, cycles, lines_of
from nbcnn.ops.conv.frame.epilogue import WITH_SECOND
from nbcnn.ops.conv.fused import (
    MEAN_UP,
    activated_cases,
    pack_index,
    pooled_cases,
    relu_cases,
    second_cases,
    up_activated_cases,
    up_cases,
)
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.wgmma import patch
from nbcnn.ops.conv.wgmma.engine import IMAGE_OPS, implementations
from nbcnn.ops.conv.wgmma.patch import KeepingTile, PatchTile
from nbcnn.ops.conv.wgmma.split import launch_split
from nbcnn.ops.conv.wgmma.tile import KINDS, Tile, fits
from nbcnn.ops.kernel.call import Call, Impl
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape
from nbcnn.plan.storage import decode

SMALL = (
    ConvShape(2, 3, 4, 6, 5, 3, 3, 1, 1),
    ConvShape(1, 2, 7, 5, 4, 3, 2, 1, 0),
    ConvShape(1, 2, 9, 8, 3, 4, 4, 3, 1),
    ConvShape(2, 3, 5, 5, 2, 1, 1, 1, 0),
)
HALVED = (
    ConvShape(2, 3, 6, 8, 5, 3, 3, 2, 1),
    ConvShape(1, 2, 8, 6, 4, 7, 5, 2, 3),
    ConvShape(2, 3, 4, 6, 2, 1, 1, 2, 0),
    ConvShape(1, 2, 4, 4, 3, 2, 2, 2, 0),
)
"""Stride 2 of even images: input gradients in four phases."""
# Channels in whole rows of a tile; images that end inside a tile; filters that end inside one; strides; one pixel; the layers.
MEAN = (
    ConvShape(1, 64, 5, 7, 8, 3, 3, 1, 1),
    ConvShape(3, 64, 9, 6, 72, 3, 3, 2, 1),
    ConvShape(2, 128, 8, 8, 64, 5, 3, 1, 2),
    ConvShape(3, 64, 1, 1, 136, 1, 1, 1, 0),
    ConvShape(1, 64, 11, 10, 200, 4, 4, 3, 0),
    ConvShape(2, 96, 7, 14, 160, 5, 5, 1, 2),
    ConvShape(2, 48, 6, 8, 96, 3, 3, 2, 1),
    ConvShape(3, 32, 8, 8, 64, 1, 1, 1, 0),
)
REAL = (
    ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1),
    ConvShape(5, 128, 8, 8, 128, 3, 3, 1, 1),
    ConvShape(3, 128, 16, 16, 256, 3, 3, 1, 1),
    ConvShape(5, 128, 16, 32, 128, 3, 3, 1, 1),
    ConvShape(5, 64, 32, 32, 64, 3, 3, 1, 1),
    ConvShape(5, 64, 48, 16, 40, 5, 3, 1, 1),
)
POOLED = (
    ConvShape(5, 64, 8, 8, 64, 3, 3, 1, 1),
    ConvShape(1, 64, 4, 4, 72, 3, 3, 1, 1),
    ConvShape(3, 64, 8, 8, 64, 3, 3, 1, 1),
    ConvShape(5, 64, 6, 16, 64, 3, 3, 1, 1),
    REAL[0],
    ConvShape(5, 64, 16, 32, 128, 3, 3, 1, 1),
)
UP = (ConvShape(1, 64, 3, 5, 64, 3, 3, 1, 1), ConvShape(5, 128, 8, 8, 256, 3, 3, 1, 1))


OPS = (*IMAGE_OPS, WITH_SECOND, named("conv_elu_fprop"), named("upconv_elu_fprop"))


def made_by(precision: str) -> dict[str, Impl]:
    return with_activations(implementations(precision), ["elu"])


def bare(case: Case) -> Call:
    return Call(case.op, (), (), tuple(a.shape for a in case.ins), tuple(shape for shape, _ in case.outs), case.attrs, "NHWC")


def cases(convs, pooled, ups) -> list[Case]:
    found = [case for shape in convs for make in (conv_cases, relu_cases, activated_cases, second_cases) for case in make(shape)]
    found += [case for shape in pooled for case in pooled_cases(shape)]
    found += [case for shape in ups for make in (up_cases, up_activated_cases) for case in make(shape)]
    return [case for case in found if case.op in OPS]


def correlate(case: Case) -> np.ndarray:
    """Target (phases,N,P,Q,K) of a case's correlation, tap by tap, from filters packed as the kernel reads them."""
    g = correlation(bare(case))
    filters = pack_array(case.ins[1].astype(np.float64), pack(bare(case))).reshape(g.phases, g.K, g.R, g.S, g.C)
    source = case.ins[0].astype(np.float64).transpose(0, 2, 3, 1)
    padded = np.zeros((g.N, g.H + 40, g.W + 40, g.C))
    padded[:, 20 : 20 + g.H, 20 : 20 + g.W] = source
    target = np.zeros((g.phases, g.N, g.P, g.Q, g.K))
    for phase in range(g.phases):
        down, right = divmod(phase, 2)
        for r in range(g.R):
            for s in range(g.S):
                top, left = 20 - g.top + r + down, 20 - g.left + s + right
                tap = padded[:, top : top + g.P * g.stride : g.stride, left : left + g.Q * g.stride : g.stride]
                target[phase] += tap @ filters[phase, :, r, s].T
    return target


def finished(case: Case, target: np.ndarray) -> list[np.ndarray]:
    """What the kernel's epilogue makes of the target: bias, ReLU, mask, pooling, interleaving."""
    if target.shape[0] == 4:
        _, n, p, q, k = target.shape
        y = target.reshape(2, 2, n, p, q, k).transpose(2, 5, 3, 0, 4, 1).reshape(n, k, 2 * p, 2 * q)
    else:
        y = target[0].transpose(0, 3, 1, 2)
    if str(case.op).endswith(("dgrad_relu", str(WITH_SECOND))):
        return [(y + sum(case.ins[3:])) * (case.ins[2] > 0)]
    if len(case.ins) > 2:
        y = y + case.ins[2][:, None, None]
    if "relu" in str(case.op):
        y = np.maximum(y, 0)
    if "elu_" in str(case.op) and "relu" not in str(case.op):
        y = np.where(y > 0, y, case.attrs["alpha"] * np.expm1(np.minimum(y, 0)))
    if "pool" not in str(case.op):
        return [y]
    n, k, p, q = y.shape
    windows = y.reshape(n, k, p // 2, 2, q // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, k, p // 2, q // 2, 4)
    return [windows.max(4), pack_index(windows.argmax(4))]


@pytest.mark.parametrize("case", cases(SMALL + HALVED, SMALL[:1], SMALL[:1] + MEAN_UP), ids=lambda case: f"{case.op} {case.label}")
def test_every_pass_is_a_correlation_with_packed_filters(case):
    strided = "conv_dgrad" in str(case.op) and not str(case.op).startswith("up") and case.attrs["stride"] != 1
    if strided and not in_phases(bare(case)):
        assert "no correlation" in made_by("bf16")[case.op].supports(bare(case), H200)
        return
    for got, ref in zip(finished(case, correlate(case)), reference(case), strict=True):
        assert relative_error(got, ref) < 1e-12


def test_corners_hold_as_many_windows_as_there_are_pixels():
    for case in cases(SMALL + HALVED + MEAN, SMALL[:1], SMALL[:1] + MEAN_UP):
        if "conv_dgrad" in str(case.op) and case.attrs.get("stride", 1) != 1 and not in_phases(bare(case)):
            continue
        g = correlation(bare(case))
        lower, upper = g.corners
        for size, count, first, last in ((g.W, g.Q, lower[0], upper[0]), (g.H, g.P, lower[1], upper[1])):
            assert (size + last - first - 1) // g.stride + 1 == count


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_tiles_fit_a_multiprocessor(precision):
    made = made_by(precision)
    for case in [case for case in cases(REAL, POOLED, UP) if case.op in made]:
        g, kind = correlation(bare(case)), KINDS[precision]
        tiles = made[case.op].candidates(bare(case), H200)
        assert tiles
        assert all(fits(tile, kind) for tile in tiles if isinstance(tile, Tile))
        for tile in patch.candidates(g, kind, H200):
            assert patch.shared_bytes(tile, kind, patch.window(g)) <= 227 * 1024
            assert tile.blocks * (patch.shared_bytes(tile, kind, patch.window(g)) + 1024) <= 228 * 1024
            assert (g.P % tile.TH, g.Q % tile.TW, tile.BM % 64) == (0, 0, 0)


@pytest.mark.parametrize(("precision", "kept"), [("bf16", 9), ("tf32", None)])
def test_filters_stay_where_a_block_has_room_for_all_of_them(precision, kept):
    """Nine taps of 64 channels are 72 KB in bf16 and 144 KB in tf32, whose eighteen steps would have more barriers than there are."""
    (case,) = [case for case in conv_cases(ConvShape(8, 64, 32, 32, 64, 3, 3, 1, 1)) if str(case.op) == "conv_dgrad"]
    g, kind = correlation(bare(case)), KINDS[precision]
    keeping = [tile for tile in patch.candidates(g, kind, H200) if tile.keeps]
    assert {(tile.slots, tile.kept) for tile in keeping} == ({(kept, kept)} if kept else set())
    for tile in keeping:
        assert patch.tiles_of(g, tile)[1] == 1
        # Two for each stage of filters and each of two patches, and for each warpgroup those of its mask and its turn.
        assert 8 * (2 * tile.slots + 8) <= patch.BARRIER_BYTES
    wide = correlation(bare(next(case for case in conv_cases(ConvShape(8, 64, 32, 32, 256, 3, 3, 1, 1)) if str(case.op) == "conv_fprop")))
    assert not any(tile.keeps for tile in patch.candidates(wide, kind, H200) if tile.BN < wide.K)


@pytest.mark.parametrize("case", cases(SMALL[:1] + HALVED[:1], (), SMALL[:1]), ids=lambda case: f"{case.op} {case.label}")
def test_channels_of_each_tap_are_padded(case):
    if "conv_dgrad" in str(case.op) and case.attrs.get("stride", 1) != 1 and not in_phases(bare(case)):
        return
    g = correlation(bare(case))
    plain = np.atleast_2d(pack(bare(case))).reshape(-1, g.phases, g.K, g.taps, g.C)
    padded = np.atleast_2d(pack(bare(case), of_tap=8)).reshape(-1, g.phases, g.K, g.taps, 8)
    assert np.array_equal(padded[..., : g.C], plain)
    assert (padded[..., g.C :] == -1).all()


def test_refusals_are_in_words():
    bf16 = made_by("bf16")
    by_op = {case.op: case for case in cases((ConvShape(1, 32, 5, 7, 60, 3, 3, 1, 1),), (), ())}
    assert "60 channels to sum over are not a multiple of 8" in bf16[named("conv_dgrad")].supports(bare(by_op[named("conv_dgrad")]), H200)
    served = cases((ConvShape(1, 48, 6, 8, 96, 3, 3, 2, 1), ConvShape(1, 32, 6, 8, 96, 1, 1, 1, 0)), (), ())
    assert {case.op for case in served if bf16[case.op].supports(bare(case), H200)} == {WITH_SECOND}, "which patches alone make"
    (odd,) = [c for c in pooled_cases(ConvShape(1, 64, 4, 6, 64, 3, 3, 1, 1)) if str(c.op) == "conv_relu_pool_fprop"]
    assert "rows of 6 pixels" in bf16[named("conv_relu_pool_fprop")].supports(bare(odd), H200)


def bound_on_host(case: Case, precision: str, tile: Tile | PatchTile | None = None) -> Bound:
    return Bound(
        made_by(precision)[case.op],
        case.op,
        case.ins,
        case.outs,
        attrs=case.attrs,
        layout="NHWC",
        device=nb.Host(),
        tile=tile,
        store=STORE[precision],
    )


@pytest.mark.sampled
@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("precision", "op", "tile"),
    [
        ("bf16", "conv_relu_pool_fprop", Tile(128, 128, 2, 3, 2)),
        ("bf16", "conv_elu_fprop", Tile(128, 128, 2, 3, 2)),
        ("bf16", "conv_elu_fprop", PatchTile(1, 32, 8, 64, 1, 6, 1, 2, turns=2, swapped=True)),
        ("tf32", "conv_elu_fprop", PatchTile(2, 8, 8, 128, 2, 4, 1, 2)),
        ("tf32", "upconv_relu_fprop", Tile(128, 128, 2, 3, 2)),
        ("fp32", "conv_dgrad_relu", Tile(128, 128, 2, 2, 1)),
        ("bf16", "upconv_dgrad_relu", PatchTile(2, 8, 8, 256, 2, 3, 1, 2)),
        ("tf32", "conv_relu_pool_fprop", PatchTile(2, 8, 8, 128, 2, 4, 1, 2)),
        ("bf16", "conv_dgrad_relu", KeepingTile(4, 8, 8, 64, 2, 9, 1, 2, 9)),
        ("bf16", "conv_dgrad_relu", PatchTile(2, 8, 8, 128, 1, 6, 1, 2, turns=2)),
        ("bf16", "conv_relu_fprop", PatchTile(1, 32, 8, 64, 1, 6, 1, 2, turns=2, swapped=True)),
        ("bf16", "conv_dgrad_relu", PatchTile(1, 16, 16, 64, 1, 6, 1, 2, turns=2, swapped=True)),
        ("bf16", WITH_SECOND, PatchTile(1, 16, 16, 64, 1, 6, 1, 2, turns=2, swapped=True)),
        ("tf32", WITH_SECOND, PatchTile(2, 8, 8, 128, 2, 4, 1, 2)),
        ("tf32", "conv_relu_fprop", PatchTile(1, 16, 16, 64, 2, 6, 1, 2, swapped=True)),
    ],
)
def test_kernels_compile_without_spills(precision, op, tile):
    side = 32 if isinstance(tile, PatchTile) and tile.swapped else 8
    shape = ConvShape(1, 64, side, side, 64, 3, 3, 1, 1)
    case = next(c for c in cases((shape,), (shape,), (shape,)) if c.op == named(op))
    for launch in bound_on_host(case, precision, tile).launches:
        report = compile_launch(launch, "90a")
        assert report.frame_bytes == 0
        # 224 registers are what 288 threads can have, 112 where two blocks share a multiprocessor.
        assert report.registers <= 224 // tile.blocks


def tried(impl: Impl, case: Case, precision: str, gpu: nb.Gpu) -> list[Tile | PatchTile | None]:
    """The tiles to test: the chosen one; of the cases whose images end inside a tile others, too, with blocks that take several.

    An op tries a quarter of them, and the next op the next quarter, since each is a kernel to compile.
    """
    if case.ins[0].shape[0] != 5:
        return [None]
    tiles = impl.candidates(bare(case), gpu.target)[list(map(named, OPS)).index(case.op) % 4 :: 4]
    return [None, *map(in_few_blocks, tiles)]


def in_few_blocks(tile: Tile | PatchTile) -> Tile | PatchTile:
    return replace(tile, resident=min(tile.resident, 2)) if isinstance(tile, PatchTile) else tile


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_ops_share_the_tiles_among_them(precision):
    """Every tile that a plain convolution has is tried by one op or another."""
    plain, every = set(), set()
    for case in cases(MEAN + REAL, POOLED, UP):
        impl = made_by(precision).get(case.op)
        if impl and case.ins[0].shape[0] == 5 and not impl.supports(bare(case), H200):
            every |= set(tried(impl, case, precision, SimpleNamespace(target=H200)))
            plain |= set(map(in_few_blocks, impl.candidates(bare(case), H200))) if case.op == named("conv_fprop") else set()
    assert plain <= every


PRECISIONS = ("bf16", "tf32", "fp32")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parity(gpu, precision):
    """Every op takes its first case, and every tile that `tried` has is some op's."""
    if gpu.capability != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")

    def all_tried(of):
        row, impls = Row("tensorcore", of, "gpu", "NHWC", (("wgmma", made_by(of)),)), made_by(of)
        for case in cases(MEAN + REAL, POOLED, UP):
            if (impl := impls.get(case.op)) is not None and not impl.supports(bare(case), H200):
                yield from ((row, impl, case, tile) for tile in tried(impl, case, of, gpu))

    earlier = PRECISIONS[: PRECISIONS.index(precision)]
    cover, ran = Cover(each for other in earlier for each in all_tried(other)), set()
    for row, impl, case, tile in all_tried(precision):
        if cover.takes_case(row, impl, case, gpu, tile) or case.op not in ran:
            assert parity(row, impl, case, gpu, tile) <= bound(case, precision), f"{case.op} {case.label} {tile}"
            ran.add(case.op)
    assert ran == set(map(named, OPS)) & set(made_by(precision))


def test_lines_of_l2_are_those_that_pixels_of_a_row_meet():
    """Pixels of 80 bytes meet 1.5 lines of 128 bytes on average, all of them in part; whole lines count once, whatever a part costs."""
    assert [lines_of(row) for row in (128, 256, 64, 80, 48, 192)] == [1.0, 1.0, 1.0, 1.5, 1.25, 1.25]
    assert [lines_of(row, 0.5) for row in (128, 256, 64, 80)] == [1.0, 1.0, 1.5, 2.25]


def test_l2_is_shared_by_all_blocks_that_run():
    """A step that waits for lines of L2 takes twice as long where twice as many blocks run."""
    rates = Rates(1.0, 1e9, 1e9, 0.0, 0.0, 1e9, 0.0, 1e9, 8, lines=L2_LINES)
    half, whole = (cycles(Work(tiles, 1, 10, 3, 1e-3, 0.0, 0.0, 0.0, 0.0, lines=600), rates, H200) for tiles in (66, 132))
    assert half == pytest.approx(10 * 66 * 600 / L2_LINES)
    assert whole == pytest.approx(2 * half)


def test_the_model_hides_the_end_of_a_tile_behind_the_other_turn():
    work = Work(tiles=8 * 132, together=1, steps=36, ahead=6, tensor=512, shared=0, fetched=0, ends=70_000, memory=0)
    rates = Rates(tensor=1, shared=1, fetched=1, latency=0, start=0, ends=35, covered=0, memory=1, soft=4)
    assert cycles(work, rates, H200) == pytest.approx(8 * (36 * 512 + 2000))
    assert cycles(replace(work, turns=2), rates, H200) == pytest.approx(8 * 36 * 512 + 2000)
    short = replace(work, steps=2)  # here the ends take longer than the other's products
    assert cycles(replace(short, turns=2), rates, H200) == pytest.approx(8 * (2 * 512 + 2000) / 2 + 2 * 512)


@pytest.mark.parametrize("op", ["conv_fprop", "conv_relu_fprop", "conv_dgrad_relu", "conv_relu_pool_fprop", "upconv_relu_fprop"])
def test_the_gpu_tests_tiles_whose_turns_go_round(op):
    """Of two blocks each has five tiles or more, so that each of its warpgroups waits for its turn again, and skips the other's stages."""
    of = [case for case in cases(MEAN + REAL, POOLED, UP) if case.op == named(op) and case.ins[0].shape[0] == 5]
    most = 0
    for case in of:
        for tile in made_by("bf16")[named(op)].candidates(bare(case), H200):
            if isinstance(tile, PatchTile) and tile.turns == 2:
                down, across = patch.tiles_of(correlation(bare(case)), tile)
                most = max(most, down * across)
    assert most >= 10


def test_turns_are_of_two_warpgroups_alone():
    PatchTile(2, 8, 8, 128, 1, 6, 1, 2, turns=2)
    for groups, turns in ((2, 2), (1, 3)):
        with pytest.raises(ValueError, match="two warpgroups take tiles alternately"):
            PatchTile(2, 8, 8, 128, groups, 6, 1, 2, turns=turns)
    with pytest.raises(ValueError, match="filters stay where products are swapped"):
        KeepingTile(2, 8, 8, 64, 1, 9, 1, 2, 9, turns=2)
    KeepingTile(1, 16, 8, 64, 1, 9, 1, 2, 9, turns=2, swapped=True)


def test_swapped_products_have_whole_strips():
    for TN, TH, TW, BN, groups in ((1, 32, 8, 64, 1), (1, 16, 16, 64, 1), (2, 16, 8, 64, 1), (1, 16, 16, 64, 2)):
        tile = PatchTile(TN, TH, TW, BN, groups, 6, 1, 2, swapped=True)
        assert tile.strip * tile.strips * groups == tile.BM
    for TN, TH, TW, BN, groups in ((1, 16, 8, 128, 1), (1, 16, 32, 64, 1), (1, 16, 8, 64, 2)):
        with pytest.raises(ValueError, match="one or two strips"):
            PatchTile(TN, TH, TW, BN, groups, 6, 1, 2, swapped=True)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_products_of_64_channels_are_swapped(precision):
    """They read less shared memory than the tensor cores take; in tf32 two tiles in turn would be of too few pixels, and masks come word by word."""
    by_op = {case.op: bare(case) for case in cases((ConvShape(64, 64, 32, 32, 64, 3, 3, 1, 1),), (), ())}
    impl = made_by(precision)[named("conv_fprop")]
    for op in ("conv_fprop", "conv_dgrad", "conv_dgrad_relu"):
        tile = impl.tile(by_op[named(op)], H200)
        assert tile.swapped == (precision == "bf16" or op != "conv_dgrad_relu"), op
    assert impl.tile(by_op[named("conv_fprop")], H200).turns == (2 if precision == "bf16" else 1)


def test_three_planes_of_bfloat16_are_a_float32(device, rng):
    count = 4 * 300  # of the second block some threads have nothing
    values = rng.standard_normal(count).astype(np.float32)
    x, planes = device.empty(count, "float32"), device.empty(3 * count, "uint16")
    device.upload(x, values)
    launch_split(x, planes, count).run(device.stream)
    parts = decode(device.download(planes), "bfloat16").reshape(3, count).astype(np.float64)
    assert (np.abs(parts[0] - values) <= 2.0**-8 * np.abs(values)).all()
    assert (np.abs(parts.sum(0) - values) <= 2.0**-25 * np.abs(values)).all()
