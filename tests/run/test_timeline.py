"""Tests of where the time of a training step goes: every launch once, the same bits as the graph, and a line to read."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from nbcnn.check.static import compile_launch
from nbcnn.datasets import shapes
from nbcnn.gpu import ranges
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD
from nbcnn.nn.resampling import MaxPool2d, Upsample2d
from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.op import Map, Op
from nbcnn.run import timeline
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

LAYERS = (Conv2d(16, 3, padding=1, in_channels=3), ReLU(), MaxPool2d(2), Upsample2d(2), Conv2d(3, 3, padding=1, in_channels=16), MSE())
FOUND = {"kernels_ms": {"conv wgrad": 1.0, "conv fprop": 0.8, "sgd": 0.001}, "gaps_ms": 0.199, "host_ms": 1.25, "step_ms": 2.0}


def session_of(mode: str) -> TrainingSession:
    images = shapes.generate(8, seed=1)[0]
    net = Net(LAYERS, images.shape[1:], mode=mode)
    return TrainingSession(net, images, optimizer=SGD(), learning_rates=np.full(4, 0.1, np.float32), batch=4)


def test_every_launch_is_in_the_sums_once():
    session = session_of("cpu")
    found = session.step_watched()()
    assert set(found) == {"kernels_ms", "gaps_ms", "host_ms", "step_ms"}
    assert {"conv fprop", "conv wgrad", "conv dgrad", "maxpool fprop", "upsample dgrad", "sgd", "advance"} <= set(found["kernels_ms"])
    assert list(found["kernels_ms"].values()) == sorted(found["kernels_ms"].values(), reverse=True)
    assert sum(found["kernels_ms"].values()) + found["gaps_ms"] == pytest.approx(found["step_ms"], abs=1e-3)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("mode", ["cpu", pytest.param("cudacore", marks=pytest.mark.gpu)])
def test_a_watched_step_has_the_bits_of_a_replayed_one(mode, request):
    if mode != "cpu":
        request.getfixturevalue("gpu")
    plain, watched = session_of(mode), session_of(mode)
    for _ in range(2):
        plain.step()
        watched.step_watched()()
    assert plain.steps_left == watched.steps_left == 0
    states = plain.state(), watched.state()
    assert all(states[0][name].tobytes() == states[1][name].tobytes() for name in states[0])


def test_kernels_fill_the_step_on_a_gpu(gpu):
    session = session_of("cudacore")
    session.step_watched()()
    found = session.step_watched()()
    # What the host needs lies in the wait before the step, not in it.
    assert found["gaps_ms"] < 0.5 * found["step_ms"] + 0.1
    assert session.program.enqueue_ms == pytest.approx(found["host_ms"], abs=1e-3)


def test_labels_are_op_and_pass():
    x, w, y = Buf("x", (1, 3, 8, 8)), Buf("w", (4, 3, 3, 3)), Buf("y", (1, 4, 8, 8))
    assert timeline.label(Step(Op("conv", "fprop", after=(Map("relu"),)), (x, w), (y,), {"stride": 1, "pad": 1})) == "conv fprop"
    assert timeline.label(Step(Op("upconv", "wgrad"), (x, y), (w,))) == "conv wgrad"
    assert timeline.label(Step(Op("maxpool", "dgrad"), (y,), (x,))) == "maxpool dgrad"
    assert timeline.label(Step(Op("pack_weights"), (w,), (w,))) == "pack weights"


def test_the_line_names_shares_gaps_and_the_host():
    assert timeline.line(FOUND) == "one step's 2.00 ms: conv wgrad 50%, conv fprop 40%, gaps 10%; enqueuing it took the host 1.25 ms"


def test_the_waiting_kernel_compiles_and_naps_for_as_long_as_it_should():
    launch = timeline.wait_launch(1.0)
    assert launch.args == (20,)
    assert timeline.wait_launch(1e9).args == (400,)
    if not timeline.SIMULATOR:
        assert compile_launch(launch, "90a").frame_bytes == 0


class Marks:
    """A stand-in for a range: which began and ended, in order."""

    def __init__(self):
        self.seen = []

    def __call__(self, name):
        @contextmanager
        def range_():
            self.seen.append(name)
            yield
            self.seen.append("end")

        return range_()


def test_every_step_of_the_plan_has_a_range_of_its_own():
    session, marks = session_of("cpu"), Marks()
    session.mark = marks
    session.step_watched()()
    steps = [f"{item.step.scope}.{item.step.op}" for item, _ in session.program.bound]
    assert marks.seen == [name for step in steps for name in (step, "end")]


def test_ranges_come_from_the_nvtx_package_where_there_is_one(monkeypatch):
    made = []
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=lambda name, domain: made.append((name, domain)) or nullcontext()))
    with ranges.nvtx()("conv1.conv_fprop"):
        pass
    assert made == [("conv1.conv_fprop", "nbcnn")]
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert ranges.nvtx() is None
    with ranges.nothing("x"):
        assert "pip install nvtx" in ranges.MISSING
