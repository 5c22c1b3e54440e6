"""Tests of a convolution with its EvoNorm: the kernel and its stand-in against the reference, compiled, and in nets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import full
from covering import Cover
from gradients import assert_same_gradients

from nbcnn import modes
from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu.device import Host
from nbcnn.gpu.language import SIMULATOR
from nbcnn.gpu.target import H200
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.models import mnist_cnn
from nbcnn.nn.norms import EvoNormB0, EvoNormS0
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.conv.winograd.engine import OPS as WINOGRAD
from nbcnn.ops.conv.winograd.engine import WinogradTile
from nbcnn.ops.conv_norm import two_ops as conv_evonorm
from nbcnn.ops.conv_norm import wgmma as conv_wgmma
from nbcnn.ops.conv_norm.two_ops import conv_norm_cases
from nbcnn.ops.conv_norm.wgmma import ImageTile
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.bounds import STORE
from nbcnn.plan.op import Norm, Op
from nbcnn.plan.shapes import ConvShape
from nbcnn.run.net import Net

ROW = modes.MODES["cudacore", "fp32"]
CASES = list(conv_norm_cases())
DIRECT = conv_evonorm.two_ops(im2col.OPS[Op("conv", "fprop")])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.label}")
def test_two_ops_on_small_shapes(case, device):
    error = gradcheck.parity(ROW, DIRECT[case.op], case, device)
    assert error <= gradcheck.bound(case), error


def test_two_ops_on_images_that_the_norm_holds(gpu):
    """There the norm works in place with all of an image's channels in registers; in one part of a batch, and by Winograd's convolution."""
    for case in conv_norm_cases([(ConvShape(16, 32, 28, 28, 64, 3, 3, 1, 1), 32)]):
        for impl, tile in ((DIRECT[case.op], None), (conv_evonorm.two_ops(WINOGRAD[Op("conv", "fprop")])[case.op], WinogradTile(5, 64, 64, 8, 4))):
            error = gradcheck.parity(ROW, impl, case, gpu, tile)
            assert error <= gradcheck.bound(case), (case.op, error)


WGMMA = (
    (ConvShape(3, 64, 28, 28, 64, 3, 3, 1, 1), 32, (None, ImageTile(4, 1, 1, 2), ImageTile(4, 1, 2, 3))),
    (ConvShape(300, 64, 8, 8, 64, 3, 3, 1, 1), 8, (None,)),
    (ConvShape(2, 64, 9, 10, 128, 3, 3, 1, 1), 128, (None, ImageTile(3, 2, 1, 2), ImageTile(3, 1, 2, 4))),
    (ConvShape(2, 64, 8, 8, 64, 1, 1, 1, 0), 4, (None,)),
)
"""Shapes, groups and tiles: parts of an image that meet; more images than warpgroups; 128 filters, a height that no tile divides and tiles
of 30 pixels, which are no whole swizzled rows of eight; 1×1."""


def on_tensor_cores(cover, precision, shapes, gpu):
    """(case, implementation, tile) that `cover` takes of all ops."""
    row, impls = modes.MODES["tensorcore", precision], conv_wgmma.ops(precision)
    for shape, groups, tiles in shapes:
        for case in (case for case in conv_norm_cases([(shape, groups)]) if case.op in conv_evonorm.REFERENCES):
            for tile in tiles:
                if cover.takes_case(row, impls[case.op], case, gpu, tile):
                    yield case, impls[case.op], tile


@pytest.mark.parametrize("precision", conv_wgmma.PRECISIONS)
def test_tensor_cores(precision, gpu):
    ran = set()
    for case, impl, tile in on_tensor_cores(Cover(), precision, WGMMA, gpu):
        error = gradcheck.parity(modes.MODES["tensorcore", precision], impl, case, gpu, tile)
        assert error <= gradcheck.bound(case, precision), (case.op, case.label, tile, error)
        ran.add(case.op)
    assert ran == set(conv_evonorm.REFERENCES)


@pytest.mark.parametrize("precision", conv_wgmma.PRECISIONS)
def test_a_pixel_that_is_nan_reaches_all_of_its_image_on_tensor_cores(precision, gpu):
    """In B0's training all images; of images in one part and in two."""
    options, ran = {"layout": "NHWC", "store": STORE[precision]}, set()
    for case, impl, tile in on_tensor_cores(Cover(), precision, WGMMA[:1], gpu):
        x, *others = case.ins
        x = x.copy()
        x[1, 3, 20, 20] = np.nan
        bound = Bound(impl, case.op, (x, *others), case.outs, device=gpu, attrs=case.attrs, tile=tile, **options)
        bound.run()
        gpu.synchronize()
        other = float(str(case.op).endswith("b0_fprop"))
        np.testing.assert_array_equal(np.isnan(bound.results()[0]).mean((1, 2, 3)), [other, 1, other], err_msg=f"{case.op} {tile}")
        ran.add(case.op)
    assert ran == set(conv_evonorm.REFERENCES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"n": 1, "c": 128, "size": 14, "k": 128}, None),
        ({"c": 32}, "multiples of 64"),
        ({"k": 96}, "64 filters"),
        ({"size": 27}, "pairs of pixels"),
        ({"c": 256, "k": 64}, "shared memory"),
        ({"layout": "NCHW"}, "NHWC"),
    ],
)
def test_what_tensor_cores_serve(change, reason):
    found = conv_wgmma.supports(bare(**({"c": 64} | change)), H200, "bf16")
    assert found is None if reason is None else reason in found


