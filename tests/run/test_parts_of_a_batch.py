"""Accumulated batches are one large batch, whatever the mean of the loss is over: against one batch, and against formulas in float64."""

import itertools
from functools import partial

import numpy as np
import pytest

import nbcnn
from nbcnn.datasets.series import Windows
from nbcnn.files.errors import UsageError
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import L1, MSE, RMSLE, BCEWithLogits, ForecastMSE, Huber, SoftmaxCrossEntropy
from nbcnn.nn.optim import SGD
from nbcnn.nn.series_layers import LastStep
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

COUNT, CLASSES, IMAGE = 7, 3, (2, 2, 3)
PARTS = {"2+2+2+1": (2, 4), "3+3+1": (3, 3), "4+3": (4, 2)}
"""(batch, accumulate) of a step of all seven examples."""


def cross_entropy(y, labels, weight, ignore, smoothing):
    """As torch.nn.CrossEntropyLoss, of rows of classes; 0 where nothing counts."""
    y, labels = np.moveaxis(y, 1, -1).reshape(-1, CLASSES), labels.reshape(-1)
    w = np.ones(CLASSES) if weight is None else np.array(weight)
    lost = counted = 0.0
    for row, label in zip(y, labels, strict=True):
        if label == ignore:
            continue
        z = np.log(np.exp(row).sum()) - row
        lost += (1 - smoothing) * w[label] * z[label] + smoothing / CLASSES * (w * z).sum()
        counted += w[label]
    return lost / counted if counted else 0.0


def rmsle(y, target, unit):
    d = np.log(1 + np.maximum(unit * y[:, 0], 0) + 1e-6) - np.log(1 + np.maximum(target, 0) + 1e-6)
    return np.sqrt((d**2).mean())


def huber(y, target, delta):
    d = np.abs(y - target)
    return np.where(d <= delta, d**2 / 2, delta * (d - delta / 2)).mean()


VALUES = {
    "mse": (MSE(), lambda y, target: ((y - target) ** 2).mean()),
    "l1": (L1(), lambda y, target: np.abs(y - target).mean()),
    "huber": (Huber(0.5), partial(huber, delta=0.5)),
    "bce": (BCEWithLogits(), lambda y, target: (np.log(1 + np.exp(y)) - y * target).mean()),
}
FORECASTS = {
    "forecast": (ForecastMSE(), lambda y, target: ((y[:, 0] - target) ** 2).mean()),
    "rmsle": (RMSLE(), partial(rmsle, unit=1.0)),
    "rmsle in tens": (RMSLE(10.0), partial(rmsle, unit=10.0)),
}
WEIGHTS, IGNORED, SMOOTHED = (None, (9.0, 1.0, 0.25), (0.0, 1.0, 2.0)), (None, 1, 255), (0.0, 0.2)
ENTROPIES = {
    f"weight {weight} ignore {ignore} smoothing {smoothing}": (weight, ignore, smoothing)
    for weight, ignore, smoothing in itertools.product(WEIGHTS, IGNORED, SMOOTHED)
}


def labels_of(shape, ignore, random):
    """Labels of which many are ignored, among them all of the first three examples."""
    labels = random.integers(0, CLASSES, shape).astype(np.int32)
    if ignore is not None:
        labels[random.random(shape) < 0.3] = ignore
        labels[:3] = ignore
    return labels


def network(kind):
    """(layers without the loss, shape of an example, the outputs in float64 of examples by weight and bias)."""
    if kind == "pixels":
        return [Conv2d(CLASSES, 1)], IMAGE, lambda x, w, b: np.einsum("nchw,kc->nkhw", x, w.reshape(CLASSES, -1)) + b[:, None, None]
    if kind == "series":
        return [LastStep(), Linear(1)], (2, 4), lambda x, w, b: x[:, :, -1] @ w.T + b
    return [Flatten(), Linear(CLASSES)], IMAGE, lambda x, w, b: x.reshape(len(x), -1) @ w.T + b


def trained(layers, shape, data, targets, loss, batch, accumulate, mode="cpu"):
    """(what one step of rate 1 subtracts from the weights, the mean loss, the loss of the last batch, the weights before)."""
    net = Net([*layers, loss], shape, mode=mode, seed=3)
    given = {"labels": targets} if loss.needs_labels else {"targets": targets}
    options = {"optimizer": SGD(momentum=0), "learning_rates": np.ones(1, np.float32)} | ({} if isinstance(data, Windows) else given)
    session = TrainingSession(net, data, batch=batch, accumulate=accumulate, **options)
    before = net.params.as_dict()
    session.step()
    status = session.status()
    after = session.net.params.as_dict()
    session.close()
    return {name: before[name] - after[name] for name in before}, status.loss_mean, status.last_loss, before


