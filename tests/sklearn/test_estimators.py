"""scikit-learn's own checks of the three estimators, counted; images, pipelines, searches, and files of fitted ones."""

from __future__ import annotations

import joblib
import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import check_estimator

import nbcnn
from nbcnn import Conv2d, Flatten, Linear, MaxPool2d, ReLU
from nbcnn.classify.processing import parse, prepared
from nbcnn.files.errors import UsageError
from nbcnn.sklearn import RBFSVC, ConvAutoencoder, ConvClassifier

SMALL = {"mode": "cpu", "batch_size": 32}


def small(shape, classes):
    return [Linear(16), ReLU(), Linear(classes)]


def convolution(shape, classes):
    return [Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(classes)]


ESTIMATORS = {
    "ConvAutoencoder": lambda: ConvAutoencoder(code=4, epochs=2, **SMALL),
    "ConvClassifier": lambda: ConvClassifier(layers=small, epochs=30, lr=0.03, **SMALL),
    "RBFSVC": lambda: RBFSVC(device="cpu", jobs=1),
}
EXPECTED: dict[str, dict[str, str]] = {name: {} for name in ESTIMATORS}
"""By the estimator, the checks that fail and why."""
LEAST = {"ConvAutoencoder": 46, "ConvClassifier": 53, "RBFSVC": 53}
"""How many checks pass for each with scikit-learn 1.9; two at most are skipped by itself (array API, data that is no array)."""


def digits(count=200):
    x, y = load_digits(return_X_y=True)
    return x[:count].astype(np.float32), y[:count]


@pytest.mark.full
@pytest.mark.parametrize("name", ESTIMATORS)
def test_scikit_learns_checks_pass_and_are_as_many_as_known(name):
    results = check_estimator(ESTIMATORS[name](), expected_failed_checks=EXPECTED[name], on_fail=None, on_skip=None)
    failed = [(each["check_name"], repr(each["exception"])) for each in results if each["status"] == "failed"]
    assert not failed, failed
    passed = [each for each in results if each["status"] == "passed"]
    assert len(passed) >= LEAST[name] or tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 9)
    assert len([each for each in results if each["status"] == "skipped"]) <= 2
    assert {each["check_name"] for each in results if each["status"] == "xfail"} == set(EXPECTED[name])


def test_the_machine_is_scikit_learns():
    x, y = digits(300)
    names = np.array(list("abcdefghij"))[y]
    ours = RBFSVC(C=10, device="cpu").fit(x[:200], names[:200])
    theirs = make_pipeline(StandardScaler(), SVC(C=10)).fit(x[:200], names[:200])
    assert (ours.predict(x) == theirs.predict(x)).all()
    binary = y < 5
    ours, theirs = RBFSVC(C=10, device="cpu").fit(x[:200], binary[:200]), theirs.fit(x[:200], binary[:200])
    # The kernel is float32: 2⁻²⁴ of at most 200 terms of size C.
    np.testing.assert_allclose(ours.decision_function(x), theirs.decision_function(x), rtol=0, atol=2e-3)


def test_a_machine_of_processed_images():
    x, y = digits(200)
    images = x.reshape(-1, 1, 8, 8)
    steps = parse("blur+sqrt+l2", (1, 8, 8))
    _, (ready,) = prepared(steps, [images.reshape(200, -1)])
    found = RBFSVC(process=steps.name, device="cpu").fit(images[:150], y[:150])
    # The means of l2 are those of what it is fitted on, so few samples of a margin may be of another class.
    direct = RBFSVC(scale=False, device="cpu").fit(ready[:150], y[:150])
    assert (found.predict(images) == direct.predict(ready)).mean() > 0.97
    assert found.score(images[150:], y[150:]) > 0.8
    with pytest.raises(UsageError, match="takes maps"):
        RBFSVC(process="blur", device="cpu").fit(x[:150], y[:150])


def test_images_in_both_forms_and_a_pipeline():
    x, y = digits(120)
    classifier = ConvClassifier(image_shape=(1, 8, 8), layers=convolution, epochs=30, **SMALL)
    flat = clone(classifier).fit(x, y).predict_proba(x)
    np.testing.assert_array_equal(clone(classifier).fit(x.reshape(-1, 1, 8, 8), y).predict_proba(x), flat)
    chain = make_pipeline(ConvAutoencoder(image_shape=(1, 8, 8), code=4, epochs=3, **SMALL), RBFSVC(device="cpu"))
    assert chain.fit(x, y).score(x, y) > 0.95
    assert chain[0].transform(x).shape == (120, 4 * 4 * 4)
    assert chain[0].reconstruction_error(x).shape == (120,)
    with pytest.raises(ValueError, match=r"image_shape \(1, 8, 8\) has 64"):
        clone(classifier).fit(x[:, :32], y)


