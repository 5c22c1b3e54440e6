"""Tests of damaged and hostile ONNX files: each is refused with a sentence and exit code 3, before anything large is allocated."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import numpy as np
import pytest

onnx = pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)") and pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from nbcnn.onnx import OnnxError, UnsupportedNodes, from_onnx  # noqa: E402
from nbcnn.onnx.files import array, read  # noqa: E402

pytestmark = pytest.mark.full
FLOAT = TensorProto.FLOAT


def value(name, *shape, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes, inputs=None, outputs=("y",), tensors=(), opset=21):
    inputs = [value("x", "n", 3, 8, 8)] if inputs is None else inputs
    outs = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "test", inputs, outs, list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def node(op, inputs, outputs=("y",), **attributes):
    return helper.make_node(op, list(inputs), list(outputs), **attributes)


def conv(weight=None):
    weight = np.ones((4, 3, 3, 3), np.float32) if weight is None else weight
    return model([node("Conv", ["x", "w"])], tensors=[numpy_helper.from_array(weight, "w")])


def refused(made, words, **options):
    """The error of a file, which says `words` and ends the command line with 3; nothing large was allocated on the way."""
    content = made if isinstance(made, bytes) else made.SerializeToString() if hasattr(made, "graph") else made
    tracemalloc.start()
    try:
        with pytest.raises(OnnxError, match=words) as caught:
            from_onnx(content, mode="cpu", **options)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.exit_code == 3
    return caught.value


# -- the message itself


def test_a_truncated_file_is_refused_wherever_it_ends():
    content = conv().SerializeToString()
    for end in {0, 1, 2, 7, len(content) // 2, len(content) - 1}:
        refused(content[:end], "no ONNX|truncated|no nodes|opset|missing|needs|output")


def test_what_is_no_protobuf_is_refused():
    refused(b"PK\x03\x04 a zip", "no ONNX file, or a truncated one")
    refused(b"\xff" * 1000, "no ONNX file, or a truncated one")
    refused(b"", "no ONNX file")


def test_files_with_changed_bytes_never_end_in_another_error(tmp_path):
    """Every error is an OnnxError; what still is a model is one."""
    content, rng = bytearray(conv().SerializeToString()), random.Random(3)
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with contextlib.suppress(OnnxError):
            from_onnx(bytes(changed), mode="cpu").close()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OnnxError, match="there is no file"):
        read(tmp_path / "none.onnx")
    with pytest.raises(OnnxError, match="there is no file"):
        read(tmp_path)


def test_an_opset_that_is_not_taken_is_named():
    refused(model([node("Relu", ["x"])], opset=99), "of opset 99; 7 to 28 are taken")
    refused(model([node("Cycle", ["x"])], opset=5), "of opset 5, which onnx cannot convert to 7")


def test_a_model_without_an_opset_is_refused():
    made = model([node("Relu", ["x"])])
    del made.opset_import[:]
    refused(made, "which opset")


# -- the graph


def test_a_cycle_is_named():
    made = model([node("Relu", ["b"], ["a"], name="first"), node("Relu", ["a"], ["b"]), node("Add", ["x", "b"])])
    refused(made, "Relu 'first' reads 'b', which a later node writes: the graph has a cycle")
    refused(model([node("Add", ["x", "y"])]), "has a cycle")


def test_a_missing_initialiser_is_named():
    refused(model([node("Conv", ["x", "w"])]), "reads 'w', which nothing writes: an initialiser or an input is missing")


def test_a_name_that_is_written_twice_is_named():
    refused(model([node("Relu", ["x"]), node("Tanh", ["x"])]), "'y' is written twice")
    twice = [numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")] * 2
    refused(model([node("Conv", ["x", "w"])], tensors=twice), "'w' is written twice")


def test_an_output_that_nothing_writes_is_named():
    refused(model([node("Relu", ["x"], ["z"])]), "nothing writes the output 'y'")
    refused(model([node("Relu", ["x"])], outputs=()), "no output")


def test_all_unknown_nodes_are_named_at_once():
    made = model([node("NonZero", ["x"], ["a"], name="p"), node("TopK", ["a", "a"], ["b", "c"], name="q"), node("NonZero", ["b"], name="r")])
    error = refused(made, "3 nodes cannot be taken")
    assert isinstance(error, UnsupportedNodes)
    assert error.reasons == ["NonZero, 2×: there is nothing for the op 'NonZero': 'p', 'r'", "TopK 'q': there is nothing for the op 'TopK'"]


def test_all_nodes_that_cannot_be_taken_are_named_at_once():
    """What reads a value that is not there is no news."""
    cubes = value("v", "n", 3, 4, 4, 4)
    weight = numpy_helper.from_array(np.ones((4, 3, 3, 3, 3), np.float32), "w")
    nodes = [
        node("Conv", ["v", "w"], ["a"], name="cube"),
        node("Relu", ["a"], ["b"]),
        node("Transpose", ["x"], ["c"], perm=[1, 0, 2, 3], name="turned"),
        node("Relu", ["x"], ["d"]),
    ]
    error = refused(model(nodes, [value("x", "n", 3, 8, 8), cubes], ["b", "c", "d"], [weight]), "2 nodes cannot be taken")
    assert [reason.split(":")[0] for reason in error.reasons] == ["Conv 'cube'", "Transpose 'turned'"]


def test_subgraphs_are_refused():
    inner = helper.make_graph([node("Relu", ["x"])], "inner", [], [value("y", "n", 3, 8, 8)])
    made = model([node("If", ["c"], then_branch=inner, else_branch=inner)], [value("x", "n", 3, 8, 8), value("c", 1)])
    assert refused(made, "cannot be taken").reasons == ["If (node 1): there is nothing for the op 'If'"]
    hidden = model([helper.make_node("Relu", ["x"], ["y"], extra=inner)])
    refused(hidden, "'extra' is a graph")


# -- tensors


@pytest.mark.parametrize("dims", [(2**40, 3, 3, 3), (4, 3, 3, 2**31), (2**62, 2**62), (4, 3, 3, 4)])
def test_a_tensor_that_claims_more_than_its_bytes_is_refused(dims):
    made = conv()
    del made.graph.initializer[0].dims[:]
    made.graph.initializer[0].dims.extend(dims)
    refused(made, r"tensor 'w'.*(needs|has dimensions)")


def test_a_tensor_of_negative_dimensions_or_too_many_is_refused():
    made = conv()
    made.graph.initializer[0].dims[0] = -4
    refused(made, "tensor 'w' has dimensions")
    made = conv()
    made.graph.initializer[0].dims.extend([1] * 40)
    refused(made, "tensor 'w' has dimensions")


def test_values_in_typed_fields_are_counted():
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[4, 3, 3, 3], float_data=[1.0] * 107)
    refused(model([node("Conv", ["x", "w"])], tensors=[tensor]), "has 107 values, and 108 are needed")


def test_text_and_unknown_types_are_refused():
    refused(model([node("Conv", ["x", "w"])], tensors=[helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])]), "of type STRING")
    refused(model([node("Conv", ["x", "w"])], tensors=[TensorProto(name="w", data_type=77, dims=[1], raw_data=b"1234")]), "unknown type 77")


def test_sparse_initialisers_are_refused():
    made = conv()
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, numpy_helper.from_array(np.zeros(1, np.int64), "i"), [4]))
    refused(made, "sparse initialisers are not taken")


def test_nan_in_weights_is_refused():
    refused(conv(np.full((4, 3, 3, 3), np.nan, np.float32)), "with 'w': its operand 2 holds NaN or Inf")


# -- tensors outside of the file


def outside(folder, location, size=432, **more):
    """The path of a model whose weight stands in another file."""
    made = conv()
    tensor = made.graph.initializer[0]
    raw = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, said in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(said))
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path, raw[:size]


def test_a_weight_in_the_folder_is_read(tmp_path):
    path, raw = outside(tmp_path, "weights.bin", offset=8, length=432)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 8 + raw)
    weights = from_onnx(path, mode="cpu").net.params.as_dict()
    assert (next(iter(weights.values())) == 1).all()


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "sub/../../secret", "", "link"])
def test_a_weight_elsewhere_is_not_read(tmp_path, location):
    (tmp_path / "secret").write_bytes(b"\0" * 432)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    path, _ = outside(folder, location)
    refused(path, "outside of the folder of the ONNX file: it is not read")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"offset": -4}, "is at bytes -4"),
        ({"offset": 8, "length": 432}, "is at bytes 8 to 440"),
        ({"offset": "much"}, "no numbers"),
        ({"length": 2**50}, "which has 432"),
        ({"length": 4}, "needs 432 bytes, and 4 are there"),
    ],
)
def test_places_beyond_the_file_are_refused(tmp_path, more, words):
    path, raw = outside(tmp_path, "weights.bin", **more)
    (tmp_path / "weights.bin").write_bytes(raw)
    refused(path, words)


def test_a_weight_in_a_file_that_is_missing_or_a_folder_is_named(tmp_path):
    refused(outside(tmp_path, "weights.bin")[0], "which is not there")
    (tmp_path / "weights.bin").mkdir()
    refused(outside(tmp_path, "weights.bin")[0], "which is not there")


def test_bytes_have_no_folder(tmp_path):
    path, _ = outside(tmp_path, "weights.bin")
    refused(path.read_bytes(), "bytes have no folder")


# -- sizes that are computed


def ints(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


HUGE = {
    "ConstantOfShape": ([node("ConstantOfShape", ["s"], ["c"]), node("Add", ["x", "c"])], [ints("s", 2**20, 2**20, 2**20)]),
    "Expand of a constant": (
        [node("Expand", ["o", "s"], ["c"]), node("Add", ["x", "c"])],
        [ints("s", 2**30, 2**30), numpy_helper.from_array(np.ones(1, np.float32), "o")],
    ),
    "Range": (
        [node("Range", ["o", "s", "o"], ["c"]), node("Reshape", ["x", "c"])],
        [ints("s", 2**60), numpy_helper.from_array(np.array(1, np.int64), "o")],
    ),
    "Expand": ([node("Expand", ["x", "s"])], [ints("s", 1, 3, 2**20, 8, 8)]),
    "Pad": ([node("Pad", ["x", "s"])], [ints("s", 0, 0, 0, 0, 0, 0, 2**40, 0)]),
    "Resize": (
        [node("Resize", ["x", "", "", "s"], mode="linear")],
        [ints("s", 1, 3, 2**31, 2**31)],
    ),
    "Reshape": ([node("Reshape", ["x", "s"])], [ints("s", -1, 2**40)]),
    "MaxPool": ([node("MaxPool", ["x"], kernel_shape=[2**40, 1])], []),
    "Conv by its pads": (
        [node("Conv", ["x", "w"], pads=[2**40, 0, 0, 0])],
        [numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")],
    ),
    "AveragePool": ([node("AveragePool", ["x"], kernel_shape=[2**30, 1], pads=[2**30, 0, 2**30, 0], count_include_pad=1)], []),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_shapes_are_refused(name):
    nodes, tensors = HUGE[name]
    assert isinstance(refused(model(nodes, tensors=tensors, opset=18), "cannot be taken"), UnsupportedNodes)


def test_a_huge_input_is_refused():
    refused(model([node("Relu", ["x"])], [value("x", "n", 2**20, 2**20)]), "input 'x': an example of")


@pytest.mark.parametrize("shape", [None, ("n", "c", 8, 8)])
def test_an_open_shape_is_named_and_may_be_given(shape):
    made = model([node("Relu", ["x"])], [helper.make_tensor_value_info("x", FLOAT, shape)])
    refused(made, r"the shape of input 'x' is left open.*give it by shapes")
    assert from_onnx(made.SerializeToString(), shapes={"x": (3, 8, 8)}, mode="cpu").net.input_shape == (3, 8, 8)


def test_inputs_of_other_types_are_named():
    refused(model([node("Relu", ["x"])], [value("x", "n", 3, kind=TensorProto.INT64)]), "of type INT64, and networks take FLOAT")
    refused(model([node("Relu", ["x"])], [value("x")]), "has no axes")


def test_a_damaged_note_of_nbcnn_is_refused():
    for key, said in (("nbcnn.forms", "[1]"), ("nbcnn.loss", '[{"layer": "Nothing"}]'), ("nbcnn.classes", "{"), ("nbcnn.loss", "[" * 100000)):
        made = model([node("Relu", ["x"])])
        helper.set_model_props(made, {key: said})
        refused(made, "a note of nbcnn in its metadata is damaged")


@pytest.mark.parametrize("kind", ["FLOAT16", "BFLOAT16", "DOUBLE", "FLOAT", "INT32", "INT64", "UINT8", "BOOL"])
def test_tensors_of_numbers_are_read_from_raw_bytes_and_from_fields(kind):
    number = getattr(TensorProto, kind)
    dtype = helper.tensor_dtype_to_np_dtype(number)
    wanted = np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype)
    raw = numpy_helper.from_array(wanted, "t")
    typed = helper.make_tensor("t", number, wanted.shape, wanted.reshape(-1).tolist())
    for tensor in (raw, typed):
        found = array(tensor)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(float), wanted.astype(float))


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.array([[0, 255]], np.uint8), "floats from 0 to 1: bytes divided by 255"),
        (np.array([[0.0, 1.0]], np.float32), "floats from 0 to 1"),
        (np.array([[-2.0, 2.5]], np.float32), "numbers as they are, from -2 to 2.5 in training"),
    ],
)
def test_the_metadata_says_which_numbers_the_input_takes(x, said):
    from nbcnn import Linear, Model
    from nbcnn.onnx import to_onnx

    with Model([Linear(2)], "cross_entropy", mode="cpu") as model:
        model.fit(x, [1], verbose=0)
        assert {each.key: each.value for each in to_onnx(model).metadata_props}["nbcnn.input"] == said
