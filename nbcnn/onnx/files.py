"""This module reads ONNX files and trusts nothing of them: what a file says of itself is compared with its bytes before anything is allocated.

Checked are the message itself, the opset, the order of the nodes (each reads what stands before it, so there is no cycle), that every name is
written once and every name that is read exists, and of every tensor that its dimensions fit the bytes that are there. Tensors outside of the file
must be regular files in its folder or below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.files import regular
from nbcnn.files.quote import brief, quoted, word
from nbcnn.onnx.errors import OnnxError, onnx_package

OPSETS = range(7, 29)
"""Versions of ONNX's own ops that are taken."""
_LARGEST = 2**31 - 1
"""Bytes of a protobuf message at most."""
_AXES = 16
"""Axes of a tensor at most."""
_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class File:
    """A file that has been read: its message, how it is called in errors, the folder for tensors outside of it (None: there is none).

    opset     of its nodes. written  that of the file before they were converted.
    """

    model: Any
    name: str
    folder: Path | None
    opset: int
    written: int

    @property
    def graph(self) -> Any:
        return self.model.graph


def read(source: Path | str | bytes | Any) -> File:
    """The file at a path, or in bytes, or an onnx.ModelProto; checked. Raises OnnxError."""
    onnx = onnx_package()
    if isinstance(source, onnx.ModelProto):
        model, name, folder = source, "the model", None
    elif isinstance(source, bytes | bytearray | memoryview):
        model, name, folder = _parsed(onnx, bytes(source), "the bytes"), "the bytes", None
    else:
        path = Path(source)
        model, name, folder = _parsed(onnx, _bytes(path), str(path)), str(path), path.resolve().parent
    try:
        converted = _converted(onnx, model)
        opset = _checked(converted)
        return File(converted, name, folder, opset, opset if converted is model else max(_versions(model)))
    except OnnxError as error:
        raise OnnxError(f"{name}: {error}") from None


def _bytes(path: Path) -> bytes:
    try:
        if not path.exists() or path.is_dir():
            raise OnnxError(f"there is no file {path}")
        return regular.read(path, _LARGEST)
    except OSError as error:
        raise OnnxError(f"{path} cannot be read ({error.strerror})") from None


def _parsed(onnx: Any, content: bytes, name: str) -> Any:
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        read = model.ParseFromString(content)
    except (DecodeError, RecursionError, ValueError) as error:
        raise OnnxError(f"{name}: no ONNX file, or a truncated one ({brief(error)})") from None
    if not content or read not in (None, len(content)):
        raise OnnxError(f"{name}: no ONNX file, or a truncated one ({len(content):,} bytes)")
    return model


def _converted(onnx: Any, model: Any) -> Any:
    """A model whose nodes are of opset 7 or later; earlier ones are converted by onnx. Raises OnnxError where it cannot."""
    versions = _versions(model)
    if not model.HasField("graph") or not versions or not 0 < max(versions) < OPSETS.start:
        return model
    _check_names(model.graph)
    try:
        from onnx import version_converter

        return version_converter.convert_version(model, OPSETS.start)
    except Exception as error:  # whatever its C++ raises
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OnnxError(f"its nodes are of opset {max(versions)}, which onnx cannot convert to {OPSETS.start}: {said:.200}") from None


def _versions(model: Any) -> list[int]:
    """The opsets that a model says it is of."""
    return [each.version for each in model.opset_import if each.domain in _DOMAINS]


def _checked(model: Any) -> int:
    """The opset of a model whose structure is sound. Raises OnnxError."""
    for text in _texts(model):
        if not isinstance(text, str):
            raise OnnxError(f"it holds the name {quoted(text)}, which is no text in UTF-8")
    if not model.HasField("graph") or not model.graph.node:
        raise OnnxError("no ONNX model: it has no nodes")
    versions = _versions(model)
    if not versions:
        raise OnnxError("it does not say which opset its nodes are of")
    if max(versions) not in OPSETS:
        raise OnnxError(f"its nodes are of opset {max(versions)}; {OPSETS.start} to {OPSETS.stop - 1} are taken")
    _check_names(model.graph)
    return max(versions)


