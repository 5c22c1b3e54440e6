"""Tests of whole networks: exported, checked by onnx, run by onnxruntime, imported again; and graphs as other programs write them."""

from __future__ import annotations

import contextlib
import importlib
import json

import numpy as np
import pytest

pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)")

import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import nbcnn
from nbcnn.onnx import UnsupportedNodes, from_onnx, to_onnx
from nbcnn.onnx.exporter import OPSET
from nbcnn.onnx.importer import imported
from nbcnn.plan.bounds import parity_bound

pytestmark = pytest.mark.full
IMAGE = (4, 8, 6)


def chain(*layers):
    return lambda: nbcnn.Model(list(layers), mode="cpu", seed=3).build(IMAGE)


def graph():
    a, b = nbcnn.Input((3, 8, 8)), nbcnn.Input((3, 8, 8))
    conv = nbcnn.Conv2d(6, 3, padding=1)
    p, q = conv(a), conv(b)
    r = nbcnn.Concat()([nbcnn.ReLU()(p + q), p * nbcnn.Sigmoid()(q)])
    return nbcnn.Model([a, b], [nbcnn.Linear(4)(nbcnn.GlobalAvgPool2d()(r)), nbcnn.Linear(2)(nbcnn.Flatten()(r))], loss=["mse", "mse"], mode="cpu")


def normalised():
    made = nbcnn.Normalisation((0.4, 0.5, 0.3, 0.1), (0.2, 0.25, 0.5, 1.0))
    return nbcnn.Model([nbcnn.Conv2d(3, 3)], mode="cpu", normalisation=made).build(IMAGE)


def gated(width, swapped=False):
    """Squeeze and excitation: images times a factor (N, C), which broadcasting would match with columns."""
    x = nbcnn.Input((4, 8, width))
    factor = nbcnn.Sigmoid()(nbcnn.Linear(4)(nbcnn.GlobalAvgPool2d()(x)))
    wide = nbcnn.Reshape((4, 1, 1))(factor)
    return nbcnn.Model(x, (factor * x if swapped else x * factor) + x * wide, mode="cpu")


C, T = nbcnn.Conv2d, nbcnn.ConvTranspose2d
MODELS = {
    "convolutions": chain(
        C(6, (3, 2), stride=(2, 1), padding=(1, 0, 0, 1)), nbcnn.ReLU(), C(6, 3, padding=2, dilation=2, groups=3), C(5, 1, bias=False)
    ),
    "transposed": chain(
        T(4, 3, stride=2, padding=1, output_padding=1),
        T(6, (3, 2), stride=(1, 2), padding=(0, 1, 1, 0), dilation=(2, 1), groups=2),
        T(3, 2, bias=False),
    ),
    "classifier": chain(C(6, 3), nbcnn.BatchNorm2d(), nbcnn.ReLU(), nbcnn.MaxPool2d(2), nbcnn.Flatten(), nbcnn.Linear(5), nbcnn.Softmax()),
    "norms": chain(C(6, 1), nbcnn.GroupNorm(3), nbcnn.InstanceNorm2d(), nbcnn.InstanceNorm2d(affine=True), nbcnn.LayerNorm(), nbcnn.BatchNorm2d()),
    "residual": chain(C(6, 1), nbcnn.Residual(nbcnn.BatchNorm2d(), nbcnn.ReLU(), C(6, 3, padding=1)), nbcnn.GlobalAvgPool2d(), nbcnn.Linear(3)),
    "activations": chain(
        *(nbcnn.LeakyReLU(0.2), nbcnn.Scale(1.5, -0.25), nbcnn.Sigmoid(), nbcnn.Scale(3), nbcnn.Swish(), nbcnn.Tanh(), nbcnn.ELU(0.5)),
        *(nbcnn.Scale(2, 0.5), nbcnn.ReLU6(), nbcnn.HardSwish(), nbcnn.PReLU(4), nbcnn.PReLU(), nbcnn.GELU(), nbcnn.GELU(approximate="tanh")),
        *(nbcnn.Softplus(), nbcnn.Abs(), nbcnn.Clip(0.1, 0.9), nbcnn.Power(1.5), nbcnn.Threshold(0.25), nbcnn.LogSoftmax(), nbcnn.Root()),
    ),
    "pools": chain(
        *(nbcnn.MaxPool2d(3, 2, padding=1), nbcnn.AvgPool2d((2, 3), 1, padding=(1, 1)), nbcnn.AvgPool2d(3, 1, padding=1, count_include_pad=False)),
        *(nbcnn.MaxPool2d((2, 2), ceil_mode=True), nbcnn.AvgPool2d(2, 2, ceil_mode=True)),
    ),
    "sizes": chain(
        nbcnn.Resize(mode="bilinear"), nbcnn.Upsample2d(2), nbcnn.Resize((1, 3)), nbcnn.Pad((1, -2, 0, 3), 0.5), nbcnn.Reshape((3, 31, 100))
    ),
    "maps": chain(
        *(
            nbcnn.LinearMap(1, 4, indices=((0, 3), (1,), ()), weights=((0.5, 2.0), (1.0,), ())),
            nbcnn.LinearMap(2, 8, indices=tuple((at,) for at in (7, 0, 3))),
        ),
        *(nbcnn.LinearMap(3, 6, indices=((0, 1, 2), (5,))), nbcnn.LinearMap(2, 3, indices=((0, 1), (2,)))),
        *(nbcnn.Permute((2, 0, 1)), nbcnn.Permute((1, 0, 2), (3, 2, 2)), nbcnn.Permute((1, 0), (4, 3)), nbcnn.Linear(2)),
    ),
    "training only": chain(nbcnn.Noise(0.5), C(4, 3), nbcnn.Dropout(0.5), nbcnn.MaskSquares(0.5, 2), nbcnn.ReLU()),
    "evonorm": chain(C(6, 1), nbcnn.EvoNormS0(groups=3), C(4, 1)),
    "evonorm of the batch": chain(C(6, 1), nbcnn.EvoNormB0(), C(4, 1)),
    "graph": graph,
    "gated": lambda: gated(8),
    "gated, square": lambda: gated(4),
    "gated, swapped": lambda: gated(4, swapped=True),
    "normalised": normalised,
}
TERMS = 4 * 3 * 3 * 8 * 6
"""The longest sum of these networks is shorter, and none has more than twenty layers."""


