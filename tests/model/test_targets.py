"""What a network learns to make: classes of images and of pixels, vectors, another image; and training data that a callable yields."""

from __future__ import annotations

import re

import numpy as np
import pytest

import nbcnn
from nbcnn import Conv2d, Flatten, Linear, ReLU
from nbcnn.datasets.augment import Augment
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files.errors import UsageError
from nbcnn.gpu.target import H200
from nbcnn.lab.measure.plans import Absent
from nbcnn.modes import MODES
from nbcnn.run import streaming
from nbcnn.run.net import Net
from nbcnn.run.planning import Training
from nbcnn.run.resident import Images
from nbcnn.run.rows import Choice
from nbcnn.run.session import TrainingSession

COUNT = 11
X = np.random.default_rng(0).integers(0, 256, (COUNT, 1, 6, 5)).astype(np.uint8)
CLASSES = np.arange(COUNT) % 3
PIXELS = X[:, 0] // 86
VECTORS = np.stack([X.mean((1, 2, 3)), X.std((1, 2, 3))], 1).astype(np.float32) / 255


def classifier():
    return [Flatten(), Linear(5), ReLU(), Linear(3)]


def segmenter():
    return [Conv2d(4, 3, padding=1), ReLU(), Conv2d(3, 1)]


def autoencoder():
    return [Conv2d(4, 3, padding=1), ReLU(), Conv2d(1, 3, padding=1)]


def regressor():
    return [Flatten(), Linear(2)]


KINDS = {
    "classes": (classifier, "cross_entropy", CLASSES),
    "pixels": (segmenter, "cross_entropy", PIXELS),
    "vectors": (regressor, "mse", VECTORS),
    "image": (autoencoder, "mse", 255 - X),
    "input": (autoencoder, "mse", None),
}


def trained(kind, x=X, y=None, normalisation=None, **options):
    layers, loss, own = KINDS[kind]
    model = nbcnn.Model(layers(), loss=loss, mode="cpu", normalisation=normalisation)
    given = own if y is None and isinstance(x, np.ndarray) else y
    history = model.fit(x, given, **{"epochs": 2, "verbose": 0, "batch_size": 4, "optimizer": nbcnn.SGD(lr=0.05)} | options)
    return model, history


