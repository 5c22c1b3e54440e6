"""Tests of activations and addition: references against their formulas, gradients against differences, kernels against references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.check import gradcheck
from nbcnn.check.one_op import run_op
from nbcnn.gpu.target import H200
from nbcnn.modes import COMMON, named
from nbcnn.nn import activations, whitening
from nbcnn.nn.activations import Elementwise
from nbcnn.ops.activations import add
from nbcnn.ops.activations.table import ACTIVATIONS, HOST, OPS, epilogue_of
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.plan.op import Op

EPS = float(np.finfo(np.float32).eps)
FORMULAS = {
    "relu": lambda x: max(x, 0.0),
    "leaky_relu": lambda x: x if x > 0 else 0.1 * x,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "tanh": math.tanh,
    "elu": lambda x: x if x > 0 else 0.8 * (math.exp(x) - 1),
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "hard_swish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
    "root": lambda x: x / math.sqrt(abs(x) + 0.01),
    "abs": abs,
    "clip": lambda x: min(max(x, -0.5), 0.75),
    "power": lambda x: x * x,
    "scale": lambda x: -1.5 * x + 0.25,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "threshold": lambda x: x if x > 0.125 else -0.25,
}
# A scalar; fewer than one float4; one float4 and a tail; one block exactly; a block, a vector and a tail.
COUNTS = [1, 3, 4, 7, maps.BLOCK, maps.BLOCK + 4 + 3]


def forward(name: str, x: np.ndarray) -> np.ndarray:
    y = np.full_like(x, np.nan)
    ACTIVATIONS[name].fprop(x, y, **ACTIVATIONS[name].parameters)
    return y


def saved(name: str, x: np.ndarray) -> np.ndarray:
    """What the gradient reads."""
    return x if ACTIVATIONS[name].reads == "x" else forward(name, x)


def backward(name: str, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    dx = np.full_like(x, np.nan)
    ACTIVATIONS[name].dgrad(dy, saved(name, x), dx, **ACTIVATIONS[name].parameters)
    return dx


def test_every_activation_has_its_ops_and_a_layer_that_reads_the_same():
    assert set(HOST) == set(OPS) == {Op(name, path) for name in ACTIVATIONS for path in ("fprop", "dgrad")}
    # Not those that another test declared.
    own = [layer for layer in Elementwise.__subclasses__() if layer.__module__ in (activations.__name__, whitening.__name__)]
    layers = {made.function: made for made in (*(layer() for layer in own), activations.GELU(approximate="tanh"))}
    assert {name: layer.reads for name, layer in layers.items()} == {name: each.reads for name, each in ACTIVATIONS.items()}
    for name, layer in layers.items():
        assert set(layer.attrs()) == set(ACTIVATIONS[name].parameters)


def test_the_epilogue_is_read_off_the_op():
    assert [epilogue_of(named(f"conv_{name}_fprop")) for name in ACTIVATIONS] == list(ACTIVATIONS)
    assert epilogue_of(named("upconv_relu_fprop")) == "relu"
    assert [epilogue_of(named(op)) for op in ("conv_fprop", "upconv_fprop", "conv_dgrad_relu")] == ["", "", ""]


def test_every_activation_has_a_formula_and_a_gradient_check():
    assert set(FORMULAS) == set(ACTIVATIONS), "write the function in float64, from its definition"
    assert {Op(name, "dgrad") for name in ACTIVATIONS} <= set(gradcheck.GRADIENTS)


@pytest.mark.parametrize("name", FORMULAS)
def test_reference_follows_the_formula(name, rng):
    x = rng.standard_normal((2, 3, 5, 4)) * 4
    wanted = np.array([FORMULAS[name](float(v)) for v in x.flat]).reshape(x.shape)
    # Both sides are a handful of float64 operations, each right to one eps; 1 + tanh(u) and exp(x) − 1 lose digits where they are near 0, and
    # exp(−x²/2) of the left tail of GELU x²/2 times an eps.
    eps = np.finfo(np.float64).eps
    np.testing.assert_allclose(forward(name, x), wanted, rtol=8 * eps, atol=8 * eps * np.abs(x).max() if name in ("gelu", "gelu_tanh", "elu") else 0)


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
def test_kernels_match_the_reference(name, count, device, rng):
    attrs = ACTIVATIONS[name].parameters
    x, dy = (rng.standard_normal(count).astype(np.float32) * 3 for _ in range(2))
    (y,) = run_op(OPS[named(f"{name}_fprop")], f"{name}_fprop", [x], [((count,), "float32")], device=device, attrs=attrs)
    exact = x.astype(np.float64)
    # exp and one division, each right to 2 ulp, and a product.
    assert np.linalg.norm(y - forward(name, exact)) <= 4 * EPS * np.linalg.norm(forward(name, exact))
    read = saved(name, x)
    (dx,) = run_op(OPS[named(f"{name}_dgrad")], f"{name}_dgrad", [dy, read], [((count,), "float32")], device=device, attrs=attrs)
    wanted = np.empty_like(exact)
    ACTIVATIONS[name].dgrad(dy.astype(np.float64), read.astype(np.float64), wanted, **attrs)
    assert np.linalg.norm(dx - wanted) <= 4 * EPS * np.linalg.norm(dy)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kernels_at_the_ends(name, device):
    attrs = ACTIVATIONS[name].parameters
    x = np.array([np.nan, -1e4, -200.0, -0.0, 0.0, 200.0, 1e4, 1.0], np.float32)
    (y,) = run_op(OPS[named(f"{name}_fprop")], f"{name}_fprop", [x], [(x.shape, "float32")], device=device, attrs=attrs)
    np.testing.assert_allclose(y, forward(name, x), rtol=4 * EPS)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_add(layout, device, rng):
    a, b = (rng.standard_normal((2, 3, 5, 7)).astype(np.float32) for _ in range(2))
    wanted = np.full_like(a, np.nan)
    add.add(a, b, wanted)
    assert (wanted == a + b).all()
    (y,) = run_op(add.OPS[named("add")], "add", [a, b], [(a.shape, "float32")], device=device, layout=layout)
    assert (y == wanted).all()


def launches() -> list[Launch]:
    x = np.zeros(10, np.float32)
    made = []
    for name, each in ACTIVATIONS.items():
        one = Call(named(f"{name}_fprop"), (x,), (x,), ((10,),), ((10,),), each.parameters)
        two = Call(named(f"{name}_dgrad"), (x, x), (x,), ((10,), (10,)), ((10,),), each.parameters)
        made += [*each.bind_fprop(one), *each.bind_dgrad(two)]
    return [*made, *add.OPS[Op("add")].bind(Call(Op("add"), (x, x), (x,), ((10,), (10,)), ((10,),)))]


def test_a_tensor_beyond_int32_is_refused():
    def call(count: int) -> Call:
        return Call(Op("relu", "fprop"), (), (), ((count,),), ((count,),))

    assert maps.supports(call(maps.LIMIT), H200) is None
    assert "32-bit" in maps.supports(call(maps.LIMIT + 1), H200)
    for op in (*OPS, "add", "flatten_fprop", "flatten_dgrad", "convert"):
        assert COMMON[named(op)].supports(call(maps.LIMIT), H200) is None, op
        assert "32-bit" in COMMON[named(op)].supports(call(maps.LIMIT + 1), H200), op


@pytest.mark.sampled
@on_every_arch
@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch.name)
def test_kernels_compile_without_spills(launch, arch):
    assert_lean(launch, arch)
