"""Tests of `nbcnn.Model` on graphs: training, files, features, several inputs and outputs, and graphs for the command line."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from scripts import ROOT, exits, train
from test_model import examples

import nbcnn
from nbcnn import Add, Concat, Conv2d, Flatten, Input, Linear, MaxPool2d, ReLU, Sigmoid
from nbcnn.cli import own_model
from nbcnn.train import checkpoint

OPTIONS = {"batch_size": 8, "verbose": 0}


def residual(**options):
    """A classifier with a shortcut around a shared convolution."""
    x = Input((1, 6, 6))
    shared = Conv2d(4, 3, padding=1)
    a = ReLU()(Conv2d(4, 3, padding=1)(x))
    b = ReLU()(shared(ReLU()(shared(a))) + a)
    return nbcnn.Model(x, Linear(3)(Flatten()(MaxPool2d(2)(b))), loss="cross_entropy", mode="cpu", **options)


def two_in_two_out(loss):
    """An image and a vector in, two vectors out."""
    image, vector = Input((1, 6, 6)), Input((2,))
    h = ReLU()(Linear(8)(Concat()([Flatten()(image), vector])))
    return nbcnn.Model([image, vector], [Linear(3)(h), Linear(2)(h)], loss=loss, mode="cpu")


def test_a_graph_learns_is_saved_and_goes_on(tmp_path):
    x, y = examples()
    model = residual()
    assert "conv2@2" in model.summary()
    history = model.fit(x, y, epochs=6, optimizer=nbcnn.SGD(lr=0.1, momentum=0.9), **OPTIONS)
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    assert model.evaluate(x, y)["accuracy"] == 1
    again = nbcnn.load(model.save(tmp_path / "net.safetensors"), mode="cpu")
    assert again.layers == model.layers
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    features = again.features(x, "conv2@2")
    assert features.shape == (24, 4, 6, 6)
    np.testing.assert_array_equal(np.maximum(features + again.features(x, "relu1"), 0), again.features(x, "relu3"))
    again.fit(x, y, epochs=1, **OPTIONS)


def test_a_graph_is_trained_in_parts_as_in_one_go():
    x, y = examples()
    whole, parts = residual(), residual()
    whole.fit(x, y, epochs=3, **OPTIONS)
    parts.fit(x, y, epochs=1, **OPTIONS)
    parts.fit(x, y, epochs=2, **OPTIONS)
    for name, values in whole.net.params.as_dict().items():
        np.testing.assert_array_equal(values, parts.net.params.as_dict()[name], err_msg=name)


def test_several_inputs_and_outputs_are_tuples(tmp_path):
    x, y = examples()
    beside = np.random.default_rng(2).random((24, 2)).astype(np.float32)
    targets = (np.eye(3)[y], beside[:, ::-1])
    model = two_in_two_out("mse")
    history = model.fit((x, beside), targets, epochs=30, optimizer=nbcnn.Adam(lr=0.02), validation_data=((x, beside), targets), **OPTIONS)
    assert history.history["loss"][-1] < 0.2 * history.history["loss"][0]
    first, second = model.predict((x, beside))
    assert (first.shape, second.shape) == ((24, 3), (24, 2))
    wanted = float(((first - targets[0]) ** 2).mean() + ((second - targets[1]) ** 2).mean())
    assert model.evaluate((x, beside), targets)["loss"] == pytest.approx(wanted, rel=1e-6)
    assert history.history["val_loss"][-1] == pytest.approx(wanted, rel=1e-6)
    again = nbcnn.load(model.save(tmp_path / "two.safetensors"), mode="cpu")
    for got, own in zip(again.predict((x, beside)), (first, second), strict=True):
        np.testing.assert_array_equal(got, own)
    assert model.features((x, beside), "concat1").shape == (24, 38)


def test_several_outputs_are_classified():
    x, y = examples()
    beside = np.zeros((24, 2), np.uint8)
    model = two_in_two_out("cross_entropy")
    labels = (y, (y == 1).astype(np.int64))
    model.fit((x, beside), labels, epochs=25, optimizer=nbcnn.Adam(lr=0.02), **OPTIONS)
    found = model.evaluate((x, beside), labels)
    assert found["accuracy"] == 1
    first, second = (logits.astype(np.float64) for logits in model.predict((x, beside)))
    wanted = sum(float((np.log(np.exp(z).sum(1)) - z[np.arange(24), label]).mean()) for z, label in zip((first, second), labels, strict=True))
    assert found["loss"] == pytest.approx(wanted, rel=1e-6)


def test_several_inputs_that_do_not_fit_are_refused():
    x, y = examples()
    model = two_in_two_out("cross_entropy")
    for given, labels, words in (
        (x, (y, y), "examples must be 2 arrays, one for each input"),
        ((x, x[:, 0, 0, :2][:5]), (y, y % 2), "must be as many: there are 24, 5"),
        ((x, x), (y, y % 2), "examples of input 2 are"),
        ((x, x[:, 0, 0, :2]), y, "the network has 2 outputs: give y as a tuple of 2 arrays"),
        ((x, x[:, 0, 0, :2]), (y, y), r"targets of output 2\[2\] is 2, and the 2 classes are 0 to 1"),
    ):
        with pytest.raises(nbcnn.UsageError, match=words):
            model.fit(given, labels, **OPTIONS)
    model.fit((x, x[:, 0, 0, :2]), (y, y % 2), **OPTIONS)
    with pytest.raises(nbcnn.UsageError, match="predict_classes is for networks with one output"):
        model.predict_classes((x, x[:, 0, 0, :2]))


GRAPH = """
from nbcnn import Conv2d, Graph, Input, Linear, Flatten, ReLU, SoftmaxCrossEntropy, Model


