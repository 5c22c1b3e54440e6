"""Tests of EvoNorm-B0's y of images stored NHWC, one thread per quad of channels: parity in small and in large, which calls it serves, bytes,
registers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiled import assert_lean, on_every_arch
from counted import counted

from nbcnn import modes
from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.gpu.device import Host
from nbcnn.gpu.language import SIMULATOR
from nbcnn.gpu.target import H200
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.norms import b0, b0_apply
from nbcnn.ops.norms.reference import norm_cases

SMALL = ((2, 4, 3, 5), (3, 12, 2, 3), (1, 8, 5, 7))
LARGE = (170, 64, 12, 10)
"""Images so many that blocks do not each make the batch's statistics (`b0_batch.by_every_block`); the last block of an image is not full."""
LAST = "evonorm_b0_apply_wide_kernel"


def case_of(shape, values="normal"):
    return next(case for case in norm_cases([(shape, 1, values)]) if str(case.op) == "evonorm_b0_fprop")


def bound_of(case, device):
    apart = replace(b0.FPROP, tile=lambda call, target: None)
    return Bound(apart, case.op, case.ins, case.outs, device=device, attrs=case.attrs, layout="NHWC")


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small_images(shape, device):
    case = case_of(shape)
    bound = bound_of(case, device)
    assert bound.launches[-1].name == LAST
    bound.run()
    device.synchronize()
    errors = [gradcheck.relative_error(got, want) for got, want in zip(bound.results(), gradcheck.reference(case), strict=True)]
    assert max(errors) <= gradcheck.bound(case)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_large_batch(precision, gpu):
    row = modes.MODES["cudacore" if precision == "fp32" else "tensorcore", precision]
    case = case_of(LARGE)
    tile = next(held for held in b0.FPROP.candidates(bound_of(case, Host()).call, H200) if not held.together)
    large = Bound(b0.FPROP, case.op, case.ins, case.outs, device=Host(), attrs=case.attrs, layout="NHWC", tile=tile)
    assert large.launches[-1].name == LAST
    assert gradcheck.parity(row, b0.FPROP, case, gpu, tile) <= gradcheck.bound(case, precision)


def test_which_calls_it_serves():
    call = bound_of(case_of((1, 8, 2, 2)), Host()).call
    assert b0_apply.serves(call)
    assert not b0_apply.serves(replace(call, layout="NCHW"))
    assert not b0_apply.serves(replace(call, in_shapes=((1, 6, 2, 2),)))
    assert not b0_apply.serves(replace(call, in_shapes=((1, 2048, 2, 2),)))


@pytest.mark.skipif(not SIMULATOR, reason="only the simulator tells loads and stores one by one")
def test_bytes_load_by_load(device, monkeypatch):
    """x and y once; statistics of planes are left out here, and a block whose rows all have pixels loads none twice."""
    bound = bound_of(case_of((2, 12, 17, 40)), device)  # 680 pixels: one block of 85 rows of eight
    *others, last = bound.launches
    for launch in others:
        launch.run()
    found = counted(last, monkeypatch, {id(value) for value in (*bound.call.ins[1:4], *bound.call.outs[1:5])})
    image = 4 * 2 * 12 * 680
    assert found == Traffic(image, image, image)
    said = b0.FPROP.traffic(bound.call)[-1]
    assert (said.read - 4 * 2 * 12, said.write) == (image, image)


@pytest.mark.sampled
@on_every_arch
def test_compiles_without_spills(arch):
    assert_lean(bound_of(case_of((4, 64, 4, 4)), Host()).launches[-1], arch, 64)
