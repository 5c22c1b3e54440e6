"""Tests of rows of samples on the GPU: every kernel beside its reference."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.gpu import device as gpu_device
from nbcnn.ops.products import gram_wgmma, parts
from nbcnn.ops.svm import rows

EPS = float(np.finfo(np.float32).eps)
PLACES = np.array([4, 0, 1, 6], np.int32)
WIDTH, PITCH, ROWS = 5, 64, 7


def on(device, values):
    array = device.empty(values.size, str(values.dtype))
    device.upload(array, values)
    return array


@pytest.fixture
def matrix(rng):
    made = np.zeros((ROWS, PITCH), np.float32)
    made[PLACES, :WIDTH] = rng.standard_normal((4, WIDTH)) * 10 + 3
    return made


def test_rows_come_to_their_places(device, matrix):
    staged, expected = np.ascontiguousarray(matrix[PLACES, :WIDTH]), np.full_like(matrix, 7)
    there = on(device, expected)
    rows.launch_place_rows(on(device, staged), on(device, PLACES), there, 4, WIDTH, PITCH).run(device.stream)
    rows.place_rows(staged, PLACES, expected)
    np.testing.assert_array_equal(device.download(there).reshape(expected.shape), expected)


def test_moments(device, matrix, rng):
    centre = rng.standard_normal(WIDTH)
    there, got = on(device, matrix), [on(device, np.zeros(3 * WIDTH)) for _ in range(2)]
    rows.launch_moments(there, on(device, PLACES), on(device, centre), *got, 4, WIDTH, PITCH, 3).run(device.stream)
    expected = np.zeros((3, WIDTH)), np.zeros((3, WIDTH))
    rows.moments(matrix, PLACES, centre, *expected)
    for one, other in zip(got, expected, strict=True):
        # A float64 sum of two terms.
        np.testing.assert_allclose(device.download(one).reshape(other.shape), other, rtol=1e-14, atol=1e-14)


def test_standardised(device, matrix, rng):
    mean, deviation = rng.standard_normal(WIDTH).astype(np.float32), (rng.random(WIDTH) + 0.5).astype(np.float32)
    there = on(device, matrix)
    rows.launch_standardise(there, on(device, PLACES), on(device, mean), on(device, deviation), 4, WIDTH, PITCH).run(device.stream)
    rows.standardise(matrix, PLACES, mean, deviation)
    np.testing.assert_allclose(device.download(there).reshape(matrix.shape), matrix, rtol=EPS, atol=0)


def test_norms(device, matrix):
    got = [on(device, np.zeros(ROWS, kind)) for kind in (np.float64, np.float32, np.float32)]
    rows.launch_norms(on(device, matrix), *got, ROWS, PITCH).run(device.stream)
    expected = np.zeros(ROWS), np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32)
    rows.norms(matrix, *expected)
    np.testing.assert_allclose(device.download(got[0]), expected[0], rtol=1e-14)
    np.testing.assert_allclose(device.download(got[1]), expected[1], rtol=EPS)
    np.testing.assert_array_equal(device.download(got[2]), expected[2])


def test_a_panel_is_copied_and_room_is_isolated(device, rng):
    k, panel = rng.random((5, 8)).astype(np.float32), rng.random((3, 2)).astype(np.float32)
    there = on(device, k)
    rows.launch_copy(on(device, panel), there, 3, 2, to=(8, 8 + 4)).run(device.stream)
    rows.copy_rows(panel, k[1:4, 4:6])
    np.testing.assert_array_equal(device.download(there).reshape(k.shape), k)
    square = device.empty(9, "float32")
    rows.launch_copy(there, square, 3, 3, start=(8, 2 * 8 + 1)).run(device.stream)
    np.testing.assert_array_equal(device.download(square).reshape(3, 3), k[2:5, 1:4])
    square = rng.random((5, 5)).astype(np.float32)
    there = on(device, square)
    rows.launch_isolate(there, 5, 3).run(device.stream)
    rows.isolate(square, real=3)
    np.testing.assert_array_equal(device.download(there).reshape(5, 5), square)


def test_halves_hold_22_bits(device, matrix):
    split = on(device, np.zeros(2 * matrix.size, np.uint16))
    rows.launch_halves(on(device, matrix), split, 64.0, matrix.size).run(device.stream)
    expected = np.zeros((2, *matrix.shape), np.uint16)
    rows.halves(matrix, expected, scale=64.0)
    found = device.download(split).reshape(expected.shape)
    np.testing.assert_array_equal(found, expected)
    together = found.view(np.float16).astype(np.float64).sum(0) / 64
    np.testing.assert_allclose(together, matrix, rtol=2**-22, atol=2**-25 / 64)


@pytest.mark.parametrize(("M", "N", "K", "subtract"), [(5, 3, 8, False), (70, 66, 40, True)])
def test_a_product_of_parts(device, rng, M, N, K, subtract):
    a, b, c = (rng.standard_normal((rows, pitch)).astype(np.float32) for rows, pitch in ((M + 1, K + 8), (N + 2, K + 4), (M, N + 3)))
    there = on(device, c)
    pitches, first = (K + 8, K + 4, N + 3), (K + 8, 2 * (K + 4), 1)
    parts.launch_product(on(device, a), on(device, b), there, M, N, K, pitches, first, subtract).run(device.stream)
    expected = c.astype(np.float64)
    parts.product_of_parts(a[1:, :K], b[2:, :K], expected[:, 1 : N + 1], subtract=subtract)
    terms = np.abs(a[1:, :K]) @ np.abs(b[2:, :K]).T + np.abs(c[:, 1 : N + 1])
    error = np.abs(device.download(there).reshape(c.shape) - expected)
    # 32 float32 sums and products, half a rounding each, and the last rounding.
    assert (error[:, 1 : N + 1] <= EPS * (np.sqrt(32) + 2) * terms).all()
    assert not error[:, 0].any()
    assert not error[:, N + 1 :].any()


def test_parts_that_cannot_be_loaded_four_at_a_time_are_refused():
    some = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="multiples of 4"):
        parts.launch_product(some, some, some, 1, 1, 6, (8, 8, 1))


@pytest.mark.parametrize("symmetric", [True, False])
def test_tiles_are_taken_once(symmetric):
    found = gram_wgmma.tiles(2500, 2500 if symmetric else 700, symmetric)
    expected = [(i, j) for i in range(20) for j in range(20 if symmetric else 6) if j >= i or not symmetric]
    assert sorted(map(tuple, found.tolist())) == expected
    assert (found[:80, 0] < gram_wgmma.BAND).all()


def values_on(gpu, a, b, gamma, *, symmetric=False, added=False, subtract=False, k=None):
    """Kernel values of a and b, from their halves."""

    def prepared(x):
        padded = np.zeros((len(x), -(-x.shape[1] // 64) * 64), np.float32)
        padded[:, : x.shape[1]] = x
        split = np.zeros((2, *padded.shape), np.uint16)
        rows.halves(padded, split, scale=64.0)
        return on(gpu, split), on(gpu, (x.astype(np.float64) ** 2).sum(1).astype(np.float32)), len(x)

    there = on(gpu, np.zeros((len(a), len(b)), np.float32) if k is None else k)
    sizes = len(a), len(b), -(-a.shape[1] // 64) * 64
    launch = gram_wgmma.launch_gram(
        prepared(a), prepared(b), there, sizes, len(b), gamma, 64.0**-2, gpu.multiprocessors, symmetric=symmetric, added=added, subtract=subtract
    )
    launch.run(gpu.stream)
    return gpu.download(there).reshape(len(a), len(b))


@pytest.mark.parametrize(("M", "N", "K"), [(5, 7, 3), (300, 129, 200), (1000, 700, 1100), (400, 400, 8192)])
def test_kernel_values_of_the_tensor_cores(gpu, rng, M, N, K):
    if gpu.capability != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")
    a, b, gamma = rng.standard_normal((M, K)).astype(np.float32), rng.standard_normal((N, K)).astype(np.float32), 0.5 / K
    b[: min(M, N) // 2] = a[: min(M, N) // 2] + 0.1 * b[: min(M, N) // 2]

    def exact(x, y):
        x, y = x.astype(np.float64), y.astype(np.float64)
        terms = (x**2).sum(1)[:, None] + (y**2).sum(1)
        return np.exp(-gamma * np.maximum(terms - 2 * x @ y.T, 0)), terms

    k, terms = exact(a, b)
    # Halves keep 2^-22 of a value, at random over K; 12 sums per step and K/64 of steps round; then norms, the difference, exp2 (2 ulp).
    bound = EPS * (4 + gamma * terms * (6 + 2 * 12 * 64 / max(K, 64) + np.sqrt(K / 64)))
    assert (np.abs(values_on(gpu, a, b, gamma) - k) <= bound).all()
    twice = values_on(gpu, a, b, gamma, added=True, k=np.ones((M, N), np.float32))
    assert (np.abs(twice - 1 - k) <= bound + 2 * EPS).all()
    same, (k, terms) = values_on(gpu, a, a, gamma, symmetric=True), exact(a, a)
    np.testing.assert_array_equal(same, same.T)
    assert (same.diagonal() == 1).all()
    k0 = rng.standard_normal((M, M)).astype(np.float32)
    less = values_on(gpu, a, a, gamma, symmetric=True, subtract=True, k=k0 + k0.T)
    wide = a.astype(np.float64)
    # 22 bits of each operand, and sums that round like a kernel value's.
    products = EPS * (4 + 2 * 12 * 64 / max(K, 64) + np.sqrt(K / 64)) * (np.abs(wide) @ np.abs(wide).T + 8)
    assert (np.tril(np.abs(less - (k0 + k0.T - wide @ wide.T))) <= products).all()
    np.testing.assert_array_equal(np.triu(less, 1), np.triu(k0 + k0.T, 1))
    assert (np.abs(same - k) <= EPS * (4 + gamma * terms * (6 + 2 * 12 * 64 / max(K, 64) + np.sqrt(K / 64)))).all()


@pytest.mark.full
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
def test_the_product_of_halves_leaves_no_sum_in_memory():
    words, floats = np.zeros(8, np.uint16), np.zeros(8, np.float32)
    assert_lean(gram_wgmma.launch_gram((words, floats, 9), (words, floats, 9), floats, (9, 9, 64), 9, 1.0, 1.0, 132), "90a", 168)


@on_every_arch
def test_the_kernels_of_rows_compile_without_spills(arch):
    f, d, i, h = (np.zeros(8, kind) for kind in (np.float32, np.float64, np.int32, np.uint16))
    assert_lean(rows.launch_place_rows(f, i, f, 1, 4, 4), arch, 32)
    assert_lean(rows.launch_moments(f, i, d, d, d, 1, 4, 4, 1), arch)
    assert_lean(rows.launch_standardise(f, i, f, f, 1, 4, 4), arch, 40)
    assert_lean(rows.launch_norms(f, d, f, f, 1, 4), arch, 40)
    assert_lean(rows.launch_halves(f, h, 1.0, 4), arch, 32)
    assert_lean(parts.launch_product(f, f, f, 1, 1, 4, (4, 4, 4)), arch, 128)
