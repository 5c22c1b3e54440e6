"""Tests that PyTorch's forms of single ops compute what ours do; on the CPU, and only where PyTorch is installed."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: its forms are checked where it is installed")

from test_bench_op import SHAPES  # noqa: E402

from nbcnn.check import gradcheck  # noqa: E402
from nbcnn.gpu.device import Host  # noqa: E402
from nbcnn.lab.measure import opcases  # noqa: E402
from nbcnn.lab.measure.op import full_bound  # noqa: E402
from nbcnn.lab.peers import ops as peers_ops  # noqa: E402

SHAPES = {**SHAPES, "conv": "6,5,4,6,4"}
WITHOUT = {
    *("conv_pool_wgrad", "unpool", "flatten_fprop", "flatten_dgrad", "gather"),
    *("evonorm_s0_grads", "evonorm_b0_grads", "evonorm_b0_infer"),
    *("conv_evonorm_s0_fprop", "conv_evonorm_b0_fprop", "conv_evonorm_b0_infer"),
}
"""Ops without a form: packed indices, views, and gradients that autograd replays only together with the forward pass."""


def ours(problem):
    """Our op's outputs, by its NumPy reference."""
    impl = gradcheck.reference_impl(problem.op)
    ins, outs = problem.operands()
    return gradcheck.run_op(impl, problem.op, ins, outs, attrs=problem.small.attrs, device=Host())


@pytest.mark.parametrize("op", opcases.OPS)
def test_a_form_is_our_op(op):
    problem = opcases.problem(op, SHAPES[opcases.kind_of(op)])
    attrs = problem.small.attrs
    function = peers_ops.function_of(op, attrs)
    assert function is None or op not in WITHOUT
    if function is None and op not in WITHOUT:
        pytest.skip(f"nobody has written PyTorch's form of {op}")
    for form in filter(None, (function, peers_ops._fused(op, attrs))):
        operands = peers_ops.operands_of(problem, lambda array: torch.from_numpy(np.array(array)))
        peers_ops.check(op, ours(problem), form(*operands), 2 * full_bound(problem, "fp32"))


def test_another_op_is_refused():
    with pytest.raises(RuntimeError, match="relu_fprop is not ours: output 0 differs by"):
        peers_ops.check("relu_fprop", [np.ones(4)], torch.full((4,), 1.01), 1e-3)