def graph(channels, height, width):
    x = Input((channels, height, width))
    y = ReLU()(Conv2d(4, 3, stride=4, padding=1)(x))
    return Graph.of(x, Linear(10)(Flatten()(y + Conv2d(4, 3, padding=1)(y))), SoftmaxCrossEntropy())


def model():
    x = Input((3, 32, 32))
    return Model(x, Linear(10)(Flatten()(Conv2d(2, 3, stride=8)(x))), loss="cross_entropy", mode="cpu")


def fixed():
    return model().layers


def two():
    x = Input((3, 32, 32))
    return Graph.of(x, [Flatten()(x), ReLU()(x)])
"""


def test_the_residual_network_of_the_examples_learns():
    spec = importlib.util.spec_from_file_location("resnet", ROOT / "examples" / "resnet.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    y = np.arange(24) % 3
    x = (90 * y[:, None, None, None] + np.random.default_rng(1).integers(0, 60, (24, 1, 6, 6))).astype(np.uint8)  # dark, grey and bright
    model = nbcnn.Model(module.resnet(1, 6, 6, blocks=(1, 1), filters=4, classes=3), mode="cpu")
    assert [type(layer).__name__ for layer in model.layers].count("Conv2d") == 6  # one of them is the projection
    history = model.fit(x, y, epochs=20, optimizer=nbcnn.Adam(lr=0.01), **OPTIONS).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert nbcnn.Model(module.resnet(), mode="cpu").net.params.count == 2_775_434


@pytest.mark.full
def test_the_command_line_takes_a_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GRAPH)
    recipe = ["--model", "mine.py:graph", "--mode", "cpu", "--dataset", "digits", "--limit", "64", "--batch", "16", "--quiet"]
    assert exits(train, [*recipe, "--epochs", "2", "--schedule", "constant", "--out", tmp_path / "whole"]) == 0
    assert exits(train, [*recipe, "--epochs", "1", "--schedule", "constant", "--out", tmp_path / "parts"]) == 0
    assert exits(train, ["--resume", tmp_path / "parts", "--epochs", "2", "--quiet"]) == 0
    whole, parts = (checkpoint.load(tmp_path / name / checkpoint.LAST)[0] for name in ("whole", "parts"))
    assert {name: values.tobytes() for name, values in whole.items()} == {name: values.tobytes() for name, values in parts.items()}
    loaded = nbcnn.load(tmp_path / "whole", mode="cpu")
    assert loaded.layers.call_names() == ["conv1", "relu1", "conv2", "add1", "flatten1", "linear1"]


def test_a_function_may_return_a_model_and_what_it_may_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GRAPH)
    made = [own_model.layers_of(f"mine.py:{name}", (3, 32, 32)) for name in ("model", "fixed")]
    assert made[0] == made[1]
    assert own_model.digest(made[0]) != own_model.digest(list(made[0]))
    with pytest.raises(nbcnn.UsageError, match=r"takes \(3, 32, 32\), and the images are \(1, 28, 28\)"):
        own_model.layers_of("mine.py:fixed", (1, 28, 28))
    with pytest.raises(nbcnn.UsageError, match="must be a loss"):
        own_model.layers_of("mine.py:two", (3, 32, 32))


def test_a_list_of_a_network_is_no_graph_and_the_other_way_round():
    x = Input((4,))
    model = nbcnn.Model(nbcnn.Graph.of(x, Add()([Linear(2)(x), Sigmoid()(Linear(2)(x))])), "mse", mode="cpu")
    assert isinstance(model.layers, nbcnn.Graph)
    assert model.loss == nbcnn.MSE()
    assert isinstance(nbcnn.Model([Linear(2)], "mse", mode="cpu").layers, list)
