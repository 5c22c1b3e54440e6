"""Tests of DepthwiseConv1d in a net: every mode and every variant lands where NumPy does, and `--dwconv` chooses the variant."""

from __future__ import annotations

import re

import numpy as np
import pytest

from nbcnn.cli import recipes, train_flags
from nbcnn.files.errors import UsageError
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200
from nbcnn.modes import DWCONV, MODES, with_dwconv
from nbcnn.nn.activations import Swish
from nbcnn.nn.layers import Residual
from nbcnn.nn.losses import MSE
from nbcnn.nn.series_layers import DepthwiseConv1d
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.flops import conv_shape, step_flops
from nbcnn.plan.graph import Buf, ShapeError, Step, Tape, named, trace
from nbcnn.plan.merging import merge
from nbcnn.plan.op import Op
from nbcnn.plan.storage import decode, encode
from nbcnn.run.net import Net
from nbcnn.run.resolve import resolver
from nbcnn.run.rows import choose_mode

SERIES = (3, 12)
LAYERS = [
    DepthwiseConv1d(5, padding="same", skip=True, channels=3),
    Residual(Swish(), DepthwiseConv1d(16, skip=True, channels=3)),
    DepthwiseConv1d(4, channels=3),
    MSE(),
]
CHOICES = [(*key, "auto") for key, row in MODES.items() if row.device == "gpu"]
# Every variant has kernels of its own; those of other precisions run in test_dwconv1d.py.
CHOICES += [(mode, precision, variant) for mode, precision in (("naive", "fp32"), ("tensorcore", "bf16")) for variant in DWCONV]
if gpu_device.SIMULATOR:
    CHOICES = [("cudacore", "fp32", "auto"), ("naive", "fp32", "warp")]


def gradients(x, **net):
    return Net(LAYERS, SERIES, seed=3, **net).gradients(x)


@pytest.mark.parametrize(("mode", "precision", "variant"), CHOICES)
def test_every_variant_lands_where_numpy_does(mode, precision, variant, device, rng):
    if mode == "tensorcore" and device.capability < (8, 0):
        pytest.skip("tensorcore needs compute capability 8.0")
    x = rng.standard_normal((3, *SERIES)).astype(np.float32)
    x = decode(encode(x, STORE[precision]), STORE[precision])
    wanted_loss, wanted = gradients(x, mode="cpu")
    loss, got = gradients(x, mode=mode, precision=precision, dwconv=variant)
    # Seven layers forward and back; no sum is longer than the 36 products of a weight gradient.
    limit = 14 * parity_bound(36, precision)
    assert loss == pytest.approx(wanted_loss, rel=limit)
    for name, gradient in wanted.items():
        assert np.linalg.norm(got[name] - gradient) <= limit * np.linalg.norm(gradient), name


def test_numpy_gradients_by_differences(rng):
    x, step = rng.standard_normal((2, *SERIES)).astype(np.float32), 1e-2
    net = Net(LAYERS, SERIES, seed=3, mode="cpu")
    _, found = net.gradients(x)
    for name, at in (("dwconv1.weight", (1, 2)), ("dwconv1.skip", (2,)), ("dwconv2.weight", (0, 3))):
        losses = []
        for sign in (1, -1):
            moved = net.params.as_dict()
            moved[name][at] += sign * step
            other = Net(LAYERS, SERIES, seed=3, mode="cpu")
            other.params.load_dict(moved)
            losses.append(other.gradients(x)[0])
        assert found[name][at] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=2e-2, abs=2e-5)


def outputs(layer, x, **params):
    """What the layer makes of series x on the host."""
    net = Net([layer], x.shape[1:], mode="cpu")
    net.params.load_dict({f"dwconv1.{name}": param for name, param in params.items()})
    return net.predict(x)


def conversion(padding):
    """(padding, weight from w, w from weight) of the torch.nn.Conv1d that DepthwiseConv1d's docstring names, as Python expressions."""
    return re.search(rf'"{padding}" +p = (.+?) +weight = (.+?) +w = (.+)', DepthwiseConv1d.__doc__).groups()


def cross_correlation(x, weight, pad):
    """torch.nn.Conv1d's definition with groups of one channel: y[n,c,t] = Σ_j weight[c,0,j]·x[n,c,t+j−pad], zeros outside."""
    taps, padded = weight.shape[2], np.pad(x, ((0, 0), (0, 0), (pad, pad)))
    return np.stack([(padded[:, :, t : t + taps] * weight[:, 0]).sum(2) for t in range(padded.shape[2] - taps + 1)], 2)


def conv1d_of_torch(x, weight, pad):
    torch = pytest.importorskip("torch", reason="compares with PyTorch, which is not installed")
    channels, _, taps = weight.shape
    layer = torch.nn.Conv1d(channels, channels, taps, padding=pad, groups=channels, bias=False)
    layer.load_state_dict({"weight": torch.tensor(weight)})
    return layer(torch.tensor(x)).detach().numpy()


