"""Tests of train.py on images of one's own: folders and arrays, augmented, normalised, streamed, resumed and extracted."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from scripts import exits, extract, message, train

from nbcnn.nn import models
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.train import checkpoint
from nbcnn.train.runlog import RunFolder


def tiny(channels=1, height=28, width=28, classes=10, norm="s0"):
    """A classifier that takes milliseconds in place of mnist-cnn."""
    return [Conv2d(4, 3, stride=2, padding=1), Flatten(), Linear(classes), SoftmaxCrossEntropy()]


@pytest.fixture
def pets(tmp_path, rng, monkeypatch):
    """A folder of 24 images of three classes, in a place with a comma in its name; mnist-cnn is a small network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(models.MODELS, "mnist-cnn", tiny)
    for name in ("ants", "bees", "cats"):
        (tmp_path / "pets, x" / name).mkdir(parents=True)
        for at in range(8):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / "pets, x" / name / f"{at}.png")
    return tmp_path / "pets, x"


OPTIONS = ["--model", "mnist-cnn", "--mode", "cpu", "--batch", "4", "--quiet"]


def ended(run):
    """Tensors of the last checkpoint, and the losses of every epoch."""
    tensors, notes = checkpoint.load(run / checkpoint.LAST)
    return {name: tensor.tobytes() for name, tensor in tensors.items()}, [row["train_loss"] for row in RunFolder(run).rows()], notes


def test_a_run_on_a_folder_is_resumed_bit_for_bit_resident_or_streamed(pets, tmp_path):
    recipe = [*OPTIONS, "--dataset", "folder:pets, x", "--normalise", "--augment", "flip:alternate,crop:2,cutout:3", "--test-share", "0.25"]
    recipe += ["--schedule", "constant"]
    assert exits(train, [*recipe, "--epochs", "2", "--resident", "no", "--out", tmp_path / "whole"]) == 0
    assert exits(train, [*recipe, "--epochs", "1", "--out", tmp_path / "parts"]) == 0
    assert exits(train, ["--resume", tmp_path / "parts", "--epochs", "2", "--quiet"]) == 0
    assert ended(tmp_path / "whole")[:2] == ended(tmp_path / "parts")[:2]
    config = RunFolder(tmp_path / "whole").read_config()
    assert config["classes"] == ["ants", "bees", "cats"]
    assert config["data"]["name"] == f"folder:{pets}?test-share=0.25"
    assert config["normalisation"] == json.loads(ended(tmp_path / "whole")[2]["normalisation"])


AUGMENTATION = """
import math
import nbcnn

def shifted(row, column, height, width, a, b, c, d):
    return row + math.floor(3.0 * a) - 1.0, column

def brighter(x, channel, row, column, a, b, c, d):
    return x * (0.5 + b)

Shift = nbcnn.augmentation("shift_of_test", source=shifted, value=brighter)
"""


def test_an_augmentation_of_ones_own_is_resumed_bit_for_bit(pets, tmp_path, capsys):
    (tmp_path / "own.py").write_text(AUGMENTATION, encoding="utf-8")
    recipe = [*OPTIONS, "--dataset", "folder:pets, x", "--schedule", "constant", "--augment"]
    assert exits(train, [*recipe, "flip,own.py:Shift", "--epochs", "2", "--resident", "no", "--out", tmp_path / "whole"]) == 0
    assert exits(train, [*recipe, "flip,own.py:Shift", "--epochs", "1", "--out", tmp_path / "parts"]) == 0
    assert exits(train, ["--resume", tmp_path / "parts", "--epochs", "2", "--quiet"]) == 0
    assert ended(tmp_path / "whole")[:2] == ended(tmp_path / "parts")[:2]
    assert exits(train, [*recipe, "flip", "--epochs", "1", "--out", tmp_path / "plain"]) == 0
    assert ended(tmp_path / "plain")[1] != ended(tmp_path / "whole")[1][:1]
    for text, words in (
        ("own.py", "a custom augmentation is FILE.py:NAME, here own.py:shifted"),
        ("none.py:Shift", "there is no file none.py"),
        ("own.py:shifted", "own.py:shifted is no augmentation"),
        ("own.py:Shift,own.py:Shift", "a function of yours stands twice"),
    ):
        assert words in message(capsys, 2, exits(train, [*recipe, text, "--epochs", "1", "--out", tmp_path / "wrong"]))


