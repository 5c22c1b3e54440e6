"""Tests of ONNX files that are large where nobody reads, long, or no files: what is not read is not loaded, and time grows with the nodes."""

from __future__ import annotations

import os
import time
import tracemalloc

import numpy as np
import pytest

onnx = pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)") and pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from nbcnn.onnx import (  # noqa: E402
    OnnxError,
    UnsupportedNodes,
    constants,
    from_onnx,
)

FLOAT = TensorProto.FLOAT


def saved(path, nodes, tensors=(), output="y", shape=("n", 4)):
    inputs, outputs = [helper.make_tensor_value_info("x", FLOAT, shape)], [helper.make_tensor_value_info(output, FLOAT, None)]
    graph = helper.make_graph(nodes, "test", inputs, outputs, list(tensors))
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString())
    return path


def outside(name, place, *dims):
    """An initialiser whose bytes are the file `place` beside the ONNX file."""
    made = TensorProto(name=name, data_type=FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="location", value=place)
    return made


def test_initialisers_that_nobody_reads_are_not_loaded_and_the_same_bytes_are_loaded_once(tmp_path):
    """60 names of 4 MB took 240 MB."""
    (tmp_path / "weights").write_bytes(bytes(4 << 20))
    unused = [outside(f"u{at}", "weights", 1 << 20) for at in range(60)]
    path = saved(tmp_path / "a.onnx", [helper.make_node("Relu", ["x"], ["y"])], unused)
    used = [outside(f"w{at}", "weights", 1024, 1024) for at in range(20)]
    nodes = [helper.make_node("Shape", [f"w{at}"], [f"s{at}"]) for at in range(20)] + [helper.make_node("Relu", ["x"], ["y"])]
    shared = saved(tmp_path / "b.onnx", nodes, used)
    from_onnx(path, mode="cpu").close()
    for each in (path, shared):
        tracemalloc.start()
        try:
            from_onnx(each, mode="cpu").close()
            assert tracemalloc.get_traced_memory()[1] < 30 << 20
        finally:
            tracemalloc.stop()


def test_computed_constants_share_one_room(tmp_path, monkeypatch):
    """Each of 20 was small enough, and together they took 5 GB: here 1 MB each, of 4 MB and four times the 64 bytes of the file's own."""
    monkeypatch.setattr(constants, "ROOM", 4 << 20)
    size = numpy_helper.from_array(np.array([512, 512]), "size")
    taken = [helper.make_node("ConstantOfShape", ["size"], [f"c{at}"]) for at in range(4)]
    views = [helper.make_node("Transpose", ["c0"], [f"t{at}"]) for at in range(20)]
    from_onnx(saved(tmp_path / "a.onnx", [*taken, *views, helper.make_node("Relu", ["x"], ["y"])], [size]), mode="cpu").close()
    for more in (helper.make_node("ConstantOfShape", ["size"], ["d"]), helper.make_node("Add", ["c0", "c1"], ["d"])):
        path = saved(tmp_path / "b.onnx", [*taken, more, helper.make_node("Relu", ["x"], ["y"])], [size])
        with pytest.raises(UnsupportedNodes, match="4,194,304 bytes more than four times its own"):
            from_onnx(path, mode="cpu")
    own = numpy_helper.from_array(np.ones((512, 512), np.float32), "own")
    quadrupled = [helper.make_node("Add", ["own", "own"], [f"d{at}"]) for at in range(8)]
    from_onnx(saved(tmp_path / "c.onnx", [*quadrupled, helper.make_node("Relu", ["x"], ["y"])], [own]), mode="cpu").close()


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.onnx")
    with pytest.raises(OnnxError, match="no regular file"):
        from_onnx(tmp_path / "a.onnx", mode="cpu")


