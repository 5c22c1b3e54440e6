"""Tests of one writer at a time: who comes second is told who holds the folder, and a dead owner's lock is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from scripts import ROOT

from nbcnn.files import atomic, lock
from nbcnn.files.lock import WRITER, Held, writing

HOLDER = """
import fcntl, sys
from pathlib import Path
if len(sys.argv) > 2:
    def flock(*_):
        raise OSError(int(sys.argv[2]), "no locks")
    fcntl.flock = flock
from nbcnn.files import atomic
from nbcnn.files.lock import writing
folder = Path(sys.argv[1])
with writing(folder):
    atomic.temporary(folder / "file").write_bytes(b"half")
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(folder, *no_locks):
    """A process that holds `folder` until it is told a line, or killed; with an error number its flock fails with that."""
    words = [sys.executable, "-c", HOLDER, str(folder), *map(str, no_locks)]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def files(folder):
    return sorted(file.name for file in folder.iterdir())


def test_the_second_writer_is_told_who_is_the_first(tmp_path):
    with holder(tmp_path) as process:
        with (
            pytest.raises(Held, match=rf"process {process.pid} on {socket.gethostname()} \(since .*\) is writing in {tmp_path}; wait") as raised,
            writing(tmp_path),
        ):
            pass
        assert raised.value.exit_code == 2
        process.communicate(b"\n")
    (tmp_path / files(tmp_path)[0]).unlink()  # the holder's own temporary file
    with writing(tmp_path):
        assert files(tmp_path) == [WRITER, f"{WRITER}.lock"]
    assert files(tmp_path) == []


def test_a_dead_owners_lock_is_taken_over_and_its_temporary_files_go(tmp_path):
    (tmp_path / ".notes.tmp").write_text("somebody's")
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert json.loads((tmp_path / WRITER).read_text())["pid"] == process.pid
    assert len(files(tmp_path)) == 4
    with writing(tmp_path):
        assert json.loads((tmp_path / WRITER).read_text())["pid"] == os.getpid()
    assert files(tmp_path) == [".notes.tmp"]