def test_validation_and_searches():
    x, y = digits(90)
    y = y % 2
    estimator = ConvClassifier(epochs=2, **SMALL)
    assert cross_val_score(estimator, x, y, cv=2).shape == (2,)
    search = GridSearchCV(RBFSVC(device="cpu"), {"C": [0.01, 10]}, cv=2).fit(x, y)
    assert search.best_params_ == {"C": 10}
    assert set(estimator.get_params()) >= {"image_shape", "layers", "epochs", "batch_size", "optimizer", "lr", "mode", "random_state"}


def test_a_fitted_estimator_goes_through_joblib(tmp_path):
    x, y = digits(60)
    for made in (ConvClassifier(epochs=1, **SMALL), ConvAutoencoder(code=4, epochs=1, **SMALL), RBFSVC(device="cpu")):
        fitted = made.fit(x, y)
        joblib.dump(fitted, tmp_path / "estimator")
        again = joblib.load(tmp_path / "estimator")
        apply = "transform" if hasattr(made, "transform") else "predict"
        np.testing.assert_array_equal(getattr(again, apply)(x), getattr(fitted, apply)(x))


def test_a_model_goes_through_joblib(tmp_path):
    x, y = digits(40)
    model = nbcnn.Model([Linear(8), ReLU(), Linear(10)], loss="cross_entropy", mode="cpu")
    model.fit(x, y, verbose=0)
    model.freeze("linear1")
    joblib.dump(model, tmp_path / "model")
    again = joblib.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    assert "2 of 4 parameters frozen" in again.summary()


def test_a_machine_takes_no_cpu_in_place_of_a_gpu_that_was_chosen(monkeypatch):
    monkeypatch.setattr("nbcnn.gpu.select._chosen", ["cuda:63"])
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: "no CUDA GPU visible")
    monkeypatch.setattr("nbcnn.gpu.language.SIMULATOR", False)
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    with pytest.raises(nbcnn.GpuUnavailable, match="there is no cuda:63, which was asked for by its name"):
        RBFSVC().fit(x, np.arange(20) % 2)
    assert RBFSVC(device="cpu").fit(x, np.arange(20) % 2).predict(x).shape == (20,)


def far_blobs(random_state=0):
    """(training, test) of three well separated clouds, (x, y) each."""
    from sklearn.datasets import make_blobs

    x, y = make_blobs(120, centers=3, n_features=4, random_state=random_state)
    return (x[:80], y[:80]), (x[80:], y[80:])


@pytest.mark.parametrize("options", [{}, {"scale": False}, {"scale": False, "gamma": 0.001}, {"process": "std"}, {"process": "l2"}], ids=str)
@pytest.mark.parametrize("form", ["float64", "int64"])
def test_features_lose_their_mean_before_they_are_rounded(options, form):
    """Around 1.7e9 neighbours in float32 are 128 apart, and the clouds some tens wide."""
    (x, y), (xt, yt) = far_blobs()
    x, xt = (((10 * each).round() + 1.7e9).astype(form) for each in (x, xt))
    near, far = RBFSVC(device="cpu", **options).fit(x - x.dtype.type(1.7e9), y), RBFSVC(device="cpu", **options).fit(x, y)
    assert far.score(xt, yt) == near.score(xt - xt.dtype.type(1.7e9), yt) > 0.9
    if not options:
        assert far.score(xt, yt) == 1


def test_what_a_scaler_in_front_made_is_taken_as_it_is():
    """Scaled once more, to 0 to 1, 22 % of these digits were recognised; 85 % are as they are."""
    x, y = load_digits(return_X_y=True)
    ready = StandardScaler().fit_transform(x)
    found = ConvClassifier(image_shape=(1, 8, 8), epochs=5, mode="cpu").fit(ready[:1000], y[:1000])
    assert (found.model_.form.scale, found.model_.form.span) == ((0.0, 1.0), (ready[:1000].min(), ready[:1000].max()))
    assert found.score(ready[1000:], y[1000:]) > 0.8


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e19, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_features_of_any_size_are_taken_without_scaling(size, dtype):
    """Their squares are no float32; the kernel does not change with the unit, neither with gamma="scale" nor with a gamma in that unit."""
    (x, y), (xt, yt) = far_blobs()
    for gamma in ("scale", 0.1):
        plain = RBFSVC(device="cpu", scale=False, gamma=gamma).fit(x, y)
        moved = RBFSVC(device="cpu", scale=False, gamma=gamma if gamma == "scale" else gamma / size**2).fit((x * size).astype(dtype), y)
        assert moved.score((xt * size).astype(dtype), yt) == plain.score(xt, yt) == 1
        np.testing.assert_array_equal(moved.predict((x * size).astype(dtype)), plain.predict(x))
