"""Tests of what training does to an imported network: weights that nodes share stay one, what the file does not have stays as it is, its loss is of
its scores alone, and a softmax at the end is the loss's own."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)")

from onnx import TensorProto, helper, numpy_helper

import nbcnn
import nbcnn.onnx
from nbcnn.onnx import UnsupportedNodes, from_onnx

RNG = np.random.default_rng(7)
X = RNG.uniform(-1, 1, (3, 4, 8, 6)).astype(np.float32)


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def file(nodes, tensors, outputs=("y",), shape=("n", 4, 8, 6), labels=()):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT64, ("n",)) for name in labels]
    made = helper.make_graph(
        nodes,
        "test",
        inputs,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(each), name) for name, each in tensors.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def shared(kind):
    """Two nodes that share a weight and have biases of their own, summed: the nodes and tensors, and how many trained numbers there are."""
    if kind == "conv":
        nodes = [node("Conv", "x w b", "p"), node("Conv", "x w c", "q"), node("Relu", "q", "r"), node("Sub", "p r", "y")]
        return nodes, {"w": random(4, 4, 1, 1), "b": random(4), "c": random(4)}, 24
    if kind == "gemm":
        nodes = [node("Flatten", "x", "f"), node("Gemm", "f w b", "p", transB=1), node("Gemm", "f w c", "q", transB=1)]
        return [*nodes, node("Tanh", "q", "r"), node("Add", "p r", "y")], {"w": random(5, 192), "b": random(5), "c": random(5)}, 970
    nodes = [
        node("InstanceNormalization", "x w b", "p"),
        node("InstanceNormalization", "x w c", "q"),
        node("Relu", "q", "r"),
        node("Add", "p r", "y"),
    ]
    return nodes, {"w": random(4), "b": random(4), "c": random(4)}, 12


@pytest.mark.parametrize("kind", ["conv", "gemm", "norm"])
def test_a_weight_that_two_nodes_read_beside_different_biases_stays_one(kind):
    nodes, tensors, count = shared(kind)
    model = from_onnx(file(nodes, tensors), loss="mse", mode="cpu")
    layout = model.net.params.layout
    trained = [name for name in layout.names if model._factors.get(name, nbcnn.nn.optim.PLAIN).lr]
    assert sum(layout.params[name].shape and int(np.prod(layout.params[name].shape)) for name in trained) == count
    target = np.zeros_like(model.predict(X))
    before = model.net.params.as_dict()
    model.fit(X, target, optimizer=nbcnn.SGD(lr=0.1, weight_decay=0.1), epochs=2, verbose=0)
    after = model.net.params.as_dict()
    for name in layout.names:
        assert (after[name] != before[name]).any() == (name in trained), name


def test_a_weight_that_no_layer_can_share_is_refused():
    nodes = [node("Conv", "x w", "p"), node("ConvTranspose", "p w", "y")]
    with pytest.raises(UnsupportedNodes, match="with 'w': a tensor that is trained as the weight of a Conv2d already"):
        from_onnx(file(nodes, {"w": random(4, 4, 1, 1)}), mode="cpu")


TIED = {
    "Transpose": ([node("Transpose", "w", "v", perm=[1, 0])], (8, 8), "MatMul"),
    "Reshape": ([node("Reshape", "w s", "v")], (4, 16), "MatMul"),
    "Unsqueeze": ([node("Unsqueeze", "w a", "v")], (8,), "Mul"),
    "Squeeze": ([node("Squeeze", "w a", "v")], (1, 8), "Mul"),
    "Identity": ([node("Identity", "w", "v")], (8, 8), "MatMul"),
    "Transpose, Transpose": ([node("Transpose", "w", "u"), node("Transpose", "u", "v")], (8, 8), "MatMul"),
}
"""Ways to the constant v from a weight w: the nodes, the shape of w, and the op that reads v."""


@pytest.mark.parametrize("way", TIED)
def test_a_weight_that_is_read_in_another_order_twice_stays_one(way):
    moves, shape, op = TIED[way]
    again = [helper.make_node(each.op_type, [name + "2" if name in "uv" else name for name in each.input], [each.output[0] + "2"]) for each in moves]
    for old, new in zip(moves, again, strict=True):
        new.attribute.extend(old.attribute)
    tensors = {"w": random(*shape), "s": np.array([8, 8]), "a": np.array([0])}
    nodes = [*moves, *again, node(op, "x v", "p"), node("Tanh", "p", "q"), node(op, "q v2", "y")]
    model = from_onnx(file(nodes, tensors, shape=("n", 8)), loss="mse", mode="cpu")
    assert model.net.params.count == tensors["w"].size


def test_a_weight_and_its_transpose_are_refused():
    nodes = [node("MatMul", "x w", "p"), node("Transpose", "w", "v", perm=[1, 0]), node("MatMul", "p v", "y")]
    with pytest.raises(UnsupportedNodes, match="with 'w': a tensor that is trained as the weight of a Linear already"):
        from_onnx(file(nodes, {"w": random(8, 8)}, shape=("n", 8)), mode="cpu")


@pytest.mark.parametrize(
    "nodes",
    [[node("Mul", "w two", "v")], [node("Slice", "w zero four", "v")], [node("Neg", "w", "u"), node("Transpose", "u", "v", perm=[0, 1, 3, 2])]],
)
def test_a_parameter_that_is_computed_of_a_trained_array_is_refused(nodes):
    """As a weight 2·w would take other steps than w, and one that is frozen none."""
    tensors = {"w": random(4, 4, 1, 1), "two": np.float32(2), "zero": np.array([0]), "four": np.array([4])}
    with pytest.raises(UnsupportedNodes, match=r"with 'w': a weight that is computed of one that is trained.*fold the constants"):
        from_onnx(file([*nodes, node("Conv", "x v", "y")], tensors), mode="cpu")


def test_factors_of_a_gemm_are_not_in_its_weights():
    nodes = [node("Flatten", "x", "f"), node("Gemm", "f w b", "y", alpha=0.5, beta=-3.0)]
    tensors = {"w": random(192, 3), "b": random(3)}
    model = from_onnx(file(nodes, tensors), mode="cpu")
    assert {each.size: each for each in model.weights().values()}.keys() == {576, 3}
    np.testing.assert_array_equal(
        np.sort(np.concatenate([each.ravel() for each in model.weights().values()])), np.sort([*tensors["w"].ravel(), *tensors["b"]])
    )
    wanted = 0.5 * X.reshape(3, -1).astype(np.float64) @ tensors["w"] - 3 * tensors["b"].astype(np.float64)
    # 192 products of terms of size 3 at most, in float32.
    np.testing.assert_allclose(model.predict(X), wanted, rtol=0, atol=192 * 3 * 2**-24)


def test_one_number_beside_all_columns_of_a_gemm_is_a_constant():
    nodes = [node("Flatten", "x", "f"), node("Gemm", "f w b", "y")]
    model = from_onnx(file(nodes, {"w": random(192, 3), "b": random(1)}), mode="cpu")
    assert model.net.params.count == 576


NUMBERS = {
    "a factor": (lambda x, w: x * w, [node("Mul", "x w", "y")], (1,)),
    "a sum": (lambda x, w: w - x, [node("Sub", "w x", "y")], ()),
    "a divisor": (lambda x, w: x / w, [node("Div", "x w", "y")], (4, 1, 1)),
    "a largest": (lambda x, w: np.maximum(x, w), [node("Max", "x w", "y")], (1,)),
    "a choice": (lambda x, w: np.where(np.arange(6) < 3, x, w), [node("Where", "m x w", "y")], (1,)),
}
"""What a file does with x and numbers w: in NumPy, as nodes, and the shape of w."""


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_that_may_be_trained_are_warned_of_and_trained_if_asked_for(kind):
    function, nodes, shape = NUMBERS[kind]
    w = (0.3 + np.abs(random(*shape))).astype(np.float32)
    content = file(nodes, {"w": w, "m": np.arange(6) < 3}) if kind == "a choice" else file(nodes, {"w": w})
    with pytest.warns(UserWarning, match=r"the bytes: 'w': constants here, .*numbers=\['w', …\]"):
        left = from_onnx(content, loss="mse", mode="cpu")
    assert left.net.params.count == 0 or all(not factor.lr for factor in left._factors.values())
    model = from_onnx(content, numbers=["w"], loss="mse", mode="cpu")
    np.testing.assert_allclose(model.predict(X), function(X.astype(np.float64), w), rtol=4 * 2**-24, atol=4 * 2**-24)
    name, value = trained_one(model)
    assert value.size == w.size
    step = 2.0**-20 * np.ones(w.shape)
    low, high = (np.square(function(X.astype(np.float64), w + sign * step)).mean((0, 2, 3)) for sign in (-1, 1))
    slope = ((high - low) / 2**-19 / 4).reshape(4, 1)
    slope = slope.sum() if w.size == 1 else slope[:, 0]
    before = value.copy()
    model.fit(X, X * 0, epochs=1, batch_size=3, optimizer=nbcnn.SGD(lr=0.5, momentum=0.0), verbose=0)
    moved = (before - model.weights()[name]).ravel() / 0.5
    # Differences over 2⁻¹⁹ are right to 2⁻³⁴ of a value of size 10; the steps are float32, of weights of size 1.
    np.testing.assert_allclose(np.sign(before.ravel()[0] * w.ravel()[0]) * moved, slope, rtol=1e-4, atol=4 * 2**-24)


def trained_one(model):
    """The one parameter that is trained, by name."""
    (found,) = [name for name in model.weights() if name not in model.frozen() and "running" not in name]
    return found, model.weights()[found]


def test_what_exporters_number_is_not_warned_of(recwarn):
    from_onnx(file([node("Mul", "x val_3", "y")], {"val_3": np.float32(0.5)}), mode="cpu")
    assert not [each for each in recwarn if each.category is UserWarning]


@pytest.mark.parametrize("numbers", [["v"], "w", ["x"]])
def test_numbers_that_the_file_does_not_have_are_refused(numbers):
    with pytest.raises(nbcnn.UsageError, match="no initialiser of the file"):
        from_onnx(file([node("Mul", "x w", "y")], {"w": np.float32(2)}), numbers=numbers, mode="cpu")


def test_a_number_that_is_computed_of_a_trained_one_is_refused():
    content = file([node("Exp", "w", "v"), node("Mul", "x v", "y")], {"w": random(1)})
    from_onnx(content, mode="cpu")
    with pytest.raises(UnsupportedNodes, match="with 'w': a weight that is computed of one that is trained"):
        from_onnx(content, numbers=["w"], mode="cpu")


def test_a_changed_file_of_ours_trains_single_numbers_as_its_network_did():
    """EvoNorm of one channel is nodes with single numbers; renamed, the node is no longer the noted network's."""
    model = nbcnn.Model([nbcnn.Conv2d(1, 3), nbcnn.EvoNormB0()], "mse", mode="cpu", seed=2).build((4, 8, 6))
    model.freeze("evonorm1.beta")
    made = nbcnn.onnx.to_onnx(model)
    made.graph.node[0].doc_string = "changed"
    again = from_onnx(made.SerializeToString(), mode="cpu")
    assert not any(isinstance(each, nbcnn.EvoNormB0) for each in again.layers)
    kept = {name: each for name, each in model.weights().items() if name not in model.frozen() and not name.endswith("running")}
    found = {name: each for name, each in again.weights().items() if name not in again.frozen() and "running" not in name}
    assert sorted(each.size for each in found.values()) == sorted(each.size for each in kept.values())
    for each in kept.values():
        assert any(np.array_equal(each.ravel(), other.ravel()) for other in found.values())