def examples(model, count=3):
    inputs = getattr(model.layers, "inputs", [model.net.input_shape])
    rng = np.random.default_rng(5)
    made = [rng.integers(0, 256, (count, *shape), dtype=np.uint8) for shape in inputs]
    return made[0] if len(made) == 1 else tuple(made)


def trained(model):
    """The model, its running statistics moved from where they start."""
    rng = np.random.default_rng(6)
    weights = model.net.params.as_dict()
    moved = {
        name: each + rng.uniform(0.1, 0.3, each.shape).astype(np.float32) for name, each in weights.items() if "running" in name or "norm" in name
    }
    model.net.params.load_dict(weights | moved)
    return model


def arrays(found):
    return list(found) if isinstance(found, tuple | list) else [found]


def near(found, wanted, layers=20):
    """Float32 sums in another order, one behind another: 4·(u + ε·√terms) a layer."""
    for one, other in zip(arrays(found), arrays(wanted), strict=True):
        assert np.isfinite(other).all()
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= layers * parity_bound(TERMS, "fp32") * max(1.0, np.abs(other).max())


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_network_is_valid_and_imported_again(name, tmp_path):
    model = trained(MODELS[name]())
    made = to_onnx(model)
    onnx.checker.check_model(made, full_check=True)
    path = tmp_path / "net.onnx"
    onnx.save(made, path)
    again, x = from_onnx(path, mode="cpu"), examples(model)
    near(again.predict(x), model.predict(x))
    if name not in ("activations", "evonorm", "evonorm of the batch", "maps", "normalised"):
        # The same layers in the same order, so the same bits; and the weights have their names.
        for one, other in zip(arrays(again.predict(x)), arrays(model.predict(x)), strict=True):
            np.testing.assert_array_equal(one, other)
    known = again.net.params.as_dict()
    for key, value in model.net.params.as_dict().items():
        if key in known:
            np.testing.assert_array_equal(known[key], value)
    if name not in ("evonorm", "evonorm of the batch", "graph"):
        assert set(model.net.params.as_dict()) <= set(known)
    saved = nbcnn.load(again.save(tmp_path / "net.safetensors"), mode="cpu")
    for one, other in zip(arrays(saved.predict(x)), arrays(again.predict(x)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_computes_the_same(name):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = trained(MODELS[name]())
    session = runtime.InferenceSession(to_onnx(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = examples(model)
    given = {each.name: (array / np.float32(255)).astype(np.float32) for each, array in zip(session.get_inputs(), arrays(x), strict=True)}
    near(session.run(None, given), model.predict(x))


def test_layers_without_a_form_in_onnx_are_named_all_at_once():
    model = nbcnn.Model([nbcnn.Whiten(3), C(8, 3), nbcnn.KSparse(2)], mode="cpu").build((4, 8, 8))
    with pytest.raises(UnsupportedNodes) as caught:
        to_onnx(model)
    assert caught.value.reasons == ["whiten1: Whiten", "ksparse1: KSparse"]
    with pytest.raises(nbcnn.UsageError, match="not built"):
        to_onnx(nbcnn.Model([C(8, 3)], mode="cpu"))


def test_the_file_says_its_opset_and_its_batch():
    model = MODELS["classifier"]()
    made = to_onnx(model)
    assert [(each.domain, each.version) for each in made.opset_import] == [("", OPSET)]
    assert made.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert to_onnx(model, batch=2).graph.output[0].type.tensor_type.shape.dim[0].dim_value == 2
    assert {"conv1.weight", "conv1.bias", "batchnorm1.running_var", "linear1.weight"} <= {each.name for each in made.graph.initializer}


def test_loss_classes_and_form_come_back():
    model = nbcnn.Model(
        [C(4, 3), nbcnn.Flatten(), nbcnn.Linear(2)], nbcnn.SoftmaxCrossEntropy(label_smoothing=0.1), mode="cpu", classes=["cat", "dog"]
    )
    x = np.random.default_rng(1).uniform(-3, 5, (8, 6, 6, 3)).astype(np.float32)
    model.fit(x, np.arange(8) % 2, epochs=1, verbose=0)
    again = from_onnx(to_onnx(model).SerializeToString(), mode="cpu")
    assert again.loss == model.loss
    assert again.classes == ("cat", "dog")
    np.testing.assert_array_equal(again.predict_classes(x), model.predict_classes(x))
    again.fit(x, np.arange(8) % 2, epochs=1, verbose=0)


@pytest.mark.parametrize("kind", ["standardised", "16 bits", "floats to 255"])
def test_a_file_answers_as_predict_does_whatever_numbers_the_network_was_trained_on(kind):
    rng = np.random.default_rng(3)
    x = {
        "standardised": rng.normal(size=(8, 2, 6, 6)).astype(np.float32),
        "16 bits": rng.integers(500, 60000, (8, 2, 6, 6)).astype(np.uint16),
        "floats to 255": rng.uniform(0, 255, (8, 2, 6, 6)).astype(np.float32),
    }[kind]
    model = nbcnn.Model([C(4, 3), nbcnn.ReLU(), nbcnn.Flatten(), nbcnn.Linear(2)], "cross_entropy", mode="cpu")
    with contextlib.nullcontext() if kind != "floats to 255" else pytest.warns(UserWarning, match="divide images by 255"):
        model.fit(x, np.arange(8) % 2, optimizer=nbcnn.SGD(lr=1e-4), verbose=0)
    written = to_onnx(model)
    assert f"numbers as they are, from {x.min():g} to {x.max():g} in training" == written.graph.input[0].doc_string
    expected = model.predict(x, channels_last=False)
    (made,) = ReferenceEvaluator(written).run(None, {"x": x.astype(np.float32)})
    # Two layers of sums of at most 64 terms, in another order.
    bound = 4 * 2.0**-24 * 64 * np.abs(expected).max()
    np.testing.assert_allclose(made, expected, atol=bound)
    again = from_onnx(written.SerializeToString(), mode="cpu")
    assert again.form == model.form
    np.testing.assert_array_equal(again.predict(x, channels_last=False), expected)
    # Of a changed graph the nodes count: what scales is a part of the network then.
    written.graph.node[-1].name = "changed"
    np.testing.assert_allclose(from_onnx(written.SerializeToString(), mode="cpu").predict(x, channels_last=False), expected, atol=bound)


# -- graphs as other programs write them


def file(nodes, tensors=(), inputs=(("x", "n", 4, 8, 6),), outputs=("y",), opset=17):
    made = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, *shape in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(each), name) for name, each in dict(tensors).items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8).SerializeToString()


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def seen(content, x, mode="cpu", **options):
    """What the imported model, and onnxruntime, make of x."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {session.get_inputs()[0].name: x})
    return from_onnx(content, mode=mode, **options), wanted


RNG = np.random.default_rng(7)
X = RNG.uniform(-1, 1, (3, 4, 8, 6)).astype(np.float32)


def test_a_shape_that_the_file_computes_is_followed():
    """x.view(x.shape[0], -1) as PyTorch writes it with an open number of examples."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n"),
        node("Unsqueeze", "n axes", "n1"),
        node("Concat", "n1 minus", "t", axis=0),
        node("Reshape", "x t", "v"),
        node("MatMul", "v w", "p"),
        node("Add", "p b", "y"),
    ]
    tensors = {
        "zero": np.int64(0),
        "axes": np.int64([0]),
        "minus": np.int64([-1]),
        "w": RNG.normal(size=(192, 5)).astype(np.float32),
        "b": np.arange(5, dtype=np.float32),
    }
    model, wanted = seen(file(nodes, tensors), X)
    near(model.predict(X), wanted)


