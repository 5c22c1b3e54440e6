"""Tests of training steps for a loop of one's own: against `fit`, gradients that add up, several passes and outputs; on a played GPU, the memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from scripts import ROOT, on_a_played_gpu

import nbcnn
from nbcnn import SGD, AdamW, BatchNorm2d, Conv2d, Cosine, Dropout, Flatten, Input, Linear, MaxPool2d, ReLU, UsageError
from nbcnn.plan.bounds import parity_bound

RANDOM = np.random.default_rng(3)
X, T = RANDOM.standard_normal((8, 2, 6, 6)).astype(np.float32), RANDOM.standard_normal((8, 3)).astype(np.float32)


def body():
    return [Conv2d(4, 3, padding=1, bias=False), BatchNorm2d(), ReLU(), MaxPool2d(2), Flatten(), Linear(3)]


def model_of(layers, loss=None, shape=(2, 6, 6), **options):
    return nbcnn.Model(layers, loss, mode="cpu", **options).build(shape)


def whole(*shape):
    """Small whole numbers, whose products and sums float32 has exactly."""
    return RANDOM.integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize("optimizer", [SGD(lr=Cosine(0.05), weight_decay=0.01), AdamW(lr=0.01)], ids=["sgd", "adamw"])
def test_a_loop_is_fit(optimizer):
    """Six updates by the mean squared error's gradient, in the order of the data: as `fit`, but for the rounding of the loss's own gradient.

    Each update moves weights by less than 0.05 (SGD) or 0.01 (AdamW) times a number of the order of 1, and a gradient is off by 2⁻²⁰ of its largest
    element (tests/run/test_function.py). Adam divides by the gradient's own size, so a small element may be off by far more: its bound is a hundredth
    of what the six updates move.
    """
    fitted, own = model_of(body(), "mse", seed=5), model_of(body(), "mse", seed=5)
    before = own.weights()
    fitted.fit(X, T, epochs=3, batch_size=4, optimizer=optimizer, shuffle=False, verbose=0)
    step = own.step(optimizer, steps=6, steps_per_epoch=2)
    for _ in range(3):
        for at in (0, 4):
            y = step.forward(X[at : at + 4])
            step.backward(2 * (y - T[at : at + 4]) / y.size)
            step.update()
    assert step.updates == 6
    assert step.finite()
    for name, wanted in fitted.weights().items():
        moved = np.abs(wanted - before[name]).max()
        limit = 0.01 if isinstance(optimizer, AdamW) else 2**-14
        np.testing.assert_allclose(own.weights()[name], wanted, rtol=0, atol=limit * moved, err_msg=name)


def test_gradients_add_up_until_the_update_and_the_update_is_the_optimizers():
    model = model_of([Flatten(), Linear(3)])
    weights = {"linear1.weight": whole(3, 72), "linear1.bias": whole(3)}
    model.set_weights(weights)
    step = model.step(SGD(lr=0.5, momentum=0))
    parts = [(whole(4, 2, 6, 6), whole(4, 3)) for _ in range(3)]
    for x, dy in parts:
        assert np.array_equal(step.forward(x), x.reshape(4, 72) @ weights["linear1.weight"].T + weights["linear1.bias"])
        assert step.backward(dy) is None
    grads = {"linear1.weight": sum(dy.T @ x.reshape(4, 72) for x, dy in parts), "linear1.bias": sum(dy.sum(0) for _, dy in parts)}
    for name, grad in step.gradients().items():
        assert np.array_equal(grad, grads[name])
    step.update()
    assert not step.gradients()["linear1.bias"].any()
    for name, values in model.weights().items():
        assert np.array_equal(values, weights[name] - np.float32(0.5) * grads[name])
    # The next gradients begin anew, and what the model predicts has moved.
    x, dy = parts[0]
    assert np.array_equal(step.forward(x), model.predict(x))
    step.backward(dy)
    assert np.array_equal(step.gradients()["linear1.bias"], dy.sum(0))


def test_several_passes_wait_and_inputs_have_gradients():
    """As a contrastive pair and a GAN's generator need them."""
    model = model_of([Flatten(), Linear(3, bias=False)])
    w = whole(3, 72)
    model.set_weights({"linear1.weight": w})
    step = model.step("sgd")
    (a, da), (b, db) = [(whole(4, 2, 6, 6), whole(4, 3)) for _ in range(2)]
    ya, yb = step.forward(a), step.forward(b)
    with pytest.raises(UsageError, match=r"2 forward passes wait: .*backward\(dy, of=y\)"):
        step.backward(da)
    dx = step.backward(da, of=ya, inputs=True, parameters=False)
    assert np.array_equal(dx, (da @ w).reshape(a.shape))
    assert not step.gradients()["linear1.weight"].any()
    assert step.backward(db, of=yb) is None
    assert np.array_equal(step.gradients()["linear1.weight"], db.T @ b.reshape(4, 72))
    # An output that was given is the caller's: a later pass in the same memory leaves it.
    kept = ya.copy()
    step.forward(whole(4, 2, 6, 6))
    assert np.array_equal(ya, kept)
    step.clear()
    with pytest.raises(UsageError, match="no gradients since the last update"):
        step.update()
    with pytest.raises(UsageError, match="no forward pass waits"):
        step.backward(da)


