"""Tests of kernel ridge: LAPACK beside the definition, the GPU's factor beside LAPACK, the command and its file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.kernel_ridge import KernelRidge

from nbcnn.classify import classifier, pipeline, ridge
from nbcnn.classify.pipeline import Settings
from nbcnn.gpu import device as gpu_device

EPS = float(np.finfo(np.float32).eps)


def samples(count, width=12, classes=3, seed=2):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    return (rng.standard_normal((count, width)) + rng.standard_normal((classes, width))[labels]).astype(np.float32), labels.astype(np.int32)


def kernel_of(x, gamma):
    x = x.astype(np.float64)
    return np.exp(-gamma * ((x[:, None] - x) ** 2).sum(-1))


def test_lapack_solves_what_scikit_learn_does():
    (x, labels), (t, _) = samples(90), samples(40, seed=3)
    found = ridge.classify(lambda: (x, t), labels, settings=Settings(scale=False))
    direct = KernelRidge(alpha=0.1, kernel="rbf", gamma=found.gamma).fit(x.astype(np.float64), ridge.targets(labels, np.arange(3)))
    # Refined once: β is right to ε times the condition number, at most (n + λ)/λ, and decisions to that of β.
    np.testing.assert_allclose(found.test_decisions, direct.predict(t.astype(np.float64)), atol=90 / 0.1 * 4 * EPS)
    np.testing.assert_array_equal(found.test_predicted, direct.predict(t.astype(np.float64)).argmax(1))
    assert (found.train_predicted == labels).mean() > 0.7


def test_a_matrix_that_is_not_positive_asks_for_a_larger_lambda():
    K = np.full((4, 4), 1, np.float32) - 3 * np.eye(4, dtype=np.float32)
    with pytest.raises(ridge.NotPositive, match="larger --lambda"):
        ridge.solve_host(K, np.ones((4, 1)), 0.1)


@pytest.mark.parametrize(("n", "block"), [(20, 8), (8, 8)])
def test_a_factor_in_blocks(device, n, block):
    x, _ = samples(n)
    K, Y = kernel_of(x, 0.05), ridge.targets(np.arange(n) % 3, np.arange(3))
    there = device.empty(n * n, "float32")
    device.upload(there, K.astype(np.float32))
    got = ridge.factorise(device, there, n, 0.1, block=block).solve(Y)
    expected = np.linalg.solve(K + 0.1 * np.eye(n), Y)
    assert np.abs(got - expected).max() <= 8 * EPS * n / 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("count", [1000, 3001])
def test_a_gpu_solves_what_lapack_does(gpu, count):
    (x, labels), (t, _) = samples(count, 200, 10), samples(500, 200, 10, seed=3)
    host, found = (ridge.classify(lambda: (x, t), labels, settings=Settings(), device=device) for device in (None, gpu))
    np.testing.assert_allclose(found.test_decisions, host.test_decisions, atol=count / 0.1 * 4 * EPS)
    assert (found.test_predicted == host.test_predicted).mean() >= 0.998


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="runs no kernel: once is enough")
def test_the_file_decides_as_the_machine(tmp_path):
    (x, labels), (t, _) = samples(60), samples(30, seed=3)
    found = ridge.classify(lambda: (x, t), labels, settings=Settings())
    from test_classifier_file import ORIGIN

    classifier.save(tmp_path / "c", found, ORIGIN, tmp_path, "ab" * 32, x)
    loaded = classifier.load(tmp_path / "c")
    np.testing.assert_allclose(loaded.decisions(t), found.test_decisions, atol=60 * 8 * EPS * np.abs(found.machine.beta).max())
    np.testing.assert_array_equal(loaded.predict(t), found.test_predicted)


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="runs no kernel: once is enough")
def test_the_command_and_what_does_not_go_together(tmp_path, capsys):
    from test_classify import ORIGIN, write

    from nbcnn.cli.classify import main

    (x, labels), (t, other) = samples(60), samples(30, seed=3)
    write(tmp_path, x, t, labels, other, ORIGIN)
    assert main([str(tmp_path), "--machine", "ridge", "--lambda", "0.2", "--device", "cpu", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["machine"], result["lambda"]) == ("ridge", 0.2)
    assert classifier.load(result["model"]).predict(t).shape == (30,)
    for words, says in ((["--machine", "ridge", "--search", "C"], "C is of --machine svm"), (["--search", "lambda"], "is of --machine ridge")):
        assert main([str(tmp_path), *words]) == 2
        assert says in capsys.readouterr().err
    assert main([str(tmp_path), "--machine", "ridge", "--search", "lambda,gamma", "--device", "cpu", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    # The given settings, two gammas, three lambdas; none of them by the test images, which are half as many.
    assert len(result["search"]) == 6
    best = max(result["search"], key=lambda each: each["accuracy"])
    assert (result["lambda"], result["classifiers"]["encoder"]["gamma"]) == (best["lambda"], pytest.approx(best["gamma"], rel=0.5))


def test_a_lambda_too_small_for_float32_is_passed_over_in_a_search():
    (x, labels), _ = samples(60), None

    def trial(load, labels, settings):
        if settings.ridge < 0.02:
            raise ridge.NotPositive("too small")
        return ridge.classify(load, labels, settings=settings)

    found, tried = pipeline.search((x,), labels, Settings(), ("lambda",), trial, "lambda")
    assert [each["lambda"] for each in tried] == [0.1, 0.01, 0.03, 0.3]
    assert tried[1]["accuracy"] == 0
    assert found.ridge != 0.01
