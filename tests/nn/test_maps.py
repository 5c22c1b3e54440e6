"""Tests of the layers that move elements or mix them along an axis: what they compute, how they are described, what they refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest

import nbcnn
from nbcnn.nn import description
from nbcnn.plan.graph import ShapeError
from nbcnn.run.net import Net

X = np.random.default_rng(3).standard_normal((2, 4, 6, 5)).astype(np.float32)


def made(*layers, x=X):
    return Net(list(layers), x.shape[1:], mode="cpu").predict(x)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_a_linear_map_is_a_product_with_its_matrix(axis):
    indices, weights = ((0, 2, 1), (), (3, 3)), ((0.5, -1.0, 2.0), (), (1.0, 0.25))
    matrix = np.zeros((3, X.shape[axis]))
    for row, (at, factor) in enumerate(zip(indices, weights, strict=True)):
        np.add.at(matrix[row], list(at), factor)
    wanted = np.moveaxis(np.tensordot(matrix, X.astype(np.float64), (1, axis)), 0, axis)
    np.testing.assert_allclose(made(nbcnn.LinearMap(axis, X.shape[axis], indices=indices, weights=weights)), wanted, rtol=1e-6, atol=1e-6)


def test_a_linear_map_without_weights_takes_elements():
    np.testing.assert_array_equal(made(nbcnn.LinearMap(3, 5, indices=((4,), (4,), (0,)))), X[..., [4, 4, 0]])


def test_permute_is_a_transposition():
    np.testing.assert_array_equal(made(nbcnn.Permute((2, 0, 1))), X.transpose(0, 3, 1, 2))
    shuffled = made(nbcnn.Permute((1, 0, 2), (2, 2, 30)), nbcnn.Reshape((4, 6, 5)))
    np.testing.assert_array_equal(shuffled, X[:, [0, 2, 1, 3]])
    np.testing.assert_array_equal(made(nbcnn.Permute((0,)), x=X.reshape(2, -1)), X.reshape(2, -1))


def test_log_softmax_is_finite_where_softmax_is_not():
    x = np.array([[0, 300, -300]], np.float32)
    np.testing.assert_allclose(made(nbcnn.LogSoftmax(), x=x), [[-300, 0, -600]])


def test_layers_with_tables_are_described():
    layers = [
        nbcnn.LinearMap(1, 4, indices=((0, 1), ()), weights=((0.5, 1.0), ())),
        nbcnn.Permute((1, 0), (4, 30)),
        nbcnn.Clip(None, 2.0),
        nbcnn.LinearMap(2, 3, indices=((1,),)),
    ]
    assert description.from_data(json.loads(json.dumps(description.as_data(layers)))) == layers


def test_a_graph_keeps_names_of_its_own():
    x = nbcnn.Input((3, 4, 4))
    graph = nbcnn.Graph.of(x, nbcnn.ReLU()(nbcnn.Conv2d(2, 1)(x)), nbcnn.MSE())
    plain = description.dumps(graph, (3, 4, 4))
    assert "names" not in json.loads(plain)["graph"]
    named = description.dumps(nbcnn.Graph(graph.inputs, graph.layers, graph.calls, graph.outputs, graph.loss, ("stem", "act")), (3, 4, 4))
    assert description.loads(named, "here")["layers"].names == ("stem", "act", "mse1")
    for wrong in (["stem"], ["a", "a"], ["a", ""], ["a", "b@2"], ["a", 3]):
        data = json.loads(named)
        data["graph"]["names"] = wrong
        with pytest.raises(description.DescriptionError, match="names"):
            description.loads(json.dumps(data), "here")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: nbcnn.LinearMap(0, 4, indices=((0,),)), "axis 1 .channels."),
        (lambda: nbcnn.LinearMap(1, 4, indices=((4,),)), "whole numbers of 0 to 3"),
        (lambda: nbcnn.LinearMap(1, 4, indices=()), "a list of whole numbers"),
        (lambda: nbcnn.LinearMap(1, 4, indices=(0, 1)), "a list for each element"),
        (lambda: nbcnn.LinearMap(1, 4, indices=((0, 1),), weights=((1.0,),)), "a finite weight for each"),
        (lambda: nbcnn.LinearMap(1, 4, indices=((0,),), weights=((float("nan"),),)), "a finite weight for each"),
        (lambda: made(nbcnn.LinearMap(1, 3, indices=((0,),))), "map1 maps 3 elements of axis 1"),
        (lambda: nbcnn.Permute((0, 2)), "each axis of an example once"),
        (lambda: nbcnn.Permute((1, 0), (3,)), "a shape of as many axes"),
        (lambda: made(nbcnn.Permute((1, 0))), "permute1 orders 2 axes"),
        (lambda: made(nbcnn.Permute((1, 0), (7, 3))), "permute1 orders 2 axes of"),
        (lambda: nbcnn.Clip(2.0, 1.0), "at most the high one"),
        (lambda: nbcnn.Clip(float("nan")), "finite limits"),
        (lambda: nbcnn.Power(float("inf")), "finite exponent"),
        (lambda: nbcnn.Scale(1.0, float("nan")), "finite factor and shift"),
        (lambda: nbcnn.Threshold(float("nan")), "finite limit and value"),
    ],
)
def test_what_does_not_fit_is_refused(act, words):
    with pytest.raises((nbcnn.UsageError, ShapeError), match=words):
        act()
