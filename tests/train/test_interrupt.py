"""Tests of Ctrl-C and SIGTERM: the first saves, the second leaves, and a resumed run ends where an uninterrupted one does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from compiled import full

from nbcnn.train import checkpoint
from nbcnn.train.checkpoint import LAST
from nbcnn.train.interrupt import Interrupted, Interrupts, Unwinding

ROOT = Path(__file__).parents[2]


def send(number: int) -> None:
    """A signal to this process, handled before the call returns."""
    signal.raise_signal(number)


@pytest.fixture(autouse=True)
def handlers():
    """Whatever a test does, the handlers are afterwards what they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_only_remembered(number, capfd):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert interrupts.signal is None
        send(number)
        assert interrupts.signal == number
    assert signal.getsignal(number) is before
    assert "Ctrl-C again quits now" in capfd.readouterr().err


def test_a_signal_is_remembered_also_where_nobody_reads_the_notice(monkeypatch):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr("nbcnn.train.interrupt.os.write", gone)
    with Interrupts() as interrupts:
        send(signal.SIGTERM)
        assert interrupts.signal == signal.SIGTERM


def test_the_second_signal_leaves_with_the_old_handlers_in_place():
    with Interrupts():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Interrupts():
        send(signal.SIGINT)
        with pytest.raises(SystemExit) as left:
            send(signal.SIGTERM)
    assert left.value.code == 143


def test_work_that_may_be_abandoned_is_left_at_once():
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted), interrupts.at_once():
            send(signal.SIGINT)
        with pytest.raises(Interrupted), interrupts.at_once():
            pytest.fail("a signal that came before should keep the block from starting")


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts:
        send(signal.SIGINT)
        assert interrupts.signal is None


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_unwinds_where_nothing_is_to_be_finished(number, kind):
    before, hook = signal.getsignal(number), sys.unraisablehook
    received = Unwinding()
    with pytest.raises(kind), received:
        send(number)
    assert received.signal == number
    assert (signal.getsignal(number), sys.unraisablehook) == (before, hook)


def test_an_ignored_termination_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Unwinding() as received:
        send(signal.SIGTERM)
    assert received.signal is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_signal_that_a_finalizer_swallows_comes_again():
    class Swallows:
        def __del__(self):
            send(signal.SIGTERM)

    with Unwinding():
        held = Swallows()
        del held
        with pytest.raises(SystemExit):
            threading.Event().wait(60)


def test_the_second_signal_in_a_command_leaves_by_its_own_way():
    with Unwinding() as received, Interrupts():
        send(signal.SIGINT)
        assert received.signal is None, "the first is the training's"
        with pytest.raises(SystemExit) as left:
            send(signal.SIGTERM)
    assert (left.value.code, received.signal) == (143, signal.SIGTERM)


def test_another_thread_leaves_the_handlers_alone():
    seen = []

    def work() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


SMALL = """
import os, signal, sys
import numpy as np
from nbcnn.files import atomic
from nbcnn.nn.losses import MSE
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.activations import ReLU
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train.trainer import Trainer

folder, number, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
images = np.random.default_rng(1).integers(0, 256, (10, 3, 6, 6), np.uint8)
net = Net([Conv2d(4, 3, padding=1), ReLU(), Conv2d(3, 3, padding=1), MSE()], (3, 6, 6), mode="cpu")
rates = learning_rates("cosine", 0.2, 4 * 5)
session = TrainingSession(net, images, optimizer=SGD(), learning_rates=rates, batch=2, test_images=images)
trainer = Trainer(session, folder, learning_rates=rates, save_every=3)
if os.path.exists(folder + "/checkpoint-last.safetensors"):
    trainer.resume(trainer.run.last)

def once(function, at):
    calls = []
    def wrapped(*args):
        calls.append(None)
        if len(calls) == at:
            os.kill(os.getpid(), number)
        return function(*args)
    return wrapped

if when == "writing":    # with the temporary file written and not yet renamed
    atomic.os.replace = once(os.replace, 3)
if when == "evaluating":
    session.evaluate_share = once(session.evaluate_share, 2)
if when == "copying":
    session.state = once(session.state, 4)
sys.exit(trainer.fit().exit_code)
"""