def _texts(model: Any) -> Iterator[Any]:
    """All names of a model. Protobuf gives those that are no UTF-8 as bytes."""
    graph = model.graph
    for entries in (model.metadata_props, *(tensor.external_data for tensor in graph.initializer)):
        for entry in entries:
            yield from (entry.key, entry.value)
    for each in model.opset_import:
        yield each.domain
    for node in graph.node:
        yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.ref_attr_name)
    for each in (*graph.input, *graph.output, *graph.initializer):
        yield each.name


def _check_names(graph: Any) -> None:
    """Raise OnnxError unless every name is written once, before it is read."""
    known: dict[str, str] = {}

    def written(name: str, by: str) -> None:
        if name in known:
            raise OnnxError(f"{quoted(name)} is written twice, by {known[name]} and by {by}")
        known[name] = by

    for each in graph.input:
        written(each.name, "an input of the graph")
    # Up to IR version 3 an initialiser is an input, too: a default that the caller may replace.
    for name in [each.name for each in graph.initializer] + [each.values.name for each in graph.sparse_initializer]:
        if known.get(name) != "an input of the graph":
            written(name, "an initialiser")
        known[name] = "an initialiser"
    later = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    for at, node in enumerate(graph.node):
        for name in node.input:
            if name and name not in known:
                if later.get(name, -1) >= at:
                    raise OnnxError(f"{label(node, at)} reads {quoted(name)}, which a later node writes: the graph has a cycle, or is not in order")
                raise OnnxError(f"{label(node, at)} reads {quoted(name)}, which nothing writes: an initialiser or an input is missing")
        for name in node.output:
            if name:
                written(name, label(node, at))
    for each in graph.output:
        if each.name not in known:
            raise OnnxError(f"nothing writes the output {quoted(each.name)}")
    if not graph.output:
        raise OnnxError("the graph has no output")


def label(node: Any, at: int) -> str:
    """How messages call a node."""
    return f"{word(node.op_type)} {quoted(node.name)}" if node.name else f"{word(node.op_type)} (node {at + 1})"


def array(tensor: Any, folder: Path | None = None) -> np.ndarray:
    """The values of an onnx.TensorProto. Raises OnnxError if they are not all there, or their type is not of numbers."""
    onnx = onnx_package()
    kinds = onnx.TensorProto.DataType
    what = f"tensor {quoted(tensor.name)}" if tensor.name else "a tensor"
    try:
        kind, dtype = kinds.Name(tensor.data_type), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except (ValueError, KeyError, TypeError):
        raise OnnxError(f"{what} is of the unknown type {tensor.data_type}") from None
    if kind not in _FIELDS:
        raise OnnxError(f"{what} is of type {kind}; {', '.join(_FIELDS)} are taken")
    dims = list(tensor.dims)
    if len(dims) > _AXES or any(not 0 <= size <= 2**48 for size in dims):
        raise OnnxError(f"{what} has dimensions {dims[: _AXES + 1]}")
    count = 1
    for size in dims:
        count *= size
    content = _external(tensor, folder, what) if tensor.data_location == onnx.TensorProto.EXTERNAL else tensor.raw_data
    held = getattr(tensor, _FIELDS[kind])
    needed = count * dtype.itemsize
    if content or (not held and needed):
        if len(content) != needed:
            raise OnnxError(f"{what} of dimensions {quoted(dims)} needs {needed:,} bytes, and {len(content):,} are there")
        return np.frombuffer(content, dtype.newbyteorder("<") if dtype.kind in "iufb" else dtype).reshape(dims).astype(dtype)
    if len(held) != count:
        raise OnnxError(f"{what} of dimensions {quoted(dims)} has {len(held):,} values, and {count:,} are needed")
    return np.asarray(onnx.numpy_helper.to_array(tensor))


_FIELDS: Mapping[str, str] = {
    "FLOAT": "float_data",
    "DOUBLE": "double_data",
    "FLOAT16": "int32_data",
    "BFLOAT16": "int32_data",
    "INT64": "int64_data",
    "UINT64": "uint64_data",
    "UINT32": "uint64_data",
    **dict.fromkeys(("INT32", "INT16", "INT8", "UINT16", "UINT8", "BOOL"), "int32_data"),
}
"""Types of tensors, and the field that has their values where there are no raw bytes."""


