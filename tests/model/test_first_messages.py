"""What a guess at the form of a network is answered: it works as in Keras or PyTorch, or the line to write is said."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
from nbcnn import Conv2d, Dropout, Flatten, Linear, ReLU
from nbcnn.files.errors import UsageError

EPS = 2.0**-24


def test_names_of_classes_are_counted_before_anything_is_trained():
    with pytest.raises(UsageError, match="classes names 2 classes, and the network's output has 3"):
        nbcnn.Model([Linear(3)], "cross_entropy", mode="cpu", classes=["a", "b"]).fit(np.zeros((3, 2), np.uint8), [0, 1, 2], verbose=0)
    with pytest.raises(UsageError, match="classes names 4 classes, and the network's output has 3"):
        nbcnn.Model([Linear(3)], "cross_entropy", mode="cpu", classes="abcd", input_shape=(2,))
    assert nbcnn.Model([Linear(3)], "cross_entropy", mode="cpu", classes="abc", input_shape=(2,)).classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nbcnn.Model(Conv2d(8, 3), ReLU()), r"layers go into one list: Model\(\[Conv2d\(…\), ReLU\(…\)\], loss=…\)"),
        (
            lambda: nbcnn.Model(Conv2d(8, 3), ReLU(), Flatten(), Linear(2), nbcnn.MSE()),
            r"Model\(\[Conv2d\(…\), ReLU\(…\), Flatten\(…\), Linear\(…\)\]",
        ),
        (lambda: nbcnn.Model(Linear(2)), r"a list of layers, got Linear: Model\(\[Linear\(…\), …\], loss=…\)"),
        (lambda: nbcnn.Model([Linear(2), "mse"]), r"The loss follows the list: Model\(\[…\], loss='mse'\)"),
        (lambda: nbcnn.Model([Linear(2)], "mse", None, "cpu"), r"name the others, as in mode=…"),
        (lambda: nbcnn.Input(3, 32, 32), r"one tuple: Input\(\(3, 32, 32\)\)"),
        (lambda: nbcnn.Input((3, 8, 8)) + ReLU(), r"got the layer ReLU: call it on a value first, ReLU\(…\)\(x\)"),
        (lambda: nbcnn.Input((3, 8, 8)) * "2", "or a value and a number, got '2'"),
        (lambda: nbcnn.Input((3, 8, 8)) / 0, "divided by a number other than 0, got 0"),
    ],
)
def test_a_wrong_guess_is_told_the_line_to_write(make, says):
    with pytest.raises(UsageError, match=says):
        make()


def test_values_take_numbers():
    x = nbcnn.Input((2,))
    given = np.array([[0.25, 1.0], [0.5, 0.75]], np.float32)
    for value, expected in (
        (x * 2 + 1, 2 * given + 1),
        (1 - x / np.float32(4), 1 - given / 4),
        (np.float64(0.5) * x - 3, given / 2 - 3),
        (x - x * x, given - given**2),
        (-x, -given),
    ):
        np.testing.assert_allclose(nbcnn.Model(x, value, mode="cpu").predict(given), expected, atol=4 * EPS)


def test_a_loss_of_a_graph_has_a_name():
    x = nbcnn.Input((2,))
    y = Linear(3)(x)
    assert nbcnn.Graph.of(x, y, "cross_entropy") == nbcnn.Graph.of(x, y, nbcnn.SoftmaxCrossEntropy())
    assert nbcnn.Graph.of(x, [y, x], "mse").loss == nbcnn.Losses((nbcnn.MSE(), nbcnn.MSE()))
    with pytest.raises(UsageError, match="no loss 'mze'; there are cross_entropy, mse,"):
        nbcnn.Graph.of(x, y, "mze")
    with pytest.raises(UsageError, match="loss must be one of"):
        nbcnn.Graph.of(x, y, 3)


def test_one_layer_object_twice_in_a_list_is_refused_where_it_has_weights():
    with pytest.raises(UsageError, match=r"layers 1 and 3 of the list are one Linear object.* \[Linear\(…\), Linear\(…\)\] .* layer\(layer\(x\)\)"):
        nbcnn.Model([shared := Linear(4), ReLU(), shared], "mse", mode="cpu").build((4,))
    relu, drop = ReLU(), Dropout(0.5)
    assert nbcnn.Model([Linear(4), relu, drop, Linear(4), relu, drop], "mse", mode="cpu").build((4,)).net.params.count == 40
    x, layer = nbcnn.Input((4,)), Linear(4)
    assert nbcnn.Model(x, layer(layer(x)), "mse", mode="cpu").net.params.count == 20, "the line that the message shows"
