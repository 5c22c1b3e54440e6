"""Tests of --recipe features, --init kmeans and the models that are dictionaries: from the command to features, predictions and files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripts import exits, extract, message, train

from nbcnn.__main__ import main
from nbcnn.classify.features import read_features
from nbcnn.cli import recipes, train_flags
from nbcnn.nn import models
from nbcnn.train import checkpoint

DATA = ["--dataset", "shapes", "--mode", "cpu", "--quiet"]


def flags(*argv):
    return recipes.fill(train_flags.parse(argv))


def test_recipes_have_their_names():
    plain, default = (vars(flags("--recipe", name)) | {"recipe": "", "given": []} for name in ("plain", "default"))
    assert plain == default
    chosen = flags("--recipe", "features")
    assert (chosen.init, chosen.whiten, chosen.noise, chosen.sparse) == ("kmeans", True, 1.0, 16)
    assert (chosen.batch, chosen.epochs, chosen.optimizer) == (256, 23, "adam")
    assert flags("--recipe", "features", "--sparse", "8").sparse == 8
    assert flags().sparse is None


@pytest.fixture(scope="module")
def features_run(tmp_path_factory):
    """A run of the recipe on a network that a CPU trains in a second."""
    out = tmp_path_factory.mktemp("features") / "run"
    words = ["--recipe", "features", "--model", "small-autoencoder", "--sparse", "2", "--limit", "24", "--batch", "8", "--epochs", "2"]
    assert exits(train, [*DATA, *words, "--out", out]) == 0
    return out


def test_the_recipe_trains_and_its_encoder_extracts(features_run, tmp_path, capsys):
    saved = checkpoint.read(features_run / checkpoint.LAST)
    assert saved.tensors["param.whiten1.fitted"] == [24]
    assert [layer["layer"] for layer in json.loads(saved.metadata["network"])["layers"]].count("KSparse") == 1
    assert json.loads((features_run / "config.json").read_text())["flags"]["init"] == "kmeans"
    assert (features_run / "reconstructions.png").exists()
    out = tmp_path / "f"
    assert exits(extract, [features_run, "--limit", "6", "--out", out, "--mode", "cpu", "--quiet"]) == 0
    assert read_features(out).origin.code_shape == (4, 8, 8)
    capsys.readouterr()


def test_predictions_are_in_colours(features_run, tmp_path, capsys):
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / "one.png")
    words = ["predict", features_run, tmp_path / "one.png", "--mode", "cpu", "--json", "--picture", tmp_path / "found.png", "--quiet"]
    assert exits(main, words) == 0
    (row,) = json.loads(capsys.readouterr().out)["images"]
    # Values of pixels lie in 0..1: an error of whitened values would be about 1.
    assert 0 < row["error"] < 0.5
    assert (tmp_path / "found.png").stat().st_size > 1000


@pytest.mark.full
@pytest.mark.parametrize("name", ["patches", "patches2"])
def test_a_dictionary_is_fitted_and_extracts(name, tmp_path, monkeypatch, capsys):
    small = {
        "patches": lambda c, h, w, classes=10: models.patches(h, w, atoms=12),
        "patches2": lambda c, h, w, classes=10: models.patches2(h, w, atoms=(6, 8), projected=4),
    }
    monkeypatch.setitem(models.MODELS, name, small[name])
    run, out = tmp_path / "run", tmp_path / "f"
    assert exits(train, [*DATA, "--model", name, "--limit", "20", "--out", run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["dataset"], told["precision"]) == ("shapes", "fp32")
    assert exits(extract, [run, "--limit", "6", "--out", out, "--mode", "cpu", "--quiet", "--checkpoint", "best"]) == 0
    features = read_features(out)
    assert features.origin.code_shape == ((12, 3, 3) if name == "patches" else (8, 3, 3))
    assert np.isfinite(features.train).all()
    assert features.train.std() > 0
    capsys.readouterr()
    assert "is complete: --model" in message(capsys, exits(train, ["--resume", run]), 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "patches", "--epochs", "3"], "--epochs is for networks that are trained; --model patches is fitted"),
        (["--model", "s4convd", "--whiten"], "--whiten is for images"),
        (["--mask", "1"], "--mask"),
        (["--sparse", "0"], "--sparse"),
    ],
)
def test_flags_that_do_not_fit_are_refused(words, said, capsys):
    assert said in message(capsys, exits(train, words), 2)
