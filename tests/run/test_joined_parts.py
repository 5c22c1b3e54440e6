"""Tests of Concat without copies where it runs: implementations make of parts the bits that they make of whole values, and so do networks."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from covering import Cover, in_turn
from test_net import net_or_skip

from nbcnn.check import gradcheck
from nbcnn.check.cases import mean_cases
from nbcnn.check.one_op import Bound, Unsupported, from_layout, poison, to_layout
from nbcnn.gpu.compiler import LOCKSTEP, SIMULATOR
from nbcnn.gpu.device import Host
from nbcnn.gpu.lockstep.check import checking
from nbcnn.gpu.target import H200, Target
from nbcnn.lab.measure.nets import Network, planned
from nbcnn.modes import MODES, named
from nbcnn.nn.activations import ReLU
from nbcnn.nn.corruption import Dropout
from nbcnn.nn.graphs import Graph, Input
from nbcnn.nn.joins import Concat
from nbcnn.nn.layers import Conv2d, Linear
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.nn.models import unet
from nbcnn.nn.norms import BatchNorm2d
from nbcnn.nn.resampling import GlobalAvgPool2d
from nbcnn.ops.conv import fused, mma
from nbcnn.ops.conv.mma.tile import Tile as MmaTile
from nbcnn.ops.conv.wgmma import wgrad
from nbcnn.ops.conv_norm import gradient_sums, statistics
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Place, follows_layout
from nbcnn.ops.kernel.case import normal
from nbcnn.plan import lowering
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.flops import step_bytes
from nbcnn.plan.graph import Buf
from nbcnn.plan.op import Op
from nbcnn.plan.parts import span
from nbcnn.plan.shapes import ConvShape, numel, rows_of
from nbcnn.plan.storage import FLOATING, ITEMSIZE, decode, encode

FRONT = 8
"""Channels of others in front of a part; behind it 8 more, and what its own lack of a multiple of 8."""


class Among:
    """An operand of a bound call as a part of a larger array, of which all else is NaN."""

    def __init__(self, bound, device, side, at):
        call, self.device, self.layout = bound.call, device, bound.layout
        shapes, dtypes, arrays = (call.in_shapes, call.in_dtypes, call.ins) if side == "in" else (call.out_shapes, call.out_dtypes, call.outs)
        (n, c, *rest), self.dtype, self.first = shapes[at], dtypes[at], FRONT
        self.whole = (n, -(-c // 8) * 8 + 2 * FRONT, *rest)
        values = poison(np.empty(self.whole, np.float32))
        if side == "in":
            values[:, FRONT : FRONT + c] = self.logical(device.download(arrays[at])[: numel(shapes[at])], shapes[at])
        flat = encode(to_layout(values, self.layout_of(self.whole)), self.dtype)
        self.array = device.empty(flat.size, self.dtype)
        device.upload(self.array, flat)
        self.part = self.array[span(Buf("part", shapes[at]).within(Buf("whole", self.whole), FRONT), self.layout)]
        self.channels, self.lies = slice(FRONT, FRONT + c), Place(FRONT, self.whole[1])

    def layout_of(self, shape):
        return self.layout if len(shape) == 4 else "NCHW"

    def logical(self, flat, shape):
        return from_layout(decode(flat, self.dtype), shape, self.layout_of(shape))

    def read(self):
        """Its values, and those of others."""
        values = self.logical(self.device.download(self.array), self.whole)
        return values[:, self.channels], np.delete(values, self.channels, axis=1)


def operands(bound, impl):
    """(side, position) of what an implementation takes as a part of a larger value: floats of two axes or more."""
    call = bound.call
    for side, shapes, dtypes in (("in", call.in_shapes, call.in_dtypes), ("out", call.out_shapes, call.out_dtypes)):
        for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            stays = side == "out" and isinstance(bound._outs[at], int)
            values = len(shape) > 1 and dtype in FLOATING and follows_layout(call.op, side, at, shape) >= (len(shape) == 4) and not stays
            if values and impl.pitched(call, side, at, 8 * rows_of(shape, call.layout)[1] * ITEMSIZE[dtype]):
                yield side, at


def ops_of(share):
    """The ops of a share, (at, shares): neighbours among the sorted, which have kernels in common."""
    at, shares = share
    ops = sorted({case.op for case in mean_cases()})
    return set(ops[len(ops) * at // shares : len(ops) * (at + 1) // shares])


def taking_parts(row, device, share=(0, 1), target=None):
    """(case, two bound calls, the operands that they take as parts) for every implementation of a row and every case of the ops of a share, the
    smallest first; of other activations than ReLU some (`in_turn`). `target`: the GPU that is planned for, by default the device.
    """
    ops = {op for op in ops_of(share) if row.device == "host" or in_turn((row.mode, row.precision), op)}
    for case in sorted((case for case in mean_cases() if case.op in ops), key=lambda case: not SIMULATOR and sum(array.size for array in case.ins)):
        rounded = gradcheck.rounded(case, row.precision)
        for _, impl in row.chain(case.op):
            # Our simulator has clusters and Ampere's tensor cores, whatever GPU it plays.
            on = (H200 if impl.engine == "cluster" else Target((8, 0), 2, simulated=True)) if LOCKSTEP else target or device.target
            options = {"attrs": case.attrs, "device": device, "layout": row.layout, "store": row.store, "target": on}
            with contextlib.suppress(Unsupported):
                two = [Bound(impl, case.op, rounded.ins, case.outs, **options) for _ in range(0 if impl.lacks(on) else 2)]
                if two and (found := list(operands(two[0], impl))):
                    yield rounded, two, found


def assert_same_of_parts(case, bound, dense, found, device, limit):
    """Two bindings of a case, of which the first has the operands `found` as parts, agree to `limit`."""
    dense.run()
    among = {each: Among(bound, device, *each) for each in found}
    ins, outs = (
        tuple(among[side, at].part if (side, at) in among else array for at, array in enumerate(arrays))
        for side, arrays in (("in", bound.call.ins), ("out", bound.call.outs))
    )
    with checking() as seen:
        for launch in bound.impl.bind(replace(bound.call, ins=ins, outs=outs, places={each: made.lies for each, made in among.items()})):
            launch.run(getattr(device, "stream", 0))
    assert not seen.faults, (bound.op, seen.faults)
    results = bound.results()
    for (side, at), made in among.items():
        own, others = made.read()
        assert np.isnan(others).all(), bound.op
        if side == "out":
            results[at] = own
    for got, want in zip(results, dense.results(), strict=True):
        assert gradcheck.relative_error(got, want) <= limit, (bound.op, case.label, bound.impl.engine, bound.call.tile)


ROWS = [
    *[("cpu", "fp32"), *(pytest.param(key, marks=pytest.mark.gpu) for key in (("cudacore", "fp32"), ("tensorcore", "bf16")))],
    *(pytest.param(("tensorcore", precision), marks=[pytest.mark.gpu, pytest.mark.full]) for precision in ("tf32", "fp32")),
]


ON_GPU = [("cudacore", "fp32"), ("tensorcore", "bf16"), ("tensorcore", "tf32"), ("tensorcore", "fp32")]


@pytest.mark.parametrize("share", [(0, 1)] if SIMULATOR else [(at, 4) for at in range(4)], ids=lambda share: f"{share[0] + 1} of {share[1]}")
@pytest.mark.parametrize("key", ROWS, ids="-".join)
def test_an_implementation_makes_the_same_of_parts(key, share, request):
    """And leaves the channels of others alone, which are NaN: what it reads of them cannot pass."""
    row, ran, cover = MODES[key], set(), Cover()
    device = Host() if row.device == "host" else request.getfixturevalue("device")
    for other in ON_GPU[: ON_GPU.index(key)] if row.device == "gpu" and not SIMULATOR else ():
        for _, (bound, _), _ in taking_parts(MODES[other], Host(), share, device.target):
            cover.takes(bound.launches)
    for case, (bound, dense), found in taking_parts(row, device, share):
        if row.device == "gpu" and not cover.takes(dense.launches) and bound.op in ran:
            continue
        # NumPy adds up what does not lie in one piece in another order: each of two results is within the bound of the truth.
        assert_same_of_parts(case, bound, dense, found, device, 2 * gradcheck.bound(case, row.precision) if row.device == "host" else 0)
        ran.add(bound.op)
    wanted = {Op("concat", "fprop"), Op("concat", "dgrad"), Op("batchnorm", "fprop"), Op("batchnorm", "grads"), Op("bias", "wgrad")}
    wanted |= {Op("conv", "fprop"), Op("conv", "dgrad"), Op("relu", "dgrad"), Op("add"), Op("mul")}
    assert ran >= {op for op in wanted if op in ops_of(share)}


@pytest.mark.parametrize("op", ["conv_relu_fprop", "conv_dgrad_relu"])
def test_a_split_product_of_mma_is_added_up_into_a_part(op, device):
    """And masked by one: by the second launch."""
    row, (case, *_) = MODES["tensorcore", "tf32"], [each for each in fused.relu_cases(ConvShape(1, 16, 8, 8, 16, 3, 3, 1, 1)) if str(each.op) == op]
    case, impl = gradcheck.rounded(case, "tf32"), mma.ops("tf32")[named(op)]
    # In the simulator, which does not compare addresses, no ring may wrap: 16 parts have at most four k-tiles.
    options = {"attrs": case.attrs, "device": device, "layout": row.layout, "store": row.store, "tile": MmaTile(32, 32, 2, 2, 4, 4, 16)}
    bound, dense = (Bound(impl, op, case.ins, case.outs, **options) for _ in range(2))
    found = list(operands(bound, impl))
    assert len(bound.launches) == 2
    assert found == [("in", 0), *([("in", 2)] if op == "conv_dgrad_relu" else []), ("out", 0)]
    assert_same_of_parts(case, bound, dense, found, device, 0)


# -- networks


def _conv(x, filters, size=1):
    return Conv2d(filters, size, padding=size // 2, bias=False)(x)


def growing():
    """Two layers that grow by 8 channels, each reading all before it (DenseNet)."""
    x = Input((3, 8, 8))
    y = _conv(x, 16, 3)
    for _ in range(2):
        y = Concat()([y, _conv(ReLU()(BatchNorm2d()(y)), 8, 3)])
    return Graph.of(x, Linear(3)(GlobalAvgPool2d()(ReLU()(BatchNorm2d()(y)))), SoftmaxCrossEntropy())


def branching():
    """Two branches of one value, joined (Inception), and a third that stays apart."""
    x = Input((3, 8, 8))
    y = ReLU()(BatchNorm2d()(_conv(x, 8)))
    joined = Concat()([ReLU()(BatchNorm2d()(_conv(y, filters, 3))) for filters in (8, 16)])
    return Graph.of(x, Linear(3)(GlobalAvgPool2d()(_conv(joined, 8))), SoftmaxCrossEntropy())


def _relu(x, filters, size=1):
    return ReLU()(Conv2d(filters, size, padding=size // 2)(x))


def growing_plain(c=8):
    """The same without norms: what is joined comes out of convolutions with a ReLU."""
    x = Input((3, 8, 8))
    y = _relu(_relu(x, 2 * c, 3), 2 * c)
    for _ in range(2):
        y = Concat()([y, _relu(_relu(y, 2 * c), c, 3)])
    return Graph.of(x, Linear(3)(GlobalAvgPool2d()(_conv(y, c))), SoftmaxCrossEntropy())


def branching_plain(c=8):
    """Three branches, one of them dropped out and one without a ReLU; the first is also added to what is made of all."""
    x = Input((3, 8, 8))
    y = _relu(x, 2 * c)
    branches = [_relu(y, c, 3), Dropout(0.5)(_relu(_relu(y, c), 2 * c, 5)), _conv(y, c)]
    return Graph.of(x, Linear(3)(GlobalAvgPool2d()(_conv(Concat()(branches), c, 3) + branches[0])), SoftmaxCrossEntropy())


NETWORKS = {
    "growing": growing,
    "branching": branching,
    "growing plain": growing_plain,
    "branching plain": branching_plain,
    "unet": lambda: unet(3, 8, 8, classes=3, filters=8, depth=1),
}


def joins(plan):
    """The bytes that steps of Concat move."""
    return sum(step_bytes(item.step) for item in plan.steps if item.step.op.kind == "concat")


@pytest.mark.parametrize("row", ROWS, ids="-".join)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_same_gradients_without_copies(name, row, monkeypatch):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)

    def run():
        net = net_or_skip(NETWORKS[name](), (3, 8, 8), row, simulated=True, seed=2)
        labels = np.random.default_rng(4).integers(0, 3, (2, *net.plane)).astype(np.int32)
        return joins(net.lower(net.record_gradients(2))), *net.gradients(x, labels), net.predict(x)

    moved, loss, grads, y = run()
    monkeypatch.setattr(lowering, "with_parts", lambda hows, layout, resolve: hows)
    copied, expected_loss, expected, expected_y = run()
    assert moved < copied
    # NumPy adds up what does not lie in one piece in another order, in each of some twenty layers.
    limit = 20 * parity_bound(9 * 32, "fp32") if row[0] == "cpu" else 0
    assert loss == pytest.approx(expected_loss, rel=limit)
    for got, want in ((y, expected_y), *((grads[each], expected[each]) for each in expected)):
        assert gradcheck.relative_error(got, want) <= limit


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("layers", [growing_plain, branching_plain])
def test_tensor_cores_copy_nothing_that_convolutions_and_maps_make(layers, precision):
    """On a GPU, of channels that are no first or last layer's: it is written where the whole lies, and its gradient read there."""
    assert not [
        item.step for item, _ in planned(Network("", "", lambda: layers(24), (3, 8, 8), 64), precision).bound if item.step.op.kind == "concat"
    ]


