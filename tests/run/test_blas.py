"""How many threads BLAS has while a plan runs on the host: one for small products, so that a busy core does not hold every product up."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from nbcnn.nn import models
from nbcnn.run import blas
from nbcnn.run.net import Net


def threads():
    """Threads of NumPy's BLAS now."""
    return max((each["num_threads"] for each in ThreadpoolController().select(user_api="blas").info()), default=1)


@pytest.fixture(autouse=True)
def several():
    """BLAS has three threads outside."""
    with ThreadpoolController().limit(limits=3, user_api="blas"):
        if threads() != 3:
            pytest.skip("NumPy's BLAS does not say how many threads it has")
        yield
        assert threads() == 3


def plan(name, shape, batch, **options):
    net = Net(models.MODELS[name](*shape, **options), shape, mode="cpu")
    return net.lower(net.record_gradients(batch))


@pytest.mark.parametrize(
    ("name", "shape", "batch", "alone"),
    [
        ("small-autoencoder", (1, 8, 8), 16, True),
        ("small-autoencoder", (3, 32, 32), 256, True),
        ("mnist-cnn", (1, 28, 28), 128, True),
        ("autoencoder", (3, 32, 32), 64, False),
        ("resnet18", (3, 32, 32), 32, False),
    ],
)
def test_the_size_of_an_images_products_decides(name, shape, batch, alone):
    assert blas.one_thread(plan(name, shape, batch)) is alone
    assert blas.one_thread(plan(name, shape, 1)) is alone, "whatever the batch, so that the bits of an image do not depend on it"


def test_a_small_network_computes_with_one_thread_and_leaves_the_rest_as_it_was(monkeypatch):
    seen = []
    net = Net(models.MODELS["small-autoencoder"](1, 8, 8), (1, 8, 8), mode="cpu")
    net.predict(np.zeros((2, 1, 8, 8), np.uint8))
    program = net.prepared[2, "uint8"].programs["predict"]
    monkeypatch.setattr(program, "_replay", lambda: seen.append(threads()))
    program.replay()
    assert seen == [1]


def test_plans_that_run_at_the_same_time_leave_what_was_before_both():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with blas.single():
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with blas.single():
        thread.start()
        assert entered.wait(60)
        assert threads() == 1
    assert threads() == 3
    leave.set()
    thread.join(60)
    assert threads() == 3
