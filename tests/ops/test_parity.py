"""Every implementation of every row on every case, and every backward against its forward (the bounds are gradcheck's)."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.check import gradcheck
from nbcnn.check.cases import mean_cases
from nbcnn.gpu import device
from nbcnn.gpu.device import Host
from nbcnn.modes import MODES, REFERENCES
from nbcnn.ops.conv import fused
from nbcnn.ops.kernel.call import Impl
from nbcnn.ops.kernel.case import Case


def _here(row):
    """A row's place, or a skip with the reason."""
    if row.place == "gpu":
        reason = device.gpu_missing()
        if reason:
            pytest.skip(f"{reason}; the simulator runs the small cases")
        return device.Gpu()
    return Host()


def test_every_row_has_every_op():
    wanted, of_convolutions = set(MODES["cpu", "fp32"].ops), set(fused.REFERENCES)
    for key, row in MODES.items():
        assert wanted <= set(row.ops), key
        assert set(row.ops) - wanted <= set(REFERENCES), key
        # Rules of fusion ask for all ops of their layer, so a row has the fused convolutions together or not at all.
        assert of_convolutions & set(row.ops) in (set(), of_convolutions), key


def test_the_cases_cover_every_op():
    # `run_op` hands an image to `convert` as it lies: test_stored.py runs it by hand.
    assert {case.op for case in mean_cases()} | {"convert"} == set(MODES["cpu", "fp32"].ops) | set(REFERENCES)


def test_every_backward_op_is_checked_against_its_forward():
    backward = {op for op in MODES["cpu", "fp32"].ops if op.endswith(("_dgrad", "_wgrad", "_grads"))}
    # evonorm_b0_dgrad is one half of evonorm_b0_grads, between whose halves the ranks meet.
    assert backward - {"evonorm_b0_dgrad"} <= set(gradcheck.GRADIENTS)


@pytest.mark.parametrize("key", MODES, ids="-".join)
def test_row_is_within_its_bounds(key):
    row = MODES[key]
    place = _here(row)
    if device.SIMULATOR and key[0] in ("cpu", "tiled", "tensorcore"):
        pytest.skip("in the simulator only convolutions and what is stored would differ from naive's, and those have files of their own")
    cases = list(gradcheck.all_cases())
    if device.SIMULATOR:
        # It runs a thread as a Python thread: convolutions, losses and products run there per file, at sizes chosen for it, and norms here once each.
        norms = {c.op: c for c in cases if "evonorm" in c.op and "conv_" not in c.op}
        per_file = ("conv_", "conv1d", "evonorm", "softmax_xent", "rmsle", "gemm")
        cases = [*norms.values(), *(c for c in cases if not any(part in c.op for part in per_file))]
    findings = list(gradcheck.check_row(row, place, cases))
    assert len(findings) >= 60
    assert [str(f) for f in findings if not f.ok] == []


def test_a_wrong_kernel_is_found():
    case = next(c for c in mean_cases() if c.op == "conv_dgrad")
    right = next(impl for _, impl in MODES["cpu", "fp32"].chain("conv_dgrad"))

    def slightly_wrong(call):
        launches = right.bind(call)

        class Nudge:
            def run(self, stream=0):
                call.outs[0][0] *= 1 + 1e-4

        return [*launches, Nudge()]

    row = MODES["cpu", "fp32"]
    assert gradcheck.parity(row, right, case, Host()) <= gradcheck.bound(case)
    assert gradcheck.parity(row, Impl(slightly_wrong), case, Host()) > gradcheck.bound(case)


def test_an_unwritten_output_is_found():
    case = Case("relu_fprop", "", (np.ones((2, 3, 4, 5), np.float32),), (((2, 3, 4, 5), "float32"),))
    assert np.isnan(gradcheck.parity(MODES["cpu", "fp32"], Impl(lambda call: []), case, Host()))


def test_a_gradient_that_is_not_the_forwards_is_found():
    row = MODES["cpu", "fp32"]
    forward = next(c for c in mean_cases() if c.op == "avgpool_fprop")
    halved = Impl(lambda call: [*next(i for _, i in row.chain("avgpool_dgrad")).bind(call), _Halve(call.outs[0])])
    error, limit = gradcheck.dot_product(row, "avgpool_dgrad", halved, forward, Host())
    assert error > limit


class _Halve:
    def __init__(self, array):
        self.array = array

    def run(self, stream=0):
        self.array *= 0.5


def test_wgmma_serves_hopper_and_no_later_gpu():
    for precision in ("bf16", "tf32", "fp32"):
        chain = dict(MODES["tensorcore", precision].chain("conv_wgrad"))
        assert chain["wgmma"].lacks((9, 0)) is None
        assert "9.0 and no other" in chain["wgmma"].lacks((12, 0))
        assert "9.0" in chain["wgmma"].lacks((8, 9))
        assert chain["mma"].lacks((12, 0)) is None
