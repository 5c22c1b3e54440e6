"""Tests of what the process of a command does with signals and closed outputs, from its first line to its last."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import ROOT, TINY

from nbcnn.cli import errors
from nbcnn.cli.process import ENDED, Output, unwritten
from nbcnn.train import checkpoint
from nbcnn.train.checkpoint import LAST

INT, TERM = (signal.SIGINT, 130), (signal.SIGTERM, 143)
linux = pytest.mark.skipif(sys.platform != "linux", reason="sees in /proc which signals a process handles")


def shell(line, *words):
    """A line of shell in the repository's root, with this Python as $0 and the words as $1 and so on."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", line, sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


# -- outputs


@pytest.mark.parametrize("outputs", ["2>&1 | head -1; exit ${PIPESTATUS[0]}", ">&- 2>&- <&-"], ids=["the reader leaves", "closed from the start"])
def test_a_training_whose_outputs_are_closed_goes_on_and_saves(tmp_path, outputs):
    # As train.py, but quicker.
    done = shell(
        f'PYTHONPATH="$PYTHONPATH:$PYTHONPATH/tests" "$0" -m campaigns.training {" ".join(TINY)} --log-every 1 --out "$1" {outputs}', tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == ("head" in outputs)
    assert done.stderr == ""
    _, notes = checkpoint.load(tmp_path / "run" / LAST)
    assert notes["epochs_done"] == "1"
    # Nothing that was said has gone into a file that got the number of a closed stream.
    assert [json.loads(line)["epoch"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [1]


def test_what_fails_keeps_its_exit_code_without_outputs(tmp_path):
    assert shell('"$0" train.py --resume "$1" >&- 2>&-', tmp_path).returncode == 3
    assert shell('"$0" extract_features.py "$1" 2>&1 | true; exit ${PIPESTATUS[0]}', tmp_path).returncode == 3


def test_a_reader_that_leaves_is_no_error():
    done = shell('"$0" train.py --help | head -1; exit ${PIPESTATUS[0]}')
    assert (done.returncode, done.stdout, done.stderr) == (0, "usage: python train.py [flags]\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_results_that_the_disk_does_not_take_are_an_error():
    code = "from nbcnn.cli import errors, process; process.begin(); raise SystemExit(errors.guarded(lambda: print(1) or 0))"
    done = shell('"$0" -c "$1" > /dev/full', code)
    assert done.returncode == 1
    assert "nbcnn: error: stdout could not be written: No space left on device" in done.stderr


def test_an_output_drops_what_nobody_reads_and_keeps_why(monkeypatch):
    read, write = os.pipe()
    with io.TextIOWrapper(io.BufferedWriter(Output(write, "w")), "utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print("read", flush=True)
        assert os.read(read, 100) == b"read\n"
        os.close(read)
        print("not read", flush=True)
        assert stream.buffer.raw.lost.errno == errno.EPIPE
        assert unwritten() is None, "that nobody reads is no failure"


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")])
def test_a_connection_that_breaks_is_a_failure(error, capsys):
    def fail():
        raise error

    assert errors.guarded(fail) == 1
    assert capsys.readouterr().err == f"nbcnn: error: {error.strerror}\n"


# -- signals


def handles(pid, number):
    """True if the process has a handler for the signal."""
    text = Path(f"/proc/{pid}/status").read_text()
    return bool(int(text[text.index("SigCgt:") + 7 :].split()[0], 16) >> number - 1 & 1)


@linux
@pytest.mark.parametrize(("number", "code"), [INT, TERM])
@pytest.mark.parametrize("words", [["train.py", *TINY], ["extract_features.py", "none"], ["-m", "nbcnn", "env"]], ids=lambda words: words[0])
def test_a_signal_at_the_first_line_ends_the_command_with_a_sentence(tmp_path, words, number, code):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    with subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 60
        while not handles(process.pid, signal.SIGTERM) and time.monotonic() < until:
            time.sleep(0.0005)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.strip() == ENDED[number]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "code"), [INT, TERM])
def test_a_signal_in_an_exec_gives_its_code(tmp_path, number, code):
    inner = f"import signal; signal.raise_signal({int(number)})"  # dataclasses and named tuples are made by exec
    outer = f"from nbcnn.cli import errors, process; process.begin(); raise SystemExit(errors.guarded(lambda: exec({inner!r})))"
    (tmp_path / "interrupted.py").write_text(outer)
    done = shell('PYTHONPATH="$PYTHONPATH:$1" "$0" -m interrupted', tmp_path)
    assert (done.returncode, done.stderr.strip()) == (code, ENDED[number])


@pytest.mark.parametrize(("number", "code"), [INT, TERM])
@pytest.mark.parametrize("end", ["signal.raise_signal({number})", "return {code}"])
def test_a_signal_that_leaves_the_import_lock_held_ends_the_process(number, code, end):
    """Also a training's: it has saved its state, and returns the code."""
    program = f"""
import _imp, signal, threading
from nbcnn.cli import errors, process
process.begin()
process.PATIENCE = 0.5

def command():
    _imp.acquire_lock()
    threading.Thread(target=__import__, args=("wave",)).start()
    {end.format(number=int(number), code=code)}

raise SystemExit(errors.guarded(command))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (code, ENDED[number] if "raise" in end else "")


@pytest.mark.parametrize("within", ["nullcontext", "Interrupts"])
def test_the_second_signal_ends_a_process_whose_code_catches_everything(within):
    """As a data source or a callback may that tries again and again."""
    program = f"""
import signal, time
from contextlib import nullcontext
from nbcnn.cli import errors, process
from nbcnn.train.interrupt import Interrupts
process.begin()
process.PATIENCE = 0.5

def command():
    with {within}():
        for attempt in range(60):
            try:
                if attempt < 2:
                    signal.raise_signal(signal.SIGINT)
                time.sleep(1)
            except BaseException:
                pass

raise SystemExit(errors.guarded(command))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 130, done.stderr


@pytest.mark.parametrize(("number", "code"), [INT, TERM])
@pytest.mark.parametrize("become", [None, ImportError])
def test_a_signal_in_a_command_gives_its_code_whatever_becomes_of_it_on_the_way(number, code, become, capsys):
    def command():
        try:
            signal.raise_signal(number)
        except BaseException as raised:
            raise (become or type(raised))(*raised.args) from None  # as C code does with what is raised in its imports
        pytest.fail("the signal raised nothing")

    before = signal.getsignal(number)
    assert errors.guarded(command) == code
    assert capsys.readouterr().err.strip() == ENDED[number]
    assert signal.getsignal(number) is before
