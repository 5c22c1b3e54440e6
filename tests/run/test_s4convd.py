"""Tests of S4ConvD as a net: its size, its two initialisations and losses, gradients by differences, every mode beside NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gradients import assert_same_gradients

from nbcnn.files.errors import UsageError
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200
from nbcnn.lab.studies import forecast_step
from nbcnn.modes import MODES, REFERENCES
from nbcnn.nn.activations import ReLU, Softmax, Swish, Tanh
from nbcnn.nn.graphs import wired
from nbcnn.nn.layers import Linear, Residual, sized
from nbcnn.nn.losses import ForecastMSE
from nbcnn.nn.models import LOSSES, s4convd
from nbcnn.nn.series_layers import GLU, DepthwiseConv1d, LastStep, PointwiseConv1d, StateSpaceConv1d
from nbcnn.ops.kernel.call import host, planned_call
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.graph import Buf, ShapeError, Tape, Wired, drop_dead, trace_nodes
from nbcnn.plan.lowering import lower
from nbcnn.plan.merging import merge
from nbcnn.plan.storage import decode, encode
from nbcnn.run.net import Net
from nbcnn.run.resolve import resolver

SHAPE = (3, 8)
ROWS = [("cudacore", "fp32")] if gpu_device.SIMULATOR else [key for key, row in MODES.items() if row.device == "gpu"]


def small(**options):
    return sized(s4convd(3, wide=4, blocks=2, taps=7, states=2, **options), SHAPE)


def batch(rng, count=2):
    return rng.standard_normal((count, *SHAPE)).astype(np.float32), np.abs(rng.standard_normal(count)).astype(np.float32)


def test_it_has_the_published_number_of_parameters():
    assert Net(s4convd(), (4, 48), mode="cpu").params.count == 199_425


def test_first_values_are_those_of_the_two_initialisations():
    lin = Net(s4convd(), (4, 48), mode="cpu").params.as_dict()
    repo = Net(s4convd(kernel_init="repo"), (4, 48), mode="cpu", init="he").params.as_dict()
    name = "residual1.s4d1."
    np.testing.assert_allclose(lin[name + "a_im"], np.broadcast_to(np.pi * np.arange(32, dtype=np.float32), (128, 32)), rtol=1e-6)
    np.testing.assert_allclose(lin[name + "a_re"], np.log(0.5), rtol=1e-6)
    assert (repo[name + "a_im"] == 1).all()
    # Standard normal: 4,096 values have a mean within 5/√4096 and a deviation within 5/√8192.
    for values in (repo[name + "a_re"], lin[name + "c_re"], lin[name + "c_im"]):
        assert abs(values.mean()) < 0.08
        assert abs(values.std() - 1) < 0.06
    for values in (lin[name + "log_dt"], repo[name + "log_dt"]):
        assert np.log(1e-3) <= values.min() <= values.max() <= np.log(1e-1)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kernel_init", ["s4d-lin", "repo"])
def test_gradients_by_differences(rng, loss, kernel_init):
    x, target = batch(rng, 5)
    layers, step = small(loss=loss, kernel_init=kernel_init, unit=2.0), 1e-2
    net = Net(layers, SHAPE, seed=1, mode="cpu")
    weights = net.params.as_dict()
    weights["linear1.bias"] += 1  # rmsle has no gradient where a prediction is below 0
    net.params.load_dict(weights)
    _, found = net.gradients(x, target)
    for name in ("residual1.s4d1.log_dt", "residual2.s4d1.a_re", "residual1.s4d1.c_im", "residual2.pointwise1.weight", "linear1.weight"):
        # Along the gradient itself the slope is its length.
        way = found[name] / np.linalg.norm(found[name])
        values = []
        for sign in (1, -1):
            net.params.load_dict(weights | {name: weights[name] + np.float32(sign * step) * way})
            values.append(net.gradients(x, target)[0])
        slope = (values[0] - values[1]) / (2 * step)
        # The loss is float32 work: its rounding over the step, and the curvature that the step sees.
        assert slope == pytest.approx(np.linalg.norm(found[name]), rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("row", ROWS, ids="-".join)
@pytest.mark.parametrize("loss", LOSSES[:1] if gpu_device.SIMULATOR else LOSSES)
def test_every_mode_lands_where_numpy_does(row, loss, device, rng):
    if row[0] == "tensorcore" and device.capability < (8, 0):
        pytest.skip("tensorcore needs compute capability 8.0")
    x, target = batch(rng)
    x = decode(encode(x, STORE[row[1]]), STORE[row[1]])
    layers = small(loss=loss, unit=2.0)
    weights = Net(layers, SHAPE, seed=1, mode="cpu").params.as_dict()
    weights["linear1.bias"] += 2
    nets = [Net(layers, SHAPE, mode=mode, precision=precision) for mode, precision in (("cpu", "fp32"), row)]
    for net in nets:
        net.params.load_dict(weights)
    (wanted_loss, wanted), (got_loss, got) = (net.gradients(x, target) for net in nets)
    # Twelve layers forward and back, of sums of at most 14 terms.
    limit = 24 * parity_bound(14, row[1])
    assert got_loss == pytest.approx(wanted_loss, rel=limit)
    for name, gradient in wanted.items():
        assert np.linalg.norm(got[name] - gradient) <= limit * np.linalg.norm(gradient), name
    np.testing.assert_allclose(nets[1].predict(x), nets[0].predict(x), rtol=limit, atol=limit)


def test_a_residual_is_fused_inside():
    steps = _recorded(small(), MODES["cudacore", "fp32"].ops)
    ops = [str(step.op) for step in steps]
    assert ops.count("dwconv1d_bwd") == 2
    assert not {"dwconv1d_wgrad", "dwconv1d_dgrad"} & set(ops)
    # The first block gates in the product's epilogue; of the second, the layers behind the convolution see one hour.
    assert ops.count("pwconv1d_glu_fprop") == ops.count("glu_fprop") == 1
    assert {
        step.ins[0].shape[2] for step in steps if step.scope.startswith("residual2") and str(step.op).startswith(("gelu", "pwconv1d", "glu"))
    } == {1}
    plain = [str(step.op) for step in _recorded(small(), ())]
    assert not {"dwconv1d_bwd", "pwconv1d_glu_fprop"} & set(plain)
    assert plain.count("glu_fprop") == 2


@pytest.mark.parametrize("length", [8, 7])
def test_fused_and_plain_networks_are_one(rng, monkeypatch, length):
    row = MODES["cpu", "fp32"]
    fused_ops = {name: host(function) for name, function in REFERENCES.items()}
    monkeypatch.setitem(MODES, ("cpu", "fp32"), replace(row, fallbacks=(("cpu", row.fallbacks[0][1] | fused_ops),)))
    x, target = rng.standard_normal((2, 3, length)).astype(np.float32), np.array([0.5, 2.0], np.float32)
    plain, fused = (Net(small(), x.shape[1:], mode="cpu", fusing=fusing) for fusing in (False, True))
    (loss, wanted), (fused_loss, got) = plain.gradients(x, target), fused.gradients(x, target)
    # The same sums of at most 14 float32 terms, some in another order, through twelve layers.
    limit = 24 * parity_bound(14, "fp32")
    assert fused_loss == pytest.approx(loss, rel=limit)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert np.linalg.norm(got[name] - gradient) <= limit * np.linalg.norm(gradient), name
    np.testing.assert_allclose(fused.predict(x), plain.predict(x), rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("layers", "hourly"),
    [
        ([DepthwiseConv1d(3), PointwiseConv1d(6), GLU(), Tanh(), LastStep()], {"pwconv1d", "glu", "tanh"}),
        ([Residual(DepthwiseConv1d(3)), LastStep()], {"add"}),
        ([Residual(DepthwiseConv1d(3), Swish()), Residual(PointwiseConv1d(3), ReLU()), LastStep()], {"pwconv1d", "relu", "add"}),
        ([Tanh(), Softmax(), LastStep()], set()),
    ],
)
def test_what_is_made_hour_by_hour_is_made_of_the_last_hour(rng, layers, hourly):
    """In any list, by any map, forward and backward; a softmax over channels is no map."""
    plain, fused = (Net([*layers, Linear(1), ForecastMSE()], (3, 9), mode="cpu", fusing=fusing) for fusing in (False, True))
    steps = [step for step in fused.record_gradients(2).steps if len(step.outs[0].shape) == 3]
    assert {step.op.kind for step in steps if step.outs[0].shape[2] == 1} == hourly
    passes = [step.op.direction for step in steps if step.op.kind in hourly - {"add"} and step.outs[0].shape[2] == 1]
    assert passes.count("fprop") == passes.count("dgrad") == len(hourly - {"add"})
    # The same sums of at most 9 float32 terms through six layers; what is left out is zero.
    assert_same_gradients(plain, fused, *(rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 9), (2,))), limit=12 * 9 * 2.0**-23)


def _recorded(layers, ops, shape=SHAPE, batch=2):
    """The steps of a training step on the caller's own series, fused by a row's `ops`."""
    *body, last = wired(layers).nodes
    tape = Tape(training=True)
    (y,), backward = trace_nodes(tape, Wired(tuple(body), last.reads), [Buf("x", (batch, *shape), home="io")])
    backward([last.layer.build(tape, y, Buf("targets", (batch,), home="io"), "loss")[1]])
    return merge(drop_dead(tape.steps), ops)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="s4d-lin"):
        StateSpaceConv1d(7, init="hippo", channels=4)
    with pytest.raises(ValueError, match="log-mse"):
        s4convd(loss="mae")
    for layers, shape in (
        ([PointwiseConv1d(3, in_channels=4)], (3, 7)),
        ([GLU()], (3, 7)),
        ([LastStep()], (3, 7, 1)),
        ([StateSpaceConv1d(7, channels=4)], (3, 7)),
    ):
        with pytest.raises(ShapeError):
            Net(layers, shape, mode="cpu")
    with pytest.raises(ShapeError, match="targets"):
        Net([LastStep(), ForecastMSE()], (3, 7), mode="cpu").record_gradients(2)
    with pytest.raises(UsageError, match="series must be float32"):
        Net([LastStep()], (3, 7), mode="cpu").predict(np.zeros((2, 3, 7)))


@pytest.mark.parametrize(("mode", "precision"), [key for key in MODES if key[0] in ("cudacore", "tensorcore")])
def test_every_step_of_a_training_plan_has_a_count(mode, precision):
    row = MODES[mode, precision]
    steps = _recorded(sized(s4convd(), (4, 48)), row.ops, (4, 48), 64)
    plan = lower(steps, row.layout, resolver(row, H200), Buf("weights", (1,), home="param"), row.store)
    steps = [item for item in plan.steps if str(item.step.op) != "pack_weights"]
    assert {str(item.step.op) for item in steps} >= {"pwconv1d_fprop", "pwconv1d_dgrad", "dwconv1d_bwd", "s4kernel_dgrad", "glu_dgrad", "last_dgrad"}
    for item in steps:
        assert item.how.impl.traffic is not None, item.step.op
        launches = item.how.impl.traffic(planned_call(item, plan.layout))
        assert all(one.write > 0 and 0 < one.distinct <= one.read for one in launches), item.step.op


VARIANTS = ("naive", "coalesced", "shared", "warp", "best")


def test_every_variant_trains_alike(gpu):
    """A hundred training steps of the published network, from the same weights on the same windows: the losses stay within 1e-4 of naive's."""
    apart = forecast_step.curves_apart(VARIANTS, mode="cudacore")
    assert tuple(apart) == VARIANTS
    assert max(apart.values()) < 1e-4
