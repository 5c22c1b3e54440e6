"""Tests of the ready-made graphs from the command line: their recipes, a segmentation from images to written masks, a denoiser, encoders."""

from __future__ import annotations

import csv
import json
from functools import partial

import numpy as np
import pytest
from PIL import Image
from scripts import exits, extract, message, train

import nbcnn
from nbcnn.__main__ import main
from nbcnn.classify.features import read_features
from nbcnn.cli import recipes, train_flags
from nbcnn.datasets import Dataset, Masks, shapes
from nbcnn.datasets.dataset import VOID
from nbcnn.files.errors import UsageError
from nbcnn.nn import models
from nbcnn.train import checkpoint
from nbcnn.train.runlog import RunFolder


def flags(*argv):
    made = recipes.fill(train_flags.parse([str(word) for word in argv]))
    made.resume = None
    return made


def test_resnet18_and_mobilenet_have_a_recipe_of_their_own():
    for model in ("resnet18", "mobilenet"):
        chosen = flags("--model", model)
        assert (chosen.recipe, chosen.batch, chosen.epochs, chosen.optimizer, chosen.nesterov) == ("resnet", 512, 16, "sgd", True)
        assert (chosen.lr, chosen.schedule, chosen.warmup, chosen.label_smoothing, chosen.augment) == (0.4, "one-cycle", 0.0, 0.1, "flip,crop:4")
        assert (chosen.weight_decay, chosen.normalise) == (5e-4, True)
    # The rate of SGD is not Adam's.
    other = flags("--model", "resnet18", "--optimizer", "adam")
    assert (other.lr, other.nesterov, other.momentum) == (0.001, False, 0.0)
    assert flags("--model", "resnet18", "--optimizer", "adam", "--lr", "0.01").lr == 0.01
    assert flags("--recipe", "per-image", "--optimizer", "adam").lr == 0.001


def test_a_small_run_has_batches_in_which_something_is_learned():
    chosen = flags("--model", "resnet18")
    notice = recipes.on_cpu(chosen)
    assert (chosen.batch, chosen.lr, chosen.epochs, chosen.limit) == (32, 0.05, 3, 1024)
    assert "small run" in notice
    chosen = flags("--model", "unet", "--batch", "8")
    recipes.on_cpu(chosen)
    assert (chosen.batch, chosen.epochs) == (8, 3)


def test_figures_that_mean_something_else_in_a_mirror_are_not_mirrored():
    chosen = flags("--model", "resnet18")
    assert recipes.on_images(chosen, "cifar10", 50_000, False) == ""
    assert chosen.augment == "flip,crop:4"
    assert "digits are not mirrored" in recipes.on_images(chosen, "digits", 8_000, False)
    assert chosen.augment == "crop:4"
    chosen = flags("--model", "resnet18", "--augment", "flip")
    assert recipes.on_images(chosen, "digits", 8_000, False) == ""
    assert chosen.augment == "flip"


def test_a_batch_of_the_recipe_is_at_most_an_eighth_of_few_images():
    chosen = flags("--model", "resnet18")
    assert "the training set has 320 images, so a batch has 40, with lr 0.0312" in recipes.on_images(chosen, "folder:pets", 320, False)
    assert (chosen.batch, chosen.lr) == (40, pytest.approx(0.4 * 40 / 512))
    chosen = flags("--model", "resnet18", "--batch", "100")
    assert recipes.on_images(chosen, "folder:pets", 320, False) == ""
    assert (chosen.batch, chosen.lr) == (100, 0.4)
    chosen = flags("--model", "unet", "--noise", "0.2")
    recipes.on_images(chosen, "folder:pets", 6, False)
    assert (chosen.batch, chosen.lr) == (6, 0.001)


