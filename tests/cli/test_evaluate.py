"""nbcnn evaluate RUN DATA: its numbers are those of scikit-learn and of Model.evaluate; classes are compared by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from scripts import exits, message
from sklearn.metrics import jaccard_score, precision_recall_fscore_support

import nbcnn
from nbcnn import Conv2d, Flatten, Linear
from nbcnn.cli import evaluate
from nbcnn.train.pixels import by_class, class_lines, counts_of


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A classifier of digits in a file."""
    data = nbcnn.datasets.load("digits", limit=300)
    with nbcnn.Model([Flatten(), Linear(10)], "cross_entropy", mode="cpu") as model:
        model.fit(data, epochs=3, verbose=0)
        return model.save(tmp_path_factory.mktemp("saved") / "digits")


def test_the_numbers_are_those_of_scikit_learn_and_of_the_model(digits, capsys):
    assert exits(evaluate.main, [digits, "digits", "--mode", "cpu", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    data = nbcnn.datasets.load("digits")
    model = nbcnn.load(digits, mode="cpu")
    assert {name: found[name] for name in ("loss", "accuracy")} == model.evaluate(data)
    predicted = model.predict_classes(data.test_images)
    precision, recall, f1, _ = precision_recall_fscore_support(data.test_labels, predicted, zero_division=np.nan)
    for at, name in enumerate(data.classes):
        row = found["classes"][name]
        np.testing.assert_allclose([np.nan if value is None else value for value in row.values()], [precision[at], recall[at], f1[at]], rtol=1e-12)
    assert np.array(found["confusion"]).trace() == round(found["accuracy"] * 360)
    assert exits(evaluate.main, [digits, "digits", "--mode", "cpu", "--split", "train", "--limit", "50"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("digits, train, 50 images: loss ")
    assert "precision     recall         f1" in said.out
    assert "50 images of digits" in said.err


def test_classes_of_a_folder_are_compared_by_name_and_images_scaled(tmp_path, capsys):
    for name, value in (("dark", 20), ("light", 230)):
        (tmp_path / "set" / "test" / name).mkdir(parents=True)
        (tmp_path / "set" / "train" / name).mkdir(parents=True)
        for part in ("train", "test"):
            Image.new("RGB", (12, 12), (value,) * 3).save(tmp_path / "set" / part / name / "a.png")
    x = np.stack([np.full((3, 6, 6), value, np.uint8) for value in (230, 20)] * 4)
    with nbcnn.Model([Flatten(), Linear(2)], "cross_entropy", mode="cpu", classes=["light", "dark"]) as model:
        model.fit(x, [0, 1] * 4, epochs=30, optimizer=nbcnn.Adam(lr=0.05), verbose=0)
        file = model.save(tmp_path / "net")
    assert exits(evaluate.main, [file, f"folder:{tmp_path / 'set'}", "--mode", "cpu", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == 1.0, "the folder has dark first, the network light"
    assert "shapes has the class 'disc', which the network does not know" in message(
        capsys, 2, exits(evaluate.main, [file, "shapes", "--mode", "cpu", "--quiet"])
    )


def test_pixels_have_their_intersection_over_union(tmp_path, capsys):
    data = nbcnn.datasets.load("shapes", limit=6)
    with nbcnn.Model([Conv2d(11, 3, padding=1)], "cross_entropy", mode="cpu") as model:
        model.fit(data, epochs=2, verbose=0)
        file = model.save(tmp_path / "net")
        predicted = model.predict_classes(data.test_images)
    assert exits(evaluate.main, [file, "shapes", "--mode", "cpu", "--limit", "6", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    true, made = data.masks.test.reshape(-1), predicted.reshape(-1)
    wanted = jaccard_score(true, made, average=None, labels=range(11), zero_division=0)
    wanted[np.setdiff1d(np.arange(11), np.concatenate([true, made]))] = np.nan
    np.testing.assert_allclose([np.nan if each["iou"] is None else each["iou"] for each in found["classes"].values()], wanted, rtol=1e-12)
    assert found["iou"] == pytest.approx(np.nanmean(wanted))


def test_data_without_labels_is_refused(digits, capsys):
    assert "photos has no labels" in message(capsys, 2, exits(evaluate.main, [digits, "photos", "--mode", "cpu", "--quiet"]))


def test_a_class_that_is_not_there_has_no_number():
    counts = counts_of(np.array([0, 0, 1]), np.array([0, 1, 1]), 3, np.ones(3, bool))
    assert np.isnan(by_class(counts)["f1"][2])
    lines = class_lines(counts, ["a", "b", "never"])
    assert lines[3].split() == ["never", "-", "-", "-", "0"]
    assert lines[4].split() == ["mean", "75.00%", "75.00%", "66.67%", "3"]
