"""Tests of the classifier's file: the whole machine, with or without its vectors; images; what is damaged or gone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripts import exits, extract

from nbcnn import datasets
from nbcnn.classify import classifier, pipeline
from nbcnn.classify.classifier import ClassifierError
from nbcnn.classify.feature_writer import FeatureWriter, publish
from nbcnn.classify.features import Origin, read_features
from nbcnn.cli.classify import main
from nbcnn.train import checkpoint

ORIGIN = Origin("runs/x", "checkpoint-last.safetensors", "ab" * 32, "noise", "made", ("a", "b", "c"), (1, 2, 2), (4,), "cpu", None)
CLASSES = np.arange(3).repeat(20).astype(np.int32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Features of three classes and the outcome of classifying them."""
    folder, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    train, test = (rng.standard_normal((60, 4)).astype(np.float32) + CLASSES[:, None] + 5 for _ in range(2))
    with (
        FeatureWriter(folder, "train", 60, 4, labels=CLASSES) as a,
        FeatureWriter(folder, "test", 60, 4, labels=CLASSES) as b,
    ):
        a.write(0, train)
        b.write(0, test)
        sha = publish(folder, ORIGIN, a, b)
    done = pipeline.classify(lambda: (train, test), CLASSES, settings=pipeline.Settings(), scratch=folder, jobs=1)
    return folder, sha, train, test, done


@pytest.mark.parametrize("portable", [True, False])
def test_a_loaded_classifier_decides_as_the_trained_one(trained, tmp_path, portable):
    folder, sha, train, test, done = trained
    path = tmp_path / classifier.NAME
    classifier.save(path, done, ORIGIN, folder, sha, train if portable else None)
    found = classifier.load(path)
    # Sums of at most 60 kernel values, each right to a few ε, times coefficients of at most C.
    bound = 60 * 10 * 8 * np.finfo(np.float32).eps
    np.testing.assert_allclose(found.decisions(test), done.test_decisions, atol=bound, rtol=0)
    np.testing.assert_array_equal(found.predict(test), done.test_predicted)
    np.testing.assert_array_equal(found.predict(test.astype(np.float64)), done.test_predicted)
    assert (found.gamma, found.C, found.origin, found.features_sha256) == (done.gamma, 10.0, ORIGIN, sha)
    assert found.predict(np.empty((0, 4))).shape == (0,)


def test_features_of_another_width_or_not_finite_are_refused(trained, tmp_path):
    folder, sha, train, test, done = trained
    classifier.save(tmp_path / "c", done, ORIGIN, folder, sha, train)
    found, bad = classifier.load(tmp_path / "c"), test.copy()
    bad[3, 2] = np.nan
    with pytest.raises(ValueError, match="feature 2 of sample 3 is nan"):
        found.predict(bad)
    with pytest.raises(ValueError, match=r"takes \(n, 4\) features"):
        found.predict(test[:, :3])
    with pytest.raises(ValueError, match="uint8 images"):
        found.features_of(None, np.zeros((1, 1, 2, 2)))


def test_what_is_damaged_or_gone_is_named(trained, tmp_path):
    folder, sha, _, _, done = trained
    path = tmp_path / "c"
    with pytest.raises(ClassifierError, match=r"there is no file [^ ]*c: python -m nbcnn classify FEATURES writes a classifier") as raised:
        classifier.load(path)
    assert raised.value.exit_code == 3
    classifier.save(path, done, ORIGIN, folder, sha)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    (tmp_path / "flipped").write_bytes(content)
    (tmp_path / "short").write_bytes(content[: len(content) // 2])
    for name in ("flipped", "short"):
        with pytest.raises(ClassifierError, match=name):
            classifier.load(tmp_path / name)
    checkpoint.save(tmp_path / "other", {"x": np.zeros(3)}, {})
    with pytest.raises(ClassifierError, match="no classifier"):
        classifier.load(tmp_path / "other")
    tensors, notes = checkpoint.load(path)
    for change, words in (
        ({"version": "9"}, "version .9"),
        ({"gamma": "none"}, "damaged"),
        ({"samples": "3"}, "do not belong together"),
        ({"features": str(tmp_path / "nowhere")}, "--portable"),
        ({"features_sha256": "cd" * 32}, "other features"),
    ):
        checkpoint.save(tmp_path / "changed", tensors, notes | change)
        with pytest.raises(ClassifierError, match=words):
            classifier.load(tmp_path / "changed")
    checkpoint.save(tmp_path / "less", {name: array for name, array in tensors.items() if name != "dual"}, notes)
    with pytest.raises(ClassifierError, match="dual"):
        classifier.load(tmp_path / "less")


def test_images_go_through_the_encoder_of_the_run(copied, tmp_path):
    """A run's features are classified by the command; the file then classifies its images."""
    out = tmp_path / "features"
    assert exits(extract, [copied, "--mode", "cpu", "--out", out, "--limit", "12", "--quiet"]) == 0
    index = json.loads((out / "features.json").read_text())
    data = datasets.load(index["origin"]["dataset"], limit=12)
    code = main([str(out), "--device", "cpu", "--jobs", "1", "--quiet", "--json", "--portable"])
    assert code == 0
    found = classifier.load(out / "classify" / classifier.NAME)
    features = read_features(out)
    images = data.test_images
    np.testing.assert_array_equal(found.predict_images(images, mode="cpu"), found.predict(features.test))
    (copied / "checkpoint-last.safetensors").write_bytes(b"gone")
    with pytest.raises(ClassifierError, match="encoder"):
        found.predict_images(images, mode="cpu")