def same(one, other):
    np.testing.assert_array_equal(one[0].predict(X), other[0].predict(X))
    assert one[1].history["loss"] == other[1].history["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_target_is_learnt_and_evaluated_alike(kind):
    y = KINDS[kind][2]
    model, history = trained(kind, epochs=8, validation_data=(X, y))
    assert history.history["loss"][-1] < history.history["loss"][0]
    found = model.evaluate(X, y)
    # The kernels' loss is of float32 results; its terms here are below 4.
    assert found["loss"] == pytest.approx(history.rows[-1]["val_loss"], rel=1e-5)
    assert found.get("accuracy") == history.rows[-1].get("val_accuracy")
    assert ("accuracy" in found) == (kind in ("classes", "pixels"))


def test_classes_of_pixels_are_what_single_pixels_would_be():
    """A 1×1 convolution sees one pixel: the same loss and gradient as of as many vectors of one value."""
    images = nbcnn.Model([Conv2d(3, 1)], loss="cross_entropy", mode="cpu")
    pixels = nbcnn.Model([Linear(3)], loss="cross_entropy", mode="cpu", input_shape=(1,))
    images.build((1, 6, 5))
    weights = images.net.params.as_dict()
    pixels.net.params.load_dict({"linear1.weight": weights["conv1.weight"].reshape(3, 1), "linear1.bias": weights["conv1.bias"]})
    seen = X.astype(np.float32) / 255
    (one, by_image), (other, by_pixel) = images.net.gradients(seen, PIXELS), pixels.net.gradients(seen.reshape(-1, 1), PIXELS.reshape(-1))
    # Sums of 330 terms below 1 in two orders.
    assert one == pytest.approx(other, rel=1e-6)
    np.testing.assert_allclose(by_image["conv1.weight"].reshape(3, 1), by_pixel["linear1.weight"], atol=330**0.5 * 2**-23)
    assert images.predict_classes(X).shape == (COUNT, 6, 5)
    np.testing.assert_allclose(images.predict_proba(X).sum(1), 1, rtol=1e-6)


def test_forms_of_labels_that_mean_the_same_train_alike():
    for form in (np.eye(3)[CLASSES], CLASSES.astype(float), CLASSES[:, None].tolist()):
        same(trained("classes"), trained("classes", y=form))
    for form in (np.eye(3)[PIXELS], np.eye(3)[PIXELS].transpose(0, 3, 1, 2), PIXELS[:, None].astype(int)):
        same(trained("pixels"), trained("pixels", y=form))


@pytest.mark.parametrize("augment", ["", "flip,crop:2", "flip,crop:2:reflect", "flip:alternate"])
def test_another_image_is_moved_as_its_input_is(augment):
    """A copy of the input as target is the input as target, however it is augmented; without it the two would differ."""
    same(trained("input", augment=augment), trained("input", y=X.copy(), augment=augment))


def test_pixels_are_mirrored_with_their_image():
    """Where the class follows from the pixel, a flip of both leaves the pairs as they are; the loss of a 1×1 convolution is that without a flip."""
    losses = []
    for augment in ("", "flip"):
        model = nbcnn.Model([Conv2d(3, 1)], loss="cross_entropy", mode="cpu")
        losses.append(model.fit(X, PIXELS, batch_size=COUNT, augment=augment, verbose=0).history["loss"][0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # the same 330 terms in another order


@pytest.mark.parametrize("kind", KINDS)
def test_a_callable_trains_as_its_arrays_would(kind):
    """Batches in the order of the arrays, smaller at the end: the bits of arrays that are not shuffled, flips and all."""
    y = KINDS[kind][2]

    def batches(epoch):
        for at in range(0, COUNT, 4):
            yield X[at : at + 4] if y is None else (X[at : at + 4], y[at : at + 4])

    flip = kind != "vectors"
    wanted = trained(kind, shuffle=False, flip=flip, epochs=3)
    same(wanted, trained(kind, batches, batch_size=None, steps_per_epoch=3, flip=flip, epochs=3))
    model, history = trained(kind, lambda epoch: list(batches(epoch)), batch_size=None, flip=flip, epochs=1)
    model.fit(lambda epoch: list(batches(epoch)), epochs=2, flip=flip, optimizer=nbcnn.SGD(lr=0.05), verbose=0)  # goes on with epoch 1
    np.testing.assert_array_equal(model.predict(X), wanted[0].predict(X))
    assert len(history) == 1


def test_a_callable_may_give_its_batches_in_any_order():
    from nbcnn.run.session import epoch_order

    def shuffled(epoch):
        order = epoch_order(0, epoch, COUNT)
        return [(X[order[at : at + 4]], CLASSES[order[at : at + 4]]) for at in range(0, COUNT, 4)]

    same(trained("classes"), trained("classes", shuffled, batch_size=None))


def test_epochs_of_a_callable_are_asked_for_one_by_one(tmp_path):
    asked = []

    def batches(epoch):
        asked.append(epoch)
        return [(X[:4], CLASSES[:4]), (X[4:8], CLASSES[4:8])]

    model, _ = trained("classes", batches, batch_size=None, epochs=3, run=tmp_path / "run")
    assert asked == [0, 1, 2]
    np.testing.assert_array_equal(nbcnn.load(tmp_path / "run", mode="cpu").predict(X), model.predict(X))


def lost(epoch):
    yield X[:4], CLASSES[:4]
    raise KeyError("mine")


WRONG = {
    "x(0) must return the batches": (lambda epoch: 5, {}),
    "x(0) has no len(): give the number of batches of an epoch by steps_per_epoch": (lambda epoch: iter([(X, CLASSES)]), {}),
    "x(0) is empty": (lambda epoch: [], {}),
    "x(0) gave no batch": (lambda epoch: iter([]), {"steps_per_epoch": 2}),
    "epoch 1 ended after 1 of 3 batches": (lambda epoch: [(X, CLASSES)], {"steps_per_epoch": 3}),
    "batch 2 of epoch 1 has 5 examples, the first had 3": (lambda epoch: [(X[:n], CLASSES[:n]) for n in (3, 5)], {}),
    "only the last batch of an epoch may be smaller": (lambda epoch: [(X[:n], CLASSES[:n]) for n in (3, 2, 3)], {}),
    "batch_size is 8, and the first batch of x(0) has 3": (lambda epoch: [(X[:3], CLASSES[:3])], {"batch_size": 8}),
    "a batch must be (x, y), or x alone, got a tuple of 3": (lambda epoch: [(X, CLASSES, CLASSES)], {}),
    "there are no targets of batch 1, and the loss needs them": (lambda epoch: [X], {}),
    "there are 2 targets of batch 1 for 3 images": (lambda epoch: [(X[:3], CLASSES[:2])], {}),
    "whose batches bring their y": (lambda epoch: [(X, CLASSES)], {"y": CLASSES}),
    "only the training data may be a callable": (lambda epoch: [(X, CLASSES)], {"validation_data": lambda epoch: []}),
    "the images of batch 2 are float32, of the first uint8": (lambda epoch: [(X[:3], CLASSES[:3]), (X[:3] / 255, CLASSES[:3])], {}),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_a_callable_may_not_give(says):
    given, options = WRONG[says]
    with pytest.raises(UsageError, match=re.escape(says)):
        trained("classes", given, **{"batch_size": None} | options)


def test_an_error_of_a_callable_is_its_own_and_the_steps_before_it_count():
    model = nbcnn.Model(classifier(), loss="cross_entropy", mode="cpu", input_shape=X.shape[1:])
    first = model.predict(X)
    with pytest.raises(KeyError, match="mine"):
        model.fit(lost, steps_per_epoch=2, verbose=0)
    assert (model.predict(X) != first).any()
    assert np.isfinite(model.predict(X)).all()


def test_a_callable_that_diverges_says_so():
    with pytest.raises(nbcnn.Diverged, match="cannot be repeated to find out where: the batches came from a callable"):
        trained("vectors", lambda epoch: [(X, VECTORS)] * 4, batch_size=None, epochs=8, optimizer=nbcnn.SGD(lr=1e30))


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("vectors", {"y": VECTORS[:, :1]}, r"targets are \(11, 1\), and the network's output is \(M, 2\)"),
        ("vectors", {"y": CLASSES}, 'for classes, the loss is "cross_entropy"'),
        ("vectors", {"y": np.full((COUNT, 2), np.nan)}, "targets hold nan in number 0"),
        ("vectors", {"y": VECTORS[:5]}, "there are 5 targets for 11 examples"),
        ("image", {"y": X[:, :, :3]}, r"targets are \(11, 1, 3, 5\), and for this network they must be \(M, 1, 6, 5\)"),
        ("pixels", {"y": CLASSES}, r"labels are \(11,\), one class per pixel is \(M, 6, 5\)"),
        ("pixels", {"y": PIXELS + 1}, r"labels\[\d+, \d+, \d+\] is 3, and the 3 classes are 0 to 2"),
        ("pixels", {"augment": "crop:2"}, "they have no class: leave crop out"),
        ("pixels", {"augment": "crop:2:reflect"}, "the classes of their pixels stay: leave crop out"),
        ("classes", {"y": PIXELS}, "a class for each pixel is for networks whose output is"),
        ("image", {"steps_per_epoch": 3}, "steps_per_epoch is for a callable"),
    ],
)
def test_targets_that_do_not_fit_are_told(kind, options, says):
    with pytest.raises(UsageError, match=says):
        trained(kind, **options)


def test_a_network_that_cannot_give_its_input_back_needs_targets():
    with pytest.raises(UsageError, match="so it cannot have its input as target: give y"):
        nbcnn.Model(regressor(), loss="mse", mode="cpu").fit(X, verbose=0)
    larger = [nbcnn.Upsample2d(2), Conv2d(1, 3, padding=1)]
    with pytest.raises(UsageError, match="which are of another scale: leave crop out"):
        nbcnn.Model(larger, loss="mse", mode="cpu").fit(X, X.repeat(2, 2).repeat(2, 3), augment="crop:1", verbose=0)
    nbcnn.Model(larger, loss="mse", mode="cpu").fit(X, X.repeat(2, 2).repeat(2, 3), flip=True, verbose=0)


def test_gradients_and_plans_of_a_network_with_targets_of_its_own():
    model = nbcnn.Model(regressor(), loss="mse", mode="cpu", input_shape=X.shape[1:])
    seen = X.astype(np.float32) / 255
    loss, grads = model.net.gradients(seen, VECTORS)
    apart = model.predict(X) - VECTORS
    assert loss == pytest.approx(np.mean(apart.astype(np.float64) ** 2), rel=1e-6)
    # 2/22 Σ apart·x: sums of 11 terms below 1.
    np.testing.assert_allclose(grads["linear1.weight"], 2 / apart.size * apart.T @ seen.reshape(COUNT, -1), atol=11 * 2**-23)
    assert "mse_fprop" in model.explain(4)
    with pytest.raises(UsageError, match=r"there are no targets, and the network is to predict \(M, 2\)"):
        model.net.gradients(seen)


@pytest.mark.parametrize("key", [key for key, row in MODES.items() if row.device == "gpu"], ids="-".join)
def test_every_row_plans_every_kind_of_target(key):
    """Without a GPU: what no row of the table lacks, and that vectors are not rounded to what activations are stored as."""
    for kind, (layers, loss, y) in KINDS.items():
        last = nbcnn.SoftmaxCrossEntropy() if loss == "cross_entropy" else nbcnn.MSE()
        net = Net([*layers(), last], X.shape[1:], choice=Choice(MODES[key], "as asked"), device=Absent(H200))
        y = y.astype(np.int32) if kind == "classes" else y
        data = Images(X, y, classes=net.takes_classes, streamed=4)
        steps = Training(net, {"train": data}, nbcnn.SGD(), 4, 1, Augment(kind != "vectors")).plan("train", 4).steps
        gathered = [item.step for item in steps if str(item.step.op) in ("gather", "gather_labels")]
        assert len(gathered) == (1 if y is None else 2), kind
        if kind == "vectors":
            assert gathered[1].outs[0].dtype == "float32"
        if kind in ("pixels", "image"):
            assert gathered[0].attrs["flip"] == gathered[1].attrs["flip"] is True
            assert gathered[1].attrs["ring"] == 4 * streaming.RING


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("kind", ["pixels", "vectors", "image"])
def test_streamed_targets_have_the_bits_of_resident_ones(kind, dtype, monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 200)
    layers, loss, y = KINDS[kind]
    layers = [*layers(), nbcnn.SoftmaxCrossEntropy() if loss == "cross_entropy" else nbcnn.MSE()]
    x = X if dtype == np.uint8 else (X / np.float32(255)).astype(np.float32)
    made = []
    for resident in (True, False):
        net = Net(layers, X.shape[1:], mode="cpu", seed=1, normalisation=Normalisation((0.5,), (0.25,)))
        given = {"labels": y, "test_labels": y} if kind == "pixels" else {"targets": y, "test_targets": y}
        options = {"optimizer": nbcnn.SGD(momentum=0.9), "learning_rates": np.full(9, 0.05, np.float32), "batch": 3, "augment": Augment("alternate")}
        session = TrainingSession(net, x, test_images=x, resident=resident, **given, **options)
        for epoch in range(2):
            session.begin_epoch(epoch)
            for _ in range(session.steps_left):
                session.step()
        made.append((session.state(), session.evaluate()))
        assert (session.streamed_bytes > 0) == (not resident)
        session.close()
    (one, loss), (other, again) = made
    assert loss == again
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name], err_msg=name)