def small_run(folder: Path, number: int, when: str) -> int:
    command = [sys.executable, "-c", SMALL, str(folder), str(number), when]
    return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=60).returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert small_run(folder, 0, "never") == 0
    return checkpoint.load(folder / LAST)[0], metrics(folder)


def metrics(folder: Path) -> list[tuple]:
    """Everything in the metrics but times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["epoch"], row["step"], row["train_loss"], row["test_loss"]) for row in rows]


def test_a_run_that_was_started_with_sigint_ignored_ignores_it(tmp_path, uninterrupted):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does before it starts a program in the background
    assert small_run(tmp_path, signal.SIGINT, "evaluating") == 0
    assert metrics(tmp_path) == uninterrupted[1]


INT, TERM, KILL = (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)


@pytest.mark.parametrize(
    ("number", "code", "when"),
    [
        *((*INT, when) for when in ("writing", "evaluating", "copying")),
        (*TERM, "evaluating"),
        (*KILL, "writing"),
        *full((*TERM, "writing"), (*TERM, "copying"), (*KILL, "evaluating"), (*KILL, "copying")),
    ],
)
def test_whenever_the_signal_comes_the_resumed_run_equals_the_uninterrupted_one(tmp_path, uninterrupted, number, code, when):
    assert small_run(tmp_path, number, when) == code
    tensors, _ = checkpoint.load(tmp_path / LAST)
    assert tensors["step_state"][0] < 20
    assert small_run(tmp_path, 0, "never") == 0
    tensors, _ = checkpoint.load(tmp_path / LAST)
    assert {name: tensor.tobytes() for name, tensor in tensors.items()} == {name: tensor.tobytes() for name, tensor in uninterrupted[0].items()}
    assert metrics(tmp_path) == uninterrupted[1]
    assert not list(tmp_path.glob(".*")), "no temporary file is left"


FLAGS = ["--model", "autoencoder", "--dataset", "shapes", "--mode", "cpu", "--limit", "9", "--batch", "2", "--epochs", "2", "--log-every", "1"]


def train(*flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "train.py", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of an uninterrupted run of train.py."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with train(*FLAGS, "--out", str(folder)) as run:
        run.communicate(timeout=120)
    assert run.returncode == 0
    return folder


@pytest.mark.parametrize(("number", "code"), [INT, *full(TERM)])
def test_train_saves_says_how_to_resume_and_resumes_to_the_same_end(tmp_path, trained, number, code):
    out = tmp_path / "stopped"
    with train(*FLAGS, "--out", str(out)) as run:
        for line in run.stderr:
            if line.startswith("epoch 1/2  step 2/5"):
                break
        run.send_signal(number)
        errors, output = run.stderr.read(), run.stdout.read()
        assert run.wait(60) == code
    assert "finishing this step" in errors
    command = output.splitlines()[-1].split()
    assert command == ["python", "train.py", "--resume", str(out)]
    with train(*command[2:]) as run:
        run.communicate(timeout=120)
        assert run.returncode == 0
    ends = [checkpoint.load(folder / LAST)[0] for folder in (out, trained)]
    assert {name: t.tobytes() for name, t in ends[0].items()} == {name: t.tobytes() for name, t in ends[1].items()}
    assert metrics(out) == metrics(trained)


HANGING = """
import sys, threading
import numpy as np, nbcnn

def batches(epoch):
    x = np.zeros((4, 3, 8, 8), np.uint8)
    yield x, x
    print("hangs", flush=True)
    threading.Event().wait()

model = nbcnn.Model([nbcnn.Conv2d(3, 3, padding=1)], loss="mse", mode="cpu")
try:
    model.fit(batches, epochs=2, steps_per_epoch=4, verbose=0)
except KeyboardInterrupt:
    print("left", flush=True)
"""


def test_the_second_signal_leaves_a_data_source_that_hangs():
    process = subprocess.Popen([sys.executable, "-c", HANGING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        try:
            assert process.stdout.readline() == b"hangs\n"
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == b"\n"
            assert process.stderr.readline().startswith(b"nbcnn: ")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert process.stdout.read() == b"left\n"
        finally:
            process.kill()
