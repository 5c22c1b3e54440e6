"""Tests of functions of layers on a caller's arrays: their gradients, in both precisions, what is kept between; on a played GPU, the addresses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scripts import on_a_played_gpu
from test_net import depth_bound

from nbcnn import MSE, BatchNorm2d, Conv2d, Dropout, EvoNormB0, Flatten, Linear, MaxPool2d, ReLU, Residual
from nbcnn.check.one_op import from_layout, to_layout
from nbcnn.files.errors import UsageError
from nbcnn.gpu.device import Host
from nbcnn.modes import MODES
from nbcnn.nn.graphs import Graph, Input
from nbcnn.nn.layers import parameters, sized, states
from nbcnn.nn.params import ParameterLayout
from nbcnn.ops.kernel.call import HostCall, Impl, follows_layout
from nbcnn.ops.kernel.row import Row
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import FLOATING, decode, encode
from nbcnn.run.function import BACKWARD, FORWARD, PARAMETERS, Function
from nbcnn.run.net import Net

SHAPE = (3, 2, 6, 6)
BODY = [Conv2d(4, 3, padding=1), BatchNorm2d(), ReLU(), MaxPool2d(2), Residual(Conv2d(4, 3, padding=1), ReLU()), Flatten(), Linear(3)]


def made(layers, **options):
    return Function(sized(layers, SHAPE[1:]), SHAPE, MODES["cpu", "fp32"], Host(), **({"training": True, "gradients": True} | options))


class Arrays(dict):
    """The arrays that a caller of `function` has: x and dy random, parameters and states at their first values."""

    def __init__(self, function, layers, dtype="float32", seed=5):
        random = np.random.default_rng(seed)
        layers = sized(layers, function.input_shape[1:])
        for shapes in (parameters(layers), states(layers)):
            layout = ParameterLayout(shapes)
            self.update({name: values.astype(dtype).reshape(-1) for name, values in layout.split(layout.initial(3, "torch")).items()})
        self.update({f"grad.{name}": np.full(self[name].size, np.nan, dtype) for name in parameters(layers)})
        sizes = {"x": function.input_shape, "y": function.output_shape, "dy": function.output_shape, "dx": function.input_shape}
        self.update({name: random.standard_normal(int(np.prod(shape))).astype("float32").astype(dtype) for name, shape in sizes.items()})
        self["kept"] = np.full(max(1, function.kept_bytes), 255, np.uint8)

    def run(self, function, part):
        function.run(part, self | {"arena": np.full(function.arena_bytes[part], 255, np.uint8)})
        return self


def test_the_gradients_are_those_of_a_net():
    function = made(BODY)
    arrays = Arrays(function, BODY).run(function, FORWARD)
    x, y = arrays["x"].reshape(SHAPE), arrays["y"].reshape(function.output_shape)
    target = np.random.default_rng(9).standard_normal(y.shape).astype(np.float32)
    net = Net([*BODY, MSE()], SHAPE[1:], mode="cpu", seed=3)
    _, wanted = net.gradients(x, target)
    arrays["dy"] = ((y - target) * np.float32(2 / y.size)).reshape(-1)
    arrays.run(function, BACKWARD)
    for name, grad in wanted.items():
        # The loss's own gradient is rounded in another order: two roundings of 2⁻²⁴, which every gradient repeats relatively.
        np.testing.assert_allclose(arrays[f"grad.{name}"], grad.reshape(-1), rtol=0, atol=2**-20 * np.abs(grad).max(), err_msg=name)


def test_a_backward_pass_may_run_twice_and_without_the_inputs_gradient():
    function = made(BODY)
    arrays = Arrays(function, BODY).run(function, FORWARD)
    kept = arrays["kept"].copy()
    first = {name: array.copy() for name, array in arrays.run(function, BACKWARD).items()}
    np.testing.assert_array_equal(arrays["kept"], kept)
    for part, but in ((BACKWARD, ()), (PARAMETERS, ("dx",))):
        arrays["dx"][:] = 0
        again = arrays.run(function, part)
        assert not [name for name, array in first.items() if name not in but and array.tobytes() != again[name].tobytes()]
    assert not again["dx"].any()
    assert function.arena_bytes[PARAMETERS] <= function.arena_bytes[BACKWARD]


def test_a_step_that_makes_both_gradients_runs_without_the_inputs():
    function = made([BatchNorm2d(), ReLU()])
    arrays = Arrays(function, [BatchNorm2d(), ReLU()]).run(function, FORWARD).run(function, BACKWARD)
    wanted = arrays.pop("grad.batchnorm1.weight").copy()
    arrays["grad.batchnorm1.weight"] = np.full(wanted.size, np.nan, np.float32)
    del arrays["dx"]
    np.testing.assert_array_equal(arrays.run(function, PARAMETERS)["grad.batchnorm1.weight"], wanted)


def test_several_outputs_have_a_gradient_each():
    """The slope of a·y + b·y2 + c·y3 in a random direction, by float64 central differences of 1e-6; one output is read by the layers behind it."""
    x = Input(SHAPE[1:])
    h = ReLU()(BatchNorm2d()(Conv2d(4, 3, padding=1)(x)))
    layers = Graph.of(x, [Linear(3)(Flatten()(h)), h, Conv2d(2, 1)(h)])
    function = made(layers, dtype="float64")
    assert function.output_shapes == {"y": (3, 3), "y2": (3, 4, 6, 6), "y3": (3, 2, 6, 6)}
    outputs = {name: (shape, f"d{name}") for name, shape in function.output_shapes.items()}
    random = np.random.default_rng(8)
    own = {name: random.standard_normal(int(np.prod(shape))) for shape, dy in outputs.values() for name in (dy,)}
    own |= {name: np.zeros(int(np.prod(shape))) for name, (shape, _) in outputs.items()}
    arrays = Arrays(function, layers, "float64")
    arrays.update(own)
    arrays.run(function, FORWARD).run(function, BACKWARD)
    u = {name: random.standard_normal(arrays[name].size) for name in ("x", *function.params)}

    def moved(sign):
        other = Arrays(function, layers, "float64")
        other.update({name: array.copy() for name, array in own.items()})
        for name, direction in u.items():
            other[name] = other[name] + sign * 1e-6 * direction
        other.run(function, FORWARD)
        return sum(own[dy] @ other[name] for name, (_, dy) in outputs.items())

    backward = sum(arrays["dx" if name == "x" else f"grad.{name}"] @ direction for name, direction in u.items())
    assert abs((moved(1) - moved(-1)) / 2e-6 - backward) <= 1e-7 * abs(backward)


def test_the_references_compute_in_float64():
    """Central differences of the float64 form in a random direction: with step 1e-6 they err by about 1e-10 of the slope."""
    layers = [Conv2d(4, 3, padding=1), BatchNorm2d(), ReLU(), EvoNormB0(), Flatten(), Linear(3)]
    function = made(layers, dtype="float64")
    arrays = Arrays(function, layers, "float64").run(function, FORWARD).run(function, BACKWARD)
    u = {name: np.random.default_rng(at).standard_normal(arrays[name].size) for at, name in enumerate(("x", *function.params))}

    def moved(sign):
        other = Arrays(function, layers, "float64")
        for name, direction in u.items():
            other[name] = other[name] + sign * 1e-6 * direction
        return other.run(function, FORWARD)["y"]

    forward = arrays["dy"] @ (moved(1) - moved(-1)) / 2e-6
    backward = sum(arrays["dx" if name == "x" else f"grad.{name}"] @ direction for name, direction in u.items())
    assert abs(forward - backward) <= 1e-7 * abs(backward)
    assert arrays["batchnorm1.running_mean"].dtype == np.float64


def emulated(precision):
    """A row that stores images channels last and rounded as mode tensorcore does, whose ops are the references on what is stored so."""

    def of(impl):
        def bind(call):
            def run(*arrays):
                ins, outs = arrays[: len(call.ins)], arrays[len(call.ins) :]

                def layout(side, at, shape):
                    named = call.attrs["source" if side == "in" else "target"] if str(call.op) == "convert" and len(shape) == 4 else "NHWC"
                    return named if str(call.op) == "convert" or follows_layout(call.op, side, at, shape) else "NCHW"

                given = [
                    from_layout(decode(array, call.in_dtypes[at]), shape, layout("in", at, shape))
                    if len(shape) == 4
                    else decode(array, call.in_dtypes[at])
                    for at, (array, shape) in enumerate(zip(ins, call.in_shapes, strict=True))
                ]
                made = [
                    np.zeros(numel(shape), "float32" if kind in FLOATING else kind)
                    for shape, kind in zip(call.out_shapes, call.out_dtypes, strict=True)
                ]
                for launch in impl.bind(replace(call, ins=tuple(given), outs=tuple(made))):
                    launch.run()
                for at, (array, one, shape) in enumerate(zip(outs, made, call.out_shapes, strict=True)):
                    array[:] = encode(to_layout(one.reshape(shape), layout("out", at, shape)) if len(shape) == 4 else one, call.out_dtypes[at])

            return [HostCall(run, (*call.ins, *call.outs), {}, call.op)]

        return Impl(bind)

    (cpu,) = (ops for _, ops in MODES["cpu", "fp32"].fallbacks)
    return Row("cpu", precision, "host", "NHWC", (("emulated", {op: of(impl) for op, impl in cpu.items()}),))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_row_that_stores_images_otherwise_keeps_and_gives_the_same(precision):
    layers = sized([Conv2d(4, 3, padding=1, bias=False), *BODY[1:]], SHAPE[1:])
    function = Function(layers, SHAPE, emulated(precision), Host(), training=True, gradients=True)
    plain = made(layers)
    found, wanted = (Arrays(each, layers).run(each, FORWARD).run(each, BACKWARD) for each in (function, plain))
    again = {name: array.copy() for name, array in found.items()}
    found.run(function, BACKWARD)
    for name in ("y", "dx", *(f"grad.{each}" for each in function.params), *function.states):
        assert found[name].tobytes() == again[name].tobytes(), name
        limit = 0 if precision == "fp32" else depth_bound(len(layers), precision)
        assert np.linalg.norm(found[name] - wanted[name]) <= limit * np.linalg.norm(wanted[name]), name


def test_inference_keeps_nothing_and_a_norm_has_no_gradient_there():
    assert made(BODY, training=False, gradients=False).kept_bytes == 0
    function = made(BODY, training=False)
    assert "no backward" in function.no_gradient
    arrays = Arrays(function, BODY).run(function, FORWARD)
    assert np.isfinite(arrays["y"]).all()
    assert not made(BODY).no_gradient


def test_what_is_no_function_is_refused():
    with pytest.raises(UsageError, match="compute nothing"):
        made([Dropout(0.5)])
    with pytest.raises(UsageError, match="float64 is for the CPU"):
        Function(BODY, SHAPE, MODES["cudacore", "fp32"], Host(), training=True, gradients=True, dtype="float64")
    x = Input(SHAPE[1:])
    y = ReLU()(x)
    with pytest.raises(UsageError, match="the same value"):
        made(Graph.of(x, [y, y]))


PLAYED = """
import played_driver
played_driver.install()
played_driver.compile_nothing()