def test_unet_takes_noise_off_where_there_are_no_masks():
    chosen = flags("--model", "unet")
    assert "unet learns to denoise images (standard deviation 0.1;" in recipes.on_images(chosen, "cifar10", 50_000, False)
    assert chosen.noise == recipes.DENOISED
    chosen = flags("--model", "unet", "--noise", "0.3")
    assert recipes.on_images(chosen, "cifar10", 50_000, False) == ""
    assert chosen.noise == 0.3
    chosen = flags("--model", "unet")
    assert "--loss mse" in recipes.on_images(chosen, "shapes", 5_000, True)
    assert chosen.noise == 0


TINY = {
    "unet": partial(models.unet, filters=2, depth=1),
    "resnet18": partial(models.resnet18, filters=2),
    "mobilenet": partial(models.mobilenet, multiplier=1 / 16),
}


@pytest.fixture
def tiny(monkeypatch):
    """The graphs with few channels, which a CPU trains in a second."""
    for name, make in TINY.items():
        monkeypatch.setitem(models.MODELS, name, make)
    monkeypatch.setitem(models.CODES, "unet", "relu4")


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """12 images of 8×8 pixels, whose bright pixels are of class 1 and whose corner has no class."""
    root, random = tmp_path_factory.mktemp("data") / "scans", np.random.default_rng(0)
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for at in range(12):
        image = random.integers(0, 256, (8, 8, 3), np.uint8)
        mask = (image[..., 0] > 127).astype(np.uint8)
        mask[0, 0] = VOID
        Image.fromarray(image).save(root / "images" / f"{at}.png")
        Image.fromarray(mask).save(root / "masks" / f"{at}.png")
    (root / "classes.txt").write_text("dark\nbright\n")
    return root


SEGMENT = ["--model", "unet", "--mode", "cpu", "--batch", "4", "--schedule", "constant", "--quiet"]


