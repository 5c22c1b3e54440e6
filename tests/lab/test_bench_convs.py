"""Tests of `bench convs` from end to end on a device that runs kernels: verified, timed, and refused where an op is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nbcnn import modes
from nbcnn.check import gradcheck
from nbcnn.check.one_op import Unsupported
from nbcnn.lab.measure import caches, steady
from nbcnn.lab.measure import op as bench_op
from nbcnn.lab.measure.op import Choice
from nbcnn.lab.measure.opcases import conv_problem
from nbcnn.lab.studies import convs
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
    right = row.fallbacks[0][1]["conv_fprop"]

    class Wrong(Launch):
        def run(self, stream=0):
            super().run(stream)
            self.args[3].copy_to_device(np.zeros(self.args[3].size, np.float32))

    def bind(call):
        return [Wrong(launch.kernel, launch.grid, launch.block, launch.args) for launch in right.bind(call)]

    changed = dict(row.fallbacks[0][1]) | {"conv_fprop": replace(right, bind=bind)}
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