def test_what_the_file_does_not_have_is_not_trained():
    """x + c has no factor that could be trained."""
    model = from_onnx(file([node("Add", "x c", "y")], {"c": random(4, 1, 1)}), loss="mse", mode="cpu")
    assert [name for name, factor in model._factors.items() if not factor.lr] == [model.layers.names[0] + ".weight"]
    model.fit(X, X * 0, verbose=0)
    (name,) = model._factors
    np.testing.assert_array_equal(model.weights()[name], 1)


def test_a_trained_vector_of_the_last_axis_is_one_vector():
    """A scale of the last of three axes is one parameter for each of its elements, not one for every element of the example."""
    made = from_onnx(file([node("Mul", "x g", "y")], {"g": random(6)}), mode="cpu")
    assert made.net.params.count == 6
    np.testing.assert_array_equal(made.predict(X), X * made.weights()[made.net.params.names[0]].reshape(6))


def test_the_loss_of_a_file_is_of_its_scores_alone():
    nodes = [
        node("GlobalAveragePool", "x", "g"),
        node("Flatten", "g", "feat"),
        node("Gemm", "feat w b", "logits"),
        node("SoftmaxCrossEntropyLoss", "logits t", "loss"),
    ]
    tensors = {"w": random(4, 3), "b": random(3)}
    labels = np.array([0, 2, 1])
    made = from_onnx(file(nodes, tensors, ("loss", "feat", "logits"), labels=("t",)), mode="cpu")
    logits = X.mean((2, 3)).astype(np.float64) @ tensors["w"] + tensors["b"]
    wanted = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(3), labels])
    # The terms are of size 1, and their sums have at most 48 of them.
    assert abs(made.evaluate(X, labels)["loss"] - wanted) < 1e-5
    assert made.predict(X).shape == (3, 3)
    both = from_onnx(file(nodes, tensors, ("loss", "feat", "logits"), labels=("t",)), loss="cross_entropy", mode="cpu")
    assert [each.shape for each in both.predict(X)] == [(3, 4), (3, 3)]