# -- wgmma, of which no simulator has the instructions: what TMA is told


X, W = normal(1, 8, 64, 16, 16), normal(2, 64, 64, 3, 3)
CONVOLUTIONS = {"conv_fprop": (X, W), "conv_dgrad": (X, W), "conv_dgrad_relu": (X, W, X), "conv_wgrad": (X, normal(3, 8, 64, 16, 16))}
READ = {op: [("in", 0), ("out", 0)] for op in CONVOLUTIONS} | {
    "conv_dgrad_relu": [("in", 0), ("in", 2), ("out", 0)],
    "conv_wgrad": [("in", 0), ("in", 1)],
}
"""What each takes as a part."""


def on_wgmma(op, precision):
    """One of CONVOLUTIONS, bound to host memory as an H200 has it."""
    row, ins = MODES["tensorcore", precision], CONVOLUTIONS[op]
    impl = next(impl for _, impl in row.chain(named(op)) if impl.engine == "wgmma")
    options = {"attrs": {"stride": 1, "pad": 1}, "device": Host(), "layout": row.layout, "store": row.store, "target": H200}
    return Bound(impl, op, ins, [((W if op == "conv_wgrad" else X).shape, "float32")], **options)


@pytest.mark.parametrize("op", CONVOLUTIONS)
def test_what_fp32_splits_into_planes_is_no_part(op):
    """The launches that split an operand read it in one piece."""
    first = on_wgmma(op, "fp32")
    tiles = {tuple(first.impl.splits(replace(first.call, tile=tile))): tile for tile in first.impl.candidates(first.call, H200)}
    assert any(tiles)
    for split, bound in zip(tiles, first.with_tiles(list(tiles.values())), strict=True):
        assert not {at for side, at in operands(bound, first.impl) if side == "in"}.intersection(split)


