"""`bench convs` from end to end on a place that runs kernels: verified, timed, and refused where an op is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nbcnn import ops
from nbcnn.bench import convs
from nbcnn.ops.call import Launch
from nbcnn.ops.run import Unsupported
from nbcnn.shapes import ConvShape

SMALL = {"conv1": ConvShape(1, 2, 4, 4, 4, 3, 3, 1, 1), "conv4": ConvShape(1, 4, 4, 4, 3, 3, 3, 1, 1)}


@pytest.fixture
def small_layers(monkeypatch, place):
    monkeypatch.setattr(convs, "LAYERS", SMALL)
    monkeypatch.setattr(convs, "sensible_count", lambda *args, **options: 2)
    real = convs.time_calls
    monkeypatch.setattr(convs, "time_calls", lambda call, place, count, warm=0.0: real(call, place, 2, 0.0))


def test_every_layer_and_pass_is_timed(small_layers):
    rows = list(convs.passes("naive", 2, tuple(SMALL), beside_cudnn=False))
    assert [(row["layer"], row["path"]) for row in rows] == [("conv1", "fprop"), ("conv1", "wgrad"), *(("conv4", path) for path in convs.PATHS)]
    assert all(row["ms"]["median"] > 0 and row["tflops"] > 0 and row["cudnn_ms"] is None for row in rows)


def test_fused_layers_are_cases_of_the_same_convolution():
    for name, ops_of in convs.FUSED.items():
        for op in ops_of.values():
            shape = replace(convs.LAYERS[name], N=2)
            ins, outs = convs._grown(convs._case(shape, op), 8)
            shapes = [array.shape for array in ins] + [out[0] for out in outs]
            assert shape.w_shape in shapes
            assert any(found[0] == 8 and found[1] in (shape.C, shape.K) for found in shapes)


def test_a_wrong_op_is_not_timed(small_layers, monkeypatch):
    row = ops.MODES["naive", "fp32"]
    right = row.parts[0][1]["conv_fprop"]

    class Wrong(Launch):
        def run(self, stream=0):
            super().run(stream)
            self.args[3].copy_to_device(np.zeros(self.args[3].size, np.float32))

    def bind(call):
        return [Wrong(launch.kernel, launch.grid, launch.block, launch.args) for launch in right.bind(call)]

    changed = dict(row.parts[0][1]) | {"conv_fprop": replace(right, bind=bind)}
    monkeypatch.setitem(ops.MODES, ("naive", "fp32"), replace(row, parts=(("naive", changed),)))
    with pytest.raises(RuntimeError, match=r"naive fp32 conv_fprop .* is not timed"):
        list(convs.passes("naive", 2, ("conv1",), beside_cudnn=False))


def test_parity_takes_as_many_images_as_the_implementation_wants(monkeypatch):
    tried = []

    def time_op(row, case, batch, place):
        tried.append(len(case.ins[0]))
        if tried[-1] < 16:
            raise Unsupported("too few images")
        return "timing", "winograd"

    monkeypatch.setattr(convs, "time_op", time_op)
    shape = ConvShape(100, 2, 4, 4, 2, 3, 3, 1, 1)
    assert convs._timed(ops.MODES["im2col", "fp32"], shape, "conv_fprop", None) == ("timing", "winograd")
    assert tried == [4, 16]
