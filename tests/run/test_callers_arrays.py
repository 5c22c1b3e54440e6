"""Arrays of a caller that lie on the device, on every row: functions with their gradients, outputs, and training, against the host's path."""

from __future__ import annotations

import numpy as np
import pytest
from test_function import Arrays
from test_net import ROWS, depth_bound, net_or_skip

from nbcnn import MSE, SGD, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, ReLU
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.gpu.arrays import DeviceArray
from nbcnn.gpu.device import Host
from nbcnn.modes import MODES
from nbcnn.nn.layers import sized
from nbcnn.run import inference
from nbcnn.run.function import BACKWARD, FORWARD, PARAMETERS, Function
from nbcnn.run.session import TrainingSession

SHAPE = (2, 2, 4, 4)
# Without a bias before the norm, whose gradient would be zero but for rounding.
BODY = [Conv2d(4, 3, padding=1, bias=False), BatchNorm2d(), ReLU(), MaxPool2d(2), Conv2d(3, 1), Flatten(), Linear(3)]


SIMULATED = (("naive", "fp32"),)
"""Where an array lies makes no difference between rows but to functions, which pack weights for cudacore: the simulator has the rest on one row."""


def on_device(device, values):
    """`values` in an array of the device that is the caller's own."""
    flat = device.empty(values.size, values.dtype.name)
    device.upload(flat, values)
    return DeviceArray(flat, values.shape, None, device.stream)


@ROWS
def test_a_function_agrees_with_the_numpy_path(row):
    net = net_or_skip([*BODY, MSE()], SHAPE[1:], row, simulated=row in (*SIMULATED, ("cudacore", "fp32")))
    layers = sized(BODY, SHAPE[1:])
    options = {"training": True, "gradients": True}
    host, function = (Function(layers, SHAPE, r, d, **options) for r, d in ((MODES["cpu", "fp32"], Host()), (net.row, net.device)))
    wanted = Arrays(host, BODY).run(host, FORWARD)
    before = {name: array.copy() for name, array in wanted.items()} | {
        name: values for name, values in Arrays(host, BODY).items() if "running" in name
    }
    wanted.run(host, BACKWARD)
    device = net.device
    made = {name: device.empty(array.size, array.dtype.name) for name, array in before.items() if name != "kept"}
    for name, array in made.items():
        device.upload(array, before[name])
    made["kept"] = device.empty(max(1, function.kept_bytes), "uint8")

    def run(part):
        function.run(part, made | {"arena": device.empty(max(1, function.arena_bytes[part]), "uint8")}, getattr(device, "stream", 0))
        return {name: device.download(array)[: before[name].size] for name, array in made.items() if name != "kept"}

    run(FORWARD)
    found = run(BACKWARD)
    for name in ("y", "dx", *(f"grad.{each}" for each in function.params), *function.states):
        assert np.linalg.norm(found[name] - wanted[name]) <= depth_bound(len(BODY), row[1]) * np.linalg.norm(wanted[name]), name
    again = run(BACKWARD) | {"dx": found["dx"]} | run(PARAMETERS)
    assert not [name for name in found if name.startswith(("grad.", "dx")) and found[name].tobytes() != again[name].tobytes()]


@ROWS
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_outputs_of_arrays_that_lie_there_have_the_bits_of_the_hosts_path(row, dtype):
    net = net_or_skip(BODY, SHAPE[1:], row, simulated=row in SIMULATED, normalisation=Normalisation((0.4, 0.5), (0.2, 0.3)))
    if net.device.name != "gpu":
        pytest.skip("the arrays of the host are the caller's own anyway")
    values = np.random.default_rng(4).integers(0, 256, (5, *SHAPE[1:])).astype(dtype)
    values = values / np.float32(255) if dtype == "float32" else values
    given, wanted = on_device(net.device, values), net.predict(values, 4)
    for _ in range(2):  # the second time the graphs between the steps are there
        found = inference.on_gpu(net, given, 4)
        np.testing.assert_array_equal(net.device.download(found.flat).reshape(found.shape), wanted)
    net.close()


@ROWS
def test_training_on_arrays_that_lie_there_has_the_bits_of_the_hosts_path(row):
    made = []
    random = np.random.default_rng(4)
    images, targets = random.random((4, *SHAPE[1:])).astype(np.float32), random.random((4, 3)).astype(np.float32)
    for there in (False, True):
        net = net_or_skip([*BODY, MSE()], SHAPE[1:], row, simulated=row in SIMULATED, seed=2)
        if net.device.name != "gpu":
            pytest.skip("the arrays of the host are the caller's own anyway")
        x, y = (on_device(net.device, each) if there else each for each in (images, targets))
        session = TrainingSession(net, x, targets=y, optimizer=SGD(), learning_rates=np.full(2, 0.05, np.float32), batch=2)
        for _ in range(2):
            session.step()
        made.append(session.state())
        planned = session.planned_bytes["data set"]
        assert planned == (0 if there else images.nbytes + targets.nbytes)
        session.close()
    assert not [name for name, array in made[0].items() if array.tobytes() != made[1][name].tobytes()]
