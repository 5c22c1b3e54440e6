"""Tests of the support vector machine: equal to one SVC on all classes, in pieces that are each equal to their definition."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from worker_tasks import die, double, fail, sleep

from nbcnn.check import static
from nbcnn.classify import gram, ovo, pipeline, report, workers
from nbcnn.classify.blocks import Blocks
from nbcnn.classify.kernel import Samples
from nbcnn.classify.scale import gamma_scale, squared_norms, standard
from nbcnn.files.atomic import DiskFull
from nbcnn.gpu import device as cuda
from nbcnn.ops.products import rbf
from nbcnn.train.interrupt import Unwinding

EPS = float(np.finfo(np.float32).eps)
TRAIN = 1250
# libsvm stops when the optimality conditions hold to this; kernels that differ in the last bit of float32 end anywhere within.
LIBSVM_TOLERANCE = 1e-3

without_kernels = pytest.mark.skipif(cuda.SIMULATOR, reason="runs no kernel: once is enough")


def digits():
    bunch = load_digits()
    return bunch.data.astype(np.float32), bunch.target.astype(np.int32)


def overlapping(separation):
    """2,000 samples of ten classes of unequal size that overlap, 128 non-negative features: like a code after ReLU."""
    rng = np.random.default_rng(5)
    labels = rng.choice(10, 2000, p=np.arange(6, 16) / 105).astype(np.int32)
    latent = rng.standard_normal((10, 40))[labels] * separation + rng.standard_normal((2000, 40))
    return np.maximum(latent @ rng.standard_normal((40, 128)), 0).astype(np.float32), labels


SETS = {"digits": digits, "hard": lambda: overlapping(0.25), "easy": lambda: overlapping(0.6)}


def classify(features, labels, folder, **options):
    jobs = options.pop("jobs", None)
    return pipeline.classify(
        lambda: (features[:TRAIN], features[TRAIN:]),
        labels[:TRAIN],
        settings=pipeline.Settings(**options),
        scratch=folder,
        jobs=jobs,
    )


@without_kernels
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("name", SETS)
def test_predictions_equal_those_of_one_svc(tmp_path, name, scale):
    features, labels = SETS[name]()
    outcome = classify(features, labels, tmp_path, scale=scale)
    train, test = features[:TRAIN], features[TRAIN:]
    if scale:
        scaler = StandardScaler().fit(train)
        train, test = scaler.transform(train), scaler.transform(test)
    direct = SVC(kernel="rbf", C=10, gamma="scale", decision_function_shape="ovo").fit(train, labels[:TRAIN])
    np.testing.assert_array_equal(outcome.test_predicted, direct.predict(test))
    np.testing.assert_array_equal(outcome.train_predicted, direct.predict(train))
    np.testing.assert_allclose(outcome.test_decisions, direct.decision_function(test), atol=LIBSVM_TOLERANCE, rtol=0)
    assert not list(tmp_path.iterdir())


def test_two_classes_equal_one_svc(tmp_path):
    features, labels = overlapping(0.1)
    labels = np.where(labels < 6, 3, 7).astype(np.int32)
    outcome = classify(features, labels, tmp_path, scale=False, gamma=0.003, C=2.0)
    direct = SVC(kernel="rbf", C=2, gamma=0.003).fit(features[:TRAIN], labels[:TRAIN])
    np.testing.assert_array_equal(outcome.test_predicted, direct.predict(features[TRAIN:]))
    # scikit-learn's sign is positive for the second of two classes, libsvm's for the first.
    np.testing.assert_allclose(-outcome.test_decisions[:, 0], direct.decision_function(features[TRAIN:]), atol=LIBSVM_TOLERANCE, rtol=0)


def test_one_class_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least two classes"):
        classify(np.ones((TRAIN + 1, 2), np.float32), np.zeros(TRAIN + 1, np.int32), tmp_path)


@without_kernels
def test_processes_change_nothing(tmp_path):
    features, labels = overlapping(0.25)
    alone, together = (classify(features, labels, tmp_path, jobs=jobs) for jobs in (1, 2))
    np.testing.assert_array_equal(alone.test_decisions, together.test_decisions)
    assert together.jobs == 2


def test_ties_go_to_the_class_that_comes_first():
    machine = ovo.Machine(np.array([2, 5, 9]), [], ovo.all_pairs(3), [])
    # Pairs (0, 1), (0, 2), (1, 2): a cycle, a clear winner, and a decision value of 0, which counts for the second class.
    decisions = np.array([[1, -1, 1], [-1, 1, 1], [0, 1, -1]], float)
    np.testing.assert_array_equal(machine.vote(decisions), [2, 5, 2])


def test_scaler_equals_standard_scaler(rng):
    features = (rng.standard_normal((5000, 700)) * 10.0 ** rng.integers(-3, 3, 700) + rng.standard_normal(700) * 100).astype(np.float32)
    features[:, 3] = 0.1
    features[:, 4] = 0
    ours, theirs = standard(features), StandardScaler().fit(features)
    assert ours.scale[3] == ours.scale[4] == 1
    # Both are float64 sums of 5,000 terms, rounded to float32 at the end: they may fall on two neighbours.
    np.testing.assert_allclose(ours.mean, theirs.mean_, rtol=EPS)
    np.testing.assert_allclose(ours.scale, theirs.scale_, rtol=EPS)
    scaled = features.copy()
    ours.apply(scaled)
    expected = (features.astype(np.float64) - ours.mean) / ours.scale
    # One rounding of the difference and one of the quotient.
    np.testing.assert_allclose(scaled, expected, rtol=2 * EPS, atol=0)


def test_gamma_is_that_of_svc(rng):
    rows = [rng.standard_normal((n, 30)).astype(np.float32) * 3 + 1 for n in (40, 1, 25)]
    direct = SVC().fit(np.concatenate(rows), [0] * 40 + [1] * 26)
    assert gamma_scale(rows, [squared_norms(part) for part in rows]) == pytest.approx(direct._gamma, rel=1e-12)
    assert gamma_scale([np.ones((3, 4), np.float32)], [np.full(3, 4.0)]) == 1.0


def rbf_error_bound(a, b, gamma):
    """What float32 may make of exp(-gamma d²): d² is a difference of sums as large as |a|² + |b|² + 2|a·b|."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    terms = (a**2).sum(1)[:, None] + (b**2).sum(1) + 2 * np.abs(a @ b.T)
    # Roundings: of the norms, the dot product (√F at random), two sums, the product with gamma, and exp itself.
    return EPS * (2 + gamma * terms * (4 + np.sqrt(a.shape[1])))


