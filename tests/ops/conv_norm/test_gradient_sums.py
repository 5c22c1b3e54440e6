"""Tests of an input gradient with the sums of the norm in front: the reference, steps merged, kernels compiled, every tile on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from compiled import full
from covering import Cover, new_sizes
from played_warps import Block

from nbcnn.check.gradcheck import bound, parity
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, f4, jit, u4
from nbcnn.gpu.target import H200
from nbcnn.modes import MODES, named
from nbcnn.ops.activations.table import ACTIVATIONS
from nbcnn.ops.conv.frame.correlation import correlation
from nbcnn.ops.conv.reference import conv_dgrad
from nbcnn.ops.conv.wgmma import patch
from nbcnn.ops.conv.wgmma.patch import KeepingTile, PatchTile
from nbcnn.ops.conv.wgmma.patch_gradient import leave_sums, put_sums, sign_words, take_signs, take_staged
from nbcnn.ops.conv.wgmma.tile import KINDS
from nbcnn.ops.conv_norm import gradient_sums
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.traffic import total
from nbcnn.ops.norms.batch_reference import batchnorm_add_relu_grads, behind
from nbcnn.ops.ptx.asm import byte_address_shared
from nbcnn.ops.ptx.vector import load1_if
from nbcnn.plan.bounds import STORE
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, numel
from nbcnn.plan.storage import decode, encode

PRECISIONS = ("bf16", "tf32")
RELU, ADD_RELU = "conv_dgrad_batchnorm_relu_sums", "conv_dgrad_batchnorm_add_relu_sums"


def engine(precision, op=RELU):
    (impl,) = [impl for name, impl in MODES["tensorcore", precision].chain(named(op)) if name == "wgmma"]
    return impl


def bare(case, precision):
    """The call without arrays."""
    kept, ins, outs = STORE[precision], tuple(array.shape for array in case.ins), tuple(shape for shape, _ in case.outs)
    stored = [tuple(kept if len(shape) == 4 and at != 1 else "float32" for at, shape in enumerate(shapes)) for shapes in (ins, outs)]
    stored[1] = (kept, *["float32"] * 3)
    return Call(case.op, (), (), ins, outs, case.attrs, "NHWC", in_dtypes=stored[0], out_dtypes=stored[1])


def cases_of(shape, op=RELU):
    return [case for case in gradient_sums.cases([shape]) if case.op == named(op)]


@pytest.mark.parametrize("which", range(2))
def test_the_reference_begins_what_the_norms_gradient_is(rng, which):
    """With the gradient that follows it makes what `batchnorm_add_relu_grads` makes of the convolution's."""
    case = cases_of(gradient_sums.CONVS[0], ADD_RELU)[which]
    dy, w, x, y, weight, mean, rstd, *more = case.ins
    made = [np.full(shape, np.nan, np.float32) for shape, _ in case.outs]
    gradient_sums.REFERENCES[named(ADD_RELU)](*case.ins, *made, **case.attrs)
    plain = np.empty_like(x)
    conv_dgrad(dy, w, plain, **case.attrs)
    dx, dother, dweight, dbias = np.empty_like(x), np.empty_like(x), np.empty_like(weight), np.empty_like(weight)
    batchnorm_add_relu_grads(plain, x, y, weight, mean, rstd, *more, dx, dother, dweight, dbias)
    np.testing.assert_allclose(made[0], dother, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made[1], np.concatenate([dbias, dweight]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made[2], dweight, rtol=1e-4, atol=1e-4)


def test_it_serves_what_patches_make():
    shape = ConvShape(64, 64, 32, 32, 64, 3, 3, 1, 1)
    refused = {
        "squares of 8×8": ConvShape(64, 64, 12, 12, 64, 3, 3, 1, 1),
    }
    for precision in PRECISIONS:
        assert engine(precision).supports(bare(cases_of(shape)[0], precision), H200) is None
    for reason, other in refused.items():
        assert reason in engine("bf16").supports(bare(cases_of(other)[0], "bf16"), H200)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [ConvShape(64, 64, 32, 32, 64, 3, 3, 1, 1), ConvShape(64, 512, 8, 8, 512, 3, 3, 1, 1), ConvShape(6, 64, 16, 24, 136, 5, 3, 1, 1)],
    ids=str,
)
def test_tiles_leave_room_for_the_sums_and_cut_the_pixels_into_equal_chunks(shape, precision):
    call, kind = bare(cases_of(shape)[0], precision), KINDS[precision]
    g = correlation(replace(call, op=Op("conv", "dgrad")))
    tiles = engine(precision).candidates(call, H200)
    assert tiles
    for tile in tiles:
        assert patch.shared_bytes(tile, kind, patch.window(g)) + patch.sums_bytes(tile, kind, "sums") <= 227 * 1024
        assert patch.tiles_of(g, tile)[0] * tile.groups * tile.chunk(g) == g.GM


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_saves_the_pass_over_the_gradient_and_its_input(precision):
    shape = ConvShape(512, 64, 32, 32, 64, 3, 3, 1, 1)
    call = bare(cases_of(shape)[0], precision)
    impl = engine(precision)
    call = replace(call, tile=impl.tile(call, H200))
    plain = replace(call, op=Op("conv", "dgrad"), in_shapes=call.in_shapes[:2], out_shapes=call.out_shapes[:1])
    plain = replace(plain, in_dtypes=call.in_dtypes[:2], out_dtypes=call.out_dtypes[:1])
    (before,), made = engine(precision, "conv_dgrad").traffic(plain), impl.traffic(call)
    image = numel(shape.x_shape) * (2 if precision == "bf16" else 4)
    assert len(made) == 2
    assert image < total(made).logical - before.logical < 1.12 * image


