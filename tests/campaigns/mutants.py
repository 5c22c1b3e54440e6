"""Mutants of every format that is read: ONNX, npz, npy, TOML, saved networks, classifiers, images, config.json, features.

Every attempt makes one to three changes in a good file that keep its outer form, such as a field of a protobuf message, a header within an archive,
or a value of a sealed note; one in four damages bytes. The reader must go on, or end with the exit code of its own and a sentence: no error of
Python, no longer than 20 s, no more than 1 GB. Seeds take the formats in turn.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import json
import re
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

import nbcnn
import nbcnn.onnx
from nbcnn import datasets
from nbcnn.classify import classifier
from nbcnn.cli import classify, train_flags
from nbcnn.cli.errors import DATA, MEMORY, OK, USAGE
from nbcnn.model import files, pictures
from nbcnn.nn import description
from nbcnn.train import checkpoint

sys.path.append(str(Path(__file__).parents[1]))
from scripts import exits

from .checkpoints import small
from .damage import damaged, damaged_json
from .files import extract_run, make_features, make_run, outcome, read_values, sentence

_kept = tempfile.TemporaryDirectory(prefix="campaign-mutants-good-")
LONGEST_LINE = 700
"""Characters of a line of a message: a sentence that quotes several names of files has less."""


@dataclass(frozen=True)
class Format:
    """What is mutated. `make` writes good files into a folder, of which `mutate` changes the one at a path; `read` reads them.

    codes  exit codes that a refusal has.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    mutate: Callable[[Random, Path], object]
    codes: tuple[int, ...] = (DATA,)


@functools.cache
def good(name: str) -> Path:
    """The folder with the good files of a format, made once."""
    folder = Path(_kept.name) / name
    folder.mkdir()
    FORMATS[name].make(folder)
    return folder


def attack(seed: int, folder: Path) -> None:
    """Mutate one file of the format whose turn it is, and read it."""
    mutated(list(FORMATS)[seed % len(FORMATS)], seed // len(FORMATS), folder)


def mutated(name: str, seed: int, folder: Path) -> None:
    """Mutate one file of the format `name`, and read it. Raises AssertionError where that ends otherwise than it may."""
    form, pick = FORMATS[name], Random(f"{name} {seed}")
    shutil.copytree(good(name), folder, dirs_exist_ok=True)
    path = pick.choice(sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")))
    if pick.random() < 0.25:
        path.write_bytes(damaged(pick, path.read_bytes()))
    else:
        form.mutate(pick, path)
    code, text = outcome(lambda: form.read(folder))
    where = f"{name}, {path.name}: exit {code}"
    assert code == OK or code in (*form.codes, MEMORY), f"{where}: {text[:300]}"
    if code != OK:
        assert sentence(text), f"{where}, but no sentence: {text[:300]!r}"
        assert code_said(code, text), f"{where}, but no sentence: {text[:300]!r}"
        assert all(len(line) <= LONGEST_LINE for line in text.splitlines()), f"{where}: the message has a line of {max(map(len, text.splitlines()))}"
        assert text.replace("\n", "").isprintable(), f"{where}: the message has control characters: {text[:300]!r}"


def code_said(code: int, text: str) -> bool:
    """Whether a refusal for want of memory says how much is wanted: the bare error of an allocation is no plan."""
    return code != MEMORY or bool(re.search(r"\d[\d.,]* ?(GiB|MiB|bytes)", text))


VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2,
        3,
        7,
        1000,
        22_000,
        2**31 - 2,
        2**31,
        2**47,
        2**63,
        2**64,
        10**400,
        0.5,
        -1.5,
        1e38,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *(
        "",
        "x",
        "\0",
        "\ud800",
        "a\x1b[31mb",
        "é" * 300,
        "[" * 10_000,
        [],
        {},
        [[]],
        [None],
        [0],
        [2**47, 2**47],
        [1, 1, 1],
        ["x", 1],
        {"layer": "Linear"},
    ),
)
"""What stands in place of a value of JSON."""


def changed(pick: Random, document: Any) -> Any:
    """`document`, of JSON, with one to three of its values replaced, removed, doubled or renamed."""
    held = [json.loads(json.dumps(document))]
    for _ in range(pick.choice((1, 1, 1, 2, 3))):
        place: Any = held
        while True:
            if not place:
                break
            at = pick.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[at], dict | list) or not place[at] or pick.random() < 0.15:
                break
            place = place[at]
        if not place:
            continue
        way = pick.randrange(8)
        if way == 0 and place is not held:
            del place[at]
        elif way == 1 and isinstance(place, list) and place is not held:
            place.insert(at, place[at])
        elif way == 2 and isinstance(place, dict):
            place[pick.choice(("x", "", "graph", "layers", "groups", "kernel_size", "\x1b[0m"))] = place.pop(at)
        elif way == 3 and isinstance(place[at], int | float) and not isinstance(place[at], bool):
            place[at] = pick.choice((place[at] + 1, place[at] - 1, -place[at], place[at] * 1000, float(str(place[at])), str(place[at])))
        elif way == 4 and isinstance(place[at], str):
            place[at] = pick.choice((place[at] + "x", place[at][:-1], place[at].upper(), pick.choice(list(description.known_layers()))))
        else:
            place[at] = copy.deepcopy(pick.choice(VALUES))  # a later change may write into it
    return held[0]


