"""Tests of the checkpoint file: its format, every way it can be wrong, and that writing never costs the old one."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nbcnn.files import atomic
from nbcnn.train import checkpoint
from nbcnn.train.checkpoint import BEST, LAST, CheckpointError

TENSORS = {
    "param.conv1.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "param.conv1.bias": np.array([-0.0, 1e-45], np.float32),
    "step_state": np.arange(8, dtype=np.int64),
    "sums": np.array([0.1, 0.2, 0.3, 0.4]),
    "scalar": np.float64(2.5) * np.ones(()),
    "empty": np.zeros((0, 3), np.float32),
    "bytes": np.arange(5, dtype=np.uint8),
}


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / LAST, TENSORS, {"step": "7"})
    return tmp_path / LAST


def split(path: Path) -> tuple[dict, bytes]:
    """Header and data section, read as the specification of safetensors says."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_roundtrip_keeps_every_bit(saved):
    tensors, metadata = checkpoint.load(saved)
    assert metadata == {"step": "7"}
    assert set(tensors) == set(TENSORS)
    for name, tensor in tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.shape == TENSORS[name].shape
        assert tensor.tobytes() == TENSORS[name].tobytes(), name
        assert tensor.flags.writeable


def test_strided_and_big_endian_tensors_are_stored_in_c_order(tmp_path):
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T
    swapped = np.arange(3, dtype=">i8")
    checkpoint.save(tmp_path / LAST, {"strided": strided, "swapped": swapped}, {})
    tensors, _ = checkpoint.load(tmp_path / LAST)
    np.testing.assert_array_equal(tensors["strided"], strided)
    np.testing.assert_array_equal(tensors["swapped"], swapped)


def test_the_file_is_safetensors(saved):
    header, data = split(saved)
    assert header.pop("__metadata__")["step"] == "7"
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[0][0] == 0
    assert ends[-1][1] == len(data)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    entry = header["param.conv1.weight"]
    assert (entry["dtype"], entry["shape"]) == ("F32", [2, 3, 2, 2])
    begin, end = entry["data_offsets"]
    np.testing.assert_array_equal(np.frombuffer(data[begin:end], "<f4"), np.arange(24))
    assert saved.stat().st_size % 8 == (len(data)) % 8, "the header is padded so that the data stay aligned"


def test_save_returns_the_size(tmp_path):
    assert checkpoint.save(tmp_path / LAST, TENSORS, {}) == (tmp_path / LAST).stat().st_size


def test_a_dtype_without_a_code_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'half' is float16"):
        checkpoint.save(tmp_path / LAST, {"half": np.zeros(2, np.float16)}, {})
    assert not list(tmp_path.iterdir())


def test_half_precisions_of_other_programs_are_read_as_float32(tmp_path):
    """Every float16 and every bfloat16 is a float32 too; the words are those of the format, little-endian."""
    halves = np.array([1.5, -0.0, 6e-8, 65504], "<f2")
    words = np.array([0x3FC0, 0x8000, 0x0001, 0x7F7F], "<u2")  # 1.5, −0, the least subnormal, the greatest
    header = {"h": entry("F16", (2, 2), (0, 8)), "b": entry("BF16", (4,), (8, 16))}
    join(tmp_path / LAST, header, halves.tobytes() + words.tobytes())
    tensors, _ = checkpoint.load(tmp_path / LAST)
    assert {name: (tensor.dtype, tensor.shape, tensor.flags.writeable) for name, tensor in tensors.items()} == {
        "h": (np.float32, (2, 2), True),
        "b": (np.float32, (4,), True),
    }
    np.testing.assert_array_equal(tensors["h"].reshape(-1).view(np.uint32), halves.astype(np.float32).view(np.uint32))
    np.testing.assert_array_equal(tensors["b"].view(np.uint32), words.astype(np.uint32) << 16)


@pytest.mark.parametrize(("dtype", "nan"), [("F16", 0x7E00), ("BF16", 0x7FC0)])
def test_a_half_that_is_no_number_is_named(tmp_path, dtype, nan):
    join(tmp_path / LAST, {"w": entry(dtype, (2,), (0, 4))}, np.array([0, nan], "<u2").tobytes())
    with pytest.raises(CheckpointError, match="'w' holds 1 values that are NaN"):
        checkpoint.load(tmp_path / LAST)


def test_every_truncation_is_noticed(saved):
    content = saved.read_bytes()
    for length in (0, 5, 8, 20, len(content) // 2, len(content) - 1):
        saved.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=str(saved)):
            checkpoint.load(saved)