@pytest.mark.skipif(SIMULATOR, reason="the simulator makes no tensor maps")
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("op", CONVOLUTIONS)
def test_tensor_maps_go_from_pixel_to_pixel_of_the_whole(op, precision, monkeypatch):
    """Of every kind of tile: the shape is the part's, and each stride is that of a dense image times the channels of the whole for one of its own."""
    seen = []

    def tiled(array, shape, box, *, first=0, strides=None, plain=False):
        seen.append((array, tuple(shape), tuple(strides or np.cumprod(shape[:-1])), first))
        return np.zeros(16, np.int64)

    def im2col(array, shape, apart, *window):
        n, h, w, c = shape
        seen.append((array, (c, w, h, n), (apart, w * apart, h * w * apart), 0))
        return np.zeros(16, np.int64)

    for module in (tensor_maps, wgrad):
        monkeypatch.setattr(module, "encode_tiled", tiled)
        monkeypatch.setattr(module, "encode_im2col", im2col)
    first = on_wgmma(op, precision)
    impl, kinds = first.impl, {type(tile): tile for tile in first.impl.candidates(first.call, H200)}
    assert len(kinds) > 1 or (op, precision) == ("conv_wgrad", "tf32")
    for bound in first.with_tiles(list(kinds.values())):
        found = list(operands(bound, impl))
        assert found == READ[op]
        for side, at in found:
            made = Among(bound, Host(), side, at)
            arrays = bound.call.ins if side == "in" else bound.call.outs
            placed = {f"{side}s": tuple(made.part if position == at else array for position, array in enumerate(arrays))}
            seen.clear()
            dense_launches = impl.bind(bound.call)
            dense = list(seen)
            seen.clear()
            launches = impl.bind(replace(bound.call, **placed, places={(side, at): made.lies}))
            assert len(seen) == len(dense)
            # The kernel of columns has no map of what it stores or masks: it takes the channels of the whole.
            if not any(array is made.part for array, *_ in seen):
                told = [
                    (was, now) for was, now in zip(dense_launches[-1].args, launches[-1].args, strict=True) if type(was) is np.int32 and was != now
                ]
                assert (side, at) != ("in", 0)
                assert told == [(64, made.whole[1])]
            for (array, shape, strides, start), (_, dense_shape, dense_strides, dense_start) in zip(seen, dense, strict=True):
                times = made.whole[1] if array is made.part else 64
                assert shape == dense_shape
                assert [64 * each for each in strides] == [times * each for each in dense_strides]
                assert 64 * start == times * dense_start