# -- ONNX


def make_onnx(folder: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper, save

    rng = np.random.default_rng(0)
    layers = [
        nbcnn.Conv2d(4, 3, padding=1),
        nbcnn.BatchNorm2d(),
        nbcnn.ReLU(),
        nbcnn.MaxPool2d(2),
        nbcnn.Flatten(),
        nbcnn.Linear(3),
        nbcnn.SoftmaxCrossEntropy(),
    ]
    save(nbcnn.onnx.to_onnx(nbcnn.Model(layers, mode="cpu").build((2, 8, 8))), folder / "list.onnx")
    x = nbcnn.Input((2, 8, 8))
    y = nbcnn.Conv2d(4, 3, stride=2, padding=1)(x)
    y = nbcnn.Add()([y, nbcnn.GELU()(y)])
    y = nbcnn.GroupNorm(2)(y)
    save(nbcnn.onnx.to_onnx(nbcnn.Model(nbcnn.Graph.of([x], [nbcnn.AvgPool2d(2)(y)]), mode="cpu")), folder / "graph.onnx")
    f = TensorProto.FLOAT
    nodes = [
        helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.array([2], np.int64))),
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Concat", ["n", "rest"], ["shape"], axis=0),
        helper.make_node("Resize", ["x", "", "scales"], ["r"], mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        helper.make_node("Slice", ["r", "zero", "eight", "two"], ["c"]),
        helper.make_node("Pad", ["c", "pads"], ["p"], mode="constant"),
        helper.make_node("ConvTranspose", ["p", "w"], ["t"], strides=[2, 2], kernel_shape=[2, 2]),
        helper.make_node("AveragePool", ["t"], ["a"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Transpose", ["a"], ["q"], perm=[0, 2, 3, 1]),
        helper.make_node("ReduceMean", ["q", "two"], ["m"], keepdims=0),
        helper.make_node("Reshape", ["m", "shape"], ["z"]),
        helper.make_node("Split", ["z"], ["z1", "z2"], axis=1, num_outputs=2),
        helper.make_node("MatMul", ["z1", "v"], ["mm"]),
        helper.make_node("Softmax", ["mm"], ["y"], axis=-1),
        helper.make_node("Clip", ["z2", "low", "high"], ["y2"]),
    ]
    tensors = {
        "zero": np.array([0], np.int64),
        "eight": np.array([8], np.int64),
        "rest": np.array([-1], np.int64),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
        "w": rng.standard_normal((2, 3, 2, 2)).astype(np.float32),
        "v": rng.standard_normal((15, 2)).astype(np.float32),
        "low": np.array(0, np.float32),
        "high": np.array(6, np.float32),
    }
    inputs = [helper.make_tensor_value_info("x", f, ("n", 2, 4, 6))]
    outputs = [helper.make_tensor_value_info(name, f, None) for name in ("y", "y2")]
    graph = helper.make_graph(nodes, "hand", inputs, outputs, [numpy_helper.from_array(array, name) for name, array in tensors.items()])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "hand.onnx")


def mutate_onnx(pick: Random, path: Path) -> None:
    """One to three fields of the message, at any depth, are others."""
    import onnx

    model = onnx.load_from_string(path.read_bytes())
    for _ in range(pick.choice((1, 1, 1, 2, 3))):
        mutate_message(pick, model)
    path.write_bytes(model.SerializeToString())


def mutate_message(pick: Random, message: Any) -> None:
    while True:
        held = message.ListFields()
        if not held:
            return
        field, value = pick.choice(held)
        many = not isinstance(value, str | bytes | int | float) and hasattr(value, "__len__")
        if field.type != field.TYPE_MESSAGE or pick.random() < 0.1:
            break
        if many and not len(value):
            return
        message = pick.choice(list(value)) if many else value
    name = field.name
    if not many:
        if field.type == field.TYPE_MESSAGE or pick.random() < 0.1:
            message.ClearField(name)
        else:
            setattr(message, name, _scalar(pick, field, value))
        return
    way = pick.randrange(5)
    at = pick.randrange(len(value))
    if way == 0:
        del value[at]
    elif way == 1 and field.type == field.TYPE_MESSAGE:
        value.add().CopyFrom(value[at])
    elif way == 1:
        value.append(_scalar(pick, field, value[at]))
    elif way == 2:
        message.ClearField(name)
    elif field.type != field.TYPE_MESSAGE:
        value[at] = _scalar(pick, field, value[at])
    elif len(value) > 1:
        other = pick.randrange(len(value))
        kept = type(value[at])()
        kept.CopyFrom(value[at])
        value[at].CopyFrom(value[other])
        value[other].CopyFrom(kept)


INTEGERS = (-(2**63), -(2**31), -3, -1, 0, 1, 2, 3, 4, 5, 7, 11, 16, 1000, 2**20, 2**24, 2**31 - 2, 2**31, 2**47, 2**62, 2**63 - 1)
WORDS = ("", "x", "two", "shape", "w", "y", "Conv", "Reshape", "axes", "axis", "SAME_UPPER", "linear", "\0", "a\x1b[31mb", "é" * 500, "(" * 10_000)


def _scalar(pick: Random, field: Any, value: Any) -> Any:
    """Another value of a field of a protobuf message."""
    if isinstance(value, str):
        return pick.choice((*WORDS, value + "x", value[1:]))
    if isinstance(value, bytes):
        return damaged(pick, value) if pick.random() < 0.5 else pick.choice(WORDS).encode()
    if isinstance(value, float):
        return pick.choice((0.0, -1.0, 1e-30, 1e38, float("inf"), float("-inf"), float("nan"), value * 2, -value, 0.5))
    kinds = field.enum_type.values_by_number if field.type == field.TYPE_ENUM else None
    if kinds:
        return pick.choice(list(kinds))
    low, high = (
        (-(2**31), 2**31 - 1)
        if field.cpp_type == field.CPPTYPE_INT32
        else (0, 2**64 - 1)
        if field.cpp_type == field.CPPTYPE_UINT64
        else (-(2**63), 2**63 - 1)
    )
    if pick.random() < 0.4:
        return min(max(value + pick.choice((-1, 1, 2)), low), high)
    return min(max(pick.choice(INTEGERS), low), high)


def read_onnx(folder: Path) -> None:
    for path in sorted(folder.glob("*.onnx")):
        with nbcnn.onnx.from_onnx(path, mode="cpu") as model:
            if numel(model.net.input_shape) < 1 << 14:
                with np.errstate(all="ignore"):
                    model.predict(np.zeros((2, *model.net.input_shape), np.float32))


def numel(shape: Any) -> int:
    return int(np.prod(shape, dtype=object))


# -- npz, npy


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "train_images": rng.integers(0, 256, (8, 3, 6, 6), np.uint8),
        "train_labels": np.arange(8) % 3,
        "test_images": rng.integers(0, 256, (4, 3, 6, 6), np.uint8),
        "test_labels": np.arange(4) % 3,
        "classes": np.array(["a", "b", "c"]),
        "train_masks": rng.integers(0, 3, (8, 6, 6), np.uint8),
        "test_masks": rng.integers(0, 3, (4, 6, 6), np.uint8),
    }