def kernel_by_definition(a, b, gamma):
    difference = a.astype(np.float64)[:, None] - b.astype(np.float64)
    return np.exp(-gamma * (difference**2).sum(-1))


def test_rbf_follows_its_definition(rng):
    a, b, gamma = rng.standard_normal((70, 12)), rng.standard_normal((33, 12)), 0.07
    k = a @ b.T
    rbf.rbf((a**2).sum(1), (b**2).sum(1), k, gamma=gamma)
    np.testing.assert_allclose(k, kernel_by_definition(a, b, gamma), rtol=1e-13)


def test_rbf_of_equal_samples_is_at_most_one():
    k = np.array([[1.0000001]], np.float32)
    rbf.rbf(np.ones(1, np.float32), np.ones(1, np.float32), k, gamma=5.0)
    assert k[0, 0] == 1


@pytest.mark.parametrize(("M", "N"), [(1, 1), (5, 7), (3, 130)])
def test_rbf_kernel_equals_its_reference(device, rng, M, N):
    row_norms, col_norms = rng.random(M, np.float32) * 9, rng.random(N, np.float32) * 9
    dots = ((row_norms[:, None] + col_norms) / 2 * rng.random((M, N))).astype(np.float32)
    arrays = []
    for values in (row_norms, col_norms, dots):
        arrays.append(device.empty(values.size, "float32"))
        device.upload(arrays[-1], values)
    rbf.launch_rbf(*arrays, M, N, 0.3).run(device.stream)
    expected = dots.astype(np.float64)
    rbf.rbf(row_norms, col_norms, expected, gamma=0.3)
    terms = row_norms[:, None] + col_norms + 2 * np.abs(dots)
    error = np.abs(device.download(arrays[2]).reshape(M, N) - expected)
    assert (error <= EPS * (2 + 4 * 0.3 * terms)).all()


@pytest.mark.skipif(cuda.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("arch", ["75", "90a"])
def test_rbf_kernel_compiles_without_spills(arch):
    flat = np.zeros(4, np.float32)
    compiled = static.compile_launch(rbf.launch_rbf(flat, flat, flat, 2, 2, 0.5), arch)
    assert compiled.frame_bytes == 0
    assert compiled.registers <= 32


def filled(folder, sizes, tests, width):
    """Every block of a small kernel matrix, and what it must be."""
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((n, width), dtype=np.float32) for n in (*sizes, tests)]
    gamma = 1 / width
    values = []
    with Blocks(sizes, tests, folder) as blocks:
        gram.fill(blocks, [Samples.of(part) for part in rows], gamma, lambda done: values.append(done))
        assert sum(values) * 4 == blocks.nbytes
        for j in range(len(sizes)):
            for i in (*range(j + 1), len(sizes)):
                k = np.empty((blocks.rows(i), sizes[j]), np.float32)
                blocks.read(i, j, 0, k)
                yield k, kernel_by_definition(rows[i], rows[j], gamma), rbf_error_bound(rows[i], rows[j], gamma)


