"""Tests of the solver of pairs: its reference beside libsvm, its kernels beside the reference."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch
from sklearn.svm import SVC

from nbcnn.ops.svm import smo
from nbcnn.ops.svm.smo import Pair

EPS = float(np.finfo(np.float32).eps)
TOLERANCE = 1e-3


def overlapping(count, width=6, seed=4):
    """Kernel values of two classes that overlap, float32, and their labels ±1."""
    rng = np.random.default_rng(seed)
    y = np.where(np.arange(count) < count * 2 // 5, 1.0, -1.0)
    x = rng.standard_normal((count, width)) + 0.4 * y[:, None]
    squares = (x**2).sum(1)
    k = np.exp(-np.maximum(squares[:, None] + squares - 2 * x @ x.T, 0) / width).astype(np.float32)
    np.fill_diagonal(k, 1)
    return k, y


def objective(K, y, alpha):
    return alpha.sum() - 0.5 * (y * alpha) @ K.astype(np.float64) @ (y * alpha)


def gap(K, y, alpha, C):
    """How far the conditions of an optimum are from holding, in float64."""
    f = np.empty(len(y))
    smo.refresh(K.astype(np.float64), y, alpha, f)
    up, low = np.where(y > 0, alpha < C, alpha > 0), np.where(y > 0, alpha > 0, alpha < C)
    return f[low].max() - f[up].min()


@pytest.mark.parametrize("C", [0.3, 10.0, 1e4])
def test_the_reference_reaches_the_optimum_of_libsvm(C):
    K, y = overlapping(120)
    alpha, f = np.zeros(120), -y
    steps, left = smo.smo(K.astype(np.float64), y, C, TOLERANCE, alpha, f, 10**6)
    svc = SVC(kernel="precomputed", C=C, tol=TOLERANCE).fit(K.astype(np.float64), y)
    theirs = np.zeros(120)
    theirs[svc.support_] = np.abs(svc.dual_coef_[0])
    assert left < TOLERANCE
    assert gap(K, y, alpha, C) < TOLERANCE * (1 + 1e-6)
    assert abs((y * alpha).sum()) < 1e-9 * alpha.sum()
    # Both stop within the tolerance of the optimum: Σα·tolerance/2 is what an objective can lack then (each α moves by at most the box).
    assert objective(K, y, alpha) == pytest.approx(objective(K, y, theirs), rel=1e-4)
    assert 0.5 < steps / svc.n_iter_[0] < 2


def arrays_of(device, matrices, pairs):
    """K and descriptions on the device, α = 0, f = −y."""
    offsets, segments, stride = smo.described(pairs)
    high = np.zeros((len(pairs), stride), np.float32)
    for row, pair in zip(high, pairs, strict=True):
        row[: pair.places] = -pair.signs()
    host = (matrices.reshape(-1), offsets, segments, np.zeros(high.size), high.reshape(-1), np.zeros(high.size, np.float32))
    made = []
    for values in (*host, np.zeros(len(pairs), np.int32), np.zeros(len(pairs), np.float32)):
        made.append(device.empty(values.size, str(values.dtype)))
        device.upload(made[-1], values)
    return tuple(made), stride


def padded(K, count_a, room):
    """K with rows and columns `room` between the classes and behind them, where values are not kernel values."""
    m, pitch = len(K), len(K) + 2 * room
    rows = np.r_[np.arange(count_a), np.arange(count_a, m) + room]
    whole = np.full((pitch, pitch), np.nan, np.float32)
    whole[np.ix_(rows, rows)] = K
    whole[~np.isin(np.arange(pitch), rows)] = 7
    whole[:, ~np.isin(np.arange(pitch), rows)] = 7
    return whole


def solved_on(device, K, y, C, sizes, budget, block=None):
    """α of the only pair, from launches of `budget` steps each with f made anew between them; steps of the first launch."""
    a, b = sizes
    room = -a % 4
    whole = padded(K, a, room)
    whole = np.pad(whole, (0, -len(whole) % 4))
    pair = Pair(0, a, a + room, b, whole.shape[1])
    arrays, stride = arrays_of(device, whole, [pair])
    first = None
    for _ in range(40):
        smo.launch_smo(arrays, 1, stride, C, TOLERANCE, budget, block).run(device.stream)
        steps, left = int(device.download(arrays[6])[0]), float(device.download(arrays[7])[0])
        first = first or (steps, device.download(arrays[4])[:stride].astype(float) - device.download(arrays[5])[:stride])
        if left < TOLERANCE:
            break
        smo.launch_refresh(arrays[:6], 1, stride).run(device.stream)
    return device.download(arrays[3])[:stride][pair.order() >= 0], first, pair


@pytest.mark.parametrize(("C", "block"), [(1.0, (32, 2)), (10.0, (64, 1))])
def test_the_kernel_takes_the_steps_of_the_reference(device, C, block):
    K, y = overlapping(22, seed=7)
    sizes = int((y > 0).sum()), int((y < 0).sum())
    alpha, f = np.zeros(22), -y
    steps, _ = smo.smo(K.astype(np.float64), y, C, TOLERANCE, alpha, f, 12)
    got, (taken, high), pair = solved_on(device, K, y, C, sizes, 12, block)
    assert taken == min(steps, 12)
    # f is a float32 and what it lost, so a step adds what its own product rounds: ε·C, twice (of the difference, of the product).
    np.testing.assert_allclose(high[pair.order() >= 0], f, atol=12 * 2 * EPS * C, rtol=0)
    assert gap(K, y, got, C) < TOLERANCE * (1 + 1e-3)
    assert abs((y * got).sum()) < 1e-9 * got.sum()
    steps, _ = smo.smo(K.astype(np.float64), y, C, TOLERANCE, alpha, f, 10**6)
    assert objective(K, y, got) == pytest.approx(objective(K, y, alpha), rel=1e-4)


def test_f_made_anew_is_its_definition(device):
    K, y = overlapping(30)
    pair = Pair(0, 12, 12, 18, 32)
    arrays, stride = arrays_of(device, np.pad(K, ((0, 2), (0, 2))), [pair])
    alpha = np.random.default_rng(0).random(stride) * 1e3
    device.upload(arrays[3], alpha)
    smo.launch_refresh(arrays[:6], 1, stride).run(device.stream)
    expected = np.empty(30)
    smo.refresh(K.astype(np.float64), y, alpha[pair.order() >= 0], expected)
    found = (device.download(arrays[4]).astype(float) - device.download(arrays[5]))[pair.order() >= 0]
    # Two float32 hold 48 bits: ε² of f, which is at most Σα.
    np.testing.assert_allclose(found, expected, atol=EPS**2 * alpha.sum() * 4, rtol=0)


@pytest.mark.parametrize("sizes", [(2000, 3000), (4, 5), (5000, 5000), (9000, 9001)])
def test_a_gpu_solves_many_pairs_at_once(gpu, sizes):
    a, b = sizes
    K, y = overlapping(a + b)
    rows = np.r_[np.nonzero(y > 0)[0][:a], np.nonzero(y < 0)[0][:b]]
    y = np.r_[np.ones(min(a, int((y > 0).sum()))), -np.ones(min(b, int((y < 0).sum())))]
    K = K[np.ix_(rows, rows)]
    a, b = int((y > 0).sum()), int((y < 0).sum())
    alpha, _, _ = solved_on(gpu, K, y, 10.0, (a, b), 100_000)
    assert gap(K, y, alpha, 10.0) < TOLERANCE * 1.01


def test_a_kernel_value_that_is_no_number_ends_the_pair(device):
    K, _ = overlapping(8)
    K = np.full_like(K, np.nan)
    arrays, stride = arrays_of(device, K[:8], [Pair(0, 3, 4, 4, 8)])
    smo.launch_smo(arrays, 1, stride, 1.0, TOLERANCE, 50, (32, 1)).run(device.stream)
    assert device.download(arrays[6])[0] <= 2
    assert not device.download(arrays[7])[0] < TOLERANCE


@pytest.mark.parametrize(("places", "block"), [(10_048, (256, 10)), (2000, (512, 1)), (40, (32, 1)), (40_000, (1024, 10))])
def test_a_block_has_room_for_its_pair(places, block):
    assert smo.block_of(places) == block
    assert 4 * block[0] * block[1] >= places


@pytest.mark.full
@on_every_arch
def test_the_kernels_compile_without_spills(arch):
    some = [np.zeros(8, kind) for kind in (np.float32, np.int64, np.int32, np.float64, np.float32, np.float32, np.int32, np.float32)]
    assert_lean(smo.launch_smo(tuple(some), 45, 10_048, 10.0, 1e-3, 100), arch, 255)
    assert_lean(smo.launch_refresh(tuple(some[:6]), 45, 10_048), arch)
