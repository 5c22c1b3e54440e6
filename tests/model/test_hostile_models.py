"""Tests of saved networks and classifiers that say what cannot be: exit code 3 and a sentence, before anything of that size is made."""

from __future__ import annotations

import json
import os
import tracemalloc

import numpy as np
import pytest

import nbcnn
from nbcnn.nn.description import DescriptionError
from nbcnn.train import checkpoint
from nbcnn.train.checkpoint import CheckpointError


@pytest.fixture
def saved(tmp_path):
    layers = [nbcnn.Conv2d(4, 3), nbcnn.BatchNorm2d(), nbcnn.Flatten(), nbcnn.Linear(3)]
    return nbcnn.Model(layers, "cross_entropy", mode="cpu", classes=["a", "b", "c"]).build((2, 6, 6)).save(tmp_path / "net.safetensors")


def edited(path, change):
    """The file with its note of the network changed, sealed again."""
    tensors, notes = checkpoint.load(path)
    about = json.loads(notes["network"])
    change(about)
    checkpoint.save(path, tensors, notes | {"network": json.dumps(about)})
    return path


def layer(at, **values):
    return lambda about: about["layers"][at].update(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (layer(0, kernel_size=None), "layer 1, Conv2d"),
        (layer(0, kernel_size=[3, "x"]), "layer 1, Conv2d"),
        (layer(0, out_channels=2**63), "batchnorm1 takes 4 channels, got 9223372036854775808"),
        (layer(3, out_features=2**40), "parameter 'linear1.weight' is"),
        (layer(1, eps=1e308), "positive, finite eps"),
        (layer(1, eps=float("nan")), "positive, finite eps"),
        (layer(0, layer="x" * 5000), "layer 1 is a 'xxx"),
        (layer(0, layer="a\x1b[31mb"), r"layer 1 is a 'a\\x1b"),
        (layer(3, layer="Conv2d"), "layer 4, Conv2d"),
        (lambda about: about.update(input_shape=[2, 2**47, 2**47]), "linear1 takes"),
        (lambda about: about.update(input_shape=[0, 2**47, 2**47]), "net.safetensors: its note of the network"),
        (lambda about: about.update(input_shape=[]), "net.safetensors: its note of the network"),
        (lambda about: about.update(input_shape=[2, 6]), "net.safetensors: its note of the network"),
        (lambda about: about.update(input_shape=[3, 6, 6]), "conv1 takes 2 channels"),
        (lambda about: about.update(classes=["a"]), "classes names 1 classes, and the network's output has 3"),
        (lambda about: about.update(scale=[0, 1, 2]), "two ascending numbers"),
        (lambda about: about.update(scale=[1, 0]), "two ascending numbers"),
        (lambda about: about.update(layers=[]), "net.safetensors: its note of the network"),
    ],
)
def test_notes_that_make_no_network_are_refused(saved, change, words):
    with pytest.raises((CheckpointError, DescriptionError), match=words) as refused:
        nbcnn.load(edited(saved, change), mode="cpu")
    assert refused.value.exit_code == 3
    assert "net.safetensors" in str(refused.value)
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


def test_a_few_kilobytes_that_describe_gigabytes_of_parameters_are_refused_before_these_are_made(saved):
    def large(about):
        about["layers"] = [{"layer": "Flatten"}, *({"layer": "Linear", "out_features": 22_000, "bias": True} for _ in range(2))]

    path = edited(saved, large)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"parameter 'linear1\.weight' is"):
            nbcnn.load(path, mode="cpu")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["{", "[]", '{"mean": [0], "deviation": [0]}', '{"mean": 1}', "9" * 5000, '{"mean": [0.0], "deviation": [1.0]}'])
def test_a_normalisation_that_is_none_is_refused(saved, text):
    tensors, notes = checkpoint.load(saved)
    checkpoint.save(saved, tensors, notes | {"normalisation": text})
    with pytest.raises((CheckpointError, DescriptionError), match=r"net\.safetensors.*normalisation"):
        nbcnn.load(saved, mode="cpu")


def test_a_checkpoint_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "net.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        nbcnn.load(tmp_path / "net.safetensors", mode="cpu")


def test_numbers_beyond_float32_are_refused_when_a_layer_is_made():
    with pytest.raises(nbcnn.UsageError, match="positive, finite eps"):
        nbcnn.BatchNorm2d(eps=1e39)
    assert nbcnn.BatchNorm2d(eps=np.float32(1e-3)).eps == np.float32(1e-3)
