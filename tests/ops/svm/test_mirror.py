"""The parts of the mirrored kernel on the GPU, each beside its reference."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.ops.svm import mirror

EPS = float(np.finfo(np.float32).eps)


def on(device, values):
    array = device.empty(values.size, str(values.dtype))
    device.upload(array, values)
    return array


def pitched(values, pitch):
    """`values` in rows of `pitch` floats, with a mark behind each."""
    made = np.full((len(values), pitch), 7, np.float32)
    made[:, : values.shape[1]] = values
    return made


def test_distances_of_mirrored_images(device, rng):
    rows, mirrored = rng.standard_normal((2, 5, 64)).astype(np.float32)
    got = on(device, np.zeros(5))
    mirror.launch_apart(on(device, rows), on(device, mirrored), got, 5, 64).run(device.stream)
    expected = np.empty(5)
    mirror.apart(rows, mirrored, expected)
    np.testing.assert_allclose(device.download(got), expected, rtol=64 * np.finfo(np.float64).eps)


def test_factors_make_a_unit_diagonal():
    squared, gamma = np.array([0.0, 0.3, 9.0]), 0.4
    # Of a sample and itself the four values are 1, k(x, x') twice, and 1.
    np.testing.assert_allclose(mirror.factors(squared, gamma).astype(np.float64) ** 2 * (2 + 2 * np.exp(-gamma * squared)), 1, rtol=4 * EPS)


@pytest.mark.parametrize(("n", "pitch"), [(1, 4), (33, 36)])
def test_a_matrix_plus_its_transpose(device, rng, n, pitch):
    k = pitched(rng.standard_normal((n, n)).astype(np.float32), pitch)
    there = on(device, k)
    mirror.launch_add_transpose(there, n, pitch).run(device.stream)
    mirror.add_transpose(k[:, :n])
    np.testing.assert_array_equal(device.download(there).reshape(k.shape), k)


@pytest.mark.parametrize("unit", [False, True])
def test_added_and_weighed(device, rng, unit):
    k, values = pitched(rng.random((3, 3), np.float32), 8), rng.random((3, 3), np.float32)
    rows, columns = rng.random((2, 3), np.float32) + 0.5
    there = on(device, k)
    mirror.launch_add_values(on(device, values), there, 3, 3, 8).run(device.stream)
    mirror.add_values(values, k[:, :3])
    np.testing.assert_array_equal(device.download(there).reshape(k.shape), k)
    mirror.launch_weigh(there, on(device, rows), on(device, columns), 3, 3, 8, unit).run(device.stream)
    mirror.weigh(k[:, :3], rows, columns, unit=unit)
    np.testing.assert_allclose(device.download(there).reshape(k.shape), k, rtol=2 * EPS)


@pytest.mark.full  # the kernels page has their registers
@on_every_arch
def test_they_compile_without_spills(arch):
    f, d = np.zeros(64, np.float32), np.zeros(8)
    launches = (
        mirror.launch_apart(f, f, d, 2, 32),
        mirror.launch_add_values(f, f, 4, 4, 4),
        mirror.launch_add_transpose(f, 8, 8),
        mirror.launch_weigh(f, f, f, 4, 4, 4, True),
    )
    for launch in launches:
        assert_lean(launch, arch)