def test_bytes_on_tensor_cores_by_hand():
    call = replace(bare(n=256, c=64), in_dtypes=("bfloat16", *("float32",) * 5), out_dtypes=("bfloat16",) * 2)
    call = replace(call, out_shapes=(*call.out_shapes, (256 * 32,), (256 * 32,)), out_dtypes=(*call.out_dtypes, "float32", "float32"))
    call = replace(call, tile=ImageTile(4, 2, 1, 128))
    image, line, filters, kept = 2 * 256 * 64 * 28 * 28, 2 * 256 * 64 * 28, 2 * 64 * 64 * 9, 8 * 256 * 32
    # Seven tiles of four lines read two lines more each, but for the two outside; z goes out and comes back.
    read = line * (7 * 6 - 2) + 128 * filters + image
    assert conv_wgmma.bytes_of(call, "bf16") == [Traffic(read, 2 * image + kept, 2 * image + filters)]
    # Four warpgroups share an image: each sends a message of 16 bytes per channel, and receives those of all four.
    call, messages = replace(call, tile=ImageTile(4, 2, 4, 512)), 16 * 256 * 64 * 4
    # Its two tiles stay in shared memory; in inference the convolution's own output never leaves it.
    read = line * (7 * 6 - 2) + 512 * filters + 4 * messages
    assert conv_wgmma.bytes_of(call, "bf16") == [Traffic(read, 2 * image + kept + messages, image + filters + messages)]
    infer = replace(call, op=Op("conv", "infer", after=(Norm("evonorm_s0"),)), out_shapes=call.out_shapes[:1], out_dtypes=call.out_dtypes[:1])
    assert conv_wgmma.bytes_of(infer, "bf16") == [Traffic(read, image + messages, image + filters + messages)]


def test_warpgroups_share_small_batches():
    def chosen(n):
        return conv_wgmma.choose(bare(n=n, c=64), "bf16", H200)

    assert [(chosen(n).parts, chosen(n).blocks) for n in (1, 64, 128, 256, 1024)] == [(4, 2), (4, 128), (2, 128), (1, 128), (1, 132)]


@pytest.mark.sampled
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("precision", "tile"), [("bf16", None), ("tf32", None), *full(("bf16", ImageTile(4, 2, 1, 2)), ("tf32", ImageTile(4, 1, 1, 2)))]
)
def test_the_sums_of_a_warpgroup_stay_in_registers_without_spills(precision, tile):
    case = next(conv_norm_cases([(ConvShape(4, 64, 28, 28, 64, 3, 3, 1, 1), 32)]))
    impl = conv_wgmma.ops(precision)[case.op]
    bound = Bound(impl, case.op, case.ins, case.outs, device=Host(), attrs=case.attrs, layout="NHWC", store=STORE[precision], tile=tile)
    (launch,) = bound.launches
    report = compile_launch(launch)
    assert (report.frame_bytes, report.registers <= 168) == (0, True), report


def test_results_stay_in_shared_memory_where_they_have_room():
    def kept(tile, precision="bf16", epilogue="s0", size=28):
        return conv_wgmma.form_of(bare(n=64, c=64, size=size), precision, tile, epilogue).kept

    quarter = ImageTile(4, 2, 4, 128)
    assert (kept(quarter), kept(quarter, epilogue="s0 infer"), kept(quarter, epilogue="planes"), kept(quarter, "tf32")) == (2, 2, 0, 0)
    assert kept(ImageTile(4, 2, 1, 32)) == 0
    assert kept(ImageTile(8, 2, 1, 32), size=8) == 1