@pytest.mark.gpu
@pytest.mark.skipif(SIMULATOR, reason="the simulator has no wgmma")
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_every_kind_of_tile_makes_the_same_of_parts(precision, device):
    """Forward with a ReLU and with moments; gradients with a mask, with a second one, with the sums of a norm; those of stride 2, in four phases."""
    row, ran, sums = MODES["tensorcore", precision], set(), list(gradient_sums.REFERENCES)
    convs = ConvShape(6, 64, 16, 16, 72, 3, 3, 1, 1), ConvShape(6, 64, 16, 16, 72, 3, 3, 2, 1)
    cases = [
        case
        for conv in convs
        for case in (*fused.relu_cases(conv), *fused.second_cases(conv), *gradient_sums.cases([conv]))
        if case.op not in sums[1:-1]
    ]
    for case in map(partial(gradcheck.rounded, precision=precision), (*cases, *statistics.cases([(convs[0], False)]))):
        options = {"attrs": case.attrs, "device": device, "layout": row.layout, "store": row.store}
        for impl in (impl for _, impl in row.chain(case.op) if impl.engine == "wgmma" and not impl.lacks(device.target)):
            with contextlib.suppress(Unsupported):
                first = Bound(impl, case.op, case.ins, case.outs, **options)
                # The last of a kind is a small one.
                tiles = {(type(tile), getattr(tile, "swapped", False)): tile for tile in impl.candidates(first.call, device.target)}
                second = Bound(impl, case.op, case.ins, case.outs, **options)
                for bound, dense in zip(first.with_tiles(tiles.values()), second.with_tiles(tiles.values()), strict=True):
                    found = list(operands(bound, impl))
                    assert ("out", 0) in found
                    assert_same_of_parts(case, bound, dense, found, device, 0)
                    ran.add((case.op, type(bound.call.tile)))
    assert len(ran) >= 3