def test_several_outputs():
    x = Input((2, 6, 6))
    h = Linear(5, bias=False)(Flatten()(x))
    model = nbcnn.Model(x, [h, Linear(2, bias=False)(h)], mode="cpu")
    v, w = whole(5, 72), whole(2, 5)
    model.set_weights({"linear1.weight": v, "linear2.weight": w})
    step = model.step("sgd")
    X, dh, dy = whole(4, 2, 6, 6), whole(4, 5), whole(4, 2)
    flat = X.reshape(4, 72)
    h, y = step.forward(X)
    assert np.array_equal(h, flat @ v.T)
    assert np.array_equal(y, h @ w.T)
    step.backward((dh, dy))
    assert np.array_equal(step.gradients()["linear1.weight"], (dh + dy @ w).T @ flat)
    step.clear()
    step.forward(X)
    step.backward((None, dy))
    assert np.array_equal(step.gradients()["linear1.weight"], (dy @ w).T @ flat)
    step.forward(X)
    with pytest.raises(UsageError, match="2 outputs: give a tuple"):
        step.backward(dy)


def test_frozen_parameters_stay_and_images_are_read_as_fit_reads_them():
    normalisation = nbcnn.Normalisation((0.5, 0.25), (0.5, 0.25))
    model = model_of(body(), normalisation=normalisation)
    model.freeze("conv1")
    images = RANDOM.integers(0, 256, (4, 2, 6, 6), dtype=np.uint8)
    before, step = model.weights(), model.step(SGD(lr=0.1))
    y = step.forward(images)
    step.backward(y)
    step.update()
    after = model.weights()
    assert {name for name in before if np.array_equal(before[name], after[name])} == {"conv1.weight"}
    with pytest.raises(UsageError, match="clip_norm would count"):
        model.step(SGD(clip_norm=1.0))
    plain = model_of(body(), seed=model.seed)
    assert np.array_equal(plain.step().forward(normalisation.done(images).astype(np.float32)), y)


def test_what_no_loop_can_train_is_refused():
    for layers, words in (
        ([Flatten(), Dropout(0.5), Linear(3)], "dropout1 draws random numbers"),
        ([nbcnn.Whiten(), Conv2d(3, 3)], "Whiten is fitted"),
    ):
        with pytest.raises(UsageError, match=words):
            model_of(layers, shape=(3, 6, 6)).step()
    a, b = Input((4,)), Input((4,))
    with pytest.raises(UsageError, match="networks with one input"):
        nbcnn.Model((a, b), Linear(2)(a + b), mode="cpu").step()
    with pytest.raises(UsageError, match="not built"):
        nbcnn.Model([Linear(3)], mode="cpu").step()
    step = model_of(body()).step()
    for dy in (np.zeros((4, 2), np.float32), np.zeros((4, 3), np.int64)):
        step.forward(X[:4])
        with pytest.raises(UsageError, match=r"must be float32 \(4, 3\)"):
            step.backward(dy)
        step.clear()
    step.forward(X)
    with pytest.raises(UsageError, match="asked for no gradient"):
        step.backward(T, parameters=False)
    for _ in range(15):
        step.forward(X)
    with pytest.raises(UsageError, match="16 forward passes wait"):
        step.forward(X)


def overwritten_by_another_step(model):
    other = model.step("sgd")
    other.backward(other.forward(X))


def overwritten_by_fit(model):
    model.fit(X, T, epochs=1, verbose=0)


@pytest.mark.parametrize("overwrite", [overwritten_by_another_step, overwritten_by_fit, lambda model: model.step()], ids=["step", "fit", "new step"])
def test_gradients_that_others_overwrote_are_not_taken(overwrite):
    """A model has one set of gradients: an update by those of another step, of fit, or by zeros would say nothing."""
    model = model_of([Flatten(), Linear(3)], "mse")
    step = model.step("sgd")
    y = step.forward(X)
    step.backward(y)
    waits = step.forward(X)
    overwrite(model)
    before = model.weights()
    for call in (step.update, step.gradients, lambda: step.backward(waits)):
        with pytest.raises(UsageError, match=r"has overwritten the gradients since backward: call clear\(\)"):
            call()
    assert all(np.array_equal(values, before[name]) for name, values in model.weights().items())
    step.clear()
    step.backward(step.forward(X))
    step.update()
    assert step.updates == 1