def test_a_lock_that_cannot_be_removed_hides_no_error_and_is_taken_over(tmp_path, monkeypatch):
    """As of a folder that has become read-only: what could not be saved there must be said."""

    def unlink(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    def train(changed):
        with writing(tmp_path):
            changed.setattr(Path, "unlink", unlink)
            raise OSError("could not be saved")

    with monkeypatch.context() as changed, pytest.raises(OSError, match="could not be saved"):
        train(changed)
    assert files(tmp_path) == [WRITER, f"{WRITER}.lock"]
    with writing(tmp_path):
        pass
    assert files(tmp_path) == []


def test_a_lock_of_another_host_stays_and_the_message_says_how_to_remove_it(tmp_path):
    owner = {"pid": 7, "host": "gpu02", "boot": "another", "since": "2026-01-01T00:00:00+00:00", "command": "train.py"}
    (tmp_path / WRITER).write_text(json.dumps(owner))
    for _ in range(2):
        with (
            pytest.raises(Held, match=rf"process 7 on gpu02 .* remove {tmp_path / WRITER} and {tmp_path / WRITER}\.lock, and try again"),
            writing(tmp_path),
        ):
            pass
    (tmp_path / WRITER).write_text(json.dumps(owner | {"boot": lock._boot() or "another", "host": socket.gethostname()}))
    with writing(tmp_path):
        pass


@pytest.mark.parametrize("line", [b"", b"\xff", b"[" * 100_000, b"3", b'{"pid": "\\u0000", "host": "h", "since": "s", "command": "c"}'])
def test_an_owners_line_that_cannot_be_read_keeps_nobody_out(tmp_path, line):
    (tmp_path / WRITER).write_bytes(line)
    with writing(tmp_path):
        pass
    assert files(tmp_path) == []


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_an_owners_line_that_is_no_regular_file_is_not_waited_for(tmp_path, make):
    make(tmp_path / WRITER)
    with writing(tmp_path):
        pass
    assert files(tmp_path) == []


def test_an_owners_line_is_quoted_short_and_escaped(tmp_path):
    long = "\x1b[31m" * 1000
    (tmp_path / WRITER).write_text(json.dumps({"pid": 7, "host": long, "since": long, "command": long}))
    with pytest.raises(Held) as held, writing(tmp_path):
        pass
    assert len(str(held.value)) < 1000
    assert str(held.value).isprintable()


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS], ids=errno.errorcode.get)
def no_locks(request, monkeypatch):
    """The number of the error with which flock fails in this process."""

    def flock(*_):
        raise OSError(request.param, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    return request.param


def test_a_file_system_without_locks_has_one_writer_at_a_time(tmp_path, no_locks):
    for _ in range(2):
        with writing(tmp_path):
            with pytest.raises(Held, match=rf"process {os.getpid()} on .* is writing in {tmp_path}; wait"), writing(tmp_path):
                pass
            assert files(tmp_path) == [WRITER, f"{WRITER}.lock", f"{WRITER}.pid"]
        assert files(tmp_path) == []
    with holder(tmp_path, no_locks) as process:
        for _ in range(2):
            with pytest.raises(Held, match=rf"process {process.pid} on"), writing(tmp_path):
                pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with writing(tmp_path):
        assert json.loads((tmp_path / WRITER).read_text())["pid"] == os.getpid()
    assert files(tmp_path) == []


def test_a_file_system_that_loses_its_locks_for_a_while_has_one_writer_too(tmp_path, monkeypatch):
    with holder(tmp_path, errno.ENOLCK) as process:  # who comes next has locks again
        with pytest.raises(Held, match=rf"process {process.pid} on"), writing(tmp_path):
            pass
        process.kill()
    with holder(tmp_path) as process:  # which had locks

        def flock(*_):
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(Held, match=rf"process {process.pid} on"), writing(tmp_path):
            pass
        process.kill()
    with writing(tmp_path):
        pass
    assert files(tmp_path) == []


def test_who_may_wait_comes_next(tmp_path):
    order, waits = [], threading.Event()

    def second():
        with writing(tmp_path, waiting=lambda text: (order.append(text), waits.set())):
            order.append("second")

    thread = threading.Thread(target=second)
    with writing(tmp_path):
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join(30)
    assert order == [order[0], "first", "second"]
    assert order[0].startswith(f"waiting for process {os.getpid()}")


def test_what_is_held_is_let_go_when_the_work_fails(tmp_path):
    with pytest.raises(RuntimeError, match="no"), writing(tmp_path):
        raise RuntimeError("no")
    assert files(tmp_path) == []


def test_a_signal_while_a_locks_files_are_removed_leaves_none(tmp_path, monkeypatch):
    remove, came = Path.unlink, []

    def interrupted(path, missing_ok=False):
        remove(path, missing_ok=missing_ok)
        if not came:
            came.append(path.name)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), writing(tmp_path):
        monkeypatch.setattr(Path, "unlink", interrupted)
    assert came == [WRITER]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"exists|Not a directory"), writing(tmp_path / "file"):
        pass


def test_temporary_names_are_never_shared(tmp_path):
    assert len({atomic.temporary(tmp_path / "file") for _ in range(100)}) == 100


def test_old_temporary_files_go_where_a_file_is_written_without_a_lock(tmp_path):
    old, young = (tmp_path / f".found.csv.{number}-0a1b2c3d.tmp" for number in (98, 99))
    for path in (old, young, tmp_path / ".notes.tmp"):
        path.write_text("half")
    os.utime(old, (0, 0))
    os.utime(tmp_path / ".notes.tmp", (0, 0))
    atomic.replace_bytes(tmp_path / "found.csv", b"whole")
    assert files(tmp_path) == sorted([young.name, ".notes.tmp", "found.csv"])
