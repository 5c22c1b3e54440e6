"""One writer at a time: who comes second is told who holds the folder, and a dead owner's lock is taken over."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from scripts import ROOT

from nbcnn.files import atomic, lock
from nbcnn.files.lock import WRITER, Held, writing

HOLDER = """
import sys
from pathlib import Path
from nbcnn.files import atomic
from nbcnn.files.lock import writing
folder = Path(sys.argv[1])
with writing(folder):
    atomic.temporary(folder / "file").write_bytes(b"half")
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(folder):
    """A process that holds `folder` until it is told a line, or killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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


@pytest.mark.parametrize("line", [b"", b"\xff", b"[" * 100_000, b"3"])
def test_an_owners_line_that_cannot_be_read_keeps_nobody_out(tmp_path, line):
    (tmp_path / WRITER).write_bytes(line)
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


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"exists|Not a directory"), writing(tmp_path / "file"):
        pass


def test_temporary_names_are_never_shared(tmp_path):
    assert len({atomic.temporary(tmp_path / "file") for _ in range(100)}) == 100


def test_where_the_system_knows_no_locks_the_files_existence_is_the_lock(tmp_path, monkeypatch):
    def unknown(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", unknown)
    with writing(tmp_path):
        assert (tmp_path / f"{WRITER}.lock").stat().st_size  # filelock's own line
        with pytest.raises(Held), writing(tmp_path):
            pass
    assert files(tmp_path) == []


def test_a_lock_whose_file_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    one, other, path = lock._lock(str(tmp_path / "a")), lock._lock(str(tmp_path / "a")), tmp_path / "a"
    flock = lock.fcntl.flock
    removals = [path]

    def racing(file, how):
        if removals:  # the last owner removes the file between another's opening and locking it
            removals.pop().unlink()
        flock(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", racing)
    one.acquire(1, 0.01)
    assert path.exists()
    with pytest.raises(TimeoutError):
        other.acquire(0.05, 0.01)
    one.release()
    other.acquire(1, 0.01)
    other.release()
