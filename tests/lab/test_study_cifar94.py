"""Tests of `study cifar94`, and of the section and the table that it and `study resnet` write: nothing stands there that was not measured."""

from __future__ import annotations

import json

import numpy as np
import pytest
import samples
from scripts import exits

from nbcnn.__main__ import main
from nbcnn.cli import study_cifar94
from nbcnn.datasets.dataset import Dataset
from nbcnn.files.document import DocumentError
from nbcnn.files.errors import UsageError
from nbcnn.lab.measure import results
from nbcnn.lab.report import readme_front
from nbcnn.lab.studies import cifar94


def row(form, seed, accuracy, seconds, **more):
    return {"form": form, "seed": seed, "epochs": 10, "accuracy": accuracy, "seconds": seconds, "ready_seconds": 1.0} | more


@pytest.fixture
def data(rng):
    """Eight images of two classes, apart by brightness, which every data set is."""
    images, labels = rng.integers(0, 100, (8, 3, 32, 32), dtype=np.uint8), np.arange(8, dtype=np.int32) % 2
    images[labels == 1] += 128
    return Dataset("cifar10", "made", images, labels, images, labels, tuple("abcdefghij"))


@pytest.fixture
def played(monkeypatch, data):
    """Trainings that take no time, of which the third is interrupted."""
    monkeypatch.setattr("nbcnn.datasets.load", lambda *given, **options: data)
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: "no GPU")

    def train(data, seed, epochs):
        if seed == 2:
            raise KeyboardInterrupt
        return row("nbcnn cpu fp32", seed, 0.9 + 0.01 * seed, 1.5) | {"epochs": epochs}

    monkeypatch.setattr(cifar94, "train", train)


def test_every_training_is_saved_with_where_it_is_from(played, tmp_path, capsys):
    words = ["study", "cifar94", "--seeds", "2", "--epochs", "3", "--save", "--results", str(tmp_path), "--json"]
    assert exits(main, words) == 0
    printed = json.loads(capsys.readouterr().out)
    kept = results.load(tmp_path / "cpu.json")["sections"]["cifar94-cpu-fp32"]
    assert kept["rows"] == printed
    assert [(one["seed"], one["accuracy"], one["seconds"], one["epochs"], one["data"]) for one in printed] == [
        (seed, 0.9 + 0.01 * seed, 1.5, 3, "cifar10") for seed in (0, 1)
    ]
    assert {"versions", "date", "command"} <= set(kept["environment"])


def test_an_interrupted_study_keeps_the_trainings_that_ended(played, tmp_path):
    assert exits(main, ["study", "cifar94", "--seeds", "5", "--save", "--results", str(tmp_path)]) == 130
    assert len(results.load(tmp_path / "cpu.json")["sections"]["cifar94-cpu-fp32"]["rows"]) == 2


def test_nothing_is_saved_unless_it_is_asked_for(played, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "save", lambda *given: pytest.fail("saved"))
    assert exits(main, ["study", "cifar94", "--seeds", "1"]) == 0
    assert "examples/cifar94.py, 10 epochs, mean of 1 seeds" in capsys.readouterr().out


def test_without_the_example_it_says_where_it_wants_it(monkeypatch, tmp_path):
    monkeypatch.setattr(cifar94, "EXAMPLE", tmp_path / "cifar94.py")
    with pytest.raises(UsageError, match="run it in a checkout"):
        cifar94.example()
    assert study_cifar94.EPOCHS == 10


@pytest.mark.full  # ten seconds of NumPy
def test_ours_trains_on_a_cpu(data, monkeypatch):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: "no GPU")
    found = cifar94.train(data, 0, 2)
    assert (found["form"], found["epochs"]) == ("nbcnn cpu fp32", 2)
    assert 0 < found["epoch_seconds"] <= found["seconds"] * 1.001
    assert 0 <= found["accuracy"] <= 1
    assert found["ready_seconds"] > 0


def test_the_table_has_medians_and_spread_of_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    samples.saved(tmp_path, samples.trainings())
    text = readme_front.trainings()
    ours = "| `examples/cifar94.py` | nbcnn tensorcore bf16 | 3 | 10 | **90.00 %** | 89.90 … 90.10 % | **1.600** | 1.500 … 1.700 |  |"
    twin = "| `examples/cifar94.py` | PyTorch graph | 3 | 10 | **90.10 %** | 90.10 … 90.10 % | **2.400** | 2.400 … 2.400 | 1.50× |"
    assert ours in text
    assert twin in text
    assert "| ResNet-18 | PyTorch compile | 1 | 10 | **89.20 %** | 89.20 … 89.20 % | **9.100** | 9.100 … 9.100 | 1.30× |" in text
    assert text.count("NVIDIA H200, ") == 2


def test_no_row_without_a_section(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    samples.saved(tmp_path, {"other": [{}]})
    assert readme_front.trainings() == "No such training is in the results files yet.\n"
    samples.saved(tmp_path, {"resnet-tensorcore-bf16": samples.trainings()["resnet-tensorcore-bf16"]})
    # The last line names the command, and that may be the name of this file.
    assert "cifar94" not in readme_front.trainings().rpartition("|")[0]


@pytest.mark.parametrize("kind", ["cifar94", "resnet"])
def test_a_training_without_its_seconds_is_not_saved(tmp_path, kind):
    broken = samples.trainings()[f"{kind}-tensorcore-bf16"][:1]
    del broken[0]["seconds"]
    with pytest.raises(DocumentError, match="lacks 'seconds'"):
        results.save(f"{kind}-tensorcore-bf16", broken, samples.DEVICE, tmp_path)
