"""Tests of networks that make NaN or infinity of what is finite: predict, evaluate and extract say so, and end with 3."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scripts import exits, extract, message

import nbcnn
from nbcnn.classify import classifier
from nbcnn.cli import classify, evaluate, finite, predict
from nbcnn.train import checkpoint


@pytest.fixture(params=["weights of 1e38", "a negative variance"])
def broken(request, tmp_path):
    """The file of a classifier that a training does not make, and a folder with an image of each of its classes."""
    for name in ("first", "second"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for at in range(3):
            Image.new("RGB", (8, 8), (200, 100, 50 * at)).save(tmp_path / "images" / name / f"{at}.png")
    layers = [nbcnn.Conv2d(4, 3, padding=1), nbcnn.BatchNorm2d(), nbcnn.ReLU(), nbcnn.Flatten(), nbcnn.Linear(2)]
    with nbcnn.Model(layers, nbcnn.SoftmaxCrossEntropy(), mode="cpu") as model:
        model.build((3, 8, 8))
        weights = model.weights()
        for name, values in weights.items():
            if request.param.startswith("weights") and name.endswith("weight"):
                values[...] = 1e38
            elif not request.param.startswith("weights") and name.endswith("running_var"):
                values[...] = -1
        model.set_weights(weights)
        model.save(tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_what_is_not_finite_is_said(broken, command, capsys):
    images = broken.parent / "images"
    main, words = {"predict": (predict.main, [images / "first"]), "evaluate": (evaluate.main, [f"folder:{images}"])}[command]
    with np.errstate(all="ignore"):
        said = message(capsys, exits(main, [broken, *words, "--mode", "cpu"]), 3)
    assert "is not finite" in said


def test_of_fp16_its_largest_number_may_be_the_cause():
    outputs = np.array([1, np.inf])
    with pytest.raises(finite.NotFinite, match=r"beyond 65,504, the largest number of fp16: take --mode cudacore"):
        finite.finite(outputs, "a.png", finite.weights("fp16"))
    with pytest.raises(finite.NotFinite, match=r"a running variance is negative$"):
        finite.finite(outputs, "a.png", finite.weights("bf16"))


@pytest.mark.parametrize("files", [False, True])
def test_features_that_are_not_finite_are_not_written(copied, files, tmp_path, capsys):
    path = copied / checkpoint.LAST
    tensors, metadata = checkpoint.load(path)
    checkpoint.save(path, {name: values * (1e38 if name.endswith("weight") else 1) for name, values in tensors.items()}, metadata)
    Image.new("RGB", (32, 32), (200, 100, 50)).save(tmp_path / "a.png")
    out = tmp_path / "features"
    words = [copied, "--checkpoint", "last", "--out", out, "--mode", "cpu", "--quiet", *(["--images", tmp_path / "a.png"] if files else [])]
    with np.errstate(all="ignore"):
        said = message(capsys, exits(extract, words), 3)
    assert "is not finite" in said
    assert not list(out.rglob("*.npy"))


def test_a_classifier_that_is_not_finite_is_blamed_and_not_the_network(copied, tmp_path, capsys, monkeypatch):
    """Its features are finite: the message names the classifier's file."""
    assert exits(extract, [copied, "--mode", "cpu", "--out", tmp_path / "features", "--limit", "12", "--quiet"]) == 0
    assert exits(classify.main, [tmp_path / "features", "--device", "cpu", "--jobs", "1", "--quiet"]) == 0
    monkeypatch.setattr(classifier.Classifier, "decisions", lambda self, *features: np.full((len(features[0]), len(self.pairs)), np.nan))
    Image.new("RGB", (32, 32), (200, 100, 50)).save(tmp_path / "a.png")
    file = tmp_path / "features" / "classify" / classifier.NAME
    said = message(capsys, exits(predict.main, [copied, tmp_path / "a.png", "--classifier", file, "--mode", "cpu", "--quiet"]), 3)
    assert f"what the classifier {file} makes of" in said
    assert "weights" not in said
