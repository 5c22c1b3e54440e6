"""Tests of `bench convs` from end to end on a device that runs kernels: verified, timed, and refused where an op is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import samples

from nbcnn import modes
from nbcnn.check import gradcheck
from nbcnn.check.one_op import Unsupported
from nbcnn.lab.measure import caches, results, steady
from nbcnn.lab.measure import op as bench_op
from nbcnn.lab.measure.op import Choice
from nbcnn.lab.measure.opcases import conv_problem
from nbcnn.lab.peers import cudnn_plans
from nbcnn.lab.report import readme_tensorcore, sections
from nbcnn.lab.studies import convs
from nbcnn.modes import named
from nbcnn.ops.kernel.call import Launch
from nbcnn.plan.shapes import ConvShape

SMALL = {"conv1": ConvShape(1, 2, 4, 4, 4, 3, 3, 1, 1), "conv4": ConvShape(1, 4, 4, 4, 3, 3, 3, 1, 1)}


@pytest.fixture
def small_layers(monkeypatch, device):
    monkeypatch.setattr(convs, "LAYERS", SMALL)
    monkeypatch.setattr(convs, "CALLS", 1)
    monkeypatch.setattr(convs, "SECONDS", 0.01)
    monkeypatch.setattr(caches, "MOST_SETS", 2)
    for name, value in (("MIN_SECONDS", 0.0), ("MAX_SECONDS", 0.002), ("WINDOW", 0.0005)):
        monkeypatch.setattr(steady, name, value)


def test_every_layer_and_pass_is_timed(small_layers):
    rows = list(convs.passes("naive", 2, tuple(SMALL), beside_cudnn=False))
    assert [(row["layer"], row["path"]) for row in rows] == [("conv1", "fprop"), ("conv1", "wgrad"), *(("conv4", path) for path in convs.PATHS)]
    assert all(row["ms"]["median"] > 0 and row["tflops"] > 0 and row["cudnn_ms"] is None for row in rows)


def test_figures_are_sampled_for_as_long_as_is_asked_for(small_layers, monkeypatch):
    asked = []
    monkeypatch.setattr(convs, "warm_up", lambda works, watch, seconds: (asked.append(seconds), steady.warm_up(works, watch, seconds))[1])
    timed_in_turn = convs.timed_in_turn
    monkeypatch.setattr(convs, "timed_in_turn", lambda *given: (asked.append(given[-1]), timed_in_turn(*given))[1])
    for how in ({}, {"seconds": 0.002, "warmup": 0.0}):
        next(convs.passes("naive", 2, ("conv1",), beside_cudnn=False, **how))
    assert asked == [None, convs.SECONDS, 0.0, 0.002]


class Peer:
    """A work whose calls take so many milliseconds."""

    def __init__(self, label, ms):
        self.label, self.ms = label, ms

    def repeat(self, n):
        return self.ms

    def enqueue(self, n):
        pass


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN as PyTorch runs it, and its best plans: plans[masked] is a time, or why there is none."""
    plans = {False: 2.0, True: 3.0}

    def plan(shape, path, precision, device, *, masked=False):
        if isinstance(plans[masked], str):
            raise cudnn_plans.NoPlan(plans[masked])
        return Peer("best", plans[masked])

    monkeypatch.setattr(convs.peers, "convolution", lambda *given: Peer("cuDNN", 4.0))
    monkeypatch.setattr(cudnn_plans, "available", lambda: True)
    monkeypatch.setattr(cudnn_plans, "convolution", plan)
    return plans


def masked_rows():
    rows = [row for row in convs.passes("cudacore", 2, ("conv3",), fused=True) if row["path"] == "dgrad"]
    assert [row["op"] for row in rows] == ["conv_dgrad_relu", "conv_dgrad"]
    return rows


@pytest.fixture
def small_conv3(small_layers, monkeypatch):
    monkeypatch.setattr(convs, "LAYERS", {"conv3": ConvShape(1, 4, 4, 4, 4, 3, 3, 1, 1)})


def test_a_masked_gradient_and_a_plain_one_are_beside_the_best_plans_of_the_same_work(small_conv3, cudnn):
    for row, ms in zip(masked_rows(), (3.0, 2.0), strict=True):
        assert row["best_plan_op"] == row["op"]
        assert row["best_plan_ms"]["median"] == ms
        assert row["best_plan_ratio"] == pytest.approx(ms / row["ms"]["median"], rel=0.5)  # medians of few times that the simulator takes
        assert row["cudnn_ms"]["median"] == 4.0


def test_a_masked_gradient_is_never_beside_a_plan_without_the_mask(small_conv3, cudnn):
    cudnn[True] = "the heuristics name no plan"
    masked, plain = masked_rows()
    assert masked["best_plan_why"] == "the heuristics name no plan"
    assert not {"best_plan_ms", "best_plan_ratio"} & set(masked)
    assert plain["best_plan_ms"]["median"] == 2.0


