"""Tests of examples that lie in GPU memory: what is refused, and, on a driver that plays a GPU, that they are read where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from scripts import on_a_played_gpu

import nbcnn
from nbcnn.datasets.arrays import Form, Forms
from nbcnn.files.errors import UsageError
from nbcnn.gpu.arrays import DeviceArray
from nbcnn.model import on_gpu

PLAYED = """
import played_driver
played_driver.install()
played_driver.compile_nothing()

import numpy as np

import nbcnn
from nbcnn.gpu import driver
from nbcnn.gpu.arrays import DeviceArray
from nbcnn.ops.kernel.call import Launch


class Theirs:
    def __init__(self, values):
        self.held = driver.upload(values)
        self.__cuda_array_interface__ = {
            "shape": values.shape, "typestr": values.dtype.str, "data": (self.held.address, False), "strides": None, "version": 3, "stream": 77
        }


seen, run = [], Launch.run


def noted(launch, stream=0):
    seen.append((launch.name, [each.address for each in launch.args if hasattr(each, "address")]))
    run(launch, stream)


Launch.run = noted
x, wide = Theirs(np.zeros((10, 1, 6, 6), np.float32)), Theirs(np.zeros((10, 1, 6, 6), np.uint8))
body = [nbcnn.Conv2d(4, 3), nbcnn.ReLU(), nbcnn.Flatten(), nbcnn.Linear(3)]
model = nbcnn.Model(body, "cross_entropy", mode="cudacore", input_shape=(1, 6, 6))
for array in (x, wide):
    for made, width in ((lambda: model.predict(array, batch_size=4), 3), (lambda: model.features(array, "relu1", batch_size=4), 64)):
        for _ in range(2):
            del seen[:]
            y = made()
        assert isinstance(y, DeviceArray) and y.size == 10 * width and len(y) == 10, y
        # Of each batch the gathering reads the caller's memory, and the last kernel writes the result's.
        row = array.held.nbytes // 10
        gathered = [addresses[0] for name, addresses in seen if name == "gather_kernel"]
        assert gathered == [array.held.address + start * row for start in (0, 4, 8)], gathered
        everything = {address for _, addresses in seen for address in addresses}
        assert {y.flat.address + 4 * start * width for start in (0, 4, 8)} <= everything
assert np.asarray(model.predict(x)).shape == model.predict_proba(x).shape == (10, 3)
assert played_driver.calls["cuEventRecordWithFlags"] > 0

del seen[:]
labels = Theirs(np.arange(10, dtype=np.int64) % 3)
history = model.fit(x, labels, epochs=1, batch_size=5, validation_data=(x, labels), verbose=0)
assert {addresses[0] for name, addresses in seen if name == "gather_kernel"} >= {x.held.address}
try:
    model.fit(lambda epoch: [(x, labels)], verbose=0)
except nbcnn.UsageError as error:
    assert "read from the host: give x.cpu()" in str(error), error
else:
    raise AssertionError("a batch on the GPU was taken")
autoencoder = nbcnn.Model([nbcnn.Conv2d(1, 3, padding=1)], "mse", mode="cudacore")
autoencoder.fit(wide, epochs=1, batch_size=5, verbose=0)
autoencoder.fit(wide, x, epochs=1, batch_size=5, verbose=0)
assert {addresses[0] for name, addresses in seen if name == "gather_kernel"} >= {wide.held.address, x.held.address}
print("read where they lie")
"""


def test_examples_on_a_played_gpu_are_read_where_they_lie(tmp_path):
    done = on_a_played_gpu(PLAYED, tmp_path)
    assert done.stdout == "read where they lie\n", done.stderr[-3000:]


class Flat:
    """A flat array of which only dtype and size are looked at."""

    def __init__(self, size, dtype):
        self.size, self.dtype, self.nbytes = size, np.dtype(dtype), 0


def held(shape, dtype="float32"):
    return DeviceArray(Flat(int(np.prod(shape)), dtype), shape)


@pytest.mark.parametrize(
    ("array", "form", "last", "says"),
    [
        (held((5, 8, 8, 3)), Form((3, 8, 8)), None, r"are \(5, 8, 8, 3\).*must be \(N, 3, 8, 8\)"),
        (held((0, 3, 8, 8)), Form((3, 8, 8)), None, r"are \(0, 3, 8, 8\)"),
        (held((5, 3, 8, 8), "float64"), Form((3, 8, 8)), None, "are float64: give uint8"),
        (held((5, 3, 8, 8)), Form((3, 8, 8), channels_last=True), None, r"give x.permute\(0, 3, 1, 2\)"),
        (held((5, 3, 8, 8)), Form((3, 8, 8)), True, r"must be \(N, C, H, W\)"),
        (held((5, 3, 8, 8)), Form((3, 8, 8), scale=(-1.0, 1.0)), None, "numbers are scaled from -1…1 to 0…1"),
        (held((5, 3)), Forms((Form((3,)), Form((3,)))), None, "networks with one input"),
    ],
)
def test_examples_that_would_have_to_be_changed_are_refused(array, form, last, says):
    with pytest.raises(UsageError, match=says):
        on_gpu.examples(array, form, last)


def test_what_fits_is_passed_on():
    for dtype in ("uint8", "float32"):
        assert on_gpu.examples(held((5, 3, 8, 8), dtype), Form((3, 8, 8), scale=(0.0, 1.0)), None).shape == (5, 3, 8, 8)
    assert on_gpu.examples(held((3, 8, 8)), Form((3, 8, 8)), None).shape == (1, 3, 8, 8)
    assert on_gpu.form_on_gpu(held((5, 3, 8, 8)), None) == Form((3, 8, 8), scale=(0.0, 1.0))


def test_targets_and_a_network_of_the_host():
    net = nbcnn.Model([nbcnn.Linear(1)], "mse", mode="cpu", input_shape=(3,)).net
    assert on_gpu.targets(held((5,)), 5, net, "targets").shape == (5, 1)
    with pytest.raises(UsageError, match=r"output is \(5, 1\)"):
        on_gpu.targets(held((5, 2)), 5, net, "targets")
    with pytest.raises(UsageError, match="give float32"):
        on_gpu.targets(held((5, 1), "uint8"), 5, net, "targets")
    with pytest.raises(UsageError, match=r"mode is cpu: give x\.cpu"):
        on_gpu.must_be_there(net)