@pytest.mark.parametrize("convolve", [cross_correlation, conv1d_of_torch])
@pytest.mark.parametrize("taps", [1, 4, 5])
@pytest.mark.parametrize("padding", ["causal", "same"])
def test_the_filters_of_a_torch_layer(padding, taps, convolve, rng):
    x, w, d = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 9), (3, taps), (3,)))
    y = outputs(DepthwiseConv1d(taps, padding=padding, skip=True, channels=3), x, weight=w, skip=d)
    pad, to_torch, from_torch = conversion(padding)
    with_skip = w.copy()
    with_skip[:, 0 if padding == "causal" else taps // 2] += d
    weight = eval(to_torch, {"w": with_skip})
    np.testing.assert_array_equal(eval(from_torch, {"weight": weight}), with_skip)
    # Sums of six products at most, in another order; none is longer than the sum of their absolute values.
    limit = 6 * np.finfo(np.float32).eps * (np.abs(w).sum(1) + np.abs(d)).max() * np.abs(x).max()
    np.testing.assert_allclose(convolve(x, weight, eval(pad, {"taps": taps}))[..., :9], y, rtol=0, atol=limit)


def test_a_causal_filter_as_one_of_both_sides(rng):
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 9), (3, 4)))
    turned = np.concatenate([w[:, ::-1], np.zeros((3, 3), np.float32)], 1)
    y = outputs(DepthwiseConv1d(7, padding="same", channels=3), x, weight=turned)
    limit = 4 * np.finfo(np.float32).eps * np.abs(w).sum(1).max() * np.abs(x).max()
    np.testing.assert_allclose(y, outputs(DepthwiseConv1d(4, channels=3), x, weight=w), rtol=0, atol=limit)


def test_both_gradients_are_one_op_where_the_row_has_it():
    layers = named([DepthwiseConv1d(96, channels=3), DepthwiseConv1d(97, channels=3)])
    tape, x = Tape(training=True), Buf("x", (2, 3, 200), home="io")
    y, backward = trace(tape, layers, x)
    backward(y)

    def gradients(row):
        return [str(step.op) for step in merge(tape.steps, row.ops) if step.op.direction != "fprop"]

    assert gradients(MODES["cudacore", "fp32"]) == ["dwconv1d_wgrad", "dwconv1d_dgrad", "dwconv1d_bwd"]
    for row in (MODES["naive", "fp32"], with_dwconv(MODES["cudacore", "fp32"], "warp")):
        assert gradients(row) == ["dwconv1d_wgrad", "dwconv1d_dgrad"] * 2
    assert Op("dwconv1d", "bwd") in with_dwconv(MODES["naive", "fp32"], "best").ops


def test_an_overlay_comes_first_and_counts_as_the_mode():
    for variant, ops in DWCONV.items():
        row = with_dwconv(MODES["cudacore", "fp32"], variant)
        for op, impl in ops.items():
            assert next(row.chain(op)) == (variant, impl)
        assert variant in row.own


@pytest.mark.parametrize("variant", DWCONV)
def test_a_variant_that_is_asked_for_runs_whatever_it_costs(variant):
    """In a row by cost, too: the plainest kernel is estimated to take three times as long as the row's own."""
    x, w, y = Buf("x", (33, 64, 256)), Buf("w", (64, 15)), Buf("y", (33, 64, 256))
    step = Step(Op("dwconv1d", "fprop"), (x, w), (y,), {"padding": "causal"})
    row = MODES["tensorcore", "bf16"]
    assert row.by_cost
    chosen = resolver(with_dwconv(row, variant), H200)(step)
    assert chosen.mode == variant
    if variant == "naive":
        asked, own = (float(words.split()[-2]) for words in chosen.offered)
        assert asked > 2 * own
    assert resolver(row, H200)(step).mode == "common"


def test_a_variant_is_refused_on_the_cpu():
    with pytest.raises(UsageError, match="GPU"):
        choose_mode("cpu", None, dwconv="warp")


def test_the_flag_knows_every_variant():
    assert recipes.fill(train_flags.parse(["--dwconv", "shared"])).dwconv == "shared"
    assert recipes.fill(train_flags.parse([])).dwconv == "auto"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="valid"):
        DepthwiseConv1d(4, padding="valid", channels=3)
    with pytest.raises(ShapeError, match="series"):
        Net([DepthwiseConv1d(3, channels=4), MSE()], (3, 12), mode="cpu")


def test_flops_count_the_taps_that_meet_the_series():
    net = Net([DepthwiseConv1d(16, channels=3), DepthwiseConv1d(4, padding="same", channels=3), MSE()], SERIES, mode="cpu")
    steps = [step for step in net.record_gradients(2).steps if str(step.op).startswith("dwconv1d")]
    assert [conv_shape(step) for step in steps] == [None] * len(steps)
    # Causal: 1 + 2 + … + 12 products per row of 12; same with four taps: offsets −2, −1, 0, 1.
    causal, same = 2 * 6 * 78, 2 * 6 * (10 + 11 + 12 + 11)
    assert {step.scope: step_flops(step) for step in steps} == {"dwconv1": causal, "dwconv2": same}