@pytest.mark.parametrize("panel", [1, 40, 1 << 25])
def test_blocks_from_blas_follow_the_definition(tmp_path, monkeypatch, panel):
    monkeypatch.setattr(gram, "PANEL_VALUES", panel)
    for got, expected, bound in filled(tmp_path, (9, 1, 14), 6, 20):
        assert (np.abs(got - expected) <= bound).all()


def test_the_matrix_needs_room(tmp_path):
    with pytest.raises(DiskFull, match=r"needs 6,000,\d{3},\d{3},\d{3} bytes"):
        Blocks((1_000_000,), 500_000, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_under_the_matrix_is_an_error(disk):
    folder = disk("size=1m")
    with Blocks((400,), 0, folder) as blocks:
        (folder / "another").write_bytes(bytes(600_000))
        with pytest.raises(DiskFull, match="needs 640,000 bytes"):
            blocks.write(0, 0, 0, np.zeros((400, 400), np.float32))
    assert [path.name for path in folder.iterdir()] == ["another"]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@without_kernels
@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_is_done_once(jobs):
    assert sorted(workers.parallel(double, 3, [5, 6, 7], jobs)) == [(0, 15), (1, 18), (2, 21)]


@without_kernels
def test_what_a_worker_raises_is_raised():
    with pytest.raises(DiskFull, match="no room for one"):
        list(workers.parallel(fail, None, [1, 2], 2))


@without_kernels
def test_a_signal_while_a_worker_starts_waits_until_it_is_known(tmp_path, monkeypatch):
    started, start = [], multiprocessing.process.BaseProcess.start

    def interrupted(worker):
        start(worker)
        started.append(worker)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", interrupted)
    with pytest.raises(SystemExit), Unwinding():
        list(workers.parallel(sleep, str(tmp_path), [60] * 2, 2))
    assert [worker.exitcode for worker in started] == [-signal.SIGKILL]


def test_a_killed_worker_is_out_of_memory():
    with pytest.raises(MemoryError, match="--jobs 1"):
        list(workers.parallel(die, None, [1, 2], 2))


@without_kernels
def test_leaving_early_ends_the_workers(tmp_path):
    solved = workers.parallel(sleep, tmp_path, [0, 1000], 2)
    next(solved)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    solved.close()
    assert all(gone(int(path.name)) for path in tmp_path.iterdir())


def test_jobs_are_bounded_by_memory(monkeypatch):
    monkeypatch.setattr(workers.memory, "available", lambda: 5 << 30)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.setattr(workers, "resident", lambda: 1 << 29)
    assert workers.affordable(1 << 30) == 5
    assert workers.affordable(100 << 30) == 1
    monkeypatch.setattr(workers.memory, "available", lambda: 500 << 30)
    assert workers.affordable(1 << 30) == 7
    assert workers.affordable(1 << 20) == 16


def test_a_full_size_pair_stays_in_its_budget():
    # 10,000 samples: 800 MB of float64 and the cache. Two of them and the parent are well under 8 GiB.
    assert 1e9 < ovo.worker_bytes(10_000) < 1.3e9


def test_scores_count_what_was_predicted(tmp_path):
    features, labels = digits()
    outcome = classify(features, labels, tmp_path)
    scores = report.score(outcome, labels[:TRAIN], labels[TRAIN:], 11)
    right = outcome.test_predicted == labels[TRAIN:]
    assert scores.test == pytest.approx(right.mean())
    assert scores.confusion.sum() == len(right)
    assert scores.confusion.trace() == right.sum()
    assert scores.per_class[3] == pytest.approx(right[labels[TRAIN:] == 3].mean())
    assert np.isnan(scores.per_class[10])
    assert report.summary(outcome, scores)["per_class_accuracy"][10] is None


def test_workers_load_neither_numba_nor_matplotlib():
    code = "import sys, nbcnn.classify.workers, nbcnn.classify.ovo; sys.exit(any(name in sys.modules for name in ('numba', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