def test_silu_of_pytorch_is_a_swish():
    model, wanted = seen(file([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")]), X)
    assert [type(each).__name__ for each in model.layers] == ["Swish"]
    near(model.predict(X), wanted)


def test_weights_of_two_nodes_are_one_layer_and_keep_their_names():
    nodes = [node("Conv", "x stem.weight stem.bias", "a", pads=[1] * 4), node("Conv", "a stem.weight stem.bias", "y", pads=[1] * 4)]
    tensors = {"stem.weight": RNG.normal(size=(4, 4, 3, 3)).astype(np.float32), "stem.bias": np.ones(4, np.float32)}
    model, wanted = seen(file(nodes, tensors), X)
    assert list(model.net.params.as_dict()) == ["stem.weight", "stem.bias"]
    near(model.predict(X), wanted)


def test_names_that_no_layer_may_have_are_changed():
    nodes = [node("Conv", "x w", "a", name="/layer@2/Conv"), node("Relu", "a", "b", name="r"), node("Relu", "b", "y", name="r")]
    made = from_onnx(file(nodes, {"w": np.ones((4, 4, 1, 1), np.float32)}), mode="cpu")
    assert list(made.layers.names) == ["layer_2/Conv", "r", "relu1"]


def test_names_are_kept_when_the_model_is_saved(tmp_path):
    tensors = {"stem.weight": RNG.normal(size=(4, 4, 3, 3)).astype(np.float32)}
    made = from_onnx(file([node("Conv", "x stem.weight", "a"), node("Relu", "a", "y", name="act")], tensors), mode="cpu")
    again = nbcnn.load(made.save(tmp_path / "net.safetensors"), mode="cpu")
    assert again.layers.names == made.layers.names == ("stem", "act")
    np.testing.assert_array_equal(again.predict(X), made.predict(X))
    assert again.features(X, "stem").shape == (3, 4, 6, 4)


def test_a_channel_shuffle_and_a_squeeze_and_excitation():
    nodes = [
        node("Reshape", "x five", "a"),
        node("Transpose", "a", "b", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "b four", "c"),
        node("GlobalAveragePool", "c", "d"),
        node("Conv", "d w", "e"),
        node("HardSigmoid", "e", "f", alpha=1 / 6, beta=0.5),
        node("Mul", "c f", "y"),
    ]
    tensors = {"five": np.int64([0, 2, 2, 8, 6]), "four": np.int64([-1, 4, 8, 6]), "w": RNG.normal(size=(4, 4, 1, 1)).astype(np.float32)}
    model, wanted = seen(file(nodes, tensors), X)
    near(model.predict(X), wanted)


def test_attention_over_rows_by_constants():
    """Products, softmax and norms along the last axis of sequences, as vision transformers have them (without products of two values)."""
    nodes = [
        node("Reshape", "x rows", "r"),
        node("Transpose", "r", "t", perm=[0, 2, 1]),
        node("LayerNormalization", "t g b", "l", axis=-1),
        node("MatMul", "l w", "m"),
        node("Softmax", "m", "s", axis=-1),
        node("ReduceMean", "s", "y", axes=[1], keepdims=0),
    ]
    tensors = {
        "rows": np.int64([0, 4, 48]),
        "g": RNG.uniform(0.5, 1.5, 4).astype(np.float32),
        "b": np.ones(4, np.float32),
        "w": RNG.normal(size=(4, 7)).astype(np.float32),
    }
    model, wanted = seen(file(nodes, tensors), X)
    near(model.predict(X), wanted)


ROOT = np.float32(2**0.5)
GELUS = {
    "as PyTorch writes it": ["Div x root", "Erf a", "Add b one", "Mul x c", "Mul d half"],
    "half before": ["Mul x half", "Div x root", "Erf b", "Add one c", "Mul a d"],
    "half inside": ["Mul x reciprocal", "Erf a", "Add b one", "Mul c half", "Mul d x"],
    "divided by two": ["Div x root", "Erf a", "Add b one", "Mul c x", "Div d two"],
}


@pytest.mark.parametrize("name", GELUS)
def test_gelus_that_are_written_with_erf(name):
    nodes = []
    for line, made in zip(GELUS[name], "abcde", strict=False):
        op, *reads = line.split()
        nodes.append(node(op, " ".join(reads), made))
    nodes[-1].output[0] = "y"
    numbers = {"root": ROOT, "reciprocal": 1 / ROOT, "one": np.float32(1), "half": np.float32(0.5), "two": np.float32(2)}
    model, wanted = seen(file(nodes, numbers), X)
    assert "GELU" in [type(each).__name__ for each in model.layers]
    near(model.predict(X), wanted)
    if name == "half before":
        del nodes[-1:]
        nodes[-1].output[0] = "y"
        with pytest.raises(UnsupportedNodes, match="'y': it is Erf, which is taken as a part of a GELU alone"):
            from_onnx(file(nodes, numbers), mode="cpu")


def test_weights_that_a_file_standardises_are_refused_until_they_are_folded():
    """nf_resnet's weights: (w − mean)·gain/√variance of each filter. Training would change what is computed, and never w."""
    w = RNG.normal(size=(5, 4, 3, 3)).astype(np.float32)
    nodes = [
        node("ReduceMean", "w axes", "m", keepdims=1),
        node("Sub", "w m", "c"),
        node("Mul", "c c", "s"),
        node("ReduceMean", "s axes", "v", keepdims=1),
        node("Sqrt", "v", "d"),
        node("Div", "c d", "n"),
        node("Conv", "x n", "y"),
    ]
    with pytest.raises(UnsupportedNodes, match=r"Conv \(node 7\) with 'w': a weight that is computed of one that is trained"):
        from_onnx(file(nodes, {"w": w, "axes": np.int64([1, 2, 3])}, opset=18), mode="cpu")
    model, wanted = seen(file(nodes[-1:], {"n": (w - w.mean((1, 2, 3), keepdims=True)) / w.std((1, 2, 3), keepdims=True)}, opset=18), X)
    near(model.predict(X), wanted)


def test_a_file_of_an_old_opset_is_converted():
    nodes = [node("Add", "x b", "a", broadcast=1, axis=3), node("Relu", "a", "y")]
    tensors = {"b": RNG.normal(size=6).astype(np.float32)}
    content = file(nodes, tensors, (("x", 3, 4, 8, 6),), opset=6)
    made = onnx.load_from_string(content)
    made.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, each.shape) for name, each in tensors.items())
    wanted = np.maximum(X + tensors["b"], 0)
    near(from_onnx(made, mode="cpu").predict(X), wanted)


def test_slopes_before_opset_7_are_those_of_channels():
    """The converter leaves a PRelu as it is, and a slope of one axis goes along the last one from opset 7 on."""
    tensors = {"s": np.float32([0.5, 2, 3])}
    inputs = (("x", "n", 3, 4, 3), ("s", 3))
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 3)).astype(np.float32)
    for opset, slope in ((6, tensors["s"][:, None, None]), (7, tensors["s"])):
        found = from_onnx(file([node("PRelu", "x s", "y")], tensors, inputs, opset=opset), mode="cpu").predict(x)
        near(found, np.where(x > 0, x, slope * x))


