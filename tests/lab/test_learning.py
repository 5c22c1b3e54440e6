"""Tests of the study of features: its draws, its rows, what it leaves out, its tables, and the section of the report."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import samples
from scripts import exits, message

from nbcnn import datasets
from nbcnn.cli import study_features
from nbcnn.gpu import device
from nbcnn.lab.measure import results, schema
from nbcnn.lab.report import learning, readme
from nbcnn.lab.report.source import opened
from nbcnn.lab.report.write import report
from nbcnn.lab.studies import features
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.resampling import MaxPool2d
from nbcnn.run.net import Net
from nbcnn.train import saved_net

pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="runs no kernel")
PIXELS = features.CASES[0]


@pytest.fixture
def plan(tmp_path):
    data = datasets.load("digits", limit=120)
    return features.Plan(data, (), tmp_path, machines=("ridge",), labels=(20,), searched=60, mode="cpu", say=lambda text: None)


def test_draws_have_as_many_of_each_class():
    labels = np.repeat([0, 1, 2], [50, 30, 3])
    made = features.drawn(labels, 15, 0)
    assert np.bincount(labels[made]).tolist() == [6, 6, 3]
    assert len(set(made.tolist())) == 15
    assert (features.drawn(labels, 15, 1) != made).any()
    assert len(features.drawn(labels, 1000, 0)) == 83


def test_rows_of_the_controls(plan):
    rows = list(features.study(plan, [PIXELS, replace(PIXELS, key="x", name="new", needs=("--recipe", "nothing"))]))
    schema.fits(rows, schema.KINDS["features"][1], "rows")
    assert [row.get("labels") for row in rows] == [120, 20, None]
    whole, few, skipped = rows
    assert whole["accuracy"] > few["accuracy"] > 0.3
    assert skipped == {"what": "skipped", "encoder": "new", "why": "this version has no --recipe nothing"}
    text = "\n".join(features.summary(rows))
    assert "raw pixels" in text
    assert "new: left out, this version has no --recipe nothing" in text


def test_a_case_is_repeated_for_every_seed_only_where_it_is_a_headline(plan):
    made = [row["seed"] for row in features.study(replace(plan, seeds=(0, 1), labels=()), [PIXELS, replace(PIXELS, headline=True)])]
    assert made == [0, 0, 1]


def test_the_rows_that_the_command_names_are_those_of_the_study(capsys):
    # A help breaks its lines at dashes, too.
    assert ",".join(case.key for case in features.CASES) in "".join(study_features.parser().format_help().split())
    assert "no row 'pixel'; did you mean pixels?" in message(capsys, 2, exits(study_features.main, ["--only", "pixel", "--mode", "cpu"]))
    assert "--labels takes whole numbers" in message(capsys, 2, exits(study_features.main, ["--labels", "many", "--mode", "cpu"]))


def test_an_untrained_encoder_keeps_what_was_fitted_before_training():
    class Prepares(Conv2d):
        prepares = True

    net = Net([Conv2d(2, 3, padding=1), ReLU(), MaxPool2d(2)], (1, 8, 8), mode="cpu", seed=3)
    before = net.params.as_dict()
    saved_net.forget(net, 4)
    after = net.params.as_dict()
    assert (after["conv1.weight"] != before["conv1.weight"]).any()
    np.testing.assert_array_equal(after["conv1.weight"], Net(net.layers, (1, 8, 8), mode="cpu", seed=4).params.read("conv1.weight"))
    kept = Net([Prepares(1, 3, padding=1), Conv2d(2, 3, padding=1)], (1, 8, 8), mode="cpu", seed=3)
    before = kept.params.as_dict()
    saved_net.forget(kept, 4)
    np.testing.assert_array_equal(kept.params.read("conv1.weight"), before["conv1.weight"])
    assert (kept.params.read("conv2.weight") != before["conv2.weight"]).any()


def test_tables_and_the_section_of_the_report(tmp_path, monkeypatch):
    path = samples.saved(tmp_path, {"features": samples.learned()})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    table = readme.rewritten("<!-- table features -->\n<!-- end -->")
    assert "| raw pixels | standardised | 8,192 | 55.00% | 57.00% | 9.0 s | 0.5 s |" in table
    assert "| features recipe | `blur+sqrt+cw1+l2` | 8,192 | 75.10% ± 0.10 (3) | 77.10% ± 0.10 (3) | 9.0 s | 0.5 s |" in table
    assert "patches2 is left out: this version has no --model patches2." in table
    few = readme.rewritten("<!-- table labels -->\n<!-- end -->")
    assert "| features of (ridge) | 100 labels | 50,000 labels |" in few
    assert "| features recipe | 37.10% ± 0.10 (3) | 77.10% ± 0.10 (3) |" in few
    text, missing = report(opened(path))
    assert "75.10% ± 0.10 (3)" in text
    assert "patches2 is left out" in text
    assert not [each for each in missing if "features" in each.what]


def test_tables_of_nothing_are_empty(tmp_path, monkeypatch):
    path = samples.saved(tmp_path, {"other": [{}]})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert {name: table() for name, table in learning.TABLES.items()} == {"features": "", "labels": ""}
    assert "python -m nbcnn study features --save" in {each.command for each in report(opened(path))[1]}


@pytest.mark.full  # trains
def test_the_command_trains_classifies_and_draws(tmp_path, capsys):
    words = ["--dataset", "digits", "--mode", "cpu", "--limit", "200", "--epochs", "1", "--labels", "50", "--search-images", "100", "--seeds", "2"]
    words += ["--only", "pixels,random,plain-processed", "--pictures", tmp_path / "drawn", "--save", "--results", tmp_path, "--json"]
    assert exits(study_features.main, words) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {(row["encoder"], row["classifier"], row["labels"]) for row in rows} == {
        (name, classifier, labels)
        for name in ("raw pixels", "random encoder", "default recipe, processed")
        for classifier in ("C-SVC", "ridge")
        for labels in (50, 200)
    }
    assert results.load(tmp_path / "cpu.json")["sections"]["features"]["rows"] == rows
    for key in ("random", "plain-processed"):
        assert {path.name for path in (tmp_path / "drawn" / key).iterdir()} == {"filters.png", "neighbours.png", "map.png"}
