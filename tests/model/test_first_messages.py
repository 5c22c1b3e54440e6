"""What a guess at the form of a network is answered: it works as in Keras or PyTorch, or the line to write is said."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import nbcnn
from nbcnn import Conv2d, Dropout, Flatten, Linear, ReLU
from nbcnn.files.errors import UsageError
from nbcnn.nn.joins import ALIASES, LOSSES
from nbcnn.nn.optim import optimizer_of

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


def test_what_is_no_callback_is_told_the_line_to_write():
    model = nbcnn.Model([Linear(2)], "cross_entropy", mode="cpu")
    for wrong, says in ((print, "got <built-in function print>"), (nbcnn.EarlyStopping, r"got <class .*>: write EarlyStopping\(\)")):
        with pytest.raises(UsageError, match=says):
            model.fit(X, FOURTH, callbacks=[wrong], verbose=0)


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


def test_names_of_keras_and_pytorch_mean_the_same_losses_and_optimizers():
    for name, own in ALIASES.items():
        assert nbcnn.Model([Linear(3)], name, mode="cpu").loss == LOSSES[own](), name
    assert not ALIASES.keys() & LOSSES.keys()
    with pytest.raises(UsageError, match=r"no loss 'categorical_crosentropy'; .* did you mean categorical_crossentropy\?"):
        nbcnn.Model([Linear(3)], "categorical_crosentropy", mode="cpu")
    assert optimizer_of("AdamW") == nbcnn.AdamW()
    assert optimizer_of("SGD") == nbcnn.SGD()


def test_same_padding_keeps_height_and_width_as_pytorchs():
    for kernel, dilation, padding in ((3, 1, 1), (1, 1, 0), (4, 1, (1, 2, 1, 2)), ((5, 3), (1, 2), 2), ((2, 7), 1, (0, 1, 3, 3))):
        layer = nbcnn.Conv2d(2, kernel, dilation=dilation, padding="same")
        assert layer.padding == padding
        assert nbcnn.Model([layer], mode="cpu").build((3, 9, 8)).net.output_shape == (2, 9, 8)
    assert nbcnn.Conv2d(2, 3, padding="valid") == nbcnn.Conv2d(2, 3)
    with pytest.raises(UsageError, match=r'padding="same" is for stride 1, got stride 2: padding=\(1, 2, 1, 2\) gives ⌈height/stride⌉ rows'):
        nbcnn.Conv2d(2, 4, stride=2, padding="same")
    assert nbcnn.Model([nbcnn.Conv2d(2, 4, stride=2, padding=(1, 2, 1, 2))], mode="cpu").build((3, 9, 8)).net.output_shape == (2, 5, 4)
    with pytest.raises(UsageError, match="no padding 'full'"):
        nbcnn.Conv2d(2, padding="full")


def test_one_layer_object_twice_in_a_list_is_refused_where_it_has_weights():
    with pytest.raises(UsageError, match=r"layers 1 and 3 of the list are one Linear object.* \[Linear\(…\), Linear\(…\)\] .* layer\(layer\(x\)\)"):
        nbcnn.Model([shared := Linear(4), ReLU(), shared], "mse", mode="cpu").build((4,))
    relu, drop = ReLU(), Dropout(0.5)
    assert nbcnn.Model([Linear(4), relu, drop, Linear(4), relu, drop], "mse", mode="cpu").build((4,)).net.params.count == 40
    x, layer = nbcnn.Input((4,)), Linear(4)
    assert nbcnn.Model(x, layer(layer(x)), "mse", mode="cpu").net.params.count == 20, "the line that the message shows"


def test_the_last_examples_are_set_aside_before_any_are_shuffled():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 4), dtype=np.uint8), np.arange(20) % 2

    def fitted(*data, **options):
        return nbcnn.Model([Linear(2)], "cross_entropy", mode="cpu").fit(*data, epochs=2, batch_size=4, verbose=0, **options)

    split = fitted(x, y, validation_split=0.2)
    by_hand = fitted(x[:16], y[:16], validation_data=(x[16:], y[16:]))
    assert [split.history[name] for name in ("loss", "val_loss", "step")] == [by_hand.history[name] for name in ("loss", "val_loss", "step")]
    assert fitted(list(x), list(y), validation_split=0.2).history["val_loss"] == split.history["val_loss"]
    squares = [np.full((4, 4), number, np.uint8) for number in range(10)]  # a list of grey images is no tuple of inputs
    assert (
        "val_loss" in nbcnn.Model([Flatten(), Linear(2)], "cross_entropy", mode="cpu").fit(squares, y[:10], validation_split=0.2, verbose=0).history
    )
    a, b = nbcnn.Input((4,)), nbcnn.Input((4,))
    both = nbcnn.Model([a, b], [Linear(2)(a), Linear(2)(b)], "mse", mode="cpu")
    z = np.ones((20, 2), np.float32)
    assert "val_loss" in both.fit((x, x), (z, z), validation_split=0.2, verbose=0).history
    same = nbcnn.Model([Linear(4)], "mse", mode="cpu").fit(x, validation_split=0.5, verbose=0)
    assert len(same.history["val_loss"]) == 1
    for options, says in (
        ({"validation_split": 1.0}, "validation_split"),
        ({"validation_split": 0.99}, "leaves 0 to train on and 20 to validate by"),
        ({"validation_split": 0.2, "validation_data": (x, y)}, "exclude each other"),
    ):
        with pytest.raises(UsageError, match=says):
            fitted(x, y, **options)
    with pytest.raises(UsageError, match="x is a callable"):
        fitted(lambda epoch: [(x, y)], validation_split=0.2)
    with pytest.raises(UsageError, match="there are 19 targets for 20 examples"):
        fitted(x, y[:19], validation_split=0.2)


X = np.linspace(0, 1, 400, dtype=np.float32).reshape(100, 4)
Y = 100 * X[:, 0]
FOURTH = (Y > 75).astype(np.int64)  # the smaller class has 25 of 100
WEIGHED = nbcnn.SoftmaxCrossEntropy(weight=(1.0, 3.0), label_smoothing=0.1)


@pytest.mark.parametrize(
    ("loss", "y", "rate", "same"),
    [
        ("mse", Y, 0.1, np.var(Y)),
        ("l1", Y, 1e3, np.abs(Y - np.median(Y)).mean()),
        (nbcnn.Huber(delta=2.0), Y, 1e3, np.mean([2 * d - 2 if d > 2 else d * d / 2 for d in abs(Y - Y.mean())])),
        ("bce", FOURTH.astype(np.float32), 1e3, -0.75 * np.log(0.75) - 0.25 * np.log(0.25)),
        ("cross_entropy", FOURTH, 1e3, -0.75 * np.log(0.75) - 0.25 * np.log(0.25)),
    ],
)
def test_a_network_no_better_than_one_answer_is_warned_of(loss, y, rate, same):
    model = nbcnn.Model([Linear(32), ReLU(), Linear(2 if loss == "cross_entropy" else 1)], loss, mode="cpu")
    with pytest.warns(UserWarning, match=rf"than the {same:.3g} of giving all.* \(SGD, lr {rate:g}: try Adam\(\) or lr {rate / 10:g}\)") as warned:
        model.fit(X, y, epochs=3, batch_size=10, optimizer=nbcnn.SGD(lr=nbcnn.Constant(rate)), verbose=0)
    assert [each.filename for each in warned] == [__file__]
    assert ("standardise" in str(warned[0].message)) == (y is Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nbcnn.Model(model.layers, mode="cpu").fit(X, y / 100 if y is Y else y, epochs=9, batch_size=10, optimizer=nbcnn.Adam(lr=0.03), verbose=0)


def test_an_autoencoder_and_several_outputs_are_warned_of_too():
    images = np.random.default_rng(0).integers(0, 256, (64, 16), dtype=np.uint8)
    x = nbcnn.Input((4,))
    both = nbcnn.Model(x, [Linear(1)(x), Linear(2)(x)], ["mse", "mse"], mode="cpu")
    for model, data, same in (
        (nbcnn.Model([Linear(16)], "mse", mode="cpu"), (images,), (images / 255).var(0).mean()),
        (both, (X, (X[:, :1], X[:, :2])), X[:, :1].var(0).mean() + X[:, :2].var(0).mean()),
    ):
        advice = r"most often too small \(SGD, lr 1e-09: try Adam\(\) or lr 0.1\)"
        with pytest.warns(UserWarning, match=f"no less than the {same:.3g} of giving.*{advice}"):
            model.fit(*data, epochs=2, optimizer=nbcnn.SGD(lr=nbcnn.Constant(1e-9), momentum=0.0), verbose=0)


@pytest.mark.parametrize("loss", ["mse", "l1", "bce", "cross_entropy", WEIGHED, nbcnn.SoftmaxCrossEntropy(ignore_index=1)])
def test_the_same_answer_is_the_best_one(loss):
    loss = nbcnn.Model([Linear(1)], loss, mode="cpu").loss
    targets = FOURTH if loss.needs_labels else FOURTH[:, None] * 0.5 if loss.kind == "bce" else Y[:, None]
    answer = loss.same(targets, 2)
    width = len(answer)

    def of(given):
        lost, weight = loss.measure(np.broadcast_to(given, (100, width)), targets)
        return lost / weight

    for step in (-2.0, 2.0):
        assert of(answer + step * np.eye(width)[0]) >= of(answer)


def test_a_warning_of_large_floats_names_the_line_that_gave_them():
    model = nbcnn.Model([Linear(1)], "mse", mode="cpu")
    with pytest.warns(UserWarning, match="taken as they are") as warned:
        model.fit(X * 255, Y, verbose=0)
    assert [each.filename for each in warned] == [__file__]
    with pytest.warns(UserWarning, match="the network was trained on floats") as warned:
        model.predict(X * -9999)
    assert [each.filename for each in warned] == [__file__]