def test_reasons_are_grouped_and_name_the_number_of_examples():
    nodes = [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "minus n", "t", axis=0), node("Reshape", "x t", "a")]
    nodes += [node("Transpose", "x", f"t{at}", perm=[1, 0, 2, 3], name=f"turn{at}") for at in range(6)] + [node("Mod", "x x", "y", name="rest")]
    with pytest.raises(UnsupportedNodes) as caught:
        from_onnx(file(nodes, {"zero": np.int64([0]), "minus": np.int64([-1])}), mode="cpu")
    assert caught.value.reasons == [
        "Reshape (node 4): the shape [-1, N]: it mixes examples, which batched=False allows",
        "Transpose, 6×: it mixes examples, which batched=False allows: 'turn0', 'turn1', 'turn2', 'turn3' and 2 more",
        "Mod 'rest': it is taken where all its operands are constants",
    ]


def test_the_products_of_attention_are_named_at_once_and_behind_what_is_refused():
    """A class token that is repeated for every example is refused, and so is each product of two computed values behind it."""
    nodes = [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "n one four", "t", axis=0), node("Expand", "token t", "many")]
    nodes += [node("Reshape", "x rows", "r"), node("Concat", "many r", "k0", axis=1), node("MatMul", "r w", "same")]
    nodes += [node("MatMul", f"k{at} k{at}", f"k{at + 1}", name=f"attention{at}") for at in range(5)] + [node("MatMul", "k5 w", "y")]
    tensors = {"zero": np.int64([0]), "one": np.int64([1]), "four": np.int64([4]), "rows": np.int64([0, 48, 4])}
    tensors |= {"token": np.ones((1, 1, 4), np.float32), "w": np.ones((4, 4), np.float32)}
    with pytest.raises(UnsupportedNodes) as caught:
        from_onnx(file(nodes, tensors), mode="cpu")
    assert caught.value.reasons == [
        "Expand (node 4): a constant that is repeated for every example",
        "MatMul, 5×: both operands are computed, and one must be a constant: 'attention0', 'attention1', 'attention2', 'attention3' and 1 more",
    ]