def test_only_a_data_gradient_has_a_mask():
    with pytest.raises(ValueError, match="wgrad has no mask"):
        cudnn_plans.convolution(SMALL["conv4"], "wgrad", "bf16", None, masked=True)


def test_the_table_of_gradients_has_what_both_sides_compute(tmp_path, monkeypatch):
    """A plan without the mask beside a masked gradient, as older results have it, is no row of it."""
    row = {
        "layer": "conv2",
        "path": "dgrad",
        "batch": 1024,
        "ms": samples.timing(0.25),
        "tflops": 620.0,
        "cudnn_ms": samples.timing(0.23),
        "ratio": 0.92,
    }
    best = {"best_plan_ms": samples.timing(0.26), "best_plan_ratio": 1.04}
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    samples.saved(tmp_path, {"convs-fused-tensorcore-bf16-1024": [row | best | {"op": "conv_dgrad_relu"}]})
    assert readme_tensorcore.gradients() == "These pairs have not been timed yet.\n"
    masked = row | best | {"op": "conv_dgrad_relu", "best_plan_op": "conv_dgrad_relu"}
    plain = row | {"op": "conv_dgrad", "ms": samples.timing(0.24), "best_plan_op": "conv_dgrad", "best_plan_ms": samples.timing(0.23)}
    plain |= {"best_plan_ratio": 0.96}
    other = row | best | {"layer": "conv4", "op": "upconv_dgrad_relu", "best_plan_op": "conv_dgrad"}
    path = samples.saved(tmp_path, {"convs-fused-tensorcore-bf16-1024": [masked, plain, other]})
    text = readme_tensorcore.gradients()
    assert "| bf16 | conv2 | dgrad and ReLU's mask | `conv_dgrad_relu` | 250 | 620 | 260 | **1.04×** |" in text
    assert "| bf16 | conv2 | dgrad | `conv_dgrad` | 240 | 620 | 230 | **0.96×** |" in text
    assert "conv4" not in text
    assert "NVIDIA H200, " in text
    layers = readme_tensorcore.layers()
    assert "| conv2 | dgrad | `conv_dgrad_relu` | 250 (0.92×) |" in layers
    assert "| conv2 | dgrad | `conv_dgrad` | 240 (0.92×) |" in layers
    every = sections.convs(results.load(path)["sections"]["convs-fused-tensorcore-bf16-1024"]["rows"])
    assert [row[1] for row in every.rows] == ["dgrad (`conv_dgrad_relu`)", "dgrad (`conv_dgrad`)", "dgrad"]


def test_fused_layers_are_cases_of_the_same_convolution():
    for name, ops_of in convs.FUSED.items():
        for op in ops_of.values():
            shape = replace(convs.LAYERS[name], N=8)
            ins, outs = conv_problem(op, shape).operands()
            shapes = [array.shape for array in ins] + [out[0] for out in outs]
            assert shape.w_shape in shapes
            assert any(found[0] == 8 and found[1] in (shape.C, shape.K) for found in shapes)


def test_a_wrong_op_is_not_timed(small_layers, monkeypatch):
    row = modes.MODES["naive", "fp32"]
    right = row.fallbacks[0][1][named("conv_fprop")]

    class Wrong(Launch):
        def run(self, stream=0):
            super().run(stream)
            self.args[3].copy_to_device(np.zeros(self.args[3].size, np.float32))

    def bind(call):
        return [Wrong(launch.kernel, launch.grid, launch.block, launch.args) for launch in right.bind(call)]

    changed = dict(row.fallbacks[0][1]) | {named("conv_fprop"): replace(right, bind=bind)}
    monkeypatch.setitem(modes.MODES, ("naive", "fp32"), replace(row, fallbacks=(("naive", changed),)))
    with pytest.raises(RuntimeError, match=r"naive fp32 conv_fprop .* is not timed"):
        list(convs.passes("naive", 2, ("conv1",), beside_cudnn=False))


def test_parity_takes_as_many_images_as_the_implementation_wants(monkeypatch):
    tried = []

    def parity(row, impl, case, device, tile):
        tried.append(len(case.ins[0]))
        if tried[-1] < 16:
            raise Unsupported("too few images")
        return 0.0

    monkeypatch.setattr(gradcheck, "parity", parity)
    problem = conv_problem("conv_fprop", ConvShape(40, 2, 4, 4, 2, 3, 3, 1, 1))
    assert bench_op.prepare(Choice("cpu"), problem, rotate=False).error == 0.0
    assert tried == [4, 16]
    monkeypatch.setattr(gradcheck, "parity", lambda *args: (_ for _ in ()).throw(Unsupported("never")))
    with pytest.raises(Unsupported, match="never"):
        bench_op.prepare(Choice("cpu"), problem, rotate=False)