@pytest.mark.parametrize("channels_last", [False, True])
def test_targets_that_fit_both_ways_are_taken_as_one_says(channels_last):
    """Six targets of 6×6×6 for an output of (6, 6, 6): the error asks, and the answer counts in `fit`, `evaluate` and validation."""
    model = nbcnn.Model([nbcnn.Conv2d(6, 1, bias=False)], "mse", mode="cpu").build((3, 6, 6))
    model.set_weights({"conv1.weight": np.zeros((6, 3, 1, 1), np.float32)})
    x, y = np.zeros((6, 6, 6, 3) if channels_last else (6, 3, 6, 6), np.float32), np.zeros((6, 6, 6, 6), np.float32)
    x[..., 0 if channels_last else slice(None)] = 1
    y[..., 2] = 1  # the channel if they come last, else a column
    with pytest.raises(nbcnn.UsageError, match="say channels_last=True or False"):
        model.fit(x, y, verbose=0)
    data = {"validation_data": (x, y), "channels_last": channels_last}
    model.fit(x, y, epochs=1, optimizer=nbcnn.SGD(0.1, momentum=0), verbose=0, **data)
    moved = model.weights()["conv1.weight"].any((1, 2, 3))
    assert moved.tolist() == ([at == 2 for at in range(6)] if channels_last else [True] * 6)
    assert np.isfinite(model.evaluate(x, y, channels_last=channels_last)["loss"])
