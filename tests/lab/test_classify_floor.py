"""Tests of what sets classification on a CPU beside its floor."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nbcnn.classify.feature_writer import FeatureWriter, publish
from nbcnn.classify.features import Origin
from nbcnn.lab.measure import classify_floor


def test_flops_are_those_of_the_blocks():
    """Classes of 30, 20 and 10 samples, 5 test samples, 7 features: blocks of two classes whole, of one class half, then one product per pair."""
    sizes, test = [30, 20, 10], 5
    whole = 30 * 20 + 30 * 10 + 20 * 10 + test * 60
    half = (900 + 400 + 100) // 2
    decisions = 2 * (60 + test) * 60 * 2
    assert classify_floor.flops(sizes, test, 7) == 2 * 7 * (whole + half) + decisions
    # Mirrored: four products of two classes; of one class two halves and the product of images with mirrored ones, whose transpose is the fourth.
    assert classify_floor.flops(sizes, test, 7, mirrored=True) == 2 * 7 * (4 * whole + 4 * half) + decisions


@pytest.mark.full  # the command in a process of its own
def test_a_row_has_the_command_and_its_floor(tmp_path, rng, capsys):
    labels = np.arange(60, dtype=np.int32) % 3
    train, test = (rng.standard_normal((len(each), 40)).astype(np.float32) + each[:, None] for each in (labels, labels[:12]))
    origin = Origin("run", "c", "0" * 64, "digits", "here", ("a", "b", "c"), (1, 8, 8), (40,), "cpu", None)
    with (
        FeatureWriter(tmp_path, "train", 60, 40, labels=labels) as a,
        FeatureWriter(tmp_path, "test", 12, 40, labels=labels[:12]) as b,
    ):
        a.write(0, train)
        b.write(0, test)
        publish(tmp_path, origin, a, b)
    assert classify_floor.main([str(tmp_path), "45"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["training"], row["test"], row["features"]) == (45, 12, 40)
    assert row["whole_seconds"] > sum(row["stages"].values()) > 0
    assert row["ratio"] == pytest.approx(row["whole_seconds"] / (row["products_seconds"] + row["pairs_seconds"]), rel=0.5)