def _external(tensor: Any, folder: Path | None, what: str) -> bytes:
    """The bytes of a tensor outside of the file. Raises OnnxError if they are not in the file's folder or below, or not all there."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    location = said.get("location", "")
    if folder is None:
        raise OnnxError(f"{what} is in the file {quoted(location)}, and bytes have no folder: give the path of the ONNX file")
    path = (folder / location).resolve()
    if not location or Path(location).is_absolute() or not path.is_relative_to(folder):
        raise OnnxError(f"{what} is in the file {quoted(location)}, outside of the folder of the ONNX file: it is not read")
    try:
        offset, size = int(said.get("offset", "0")), path.stat().st_size if path.is_file() else -1
        length = int(said.get("length", size - offset))
    except ValueError:
        raise OnnxError(f"{what} is at offset {quoted(said.get('offset'))}, of length {quoted(said.get('length'))}, which are no numbers") from None
    except OSError as error:
        raise OnnxError(f"{what} is in the file {quoted(location)}, which cannot be read ({error.strerror})") from None
    if size < 0:
        raise OnnxError(f"{what} is in the file {quoted(location)}, which is not there")
    if offset < 0 or length < 0 or offset + length > size:
        raise OnnxError(f"{what} is at bytes {offset:,} to {offset + length:,} of {quoted(location)}, which has {size:,}")
    try:
        with regular.opened(path) as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise OnnxError(f"{what} is in the file {quoted(location)}, which cannot be read ({error.strerror})") from None


def initialisers(file: File) -> Iterator[tuple[str, np.ndarray]]:
    """The names and values of all initialisers that are read; those of the same bytes of another file share them. Raises OnnxError."""
    if file.graph.sparse_initializer:
        raise OnnxError(f"{file.name}: sparse initialisers are not taken ({quoted(file.graph.sparse_initializer[0].values.name)})")
    read = {name for node in file.graph.node for name in node.input} | {each.name for each in file.graph.output}
    outside: dict[tuple[Any, ...], np.ndarray] = {}
    for tensor in file.graph.initializer:
        if tensor.name not in read:
            continue
        place = (tensor.data_type, *tensor.dims, *((entry.key, entry.value) for entry in tensor.external_data))
        try:
            if place not in outside:
                made = array(tensor, file.folder)
                if not tensor.external_data:
                    yield tensor.name, made
                    continue
                outside[place] = made
            yield tensor.name, outside[place]
        except OnnxError as error:
            raise OnnxError(f"{file.name}: {error}") from None


_SMALL = 64
"""Elements of initialisers that may be shapes."""


def inferred(file: File, inputs: Mapping[str, tuple[int, ...]], first: int | str | None) -> dict[str, tuple[int, ...]]:
    """The shapes of examples, by name, of the values of floats whose shape onnx infers and whose first axis counts examples; none where it fails.

    inputs  by name the shapes of examples. first  their number, or a name for it; None: an input is one. Of weights onnx gets the shapes alone.
    """
    onnx = onnx_package()
    helper, graph, lead = onnx.helper, file.graph, [] if first is None else [first]
    known = {each.name for each in graph.initializer}
    given = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [*lead, *dims]) for name, dims in inputs.items()]
    given += [each for each in graph.input if each.name not in inputs and each.name not in known]
    large = [each for each in graph.initializer if math.prod(each.dims) > _SMALL]
    given += [helper.make_tensor_value_info(each.name, each.data_type, list(each.dims)) for each in large]
    small = [each for each in graph.initializer if math.prod(each.dims) <= _SMALL]
    try:
        made = helper.make_model(
            helper.make_graph(graph.node, "shapes", given, graph.output, small, value_info=graph.value_info), opset_imports=file.model.opset_import
        )
        values = onnx.shape_inference.infer_shapes(made, data_prop=True).graph.value_info
    except Exception:  # whatever its C++ raises: then less is named at once
        return {}
    shapes = dict[str, tuple[int, ...]]()
    for each in values:
        tensor = each.type.tensor_type
        sizes = [size.dim_param or size.dim_value for size in tensor.shape.dim]
        if lead and (not sizes or sizes.pop(0) != first):
            continue
        if tensor.elem_type == onnx.TensorProto.FLOAT and tensor.HasField("shape") and all(isinstance(size, int) and size > 0 for size in sizes):
            shapes[each.name] = tuple(sizes)
    return shapes