@pytest.fixture(scope="module")
def segmented(scans, tmp_path_factory):
    """A run that learned the classes of the pixels of `scans`, two epochs long."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, "unet", TINY["unet"])
        assert exits(train, [*SEGMENT, "--dataset", f"folder:{scans}", "--epochs", "2", "--out", out]) == 0
    return out


def bits(run):
    return {name: tensor.tobytes() for name, tensor in checkpoint.load(run / checkpoint.LAST)[0].items()}


def test_masks_decide_that_unet_classifies_pixels(segmented, scans, tiny, tmp_path):
    run = RunFolder(segmented)
    config = run.read_config()
    assert config["classes"] == ["dark", "bright"]
    assert (config["flags"]["ignore_index"], config["flags"]["noise"]) == (VOID, 0.0)
    rows = run.rows()
    assert all(0 < row["test_iou"] <= row["test_accuracy"] <= 1 for row in rows)
    assert all((segmented / name).stat().st_size > 1000 for name in ("curves.png", "segmentation.png"))
    # Resumed after one epoch, it is the same run.
    assert exits(train, [*SEGMENT, "--dataset", f"folder:{scans}", "--epochs", "1", "--out", tmp_path / "parts"]) == 0
    assert exits(train, ["--resume", tmp_path / "parts", "--epochs", "2", "--quiet"]) == 0
    assert bits(segmented) == bits(tmp_path / "parts")
    # Whoever changes a mask has other data.
    Image.fromarray(np.ones((8, 8), np.uint8)).save(scans / "masks" / "0.png")
    assert exits(train, ["--resume", tmp_path / "parts", "--epochs", "3", "--quiet"]) == 3


def test_masks_are_predicted_and_written_as_large_as_their_images(segmented, tmp_path, capsys):
    (tmp_path / "new").mkdir()
    random = np.random.default_rng(1)
    for name, size in (("a.png", (16, 16)), ("b.bmp", (16, 32))):
        Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(tmp_path / "new" / name)
    words = ["predict", segmented, tmp_path / "new", "--mode", "cpu", "--quiet"]
    more = ["--masks", tmp_path / "masks", "--csv", tmp_path / "found.csv", "--picture", tmp_path / "found.png", "--json"]
    assert exits(main, [*words, *more]) == 0
    rows = json.loads(capsys.readouterr().out)["images"]
    for row, shape in zip(rows, ((16, 16), (16, 32)), strict=True):
        assert sum(row["pixels"].values()) == pytest.approx(1, abs=1e-5)
        with Image.open(row["mask"]) as mask:
            values = np.asarray(mask)
        assert values.shape == shape
        inside = values[:, 8:24] if shape == (16, 32) else values
        assert set(np.unique(inside)) <= {0, 1}
        assert (inside == 1).mean() == pytest.approx(row["pixels"].get("bright", 0), abs=1e-6)
        assert shape == (16, 16) or (values[:, [*range(8), *range(24, 32)]] == VOID).all()
    with (tmp_path / "found.csv").open() as file:
        lines = list(csv.reader(file))
    assert lines[0][0] == "image"
    assert set(lines[0][1:]) <= {"dark", "bright"}
    assert (tmp_path / "found.png").stat().st_size > 1000
    assert exits(main, words) == 0
    assert " dark " in capsys.readouterr().out
    # Of two images of one name one mask would replace the other.
    (tmp_path / "new" / "deep").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "new" / "deep" / "a.png")
    assert "several images are called a" in message(capsys, 2, exits(main, [*words, "--masks", tmp_path / "masks"]))


def test_a_network_that_classifies_images_writes_no_masks(tmp_path, capsys):
    layers = [nbcnn.Conv2d(2, 3), nbcnn.Flatten(), nbcnn.Linear(2)]
    path = nbcnn.Model(layers, "cross_entropy", mode="cpu").build((1, 4, 4)).save(tmp_path / "net.safetensors")
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "one.png")
    words = ["predict", path, tmp_path / "one.png", "--masks", tmp_path / "masks", "--mode", "cpu", "--quiet"]
    assert "--masks is for networks that classify pixels" in message(capsys, 2, exits(main, words))
    assert not (tmp_path / "masks").exists()


@pytest.mark.full  # tests/model/test_targets.py trains classes of pixels, the fixture above by the command
def test_a_network_of_ones_own_learns_masks_too(segmented, scans, tmp_path):
    (tmp_path / "own.py").write_text(
        "from nbcnn import *\ndef layers(c, h, w):\n    return [Conv2d(2, 3, padding=1), ReLU(), Conv2d(2, 1), SoftmaxCrossEntropy()]\n"
    )
    words = ["--model", f"{tmp_path / 'own.py'}:layers", "--dataset", f"folder:{scans}", "--mode", "cpu", "--batch", "4", "--epochs", "1", "--quiet"]
    assert exits(train, [*words, "--out", tmp_path / "run"]) == 0
    assert "test_iou" in RunFolder(tmp_path / "run").rows()[0]


def test_what_has_no_masks_is_not_segmented(tiny, tmp_path, capsys):
    words = ["--model", "unet", "--dataset", "photos", "--loss", "cross-entropy", "--mode", "cpu", "--limit", "4", "--out", tmp_path / "run"]
    assert "classifies pixels, and photos has no masks" in message(capsys, 2, exits(train, words))
    words = ["--model", "resnet18", "--sparse", "2", "--dataset", "shapes", "--mode", "cpu", "--limit", "4", "--out", tmp_path / "run"]
    assert "resnet18 is a graph" in message(capsys, 2, exits(train, words))


@pytest.mark.full  # the flags that make it are tested above
def test_a_denoiser_is_trained_on_noise_and_draws_what_it_restores(tiny, tmp_path, capsys):
    words = ["--model", "unet", "--dataset", "shapes", "--loss", "l1", "--mode", "cpu", "--limit", "4", "--batch", "2", "--epochs", "1"]
    assert exits(train, [*words, "--out", tmp_path / "run"]) == 0
    said = capsys.readouterr().err
    assert "unet learns to denoise images" in said
    assert "noise of 0.1" in said
    assert (tmp_path / "run" / "reconstructions.png").stat().st_size > 1000


@pytest.mark.parametrize(("model", "width"), [("resnet18", 16), pytest.param("mobilenet", 64, marks=pytest.mark.full)])
def test_the_mean_of_the_last_channels_is_the_code(model, width, tiny, tmp_path, capsys):
    images = np.random.default_rng(0).integers(0, 256, (12, 1, 16, 16), np.uint8)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(12) % 3)
    words = ["--model", model, "--dataset", f"npz:{tmp_path / 'set.npz'}", "--mode", "cpu", "--batch", "4", "--epochs", "1", "--quiet"]
    assert exits(train, [*words, "--out", tmp_path / "run"]) == 0
    saved = checkpoint.read(tmp_path / "run" / checkpoint.LAST)
    assert json.loads(saved.metadata["normalisation"])["mean"][0] == pytest.approx(images[:, 0].mean() / 255, abs=0.05)
    assert exits(extract, [tmp_path / "run", "--out", tmp_path / "f", "--mode", "cpu", "--quiet"]) == 0
    features = read_features(tmp_path / "f")
    assert (features.origin.code_shape, features.origin.layer, features.train.shape[1]) == ((width,), None, width)
    assert np.isfinite(features.train).all()
    assert np.asarray(features.train).std() > 0
    capsys.readouterr()


@pytest.mark.full  # scikit-learn's machinery
def test_features_of_a_graph_are_classified_beside_an_untrained_one(tiny, tmp_path, capsys):
    words = ["--model", "resnet18", "--dataset", "digits", "--mode", "cpu", "--batch", "16", "--epochs", "1", "--limit", "60", "--quiet"]
    assert exits(train, [*words, "--out", tmp_path / "run"]) == 0
    assert exits(extract, [tmp_path / "run", "--out", tmp_path / "f", "--mode", "cpu", "--quiet"]) == 0
    capsys.readouterr()
    assert exits(main, ["classify", tmp_path / "f", "--baselines", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["classifiers"]
    assert {row["features"] for row in found.values()} == {16, 3072}


def drawn(count, size=16):
    """A data set of `count` drawn images, which are also the test images, with masks."""
    images, labels, masks = shapes.with_masks(count, 0, size)
    return Dataset("shapes", "drawn", images, labels, images, labels, shapes.CLASSES, Masks(masks, masks, shapes.MASK_CLASSES))


def test_a_small_unet_learns_the_masks_of_shapes():
    data = drawn(4)
    graph = nbcnn.unet(3, 16, 16, classes=11, filters=8, depth=2)
    with nbcnn.Model(graph, mode="cpu", input_shape=(3, 16, 16), classes=data.masks.classes) as model:
        history = model.fit(data, epochs=40, batch_size=4, optimizer=nbcnn.Adam(nbcnn.Cosine(0.03)), verbose=0)
        found = model.evaluate(data)
        assert found["iou"] == pytest.approx(history.rows[-1]["val_iou"], abs=1e-12)
        assert found["accuracy"] == pytest.approx(history.rows[-1]["val_accuracy"], abs=1e-12)
        # Background everywhere would be right in 64 of 100 pixels, with an IoU of 0.64 for one class and of 0 for the four others.
        assert found["accuracy"] > 0.9
        assert found["iou"] > 0.7
        assert model.predict_classes(data.test_images).shape == (4, 16, 16)


def test_a_data_set_without_masks_is_refused_where_pixels_are_classified():
    images, labels = shapes.generate(4, 0, 16)
    model = nbcnn.Model(nbcnn.unet(3, 16, 16, classes=2, filters=2, depth=1), mode="cpu")
    with pytest.raises(UsageError, match="has no masks, and the network classifies pixels"):
        model.fit(Dataset("plain", "drawn", images, labels, images, labels, shapes.CLASSES), verbose=0)