def gradient(value, weights):
    """Central differences in float64, right to about 1e-9 of numbers near 1."""
    made = {}
    for name, w in weights.items():
        made[name] = np.zeros(w.shape)
        for at in np.ndindex(w.shape):
            both = []
            for step in (1e-5, -1e-5):
                moved = {other: each.astype(np.float64) for other, each in weights.items()}
                moved[name][at] += step
                both.append(value(*moved.values()))
            made[name][at] = (both[0] - both[1]) / 2e-5
    return made


def check(kind, data, x, targets, loss, value, mode="cpu"):
    """Every way to split the batch has the loss and the gradient of the whole batch, and of the formula."""
    layers, shape, outputs = network(kind)
    one, mean, last, weights = trained(layers, shape, data, targets, loss, COUNT, 1, mode)
    assert last == pytest.approx(mean, rel=1e-12)

    def lost(w, b):
        return value(outputs(np.float64(x), w, b), np.float64(targets) if targets.dtype == np.float32 else targets)

    exact = gradient(lost, weights)
    # Sums of at most 42 pixels and 12 features; terms are below 16 with every weight and unit here.
    tolerance = 4 * np.sqrt(42 * 12) * 16 * 2**-24
    for name, (batch, accumulate) in {"1 part": (COUNT, 1), **PARTS}.items():
        made, several_mean, several_last, _ = trained(layers, shape, data, targets, loss, batch, accumulate, mode)
        assert several_mean == pytest.approx(lost(*(w.astype(np.float64) for w in weights.values())), rel=2e-6, abs=1e-7), name
        assert several_last == pytest.approx(several_mean, rel=1e-12), name
        for parameter, expected in exact.items():
            np.testing.assert_allclose(made[parameter], expected, atol=tolerance, err_msg=f"{name}: {parameter}")
            np.testing.assert_allclose(made[parameter], one[parameter], atol=tolerance, err_msg=f"{name}: {parameter}")


@pytest.fixture
def x(rng):
    return rng.standard_normal((COUNT, *IMAGE)).astype(np.float32)


@pytest.mark.parametrize("of", ["vectors", "pixels"])
@pytest.mark.parametrize("loss", VALUES)
def test_losses_of_values(x, rng, loss, of):
    made, value = VALUES[loss]
    shape = (COUNT, CLASSES, *(IMAGE[1:] if of == "pixels" else ()))
    check(of, x, x, rng.random(shape).astype(np.float32), made, value)


@pytest.mark.parametrize("of", ["vectors", "pixels"])
@pytest.mark.parametrize("case", ENTROPIES)
def test_cross_entropies(x, rng, case, of):
    weight, ignore, smoothing = ENTROPIES[case]
    labels = labels_of((COUNT, *(IMAGE[1:] if of == "pixels" else ())), ignore, rng)
    loss = SoftmaxCrossEntropy(weight=weight, ignore_index=ignore, label_smoothing=smoothing)
    check(of, x, x, labels, loss, partial(cross_entropy, weight=weight, ignore=ignore, smoothing=smoothing))


@pytest.mark.parametrize("loss", FORECASTS)
def test_losses_of_forecasts(rng, loss):
    made, value = FORECASTS[loss]
    rows, targets = rng.standard_normal((11, 2)).astype(np.float32), rng.uniform(0, 3, 11).astype(np.float32)
    windows = Windows(rows, targets, np.arange(COUNT, dtype=np.int32), length=4)
    check("series", windows, windows.series(), targets[windows.starts + 4], made, value)


def test_a_batch_of_which_nothing_counts_changes_nothing(x):
    labels = np.full(COUNT, 5, np.int32)
    made, mean, last, _ = trained(*network("vectors")[:2], x, labels, SoftmaxCrossEntropy(ignore_index=5), 3, 3)
    assert (mean, last) == (0, 0)
    assert all(not each.any() for each in made.values())


def test_the_weights_of_classes_count_over_the_whole_batch():
    """Logits 0: the gradient of w[0] is 9·(½ − 1)/20 for each of the first two examples, and 1·½/20 for each of the others."""
    x, y = np.eye(4, dtype=np.float32), [0, 0, 1, 1]
    model = nbcnn.Model([Linear(2, bias=False)], SoftmaxCrossEntropy(weight=(9, 1)), mode="cpu").build((4,))
    model.set_weights({"linear1.weight": np.zeros((2, 4), np.float32)})
    model.fit(x, y, epochs=1, batch_size=2, accumulate=2, shuffle=False, optimizer=nbcnn.SGD(1.0, momentum=0), verbose=0)
    np.testing.assert_allclose(-model.weights()["linear1.weight"][0], [-0.225, -0.225, 0.025, 0.025], rtol=1e-6)


def test_a_root_of_a_mean_is_no_loss_of_several_outputs():
    with pytest.raises(UsageError, match="RMSLE, the root of one"):
        nbcnn.Losses((RMSLE(), RMSLE()))