@pytest.mark.parametrize("name", ["(" * 10_000, "a\x1b[31mb", "é" * 500])
def test_messages_quote_names_short_and_escaped(tmp_path, name):
    unknown = saved(tmp_path / "a.onnx", [helper.make_node(name, ["x"], ["y"], name=name)])
    unread = saved(tmp_path / "b.onnx", [helper.make_node("Relu", ["x"], ["y"])], output=name)
    many = saved(tmp_path / "c.onnx", [helper.make_node("Conv", ["x", "w"], ["y" if at == 0 else f"y{at}"]) for at in range(3000)], [FILTER])
    for path in (unknown, unread, many):
        with pytest.raises(OnnxError) as refused:
            from_onnx(path, mode="cpu")
        text = str(refused.value)
        assert len(text) < 60 * 200
        assert max(map(len, text.splitlines())) < 400
        assert text.replace("\n", "").isprintable()
    assert isinstance(refused.value, UnsupportedNodes)
    assert "3000 nodes cannot be taken" in text


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"axis": 1.5}, "attribute axis is of another type than INT"),
        ({"axis": "x"}, "attribute axis is of another type than INT"),
        ({}, "lacks its attribute axis"),
    ],
)
def test_attributes_of_another_type_than_the_ops_are_named(tmp_path, attributes, words):
    path = saved(tmp_path / "a.onnx", [helper.make_node("Concat", ["x", "x"], ["y"], **attributes)])
    with pytest.raises(UnsupportedNodes, match=words):
        from_onnx(path, mode="cpu")


def test_names_that_are_no_text_are_refused(tmp_path):
    path = saved(tmp_path / "a.onnx", [helper.make_node("Relu", ["x"], ["y"], name="rectified")])
    path.write_bytes(path.read_bytes().replace(b"rectified", b"recti\xffied"))
    with pytest.raises(OnnxError, match="no text in UTF-8"):
        from_onnx(path, mode="cpu")


FILTER = numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "w")


@pytest.mark.full
def test_time_grows_with_the_nodes_and_not_with_their_square(tmp_path):
    """20,000 nodes took 77 s. Four times the nodes take at most seven times the processor's time; with the square it were sixteen."""

    def seconds(count):
        nodes = [helper.make_node("Relu" if at % 2 else "Sigmoid", [f"v{at}" if at else "x"], [f"v{at + 1}"]) for at in range(count)]
        path = saved(tmp_path / f"{count}.onnx", nodes, output=f"v{count}")
        begun = time.process_time()
        from_onnx(path, mode="cpu").close()
        return time.process_time() - begun

    seconds(10)
    short, long = seconds(5000), seconds(20_000)
    assert long < 7 * short
    assert long < 40


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Conv", {"strides": [1] * 10_000}),
        ("Conv", {"pads": [0] * 10_000}),
        ("MaxPool", {"kernel_shape": [2] * 10_000}),
        ("Transpose", {"perm": list(range(10_000))}),
        ("LpNormalization", {"axis": 10_000}),
    ],
)
def test_messages_quote_lists_of_files_short(tmp_path, op, attributes):
    operands = ["x", "w"] if op == "Conv" else ["x"]
    path = saved(tmp_path / "a.onnx", [helper.make_node(op, operands, ["y"], **attributes)], [FILTER], shape=("n", 3, 8, 8))
    with pytest.raises(UnsupportedNodes) as refused:
        from_onnx(path, mode="cpu")
    assert all(len(reason) < 400 for reason in refused.value.reasons), refused.value.reasons


def test_messages_quote_what_a_long_concat_joins_short(tmp_path):
    tensors = [numpy_helper.from_array(np.ones((1, at % 7 + 2), np.float32), f"c{at}") for at in range(1000)]
    path = saved(tmp_path / "a.onnx", [helper.make_node("Sum", ["x", *(each.name for each in tensors)], ["y"])], tensors)
    with pytest.raises(UnsupportedNodes) as refused:
        from_onnx(path, mode="cpu")
    assert all(len(reason) < 400 for reason in refused.value.reasons)
