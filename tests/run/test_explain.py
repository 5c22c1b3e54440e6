"""Tests of what `--explain` says of fusions: what each fused step was made of, what was not fused for its cost, and with which estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbcnn import modes
from nbcnn.gpu.target import H200
from nbcnn.lab.measure.plans import Absent
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.nn.models import unet
from nbcnn.plan.rewriting import joined
from nbcnn.run.explain import explain, fused
from nbcnn.run.net import Net
from nbcnn.run.rows import Choice

SMALL = [Conv2d(8, 3, padding=1), ReLU(), Conv2d(3, 3, padding=1), MSE()]


def planned(layers, row, batch=16, **options):
    """(the net, the plan of its training step) on a GPU that is not there."""
    net = Net(layers, (3, 32, 32), choice=Choice(modes.MODES[row], "as asked"), device=Absent(H200), **options)
    return net, net.lower(net.record_gradients(batch))


def test_a_small_network_says_what_its_steps_were_made_of():
    _, plan = planned(SMALL, ("cudacore", "fp32"))
    head, *lines = fused(plan)
    assert head == "what was fused, and the estimated times before and after:"
    ops = [line.split("µs -> ") for line in lines]
    assert [line.split("  ")[1] for line in lines] == ["conv1+relu1", "conv2+relu1"]
    assert "conv_fprop" in ops[0][0]
    assert "relu_fprop" in ops[0][0]
    assert ops[0][1].startswith("conv_relu_fprop ")
    assert ops[1][1].startswith("conv_dgrad_relu ")
    assert set(lines) < set(explain(plan).splitlines())
    assert planned(SMALL, ("cudacore", "fp32"), fusing=False)[1].fusions == ()


def test_a_mode_that_does_not_choose_by_cost_names_the_steps_alone():
    net, plan = planned(SMALL, ("tensorcore", "bf16"))
    assert any("µs" in line for line in fused(plan))
    net.row = replace(net.row, by_cost=False)
    _, *lines = fused(net.lower(net.record_gradients(16)))
    assert lines == ["  conv1+relu1  conv_fprop + relu_fprop -> conv_relu_fprop", "  conv2+relu1  conv_dgrad + relu_dgrad -> conv_dgrad_relu"]


@pytest.mark.parametrize("row", [("tensorcore", "bf16"), ("tensorcore", "fp32"), ("cudacore", "fp32")], ids="-".join)
def test_every_fused_step_of_a_unet_is_said_to_be_made_of_recorded_ones(row):
    net, plan = planned(unet(classes=3), row)
    recorded = {step.op for step in Net(net.layers, net.input_shape, mode="cpu", fusing=False).record_gradients(16).steps}
    whole, refused = joined(plan.fusions), [each for each in plan.fusions if not each.kept]
    assert {step.op for each in whole for step in each.gone} <= recorded
    come = [str(step.op) for each in whole for step in each.come]
    planned_ops = [str(item.step.op) for item in plan.steps]
    for op in {str(item.step.op) for item in plan.steps} - {*map(str, recorded), "convert", "pack_weights"}:
        assert come.count(op) == planned_ops.count(op), op
    for each in plan.fusions:
        assert (sum(each.come.values()) <= sum(each.gone.values()) * (1 + 1e-12)) == each.kept
    assert bool(refused) == (row[0] == "tensorcore"), "norms of clusters read their input once anyway"
    assert ("what would take longer fused, and is not:" in explain(plan)) == bool(refused)
