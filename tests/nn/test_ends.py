"""Tests of losses of networks that end in the loss's own activation: the loss is that of what comes before it, outputs are probabilities."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn

X = np.random.default_rng(1).integers(0, 256, (12, 5), dtype=np.uint8)


def pair(loss, end):
    """A network with the activation at its end and the same one without."""
    return [nbcnn.Model([nbcnn.Linear(3), *ends], loss, mode="cpu").build((5,)) for ends in ((end,), ())]


@pytest.mark.parametrize(
    ("loss", "end", "y"),
    [
        ("cross_entropy", nbcnn.Softmax(), np.arange(12) % 3),
        (nbcnn.SoftmaxCrossEntropy(label_smoothing=0.1, ignore_index=2), nbcnn.Softmax(), np.arange(12) % 3),
        ("bce", nbcnn.Sigmoid(), (np.arange(36).reshape(12, 3) % 2).astype(np.float32)),
    ],
)
def test_training_is_that_of_the_logits_and_outputs_are_probabilities(loss, end, y):
    ended, bare = pair(loss, end)
    histories = [each.fit(X, y, epochs=3, batch_size=4, verbose=0).history["loss"] for each in (ended, bare)]
    assert histories[0] == histories[1]
    for one, other in zip(ended.weights().values(), bare.weights().values(), strict=True):
        np.testing.assert_array_equal(one, other)
    z = bare.predict(X).astype(np.float64)
    wanted = 1 / (1 + np.exp(-z)) if loss == "bce" else np.exp(z) / np.exp(z).sum(1, keepdims=True)
    # A probability is at most 1, of a handful of roundings.
    np.testing.assert_allclose(ended.predict(X), wanted, rtol=0, atol=8 * 2**-24)
    assert abs(ended.evaluate(X, y)["loss"] - bare.evaluate(X, y)["loss"]) < 1e-6
    if loss != "bce":
        np.testing.assert_array_equal(ended.predict_proba(X), ended.predict(X))


@pytest.mark.parametrize(
    ("ends", "classes"),
    [
        ([nbcnn.Reshape((3, 1, 1)), nbcnn.Softmax(), nbcnn.Flatten()], True),
        ([nbcnn.Softmax(), nbcnn.Reshape((3, 1, 1)), nbcnn.Reshape((3,))], True),
        ([nbcnn.Reshape((1, 3, 1)), nbcnn.Softmax(), nbcnn.Flatten()], False),
    ],
)
def test_moves_between_the_activation_and_the_loss_stay(ends, classes):
    """Unless they make other classes: of one class a softmax is 1, and 3 classes are made of 3 pixels."""
    made, bare = [nbcnn.Model([nbcnn.Linear(3), *each], "cross_entropy", mode="cpu").build((5,)) for each in (ends, [])]
    assert made.net.ended == [classes]
    y = np.arange(12) % 3
    histories = [each.fit(X, y, epochs=2, batch_size=4, verbose=0).history["loss"] for each in (made, bare)]
    assert (histories[0] == histories[1]) == classes
    if classes:
        np.testing.assert_array_equal(made.predict_proba(X).reshape(12, 3), made.predict(X).reshape(12, 3))


def test_a_sigmoid_behind_which_elements_move_is_an_end():
    y = (np.arange(36).reshape(12, 3) % 2).astype(np.float32)
    models = [nbcnn.Model([nbcnn.Linear(3), *ends, nbcnn.Reshape((1, 3, 1))], "bce", mode="cpu").build((5,)) for ends in ([nbcnn.Sigmoid()], [])]
    histories = [each.fit(X, y.reshape(12, 1, 3, 1), epochs=2, batch_size=4, verbose=0).history["loss"] for each in models]
    assert histories[0] == histories[1]


def test_an_activation_that_another_part_reads_stays():
    x = nbcnn.Input((5,))
    p = nbcnn.Softmax()(nbcnn.Linear(3)(x))
    model = nbcnn.Model(x, [p, nbcnn.Linear(3)(p)], loss="cross_entropy", mode="cpu")
    value = model.fit(X, (np.arange(12) % 3, np.arange(12) % 3), verbose=0).history["loss"][-1]
    assert np.isfinite(value)
    assert model.net.ended == [True, False]


def test_softmax_in_the_middle_is_no_end():
    model = nbcnn.Model([nbcnn.Linear(3), nbcnn.Softmax(), nbcnn.Linear(2)], "cross_entropy", mode="cpu").build((5,))
    assert model.net.ended == [False]
    assert nbcnn.Model([nbcnn.Linear(3), nbcnn.Softmax()], "mse", mode="cpu").build((5,)).net.ended == [False]