import numpy as np

import nbcnn
from nbcnn.gpu import driver
from nbcnn.gpu.device import Gpu
from nbcnn.modes import MODES
from nbcnn.nn.layers import sized
from nbcnn.ops.kernel.call import Launch
from nbcnn.run.function import BACKWARD, FORWARD, Function

seen, run = [], Launch.run


def noted(launch, stream=0):
    seen.append((stream, {each.address for each in launch.args if hasattr(each, "address")}))
    run(launch, stream)


Launch.run = noted
layers = sized([nbcnn.Conv2d(64, 3, padding=1), nbcnn.BatchNorm2d(), nbcnn.ReLU(), nbcnn.Conv2d(64, 3), nbcnn.MaxPool2d(2)], (64, 8, 8))
gpu = Gpu()
for mode, precision in (("tensorcore", "bf16"), ("tensorcore", "fp32"), ("cudacore", "fp32")):
    function = Function(layers, (4, 64, 8, 8), MODES[mode, precision], gpu, training=True, gradients=True)
    sizes = {"x": function.input_shape, "y": function.output_shape, "dy": function.output_shape, "dx": function.input_shape}
    sizes |= function.params | function.states | {f"grad.{name}": shape for name, shape in function.params.items()}
    arrays = {name: driver.empty(int(np.prod(shape)), "float32") for name, shape in sizes.items()}
    arrays["kept"] = driver.empty(function.kept_bytes, "uint8")
    for part, touched in ((FORWARD, {"x", "y", *function.states}), (BACKWARD, {"dy", "dx", *(n for n in sizes if n.startswith("grad."))})):
        given = arrays | {"arena": driver.empty(max(1, function.arena_bytes[part]), "uint8")}
        for stream in (77, 78):
            del seen[:]
            count = played_driver.calls["cuMemAlloc"]
            function.run(part, given, stream)
            everything = set().union(*(addresses for _, addresses in seen))
            missed = {name for name in touched if arrays[name].address not in everything}
            assert not missed, (mode, precision, part, missed)
            assert {each for each, _ in seen} == {stream}
        assert played_driver.calls["cuMemAlloc"] == count, "launches of addresses that are known are not bound again"
        begin, end = arrays["kept"].address, arrays["kept"].address + function.kept_bytes
        assert any(begin <= address < end for address in everything), "what is kept is written and read"
    other = arrays | {"x": driver.empty(arrays["x"].size, "float32"), "arena": driver.empty(max(1, function.arena_bytes[FORWARD]), "uint8")}
    del seen[:]
    function.run(FORWARD, other, 77)
    everything = set().union(*(addresses for _, addresses in seen))
    assert other["x"].address in everything and arrays["x"].address not in everything
print("in place")
"""


def test_a_function_on_a_played_gpu_reads_and_writes_the_callers_memory(tmp_path):
    done = on_a_played_gpu(PLAYED, tmp_path)
    assert done.stdout == "in place\n", done.stderr[-3000:]