def test_what_cannot_be_taken_is_named_behind_what_is_refused():
    """Shapes that onnx infers stand for the values of nodes that are not taken, so the transposition of examples behind them is named, too."""
    nodes = [node("Sin", "x", "s", name="sine"), node("Relu", "s", "r"), node("Transpose", "r", "t", perm=[1, 0, 2, 3], name="turn")]
    nodes += [node("Conv", "r w", "c"), node("ReduceMax", "c", "y", name="over all", keepdims=1)]
    with pytest.raises(UnsupportedNodes) as caught:
        from_onnx(file(nodes, {"w": np.ones((2, 4, 1, 1), np.float32)}, outputs=("y", "t")), mode="cpu")
    assert [each.split(":")[0] for each in caught.value.reasons] == ["Sin 'sine'", "Transpose 'turn'", "ReduceMax 'over all'"]


def test_constants_that_are_cast_like_values_are_constants():
    """As PyTorch's exporter writes limits; a weight that is cast stays the one that is trained."""
    nodes = [node("CastLike", "low x", "end"), node("Clip", "x end", "c"), node("CastLike", "w c", "v"), node("Mul", "c v", "y")]
    tensors = {"low": np.float64(0.1), "w": np.arange(4, dtype=np.float32).reshape(4, 1, 1) - 1.5}
    model = from_onnx(file(nodes, tensors), mode="cpu")
    near(model.predict(X), np.maximum(X, np.float32(0.1)) * tensors["w"])
    assert model.net.params.count == 4
    assert not model.frozen()