def test_a_softmax_at_the_end_is_the_cross_entropys_own():
    nodes = [node("Flatten", "x", "f"), node("Gemm", "f w", "z"), node("Softmax", "z", "y", axis=1)]
    w = random(192, 3) / 16
    labels = np.array([0, 2, 1])
    model = from_onnx(file(nodes, {"w": w}), loss="cross_entropy", mode="cpu")
    bare = from_onnx(file(nodes[:2], {"w": w}, ("z",)), loss="cross_entropy", mode="cpu")
    np.testing.assert_array_equal(model.predict_proba(X), model.predict(X))
    np.testing.assert_allclose(model.predict(X), bare.predict_proba(X), rtol=0, atol=3 * 2**-24)
    # log p of a p that is a rounded float32: 2⁻²⁴ relative, so absolute of the logarithm.
    assert abs(model.evaluate(X, labels)["loss"] - bare.evaluate(X, labels)["loss"]) < 1e-6
    for each in (model, bare):
        each.fit(X, labels, epochs=3, shuffle=False, verbose=0)
    for one, other in zip(model.weights().values(), bare.weights().values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_softmax_that_a_file_takes_the_softmax_of_stays_behind_a_reshape():
    nodes = [node("Conv", "x w", "z"), node("Softmax", "z", "p", axis=1), node("Reshape", "p s", "q"), node("SoftmaxCrossEntropyLoss", "q t", "loss")]
    w, labels = random(3, 4, 1, 1), RNG.integers(0, 3, (3, 1, 48))
    model = from_onnx(file(nodes, {"w": w, "s": np.array([0, 3, 1, 48])}, ("loss",), labels=("t",)), mode="cpu")
    z = np.einsum("kc,nchw->nkhw", w[:, :, 0, 0].astype(np.float64), X).reshape(3, 3, 48)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    wanted = np.mean(np.log(np.exp(p).sum(1)) - np.take_along_axis(p, labels, 1)[:, 0])
    assert abs(model.evaluate(X, labels)["loss"] - wanted) < 1e-6
