"""Tests of `study resnet`: its recipe is that of train.py, ours trains by it, and what it says. Its peer has tests/pytorch/test_twin.py."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scripts import exits

from nbcnn.__main__ import main
from nbcnn.cli.recipes import RECIPES
from nbcnn.lab.measure import results
from nbcnn.lab.studies import resnet


def test_the_recipe_is_that_of_train():
    recipe = resnet.recipe_of(RECIPES["resnet"], 50_000, 16)
    assert (recipe.batch, recipe.crop, recipe.flip, recipe.weight_decay, recipe.label_smoothing) == (512, 4, True, 5e-4, 0.1)
    assert len(recipe.rates) == 16 * 98  # the last batch has 336 images
    # The peak is the last step of the rise.
    assert max(recipe.rates) == recipe.rates[round(0.25 * len(recipe.rates)) - 1] == np.float32(0.4)
    assert recipe.rates[-1] < 1e-5


def test_summary_compares_means_of_the_seeds():
    def row(form, seed, accuracy, seconds):
        return {"form": form, "seed": seed, "epochs": 16, "accuracy": accuracy, "seconds": seconds, "ready_seconds": 1.0}

    rows = [row("nbcnn tensorcore bf16", 0, 0.94, 10.0), row("PyTorch graph", 0, 0.95, 20.0)]
    rows += [row("nbcnn tensorcore bf16", 1, 0.96, 12.0), row("PyTorch graph", 1, 0.945, 24.0)]
    head, own, other = resnet.summary(rows)
    assert head == "ResNet-18, 16 epochs, mean of 2 seeds"
    assert own.split()[-3:] == ["95.00%", "11.00", "s"]
    assert other.endswith("nbcnn: +0.25 points, 0.50 × the time")


@pytest.mark.full  # ten seconds of NumPy
def test_ours_trains_on_a_cpu(tmp_path, capsys):
    words = [
        "study",
        "resnet",
        "--dataset",
        "digits",
        "--mode",
        "cpu",
        "--filters",
        "1",
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--batch",
        "6",
        "--limit",
        "8",
    ]
    saving = ["--save", "--results", tmp_path / "results"]
    assert exits(main, [*words, "--limit", "8", "--out", tmp_path / "rows.json", *saving, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["form"], row["epochs"], row["data"]) == ("nbcnn cpu fp32", 1, "digits")
    assert math.isfinite(row["train_loss"])
    assert json.loads((tmp_path / "rows.json").read_text()) == [row]
    assert results.load(tmp_path / "results" / "cpu.json")["sections"]["resnet-cpu-fp32"]["rows"] == [row]