def test_exp_is_right_as_far_as_float32_goes():
    x = np.linspace(-85, 88.5, 1001, dtype=np.float32)[:, None]
    model = from_onnx(file([node("Exp", "x", "y")], {}, (("x", 1),)), mode="cpu")
    # Two sigmoids, a reciprocal and a product, each right to 2⁻²³, and all of it doubled by the square.
    np.testing.assert_allclose(model.predict(x), np.exp(x.astype(np.float64)), rtol=16 * 2**-23)


def test_upsampling_with_sizes_and_a_skip_connection():
    nodes = [
        node("MaxPool", "x", "a", kernel_shape=[2, 2], strides=[2, 2], pads=[1, 1, 0, 0]),
        node("Resize", "a none none sizes", "b", mode="linear", coordinate_transformation_mode="align_corners"),
        node("Concat", "x b", "y", axis=1),
    ]
    model, wanted = seen(file(nodes, {"none": np.zeros(0, np.float32), "sizes": np.int64([3, 4, 8, 6])}, (("x", 3, 4, 8, 6),)), X)
    near(model.predict(X), wanted)


def test_a_masked_constant_is_refused():
    made = nbcnn.onnx.to_onnx(nbcnn.Model([nbcnn.Linear(2)], mode="cpu").build((3,)))
    with pytest.raises(nbcnn.UsageError, match="the values of the constant 'x' are a masked array"):
        nbcnn.onnx.from_onnx(made.SerializeToString(), constants={"x": np.ma.masked_array(np.ones(3), [0, 1, 0])}, mode="cpu")


