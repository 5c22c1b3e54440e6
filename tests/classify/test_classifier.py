"""Tests of the classifiers end to end on the CPU: train.py, its pictures and metrics, resuming, features; and Fashion-MNIST's files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripts import exits, extract, message, train

from nbcnn import datasets
from nbcnn.datasets import DataMissing, mnist
from nbcnn.nn.layers import parameters, sized
from nbcnn.nn.models import MODELS, mnist_cnn
from nbcnn.nn.norms import EvoNormB0, EvoNormS0
from nbcnn.nn.optim import Adam
from nbcnn.plan.shapes import numel
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train import plots

RUN = ["--model", "mnist-cnn-b0", "--dataset", "mnist", "--mode", "cpu", "--batch", "6", "--epochs", "2", "--quiet"]


def write_idx(path, array):
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_set(folder, count=12, size=8):
    """Images that show their label: a bright row."""
    folder.mkdir(parents=True)
    for at, many in ((0, count), (2, count // 2)):
        labels = np.arange(many) % size
        images = np.random.default_rng(at).integers(0, 40, (many, size, size))
        images[np.arange(many), labels] = 255
        write_idx(folder / mnist.FILES[at], images)
        write_idx(folder / mnist.FILES[at + 1], labels)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, and that of its data."""
    base = tmp_path_factory.mktemp("classifier")
    write_set(base / "data")
    assert exits(train, [*RUN, "--data-dir", base / "data", "--out", base / "run"]) == 0
    return base


def test_the_networks_parameters():
    counts = [sum(numel(p.shape) for p in parameters(sized(mnist_cnn(norm=norm), (1, 28, 28))).values()) for norm in ("s0", "b0")]
    assert counts == [421_642 + 288] * 2
    kinds = {name: {type(layer) for layer in MODELS[name](1, 28, 28)} for name in ("mnist-cnn", "mnist-cnn-b0")}
    assert EvoNormS0 in kinds["mnist-cnn"]
    assert EvoNormB0 not in kinds["mnist-cnn"]
    assert EvoNormB0 in kinds["mnist-cnn-b0"]
    assert EvoNormS0 not in kinds["mnist-cnn-b0"]


@pytest.mark.parametrize("norm", ["s0", "b0"])
def test_a_few_images_are_overfit(norm):
    images = np.random.default_rng(0).integers(0, 256, (8, 1, 8, 8)).astype(np.uint8)
    labels = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
    net = Net(mnist_cnn(norm=norm), (1, 8, 8), mode="cpu", init="he")
    trained = TrainingSession(net, images, optimizer=Adam(), learning_rates=np.full(40, 2e-3), batch=8, labels=labels)
    for epoch in range(40):
        trained.begin_epoch(epoch)
        trained.step()
    assert trained.status().last_loss < 0.05
    logits = net.predict(images)
    assert logits.shape == (8, 10)
    if norm == "s0":  # B0's running variance is still on its way
        assert (logits.argmax(1) == labels).all()


def test_a_run_reports_its_accuracy(run):
    rows = [json.loads(line) for line in (run / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 <= row["test_accuracy"] <= 1 for row in rows)
    assert "test_accuracy" in (run / "run/metrics.csv").read_text().splitlines()[0]
    config = json.loads((run / "run/config.json").read_text())["flags"]
    assert (config["recipe"], config["optimizer"], config["init"]) == ("classifier", "adam", "he")
    for name in ("curves.png", "confusion.png", "mistakes.png"):
        assert (run / "run" / name).read_bytes().startswith(b"\x89PNG")
    assert not (run / "run/reconstructions.png").exists()


def test_the_summary_has_the_accuracy(run, tmp_path, capsys):
    assert exits(train, [*RUN, "--data-dir", run / "data", "--out", tmp_path / "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = json.loads((run / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert found["test_accuracy"] == last["test_accuracy"], "the same run twice"
    assert found["test_loss"] == last["test_loss"]


def test_a_finished_run_is_resumed_and_draws_again(run, capsys):
    (run / "run/confusion.png").unlink()
    assert exits(train, ["--resume", run / "run", "--quiet"]) == 0
    assert (run / "run/confusion.png").exists()
    assert "test accuracy" in capsys.readouterr().out


def test_its_features_can_be_extracted(run, tmp_path):
    assert exits(extract, [run / "run", "--out", tmp_path / "features", "--mode", "cpu", "--quiet"]) == 0
    assert np.load(tmp_path / "features/train_features.npy").shape == (12, 64 * 2 * 2)


def test_a_set_without_labels_cannot_be_classified(capsys):
    got = exits(train, ["--model", "mnist-cnn", "--dataset", "photos", "--mode", "cpu", "--limit", "4", "--batch", "2", "--epochs", "1", "--quiet"])
    assert "label" in message(capsys, 2, got)


def test_fashion_mnist_is_looked_for_in_its_own_places(tmp_path):
    write_set(tmp_path / "MNIST/raw")
    with pytest.raises(DataMissing, match="Fashion-MNIST was not found"):
        datasets.load("fashion-mnist", data_dir=tmp_path)
    write_set(tmp_path / "fashion-mnist", count=6)
    data = datasets.load("fashion-mnist", data_dir=tmp_path)
    assert (data.name, len(data.train_images), data.classes[9]) == ("fashion-mnist", 6, "boot")
    assert len(datasets.load("mnist", data_dir=tmp_path).train_images) == 12


@pytest.mark.parametrize("wrong", [0, 3, 60])
def test_mistakes_are_drawn_however_many(wrong, tmp_path):
    images = np.zeros((70, 1, 8, 8), np.uint8)
    labels = np.zeros(70, np.int32)
    logits = np.eye(10, dtype=np.float32)[np.r_[np.ones(wrong, int), np.zeros(70 - wrong, int)]]
    plots.mistakes(tmp_path / "mistakes.png", images, labels, logits, tuple("0123456789"), "title")
    assert (tmp_path / "mistakes.png").read_bytes().startswith(b"\x89PNG")