def test_the_two_ops_are_the_reference_on_the_host():
    cpu = modes.MODES["cpu", "fp32"]
    conv = next(cpu.chain(Op("conv", "fprop")))[1]
    for case in CASES:
        plain = str(case.op).removeprefix("conv_").replace("s0_infer", "s0_fprop")
        impl = conv_evonorm.composed(conv, next(cpu.chain(modes.named(plain)))[1])
        assert gradcheck.parity(cpu, impl, case, Host()) <= gradcheck.bound(case)


def bare(n=2, c=3, size=28, k=64, groups=32, layout="NHWC", window=3):
    ins, outs = ((n, c, size, size), (k, c, window, window), *((k,),) * 4), ((n, k, size, size),) * 2
    return Call(
        Op("conv", "fprop", after=(Norm("evonorm_s0"),)), (), (), ins, outs, {"stride": 1, "pad": window // 2, "groups": groups, "eps": 1e-5}, layout
    )


@pytest.mark.parametrize("norm", ["s0", "b0"])
def test_the_classifier_fuses(norm, fusing_cpu):
    net = Net(mnist_cnn(norm=norm), (1, 8, 8), mode="cpu")
    for steps, passed in ((net.record_gradients(2).steps, "fprop"), (net.record_predict(2).steps, "infer")):
        ops = [str(step.op) for step in steps if step.op.kind in ("conv", f"evonorm_{norm}") and step.op.direction == passed and len(step.ins) > 3]
        assert ops == [f"conv_evonorm_{norm}_{passed}"] * 2
    net = Net([Conv2d(8, 3, bias=False), EvoNormS0(groups=4), Conv2d(3, 3), MSE()], (1, 8, 8), mode="cpu")
    assert [str(step.op) for step in net.record_gradients(2).steps[:2]] == ["conv_fprop", "evonorm_s0_fprop"], "the epilogue has a bias"


@pytest.mark.parametrize("norm", ["s0", "b0"])
def test_fused_and_plain_classifiers_agree(norm, fusing_cpu, rng):
    x, labels = rng.standard_normal((3, 1, 8, 8)).astype(np.float32), np.array([1, 7, 2], np.int32)
    plain, fused = (Net(mnist_cnn(norm=norm), (1, 8, 8), mode="cpu", init="he", fusing=fusing) for fusing in (False, True))
    assert f"conv_evonorm_{norm}_fprop" in {str(step.op) for step in fused.record_gradients(3).steps}
    # The same float32 operations, but for the order in which BLAS adds at most 288 terms, in 8 layers.
    assert_same_gradients(plain, fused, x, labels, limit=8 * 4 * 2.0**-23 * 17)
    images = rng.integers(0, 256, (3, 1, 8, 8)).astype(np.uint8)
    assert f"conv_evonorm_{norm}_infer" in {str(step.op) for step in fused.record_predict(3).steps}
    np.testing.assert_allclose(fused.predict(images), plain.predict(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [lambda: EvoNormS0(groups=4, channels=8), lambda: EvoNormB0(channels=8)])
def test_inference_has_half_the_intermediate_images_and_training_keeps_the_convolutions(norm, fusing_cpu):
    layers = [
        Conv2d(8, 3, padding=1, in_channels=3),
        norm(),
        Conv2d(8, 3, padding=1, in_channels=8),
        norm(),
        Flatten(),
        Linear(4, in_features=8 * 6 * 6),
        SoftmaxCrossEntropy(),
    ]
    plain, fused = (Net(layers, (3, 6, 6), mode="cpu", fusing=fusing) for fusing in (False, True))

    def made(tape):
        return {buf.name: buf.nbytes for step in tape.steps for buf in step.outs if buf.shape == (2, 8, 6, 6)}

    assert sum(made(plain.record_predict(2)).values()) == 2 * sum(made(fused.record_predict(2)).values()) == 4 * 2 * 8 * 6 * 6 * 4
    # The norm's gradient reads what the convolution made, and the next layer's weight gradient what the norm made: both stay, fused or not.
    kept = {name for name in made(fused.record_gradients(2)) if name.endswith(".y")}
    assert len(kept) == 4
    assert kept == {name for name in made(plain.record_gradients(2)) if name.endswith(".y")}