def test_the_loss_of_a_file_becomes_the_models():
    nodes = [node("Flatten", "x", "f"), node("Gemm", "f w", "z"), node("SoftmaxCrossEntropyLoss", "z t", "loss", ignore_index=1)]
    made = helper.make_graph(
        nodes,
        "test",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 4, 8, 6)),
            helper.make_tensor_value_info("t", TensorProto.INT64, ("n",)),
        ],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, ())],
        [numpy_helper.from_array(RNG.normal(size=(192, 3)).astype(np.float32), "w")],
    )
    found = imported(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString(), mode="cpu")
    assert found.labels == "t"
    assert found.model.loss == nbcnn.SoftmaxCrossEntropy(ignore_index=1)
    assert list(found.outputs.values()) == [(3,)]
    assert np.isfinite(found.model.fit(X, [0, 1, 2], verbose=0).history["loss"]).all()


def test_an_imported_model_trains_further():
    model = from_onnx(to_onnx(MODELS["residual"]()).SerializeToString(), loss="cross_entropy", mode="cpu")
    x = np.random.default_rng(2).integers(0, 256, (12, *IMAGE), dtype=np.uint8)
    history = model.fit(x, np.arange(12) % 3, epochs=40, batch_size=6, optimizer=nbcnn.Adam(lr=0.02), verbose=0).history["loss"]
    assert history[-1] < 0.8 * history[0]


# -- commands


def command(name, *words):
    return importlib.import_module(f"nbcnn.cli.{name}").main([str(word) for word in words])


def test_export_and_import_on_the_command_line(tmp_path, capsys):
    model = MODELS["classifier"]()
    saved = model.save(tmp_path / "net.safetensors")
    assert command("export", saved, tmp_path / "net.onnx", "--json", "--batch", 2) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["opset"] == OPSET
    assert said["bytes"] == (tmp_path / "net.onnx").stat().st_size
    assert command("import", tmp_path / "net.onnx", tmp_path / "again.safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == model.net.params.count
    x = examples(model)
    np.testing.assert_array_equal(nbcnn.load(tmp_path / "again.safetensors", mode="cpu").predict(x), model.predict(x))
    assert command("import", tmp_path / "net.onnx", tmp_path / "third.safetensors") == 0
    assert "conv1" in capsys.readouterr().out


def test_the_commands_refuse_what_is_damaged(tmp_path, capsys):
    (tmp_path / "bad.onnx").write_bytes(b"no protobuf")
    assert command("import", tmp_path / "bad.onnx", tmp_path / "net.safetensors") == 3
    assert capsys.readouterr().err.startswith("nbcnn: error: ")
    assert command("export", tmp_path / "none.safetensors", tmp_path / "net.onnx") == 3
    layers = [nbcnn.Conv2d(4, 1), nbcnn.KSparse(2)]
    saved = nbcnn.Model(layers, mode="cpu").build(IMAGE).save(tmp_path / "limit.safetensors")
    (tmp_path / "net.onnx").write_bytes(b"kept")
    assert command("export", saved, tmp_path / "net.onnx") == 3
    assert "ksparse1: KSparse" in capsys.readouterr().err
    assert (tmp_path / "net.onnx").read_bytes() == b"kept"
    assert not (tmp_path / "net.safetensors").exists()