def make_npz(folder: Path) -> None:
    np.savez(folder / "found.npz", **arrays())
    np.savez_compressed(folder / "whole.npz", x=arrays()["train_images"].transpose(0, 2, 3, 1), y=np.array(list("abcabcab")))


def make_npy(folder: Path) -> None:
    (folder / "parts").mkdir()
    for name, array in arrays().items():
        np.save(folder / "parts" / f"{name}.npy", array)


DESCRIPTIONS = (
    "<f8",
    "<f4",
    "<f2",
    "|u1",
    "|b1",
    "<i4",
    "<i8",
    ">i2",
    "<c8",
    "<U3",
    "<U99999999",
    "|S5",
    "|O",
    "<M8[s]",
    "|V7",
    "[('a', '<f4')]",
    "x",
    "",
)


def mutate_array(pick: Random, content: bytes) -> bytes:
    """An npy file whose header, or whose array, is another."""
    length = int.from_bytes(content[8:10], "little")
    header, body = content[10 : 10 + length].decode("latin1"), content[10 + length :]
    if pick.random() < 0.6:
        match pick.randrange(7):
            case 0:
                header = re.sub(r"'descr': '[^']*'", lambda _: f"'descr': {pick.choice(DESCRIPTIONS)!r}", header)
            case 1:
                shape = tuple(pick.choice((-1, 0, 1, 2, 3, 8, 2**31, 2**47, 2**63, 10**30, True)) for _ in range(pick.randrange(6)))
                header = re.sub(r"\([^)]*\)", lambda _: str(shape), header)
            case 2:
                header = re.sub(r"\d+", lambda found: pick.choice((found[0], str(2**47), "1" * 5000, "0", "-1")), header)
            case 3:
                header = header.replace("False", pick.choice(("True", "None", "1", "[", "'x'")))
            case 4:
                at = pick.randrange(len(header))
                header = header[:at] + pick.choice(("(", "[" * 100, "{" * 3000, "'", "\0", "\\", ",", "  ", "#", "\n")) + header[at + 1 :]
            case 5:
                header = pick.choice(("", "{}", "[]", "None", "{'descr': '<f4'}", "(" * 20_000, "__import__('os')", "-" * 30_000 + "1"))
            case _:
                header = header.rstrip() + pick.choice((" " * 60_000, ", 'more': 1}", "}}"))
        made = header.encode("latin1", "replace")[:65535]
        return content[:6] + bytes((pick.choice((1, 1, 1, 1, 2, 3, 9)), 0)) + len(made).to_bytes(2, "little") + made + body
    array = np.load(io.BytesIO(content))
    other = pick.choice(
        (
            lambda: array.astype(np.float32) if array.dtype.kind in "iu" else array,
            lambda: array.astype(np.float64) * 1e300 if array.dtype.kind in "iu" else array,
            lambda: array.astype(np.int64) - 2**40 if array.dtype.kind in "iu" else array,
            lambda: np.where(np.arange(array.size).reshape(array.shape) % 7 == 3, np.nan, 0.5),
            lambda: np.full(array.shape, 2**31 - 2, np.int64),
            lambda: np.full(array.shape, 300, np.uint16),
            lambda: array[:-1],
            lambda: array[..., :0],
            lambda: array[None],
            lambda: array.reshape(-1),
            lambda: array.swapaxes(0, -1),
            lambda: array.astype(str),
            lambda: array.astype("S"),
            lambda: array.astype(np.complex64) if array.dtype.kind in "iu" else array,
            lambda: np.array(["a\x1b[31m", "b" * 300, "\u202e"]),
            lambda: np.zeros((3 << 23), np.uint8),
            lambda: np.zeros((1 << 24, 1, 1, 1), np.uint8),
            lambda: np.array(7),
            lambda: np.array([{"a": 1}], object),
            lambda: np.zeros(4, [("a", "<f4"), ("b", "<i4")]),
            lambda: np.zeros(array.shape, "M8[s]"),
        )
    )()
    made = io.BytesIO()
    np.save(made, other, allow_pickle=True)
    return made.getvalue()


