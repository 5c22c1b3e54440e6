"""Tests of how files of others are opened, quoted and their headers read: nothing is waited for, asked for or printed because a file says so."""

from __future__ import annotations

import ast
import io
import os
import tracemalloc

import numpy as np
import pytest
from scripts import ROOT

from nbcnn.files import npy, regular
from nbcnn.files.quote import brief, printable, quoted


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(content):
    return npy.header(io.BytesIO(content), len(content))


def with_header(text, body=b"", version=1):
    made = text.encode("latin1")
    return npy.MAGIC + bytes((version, 0)) + len(made).to_bytes(2, "little") + made + body


@pytest.mark.parametrize("value", ["(" * 10_000, "é" * 300, b"x" * 300, [1] * 300, {"a": "b" * 99}])
def test_a_quoted_value_has_at_most_60_characters(value):
    assert len(quoted(value)) <= 60


def test_what_python_cannot_write_is_quoted():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert quoted(deep) == "a very large list"
    assert quoted(10**5000) == "a very large int"


def test_escape_sequences_are_printed_escaped():
    assert quoted("a\x1b[31mb") == r"'a\x1b[31mb'"
    assert printable("a\x1b[31m\nb\udcff") == "a\\x1b[31m\nb\\udcff"
    assert brief(ValueError("a\x1b[31m\nb" * 500)).startswith(r"a\x1b[31m b")
    assert len(brief(ValueError("x" * 5000))) == 200


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_only_regular_files_are_opened(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(OSError, match=r"regular|directory"):
        regular.read(tmp_path / "x")


OF_THE_SYSTEM = (
    *("files/lock", "classify/workers", "cli/env", "cli/phases", "gpu/memory"),
    *("gpu/kernel_cache", "lab/report/readme", "lab/report/kernels_page"),
)
"""Modules that read what is no file of users: of /proc, or of the package and its documents."""


def test_every_file_of_users_is_opened_by_regular():
    """So a FIFO is not waited for and a device is not read, wherever a path comes from."""
    found = []
    for file in sorted((ROOT / "nbcnn").rglob("*.py")):
        name = str(file.relative_to(ROOT / "nbcnn"))
        if name.startswith((*OF_THE_SYSTEM, "files/regular", "lab/studies", "lab/peers", "lab/measure")):
            continue
        for call in (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
            mode = next((arg.value for arg in call.args[1:2] if isinstance(arg, ast.Constant)), "r")
            if called in ("read_bytes", "read_text") or (ast.unparse(call.func) == "open" and mode in ("r", "rb")):
                found.append(f"nbcnn/{name}:{call.lineno}")
    assert not found, f"{found}: nbcnn.files.regular has `read` and `opened`"


def test_no_more_is_allocated_than_a_file_holds(tmp_path):
    (tmp_path / "x").write_bytes(bytes(11))
    tracemalloc.start()
    try:
        with regular.opened(tmp_path / "x") as file:
            assert file.read(1 << 33) == bytes(11)
            assert file.read(1 << 33) == file.read() == b""
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_longer_than_may_be_is_not_read(tmp_path):
    (tmp_path / "x").write_bytes(bytes(11))
    assert regular.read(tmp_path / "x", 11) == bytes(11)
    with pytest.raises(OSError, match="11 bytes, and at most 10"):
        regular.read(tmp_path / "x", 10)


@pytest.mark.parametrize(
    "array",
    [np.zeros((3, 4), np.float32), np.array(["ab", "c"]), np.float64(7), np.asfortranarray(np.zeros((2, 3))), np.zeros((0, 5)), np.zeros(3, ">i2")],
)
def test_headers_of_numpy_are_read(array):
    found = header(saved(array))
    assert (found.dtype, found.shape, found.nbytes) == (array.dtype, array.shape, array.nbytes)
    assert found.columns == (array.ndim > 1 and not array.flags.c_contiguous)


def test_headers_of_other_writers_are_read():
    assert header(with_header("{'shape':(3L,), 'fortran_order':False,'descr':'<i2' }", bytes(6))).shape == (3,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }", bytes(64)),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 140737488355328, 140737488355328), }"),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", bytes(4)),
        with_header("{'descr': '<U99999999', 'fortran_order': False, 'shape': (1,), }", bytes(4)),
        with_header("{'descr': '<U0', 'fortran_order': False, 'shape': (99999999,), }"),
        with_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
        with_header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", bytes(4)),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1" * 5000 + ",), }", bytes(4)),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'shape': (1,)", bytes(4)),
        with_header("(" * 5000),
        with_header("{'descr': '<f4", bytes(4)),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(4), version=9),
        npy.MAGIC + b"\x02\0\xff\xff\xff\x7f",
        npy.MAGIC + b"\x01\0\0\0",
        saved(np.zeros(5))[:-1],
        saved(np.zeros(5)) + b"x",
    ],
)
def test_headers_that_claim_what_is_not_there_are_refused_before_memory_is_asked_for(content):
    tracemalloc.start()
    try:
        with pytest.raises(npy.NpyError) as refused:
            header(content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("wanted", [None, [], [0], [4, 1, 1, 9], list(range(10))[::-1]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_are_read_in_the_order_that_is_asked_for(monkeypatch, wanted, order):
    monkeypatch.setattr(npy, "BLOCK", 50)
    array = np.arange(60, dtype=np.int32).reshape(10, 2, 3, order=order)
    content = saved(array)
    file = io.BytesIO(content)
    made = npy.read_rows(file, npy.header(file, len(content)), None if wanted is None else np.array(wanted, np.int64))
    np.testing.assert_array_equal(made, array if wanted is None else array[np.array(wanted, np.int64)])


@pytest.mark.parametrize("point", [0x110000, 0xD800, 0xFFFFFFFF])
def test_text_with_characters_that_there_are_not_is_refused(point):
    values = np.array([65, point], np.uint32).view("<U2")
    with pytest.raises(npy.NpyError, match="characters that there are not"):
        npy.texts(values)
    assert npy.texts(np.array(["a", "é"])) == ("a", "é")
