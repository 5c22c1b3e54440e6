"""Tests of the disk cache of compiled kernels: one folder per version of the sources."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile

import pytest

from nbcnn.files.errors import UsageError
from nbcnn.gpu import device, kernel_cache


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nbcnn"


def test_the_folder_is_named_after_the_sources(root):
    assert kernel_cache.folder() == root / f"kernels-{kernel_cache.SOURCES}"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three files in place of this one."""
    for name in ("ops/a.py", "gpu/compiler.py", "run/peak_kernels.py", "gpu/device.py", "plan/x.py"):
        (tmp_path / "nbcnn" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nbcnn" / name).write_text("pass\n")
    monkeypatch.setattr("nbcnn.__file__", str(tmp_path / "nbcnn" / "__init__.py"))
    return tmp_path / "nbcnn"


@pytest.mark.parametrize(
    ("name", "counts"),
    [("ops/a.py", True), ("gpu/compiler.py", True), ("run/peak_kernels.py", True), ("gpu/device.py", False), ("plan/x.py", False)],
)
def test_the_hash_is_of_ops_and_of_the_compilers_door(name, counts, package):
    before = kernel_cache.source_hash()
    (package / name).write_text("pass \n")
    assert (kernel_cache.source_hash() != before) == counts


def test_a_file_of_another_name_is_another_source(package):
    before = kernel_cache.source_hash()
    (package / "ops" / "a.py").rename(package / "ops" / "b.py")
    assert kernel_cache.source_hash() != before


def test_what_is_edited_after_the_import_does_not_move_the_folder(package, root):
    before = kernel_cache.folder()
    (package / "ops" / "a.py").write_text("edited")
    assert kernel_cache.folder() == before


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


def expose(folder, how):
    """Let others write into `folder`, or let it look as if they had written."""
    folder.mkdir(mode=0o700)
    match how:
        case "everybody":
            folder.chmod(0o777)
        case "the group":
            folder.chmod(0o770)
        case "a file":
            folder.chmod(0o755)
            (folder / "index.nbi").touch()
            (folder / "index.nbi").chmod(0o666)
        case "another's":
            os.chown(folder, 12345, 12345)
        case "another's file":
            (folder / "below").mkdir()
            (folder / "below" / "index.nbi").touch()
            os.chown(folder / "below" / "index.nbi", 12345, 12345)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
EXPOSED = ["everybody", "the group", "a file", *(pytest.param(how, marks=as_root) for how in ("another's", "another's file"))]


@pytest.mark.parametrize("how", EXPOSED)
def test_a_chosen_folder_that_others_can_write_is_refused(how, tmp_path, monkeypatch):
    expose(tmp_path / "shared", how)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "shared"))
    with pytest.raises(UsageError, match=r"NUMBA_CACHE_DIR is .*shared, and .*(chmod 700|another user)") as caught:
        kernel_cache.folder()
    assert caught.value.exit_code == 2


def test_a_closed_folder_may_hold_files_with_any_mode(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "index.nbi").touch()
    (tmp_path / "mine" / "index.nbi").chmod(0o666)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    assert kernel_cache.folder() == tmp_path / "mine"


def test_what_is_made_is_closed_to_others(root, tmp_path, monkeypatch):
    before = os.umask(0)
    try:
        made = kernel_cache.folder()
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
        chosen = kernel_cache.folder()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made, made.parent, chosen)] == [0o700] * 3


def test_the_default_folder_of_an_earlier_version_is_closed(root):
    old = root / f"kernels-{kernel_cache.SOURCES}"
    old.mkdir(parents=True)
    old.chmod(0o775)
    assert kernel_cache.folder() == old
    assert stat.S_IMODE(old.stat().st_mode) == 0o700


@as_root
def test_a_default_folder_of_another_user_is_passed_over(root, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    kernels = kernel_cache.folder()
    (kernels / "index.nbi").touch()
    os.chown(kernels / "index.nbi", 12345, 12345)
    assert kernel_cache.folder() == tmp_path / "temporary" / f"nbcnn-{os.geteuid()}" / kernels.name
    os.chown(kernel_cache.folder().parent, 12345, 12345)
    assert kernel_cache.folder() is None


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator's commands compile nothing")
def test_a_command_exits_2_before_anything_is_loaded_from_there(tmp_path):
    expose(tmp_path / "shared", "everybody")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "shared")}
    done = subprocess.run([sys.executable, "-m", "nbcnn", "env"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("nbcnn: error: NUMBA_CACHE_DIR is ")
    assert "Traceback" not in done.stderr


def test_without_a_writable_place_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernel_cache.folder() is None
