"""Tests of derived gradients: every rule against the complex step, and losses and activations that are declared without a gradient, on every row."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

import nbcnn
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.compiler import SIMULATED_CAPABILITY
from nbcnn.gpu.language import jit
from nbcnn.model import declare
from nbcnn.model.derive import _RULES, derivative
from nbcnn.modes import MODES
from nbcnn.nn.description import DescriptionError
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.losses import pairs

EPS = float(np.finfo(np.float64).eps)


@jit(device=True)
def softplus(x):
    return (0.0 if x < 0.0 else x) + math.log1p(math.exp(-abs(x)))


def focal(y, target, gamma=1.5):
    """(1 − p)^gamma·cross-entropy of a logit y (Lin et al., arXiv:1708.02002)"""
    cost = softplus(-y) if target > 0.5 else softplus(y)
    return math.pow(1.0 - math.exp(-cost), gamma) * cost


def focal_by_hand(y, target, gamma):
    z = y if target > 0.5 else -y
    p = 1 / (1 + math.exp(-z))
    return (-1 if target > 0.5 else 1) * (1 - p) ** gamma * (1 - p - gamma * p * math.log(p))


@pytest.fixture(autouse=True)
def clean():
    """What these tests declare is taken out again."""
    yield
    for name in {"focal", "saturating", "charbonnier"} & declare._declared.keys():
        declare.forget(name)


def arguments_of(name):
    """Where a function of math is defined, and smooth."""
    return [(0.3, 0.7), (0.6, 1.9)] if len(_RULES[name]) == 2 else [(0.5,), (0.6,)]


@pytest.mark.parametrize("name", [name for name in _RULES if name not in ("floor", "ceil", "trunc")])
def test_every_function_of_math_has_its_derivatives(name, tmp_path):
    count = len(_RULES[name])
    letters = "ab"[:count]
    file = tmp_path / "own.py"
    file.write_text(f"import math\ndef f({', '.join(letters)}):\n    return math.{name}({', '.join(letters)})\n")
    space: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    f, h = space["f"], 1e-5
    for at in range(count):
        slope = derivative(f, at)
        for point in arguments_of(name):
            up, down = ([*point[:at], point[at] + sign * h, *point[at + 1 :]] for sign in (1, -1))
            # The difference is off by h²/6 times the third derivative, here at most 30, and by ε/h of the value.
            assert slope(*point) == pytest.approx((f(*up) - f(*down)) / (2 * h), abs=30 * h * h / 6 + 8 * EPS / h)


def everything(y, target):
    """Assignments at once, branches, a loop, augmented assignments, powers, quotients."""
    total, other = y * y, 1.0 / (2.0 + y)
    for k in range(1, 4):
        total += y**k / (1.0 + k)
        total, other = total - 0.5 * other, total * other
        if target > 0.5:
            total *= 0.75
        else:
            other -= y
    power = -(total**2) + 2.0**y
    return power / (1.0 + other * other) if other > -1e6 else 0.0


def complex_everything(y, target):
    total, other = y * y, 1.0 / (2.0 + y)
    for k in range(1, 4):
        total += y**k / (1.0 + k)
        total, other = total - 0.5 * other, total * other
        if target > 0.5:
            total *= 0.75
        else:
            other -= y
    return (-(total**2) + cmath.exp(y * math.log(2.0))) / (1.0 + other * other)


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_statements_and_operators(target):
    slope = derivative(everything)
    for y in (0.3, 0.9, 1.7):
        assert everything(y, target) == pytest.approx(complex_everything(y, target).real, rel=64 * EPS)
        # Of a step of 1e-30 along the imaginary axis nothing cancels: the derivative to a few roundings of about forty terms.
        assert slope(y, target) == pytest.approx(complex_everything(complex(y, 1e-30), target).imag / 1e-30, rel=400 * EPS)


def test_kinks_and_what_does_not_depend_on_it():
    def kinked(x, other):
        return max(x, other) + 2.0 * min(x, other) + abs(x) + math.floor(x) + (3.0 if x > other else other)

    slope = derivative(kinked)
    assert [slope(-1.0, 0.5), slope(0.25, 0.5), slope(2.0, 0.5)] == [1.0, 3.0, 2.0]
    assert math.isnan(derivative(distance)(math.nan))


def distance(x):
    return abs(x)


def test_what_cannot_be_derived_is_named_with_its_line(tmp_path):
    def unpacked(y, target):
        pair = (y, target)
        return pair[0]

    def gamma(y, target):
        return math.lgamma(y)

    def without_default(y, target, gamma):
        return gamma * (y - target)

    layers = [nbcnn.Linear(1)]
    for given, words in (
        (unpacked, f"test_derive.py, line {unpacked.__code__.co_firstlineno + 1}: "),
        (unpacked, "\\(y, target\\); declare it with one"),
        (gamma, "math.lgamma\\(y\\); declare it with one"),
        (without_default, "gamma has none"),
    ):
        with pytest.raises(nbcnn.UsageError, match=words):
            nbcnn.Model(layers, given, mode="cpu")
    with pytest.raises(nbcnn.UsageError, match="a gradient that reads y must be given"):
        nbcnn.activation("late", distance, reads="y")


def test_a_plain_function_is_a_loss(tmp_path):
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 256, (8, 6)).astype(np.uint8), [0, 1] * 4
    model = nbcnn.Model([nbcnn.Linear(1)], focal, mode="cpu")
    assert repr(model.loss) == "Focal(gamma=1.5)"
    assert type(nbcnn.Model([nbcnn.Linear(1)], loss=focal, mode="cpu").loss) is type(model.loss), "the same function is the same loss"
    history = model.fit(x, y, epochs=30, batch_size=4, run=tmp_path / "run", verbose=0)
    assert history.rows[-1]["loss"] < 0.9 * history.rows[0]["loss"]
    model.save(tmp_path / "net.safetensors")
    for path in ("run", "net.safetensors"):
        np.testing.assert_array_equal(nbcnn.load(tmp_path / path, mode="cpu").predict(x), model.predict(x))
    z, target = rng.standard_normal(100) * 3, (rng.random(100) > 0.5).astype(np.float64)
    wanted = [focal_by_hand(float(a), float(b), 1.5) for a, b in zip(z, target, strict=True)]
    # 0.5, the constants and the parameter are exact in float32.
    np.testing.assert_allclose(pairs.LOSSES["focal"].slopes(z, target, gamma=1.5), wanted, rtol=1e-10)
    declare.forget("focal")
    with pytest.raises(DescriptionError, match="import the file that declares it first"):
        nbcnn.load(tmp_path / "net.safetensors", mode="cpu")
    nbcnn.loss("focal", focal, gamma=1.5)
    assert repr(nbcnn.load(tmp_path / "net.safetensors", mode="cpu").loss) == "Focal(gamma=1.5)"


def saturating(x, width):
    """x/√(width + x²)"""
    return x / math.sqrt(width + x * x)


def charbonnier(y, target):
    d = y - target
    return math.sqrt(d * d + 0.25)


@pytest.mark.parametrize("key", [key for key in MODES if key[0] != "cpu"], ids="-".join)
def test_training_on_kernels(key, device):
    if gpu_device.SIMULATOR and key[0] == "tensorcore" and SIMULATED_CAPABILITY < (8, 0):
        pytest.skip("the simulated GPU has no tensor cores, unless NBCNN_SIMULATOR=80")
    x, y = np.random.default_rng(6).integers(0, 256, (12, 6)).astype(np.uint8), np.linspace(-1, 1, 12, dtype=np.float32)[:, None]
    layer = nbcnn.activation("saturating", saturating, width=1.0)
    weights = []
    for mode, precision in (key, ("cpu", None)):
        model = nbcnn.Model([nbcnn.Linear(5), layer(width=0.5), nbcnn.Linear(1)], charbonnier, mode=mode, precision=precision, seed=3)
        model.fit(x, y, epochs=2, batch_size=12, optimizer=nbcnn.SGD(0.1, momentum=0.0), verbose=0)
        weights.append(model.weights())
    # Two steps of a twentieth of a weight; gradients are off by 2^-8 of themselves in bf16, by 2^-11 in tf32, times about six roundings.
    off = {"bf16": 6 * 2**-8, "tf32": 6 * 2**-11, "fp16": 6 * 2**-11}.get(key[1], 1e-5)
    for name in weights[0]:
        scale = max(np.abs(weights[1][name]).max(), 0.1)
        assert np.abs(weights[0][name] - weights[1][name]).max() <= off * scale, name


@on_every_arch
def test_derived_gradients_compile_without_spills(arch):
    nbcnn.loss("focal", focal, gamma=1.5)
    array = np.zeros(4096, np.float32)
    op = next(op for op in MODES["cudacore", "fp32"].ops if str(op) == "focal_dgrad")
    call = Call(op, (array, array), (array,), ((4096,),) * 2, ((4096,),), {"gamma": 1.5})
    (launch,) = pairs.LOSSES["focal"].bind_dgrad(call)
    assert_lean(launch, arch)
