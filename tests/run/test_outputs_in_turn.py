"""Tests of outputs that are copied from the GPU beside what makes the next ones: the same values, in order, wherever the caller stops."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn import Conv2d, ReLU
from nbcnn.run import inference
from nbcnn.run.net import Net


@pytest.fixture
def net(device):
    return Net([Conv2d(3, 1), ReLU()], (1, 2, 2), mode="naive", device=device)


def test_outputs_are_the_same_copied_in_turn(net, rng, monkeypatch):
    x = rng.integers(0, 256, (11, 1, 2, 2), dtype=np.uint8)
    wanted = net.predict(x, 2)
    monkeypatch.setattr(inference, "WORTH_BYTES", 0)
    np.testing.assert_array_equal(net.predict(x, 2), wanted)
    blocks = net.predict_batches(x, 2)
    first = next(blocks)
    # What came first stays what it is while five more outputs go through three slots.
    rest = list(blocks)
    assert [len(each) for each in (first, *rest)] == [2, 2, 2, 2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([first, *rest]), wanted)


def test_two_callers_take_turns(net, rng, monkeypatch):
    x = rng.integers(0, 256, (8, 1, 2, 2), dtype=np.uint8)
    wanted = net.predict(x, 2)
    monkeypatch.setattr(inference, "WORTH_BYTES", 0)
    one, other = net.predict_batches(x, 2), net.predict_batches(x[::-1], 2)
    found = [(next(one), next(other)) for _ in range(4)]
    np.testing.assert_array_equal(np.concatenate([a for a, _ in found]), wanted)
    np.testing.assert_array_equal(np.concatenate([b for _, b in found]), wanted[::-1])
    given_up = net.predict_batches(x, 2)
    next(given_up)
    given_up.close()
    np.testing.assert_array_equal(net.predict(x, 2), wanted)
