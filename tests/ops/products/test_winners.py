"""The kernel of k-means beside its reference."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean

from nbcnn.gpu import device as gpu_device
from nbcnn.ops.products.winners import keep_winner, launch_keep_winner


def test_the_reference_keeps_one_value_of_a_column():
    r = np.array([[1, -3, 2], [-2, 3, 0], [1, 1, -2]], np.float32)
    keep_winner(r)
    np.testing.assert_array_equal(r, [[0, -3, 2], [-2, 0, 0], [0, 0, 0]])


def test_the_kernel_keeps_what_the_reference_keeps(device, rng):
    # Quarters, so that ties occur; more columns than a block has threads.
    r = (rng.integers(-8, 9, (5, 131)) / 4).astype(np.float32)
    there = device.empty(r.size, "float32")
    device.upload(there, r)
    launch_keep_winner(there, *r.shape).run(device.stream)
    got = device.download(there).reshape(r.shape)
    keep_winner(r)
    np.testing.assert_array_equal(got, r)


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
def test_the_kernel_is_lean():
    f = np.zeros(1024, np.float32)
    assert_lean(launch_keep_winner(f, 32, 32), "75", registers=32)