def test_a_parameter_that_is_frozen_later_does_not_move():
    model = model_of([Flatten(), Linear(3)])
    step, before = model.step("sgd"), model.weights()
    step.backward(step.forward(X))
    model.freeze("linear1.weight")
    with pytest.raises(UsageError, match=r"freeze, unfreeze or set_factors was called after model\.step: make another step"):
        step.update()
    assert all(np.array_equal(values, before[name]) for name, values in model.weights().items())
    model.unfreeze("linear1.weight")
    step.update()
    assert not np.array_equal(model.weights()["linear1.weight"], before["linear1.weight"])


def test_steps_with_whole_turns_share_a_model():
    model = model_of([Flatten(), Linear(3)])
    for _ in range(2):
        for step in (model.step("sgd"), model.step("adam")):
            step.backward(step.forward(X))
            step.update()
            assert step.updates == 1


def test_a_closed_step_is_refused():
    step = model_of(body()).step()
    step.backward(step.forward(X))
    step.close()
    step.close()
    with pytest.raises(UsageError, match="the step was closed"):
        step.forward(X)
    with pytest.raises(UsageError, match="no gradients"):
        step.update()


PLAYED = """
import played_driver
played_driver.install()
played_driver.compile_nothing()

import numpy as np
import nbcnn
from nbcnn.gpu import driver
from nbcnn.gpu.arrays import DeviceArray

layers = [nbcnn.Conv2d(64, 3, padding=1), nbcnn.BatchNorm2d(), nbcnn.ReLU(), nbcnn.Flatten(), nbcnn.Linear(10)]
for mode, precision in (("tensorcore", "bf16"), ("cudacore", "fp32")):
    model = nbcnn.Model(layers, mode=mode, precision=precision).build((3, 8, 8))
    step = model.step(nbcnn.Adam())
    x, dy = (DeviceArray(driver.empty(int(np.prod(shape)), "float32"), shape) for shape in ((4, 3, 8, 8), (4, 10)))
    seen = []
    for turn in range(4):
        if turn == 2:
            count, launched = played_driver.calls["cuMemAlloc"], played_driver.calls["cuLaunchKernelEx"] + played_driver.calls["cuLaunchKernel"]
        y = step.forward(x)
        assert isinstance(y, DeviceArray) and y.shape == (4, 10) and y.ready is not None
        dx = step.backward(dy, inputs=True)
        assert isinstance(dx, DeviceArray) and dx.shape == x.shape
        step.forward(x)
        step.backward(dy)
        step.update()
        seen.append(y.flat.address)
    assert len(set(seen)) == 1, "a pass that is over is taken again"
    assert played_driver.calls["cuMemAlloc"] == count, "steps that repeat allocate nothing"
    assert played_driver.calls["cuLaunchKernelEx"] + played_driver.calls["cuLaunchKernel"] == launched, "what repeats is captured"
    host = step.forward(np.zeros((2, 3, 8, 8), np.float32))
    assert isinstance(host, np.ndarray) and host.shape == (2, 10)
    step.close()
try:
    nbcnn.Model(layers, mode="tensorcore", precision="fp16").build((3, 8, 8)).step()
except nbcnn.UsageError as error:
    assert "scales the loss" in str(error)
print("captured")
"""


def test_on_a_played_gpu_a_step_that_repeats_is_captured_and_allocates_nothing(tmp_path):
    done = on_a_played_gpu(PLAYED, tmp_path)
    assert done.stdout == "captured\n", done.stderr[-3000:]


SIMULATED = """
import sys

import numpy as np

import nbcnn
from nbcnn import BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, ReLU

random = np.random.default_rng(0)
x, t = random.standard_normal((2, 2, 4, 4)).astype(np.float32), random.standard_normal((2, 3)).astype(np.float32)
for mode in ("cpu", "naive", "cudacore"):
    layers = [Conv2d(4, 3, padding=1, bias=False), BatchNorm2d(), ReLU(), MaxPool2d(2), Flatten(), Linear(3)]
    model = nbcnn.Model(layers, mode=mode, seed=1).build((2, 4, 4))
    step, made = model.step(nbcnn.SGD(lr=0.1)), {}
    for turn in range(2):
        a, b = step.forward(x), step.forward(x[::-1].copy())
        made |= {f"y{turn}": a, f"dx{turn}": step.backward(a - t, of=a, inputs=True)}
        step.backward(b - t, of=b)
        step.update()
    assert step.finite()
    np.savez(f"{sys.argv[1]}/{mode}.npz", **made, **model.weights())
"""


def test_in_the_simulator_a_loop_agrees_with_the_numpy_path(tmp_path):
    """Two updates of two passes each, whose gradients add up: each of six layers may err by the parity bound, in the two updates."""
    environment = os.environ | {"NBCNN_SIMULATOR": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SIMULATED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = np.load(tmp_path / "cpu.npz")
    for mode in ("naive", "cudacore"):
        found = np.load(tmp_path / f"{mode}.npz")
        for name in wanted.files:
            assert np.linalg.norm(found[name] - wanted[name]) <= 2 * 6 * parity_bound(150, "fp32") * np.linalg.norm(wanted[name]), (mode, name)