TILES = (
    ("bf16", KeepingTile(1, 32, 8, 64, 1, 9, 1, 132, turns=2, swapped=True, kept=9), 1),
    ("bf16", PatchTile(1, 8, 16, 128, 1, 6, 1, 132, turns=2), 1),
    ("bf16", PatchTile(1, 8, 16, 128, 1, 6, 1, 132, turns=2), 2),
    ("bf16", PatchTile(1, 16, 16, 128, 2, 3, 1, 132), 1),
    ("bf16", PatchTile(1, 8, 16, 256, 2, 2, 1, 132), 1),
    ("bf16", PatchTile(1, 8, 16, 64, 2, 4, 2, 264), 1),
    ("bf16", PatchTile(1, 8, 8, 64, 1, 4, 2, 264), 1),
    ("bf16", PatchTile(1, 16, 16, 64, 2, 6, 1, 132, swapped=True), 1),
    ("bf16", PatchTile(1, 16, 8, 64, 1, 4, 2, 264, swapped=True), 1),
    ("tf32", PatchTile(1, 8, 32, 64, 2, 6, 1, 132), 1),
    ("tf32", PatchTile(1, 8, 16, 128, 2, 6, 1, 132), 1),
)
"""Precisions, tiles, and strides."""


@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("op", [RELU, ADD_RELU])
@pytest.mark.parametrize(("precision", "tile", "stride"), [TILES[0], *full(*TILES[1:])])
def test_sums_cost_no_spill(precision, tile, stride, op):
    """With a second gradient, the longest form."""
    case = cases_of(ConvShape(2, 64, 32, 32, 64, 3, 3, stride, 1), op)[1]
    options = {"attrs": case.attrs, "layout": "NHWC", "device": nb.Host(), "tile": tile, "store": STORE[precision]}
    launches = Bound(engine(precision, op), op, case.ins, case.outs, **options).launches
    assert len(launches) == 2, "the convolution, and the sums of its chunks"
    report = compile_launch(launches[0], "90a")
    assert report.frame_bytes == 0
    assert report.registers <= 65536 // (patch.threads_of(tile, "sums") * tile.blocks) // 8 * 8
    if patch.moves_registers(tile, "sums"):
        # What a block has at its start is what its threads have after the exchange: with less, those that ask for more would wait for ever.
        after = patch.WARPGROUP * patch.PRODUCER_REGISTERS + 2 * patch.WARPGROUP * patch.CONSUMER_REGISTERS
        assert 3 * patch.WARPGROUP * report.registers == after


WARPGROUP, K = 128, 136
OF_PARTS = (
    ("bf16", PatchTile(1, 32, 8, 64, 1, 6, 1, 132, turns=2, swapped=True)),
    ("bf16", PatchTile(1, 8, 16, 128, 1, 6, 1, 132, turns=2)),
    ("tf32", PatchTile(1, 8, 8, 64, 1, 6, 1, 132)),
)


