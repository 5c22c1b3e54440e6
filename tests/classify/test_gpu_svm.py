"""Tests of the machine that is trained on a GPU: its parts beside the CPU path and scikit-learn, small in the simulator, at size on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.svm import SVC

from nbcnn.classify import gpu as device_svm
from nbcnn.classify import pipeline
from nbcnn.classify.pipeline import Settings
from nbcnn.gpu import device as gpu_device

TOLERANCE = 1e-3


def overlapping(count, width, classes, separation, seed=5):
    rng = np.random.default_rng(seed)
    labels = rng.choice(classes, count, p=np.arange(6, 6 + classes) / np.arange(6, 6 + classes).sum()).astype(np.int32)
    latent = rng.standard_normal((classes, 40))[labels] * separation + rng.standard_normal((count, 40))
    return np.maximum(latent @ rng.standard_normal((40, width)), 0).astype(np.float32), labels


def both(device, tmp_path, train, labels, test, **settings):
    options = Settings(**settings)
    host = pipeline.classify(lambda: (train, test), labels, settings=options, scratch=tmp_path, jobs=1)
    return host, device_svm.classify(lambda: (train, test), labels, settings=options, device=device)


def compare(host, found, same=0.999):
    for one, other in zip(host.machine.machines, found.machine.machines, strict=True):
        assert other.gap < TOLERANCE
        assert abs(one.intercept - other.intercept) < 3 * TOLERANCE
    for one, other in ((host.test_predicted, found.test_predicted), (host.train_predicted, found.train_predicted)):
        assert (one == other).mean() >= same
    # Both are within the tolerance of the optimum, so a decision is within twice of it; three for their ends of the intercept.
    assert np.abs(host.test_decisions - found.test_decisions).max() < 3 * TOLERANCE


@pytest.mark.full  # a minute in the simulator
@pytest.mark.skipif(not gpu_device.SIMULATOR, reason="the small case is the simulator's; a GPU has the large ones")
@pytest.mark.parametrize("fits", [True, False])
def test_a_small_machine(device, tmp_path, monkeypatch, fits):
    features, labels = overlapping(24, 6, 2, 0.5)
    if not fits:
        monkeypatch.setattr(device_svm.Machine, "_free", lambda self: 4 * (64**2 - 1) if not hasattr(self, "matrix") or self.matrix is None else 0)
        monkeypatch.setattr(device_svm, "ALIGNED", 8)
    host, found = both(device, tmp_path, features[:18], labels[:18], features[18:])
    compare(host, found)
    assert found.gamma == pytest.approx(host.gamma, rel=1e-6)


@pytest.mark.parametrize(("scale", "C"), [(True, 10.0), (False, 1.0)])
def test_a_gpu_predicts_what_the_cpu_does(gpu, tmp_path, scale, C):
    features, labels = overlapping(3000, 300, 10, 0.25)
    host, found = both(gpu, tmp_path, features[:2400], labels[:2400], features[2400:], scale=scale, C=C)
    compare(host, found)
    direct = SVC(C=C, gamma=host.gamma).fit(host.scaler.applied(features[:2400]), labels[:2400])
    assert (direct.predict(host.scaler.applied(features[2400:])) == found.test_predicted).mean() >= 0.999


def test_a_matrix_that_does_not_fit_is_made_by_pairs(gpu, tmp_path, monkeypatch):
    features, labels = overlapping(1500, 100, 5, 0.3)
    whole = device_svm.classify(lambda: (features[:1200], features[1200:]), labels[:1200], settings=Settings(), device=gpu)
    monkeypatch.setattr(device_svm.Machine, "_free", lambda self: 4 * 900**2)
    parts = device_svm.classify(lambda: (features[:1200], features[1200:]), labels[:1200], settings=Settings(), device=gpu)
    assert "does not fit" in parts.notes[0]
    compare(whole, parts)


def test_a_pair_that_does_not_fit_says_so(gpu, monkeypatch):
    features, labels = overlapping(300, 100, 2, 0.3)
    monkeypatch.setattr(device_svm.Machine, "_free", lambda self: 4 * 100**2)
    with pytest.raises(MemoryError, match="--limit takes fewer"):
        device_svm.classify(lambda: (features, features), labels, settings=Settings(), device=gpu)
