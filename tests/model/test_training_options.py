"""Tests of what a training can be told: losses, accumulated batches, an average of the weights, optimizers; through `Model` and train.py."""

from __future__ import annotations

import numpy as np
import pytest
from scripts import exits, train
from teams import together

import nbcnn
from nbcnn import Conv2d, Flatten, Linear, ReLU
from nbcnn.files.errors import UsageError
from nbcnn.nn.optim import SGD
from nbcnn.nn.params import under
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train import checkpoint

COUNT = 11
X = np.random.default_rng(0).integers(0, 256, (COUNT, 1, 6, 5)).astype(np.uint8)
CLASSES = np.arange(COUNT) % 3
PIXELS = (X[:, 0] // 86).astype(int)
PIXELS[:, 0] = -1
VECTORS = np.stack([X.mean((1, 2, 3)), X.std((1, 2, 3))], 1).astype(np.float32) / 255


def classifier():
    return [Flatten(), Linear(5), ReLU(), Linear(3)]


def segmenter():
    return [Conv2d(4, 3, padding=1), ReLU(), Conv2d(3, 1)]


KINDS = {
    "smoothed": (classifier, nbcnn.SoftmaxCrossEntropy(label_smoothing=0.2), CLASSES),
    "weighted": (classifier, nbcnn.SoftmaxCrossEntropy(weight=(1, 2, 0.5)), CLASSES),
    "masked": (segmenter, nbcnn.SoftmaxCrossEntropy(ignore_index=-1), PIXELS),
    "l1": (lambda: [Flatten(), Linear(2)], "l1", VECTORS),
    "huber": (lambda: [Flatten(), Linear(2)], nbcnn.Huber(0.1), VECTORS),
    "bce": (lambda: [Flatten(), Linear(2)], "bce", VECTORS),
    "bce of the input": (lambda: [Conv2d(4, 3, padding=1), ReLU(), Conv2d(1, 3, padding=1)], "bce", None),
}


def trained(kind="smoothed", **options):
    layers, loss, y = KINDS[kind]
    model = nbcnn.Model(layers(), loss=loss, mode="cpu")
    return model, model.fit(X, y, **{"epochs": 2, "verbose": 0, "batch_size": 4, "optimizer": nbcnn.SGD(lr=0.05)} | options)


def weights(model):
    return model.net.params.as_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_is_learnt_and_evaluated_alike(kind, tmp_path):
    y = KINDS[kind][2]
    # The gradient of L1 does not shrink towards the least loss.
    optimizer = nbcnn.SGD(lr=0.01, momentum=0) if kind == "l1" else nbcnn.SGD(lr=0.05)
    model, history = trained(kind, epochs=8, optimizer=optimizer, validation_data=X if y is None else (X, y))
    assert history.history["loss"][-1] < history.history["loss"][0]
    found = model.evaluate(X) if y is None else model.evaluate(X, y, batch_size=3)
    # The kernels' loss is of float32 results, in other batches; its terms here are below 4.
    assert found["loss"] == pytest.approx(history.rows[-1]["val_loss"], rel=1e-5)
    assert found.get("accuracy") == history.rows[-1].get("val_accuracy")
    again = nbcnn.load(model.save(tmp_path / "model"), mode="cpu")
    assert again.loss == model.loss
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


@pytest.mark.parametrize("kind", ["smoothed", "l1"])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_batches_are_one_larger_batch(kind, accumulate):
    """Of 11 examples in batches of 4: two steps of eight and three, or one of all."""
    several, history = trained(kind, accumulate=accumulate, shuffle=False)
    one, whole = trained(kind, batch_size=min(4 * accumulate, COUNT), shuffle=False)
    assert history.rows[-1]["step"] == whole.rows[-1]["step"]
    assert history.history["loss"] == pytest.approx(whole.history["loss"], rel=1e-5)
    for name, value in weights(one).items():
        # The same sums of float32 in another order, in each of at most four steps: 11 terms below 4.
        np.testing.assert_allclose(weights(several)[name], value, atol=4 * 11 * 4 * 2**-23)


def session(team=None, count=COUNT, **options):
    net = Net([Flatten(), Linear(5), ReLU(), Linear(3), options.pop("loss", nbcnn.SoftmaxCrossEntropy(label_smoothing=0.1))], (1, 6, 5), mode="cpu")
    given = {"optimizer": SGD(nesterov=True), "learning_rates": np.full(6, 0.05, np.float32), "batch": 4, "labels": CLASSES[:count]} | options
    return TrainingSession(net, X[:count], **given, **({"team": team} if team else {}))


def test_the_average_of_the_weights_is_that_of_every_step():
    made = session(ema=0.5)
    average = made.net.params.download()[0]
    for step in range(3):
        made.step()
        share = np.float32(1 - min(0.5, (2 + step) / (11 + step)))
        average = average + share * (made.net.params.download()[0] - average)
    last = made.net.params.download()[0]
    with made.averaged():
        np.testing.assert_array_equal(made.net.params.download()[0], average)
    np.testing.assert_array_equal(made.net.params.download()[0], last)
    state = made.state()
    layout = made.net.params.layout
    np.testing.assert_array_equal(layout.join(under("param.", state)), average)
    np.testing.assert_array_equal(layout.join(under("optim.weights.", state)), last)
    made.close()
    np.testing.assert_array_equal(made.net.params.download()[0], average)


def test_a_model_is_evaluated_and_saved_by_the_average(tmp_path):
    model, history = trained(ema=0.9, epochs=6, validation_data=(X, CLASSES), run=tmp_path / "run")
    assert model.evaluate(X, CLASSES)["loss"] == pytest.approx(history.rows[-1]["val_loss"], rel=1e-5)
    plain, other = trained(epochs=6, validation_data=(X, CLASSES))
    assert history.history["loss"] == other.history["loss"]  # the weights that are trained do not know their average
    assert history.history["val_loss"] != other.history["val_loss"]
    again = nbcnn.load(tmp_path / "run", mode="cpu")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    last = under("optim.weights.", checkpoint.read(tmp_path / "run" / "checkpoint-last.safetensors").tensors)
    for name, value in weights(plain).items():
        np.testing.assert_array_equal(last[name], value)


def test_a_state_is_taken_up_bit_for_bit():
    """Nesterov, two batches per step, an average, labels that are ignored: after each step, in a new session."""
    options = {"accumulate": 2, "ema": 0.9, "loss": nbcnn.SoftmaxCrossEntropy(ignore_index=0, weight=(1, 2, 3), label_smoothing=0.1)}
    whole = session(**options)
    states = []
    for _ in range(2):
        whole.step()
        states.append(whole.state())
    other = session(**options)
    other.load_state(states[0])
    other.step()
    for name, value in states[1].items():
        np.testing.assert_array_equal(other.state()[name], value, err_msg=name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_train_as_one_process(accumulate):
    """Weights of classes and ignored labels: each rank has others, and all divide by what counts together. One rank has no image of the last step."""
    options = {
        "loss": nbcnn.SoftmaxCrossEntropy(ignore_index=0, weight=(1, 2, 3), label_smoothing=0.1),
        "accumulate": accumulate,
        "ema": 0.5,
        "test_images": X,
        "test_labels": CLASSES,
        "count": 9,
    }

    def work(team=None):
        made = session(team, **options)
        for _ in range(made.steps_per_epoch):
            made.step()
        return made.state(), made.status().loss_mean, made.evaluate()

    (alone, *losses), (first, second) = work(), together(2, work)
    for state, *found in (first, second):
        assert found == pytest.approx(losses, rel=1e-6)
        for name in (name for name in alone if alone[name].dtype == np.float32):
            # Three steps of float32 sums of nine terms, in another order.
            np.testing.assert_allclose(state[name], alone[name], atol=3 * 9 * 4 * 2**-23, err_msg=name)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(UsageError, match="a callable"):
        nbcnn.Model(classifier(), "cross_entropy", mode="cpu").fit(lambda epoch: [(X[:4], CLASSES[:4])], accumulate=2, verbose=0)
    with pytest.raises(UsageError, match="ema must be a number of at least 0 and less than 1"):
        trained(ema=1.0)
    with pytest.raises(UsageError, match="accumulate"):
        trained(accumulate=0)
    with pytest.raises(UsageError, match=r"labels\[3\] is 7"):
        nbcnn.Model(classifier(), nbcnn.SoftmaxCrossEntropy(ignore_index=9), mode="cpu").fit(X, [0, 1, 9, 7, *CLASSES[4:]], verbose=0)


def test_a_second_training_goes_on_from_the_average():
    model, _ = trained(ema=0.9)
    before = weights(model)
    model.fit(X, CLASSES, batch_size=4, optimizer=nbcnn.SGD(lr=1e-30), ema=0.9, verbose=0)
    for name, value in weights(model).items():
        np.testing.assert_allclose(value, before[name], rtol=1e-6)


RUN = ["--dataset", "digits", "--limit", "40", "--mode", "cpu", "--batch", "8", "--quiet"]
NETWORK = """from nbcnn import Conv2d, Flatten, Linear, PReLU, SoftmaxCrossEntropy
def layers():
    return [Conv2d(4, 5, stride=4), PReLU(4), Flatten(), Linear(10), SoftmaxCrossEntropy()]
"""
SETTINGS = """optimizer = "adamw"
accumulate = 2
label-smoothing = 0.1
[schedule]
schedule = "piecewise"
points = "0:0.5,1:1,2:0"
"""


def test_train_takes_and_resumes_every_option(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(SETTINGS)
    (tmp_path / "net.py").write_text(NETWORK)
    own = [*RUN, "--model", f"{tmp_path / 'net.py'}:layers", "--ignore-index", "3", "--ema", "0.9", "--config", tmp_path / "run.toml"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert exits(train, [*own, "--epochs", "2", "--out", whole]) == 0
    assert exits(train, [*own, "--epochs", "1", "--out", parts]) == 0
    assert exits(train, ["--resume", parts, "--ema", "0.5", "--quiet"]) == 2
    assert "--ema 0.5 cannot change" in capsys.readouterr().err
    assert exits(train, ["--resume", parts, "--epochs", "2", "--quiet"]) == 0
    one, other = (checkpoint.read(folder / "checkpoint-last.safetensors").tensors for folder in (whole, parts))
    assert one.keys() == other.keys()
    assert any(name.startswith("optim.weights.") for name in one)
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--loss", "rmsle"], "belongs to --model s4convd"),
        (["--loss", "cross-entropy"], "compares images"),
        (["--huber-delta", "2"], "--huber-delta belongs to --loss huber"),
        (["--label-smoothing", "0.1"], "belongs to networks that classify"),
        (["--class-weights", "1,-1"], "weights are finite numbers"),
        (["--optimizer", "adamw", "--nesterov"], "--nesterov belongs to --optimizer sgd"),
        (["--gamma", "0.5"], "--gamma belongs to --schedule step"),
        (["--schedule", "piecewise"], "needs --points"),
        (["--schedule", "piecewise", "--points", "3:1,2:1"], "ascending"),
        (["--model", "mnist-cnn", "--dataset", "digits", "--loss", "l1"], "classifies"),
    ],
)
def test_flags_that_do_not_go_together_exit_2(argv, says, capsys, tmp_path):
    assert exits(train, [*RUN, "--epochs", "1", *argv, "--out", tmp_path / "run"]) == 2
    assert says in capsys.readouterr().err
