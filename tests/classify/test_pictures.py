"""Tests of the pictures of what was learned: which filters, neighbours and points they show."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripts import exits, extract

from nbcnn.classify import pictures
from nbcnn.classify.processing import parse, prepared
from nbcnn.cli import classify as command
from nbcnn.datasets import Dataset
from nbcnn.gpu import device

pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="runs no kernel")
PNG = b"\x89PNG"


def test_first_filters_are_those_of_the_image():
    rng = np.random.default_rng(0)
    conv, atoms, patches = rng.standard_normal((4, 3, 3, 3)), rng.standard_normal((5, 12, 1, 1)), rng.standard_normal((12, 3, 2, 2))
    assert pictures.first_filters({"conv1.weight": conv}) is conv
    made = pictures.first_filters({"conv1.weight": atoms, "patches1.weight": patches})
    np.testing.assert_allclose(made[2, 1], sum(atoms[2, d, 0, 0] * patches[d, 1] for d in range(12)))
    assert pictures.first_filters({"linear1.weight": conv}) is None


def test_neighbours_are_the_nearest():
    rng = np.random.default_rng(1)
    rows, queries = rng.standard_normal((40, 6)), rng.standard_normal((3, 6))
    expected = np.argsort(((queries[:, None] - rows) ** 2).sum(2), 1)[:, :5]
    np.testing.assert_array_equal(pictures.neighbours(queries, rows, 5), expected)


def test_queries_are_of_all_classes_in_turn():
    labels = np.array([1, 1, 1, 0, 2, 0])
    assert pictures.spread(labels, 6, 4).tolist() == [3, 0, 4, 5]
    assert pictures.spread(None, 3, 4).tolist() == [0, 1, 2]
    assert pictures.spread(labels, 0, 4).tolist() == []


@pytest.mark.full
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_drawn(tmp_path, channels):
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (90, channels, 4, 4), np.uint8)
    labels = (np.arange(90) % 3).astype(np.int32)
    data = Dataset("noise", "made", images[:30], labels[:30], images[30:], labels[30:], ("a", "b", "c"))
    rows = images.reshape(90, -1).astype(np.float32)
    process, _ = prepared(parse("blur+l2", (channels, 4, 4)), [rows[:30]]) if channels == 3 else (None, None)
    weights = {"conv1.weight": rng.standard_normal((6, channels, 3, 3))}
    made = pictures.draw(tmp_path, weights, data, process, rows[:30], rows[30:], "noise", 60 if channels == 3 else 40)
    # A map takes more than 50 points.
    assert set(made) == {"filters", "neighbours", *(["map"] if channels == 3 else [])}
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(PNG) for name in made)
    assert pictures.draw(tmp_path / "none", {}, data, process, rows[:5], rows[30:40], "noise") == {}


def test_the_command_draws_and_the_report_shows(copied, tmp_path):
    out = tmp_path / "features"
    assert exits(extract, [copied, "--mode", "cpu", "--out", out, "--limit", "24", "--quiet"]) == 0
    assert command.main([str(out), "--device", "cpu", "--jobs", "1", "--quiet", "--json", "--machine", "ridge", "--pictures"]) == 0
    found = json.loads((out / "classify" / "classify.json").read_text())
    # 24 test images are too few for a map.
    assert set(found["pictures"]) == {"filters", "neighbours"}
    from nbcnn.lab.report.source import opened
    from nbcnn.lab.report.write import report

    text, _ = report(opened(copied, features=out))
    assert "What the encoder learned" in text
    assert "no label took part in finding them" in text
    (out / "classify" / "filters.png").unlink()
    missing = {each.what: each for each in report(opened(copied, features=out))[1]}
    assert missing["the picture filters.png"].command == f"python -m nbcnn classify {out} --pictures"
