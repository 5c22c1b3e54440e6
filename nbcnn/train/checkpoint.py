"""This module writes and reads checkpoints, one safetensors file each: writing loses nothing, reading trusts nothing.

The format (https://github.com/huggingface/safetensors): 8 bytes, the little-endian length of the header; the header, a JSON
object {name: {"dtype", "shape", "data_offsets": [begin, end]}, …} with string metadata under "__metadata__"; then the raw
little-endian tensors, without holes. No pickle. Ours begin their metadata with "seal", the SHA-256 of the whole file with these 64 digits
as zeros, so that a changed name, shape or string is noticed like a changed weight. Files of earlier versions have instead, under "sha256", the
SHA-256 of the tensors' bytes alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nbcnn.files import atomic, regular
from nbcnn.files.quote import brief, quoted
from nbcnn.files.suggest import for_shell
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import decode
from nbcnn.train import former

ADVICE = "give a .safetensors file, or the folder of a run"
"""What to do where there is no checkpoint."""
_OF_PYTORCH = (
    "a file of PyTorch, which is never unpickled here. In PyTorch, safetensors.torch.save_file(module.state_dict(), {to!r}) writes "
    "weights that Model.load_weights takes"
)
FOREIGN = {
    ".onnx": "an ONNX file: python -m nbcnn import {words} makes a model of it, in Python nbcnn.onnx.from_onnx({path!r})",
    ".pt": _OF_PYTORCH,
    ".pth": _OF_PYTORCH,
}
"""By the end of its name what a file of another program is, and what to do with it."""
LAST, BEST = "checkpoint-last.safetensors", "checkpoint-best.safetensors"

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
"""What `save` writes, by the format's names."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
HALVES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""What files of other programs have besides, and is read as float32, which holds every value of both. NumPy has no bfloat16: its words are kept."""
_MAX_HEADER, _MAX_DIMENSIONS = 1 << 24, 8
_METADATA, _SEAL, _OLDER_SEAL = "__metadata__", "seal", "sha256"
_BEFORE_SEAL = f'{{"{_METADATA}": {{"{_SEAL}": "'.encode()
_SEAL_AT = 8 + len(_BEFORE_SEAL)
_NO_SEAL = b"0" * 64

Tensors = dict[str, np.ndarray]
Metadata = dict[str, str]


class CheckpointError(Exception):
    """A checkpoint is missing, corrupt, or of another network; the message names the file and the tensor. On the command line the exit code is 3.

    Example:
        >>> import nbcnn
        >>> try:
        ...     nbcnn.load("no-such-file.safetensors")
        ... except nbcnn.CheckpointError as error:
        ...     print(error)
        there is no file or run folder no-such-file.safetensors: give a .safetensors file, or the folder of a run
    """

    exit_code = 3


class _Missing(CheckpointError):
    """There is no such file."""


@dataclass(frozen=True)
class Saved:
    """What the checkpoint `path` holds. `tensors` are writable copies; `sha256` is that of the file, as it was read.

    `checked` says what its checksum covered: "all", "tensors" (written before the seal) or "" (no checksum: another program's file).
    """

    path: Path
    tensors: Tensors
    metadata: Metadata
    sha256: str
    checked: str


def save(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> int:
    """Put a checkpoint in place of `path`, whole or not at all, and return its size in bytes.

    Raises ValueError for a name, dtype or shape that the format does not have, atomic.DiskFull (an OSError) if there is no room.
    """
    entries: dict[str, Any] = {}
    parts: list[np.ndarray] = []
    begin = 0
    # Wide types first, so that every tensor is aligned for whoever maps the file.
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        array = np.asarray(tensors[name])
        dtype = array.dtype.newbyteorder("<")
        if dtype not in _CODES:
            raise ValueError(f"tensor {quoted(name)} is {array.dtype}; a checkpoint holds {', '.join(d.name for d in _CODES)}")
        if name == _METADATA or not _counts(list(array.shape)):
            raise ValueError(f"tensor {quoted(name)} of shape {array.shape} has no place in a checkpoint")
        # ascontiguousarray would turn a scalar's shape () into (1,), so the shape is taken before.
        entries[name] = {"dtype": _CODES[dtype], "shape": list(array.shape), "data_offsets": [begin, begin + array.nbytes]}
        parts.append(np.ascontiguousarray(array, dtype))
        begin += array.nbytes
    if {_SEAL, _OLDER_SEAL} & metadata.keys():
        raise ValueError(f"the metadata {_SEAL!r} and {_OLDER_SEAL!r} are the checkpoint's own")
    header = json.dumps({_METADATA: {_SEAL: _NO_SEAL.decode(), **metadata}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _MAX_HEADER:
        raise ValueError(f"the header of {path} would have {len(header):,} bytes, more than {_MAX_HEADER:,}")
    content = len(header).to_bytes(8, "little") + header
    digest = hashlib.sha256(content)
    for part in parts:
        digest.update(part.data)
    content = content[:_SEAL_AT] + digest.hexdigest().encode() + content[_SEAL_AT + len(_NO_SEAL) :]

    def write(file: BinaryIO) -> None:
        file.write(content)
        for part in parts:
            file.write(part.data)

    total = len(content) + begin
    atomic.replace(path, total, write)
    return total


def load(path: Path) -> tuple[Tensors, Metadata]:
    """The tensors (writable copies) and the metadata of a checkpoint; raises as `read`."""
    saved = read(path)
    return saved.tensors, saved.metadata


def read(path: Path) -> Saved:
    """A checkpoint, from one reading of its file.

    Raises CheckpointError if the file is missing, its header or a tensor's place in the file is wrong, bytes are missing,
    left over or changed, or a floating-point tensor holds NaN or Inf.
    """
    if path.suffix.lower() in FOREIGN and path.is_file():
        to = f"{path.stem}.safetensors"
        raise CheckpointError(f"{path} is {FOREIGN[path.suffix.lower()].format(path=str(path), to=to, words=for_shell(path, to))}")
    try:
        return _read(path)
    except _Missing:
        what = f"checkpoint {path.name} in {path.parent}" if os.path.isdir(path.parent) else f"file or run folder {path.parent}"
        raise CheckpointError(f"there is no {what}: {_alternative(path) or ADVICE}") from None
    except CheckpointError as error:
        alone = "there is no other good checkpoint beside it: put a sound copy in its place, or train again"
        raise CheckpointError(f"{path}: {error}; {_alternative(path) or alone}") from None


def _read(path: Path) -> Saved:
    """Read a checkpoint like `read`, with errors that name the tensor but not the file."""
    try:
        content = regular.read(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _Missing from None
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from None
    tensors, metadata, data = _parse(content)
    for name, tensor in tensors.items():
        bad = tensor.size - np.isfinite(tensor).sum() if tensor.dtype.kind == "f" else 0
        if bad:
            raise CheckpointError(f"tensor {quoted(name)} holds {bad:,} values that are NaN or Inf")
    seal, older = metadata.pop(_SEAL, None), metadata.pop(_OLDER_SEAL, None)
    if seal is not None and seal != _sealed(content):
        raise CheckpointError("the checksum in its header is not that of the file: bytes were changed after it was written")
    if older is not None and older != hashlib.sha256(data).hexdigest():
        raise CheckpointError("the checksum in its header is not that of its tensors: bytes were changed after it was written")
    checked = "all" if seal is not None else "tensors" if older is not None else ""
    return Saved(path, tensors, former.of_checkpoint(metadata), hashlib.sha256(content).hexdigest(), checked)


def _sealed(content: bytes) -> str:
    """The SHA-256 of a file's content with the digits of its seal as zeros; empty if they are not where `save` puts them."""
    if content[8:_SEAL_AT] != _BEFORE_SEAL:
        return ""
    digest = hashlib.sha256(content[:_SEAL_AT] + _NO_SEAL)
    digest.update(memoryview(content)[_SEAL_AT + len(_NO_SEAL) :])
    return digest.hexdigest()


def _parse(content: bytes) -> tuple[Tensors, Metadata, memoryview]:
    """Tensors, metadata and the data section of a file's content."""
    if len(content) < 8:
        raise CheckpointError(f"{len(content)} bytes are too few for a safetensors file")
    length = int.from_bytes(content[:8], "little")
    if length > min(_MAX_HEADER, len(content) - 8):
        raise CheckpointError(f"not a safetensors file, or truncated: its header claims {length:,} bytes of {len(content) - 8:,}")
    try:
        header = json.loads(content[8 : 8 + length].decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not a safetensors file: its header is no JSON ({brief(error)})") from None
    if not isinstance(header, dict):
        raise CheckpointError("not a safetensors file: its header is no JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("its metadata is not a map of strings")
    data = memoryview(content)[8 + length :]
    places = {name: _place(name, entry) for name, entry in header.items()}
    at = 0
    for name, (begin, end, _, _) in sorted(places.items(), key=lambda item: item[1][:2]):
        if begin != at:
            raise CheckpointError(f"tensor {quoted(name)} starts at byte {begin:,} of the data, expected {at:,}: tensors overlap or leave a hole")
        if end > len(data):
            raise CheckpointError(f"tensor {quoted(name)} ends at byte {end:,} of the data, the file has {len(data):,}: truncated")
        at = end
    if at != len(data):
        raise CheckpointError(f"{len(data) - at:,} bytes follow the last tensor")
    return {name: _values(data[begin:end], code).reshape(shape) for name, (begin, end, code, shape) in places.items()}, metadata, data


def _values(content: memoryview, code: str) -> np.ndarray:
    """The elements of a tensor's bytes, flat: a copy of its own, float32 of a half precision."""
    if code == "BF16":
        return decode(np.frombuffer(content, HALVES[code]), "bfloat16")
    if code == "F16":
        return np.frombuffer(content, HALVES[code]).astype(np.float32)
    return np.frombuffer(content, DTYPES[code]).copy()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise CheckpointError("its header names a tensor twice")
    return made


def _place(name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, the format's name of the dtype, shape) of one header entry, or CheckpointError with the tensor's name."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {quoted(name)} needs exactly dtype, shape and data_offsets in the header")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    known = DTYPES | HALVES
    if not isinstance(code, str) or code not in known:
        raise CheckpointError(f"tensor {quoted(name)} has dtype {quoted(code)}; nbcnn reads {', '.join(known)}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"tensor {quoted(name)} has shape {quoted(shape)} and data_offsets {quoted(offsets)}: not lists of sizes")
    begin, end = offsets
    nbytes = numel(tuple(shape)) * known[code].itemsize
    if end - begin != nbytes:
        raise CheckpointError(f"tensor {quoted(name)} of {code} {quoted(shape)} needs {nbytes:,} bytes, its data_offsets give {end - begin:,}")
    return begin, end, code, tuple(shape)


def _counts(values: Any) -> bool:
    """True for a list of at most eight sizes (JSON's true and false are ints to Python, and refused)."""
    return isinstance(values, list) and len(values) <= _MAX_DIMENSIONS and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _alternative(path: Path) -> str:
    """The end of an error message, which names the newest other readable checkpoint of the folder; empty if there is none."""
    good = []
    for other in sorted(path.parent.glob("checkpoint-*.safetensors")):
        if other.name != path.name:
            try:
                good.append((int(_read(other).metadata["step"]), other))
            except (CheckpointError, KeyError, ValueError):
                continue
    if not good:
        return ""
    step, other = max(good)
    return f"the last good one is {other} (training step {step:,}), which can be given by its path"