def test_every_flipped_bit_of_the_data_is_noticed(saved):
    content = saved.read_bytes()
    data_bytes = len(split(saved)[1])
    for position in range(len(content) - data_bytes, len(content), 7):
        wrong = bytearray(content)
        wrong[position] ^= 0x10
        saved.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"checksum|NaN"):
            checkpoint.load(saved)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"not json", "no JSON"),
        (b"[1, 2]", "no JSON object"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, ' + b"9" * 5000 + b"]}}", "no JSON"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "w": {}}', "twice"),
        ({"w": 3}, "'w' needs exactly"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "'w' needs exactly"),
        ({"w": entry(dtype="F8_E4M3")}, "'w' has dtype 'F8_E4M3'"),
        ({"w": entry(dtype="BF16")}, "'w' of BF16 .* needs 4 bytes"),
        ({"w": entry(dtype=["F32"])}, "'w' has dtype"),
        ({"w": entry(shape=[-2])}, "'w' has shape"),
        ({"w": entry(shape=[True, 2])}, "'w' has shape"),
        ({"w": entry(shape=[1 << 62, 0], offsets=[0, 0])}, "'w' has shape"),
        ({"w": entry(shape=[1] * 40 + [2])}, "'w' has shape"),
        ({"w": entry(offsets=[0, 8, 16])}, "'w' has shape"),
        ({"w": entry(offsets=[8, 0])}, "'w' of F32"),
        ({"w": entry(shape=[3])}, "'w' of F32 .* needs 12 bytes"),
        ({"w": entry(shape=[4], offsets=[0, 16])}, "'w' ends at byte 16"),
        ({"w": entry(), "v": entry()}, "'v' starts at byte 0 .* overlap"),
        ({"w": entry(shape=[1], offsets=[4, 8])}, "'w' starts at byte 4"),
        ({"w": entry(shape=[1], offsets=[0, 4])}, "4 bytes follow"),
        ({"__metadata__": {"step": 3}, "w": entry()}, "map of strings"),
    ],
)
def test_a_wrong_header_is_named(tmp_path, header, says):
    join(tmp_path / LAST, header, bytes(8))
    with pytest.raises(CheckpointError, match=says):
        checkpoint.load(tmp_path / LAST)


def test_a_header_longer_than_the_file_is_not_allocated(tmp_path):
    (tmp_path / LAST).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header claims"):
        checkpoint.load(tmp_path / LAST)


def test_a_foreign_safetensors_file_without_a_checksum_is_read(tmp_path):
    join(tmp_path / LAST, {"w": entry()}, np.array([1, 2], "<f4").tobytes())
    np.testing.assert_array_equal(checkpoint.load(tmp_path / LAST)[0]["w"], [1, 2])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_names_the_tensor(tmp_path, bad):
    tensors = TENSORS | {"optim.m.conv3.weight": np.array([0, bad, 1], np.float32)}
    checkpoint.save(tmp_path / LAST, tensors, {})
    with pytest.raises(CheckpointError, match=r"'optim\.m\.conv3\.weight' holds 1 values that are NaN or Inf"):
        checkpoint.load(tmp_path / LAST)


def test_a_corrupt_last_names_the_newest_good_one(saved):
    checkpoint.save(saved.with_name(BEST), TENSORS, {"step": "5"})
    checkpoint.save(saved.with_name("checkpoint-000003.safetensors"), TENSORS, {"step": "3"})
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"last good one is .*{BEST} \(training step 5\)"):
        checkpoint.load(saved)
    saved.with_name(BEST).write_bytes(b"also broken")
    with pytest.raises(CheckpointError, match=r"last good one is .*000003"):
        checkpoint.load(saved)
    saved.with_name("checkpoint-000003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no other good checkpoint beside it: put a sound copy in its place, or train again$"):
        checkpoint.load(saved)
    saved.unlink()
    saved.with_name(BEST).unlink()
    checkpoint.save(saved.with_name(BEST), TENSORS, {"step": "5"})
    with pytest.raises(CheckpointError, match=rf"^there is no checkpoint {LAST} in .*: the last good one is .*{BEST}"):
        checkpoint.load(saved)


def test_a_missing_one_and_a_folder_are_errors_of_their_own(tmp_path):
    with pytest.raises(CheckpointError, match=rf"^there is no checkpoint {LAST} in {tmp_path}: give a \.safetensors file, or the folder of a run$"):
        checkpoint.load(tmp_path / LAST)
    with pytest.raises(CheckpointError, match=rf"^there is no file or run folder {tmp_path / 'none'}: give a \.safetensors file"):
        checkpoint.load(tmp_path / "none" / LAST)
    with pytest.raises(CheckpointError, match="directory"):
        checkpoint.load(tmp_path)


def test_a_write_that_fails_keeps_the_old_file_and_removes_its_own(saved, monkeypatch):
    before = saved.read_bytes()

    def fail(_):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        checkpoint.save(saved, TENSORS, {"step": "8"})
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_too_little_room_is_told_before_writing(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(atomic.DiskFull, match=rf"needs {len(before):,} bytes, 10 are free"):
        checkpoint.save(saved, TENSORS, {"step": "7"})
    assert saved.read_bytes() == before


def test_a_full_disk_keeps_the_old_checkpoint(disk, monkeypatch):
    path = disk("size=256k") / LAST
    checkpoint.save(path, TENSORS, {"step": "1"})
    before = path.read_bytes()
    large = {"w": np.ones(1 << 16, np.float32)}
    with pytest.raises(atomic.DiskFull, match=r"needs 262,[0-9]{3} bytes"):
        checkpoint.save(path, large, {})
    # The same with another process eating the room after the check.
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 40})())
    with pytest.raises(atomic.DiskFull, match=r"needs 262,[0-9]{3} bytes and the disk is full"):
        checkpoint.save(path, large, {})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


WRITER = """
import sys
from pathlib import Path
import numpy as np
from nbcnn.train import checkpoint
path, value = Path(sys.argv[1]), 1
while True:
    checkpoint.save(path, {"w": np.full(1 << 20, value, np.float32)}, {"step": str(value)})
    print(value, flush=True)
    value += 1
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_writer_leaves_a_whole_checkpoint(tmp_path, number):
    path = tmp_path / LAST
    for pause in (0.0, 0.003, 0.007, 0.013):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as writer:
            writer.stdout.readline()
            # Later and later within the second write.
            time.sleep(pause)
            writer.send_signal(number)
            last = max(int(line) for line in [b"1", *writer.stdout.read().split()])
            writer.wait(10)
        tensors, metadata = checkpoint.load(path)
        assert int(metadata["step"]) in (last, last + 1)
        assert (tensors["w"] == int(metadata["step"])).all()
