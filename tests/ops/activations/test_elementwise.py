"""Activations and addition: references against their formulas, gradients against differences, kernels against references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.check.one_op import run_op
from nbcnn.ops.activations import add, leaky_relu, relu, sigmoid, swish
from nbcnn.ops.kernel import elementwise
from nbcnn.ops.kernel.call import Call, Impl, Launch

EPS = float(np.finfo(np.float32).eps)
SLOPE = {"slope": 0.1}
# op -> (module, attributes, scalar formula, whether dgrad reads x instead of y)
ACTIVATIONS = {
    "relu": (relu, {}, lambda x: max(x, 0.0), False),
    "leaky_relu": (leaky_relu, SLOPE, lambda x: x if x > 0 else 0.1 * x, False),
    "sigmoid": (sigmoid, {}, lambda x: 1 / (1 + math.exp(-x)), False),
    "swish": (swish, {}, lambda x: x / (1 + math.exp(-x)), True),
}
# A scalar; fewer than one float4; one float4 and a tail; one block exactly; a block, a vector and a tail.
COUNTS = [1, 3, 4, 7, elementwise.BLOCK, elementwise.BLOCK + 4 + 3]


def reference(name: str, path: str):
    return getattr(ACTIVATIONS[name][0], f"{name}_{path}")


def forward(name: str, x: np.ndarray) -> np.ndarray:
    y = np.full_like(x, np.nan)
    reference(name, "fprop")(x, y, **ACTIVATIONS[name][1])
    return y


def backward(name: str, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    dx = np.full_like(x, np.nan)
    read = x if ACTIVATIONS[name][3] else forward(name, x)
    reference(name, "dgrad")(dy, read, dx, **ACTIVATIONS[name][1])
    return dx


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_reference_follows_the_formula(name, rng):
    x = rng.standard_normal((2, 3, 5, 4)) * 4
    wanted = np.array([ACTIVATIONS[name][2](float(v)) for v in x.flat]).reshape(x.shape)
    # Both sides are a handful of float64 operations, each right to one eps.
    np.testing.assert_allclose(forward(name, x), wanted, rtol=8 * np.finfo(np.float64).eps)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradient_is_the_derivative(name, rng):
    x, dy, u = (rng.standard_normal((3, 50)) for _ in range(3))
    x += np.sign(x) * 0.01  # a difference must not straddle the kink at 0
    step = 1e-4
    difference = (forward(name, x + step * u) - forward(name, x - step * u)) / (2 * step)
    # Central differences: step² · |y'''| / 6 plus eps / step, both below 1e-8 · |u|³ for these functions.
    assert np.vdot(dy, difference) == pytest.approx(np.vdot(backward(name, dy, x), u), abs=1e-7 * np.linalg.norm(dy) * np.linalg.norm(u**3))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_reference_keeps_float32(name, rng):
    x = rng.standard_normal(64).astype(np.float32)
    exact = forward(name, x.astype(np.float64))
    assert np.linalg.norm(forward(name, x) - exact) <= 4 * EPS * np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["sigmoid", "swish"])
def test_reference_is_safe_at_the_ends(name):
    x = np.array([-1e4, -200.0, 0.0, 200.0, 1e4], np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        y, dx = forward(name, x), backward(name, np.ones_like(x), x)
    if name == "sigmoid":
        assert y.tolist() == [0, 0, 0.5, 1, 1]
        assert dx.tolist() == [0, 0, 0.25, 0, 0]
    else:
        assert y.tolist() == [0, 0, 0, 200, 1e4]
        assert dx.tolist() == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_is_not_hidden(name):
    assert np.isnan(forward(name, np.array([np.nan]))).all()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kernels_match_the_reference(name, count, place, rng):
    module, attrs, _, reads_x = ACTIVATIONS[name]
    x, dy = (rng.standard_normal(count).astype(np.float32) * 3 for _ in range(2))
    (y,) = run_op(Impl(module.bind_fprop), f"{name}_fprop", [x], [((count,), "float32")], place=place, attrs=attrs)
    exact = x.astype(np.float64)
    # exp and one division, each right to 2 ulp, and a product.
    assert np.linalg.norm(y - forward(name, exact)) <= 4 * EPS * np.linalg.norm(forward(name, exact))
    read = x if reads_x else forward(name, x)
    (dx,) = run_op(Impl(module.bind_dgrad), f"{name}_dgrad", [dy, read], [((count,), "float32")], place=place, attrs=attrs)
    wanted = np.empty_like(exact)
    reference(name, "dgrad")(dy.astype(np.float64), read.astype(np.float64), wanted, **attrs)
    assert np.linalg.norm(dx - wanted) <= 4 * EPS * np.linalg.norm(dy)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kernels_at_the_ends(name, place):
    module, attrs, _, _ = ACTIVATIONS[name]
    x = np.array([np.nan, -1e4, -200.0, -0.0, 0.0, 200.0, 1e4, 1.0], np.float32)
    (y,) = run_op(Impl(module.bind_fprop), f"{name}_fprop", [x], [(x.shape, "float32")], place=place, attrs=attrs)
    np.testing.assert_allclose(y, forward(name, x), rtol=4 * EPS)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_add(layout, place, rng):
    a, b = (rng.standard_normal((2, 3, 5, 7)).astype(np.float32) for _ in range(2))
    wanted = np.full_like(a, np.nan)
    add.add(a, b, wanted)
    assert (wanted == a + b).all()
    (y,) = run_op(Impl(add.bind), "add", [a, b], [(a.shape, "float32")], place=place, layout=layout)
    assert (y == wanted).all()


def launches() -> list[Launch]:
    x = np.zeros(10, np.float32)
    made = []
    for name, (module, attrs, _, _) in ACTIVATIONS.items():
        one = Call(f"{name}_fprop", (x,), (x,), ((10,),), ((10,),), attrs)
        two = Call(f"{name}_dgrad", (x, x), (x,), ((10,), (10,)), ((10,),), attrs)
        made += [*module.bind_fprop(one), *module.bind_dgrad(two)]
    return [*made, *add.bind(Call("add", (x, x), (x,), ((10,), (10,)), ((10,),)))]


def test_a_tensor_beyond_int32_is_refused():
    def call(count: int) -> Call:
        return Call("relu_fprop", (), (), ((count,),), ((count,),))

    assert elementwise.supports(call(elementwise.LIMIT)) is None
    assert "32-bit" in elementwise.supports(call(elementwise.LIMIT + 1))


@on_every_arch
@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch.name)
def test_kernels_compile_without_spills(launch, arch):
    assert_lean(launch, arch)
