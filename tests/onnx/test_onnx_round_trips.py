"""Random networks into files and back: ONNX's checker takes every file, onnxruntime computes the same, and what comes back is the network itself."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)")

import onnx
from random_nets import images_of, model_of

import nbcnn
from nbcnn.nn import description
from nbcnn.nn.activations import ELEMENTWISE
from nbcnn.onnx import from_onnx, to_onnx
from nbcnn.plan.bounds import parity_bound

SEEDS = 137
TERMS = 4000
"""No sum of a random network is longer."""


def described(model):
    return description.dumps(model.net.layers, model.net.input_shape)


def assert_the_same(again, model, x):
    """The same layers, names, weights and frozen parameters, so the same bits; and of gradients too."""
    assert described(again) == described(model)
    assert again.net.params.names == model.net.params.names
    assert again.frozen() == model.frozen()
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    # A network whose output has the shape of its input is to give that back.
    target = np.zeros((len(x), *model.net.output_shape), np.float32) if model.net.needs_values else None
    (loss, gradients), (own_loss, own) = (each.net.gradients(x, target) for each in (again, model))
    assert loss == own_loss
    for name, gradient in own.items():
        np.testing.assert_array_equal(gradients[name], gradient)


def there_and_back(seed, runtime=None):
    model = model_of(seed)
    made, x = to_onnx(model), images_of(model)
    onnx.checker.check_model(made, full_check=True)
    content = made.SerializeToString()
    assert_the_same(from_onnx(content, loss="mse", mode="cpu"), model, x)
    if runtime is None:
        return
    # At most twenty layers, one behind the other, in another order of sums; norms of few elements multiply what is before them.
    wanted = model.predict(x).astype(np.float64)
    bound = 400 * parity_bound(TERMS, "fp32") * max(1.0, float(np.abs(wanted).max()))
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    assert np.abs(found - wanted).max() <= bound
    # As a file of another program, by its nodes.
    del made.metadata_props[:]
    if not {"Greater", "Max"} & {each.op_type for each in made.graph.node}:
        read = from_onnx(made, mode="cpu").predict(x)
        assert np.abs(read.reshape(wanted.shape) - wanted).max() <= bound


@pytest.mark.parametrize("seed", range(6))
def test_a_random_network_comes_back_as_it_was(seed):
    there_and_back(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6, SEEDS))
def test_random_networks_run_in_onnxruntime_and_come_back(seed):
    there_and_back(seed, pytest.importorskip("onnxruntime", reason="onnxruntime is not installed"))


def test_a_file_whose_graph_was_changed_is_read_by_its_nodes():
    """The noted layers are those of another graph then: a weight that is another in the file counts, and a node that is gone is gone."""
    model = nbcnn.Model([nbcnn.Conv2d(4, 3), nbcnn.ReLU(), nbcnn.Dropout(0.5)], mode="cpu").build((1, 6, 6))
    model.freeze("conv1.bias")
    made = to_onnx(model)
    assert [type(each).__name__ for each in from_onnx(made, mode="cpu").layers] == ["Conv2d", "ReLU", "Dropout"]
    made.graph.node[1].op_type = "Abs"
    again = from_onnx(made, mode="cpu")
    assert [type(each).__name__ for each in again.layers] == ["Conv2d", "Abs"]
    assert again.frozen() == ["conv1.bias"]
    weight = next(each for each in made.graph.initializer if each.name == "conv1.weight")
    weight.CopyFrom(onnx.numpy_helper.from_array(np.zeros((4, 1, 3, 3), np.float32), "conv1.weight"))
    assert not from_onnx(made, mode="cpu").weights()["conv1.weight"].any()


def test_a_normalisation_and_a_softmax_come_back(tmp_path):
    images = np.random.default_rng(3).integers(0, 256, (6, 2, 8, 8), dtype=np.uint8)
    normal = nbcnn.Normalisation.of(images)
    layers = [nbcnn.Conv2d(3, 3), nbcnn.InstanceNorm2d(), nbcnn.Flatten(), nbcnn.Linear(3), nbcnn.Softmax()]
    model = nbcnn.Model(layers, "cross_entropy", mode="cpu", normalisation=normal, classes=["a", "b", "c"]).build((2, 8, 8))
    again = from_onnx(to_onnx(model), mode="cpu")
    assert (described(again), again.normalisation, again.classes) == (described(model), normal, ("a", "b", "c"))
    np.testing.assert_array_equal(again.predict(images), model.predict(images))
    histories = [each.fit(images, np.arange(6) % 3, epochs=2, verbose=0).history["loss"] for each in (model, again)]
    assert histories[0] == histories[1]


def test_frozen_parameters_are_saved(tmp_path):
    model = nbcnn.Model([nbcnn.Conv2d(4, 3), nbcnn.Flatten(), nbcnn.Linear(2)], mode="cpu").build((1, 6, 6))
    plain = model.save(tmp_path / "plain.safetensors").read_bytes()
    model.freeze("conv1")
    again = nbcnn.load(model.save(tmp_path / "frozen.safetensors"), mode="cpu")
    assert again.frozen() == ["conv1.weight", "conv1.bias"]
    assert b'"frozen"' not in plain


POOLS = [
    (kind, extent, size, stride, padding, counted)
    for kind in ("max", "mean")
    for extent in (5, 6, 7, 9)
    for size in (2, 3, 4)
    for stride in (1, 2, 3, 4)
    for padding in range(size // 2 + 1)
    for counted in ((True, False) if kind == "mean" else (False,))
]


@pytest.mark.full
def test_pools_that_round_up_pass_the_full_check_and_are_right():
    """All geometries of one axis beside a fixed one: the checker's shapes, and onnxruntime's numbers, are those of the layer."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    for kind, extent, size, stride, padding, counted in POOLS:
        how = {"stride": (stride, 2), "padding": (padding, 1), "ceil_mode": True}
        layer = nbcnn.MaxPool2d((size, 3), **how) if kind == "max" else nbcnn.AvgPool2d((size, 3), **how, count_include_pad=counted)
        model = nbcnn.Model([layer], mode="cpu").build((2, extent, 8))
        made = to_onnx(model)
        onnx.checker.check_model(made, full_check=True)
        x = np.random.default_rng(1).integers(0, 256, (2, 2, extent, 8), dtype=np.uint8)
        (found,) = runtime.InferenceSession(made.SerializeToString()).run(None, {"x": (x / np.float32(255)).astype(np.float32)})
        # Means of at most 12 numbers of at most 1.
        np.testing.assert_allclose(found, model.predict(x), rtol=0, atol=12 * 2**-24)


@pytest.mark.parametrize("kind", [each for each in ELEMENTWISE if each.elsewhere.onnx], ids=lambda kind: kind.__name__)
def test_the_op_that_an_activation_names_is_written_and_read(kind):
    model = nbcnn.Model([nbcnn.Linear(3), kind()], mode="cpu", input_shape=(4,))
    file = to_onnx(model)
    assert kind.elsewhere.onnx in [node.op_type for node in file.graph.node]
    # Without the notes of nbcnn the ops alone say what it was.
    del file.metadata_props[:]
    assert [type(layer) for layer in from_onnx(file, mode="cpu").layers][-1] is kind