def mutate_npz(pick: Random, path: Path) -> None:
    """A member of the archive is another array, has another header or name, stands twice, is missing, or is of gigabytes of zeros."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = pick.choice(sorted(members))
    way = pick.randrange(12)
    if way == 0:
        del members[name]
    elif way == 1:
        members[pick.choice(("more.npy", "x.npy", "images.npy", "../x.npy", "a\x1b[31mb.npy", "masks.npy", "train_images", "channels_last.npy"))] = (
            members.pop(name)
        )
    elif way == 2:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": pick.choice(("|u1", "<f4")), "fortran_order": False, "shape": (700_000, 3, 16, 16)})
        members[name] = head.getvalue() + bytes(1 << 24)
    else:
        members[name] = mutate_array(pick, members[name])
    with zipfile.ZipFile(path, "w", pick.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))) as archive:
        for each, content in members.items():
            archive.writestr(each, content)


def mutate_npy(pick: Random, path: Path) -> None:
    path.write_bytes(mutate_array(pick, path.read_bytes()))


def read_npz(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        datasets.load(f"npz:{path}", limit=6)


# -- TOML

SETTINGS = """# settings of a run
epochs = 3
batch = 64
lr = 1e-3
quiet = true
[data]
dataset = "shapes"
augment = "flip,crop:4"
[optimisation]
optimizer = "adam"
weight-decay = 0.01
points = "0:0.1,2:1"
schedule = "constant"
"""
LINES = (
    "a" + ".a" * 3000 + " = 1",
    "x = " + "[" * 5000,
    "x = " + "{a=" * 2000,
    "batch = " + "9" * 5000,
    "epochs = 1000000000",
    "epochs = " + "9" * 30,
    "lr = inf",
    "lr = nan",
    "lr = 1e400",
    "epochs = 1_0",
    "epochs = 0x10",
    "batch = 1979-05-27T07:32:00Z",
    "batch = 07:32:00",
    'model = "' + "x" * 5000 + '"',
    'model = "a\\u001b[31mb"',
    'dataset = "npz:\\u0000"',
    'out = """\n\n"""',
    "'' = 1",
    '"\\u001b[31m" = 1',
    "[[data]]",
    "[data.data]\nbatch = 2",
    "size = 99999999",
    'size = "99999x99999"',
    'points = "' + "0:0.1," * 9000 + '"',
    'augment = "' + "flip," * 9000 + '"',
    "seed = -1",
    "seed = 9223372036854775808",
    "limit = 1e3",
    "ignore-index = -2147483648",
    'class-weights = "1,nan"',
    "huber-delta = 1e-400",
    "config = 'x.toml'",
    "help = true",
    "quiet = 1",
    "device = 'cuda:99999999999999999999'",
)


def mutate_toml(pick: Random, path: Path) -> None:
    lines = path.read_text().splitlines()
    for _ in range(pick.choice((1, 1, 2, 3))):
        at = pick.randrange(len(lines))
        match pick.randrange(5):
            case 0:
                lines.insert(at, pick.choice(LINES))
            case 1:
                lines[at] = pick.choice(LINES)
            case 2:
                lines[at] = re.sub(r"= .*", lambda _: f"= {pick.choice(VALUES)!r}".replace("\0", ""), lines[at])
            case 3:
                lines[at] = lines[at][: pick.randrange(len(lines[at]) + 1)] + pick.choice(("[", '"', "'", "\\", ".", "=", "\r", "é", "\x1b"))
            case _:
                lines[at], lines[0] = lines[0], lines[at]
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogateescape" if pick.random() < 0.5 else "replace"))


def read_toml(folder: Path) -> int:
    def parsed(argv: list[str]) -> int:
        assert isinstance(train_flags.parse(argv), SimpleNamespace)
        return OK

    return int(exits(parsed, ["--config", folder / "run.toml"]))


# -- saved networks, classifiers: sealed safetensors files


def make_saved(folder: Path) -> None:
    rng = np.random.default_rng(0)
    layers = [
        nbcnn.Conv2d(4, 3),
        nbcnn.BatchNorm2d(),
        nbcnn.Residual(nbcnn.Conv2d(4, 3, padding=1), nbcnn.ReLU()),
        nbcnn.MaxPool2d(2),
        nbcnn.Flatten(),
        nbcnn.Linear(3),
    ]
    model = nbcnn.Model(layers, "cross_entropy", mode="cpu")
    model.fit(rng.integers(0, 256, (8, 2, 8, 8), np.uint8), rng.integers(0, 3, 8), epochs=1, batch_size=4, verbose=0)
    model.save(folder / "list.safetensors")
    x, y = nbcnn.Input((1, 6, 6)), nbcnn.Input((5,))
    z = nbcnn.Concat()([nbcnn.Flatten()(nbcnn.Conv2d(2, 3)(x)), nbcnn.Linear(4)(y)])
    nbcnn.Model(nbcnn.Graph.of([x, y], [nbcnn.Linear(2)(nbcnn.Tanh()(z))]), "mse", mode="cpu").save(folder / "graph.safetensors")


def mutate_sealed(pick: Random, path: Path) -> None:
    """A value of a note, or a tensor, is another; the seal fits. Some are without a seal, as another program writes them."""
    tensors, notes = checkpoint.load(path)
    if pick.random() < 0.75:
        key = pick.choice([*notes, *4 * [key for key in notes if notes[key][:1] in "[{"]])
        try:
            told = json.loads(notes[key])
        except ValueError:
            told = None
        if isinstance(told, dict | list) and pick.random() < 0.9:
            notes[key] = json.dumps(changed(pick, told))
        elif pick.random() < 0.3:
            del notes[key]
        else:
            notes[key] = pick.choice(
                ("", "0", "-1", "nan", "1e38", "9" * 5000, "x" * 5000, "[" * 50_000, "{}", "[]", "null", "\0", "a\x1b[31mb", "é", "7", "0.5")
            )
    else:
        name = pick.choice(sorted(tensors))
        match pick.randrange(8):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = tensors[name][None]
            case 2:
                tensors[name] = tensors[name].reshape(-1)[:-1]
            case 3:
                tensors[name] = tensors[name].astype(np.float64 if tensors[name].dtype != np.float64 else np.float32)
            case 4:
                tensors[name] = tensors[name].astype(np.int32)
            case 5:
                with np.errstate(all="ignore"):
                    tensors[name] = (tensors[name].astype(np.float64) * pick.choice((1e36, -1e38, 0, 1e-40, 2**20))).astype(tensors[name].dtype)
            case 6:
                tensors[pick.choice(("param.", "x", "param.conv9.weight", "a\x1b[31mb", "é" * 300))] = tensors.pop(name)
            case _:
                tensors[name] = np.zeros(0, tensors[name].dtype)
    try:
        with np.errstate(all="ignore"):
            checkpoint.save(path, tensors, notes)
    except ValueError:
        path.write_bytes(damaged(pick, path.read_bytes()))


def read_saved(folder: Path) -> None:
    rng = np.random.default_rng(1)
    for path in sorted(folder.glob("*.safetensors")):
        with files.load(path, mode="cpu") as model:
            layers = model.net.layers
            shapes = layers.inputs if isinstance(layers, nbcnn.Graph) else (model.net.input_shape,)
            if sum(map(numel, shapes)) < 1 << 14 and numel(model.net.output_shape) < 1 << 14:
                given = [rng.integers(0, 2, (2, *shape), np.uint8) for shape in shapes]
                with np.errstate(all="ignore"):  # what weights of 1e38 lead to is infinite
                    model.predict(given if len(given) > 1 else given[0])


def make_classifier(folder: Path) -> None:
    make_features(folder / "features")
    for name, flags in (("svc", []), ("ridge", ["--machine", "ridge"]), ("processed", ["--process", "std"])):
        code, text = outcome(
            lambda flags=flags, name=name: exits(
                classify.main, [folder / "features", "--device", "cpu", "--quiet", "--jobs", "1", "--portable", *flags, "--out", folder / name]
            )
        )  # type: ignore[misc]
        assert code == OK, text
        (folder / name / classifier.NAME).rename(folder / f"{name}.safetensors")
        shutil.rmtree(folder / name)
    shutil.rmtree(folder / "features")


def read_classifier(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        found = classifier.load(path)
        if found.width < 1 << 14 and not found.mirrored:
            with np.errstate(all="ignore"):  # what vectors of 1e38 lead to is infinite
                decisions = found.decisions(np.ones((3, found.width), np.float32))
                found.margins(decisions)
                assert set(found.voted(decisions).tolist()) <= set(found.classes.tolist())


# -- images


def make_images(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for at, (suffix, mode, options) in enumerate(
        (
            ("png", "RGB", {}),
            ("png", "P", {}),
            ("png", "I;16", {}),
            ("jpg", "RGB", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"}),
            ("bmp", "RGB", {}),
            ("gif", "P", {}),
            ("tif", "RGB", {"compression": "tiff_lzw"}),
            ("tiff", "L", {}),
            ("webp", "RGB", {}),
            ("ppm", "RGB", {}),
            ("pgm", "L", {}),
        )
    ):
        place = folder / "ab"[at % 2]
        place.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (12, 12, 3), np.uint8)
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(pixels).convert(mode)
        image.save(place / f"{at}.{suffix}", **options)


def mutate_image(pick: Random, path: Path) -> None:
    """The file is that of a huge image, of a kind that no suffix names, or has other numbers in its head."""
    from PIL import Image

    content = bytearray(path.read_bytes())
    way = pick.randrange(6)
    if way == 0:
        Image.new(pick.choice(("1", "L", "RGB")), pick.choice(((1, 1), (1, 5000), (5000, 5000), (11_000, 11_000)))).save(
            path, format="PNG", compress_level=1
        )
    elif way == 1:
        kind = pick.choice(("EPS", "DDS", "SPIDER", "PDF", "TGA", "PCX", "ICNS", "JPEG2000", "SGI", "IM", "AVIF", "MPO", "QOI", "BLP", "XBM"))
        made = io.BytesIO()
        try:
            Image.new("F" if kind == "SPIDER" else "1" if kind == "XBM" else "P" if kind == "BLP" else "RGB", (32, 32)).save(made, format=kind)
        except (OSError, ValueError, KeyError):
            made = io.BytesIO(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
        path.write_bytes(made.getvalue())
    else:
        for _ in range(pick.choice((1, 2, 8))):
            at = pick.randrange(min(len(content), pick.choice((40, 200, len(content)))))
            put = pick.choice((b"\xff", b"\0", b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", b"\0\0\xff\xff", pick.randbytes(2)))
            content[at : at + len(put)] = put
        path.write_bytes(content)


def read_images(folder: Path) -> int:
    warnings.filterwarnings("ignore", module="PIL")  # they name no file; what cannot be used is an error
    datasets.load(f"folder:{folder}?size=8", progress=False)
    problems: list[str] = []
    for _ in pictures.read_all(pictures.files_in([folder]), (3, 8, 8), problems):
        pass
    assert not problems, problems
    return OK


# -- config.json, features


def mutate_json(pick: Random, path: Path) -> None:
    """A value of a document is another; of the other files of the folder bytes are."""
    if path.suffix == ".json":
        document = changed(pick, json.loads(path.read_bytes())) if pick.random() < 0.8 else None
        path.write_bytes(damaged_json(pick, path.read_bytes()) if document is None else json.dumps(document).encode())
    elif path.suffix == ".npy":
        mutate_npy(pick, path)
    else:
        path.write_bytes(damaged(pick, path.read_bytes()))


def make_config(folder: Path) -> None:
    with small():
        make_run(folder)
    for path in (folder / "run").iterdir():
        if path.name not in ("config.json", "metrics.jsonl", checkpoint.LAST):
            path.unlink()


def read_config(folder: Path) -> int:
    with small():
        return extract_run(folder)


def mutate_config(pick: Random, path: Path) -> None:
    mutate_json(pick, path.parent / "config.json")


HAS_ONNX = importlib.util.find_spec("onnx.checker") is not None
"""Whether the package is installed: the folder of tests called onnx is found by its name, too."""
FORMATS: dict[str, Format] = {
    **({"onnx": Format(make_onnx, read_onnx, mutate_onnx)} if HAS_ONNX else {}),
    "npz": Format(make_npz, read_npz, mutate_npz),
    "npy": Format(make_npy, read_npz, mutate_npy),
    "toml": Format(lambda folder: (folder / "run.toml").write_text(SETTINGS), read_toml, mutate_toml, (USAGE,)),
    "saved network": Format(make_saved, read_saved, mutate_sealed),
    "classifier": Format(make_classifier, read_classifier, mutate_sealed),
    "images": Format(make_images, read_images, mutate_image),
    "config": Format(make_config, read_config, mutate_config),
    "features": Format(make_features, read_values, mutate_json),
}
