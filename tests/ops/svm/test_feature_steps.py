"""Tests of feature processing on the GPU: every kernel beside its reference, at shapes that no tile divides."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, full, on_every_arch

from nbcnn.files.errors import UsageError
from nbcnn.ops.svm import process

EPS = float(np.finfo(np.float32).eps)
PLACES = np.array([3, 0, 4], np.int32)
ROWS, MARK = 6, 7.0


def on(device, values):
    array = device.empty(values.size, str(values.dtype))
    device.upload(array, values)
    return array


def matrix(rng, width, pitch):
    """Rows of `pitch` floats with a mark wherever no feature is."""
    made = np.full((ROWS, pitch), MARK, np.float32)
    made[PLACES, :width] = rng.standard_normal((len(PLACES), width))
    return made


def compare(device, there, expected, **tolerance):
    """Features are close, and everything else is untouched."""
    np.testing.assert_allclose(device.download(there).reshape(expected.shape), expected, **tolerance)


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 1, 3), *full(((2, 33, 32),))])
def test_blurred_maps(device, rng, shape):
    width = int(np.prod(shape))
    rows = matrix(rng, width, width + 4)
    there = on(device, rows)
    process.launch_blur(there, on(device, PLACES), len(PLACES), shape, width + 4).run(device.stream)
    most = np.abs(rows[PLACES, :width]).max()
    process.blur(rows, PLACES, shape=shape)
    # Nine terms whose weights sum to 1: at most ten roundings of the largest value on either side.
    compare(device, there, rows, rtol=0, atol=20 * EPS / 2 * most)


def test_a_map_of_more_positions_than_shared_memory_has_is_refused():
    with pytest.raises(UsageError, match="at most 12,288 on a GPU"):
        process.launch_blur(None, None, 1, (1, 112, 112), 12_544)


def test_blur_is_the_filter_with_replicated_borders():
    rows = np.zeros((1, 9), np.float32)
    rows[0, 0] = 16
    process.blur(rows, np.array([0]), shape=(1, 3, 3))
    # In a corner the weights of what lies outside, 1 + 2 in each direction, are those of the corner itself.
    np.testing.assert_array_equal(rows.reshape(3, 3), [[9, 3, 0], [3, 1, 0], [0, 0, 0]])


def test_signed_roots(device, rng):
    rows = matrix(rng, 5, 8)
    rows[0, 1] = 0
    there = on(device, rows)
    process.launch_signed_root(there, on(device, PLACES), len(PLACES), 5, 8).run(device.stream)
    process.signed_root(rows, PLACES, width=5)
    compare(device, there, rows, rtol=2 * EPS, atol=0)


def test_centred_copies(device, rng):
    rows, mean = matrix(rng, 6, 8), rng.standard_normal(6).astype(np.float32)
    got, expected = on(device, np.zeros(18, np.float32)), np.zeros((3, 6), np.float32)
    process.launch_centred(on(device, rows), on(device, PLACES), on(device, mean), got, 3, 6, 8).run(device.stream)
    process.centred(rows, PLACES, mean, expected)
    compare(device, got, expected, rtol=EPS)


@pytest.mark.parametrize(("channels", "positions"), [(3, 5), *full((70, 9), (128, 64))])
def test_products_of_channels(device, rng, channels, positions, monkeypatch):
    monkeypatch.setattr(process, "BLOCKS", 2)
    packed = rng.standard_normal((3, channels, positions)).astype(np.float32)
    begun = rng.standard_normal((process.parts_of(channels), channels, channels))
    there = on(device, begun)
    process.launch_channel_products(on(device, packed), there, 3, channels, positions).run(device.stream)
    expected, sizes = np.zeros((channels, channels)), np.zeros((channels, channels))
    process.channel_products(packed, expected)
    process.channel_products(np.abs(packed), sizes)
    got = (device.download(there).reshape(begun.shape) - begun).sum(0)
    upper = np.triu_indices(channels)
    # 32 products and their sum are rounded to float32: 33 roundings of half an ε of the sum of their sizes.
    assert (np.abs(got - expected)[upper] <= 33 * EPS / 2 * sizes[upper] + 1e-12).all()


@pytest.mark.parametrize(("channels", "positions"), [(3, 5), *full((70, 9), (128, 64))])
def test_whitened_rows(device, rng, channels, positions):
    width = channels * positions
    packed, Z = rng.standard_normal((3, channels, positions)).astype(np.float32), rng.standard_normal((channels, channels)).astype(np.float32)
    Z += Z.T.copy()
    rows = matrix(rng, width, width + 4)
    there = on(device, rows)
    process.launch_whiten(on(device, packed), on(device, Z), there, on(device, PLACES), 3, channels, positions, width + 4).run(device.stream)
    process.whiten(packed.astype(np.float64), Z.astype(np.float64), rows, PLACES)
    # A sum of C products in float32, C + 1 roundings of half an ε of the sum of their sizes; and the reference's own last one.
    sizes = np.matmul(np.abs(Z), np.abs(packed)).max()
    compare(device, there, rows, rtol=0, atol=(channels + 2) * EPS / 2 * sizes)


def test_rows_of_unit_length(device, rng):
    rows, mean = matrix(rng, 40, 64), rng.standard_normal(40).astype(np.float32)
    rows[PLACES[1], :40] = mean  # nothing is left of it
    there = on(device, rows)
    process.launch_unit_rows(there, on(device, PLACES), on(device, mean), 3, 40, 64).run(device.stream)
    process.unit_rows(rows, PLACES, mean)
    np.testing.assert_allclose((rows[PLACES, :40].astype(np.float64) ** 2).sum(1), [1, 0, 1], atol=8 * EPS)
    # A difference, a factor and their product are rounded once each.
    compare(device, there, rows, rtol=3 * EPS, atol=0)


@pytest.mark.full  # the kernels page has their registers
@on_every_arch
def test_they_compile_without_spills(arch):
    f, d, i = np.zeros(64, np.float32), np.zeros(64), np.zeros(2, np.int32)
    for launch in (
        process.launch_blur(f, i, 2, (2, 4, 4), 32),
        process.launch_signed_root(f, i, 2, 32, 32),
        process.launch_centred(f, i, f, f, 2, 32, 32),
        process.launch_unit_rows(f, i, f, 2, 32, 32),
    ):
        assert_lean(launch, arch)
    for launch in (process.launch_channel_products(f, d, 2, 2, 16), process.launch_whiten(f, f, f, i, 2, 2, 16, 32)):
        assert_lean(launch, arch, 128)
