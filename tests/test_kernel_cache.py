"""The disk cache of compiled kernels: one folder per version of the sources."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nbcnn import cuda, kernel_cache


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nbcnn"


def test_the_folder_is_named_after_the_sources(root):
    assert kernel_cache.folder() == root / f"kernels-{kernel_cache.source_hash()}"


def test_only_the_most_recent_folders_stay(root):
    for age in range(10):
        old = root / f"kernels-{age}"
        old.mkdir(parents=True)
        os.utime(old, (1e9 - age, 1e9 - age))
    kept = kernel_cache.folder()
    assert {path.name for path in root.iterdir()} == {kept.name, "kernels-0", "kernels-1", "kernels-2"}


def test_a_folder_of_the_users_own_is_taken_as_it_is(root, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    assert kernel_cache.folder() == tmp_path / "mine"
    assert not root.exists()


def test_without_a_writable_place_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernel_cache.folder() is None


_CLOSURE_HASH = """
import hashlib
from numba.cuda.serialize import dumps
from nbcnn.ops.conv.im2col import gather_product
from nbcnn.ops.conv.tiles import Tile
kernel = gather_product(Tile(64, 64, 16, 4, 4), 3, 3, 1, 1, 4, True, True, True)
print(hashlib.sha256(dumps([cell.cell_contents for cell in kernel.py_func.__closure__])).hexdigest())
"""


@pytest.mark.skipif(cuda.SIMULATOR, reason="the simulator compiles nothing")
def test_a_second_process_finds_a_kernel_because_its_closure_pickles_to_the_same_bytes():
    found = [subprocess.run([sys.executable, "-c", _CLOSURE_HASH], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert len(found[0]) == 65
    assert found[0] == found[1]
