"""Tests of predictions whose batches go through page-locked memory, or stand-ins of it: in order, each its own, also where a caller breaks off."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
from nbcnn.gpu.staging import staging
from nbcnn.run import allocation, inference
from nbcnn.run.net import Net


class Later:
    """Staging as a GPU has it, on a host: work runs only when the result is waited for, as late as a stream might."""

    made = 0

    def __init__(self, device, source, target):
        self._device, self._source, self._target = device, source, target
        self._todo, self._found = None, np.empty(target.size, target.dtype)
        Later.made += 1

    def run(self, values, work):
        assert self._todo is None, "the memory is another batch's"
        given = values.copy()
        self._todo = lambda: (self._device.upload(self._source, given), work(), np.copyto(self._found, self._target))

    def wait(self):
        if self._todo is not None:
            todo, self._todo = self._todo, None
            todo()
        return self._found


@pytest.fixture
def net():
    return Net([nbcnn.Flatten(), nbcnn.Linear(3)], (2, 2, 2), mode="cpu")


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (11, 2, 2, 2), np.uint8)


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(Later, "made", 0)
    monkeypatch.setattr(allocation, "staging", Later)


@pytest.mark.parametrize("batch", [1, 4, 11, 20])
def test_outputs_are_those_of_one_batch(net, images, batch, late):
    want = inference.whole(net, images, len(images))
    assert np.array_equal(inference.whole(net, images, batch), want)
    parts = list(net.predict_batches(images, batch))
    assert [len(part) for part in parts] == [min(batch, 11 - start) for start in range(0, 11, batch)]
    assert np.array_equal(np.concatenate(parts), want)


def test_two_batches_are_under_way_and_their_memory_is_used_again(net, images, late):
    list(net.predict_batches(images[:8], 2))
    assert Later.made == 2
    list(net.predict_batches(images[:8], 2))
    assert Later.made == 2


def test_a_caller_who_breaks_off_or_predicts_in_between_changes_nothing(net, images, late):
    want = net.predict(images, 2)
    parts = net.predict_batches(images, 2)
    first = next(parts)
    assert np.array_equal(net.predict(images, 2), want)
    assert np.array_equal(np.concatenate([first, *parts]), want)
    broken = net.predict_batches(images, 2)
    next(broken)
    broken.close()
    assert np.array_equal(net.predict(images, 2), want)


def test_a_host_copies_straight(net, images):
    held = inference._prepared(net, 4)
    assert staging(net.device, held.array("images"), held.array("output")) is None
    want = np.concatenate([net.predict(images[at : at + 1]) for at in range(11)])
    assert np.allclose(net.predict(images, 4), want, rtol=1e-6)


def test_a_gpu_gives_the_same_bits_as_straight_copies(gpu, images, monkeypatch):
    layers = [nbcnn.Flatten(), nbcnn.Linear(64), nbcnn.ReLU(), nbcnn.Linear(10)]
    made = Net(layers, (2, 2, 2), mode="cudacore")
    found = [made.predict(images, batch) for batch in (1, 4, 11)]
    again = made.predict(images, 4)
    monkeypatch.setattr(allocation, "staging", lambda *arrays: None)
    straight = Net(layers, (2, 2, 2), mode="cudacore")
    for batch, outputs in zip((1, 4, 11), found, strict=True):
        assert np.array_equal(straight.predict(images, batch), outputs)
    assert np.array_equal(again, found[1])
