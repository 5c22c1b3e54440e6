"""Tests of `bench predict`: what a row says, what is too far from float64 gets no time, and flags that do not go together."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from nbcnn.cli import bench, bench_nets
from nbcnn.files.errors import UsageError
from nbcnn.lab.measure import nets, schema
from nbcnn.lab.studies import predict as study
from nbcnn.lab.studies.nets import Apart
from nbcnn.nn.activations import Swish
from nbcnn.nn.layers import Flatten, Linear
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.run.net import Net

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is no dependency")


def layers():
    return [Flatten(), Linear(4), Swish(), Linear(3), SoftmaxCrossEntropy()]


TINY = nets.Network("tiny", "a test", layers, (2, 2, 2), 4)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(study, "MANY", 2)


def test_a_row_says_how_long_and_how_many(few):
    rows = list(study.measure(TINY, "fp32", mode="cpu", batches=(1, 3), seconds=0.002, peer=False))
    assert [(row["form"], row["batch"], "why" in row) for row in rows] == [("nbcnn cpu", 1, False), ("nbcnn cpu", 3, False)]
    schema.fits(rows, schema.KINDS["predict"][1], "rows")
    for row in rows:
        assert row["latency_ms"]["median"] > row["replay_ms"]["least"] > 0
        assert row["images_per_second"] > 0
        assert row["evaluated_per_second"] > 0
        assert row["launches"] == 4  # gather, two linear layers, Swish: vectors are flattened images without a copy
    text = study.lines([*rows, {"what": "tiny", "precision": "fp32", "batch": 1, "form": "PyTorch graph", "why": "it failed"}])
    assert len(text) == 4
    assert text[-1].endswith("not timed: it failed")


def test_outputs_that_are_not_finite_get_no_time(few, monkeypatch):
    monkeypatch.setattr(study.Net, "predict", lambda net, images, batch: np.full((len(images), 3), np.nan, np.float32))
    (row,) = study.measure(TINY, "fp32", mode="cpu", batches=(1,), seconds=0.002, peer=False)
    assert row["ok"] is False
    assert "not finite" in row["why"]


def test_outputs_may_be_twice_as_far_off_as_pytorchs():
    net = Net(layers(), (2, 2, 2), mode="cpu")
    exact = np.ones((2, 3))
    found = study.check(net, exact + 0.02, exact, exact + 0.0101)
    assert found == {"error": pytest.approx(0.02), "peer_error": pytest.approx(0.0101)}
    with pytest.raises(Apart, match="the outputs are"):
        study.check(net, exact + 0.03, exact, exact + 0.01)


def test_flags_that_do_not_go_together_are_refused():
    def flags(*words):
        return bench.parser().parse_args(["predict", *words])

    assert bench_nets.names(flags()) == ("mlp", *nets.NETWORKS)
    with pytest.raises(UsageError, match=r"bench predict has no network 'mlb'.*mlp"):
        bench_nets.names(flags("--model", "mlb"))
    with pytest.raises(UsageError, match="no form compile-max"):
        bench_nets.check_predict(flags("--forms", "compile-max"))
    with pytest.raises(UsageError, match="--compare holds one network"):
        bench_nets.check_predict(flags("--compare", "old.json"))
    given = SimpleNamespace(what="predict", batch=1, recompute=None)
    assert bench_nets.section("mlp", "bf16", given) == "predict-bf16-mlp-1"


@needs_torch
def test_our_outputs_are_the_twins():
    net = Net(layers(), (2, 2, 2), mode="cpu")
    images = nets.examples(net, 3)[0]
    exact, its = study._outputs(net, images, "fp32")
    errors = study.check(net, net.predict(images), exact, its)
    assert errors["error"] < 1e-6
