"""One model in several threads: every answer is the one that a single thread gets. A prediction shares the model's buffers, so calls take turns."""

from __future__ import annotations

import io
import json
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from scripts import ROOT

import nbcnn
from nbcnn import Conv2d, Flatten, Linear, MaxPool2d, ReLU
from nbcnn.files.errors import UsageError
from nbcnn.sklearn import ConvAutoencoder, ConvClassifier

MODES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
THREADS = 8


def classifier(mode="cpu"):
    layers = [Conv2d(8, 3, padding=1), ReLU(), MaxPool2d(2), Flatten(), Linear(4)]
    return nbcnn.Model(layers, "cross_entropy", mode=mode, input_shape=(3, 12, 12), classes=["a", "b", "c", "d"])


def images(count):
    return np.random.default_rng(0).integers(0, 256, (count, 3, 12, 12), dtype=np.uint8)


@pytest.fixture
def mode(request):
    """A mode of the device that a test is for."""
    if request.param == "gpu":
        request.getfixturevalue("gpu")
    return "cpu" if request.param == "cpu" else "auto"


@pytest.fixture(autouse=True)
def switching():
    """Threads change places 500 times as often as they do by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def wrong(calls, answers, count):
    """How many of `count` calls by 8 threads give other answers than one thread got."""
    rows = np.random.default_rng(1).integers(0, len(answers), count)

    def differs(number):
        return not np.array_equal(calls[number % len(calls)](rows[number]), answers[rows[number]])

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(differs, range(count)))


@pytest.mark.parametrize("mode", MODES, indirect=True)
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.full)])
def test_eight_threads_get_the_answers_of_one(mode, count):
    x = images(64)
    with classifier(mode) as model:
        answers = np.stack([model.predict(image) for image in x])
        assert wrong([lambda row: model.predict(x[row])], answers, count) == 0


def test_calls_of_every_kind_take_turns():
    x, y = images(32), np.arange(32) % 4
    with classifier() as model:
        calls = {
            "predict": lambda row: model.predict(x[row]),
            "proba": lambda row: model.predict_proba(x[row]),
            "features": lambda row: model.features(x[row], at="conv1"),
            "evaluate": lambda row: model.evaluate(x[row : row + 1], y[row : row + 1])["loss"],
        }
        answers = {name: [call(row) for row in range(32)] for name, call in calls.items()}

        def differs(number):
            name, row = list(calls)[number % 4], number % 32
            return not np.array_equal(calls[name](row), answers[name][row])

        with ThreadPoolExecutor(THREADS) as pool:
            assert sum(pool.map(differs, range(320))) == 0


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_fits_at_the_same_time_run_one_after_the_other(mode):
    x, y = images(16), np.arange(16) % 4
    with classifier(mode) as alone, classifier(mode) as shared:
        for _ in range(4):
            alone.fit(x, y, epochs=2, batch_size=8, verbose=0)
        with ThreadPoolExecutor(4) as pool:
            for fitted in [pool.submit(shared.fit, x, y, epochs=2, batch_size=8, verbose=0) for _ in range(4)]:
                fitted.result()
        for name, values in alone.weights().items():
            np.testing.assert_array_equal(shared.weights()[name], values)


def test_a_prediction_during_a_fit_waits_for_its_end():
    x, y = images(16), np.arange(16) % 4
    inside, go_on, found = threading.Event(), threading.Event(), []

    class Waits(nbcnn.Callback):
        def epoch(self, trainer, row):
            model.predict(x)  # the thread of the fit itself has its turn
            inside.set()
            assert go_on.wait(60)

    with classifier() as model:
        fitting = threading.Thread(target=lambda: model.fit(x, y, callbacks=[Waits()], verbose=0))
        fitting.start()
        assert inside.wait(60)
        asking = threading.Thread(target=lambda: found.append(model.predict(x)))
        asking.start()
        asking.join(0.3)
        assert asking.is_alive()
        go_on.set()
        fitting.join(60)
        asking.join(60)
        np.testing.assert_array_equal(found[0], model.predict(x))


def test_a_call_where_fit_reads_its_batches_is_refused_instead_of_waiting_for_ever():
    x, y = images(8), np.arange(8) % 4

    def batches(epoch):
        for _ in range(3):
            model.predict(x)
            yield x, y

    with classifier() as model, pytest.raises(UsageError, match="predict was called where fit reads its batches"):
        model.fit(batches, epochs=2, steps_per_epoch=3, verbose=0)


@pytest.mark.parametrize("kind", [ConvClassifier, ConvAutoencoder])
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_an_estimator_in_eight_threads(kind, count):
    x = images(40).astype(np.float32) / 255
    made = kind(image_shape=(3, 12, 12), epochs=1, mode="cpu")
    made.fit(x, np.arange(40) % 4)
    call = made.predict_proba if kind is ConvClassifier else made.transform
    answers = [call(x[row : row + 1]) for row in range(40)]
    assert wrong([lambda row: call(x[row : row + 1])], answers, count) == 0


def test_a_model_keeps_its_lock_out_of_pickles():
    import copy

    with classifier() as model, copy.deepcopy(model) as other:
        np.testing.assert_array_equal(other.predict(images(2)), model.predict(images(2)))


def test_the_example_of_a_server_answers_eight_clients():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import serve
    finally:
        sys.path.remove(str(ROOT / "examples"))

    def post(body):
        with urllib.request.urlopen(f"http://127.0.0.1:{made.server_port}/", body, timeout=60) as answer:
            return json.load(answer)

    bodies = []
    for image in images(16):
        held = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(held, "PNG")
        bodies.append(held.getvalue())
    with classifier() as model, serve.server(model, 0) as made:
        threading.Thread(target=made.serve_forever).start()
        try:
            classes = [model.classes[at] for at in model.predict_classes(images(16))]
            with ThreadPoolExecutor(THREADS) as pool:
                found = list(pool.map(post, bodies * 10))
            assert [each["class"] for each in found] == classes * 10
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(b"no image")
        finally:
            made.shutdown()