def staged(tile, values, store):
    """(pixels, channels) as they lie in a warpgroup's part of the stage: squares of 64 pixels of 128 bytes of channels, swizzled; as words."""
    wide = 64 if store == "bfloat16" else 32
    stored = encode(np.ascontiguousarray(values).reshape(-1), store).reshape(values.shape)
    squares = stored.reshape(len(values) // 64, 64, -1, wide).transpose(0, 2, 1, 3)
    chunks = squares.reshape(*squares.shape[:3], 8, -1)
    rows = np.arange(64)[:, None]
    return np.ascontiguousarray(chunks[:, :, rows, np.arange(8) ^ rows % 8]).view(np.uint32).reshape(-1)


def fragments(tile, values):
    """(pixels, channels) as the threads of a warpgroup hold them (`nbcnn.ops.ptx.wgmma`)."""
    t, e = np.ogrid[:WARPGROUP, : values.size // WARPGROUP]
    row, pair = 16 * (t // 32) + t % 32 // 4 + 8 * (e // 2 % 2), 2 * (t % 4) + e % 2
    if tile.swapped:
        return values[8 * (e // 4) + pair, row]
    return values[64 * (e // 4 // (tile.BN // 8)) + row, 8 * (e // 4 % (tile.BN // 8)) + pair]


@pytest.mark.skipif(NUMBA_SIMULATOR, reason="Numba's simulator has no shuffles")
@pytest.mark.parametrize("activation", ["", "relu", "relu6", "hard_swish"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("precision", "tile"), OF_PARTS, ids=str)
def test_parts_of_the_epilogue_make_the_gradient_and_its_sums(device, rng, precision, tile, masked, activation):
    """Signs are taken, sums begin as a second gradient, x is read where results go; the last tile has fewer channels than columns."""
    if masked and activation:
        pytest.skip("where y masks there is no activation of the norm")
    store, pixels, n0 = STORE[precision], tile.BM // tile.groups, K - 72 if tile.BN == 128 else K - 40
    SUMS, SIGN_WORDS = pixels * tile.BN // WARPGROUP, sign_words(tile)
    COUNT = pixels * tile.BN // (2 if store == "bfloat16" else 1)
    MEMORY = 8 * tile.BN
    ALL = COUNT + MEMORY
    more_of, signs_of, put, leave = (
        take_staged(tile, precision),
        take_signs(tile, precision),
        put_sums(tile, precision, activation, masked),
        leave_sums(tile),
    )
    SWAPPED, MASKED = tile.swapped, masked

    @jit()
    def parts_kernel(more, y, x, weight, bias, mean, rstd, g, partials, n0, channels, chunk, chunks):
        """grid 1, block 128."""
        words = cuda.shared.array(ALL, u4)
        acc, signs = cuda.local.array(SUMS, f4), cuda.local.array(SIGN_WORDS, u4)
        t = cuda.threadIdx.x
        stage = byte_address_shared(words)
        for i in range(t, COUNT, 128):
            words[i] = y[i]
        cuda.syncthreads()
        if MASKED:
            signs_of(signs, stage, t >> 5, t & 31)
        cuda.syncthreads()
        for i in range(t, COUNT, 128):
            words[i] = more[i]
        cuda.syncthreads()
        more_of(acc, stage, t >> 5, t & 31)
        cuda.syncthreads()
        for i in range(t, COUNT, 128):
            words[i] = x[i]
        cuda.syncthreads()
        memory = stage + 4 * COUNT
        put(acc, signs, stage, t >> 5, t & 31, n0, channels, weight, bias, mean, rstd, memory, partials, chunk, chunks)
        cuda.syncthreads()
        if not SWAPPED:
            leave(memory, partials, t, n0, channels, chunk, chunks)
        for i in range(t, COUNT, 128):
            g[i] = words[i]

    more, y, x = (decode(encode(rng.standard_normal(pixels * tile.BN).astype(np.float32), store), store).reshape(pixels, tile.BN) for _ in range(3))
    weight, bias, mean, rstd = 1 + 0.3 * rng.standard_normal(K), rng.standard_normal(K), rng.standard_normal(K), 1 + rng.random(K)
    channels, chunks, chunk = [each.astype(np.float32) for each in (weight, bias, mean, rstd)], 3, 1
    arrays = (
        [staged(tile, each, store) for each in (more, y, x)] + channels + [np.zeros(COUNT, np.uint32), np.full(2 * K * chunks, np.nan, np.float32)]
    )
    given = [device.empty(each.size, str(each.dtype)) for each in arrays]
    for there, each in zip(given, arrays, strict=True):
        device.upload(there, each)
    Launch(parts_kernel, 1, WARPGROUP, (*given, *map(np.int32, (n0, K, chunk, chunks)))).run(device.stream)
    device.synchronize()
    result = np.where(y > 0, more, 0) if masked else more
    np.testing.assert_array_equal(device.download(given[-2]), staged(tile, result, store))
    here = slice(n0, min(n0 + tile.BN, K))
    count = here.stop - here.start
    wide = [each[here].astype(np.float64) for each in channels]
    images = [each[:, :count].astype(np.float64).T.reshape(1, count, pixels, 1) for each in (result, x)]
    passed = behind(ACTIVATIONS[activation], *images, *wide) if activation else images[0]
    sums = passed.sum((0, 2, 3)), (passed * (images[1] - wide[2][:, None, None])).sum((0, 2, 3))
    partials = device.download(given[-1]).reshape(2, K, chunks)
    limit = pixels * np.finfo(np.float32).eps
    for got, expected in zip(partials[:, here, chunk], sums, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=limit * np.abs(passed).sum() / count)
    assert np.isnan(np.delete(partials, chunk, axis=2)).all()
    assert np.isnan(np.delete(partials[:, :, chunk], np.arange(here.start, here.stop), axis=1)).all()


PLAYED = (
    (1, PatchTile(1, 8, 8, 64, 1, 3, 1, 3, turns=2)),
    (1, PatchTile(1, 8, 16, 128, 1, 2, 1, 2, turns=2)),
    (1, PatchTile(1, 16, 8, 64, 2, 3, 1, 3)),
    (1, PatchTile(1, 16, 8, 64, 1, 4, 2, 3, turns=2, swapped=True)),
    (1, PatchTile(1, 16, 16, 64, 1, 3, 1, 2, turns=2, swapped=True)),
    (1, PatchTile(1, 16, 16, 64, 2, 4, 1, 1, swapped=True)),
    (1, KeepingTile(1, 16, 16, 64, 1, 18, 1, 2, turns=2, swapped=True, kept=18)),
    (2, PatchTile(1, 8, 8, 64, 1, 3, 1, 3, turns=2)),
    (2, PatchTile(2, 8, 8, 128, 2, 3, 1, 3)),
)
"""Strides and tiles."""


@pytest.mark.skipif(nb.SIMULATOR, reason="kernels are played in another way")
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("op", [RELU, ADD_RELU])
@pytest.mark.parametrize(("stride", "tile"), PLAYED, ids=str)
def test_played_blocks_have_the_right_squares_on_the_stage(stride, tile, op, added):
    """Signs, the second gradient, and at the end x lie where the results will be, each of the squares that are stored then; no block is stuck."""
    case, phases = cases_of(ConvShape(2, tile.BN, 16, 16, 128, 3, 3, stride, 1), op)[added], stride * stride
    options = {"attrs": case.attrs, "layout": "NHWC", "device": nb.Host(), "tile": tile, "store": "bfloat16"}
    launch = Bound(engine("bf16", op), op, case.ins, case.outs, **options).launches[0]
    g, squares, seen = correlation(replace(bare(case, "bf16"), op=Op("conv", "dgrad"))), [], []
    load, first = patch.patch_load(tile, patch.window(g)), 256
    x_of, y_of, more_of = first + 128 * phases, first + 2 * 128 * phases, first + 3 * 128 * phases

    def on_stage(block, stage):
        """Maps and places of what lies in a warpgroup's part of the stage."""
        mine = tile.BM // tile.groups * tile.BN * 2
        with block.changed:
            return [block.memory[at][::2] for at in sorted(block.memory) if stage <= at < stage + mine]

    def take(wanted):
        def run(block, into, stage, *rest):
            found = on_stage(block, stage)
            assert found
            seen.extend((wanted, (source - wanted) // 128, where) for source, where in found)

        return run

    def put(block, acc, signs, stage, *rest):
        block.results[stage] = on_stage(block, stage)

    replaced = {"put_sums": put, "take_signs": take(y_of), "take_staged": take(more_of), "leave_sums": lambda *_: None}
    replaced[load1_if.py_func.__qualname__] = lambda *_: 0.0
    sizes = {"cp_async_bulk_tensor_4d": lambda source: load if source < first else 64 * 128, "cp_async_bulk_tensor_2d": 128 * tile.BN}
    args = tuple(int(each) if isinstance(each, np.int32) else 0.0 if isinstance(each, np.float32) else None for each in launch.args)
    for number in range(tile.resident):
        block = Block(number, tile.resident, patch.threads_of(tile, "sums") // 32, sizes, replaced)
        block.play(launch.kernel, args)
        assert all(barrier.bytes == 0 and barrier.left == barrier.count for at, barrier in block.barriers.items())
        for target, place, held in block.stored:
            phase = (target - first) // 128
            squares.append((phase, place))
            assert (x_of + 128 * phase, place) in held
    side = range(0, 16 // stride, 8)
    assert sorted(squares) == [(p, (n, w, h, i)) for p in range(phases) for n in range(0, tile.BN, 64) for w in side for h in side for i in range(2)]
    for which, there in ((y_of, op == ADD_RELU), (more_of, added)):
        assert {(phase, place) for source, phase, place in seen if source == which} == (set(squares) if there else set())


def tried(case, precision, target):
    """The tiles of a case: the chosen one; for some others, too, with few blocks, so that each has several: all that kernels do is among these.

    Each is a kernel to compile. An op has every second tile, the other op those between, and of these such as have a size or a property that none
    before has; the plain gradient tries all (test_conv_wgmma.py).
    """
    call, impl = bare(case, precision), engine(precision, case.op)
    if impl.supports(call, target):
        return []
    tiles = [impl.tile(call, target)]
    shapes = [case.label.startswith(label) for label in ("64→64 32×32", "64→136 16×24")]
    if (str(case.op), len(case.ins)) in ((RELU, 7), (ADD_RELU, 8)) and any(shapes):
        every = impl.candidates(call, target)[shapes[0] == (str(case.op) == RELU) :: 2]
        tiles += new_sizes(replace(tile, resident=min(tile.resident, 2)) for tile in every)
    return tiles


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_kind_of_tile_is_tried_on_a_gpu(precision):
    tiles = {case.op: tried(case, precision, H200) for case in gradient_sums.real_cases()}
    assert all(tiles[op] for op in gradient_sums.REFERENCES)
    every = [tile for case in gradient_sums.real_cases() for tile in tried(case, precision, H200)]
    assert any(tile.turns == 2 for tile in every)
    assert any(tile.keeps for tile in every)
    assert any(tile.swapped for tile in every) == (precision == "bf16")
    (case,) = [case for case in gradient_sums.real_cases() if case.op == named(RELU) and case.label.startswith("64→64 32×32") and len(case.ins) == 7]
    for size in ("TN", "TH", "TW", "BN", "groups", "slots", "blocks"):
        of_all = {getattr(tile, size) for tile in engine(precision).candidates(bare(case, precision), H200)}
        assert of_all <= {getattr(tile, size) for tile in every}, size


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tile_makes_the_gradient_and_its_sums(gpu, precision, added):
    if gpu.capability != (9, 0):
        pytest.skip("needs compute capability 9.0")

    def all_tried(of, added):
        for case in (cases_of(shape, op)[added] for shape in gradient_sums.REAL for op in sorted(gradient_sums.REFERENCES)):
            yield from ((MODES["tensorcore", of], engine(of, case.op), case, tile) for tile in tried(case, of, gpu.target))

    every = list(product(PRECISIONS, (False, True)))
    cover, ran = Cover(each for other in every[: every.index((precision, added))] for each in all_tried(*other)), set()
    for row, impl, case, tile in all_tried(precision, added):
        if cover.takes_case(row, impl, case, gpu, tile) or case.op not in ran:
            assert parity(row, impl, case, gpu, tile) <= bound(case, precision), (case.op, case.label, tile)
            ran.add(case.op)
    assert ran == set(gradient_sums.REFERENCES)
