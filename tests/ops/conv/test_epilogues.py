"""Tests of activations in the epilogues of convolutions: every engine takes any device function, with the parameters of the call."""

from __future__ import annotations

from dataclasses import replace

import pytest

import nbcnn
from nbcnn.check import gradcheck
from nbcnn.lab.measure.plans import Absent
from nbcnn.modes import MODES, Row, named
from nbcnn.ops.activations.table import ACTIVATIONS
from nbcnn.ops.conv import fused, mma, thin_mma
from nbcnn.ops.conv.mma.tile import Tile as MmaTile
from nbcnn.ops.conv.simt import few_rows, im2col_fused, pointwise
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.conv.thin import fused as thin_fused
from nbcnn.ops.conv.winograd import engine as winograd
from nbcnn.ops.conv.winograd import nine_products
from nbcnn.plan.op import Map, Op
from nbcnn.plan.shapes import ConvShape
from nbcnn.run.net import Net
from nbcnn.run.rows import Choice

FIRST, WIDE, ONE = ConvShape(1, 3, 6, 8, 8, 3, 3, 1, 1), ConvShape(1, 16, 8, 8, 16, 3, 3, 1, 1), ConvShape(2, 16, 1, 1, 12, 1, 1, 1, 0)
TINY = Tile(16, 32, 8, 4, 4)
ENGINES = {
    "im2col": (im2col_fused.FUSED, "fp32", WIDE, TINY),
    "im2col split": (im2col_fused.FUSED, "fp32", WIDE, replace(TINY, split=2)),
    "few rows": (few_rows.OPS, "fp32", ONE, None),
    "pointwise": (pointwise.OPS, "fp32", ONE, TINY),
    "thin": (thin_fused.FUSED, "fp32", FIRST, None),
    "winograd": (winograd.FUSED, "fp32", WIDE, winograd.WinogradTile(2, 16, 32, 4, 4)),
    "mma bf16": (mma.ops("bf16"), "bf16", WIDE, None),
    # In the simulator, which does not compare addresses, no ring may wrap: 16 parts have at most four k-tiles.
    "mma tf32 split": (mma.ops("tf32"), "tf32", WIDE, MmaTile(32, 32, 2, 2, 4, 4, 16)),
    "first bf16": (thin_mma.parts("bf16")[0], "bf16", FIRST, None),
    "first tf32": (thin_mma.parts("tf32")[0], "tf32", FIRST, None),
    "last bf16": (thin_mma.parts("bf16")[1], "bf16", ConvShape(1, 32, 6, 8, 3, 3, 3, 1, 1), None),
}
DOUBLED, LAST = ConvShape(1, 16, 4, 4, 16, 3, 3, 1, 1), ConvShape(1, 32, 3, 4, 3, 3, 3, 1, 1)
OF_DOUBLED = {
    "im2col": (im2col_fused.FOLDED, "fp32", DOUBLED, TINY),
    "im2col split": (im2col_fused.FOLDED, "fp32", DOUBLED, replace(TINY, split=2)),
    "thin": (thin_fused.FUSED, "fp32", LAST, None),
    "nine products": (nine_products.FUSED, "fp32", DOUBLED, winograd.WinogradTile(2, 16, 32, 4, 4)),
    "mma bf16": (mma.ops("bf16"), "bf16", DOUBLED, None),
    "mma tf32 split": (mma.ops("tf32"), "tf32", DOUBLED, MmaTile(32, 32, 2, 2, 4, 4, 16)),
    "last bf16": (thin_mma.parts("bf16")[1], "bf16", LAST, None),
    "last tf32": (thin_mma.parts("tf32")[1], "tf32", LAST, None),
}
NAMES = ("relu", "elu", "sigmoid", "hard_swish", "clip")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_applies_the_activation_of_the_call(engine, name, device):
    ops, precision, shape, tile = ENGINES[engine]
    impl = replace(ops[named("conv_relu_fprop")], supports=lambda call, target: None)
    row = Row("tensorcore" if precision != "fp32" else "im2col", precision, "gpu", "NHWC", ())
    (case,) = fused.activated_cases(shape, (name,))
    # Winograd's transforms round about twice as often; `bound` has room for both (test_conv_winograd.py).
    assert gradcheck.parity(row, impl, case, device, tile) <= gradcheck.bound(case, precision)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", OF_DOUBLED)
def test_an_engine_applies_the_activation_to_a_doubled_images_convolution(engine, name, device):
    ops, precision, shape, tile = OF_DOUBLED[engine]
    impl = replace(ops[named("upconv_relu_fprop")], supports=lambda call, target: None)
    row = Row("tensorcore" if precision != "fp32" else "im2col", precision, "gpu", "NHWC", ())
    (case,) = fused.up_activated_cases(shape, (name,))
    assert gradcheck.parity(row, impl, case, device, tile) <= gradcheck.bound(case, precision)


def test_every_row_that_fuses_a_relu_fuses_every_activation():
    for key, row in MODES.items():
        for part, ops in row.fallbacks:
            for kind in ("conv", "upconv"):
                made = {name: Op(kind, "fprop", after=(Map(name),)) for name in ACTIVATIONS}
                if made["relu"] in ops:
                    assert {ops[op] for op in made.values()} == {ops[made["relu"]]}, (key, part)


@pytest.mark.parametrize("activation", [nbcnn.ReLU, nbcnn.Sigmoid, nbcnn.Tanh, nbcnn.ELU])
def test_an_activation_does_not_leave_hoppers_engine(activation):
    layers = [nbcnn.Flatten(), nbcnn.Linear(4096), activation(), nbcnn.Linear(4096), activation(), nbcnn.Linear(10), nbcnn.SoftmaxCrossEntropy()]
    net = Net(layers, (4, 32, 32), choice=Choice(MODES["tensorcore", "bf16"], "as asked"), device=Absent())
    plan = net.lower(net.record_gradients(1024))
    ran = [item.how.mode for item in plan.steps if str(item.step.op) == f"conv_{activation.kind}_fprop"]
    assert ran == ["wgmma", "wgmma"]
