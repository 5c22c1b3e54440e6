"""Tests that what a training writes can be read again, and that what cannot is refused before it trains."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from scripts import ROOT, TINY, exits, extract, message, train

import nbcnn
from nbcnn.classify.features import read_features
from nbcnn.cli import export, pipeline, predict, report
from nbcnn.train import checkpoint
from nbcnn.train.runlog import RunFolder

STRANGE = os.fsdecode(b"caf\xe9")


def photographs(folder):
    folder.mkdir(parents=True)
    for number in range(6):
        Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)).save(folder / f"{number}.png")


def test_a_class_folder_that_is_not_utf8_is_refused_before_training(tmp_path, capsys):
    for name in (STRANGE, "dog"):
        photographs(tmp_path / "pets" / name)
    words = ["--dataset", f"folder:{tmp_path / 'pets'}", "--mode", "cpu", "--batch", "2", "--epochs", "1", "--quiet", "--out", tmp_path / "run"]
    text = message(capsys, 3, exits(train, words))
    assert "the name of a class has the text 'caf\\udce9'" in text
    assert "Rename the class" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--dataset", "--data-dir", "--weights", "--model"])
def test_a_path_that_is_not_utf8_and_would_be_written_down_is_refused(flag, tmp_path, capsys):
    value = {"--dataset": f"folder:{tmp_path / STRANGE}", "--model": f"{tmp_path / STRANGE}.py:f"}.get(flag, tmp_path / STRANGE)
    assert "is no UTF-8" in message(capsys, 2, exits(train, [*TINY, flag, value]))
    assert "is no UTF-8" in message(capsys, 2, exits(pipeline.main, [*TINY, flag, value]))


def test_a_run_in_a_folder_that_is_not_utf8_goes_on(tmp_path, capsys):
    run, file = tmp_path / STRANGE, tmp_path / f"{STRANGE}.toml"
    file.write_text("seed = 3\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"}
    for words in (["train", *TINY, "--quiet", "--config", file, "--out", run], ["train", "--quiet", "--resume", run]):
        finished = subprocess.run([sys.executable, "-m", "nbcnn", *words], env=environment, capture_output=True)
        assert finished.returncode == 0, finished.stderr
    assert RunFolder(run).read_config()["command"][-1].endswith("caf\\xe9")
    assert exits(report.main, [run, "--json"]) == 0, capsys.readouterr().err
    with nbcnn.load(run, mode="cpu") as model:
        assert model.predict(np.zeros((1, 3, 32, 32), np.uint8)).shape == (1, 3, 32, 32)
    text = message(capsys, 2, exits(extract, [run, "--out", tmp_path / "features"]))
    assert "is no UTF-8, as features.json is, which names the run for classify" in text
    photographs(tmp_path / f"{STRANGE}-photos")
    line = [run, tmp_path / f"{STRANGE}-photos", "--mode", "cpu", "--quiet", "--csv", tmp_path / f"{STRANGE}.csv"]
    assert exits(predict.main, line) == 0, capsys.readouterr().err
    assert os.fsencode(f"{STRANGE}-photos/5.png") in (tmp_path / f"{STRANGE}.csv").read_bytes()
    assert exits(extract, [run, "--images", line[1], "--mode", "cpu", "--quiet", "--out", tmp_path / "of-files"]) == 0, (
        "no file of these names the run"
    )
    (tmp_path / "link").symlink_to(run)
    assert exits(extract, [tmp_path / "link", "--out", tmp_path / f"{STRANGE}-features", "--mode", "cpu", "--quiet", "--json"]) == 0
    read_features(tmp_path / f"{STRANGE}-features")


def nested(levels):
    layers = [nbcnn.Conv2d(3, 3, padding=1)]
    for _ in range(levels):
        layers = [nbcnn.Residual(*layers)]
    return layers


def test_a_network_that_is_nested_too_deep_is_refused_before_it_trains(tmp_path):
    images = np.zeros((2, 3, 8, 8), np.uint8)
    model = nbcnn.Model(nested(40), "mse", mode="cpu")
    with pytest.raises(nbcnn.UsageError, match=r"the network has lists or objects more than 64 deep.*could never be read again"):
        model.fit(images, epochs=1, verbose=0, run=tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.safetensors"))
    with pytest.raises(nbcnn.UsageError, match="more than 64 deep"):
        model.save(tmp_path / "net.safetensors")
    small = nbcnn.Model(nested(12), "mse", mode="cpu")
    small.fit(images, epochs=1, verbose=0, run=tmp_path / "small")
    small.save(tmp_path / "net.safetensors")
    for path in (tmp_path / "small", tmp_path / "net.safetensors"):
        with nbcnn.load(path, mode="cpu") as loaded:
            np.testing.assert_array_equal(loaded.predict(images), small.predict(images))
    assert checkpoint.load(tmp_path / "small" / checkpoint.LAST)[1]["epochs_done"] == "1"


def test_a_network_that_is_nested_as_deep_as_can_be_read_is_exported(tmp_path):
    pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)")
    nbcnn.Model(nested(12), "mse", mode="cpu").build((3, 8, 8)).save(tmp_path / "net.safetensors")
    assert exits(export.main, [tmp_path / "net.safetensors", tmp_path / "net.onnx"]) == 0
