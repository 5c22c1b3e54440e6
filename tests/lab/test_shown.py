"""Tests of the pictures of what a training makes: they are kept in the results, drawn from them, and say from which."""

from __future__ import annotations

import json

import numpy as np
import pytest
import samples
from PIL import Image
from scripts import exits, extract, train

from nbcnn import __main__
from nbcnn.lab.measure import results
from nbcnn.lab.report import readme, shown
from nbcnn.lab.report.stamp import digest, stamped
from nbcnn.lab.studies import shown as study


def test_images_are_kept_as_they_are():
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 4, 5), np.uint8)
    np.testing.assert_array_equal(study.unpacked(json.loads(json.dumps(study.packed(images)))), images)


def test_a_run_and_its_classifier_become_one_row(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    run, features = tmp_path / "run", tmp_path / "f"
    assert exits(train, ["--dataset", "shapes", "--mode", "cpu", "--limit", "40", "--epochs", "2", "--quiet", "--out", run]) == 0
    assert exits(extract, [run, "--mode", "cpu", "--out", features, "--quiet"]) == 0
    assert exits(__main__.main, ["classify", str(features), "--quiet"]) == 0
    monkeypatch.setattr("sys.argv", ["shown", str(run), "--features", str(features), "--data-dir", str(tmp_path), "--results", str(tmp_path)])
    assert study.main() == 0
    (row,) = results.load(tmp_path / "cpu.json")["sections"]["shown"]["rows"]
    assert (row["dataset"], row["epochs"], len(row["test_losses"]), row["training_images"]) == ("shapes", 2, 2, 40)
    assert row["samples"]["shape"][0] == study.SAMPLES * row["made"]["shape"][0] == study.SAMPLES * len(row["classes"])
    assert row["mistakes"]["shape"][0] == len(row["true"]) == len(row["said"]) == min(row["wrong"], study.MISTAKES)
    assert all(true != said for true, said in zip(row["true"], row["said"], strict=True))


def test_the_pictures_are_drawn_from_the_results_and_say_so(tmp_path, monkeypatch):
    samples.saved(tmp_path, {"shown": [samples.shown()]})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    shown.charts(tmp_path)
    for name in shown.PICTURES:
        assert stamped(tmp_path / name) == digest([samples.shown()])
        Image.open(tmp_path / name).verify()
    text = shown.table()
    assert text.startswith("autoencoder, 2 epochs of 8,000 images of cifar10, cudacore fp32: test MSE 0.01250.\n")
    assert all(f"../pictures/{name}" in text for name in (shown.CURVES, *shown.PICTURES))


def test_no_shown_picture_is_older_than_its_numbers(tmp_path):
    folder, found = readme.DOCS / "pictures", shown.kept()
    assert {path.name for path in folder.glob("*.png")} == (set(shown.PICTURES) if found else set())
    if found:
        assert {stamped(folder / name) for name in shown.PICTURES} == {digest([found[0]])}, "run `python -m nbcnn.lab.report.readme`"
        shown.charts(tmp_path)
        assert (tmp_path / shown.CURVES).read_text() == (folder / shown.CURVES).read_text(), "run `python -m nbcnn.lab.report.readme`"
