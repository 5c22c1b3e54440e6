"""Tests of batch normalisation by clusters: which images they take, the kernels compiled, in the simulator and on a Hopper."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from compiled import full
from covering import Cover, in_turn

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import compiler, device
from nbcnn.gpu.device import Host
from nbcnn.gpu.lockstep.check import checking
from nbcnn.gpu.lockstep.findings import Found
from nbcnn.gpu.target import H200
from nbcnn.modes import MODES, named
from nbcnn.ops.activations.table import with_activations
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.norms import batch, batch_cluster
from nbcnn.ops.norms.batch_cluster import _REGISTERS, BLOCK_SHARED, CLUSTERS, FEWEST, RESERVED, SHARED, WAVES, candidates_of
from nbcnn.ops.norms.cluster_share import Tile, layout_of
from nbcnn.plan.op import Op

TENSORCORE = {precision: MODES["tensorcore", precision] for precision in ("bf16", "tf32", "fp32")}
OPS = with_activations(batch_cluster.OPS)
COMPILES = pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")


# -- which images


@pytest.mark.parametrize(
    ("shape", "kind", "tensors", "columns", "blocks", "cluster"),
    [
        ((512, 512, 4, 4), "bfloat16", 2, 4, 96, 6),
        ((512, 512, 4, 4), "bfloat16", 1, 4, 96, 6),
        ((512, 1024, 2, 2), "bfloat16", 2, 8, 96, 6),
        ((512, 256, 4, 4), "bfloat16", 2, 2, 96, 6),
        ((512, 512, 4, 4), "float32", 2, 4, 192, 6),
        ((16, 256, 32, 32), "bfloat16", 2, 2, 96, 6),
        ((512, 256, 8, 8), "bfloat16", 1, 2, 96, 6),
        ((512, 256, 8, 8), "bfloat16", 2, None, None, None),
        ((10, 128, 13, 11), "bfloat16", 1, 2, 64, 8),
        ((512, 128, 8, 8), "bfloat16", 2, None, None, None),
        ((512, 64, 32, 32), "bfloat16", 1, None, None, None),
        ((8192, 1024, 4, 4), "bfloat16", 1, None, None, None),
        ((64, 64, 2, 2), "bfloat16", 1, None, None, None),
        ((64, 1023, 2, 2), "bfloat16", 1, None, None, None),
    ],
)
def test_images_fit_or_do_not(shape, kind, tensors, columns, blocks, cluster):
    found = candidates_of(shape, kind, tensors, "NHWC")
    if columns is None:
        assert found == []
        return
    width = 8 if kind == "bfloat16" else 4
    first = found[0]
    assert (first.cluster, first.columns, shape[1] // (first.columns * width) * first.cluster) == (cluster, columns, blocks)
    assert candidates_of(shape, kind, tensors, "NCHW") == []


@pytest.mark.parametrize("kind", ["bfloat16", "tfloat32", "float32"])
@pytest.mark.parametrize("shape", [(128, 512, 4, 4), (3, 1040, 1, 1), (512, 1024, 2, 2), (7, 272, 5, 5), (512, 256, 3, 3), (96, 512, 4, 4)])
def test_every_tile_fits_and_covers_the_batch(shape, kind):
    n, channels, h, w = shape
    width, pixels = 8 if kind == "bfloat16" else 4, n * h * w
    for tensors in (1, 2):
        found = candidates_of(shape, kind, tensors, "NHWC")
        assert found
        for tile in found:
            own = ceil_div(pixels, tile.cluster)
            layout, blocks = layout_of(tile, width, own, tensors), channels // (tile.columns * width) * tile.cluster
            assert layout.nbytes <= BLOCK_SHARED
            assert layout.held * 16 // width >= own * tile.columns * 16
            assert channels % (tile.columns * width) == 0
            together = min(SHARED // (layout.nbytes + RESERVED), 65536 // (_REGISTERS[tensors] * tile.threads))
            assert FEWEST <= blocks <= WAVES * CLUSTERS[tile.cluster] * tile.cluster * together
            assert tile.threads in (256, 512)
            assert 2 * tile.columns * width <= tile.threads, "a thread for each of a block's sums"


def test_only_hopper_takes_clusters_and_all_else_stays():
    for row in TENSORCORE.values():
        for op in OPS:
            first, *_, last = (impl for _, impl in row.chain(named(op)))
            assert first is OPS[named(op)]
            assert first.lacks(H200) is None
            assert None not in (first.lacks(replace(H200, capability=other)) for other in ((8, 9), (10, 0)))
            assert last is with_activations(batch.OPS)[named(op)]
    assert OPS[named("batchnorm_grads")] not in [impl for _, impl in MODES["cudacore", "fp32"].chain(named("batchnorm_grads"))]


@pytest.mark.parametrize(
    ("shape", "layout", "reason"),
    [
        ((512, 512, 16, 16), "NHWC", "holds no batch of 512×512×16×16"),
        ((512, 64, 2, 2), "NHWC", "64 channels make fewer than 64 blocks"),
        ((512, 520, 2, 2), "NHWC", "520 channels are no multiple of 16"),
        ((512, 512, 4, 4), "NCHW", "read NHWC, not NCHW"),
        ((512, 512, 4, 4), "NHWC", None),
    ],
)
def test_refusals_are_in_words(shape, layout, reason):
    kept = [(shape[1],)] * 4
    call = Call(Op("batchnorm", "fprop"), (), (), (shape, *kept), (shape, *kept), layout=layout, in_dtypes=("bfloat16", *["float32"] * 4))
    found = OPS[named("batchnorm_fprop")].supports(call, H200)
    assert found is None if reason is None else reason in found


# -- compiled


def bound(op, precision, shape, on, more=False, tile=None, impl=None):
    """An op on images of a shape, as the tensorcore row of a precision binds it."""
    case = next(case for case in batch.cases((shape,)) if case.op == named(op) and (len(case.ins) > 6 or not more))
    return of_case(case, precision, on, tile, impl), case


def of_case(case, precision, on, tile=None, impl=None):
    row, case = TENSORCORE[precision], gradcheck.rounded(case, precision)
    impl = impl or OPS[case.op]
    return Bound(impl, case.op, case.ins, case.outs, attrs=case.attrs, device=on, layout=row.layout, store=row.store, tile=tile)


FIRST = (("batchnorm_relu6_fprop", "bf16", 6), ("batchnorm_add_relu_grads", "bf16", 6))
REST = [(op, precision, 6) for op in map(str, OPS) for precision in TENSORCORE if (op, precision, 6) not in FIRST]


@COMPILES
@pytest.mark.parametrize(("op", "precision", "cluster"), [*FIRST, *full(*REST, *((*FIRST[1][:2], cluster) for cluster in CLUSTERS if cluster != 6))])
def test_kernels_keep_everything_in_registers_and_have_clusters(op, precision, cluster):
    """A block of 512 threads, alone on its multiprocessor, has 128 registers per thread; forward kernels have 80, so that three of 256 share one."""
    forms = [(tile, more) for tile in (Tile(4, 128, cluster), Tile(2, 128, cluster)) for more in (False, True)]
    for tile, more in forms if op.endswith("_grads") else forms[::2]:
        made, _ = bound(op, precision, (80, 128, 8, 8), Host(), more, tile=tile)
        (launch,) = made.launches
        report = compile_launch(launch)
        assert (report.frame_bytes, report.cluster) == (0, cluster)
        assert report.registers <= _REGISTERS[1 if str(op).endswith("_fprop") else 2]
        (moved,) = OPS[named(op)].traffic(made.call)
        assert moved.read == moved.distinct


def test_one_launch_moves_every_tensor_once():
    shape, kept = (512, 512, 4, 4), [(512,)] * 4
    for op, ins, outs in (("fprop", [shape, *kept], [shape, *kept]), ("grads", [shape, shape, *kept], [shape, (512,), (512,)])):
        dtypes = [tuple("bfloat16" if len(each) == 4 else "float32" for each in side) for side in (ins, outs)]
        call = Call(named(f"batchnorm_relu6_{op}"), (), (), tuple(ins), tuple(outs), {}, "NHWC", in_dtypes=dtypes[0], out_dtypes=dtypes[1])
        one, three = (sum(each.logical for each in with_activations(module.OPS)[call.op].traffic(call)) for module in (batch_cluster, batch))
        tensors = 2 if op == "fprop" else 3
        assert tensors <= one / 2**23 < tensors + 0.01
        assert three - one > (tensors - 1) * 2**23


# -- right


def within(case, precision, got):
    wanted = gradcheck.reference(gradcheck.rounded(case, precision))
    limit = gradcheck.bound(case, precision)
    for made, right in zip(got, wanted, strict=True):
        assert gradcheck.relative_error(made, right) <= limit, case.op


@pytest.mark.skipif(not compiler.LOCKSTEP, reason="needs NBCNN_SIMULATOR=1")
@pytest.mark.parametrize("precision", TENSORCORE)
@pytest.mark.parametrize("shape", [(2, 128, 2, 3), (7, 144, 5, 5)])
def test_it_is_right_in_the_simulator(shape, precision, device):
    """Blocks without pixels, and several pixels per thread; no race and nothing out of bounds, for which activations make no difference."""
    ops, forms = set(), set()
    for case in batch.cases((shape,)):
        if case.op in OPS:
            made = of_case(case, precision, device)
            form = case.op.direction, len(case.ins), len(case.outs)
            with checking() if form not in forms else nullcontext(Found()) as seen:
                made.run()
            forms.add(form)
            assert not seen.faults, (case.op, *map(str, seen.faults))
            within(case, precision, made.results())
            ops.add(case.op)
    assert ops == set(OPS)


@pytest.mark.skipif(not compiler.LOCKSTEP, reason="needs NBCNN_SIMULATOR=1")
@pytest.mark.parametrize("op", ["batchnorm_relu_fprop", "batchnorm_add_relu_grads"])
def test_every_tile_is_right_in_the_simulator(op, device):
    shape = (3, 256, 5, 3)
    for tile in candidates_of(shape, "bfloat16", 2, "NHWC"):
        made, case = bound(op, "bf16", shape, device, tile=tile)
        made.run()
        within(case, "bf16", made.results())


@pytest.mark.skipif(not compiler.LOCKSTEP, reason="needs NBCNN_SIMULATOR=1")
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("form", ["relu6_fprop", "add_relu_fprop", "relu6_grads", "gelu_grads", "add_relu_grads"])
def test_many_pixels_a_thread_are_right_in_the_simulator(form, precision, rows, device):
    """Twelve or three of them, the last one not of every thread: loads ahead of what is there do no harm."""
    made, case = bound(f"batchnorm_{form}", precision, (10, 128, 13, 11), device, more=form == "add_relu_grads", tile=Tile(2, rows, 8))
    with checking() as seen:
        made.run()
    assert not seen.faults, list(map(str, seen.faults))
    within(case, precision, made.results())


@pytest.fixture
def hopper(device):
    if compiler.SIMULATOR or device.capability != (9, 0):
        pytest.skip("needs a Hopper")
    return device


REAL = [(64, 512, 4, 4), (64, 1024, 2, 2), (96, 256, 4, 4), (7, 272, 5, 5), (1, 512, 3, 1)]


@pytest.mark.parametrize("precision", TENSORCORE)
def test_it_is_right_on_a_hopper_and_twice_the_same(precision, hopper):

    def cases_of(row):
        return (case for case in batch.cases(REAL) if case.op in OPS and in_turn((row.mode, row.precision), case.op))

    earlier = list(TENSORCORE.values())[: list(TENSORCORE).index(precision)]
    cover = Cover((row, OPS[case.op], case, None) for row in earlier for case in cases_of(row))
    for case in cases_of(TENSORCORE[precision]):
        made = of_case(case, precision, hopper)
        if cover.takes(made.launches):
            made.run()
            first = made.results()
            within(case, precision, first)
            fresh = of_case(case, precision, hopper)
            fresh.run()
            for one, other in zip(first, fresh.results(), strict=True):
                np.testing.assert_array_equal(one, other, case.op)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_y_has_the_bits_of_the_norm_made_again(precision, hopper):
    """What `--recompute` counts on: y of x and the statistics by `batchnorm_apply`."""
    made_again(precision, (64, 512, 4, 4), hopper)


@pytest.mark.skipif(not compiler.LOCKSTEP, reason="needs NBCNN_SIMULATOR=1")
def test_y_has_the_bits_of_the_norm_made_again_in_the_simulator(device):
    made_again("bf16", (2, 128, 2, 3), device)


def made_again(precision, shape, on):
    for form in ("_relu6", "_add_relu"):
        forward, case = bound(f"batchnorm{form}_fprop", precision, shape, on)
        forward.run()
        y, mean, rstd, *_ = forward.results()
        x, weight, bias, _, _, *plus = case.ins
        again = replace(case, op=named(f"batchnorm{form}_apply"), ins=(x, weight, bias, mean, rstd, *plus), outs=case.outs[:1], attrs={})
        made = of_case(again, precision, on, impl=with_activations(batch.OPS)[again.op])
        made.run()
        np.testing.assert_array_equal(made.results()[0], y)