def test_what_a_folder_run_is_bound_to(pets, tmp_path, capsys, rng):
    assert exits(train, [*OPTIONS, "--dataset", f"folder:{pets}", "--augment", "crop:1", "--epochs", "1", "--out", tmp_path / "run"]) == 0
    for words in (["--augment", "crop:2"], ["--normalise"], ["--size", "4"], ["--test-share", "0.5"]):
        assert "cannot change in a resumed run" in message(capsys, 2, exits(train, ["--resume", tmp_path / "run", "--epochs", "2", *words]))
    Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(pets / "cats" / "0.png")
    assert "belongs to another run" in message(capsys, 3, exits(train, ["--resume", tmp_path / "run", "--epochs", "2"]))


def test_a_run_without_the_new_flags_is_named_as_before(tmp_path, monkeypatch):
    monkeypatch.setitem(models.MODELS, "mnist-cnn", tiny)
    assert exits(train, [*OPTIONS, "--dataset", "shapes", "--limit", "4", "--batch", "2", "--epochs", "1", "--out", tmp_path / "run"]) == 0
    _, _, notes = ended(tmp_path / "run")
    assert {"size", "test_share", "augment", "normalise", "resident"}.isdisjoint(json.loads(notes["flags"]))
    assert "normalisation" not in notes
    # So its config.json, too, may be one of an earlier version.
    run = RunFolder(tmp_path / "run")
    config = run.read_config()
    for name in ("size", "test_share", "augment", "normalise", "resident"):
        del config["flags"][name]
    run.write_config(config)
    assert exits(train, ["--resume", tmp_path / "run", "--epochs", "2", "--quiet"]) == 0


def test_features_are_those_of_the_normalised_network(tmp_path, rng, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(models.MODELS, "mnist-cnn", tiny)
    monkeypatch.setitem(models.CODES, "mnist-cnn", "conv1")
    images = rng.random((12, 2, 8, 8), np.float32) * 3
    np.savez("set.npz", images=images, labels=np.arange(12) % 2)
    assert exits(train, [*OPTIONS, "--dataset", "npz:set.npz", "--normalise", "--epochs", "1", "--out", "run"]) == 0
    assert exits(extract, ["run", "--mode", "cpu", "--quiet"]) == 0
    tensors, notes = checkpoint.load(tmp_path / "run" / checkpoint.LAST)
    made = json.loads(notes["normalisation"])
    saved = np.load(next(path for path in (tmp_path / "features" / "set").glob("train*.npy") if np.load(path, mmap_mode="r").ndim == 2))
    order = np.argsort(np.random.Philox(key=0).random_raw(12), kind="stable")[1:]
    seen = (images[order] - np.array(made["mean"])[:, None, None]) / np.array(made["deviation"])[:, None, None]
    padded = np.pad(seen, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]  # (11, 2, 4, 4, 3, 3)
    expected = np.einsum("nchwrs,kcrs->nkhw", windows, tensors["param.conv1.weight"]) + tensors["param.conv1.bias"][:, None, None]
    # 19 float32 products and sums of terms below 3 standard deviations times weights below 1.
    np.testing.assert_allclose(saved.reshape(expected.shape), expected, rtol=1e-5, atol=4 * 2**-24 * 19 * 3)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--dataset", "folder:nowhere"], 3, "nowhere is no folder"),
        (["--dataset", "folder"], 2, "none of auto"),
        (["--dataset", "digits", "--size", "8"], 2, "--size is for a custom --dataset (folder:PATH"),
        (["--dataset", "folder:pets, x", "--size", "8x"], 2, "no size of images"),
        (["--dataset", "folder:pets, x", "--augment", "flop"], 2, "did you mean flip"),
        (["--dataset", "folder:pets, x", "--augment", "crop:8", "--batch", "4"], 2, "it must be below 8"),
        (["--dataset", "energy", "--augment", "flip"], 2, "--augment is for images"),
    ],
)
def test_what_is_refused(pets, capsys, words, code, text):
    model = [] if "energy" in words else ["--model", "mnist-cnn"]
    assert text in message(capsys, code, exits(train, ["--mode", "cpu", *model, *words]))
